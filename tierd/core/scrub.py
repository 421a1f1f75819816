"""Scrubbing: which copy is read again when, so that each is within a period, and who does it on a tier that is shared.

Law: every copy has a moment of its own in the period, given by its name, so that what was written or flushed at once
does not come due at once, whatever is restarted. It is due at the first such moment after it was last verified or,
where that is not remembered, made. What a copy names of a checkpoint that is gone stays due at that one's moments,
however young the copies are that name it. No decision here deletes anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import xxhash

from tierd.core.ids import PartId
from tierd.core.plan import is_janitor
from tierd.core.world import SPOOL, Facts, Place, World, runs

_EARLY = 0.9  # of the period: what is left is for reading, and for a daemon that was down


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """One place's copy of a part; `place` is `SPOOL` or a tier's name."""

    place: str
    part: PartId


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """When a copy's turn is: `verified` last, to be read again `at`; seconds since 1970."""

    at: float
    copy: Copy
    verified: float


Remembered = Mapping[Copy, float]  # when each copy was last found right, seconds since 1970


def agenda(world: World, remembered: Remembered, period: float, now: float, place: str | None = None) -> list[Turn]:
    """Every copy that this daemon reads again, the most overdue first; only those in `place` if that is given."""
    return sorted(
        (_turn(world, copy, facts, remembered, period, now) for copy, facts in _duties(world, place)),
        key=lambda turn: (turn.at, turn.copy),
    )


def again(world: World, copy: Copy, remembered: Remembered, period: float, now: float) -> Turn | None:
    """A copy's turn by what is remembered now; None where its place does not show it any more."""
    place = world.places.get(copy.place)
    seen = place.checkpoints.get(copy.part.checkpoint) if place else None
    if seen is None or not seen.has(copy.part):
        return None
    return _turn(world, copy, seen.facts.get(copy.part) or seen.spoken, remembered, period, now)


def lenders(world: World, copy: Copy) -> list[Copy]:
    """The copies that are gone, and of which this one names chunks."""
    place = world.tiers.get(copy.place)
    facts = place.facts(copy.part) if place else None
    owners = facts.borrowed if facts else ()
    found = [Copy(copy.place, replace(copy.part, checkpoint=owner)) for owner in sorted(owners)]
    return [one for one in found if place and not place.lists(one.part)]


def overdue(turns: list[Turn], period: float, now: float) -> int:
    """How many copies were not read again within the period."""
    return sum(turn.verified + period < now for turn in turns)


def _duties(world: World, only: str | None) -> Iterator[tuple[Copy, Facts | None]]:
    """All of the spool. On a tier, all parts of the ranks that the spool has any part of; and, for a run's janitor, of
    the ranks that its newest attempt does not have: no spool will hold those again. Where a part's manifest was not
    read, the one that speaks for its checkpoint tells when it was made."""
    mine = world.spool.ranks
    for name, place in {SPOOL: world.spool, **world.tiers}.items():
        if place is None or only not in (None, name):
            continue
        beyond = {run: _world_size(world, place, run) for run in runs(world) if is_janitor(world, place, run)}
        for seen in place.checkpoints.values():
            own, end = mine.get(seen.id.run, frozenset()), beyond.get(seen.id.run, math.inf)
            speaks = seen.spoken
            for size, ranks in seen.ranks.items():
                wanted = ranks & own if size <= end else ranks & own | {rank for rank in ranks if rank >= end}
                for part in (PartId(seen.id, rank, size) for rank in wanted):
                    if part not in seen.defects:
                        yield Copy(name, part), seen.facts.get(part) or speaks


def _world_size(world: World, tier: Place, run: str) -> int:
    """How many ranks the newest attempt has."""
    found = [(seen.id.attempt, max(seen.ranks)) for place in (world.spool, tier) for seen in place.copies(run)]
    if run in world.spool.launches:
        launch = world.spool.launches[run]
        found.append((launch.attempt, max(launch.ranks)))
    return max(found)[1]


def _turn(world: World, copy: Copy, facts: Facts | None, remembered: Remembered, period: float, now: float) -> Turn:
    verified = _verified(copy, facts, remembered, period, now)
    turns = [Turn(_moment(copy, verified, period), copy, verified)]
    for lender in lenders(world, copy):
        verified = min(max(0.0, remembered.get(lender, now)), now)
        turns.append(Turn(_moment(lender, verified, period), copy, verified))
    return min(turns, key=lambda turn: turn.at)


def _verified(copy: Copy, facts: Facts | None, remembered: Remembered, period: float, now: float) -> float:
    # A copy was verified when it was put. A time to come, by a clock that was wrong or a damaged memory, says nothing.
    made = facts.created.timestamp() if facts else -1.0
    times = [time for time in (remembered.get(copy, -1.0), made) if 0 <= time <= now]
    return times[0] if times else now - period


def _moment(copy: Copy, verified: float, period: float) -> float:
    beat = period * _EARLY
    own: float = beat * xxhash.xxh3_64_intdigest(f"{copy.place}/{copy.part.path}".encode()) / 2**64
    return own + beat * (math.floor((verified - own) / beat) + 1)
