"""Every error that tierd raises, named after the condition it states.

Law: an error is not corruption. Only `CorruptChunk` and `ManifestError` say that bytes are proven wrong; nothing else
may quarantine, step back or prune. A foreign exception becomes one of these once, at the edge where it appears.
"""

from __future__ import annotations

import errno

from tierd.core.printable import printable_lines


class TierdError(Exception):
    """The base of every error that tierd raises on purpose. What it says is safe to look at, because names and servers'
    answers in it are escaped."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ConfigError(TierdError):
    """The configuration, a URL, a name or an argument cannot be used; the message names the place."""


class StepRefused(TierdError):
    """The step is no int, is negative, or was already committed by this attempt."""


class StateRefused(TierdError):
    """A value in the state has no safe encoding, or one in a checkpoint no safe decoding; the message names its path.
    Nothing was written or loaded."""


class StateMismatch(TierdError):
    """The checkpoint does not fit the objects it should be loaded into; whatever was loaded before is named."""


class StoreUnavailable(TierdError):
    """The store did not answer, or answered that it cannot now. The only condition that is retried."""


class StoreFull(StoreUnavailable):
    """The store has no room for a put: its file system is full, or the quota is used up."""


class StoreRefused(TierdError):
    """The store answered no: credentials, permissions, a missing bucket. Trying again at once will not help."""


class DeleteRefused(StoreRefused):
    """The store does not let this be deleted: no permission, or a lock on it. Whoever may only add writes on."""


class ObjectNotFound(TierdError):
    """The store answered, and the key is not there."""


class CorruptChunk(TierdError):
    """Bytes differ from their recorded digest or size: proven corruption."""


class ManifestError(TierdError):
    """A manifest is truncated, altered, oversized, or says something that no honest writer says: proven corruption."""


class FormatTooNew(TierdError):
    """An intact manifest of a format version that this tierd does not know. Not corruption: a newer tierd reads it."""


class WrongKey(FormatTooNew):
    """What lies there is encrypted with a key that is not at hand, or not at all where a key is required. Not
    corruption: who has the right key reads it."""


class CheckpointNotFound(TierdError):
    """No verified checkpoint answers the request; the message says what was skipped, why, and what else there is."""


class SpoolUnusable(TierdError):
    """The spool is no directory, or is not readable or writable."""


class SpoolHeld(SpoolUnusable):
    """Another daemon holds the spool."""


class SpoolFull(TierdError):
    """The spool's file system has no room for the write."""


class SaveFailed(TierdError):
    """The checkpoint could not be made durable; the cause is chained."""


class SaveSkipped(TierdError):
    """An earlier save was still being persisted, and `when_busy` says not to wait for it."""


class TornSnapshot(TierdError):
    """A tensor changed while it was copied, by other means than an attached optimizer's step; nothing was kept."""


class DaemonUnavailable(TierdError):
    """No daemon answers on the spool's control socket."""


class DaemonAbsent(DaemonUnavailable):
    """No daemon runs on the spool: there is no socket, or nobody listens."""


class DaemonSilent(DaemonUnavailable):
    """A daemon holds the spool and does not answer, as one that is stopped does. The message names the process."""


class VersionMismatch(DaemonUnavailable):
    """Client and daemon are too far apart to work together; the message says which one to upgrade."""


class RequestUnknown(DaemonUnavailable):
    """The daemon is older than this request. It answers other requests."""


class LoopFailed(TierdError):
    """A training loop under check ended, failed, hung or could not be killed before it was through: nothing could be
    compared. The message holds the end of its output."""


EXHAUSTED = "no more memory or threads for this process: raise its limits (ulimit -v, ulimit -u, or the container's)"


def is_exhausted(error: BaseException) -> bool:
    """Whether an error, or one of a group, says that this process gets no more memory or threads."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_exhausted, error.exceptions))
    threads = isinstance(error, RuntimeError) and "start new thread" in str(error)
    return threads or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
