"""Every kind of event, the form of an event, and the checks of a webhook that receives events.

Invariant: an event records one occurrence in one place. Facts that a program needs have members of their own; `why` is
for people. No message repeats more of a webhook's address than scheme, host and port, because anybody who knows the
address may post there. The address may come from a file or the environment. The values of headers must come from there.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, NoReturn
from urllib.parse import SplitResult, urlsplit

import msgspec

from tierd.core.errors import ConfigError
from tierd.core.replicas.replica_comparison import TensorDifference

_METRICS = 50  # the most metrics in an event
MORE_EVENTS = "more"  # the kind that stands for events that a receiver did not get
TEST_EVENT = "test"  # the kind that `tierd notify test` sends


class EventKind(NamedTuple):
    """The meaning of a kind of event."""

    meaning: str
    level: Literal["info", "error", "alert"] = "info"
    is_usual: bool = True  # whether receivers get it that choose no kinds
    is_urgent: bool = False  # whether it is sent even if a receiver got too many events in this minute
    # whether the status counts it as a problem until the daemon starts again, because nothing that can be observed
    # later shows that it happened
    persists: bool = False


EVENT_KINDS: dict[str, EventKind] = {
    "persisted": EventKind("a part is durable in the spool, written by a trainer or the daemon"),
    "persist failed": EventKind("the trainer or the daemon could not make a save durable, and gave it up", "error"),
    "flushed": EventKind("a part is on a tier, and each of its bytes was verified there", is_usual=False),
    "durable": EventKind("a tier now holds every rank's part of a checkpoint, verified"),
    "not taken": EventKind(
        "a checkpoint in a watched directory is damaged, has no format that can be checked, or changed each time while "
        "it was taken",
        "error",
    ),
    "nothing taken": EventKind(
        "a watched directory has had files for 15 minutes, and nothing of it was ever taken; sent once", "error"
    ),
    "in doubt": EventKind(
        "a checkpoint in a watched directory has a later step and an earlier time than others: it is taken and pinned",
        "error",
    ),
    "failing": EventKind(
        "the same action failed three times in a row, a tier gave no answer for 75 seconds, the reads of a copy gave "
        "different wrong bytes, or the backlog of prunes grew for ten minutes; repeated at growing intervals while "
        "that lasts",
        "alert",
        is_urgent=True,
    ),
    "works again": EventKind(
        "the action of an earlier `failing` succeeded, or the tensors of an earlier `replicas differ` are equal again",
        is_urgent=True,
    ),
    "corrupt": EventKind("a copy is proven corrupt", "error"),
    "repaired": EventKind("chunks of a copy were repaired from another place; in the spool, also fetched anew"),
    "quarantined": EventKind("a corrupt copy was quarantined, because no place had the right bytes", "error"),
    "released": EventKind(
        "a quarantined copy was read again before its deletion, proved right, and is used again; the disk, the memory "
        "or the network gave wrong bytes before"
    ),
    "fell back": EventKind("a restore returned an older checkpoint, because the newest could not be used", "error"),
    "restored": EventKind("a rank read and verified its part of the checkpoint that every rank loads", is_usual=False),
    "pruned": EventKind("retention deleted a copy of a checkpoint"),
    "append only": EventKind(
        "a tier refuses deletions, so the daemon prunes nothing there; sent once, until the tier deletes"
    ),
    "two launches": EventKind(
        "several launches of one run save the same rank at the same time; sent again when another one joins",
        "alert",
        is_urgent=True,
    ),
    "rolled back": EventKind(
        "a run's history on a tier is older than this node saw it there, because somebody deleted objects or put an "
        "older copy of the tier in its place; or its head there cannot be read, for example with another key_file",
        "alert",
        is_urgent=True,
        persists=True,
    ),
    "replicas differ": EventKind(
        "tensors that should be the same on all ranks differ between ranks of a checkpoint, because a GPU computes "
        "wrong, for example; sent once for a checkpoint, and again if another place shows further ranks of it",
        "alert",
        is_urgent=True,
    ),
    "samples leaked": EventKind(
        "a trainer's `SampleWatch` saw samples twice in an epoch, or of the validation split; sent once an epoch",
        "error",
    ),
    "preempted": EventKind(
        "a trainer got notice that its node or job ends, and saves at this step; the daemon sends the newest "
        "checkpoint first; sent once in ten minutes by each node",
        is_urgent=True,
    ),
    "given up": EventKind(
        "the daemon deleted the last copy of a checkpoint although a tier still wanted it",
        "alert",
        is_urgent=True,
        persists=True,
    ),
    MORE_EVENTS: EventKind(
        "the number of events that this receiver did not get: too many a minute, no room in the queue, or given up"
    ),
    TEST_EVENT: EventKind("`tierd notify test` sends it to every receiver; the daemon never does"),
}
SELECTABLE_KINDS = tuple(name for name in EVENT_KINDS if name not in (MORE_EVENTS, TEST_EVENT))
USUAL_KINDS = tuple(name for name in SELECTABLE_KINDS if EVENT_KINDS[name].is_usual)


def metrics_of(numbers: Mapping[str, float]) -> dict[str, float | None] | None:
    """A save's metrics in the form of an event's member; None if there are none."""
    names = sorted(numbers)[:_METRICS]
    return {name: numbers[name] if math.isfinite(numbers[name]) else None for name in names} or None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An occurrence, for people and programs. A member that does not apply is None, and is left out in JSON.

    Attributes:
        at: the time of the event, RFC 3339 in UTC.
        what: the kind of event, one of `EVENT_KINDS`.
        place: `local`, a tier's name, or the name of a `[[notify]]`.
        subject: the part or checkpoint, in words; the action, if the event concerns neither.
        why: the reason, for people; may be empty.
        run, step, attempt, rank, world_size: the identity of the subject; a checkpoint has no rank.
        raw_bytes: the size in the spool, in bytes.
        stored_bytes: the size on the tier, in bytes.
        sent_bytes: the part of `stored_bytes` that had to be sent now.
        chunks: how many chunks were repaired.
        blocked_s: in `persisted`, the time for which `save` blocked training, in seconds.
        seconds: how long it took. In `persisted`, the time since the call of `save`; in `durable`, the time since this
            daemon observed the checkpoint in the spool; in
            `failing` and `works again`, the time since the first failure.
        doing: the action that fails: `save`, `flush`, `prune`, `repair`, `discard`, `observe` or `notify`; `compare` if
            replicas differ.
        tries: how often the action failed in a row.
        counts: in `more`, the number of events of each kind.
        metrics: the save's first 50 metrics by name; null for a value that is not a finite number.
        tensors: in `replicas differ`, the number of tensors that differ.
        differences: the first 8 of them, with the ranks that agree and those that do not.
    """

    at: str
    what: str
    place: str
    subject: str
    why: str
    run: str | None = None
    step: int | None = None
    attempt: str | None = None
    rank: int | None = None
    world_size: int | None = None
    raw_bytes: int | None = None
    stored_bytes: int | None = None
    sent_bytes: int | None = None
    chunks: int | None = None
    blocked_s: float | None = None
    seconds: float | None = None
    doing: str | None = None
    tries: int | None = None
    counts: dict[str, int] | None = None
    metrics: dict[str, float | None] | None = None
    tensors: int | None = None
    differences: tuple[TensorDifference, ...] | None = None

    @property
    def level(self) -> str:
        return EVENT_KINDS[self.what].level


_HOST = re.compile(r"([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
_TARGET = re.compile(r"[!-~]*")  # printable ASCII without spaces
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]{0,127}|file:/[^\0]{0,4000}")
_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_OWN_HEADERS = frozenset({"content-length", "content-type", "host", "connection", "transfer-encoding", "user-agent"})
_WAY_OUT = "write env:NAME or file:/path, which the daemon reads at its start"


def is_reference(text: str) -> bool:
    """Whether a value is ``env:NAME`` or ``file:/path``, which refer to a value stored elsewhere."""
    return _REFERENCE.fullmatch(text) is not None


def check_webhook(url: str, headers: Mapping[str, str]) -> None:
    """Check an address and its headers, as far as they are given directly and not by reference.

    Raises `ConfigError`, whose message begins with the key.
    """
    if not is_reference(url):
        redacted_url(url)
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or name.lower() in _OWN_HEADERS:
            raise ConfigError(f"headers: {name[:64]!r} is no header's name, or one that tierd sets")
        if not is_reference(value):
            raise ConfigError(f"headers.{name}: what it says does not belong in this file: {_WAY_OUT}")


def redacted_url(url: str) -> str:
    """The part of a webhook's address that messages may show: ``https://host:port/…``.

    Raises `ConfigError` if it is no address, contains credentials, or would cross a network unencrypted.
    """
    if url.startswith(("env:", "file:")):
        _refuse(_WAY_OUT)
    if not _TARGET.fullmatch(url) or "#" in url:
        _refuse("it holds a space, a control character, '#', or something that is not ASCII")
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        _refuse("its host or port is not well formed")
    if split.scheme not in ("https", "http"):
        _refuse(f"it begins with https://, or {_WAY_OUT}")
    if "@" in split.netloc:
        _refuse(f"credentials do not belong into it: use headers.Authorization; there, {_WAY_OUT}")
    if not _HOST.fullmatch(split.netloc) or port == 0:
        _refuse("a host's name or address, and perhaps a port, follow https://")
    if split.scheme == "http" and not is_loopback(split):
        _refuse("http:// goes to this machine alone (127.0.0.1, localhost); over a network it is https://")
    return f"{split.scheme}://{split.netloc.lower()}/…"


def is_loopback(split: SplitResult) -> bool:
    """Whether a URL's host is this machine."""
    host = split.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f"url: {reason}") from None
