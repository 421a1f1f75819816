"""Every error that tierd raises, named after the condition that it reports; and the escaping of text of unknown origin.

Invariant: an error is not corruption. Only `CorruptChunk` and `ManifestError` prove that bytes are wrong; no other
error may lead to a quarantine, a fallback or a prune. An exception of another library is converted into one of these
once, where it first appears.

Names in a bucket and answers of a server may contain characters that control a terminal, reverse the order of a line,
or end it. Everything that tierd prints passes through `printable` or one of its kin. Their results contain no character
of the categories Cc, Cf, Cs, Co, Cn, Zl or Zp, and escaping a result again does not change it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from unicodedata import category

from tierd.core.installation import install_command


def printable(text: object) -> str:
    """`text` as one line, with each unprintable character escaped, as in ``\\x9b`` or ``\\u202e``."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join([char if _is_visible(char) else _escaped(char) for char in line])


def printable_lines(text: object) -> str:
    """Escape like `printable`, but keep lines. Lines after the first are indented if they are not yet, so that no line
    can be mistaken for one of tierd's own."""
    first, *following = map(printable, str(text).split("\n"))
    return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in following)])


def printable_json(text: str) -> str:
    """JSON of the same value, with each unprintable character escaped except line feeds between tokens."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join([char if char == "\n" or _is_visible(char) else _json_escaped(char) for char in text])


def _is_visible(char: str) -> bool:
    return char.isprintable() or category(char) == "Zs"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()


def _json_escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


class TierdError(Exception):
    """The base of every error that tierd raises on purpose. Its text is safe to print, because names and servers'
    answers in it are escaped."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ConfigError(TierdError):
    """The configuration, a URL, a name or an argument cannot be used; the message says which one."""


class StepRefused(TierdError):
    """The step is not an int, is negative, or was already committed by this attempt."""


class StateRefused(TierdError):
    """A value in the state has no safe encoding, or a value in a checkpoint has no safe decoding.

    The message names the value's path. Nothing was written or loaded.
    """


class StateMismatch(TierdError):
    """The checkpoint does not fit the objects to be loaded into; the message names entries that are already loaded."""


class StoreUnavailable(TierdError):
    """The store did not answer, or answered that it cannot serve the request now. Only this condition is retried."""


class StoreFull(StoreUnavailable):
    """The store has no room for a put: its file system is full, or the quota is used up."""


class StoreRefused(TierdError):
    """The store refused: credentials, permissions, a missing bucket. An immediate retry would not help."""


class DeleteRefused(StoreRefused):
    """The store refused to delete an object: no permission, or a lock on the object. Puts go on, because a tier may
    allow only these."""


class ObjectNotFound(TierdError):
    """The store answered that the key does not exist."""


class CorruptChunk(TierdError):
    """Bytes differ from their recorded digest or size: proven corruption.

    `read_digest` is that of the bytes that were read; empty if the message alone identifies the result.
    """

    read_digest = ""


class ManifestError(TierdError):
    """A manifest is truncated, altered, oversized, or states what no correct writer states: proven corruption."""

    read_digest = ""


class DivisionMismatch(TierdError):
    """Two ranks of a node divided different states, so some tensors may be in no part. Not corruption: every byte is
    the one that was saved."""


class FormatTooNew(TierdError):
    """An intact manifest has a format version that this tierd does not know. Not corruption: a newer tierd reads it."""


class WrongKey(FormatTooNew):
    """An object is encrypted with another key than the given one, or only one of the object and the tier has a key.

    Not corruption, because the object is readable with the right key.
    """


class CheckpointNotFound(TierdError):
    """No verified checkpoint matches the request; the message names skipped checkpoints with reasons, and others."""


class SpoolUnusable(TierdError):
    """The spool is not a directory, or is not readable or writable."""


class SpoolHeld(SpoolUnusable):
    """Another daemon holds the spool."""


class SpoolFull(TierdError):
    """The spool's file system has no room for the write."""


class SaveFailed(TierdError):
    """A checkpoint could not be made durable. `Save.wait` chains the cause. `close` names the states in no place."""


class SaveSkipped(TierdError):
    """An earlier save was still being persisted, and `when_busy` was set not to wait for it."""


class TornSnapshot(TierdError):
    """A tensor changed while it was copied, not by an attached optimizer's step; nothing of the save was kept."""


class DaemonUnavailable(TierdError):
    """No daemon answers on the spool's control socket."""


class DaemonAbsent(DaemonUnavailable):
    """No daemon runs on the spool: there is no socket, or no process listens on it."""


class DaemonSilent(DaemonUnavailable):
    """A daemon holds the spool and does not answer, for example a stopped one. The message names its process."""


class VersionMismatch(DaemonUnavailable):
    """The versions of client and daemon are too far apart to work together; the message says which one to upgrade."""


class RequestUnknown(DaemonUnavailable):
    """The daemon is too old to know this request. It answers other requests."""


class LoopFailed(TierdError):
    """A training loop under check ended early, failed, hung or could not be killed; the message ends with its output's
    end.
    """


EXHAUSTED = "no more memory or threads for this process: raise its limits (ulimit -v, ulimit -u, or the container's)"


def is_exhausted(error: BaseException) -> bool:
    """Whether an error, or one in an exception group, means that this process gets no more memory or threads."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_exhausted, error.exceptions))
    threads = isinstance(error, RuntimeError) and "start new thread" in str(error)
    return threads or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def as_both(kind: type[Exception]) -> type[StateMismatch]:
    """Return a subclass of `StateMismatch` and of the library's own exception, which its documentation names for this
    error.
    """
    if kind.__module__ == "builtins" or issubclass(StateMismatch, kind):
        return StateMismatch
    if issubclass(kind, StateMismatch):
        return kind
    plain = {"__init__": Exception.__init__, "__str__": Exception.__str__, "__module__": StateMismatch.__module__}
    try:
        return type(StateMismatch.__name__, (StateMismatch, kind), plain)
    except TypeError:  # their memory layouts cannot be combined in one class
        return StateMismatch


@contextmanager
def importing_extras(feature: str, extras: str) -> Iterator[None]:
    """Run imports of optional packages, which `feature` needs and tierd's `extras` install.

    Raises:
        ImportError: a package is not installed; the message names it and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tierd"):
            raise
        raise ImportError(
            f"{feature} needs the package {error.name}: {install_command(extras)}", name=error.name
        ) from error
