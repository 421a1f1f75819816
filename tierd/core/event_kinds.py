"""Every kind of event, and the form of an event.

Invariant: an event records one occurrence in one place. Facts that a program needs have members of their own; `why` is
for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

_METRICS = 50  # the most metrics in an event
MORE = "more"  # the kind that stands for events that a receiver did not get


class EventKind(NamedTuple):
    """The meaning of a kind of event.

    Attributes:
        means: the meaning, for the reference.
        level: how serious an event of this kind is.
        usual: whether receivers get it that choose no kinds.
        urgent: whether it is sent even if a receiver got too many events in this minute.
        stays: whether the status counts it as a problem until the daemon starts again, because nothing that can be
            observed later shows that it happened.
    """

    means: str
    level: Literal["info", "error", "alert"] = "info"
    usual: bool = True
    urgent: bool = False
    stays: bool = False


KINDS: dict[str, EventKind] = {
    "persisted": EventKind("a part is durable in the spool, written by a trainer or the daemon"),
    "persist failed": EventKind("the trainer or the daemon could not make a save durable, and gave it up", "error"),
    "flushed": EventKind("a part is on a tier, and each of its bytes was verified there", usual=False),
    "durable": EventKind("a tier now holds every rank's part of a checkpoint, verified"),
    "not taken": EventKind(
        "a checkpoint in a watched directory is damaged, has no format that can be checked, or changed each time while "
        "it was taken",
        "error",
    ),
    "nothing taken": EventKind(
        "a watched directory has had files for 15 minutes, and nothing of it was ever taken; sent once",
        "error",
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
        urgent=True,
    ),
    "works again": EventKind("the action of an earlier `failing` succeeded", urgent=True),
    "corrupt": EventKind("a copy is proven corrupt", "error"),
    "repaired": EventKind("chunks of a copy were repaired from another place; in the spool, also fetched anew"),
    "quarantined": EventKind("a corrupt copy was quarantined, because no place had the right bytes", "error"),
    "released": EventKind(
        "a quarantined copy was read again before its deletion, proved right, and is used again; the disk, the memory "
        "or the network gave wrong bytes before"
    ),
    "fell back": EventKind("a restore returned an older checkpoint, because the newest could not be used", "error"),
    "restored": EventKind("a rank read and verified its part of the checkpoint that every rank loads", usual=False),
    "pruned": EventKind("retention deleted a copy of a checkpoint"),
    "append only": EventKind(
        "a tier refuses deletions, so the daemon prunes nothing there; sent once, until the tier deletes"
    ),
    "two launches": EventKind(
        "several launches of one run save the same rank at the same time; sent again when another one joins",
        "alert",
        urgent=True,
    ),
    "rolled back": EventKind(
        "a run's history on a tier is older than this node saw it there, because somebody deleted objects or put an "
        "older copy of the tier in its place; or its head there cannot be read, for example with another key_file",
        "alert",
        urgent=True,
        stays=True,
    ),
    "samples leaked": EventKind(
        "a trainer's `SampleWatch` saw samples twice in an epoch, or of the validation split; sent once an epoch",
        "error",
    ),
    "preempted": EventKind(
        "a trainer got notice that its node or job ends, and saves at this step; the daemon sends the newest "
        "checkpoint first; sent once in ten minutes by each node",
        urgent=True,
    ),
    "given up": EventKind(
        "the daemon deleted the last copy of a checkpoint although a tier still wanted it",
        "alert",
        urgent=True,
        stays=True,
    ),
    MORE: EventKind(
        "the number of events that this receiver did not get: too many a minute, no room in the queue, or given up"
    ),
}
CHOICES = tuple(name for name in KINDS if name != MORE)
USUAL = tuple(name for name in CHOICES if KINDS[name].usual)


def metrics_of(numbers: Mapping[str, float]) -> dict[str, float | None] | None:
    """A save's metrics in the form of an event's member; None if there are none."""
    names = sorted(numbers)[:_METRICS]
    return {name: numbers[name] if math.isfinite(numbers[name]) else None for name in names} or None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An occurrence, for people and programs. A member that does not apply is None, and is left out in JSON.

    Attributes:
        at: the time of the event, RFC 3339 in UTC.
        what: the kind of event, one of `KINDS`.
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
        doing: the action that fails: `save`, `flush`, `prune`, `repair`, `discard`, `observe` or `notify`.
        tries: how often the action failed in a row.
        counts: in `more`, the number of events of each kind.
        metrics: the save's first 50 metrics by name; null for a value that is not a finite number.
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

    @property
    def level(self) -> str:
        return KINDS[self.what].level
