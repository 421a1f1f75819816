"""Launches of one run that live at the same time, by mistake: which ones do, and which therefore lose nothing.

Law: a launch that lives keeps what it would keep alone. Nothing here lets anything be deleted, so a launch that is
wrongly taken for living costs space and no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from tierd.core.ids import CheckpointId
from tierd.core.world import SPOOL, Seen, Trainer, World

LEASE_S = 3600.0  # an earlier launch on another node lives for so long after its newest checkpoint was made
_INTERVALS = 3  # or for so many times what lay between its last two


class Rival(msgspec.Struct, frozen=True):
    """A launch that saves beside another one of its run.

    Attributes:
        place: `local` where its trainers hold their locks in this spool, else the tier that shows what it saved.
        pids: its trainers on this node; 0 for one that is in another pid namespace.
        last: when its newest checkpoint was made, of those whose manifests were read; RFC 3339 in UTC, or empty.
    """

    run: str
    attempt: str
    place: str
    pids: tuple[int, ...]
    last: str

    def __str__(self) -> str:
        if self.place == SPOOL:
            return f"{self.attempt} (process {', '.join(map(str, self.pids))} on this node)"
        return f"{self.attempt} (on another node, if it lives; its last checkpoint on {self.place}: {self.last})"


class Lease(msgspec.Struct, frozen=True):
    """Who saves a rank of a run on this node: its lock lasts as long as its process.

    Attributes:
        pid: 0 where it is in another pid namespace.
        since: when it first saved for this launch; RFC 3339 in UTC.
        renewed: when the launch's newest checkpoint was made, of those whose manifests were read; or empty.
    """

    run: str
    attempt: str
    rank: int
    pid: int
    since: str
    renewed: str


def leases(world: World) -> tuple[Lease, ...]:
    """Of every run, in the order of runs, launches and ranks."""
    found = []
    for run, trainers in sorted(world.spool.alive.items()):
        newest = _newest(world, run)
        for one in trainers:
            renewed = _text(newest[one.attempt]) if one.attempt in newest else ""
            found.append(Lease(run, one.attempt, one.rank, one.pid, _text(one.since), renewed))
    return tuple(found)


def held(found: Iterable[Lease]) -> Iterator[str]:
    """A line for a person for each launch."""
    for (run, attempt), some in itertools.groupby(found, key=lambda one: (one.run, one.attempt)):
        ranks = list(some)
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(str(one.rank) for one in ranks)}"
        pids = ", ".join(dict.fromkeys(str(one.pid) for one in ranks))
        last = f", its last checkpoint {max(one.renewed for one in ranks)}" if any(one.renewed for one in ranks) else ""
        since = min(one.since for one in ranks)
        yield f"run {run}: attempt {attempt} saves {who} (process {pids}) since {since}{last}"


def unvouched(world: World, tier: str, run: str) -> tuple[str, ...]:
    """The attempts of which a tier shows names that are newer than all of a run of which anything can be read. While
    they are there, no node deletes what retention drops: whose launch is the newest cannot be told.
    """
    place = world.tiers.get(tier)
    told = world.origins(run)
    newest = max(told, default="")
    shown = {seen.id.attempt for seen in place.copies(run)} if place else set()
    return tuple(sorted(attempt for attempt in shown - told.keys() if told and attempt > newest))


def disowning(run: str, attempt: str) -> str:
    """The way out where a launch's names are nobody's, for messages."""
    return f"if that launch is nobody's, `tierd disown {run} {attempt} URL` takes its names away"


def beside(world: World, run: str, now_s: float = 0.0) -> tuple[Rival, ...]:
    """The launches of a run that save the same rank at the same time, in their order; empty where there is one at most.

    On this node the trainers' locks tell. Of other nodes a tier tells: a launch that is later than one that lives here
    saved there, which a resume goes on from whether it lives or not; or an earlier one saved after the one that lives
    here had begun, and its lease has not ended; or there are parts of a rank that saves here which this node did not
    write.

    Args:
        now_s: by this node's clock, seconds since 1970. It ends the leases of earlier launches and nothing else.
    """
    here = world.spool.alive.get(run, ())
    if not here:
        return ()
    made = _made(world, run)
    newest = {attempt: times[-1] for attempt, times in made.items()}
    local = {one.attempt for one in here} | world.spool.ended.get(run, frozenset())
    found = {one.attempt: SPOOL for one in here if _has_rival(one, here)}
    twins: dict[str, str] = {}
    for name, place in world.tiers.items():
        for seen in place.copies(run) if place else ():
            other = seen.id.attempt
            if any(one.attempt == other and _is_foreign(world, one.rank, seen) for one in here):
                found[other], twins[other] = SPOOL, name
            if other in local:
                continue
            ranks = frozenset[int]().union(*seen.ranks.values())
            rivals = [one.attempt for one in here if one.rank in ranks]
            goes_on = newest.get(other, 0.0) if not _has_ended(made.get(other, ()), now_s) else 0.0
            rivals = [one for one in rivals if other > one or goes_on > _launched(one)]
            found |= dict.fromkeys(rivals, SPOOL) | ({other: name} if rivals else {})
    entries = sorted((attempt, place != SPOOL, place) for attempt, place in (*found.items(), *twins.items()))
    return tuple(_described(world, run, attempt, place, newest) for attempt, _, place in entries)


def _has_ended(made: Sequence[float], now_s: float) -> bool:
    """Whether a launch on another node made nothing for so long that it lives no more."""
    if not made:
        return True
    between = made[-1] - made[-2] if len(made) > 1 else 0.0
    return now_s - made[-1] > max(LEASE_S, _INTERVALS * between)


def _is_foreign(world: World, rank: int, seen: Seen) -> bool:
    """Whether a tier's copy of a rank that saves here, of the same attempt, is another node's work: it is not the part
    that has its name here, or it is later than all that this node has committed."""
    for part, theirs in seen.facts.items():
        own = world.spool.facts(part)
        if part.rank != rank:
            continue
        if own is not None and own.created != theirs.created:
            return True
        for last in world.spool.committed if own is None else ():  # of each writer here, its newest
            if (last.lane, last.checkpoint.attempt) == (part.lane, seen.id.attempt) and last.checkpoint < seen.id:
                newest = world.spool.facts(last)  # a step may also be saved after a later one
                return newest is not None and newest.created < theirs.created
    return False


def warning(rivals: Iterable[Rival]) -> str:
    """One line for a person, of what `beside` found."""
    found = list(rivals)
    names = ", ".join(map(str, found))
    told = (
        f"{len(found)} launches of run {found[0].run} save at the same time: {names}. Stop all but one, because a "
        "resume goes on from the latest launch alone. Until then each keeps what it would keep alone"
    )
    if twins := sorted({one.attempt for one in found if [other.attempt for other in found].count(one.attempt) > 1}):
        told += (
            f". Two nodes save the same rank of attempt {', '.join(twins)}, and of a step that both save a tier keeps "
            "one copy: give each launch an attempt of its own (tierd.new_attempt())"
        )
    return told


def living(world: World, run: str, place: str) -> frozenset[str]:
    """The launches of a run that keep, in a place, what they would keep if no later one had been.

    A launch whose trainer is on this node keeps it in this spool. On a tier it does so where every node can tell: the
    latest launch is on this node, too, or it saved after the latest one had begun. Else the latest one's node, which
    does not know of it, would delete what this node sends again and again.
    """
    here = frozenset(one.attempt for one in world.spool.alive.get(run, ()))
    if not here:
        return here
    known = {seen.id.attempt for some in world.places.values() for seen in some.copies(run)}
    latest, newest, ended = max(known | here), _newest(world, run), world.spool.ended.get(run, frozenset())
    late = frozenset(one for one in known - {latest} - ended if newest.get(one, 0.0) > _launched(latest))
    return late | here if place == SPOOL or latest in here else late


def _has_rival(one: Trainer, here: Iterable[Trainer]) -> bool:
    # Ranks of one launch that restored begin its next attempt one after the other; two launches have a rank twice.
    return any(other.rank == one.rank and other.attempt != one.attempt for other in here)


def _described(world: World, run: str, attempt: str, place: str, newest: Mapping[str, float]) -> Rival:
    here = world.spool.alive.get(run, ()) if place == SPOOL else ()
    pids = tuple(one.pid for one in here if one.attempt == attempt)
    made = newest.get(attempt)
    last = "" if made is None else _text(made)
    return Rival(run, attempt, place, pids, last)


def _text(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _newest(world: World, run: str) -> dict[str, float]:
    """By launch, when its newest checkpoint was made, by its node's clock; seconds since 1970."""
    return {attempt: times[-1] for attempt, times in _made(world, run).items()}


def _made(world: World, run: str) -> dict[str, list[float]]:
    """By launch, when its checkpoints were made, in order, by its node's clock; seconds since 1970."""
    found: dict[str, dict[CheckpointId, float]] = {}
    for place in world.places.values():
        for seen in place.copies(run):
            if facts := seen.spoken:
                made = facts.created.timestamp()
                times = found.setdefault(seen.id.attempt, {})
                times[seen.id] = max(made, times.get(seen.id, made))
    return {attempt: sorted(times.values()) for attempt, times in found.items()}


def _launched(attempt: str) -> float:
    """When a launch was named, seconds since 1970."""
    return int(attempt[:12], 16) / 1000
