"""Which parts are not on every tier that wants them, and how a person is told of it.

Law: a tier that did not answer may lack anything, so every part of the spool counts as lacking there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from tierd.core.errors import DaemonUnavailable
from tierd.core.ids import PartId
from tierd.core.world import World

_NAMED = 5  # parts that a sentence names


class Remaining(msgspec.Struct, frozen=True, kw_only=True):
    """One part that some tier lacks.

    Attributes:
        size_bytes: raw; 0 where its manifest cannot be read.
        on: tiers that hold a verified copy.
        lacks: tiers that want a copy and have none, and tiers that did not answer.
    """

    part: PartId
    size_bytes: int
    on: tuple[str, ...]
    lacks: tuple[str, ...]


class TierTrouble(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a tier takes checkpoints now.

    Attributes:
        reached: whether it answered the daemon's last look.
        error: why it takes nothing; None where nothing failed.
        refused: whether the tier said no, so that a person has to act; otherwise it may pass.
    """

    reached: bool
    error: str | None = None
    refused: bool = False

    @property
    def accepts(self) -> bool:
        return self.reached and self.error is None


class Backlog(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A daemon's answer to `wire.Backlog`: what is left, whether each tier takes it, and until when it is paused."""

    left: tuple[Remaining, ...] = ()
    tiers: dict[str, TierTrouble] = {}
    paused: str | None = None

    @property
    def trouble(self) -> str | None:
        """Why no tier takes checkpoints; None where one does, or where nobody has looked yet."""
        if self.paused:
            return f"paused: {self.paused}"
        errors = [f"{name}: {tier.error}" for name, tier in self.tiers.items() if tier.error]
        return "; ".join(errors) if errors and len(errors) == len(self.tiers) else None


def backlog_of(answer: Mapping[str, Any]) -> Backlog:
    """The backlog in a daemon's answer.

    Raises:
        DaemonUnavailable: it answers otherwise.
    """
    try:
        return msgspec.convert(answer["backlog"], Backlog)
    except (KeyError, msgspec.ValidationError) as error:
        raise DaemonUnavailable(f"the daemon is of another version of tierd ({error}): restart it") from error


def remaining(world: World, wanted: Collection[tuple[PartId, str]]) -> tuple[Remaining, ...]:
    """The parts that some tier lacks and this daemon sends it, newest first: from the spool, or from another tier.

    Args:
        wanted: the part and the tier of each flush that the plan would do now.
    """
    found = []
    parts = {*world.spool.parts(), *(part for part, _ in wanted)}
    for part in sorted(parts, key=lambda one: (one.checkpoint, -one.rank), reverse=True):
        lacks = tuple(
            name
            for name, place in world.tiers.items()
            if (part, name) in wanted or (place is None and world.spool.lists(part))
        )
        if lacks:
            on = tuple(name for name, place in world.tiers.items() if place and place.has(part))
            found.append(Remaining(part=part, size_bytes=world.size_bytes(part), on=on, lacks=lacks))
    return tuple(found)


def by_tier(left: Sequence[Remaining]) -> dict[str, tuple[int, int]]:
    """`(parts, bytes)` that each tier lacks; only tiers that lack something."""
    parts, size = Counter[str](), Counter[str]()
    for one in left:
        parts.update(one.lacks)
        size.update(dict.fromkeys(one.lacks, one.size_bytes))
    return {name: (parts[name], size[name]) for name in parts}


def describe(left: Sequence[Remaining], silent: Collection[str] = ()) -> str:
    """What is left, in one sentence: parts that are on no tier apart from parts that only some tiers lack.

    Args:
        silent: tiers that did not answer.
    """
    if not left:
        return "nothing is left: every part is on every tier that wants it"
    nowhere = [one for one in left if not one.on]
    pieces = []
    if nowhere:
        known = "no tier that answers" if silent else "no tier"
        pieces.append(f"{_parts(len(nowhere))} on {known}: {_names(nowhere)}")
    for (on, lacks), count in Counter((one.on, one.lacks) for one in left if one.on).items():
        number = f"{count} more {'is' if count == 1 else 'are'}" if pieces else _parts(count)
        pieces.append(f"{number} on {_both(on)} and not on {_both(lacks)}")
    return "; ".join(pieces) + (f" ({_both(tuple(silent))} did not answer)" if silent else "")


def _parts(count: int) -> str:
    return "1 part is" if count == 1 else f"{count} parts are"


def _names(parts: Sequence[Remaining]) -> str:
    named = ", ".join(str(one.part) for one in parts[:_NAMED])
    return named + (f", and {len(parts) - _NAMED} older ones" if len(parts) > _NAMED else "")


def _both(names: tuple[str, ...]) -> str:
    return " and ".join(names)
