"""What may happen that somebody wants to hear of: every kind of event, and how one looks.

Law: an event tells of one thing, in one place; what a program needs of it stands in members of its own, and `why` is
for people.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

MORE = "more"  # what stands for events that were not told


class Kind(NamedTuple):
    """What an event of this kind means. `usual`: told where nobody chose; `urgent`: never held back."""

    means: str
    level: Literal["info", "error", "alert"] = "info"
    usual: bool = True
    urgent: bool = False


KINDS: dict[str, Kind] = {
    "persisted": Kind("a part is durable in the spool, whoever wrote it"),
    "persist failed": Kind("a save could not be made durable, by daemon or trainer, and is given up", "error"),
    "flushed": Kind("a part is on a tier, each byte of it verified there", usual=False),
    "durable": Kind("a tier has come to hold every rank's part of a checkpoint, verified"),
    "failing": Kind(
        "three tries in a row of the same thing failed, or what is to be pruned becomes ever more for ten minutes; "
        "again while that lasts, ever more seldom",
        "alert",
        urgent=True,
    ),
    "works again": Kind("what was failing works", urgent=True),
    "corrupt": Kind("a copy is proven corrupt", "error"),
    "healed": Kind("the spool's copy was put right, or brought, from tiers"),
    "repaired": Kind("a tier's copy was put right"),
    "quarantined": Kind("a copy is set aside: no place had it right", "error"),
    "fell back": Kind("a restore was given an older checkpoint than the newest there is", "error"),
    "pruned": Kind("retention deleted a copy of a checkpoint"),
    "append only": Kind("a tier refuses to delete anything, so nothing is pruned there; told once, until it does"),
    "two launches": Kind(
        "launches of one run save at the same time, each the same rank; again where another one joins them",
        "alert",
        urgent=True,
    ),
    "rolled back": Kind(
        "a run's history on a tier is older than what this node saw there: somebody deleted there, or put an older "
        "copy in its place",
        "alert",
        urgent=True,
    ),
    "given up": Kind("the last copy of a checkpoint went although a tier still wanted it", "alert", urgent=True),
    MORE: Kind("so many events were not told there: too many a minute, no room, or given up"),
}
CHOICES = tuple(name for name in KINDS if name != MORE)
USUAL = tuple(name for name in CHOICES if KINDS[name].usual)


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened. What does not apply is None, and left out in JSON. Sizes are bytes.

    Attributes:
        at: RFC 3339 in UTC.
        what: one of `KINDS`.
        place: `local`, a tier's name, or the name of a `[[tell]]`.
        subject: the part or checkpoint, in words; with nothing of the kind, what was done.
        why: for people; may be empty.
        run, step, attempt, rank, world_size: the subject's; a checkpoint has no rank.
        raw_bytes: in the spool.
        stored_bytes: on the tier.
        sent_bytes: of those, what had to be sent now.
        chunks: how many were put right.
        seconds: how long it took; of `durable`, since this daemon saw it in the spool; of `failing` and `works again`,
            since the first failure.
        doing: what fails: `save`, `flush`, `prune`, `mend`, `discard`, `look` or `tell`.
        tries: how often in a row.
        counts: of `more`, how many of each kind.
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
    seconds: float | None = None
    doing: str | None = None
    tries: int | None = None
    counts: dict[str, int] | None = None

    @property
    def level(self) -> str:
        return KINDS[self.what].level
