"""Launches of one run that live at the same time, by mistake: which ones do, and which therefore lose nothing.

Law: a launch that lives keeps what it would keep alone. Nothing here lets anything be deleted, so a launch that is
wrongly taken for living costs space and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from tierd.core.world import SPOOL, Trainer, World


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


def beside(world: World, run: str) -> tuple[Rival, ...]:
    """The launches of a run that save the same rank at the same time, in their order; empty where there is one at most.

    On this node the trainers' locks tell. Of other nodes a tier tells: a launch that is later than one that lives here
    saved there, or an earlier one saved after the one that lives here had begun.
    """
    here = world.spool.alive.get(run, ())
    if not here:
        return ()
    newest = _newest(world, run)
    local = {one.attempt for one in here} | world.spool.ended.get(run, frozenset())
    found = {one.attempt: SPOOL for one in here if _has_rival(one, here)}
    for name, place in world.tiers.items():
        for seen in place.copies(run) if place else ():
            other = seen.id.attempt
            if other in local:
                continue
            ranks = frozenset[int]().union(*seen.ranks.values())
            rivals = [one.attempt for one in here if one.rank in ranks]
            rivals = [one for one in rivals if other > one or newest.get(other, 0.0) > _launched(one)]
            found |= dict.fromkeys(rivals, SPOOL) | ({other: name} if rivals else {})
    return tuple(_described(world, run, attempt, found[attempt], newest) for attempt in sorted(found))


def warning(rivals: Iterable[Rival]) -> str:
    """One line for a person, of what `beside` found."""
    found = list(rivals)
    names = ", ".join(map(str, found))
    return (
        f"{len(found)} launches of run {found[0].run} save at the same time: {names}. Stop all but one, because a "
        "resume goes on from the latest launch alone. Until then each keeps what it would keep alone"
    )


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
    pids = tuple(one.pid for one in world.spool.alive.get(run, ()) if one.attempt == attempt)
    made = newest.get(attempt)
    last = "" if made is None else datetime.fromtimestamp(made, UTC).isoformat(timespec="seconds")
    return Rival(run, attempt, place, pids, last)


def _newest(world: World, run: str) -> dict[str, float]:
    """By launch, when its newest checkpoint was made, by its node's clock; seconds since 1970."""
    found: dict[str, float] = {}
    for place in world.places.values():
        for seen in place.copies(run):
            if facts := seen.spoken:
                attempt, made = seen.id.attempt, facts.created.timestamp()
                found[attempt] = max(made, found.get(attempt, made))
    return found


def _launched(attempt: str) -> float:
    """When a launch was named, seconds since 1970."""
    return int(attempt[:12], 16) / 1000
