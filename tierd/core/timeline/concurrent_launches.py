"""Launches of one run that live at the same time by mistake: how to detect them, and how to protect their checkpoints.

Invariant: a launch that lives keeps the checkpoints that it would keep if no later launch existed. This module never
causes a deletion, so a launch that is wrongly taken for living only costs space.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from tierd.core.ids import CheckpointId, launch_ms
from tierd.core.planning.copies import CheckpointCopy
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Trainer

LEASE_S = 3600.0  # an earlier launch on another node counts as living this long after it made its newest checkpoint
_INTERVALS = 3  # or for this many intervals between its last two checkpoints, if that is longer


class Rival(msgspec.Struct, frozen=True):
    """A launch that saves at the same time as another launch of its run.

    Attributes:
        run: the run's name.
        attempt: the launch that saves.
        place: `local` if its trainers hold their locks in this spool; otherwise the tier that has its checkpoints.
        pids: the process ids of its trainers on this node; 0 for a trainer in another pid namespace.
        last: when the newest of its checkpoints with a read manifest was made; RFC 3339 in UTC, or empty.
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
    """The right of one process on this node to save a rank of a run. Its lock lasts as long as the process.

    Attributes:
        run: the run's name.
        attempt: the launch that saves.
        rank: the rank that it saves.
        pid: the process id; 0 if the process is in another pid namespace.
        since: when the process first saved for this launch; RFC 3339 in UTC.
        renewed: when the newest of the launch's checkpoints with a read manifest was made; RFC 3339 in UTC, or empty.
    """

    run: str
    attempt: str
    rank: int
    pid: int
    since: str
    renewed: str


def list_leases(inventory: Inventory) -> tuple[Lease, ...]:
    """The leases of every run, in the order of runs, launches and ranks."""
    entries = []
    for run, trainers in sorted(inventory.spool.alive.items()):
        newest = _newest(inventory, run)
        for trainer in trainers:
            renewed = _text(newest[trainer.attempt]) if trainer.attempt in newest else ""
            entries.append(Lease(run, trainer.attempt, trainer.rank, trainer.pid, _text(trainer.since), renewed))
    return tuple(entries)


def unproven_attempts(inventory: Inventory, tier: str, run: str) -> tuple[str, ...]:
    """The attempts on a tier that are newer by name than every attempt of the run whose origin is known.

    While such names exist, no node prunes the run, because no node can determine which launch is the newest.
    """
    place = inventory.tiers.get(tier)
    origins = inventory.origins(run)
    newest = max(origins, default="")
    attempts = {copy.id.attempt for copy in place.copies(run)} if place else set()
    return tuple(sorted(attempt for attempt in attempts - origins.keys() if origins and attempt > newest))


def disown_advice(run: str, attempt: str) -> str:
    """The advice, for messages, for names of a launch that no node made."""
    return f"if that launch is nobody's, `tierd disown {run} {attempt} URL` takes its names away"


def concurrent_launches(inventory: Inventory, run: str, now_s: float = 0.0) -> tuple[Rival, ...]:
    """The launches of a run that save the same rank at the same time, in order; empty if there is at most one.

    On this node the trainers' locks show them. On other nodes, a tier shows them in one of three cases. First, a launch
    later than one that lives here saved there; a resume continues from it whether it lives or not. Second, an earlier
    launch saved after the one that lives here had begun, and its lease has not ended. Third, the tier has parts of a
    rank that saves here which this node did not write.

    Args:
        now_s: seconds since 1970 by this node's clock, used only to end the leases of earlier launches.
    """
    trainers = inventory.spool.alive.get(run, ())
    if not trainers:
        return ()
    save_times = _save_times(inventory, run)
    newest = {attempt: times[-1] for attempt, times in save_times.items()}
    local = {trainer.attempt for trainer in trainers} | inventory.spool.ended_launches.get(run, frozenset())
    places = {trainer.attempt: SPOOL for trainer in trainers if _has_rival(trainer, trainers)}
    twins: dict[str, str] = {}
    for name, place in inventory.tiers.items():
        for copy in place.copies(run) if place else ():
            attempt = copy.id.attempt
            if any(trainer.attempt == attempt and _is_foreign(inventory, trainer.rank, copy) for trainer in trainers):
                places[attempt], twins[attempt] = SPOOL, name
            if attempt in local:
                continue
            ranks = frozenset[int]().union(*copy.ranks.values())
            rivals = [trainer.attempt for trainer in trainers if trainer.rank in ranks]
            active_until = newest.get(attempt, 0.0) if not _has_ended(save_times.get(attempt, ()), now_s) else 0.0
            rivals = [rival for rival in rivals if attempt > rival or active_until > launch_ms(rival) / 1000]
            places |= dict.fromkeys(rivals, SPOOL) | ({attempt: name} if rivals else {})
    entries = sorted((attempt, place != SPOOL, place) for attempt, place in (*places.items(), *twins.items()))
    return tuple(_described(inventory, run, attempt, place, newest) for attempt, _, place in entries)


def _has_ended(save_times: Sequence[float], now_s: float) -> bool:
    """Whether the lease of a launch on another node has ended, because it made no checkpoint for too long."""
    if not save_times:
        return True
    between = save_times[-1] - save_times[-2] if len(save_times) > 1 else 0.0
    return now_s - save_times[-1] > max(LEASE_S, _INTERVALS * between)


def _is_foreign(inventory: Inventory, rank: int, copy: CheckpointCopy) -> bool:
    """Whether another node wrote a tier's part of `rank`, which also saves on this node for the same attempt.

    Another node did if the part differs from the part of that name here, or is later than every part committed here.
    """
    for part, tier_facts in copy.facts.items():
        spool_facts = inventory.spool.facts(part)
        if part.rank != rank:
            continue
        if spool_facts is not None and spool_facts.created != tier_facts.created:
            return True
        for last in inventory.spool.committed if spool_facts is None else ():  # the newest of each writer here
            if (last.writer, last.checkpoint.attempt) == (part.writer, copy.id.attempt) and last.checkpoint < copy.id:
                newest = inventory.spool.facts(last)  # times decide: a trainer may save a step after a later one
                return newest is not None and newest.created < tier_facts.created
    return False


def concurrency_warning(rivals: Iterable[Rival]) -> str:
    """One line, for people, about the launches that `concurrent_launches` found."""
    launches = list(rivals)
    names = ", ".join(map(str, launches))
    if len(launches) == 1:  # two of different world sizes on this node
        return (
            f"two launches of run {launches[0].run} save the same rank of one attempt at the same time: {names}. "
            "Stop one, and give each launch an attempt of its own (tierd.new_attempt())"
        )
    text = (
        f"{len(launches)} launches of run {launches[0].run} save at the same time: {names}. Stop all but one, "
        "because a "
        "resume goes on from the latest launch alone. Until then each keeps what it would keep alone"
    )
    if twins := sorted(
        {launch.attempt for launch in launches if [rival.attempt for rival in launches].count(launch.attempt) > 1}
    ):
        text += (
            f". Two nodes save the same rank of attempt {', '.join(twins)}, and of a step that both save a tier keeps "
            "one copy: give each launch an attempt of its own (tierd.new_attempt())"
        )
    return text


def live_launches(inventory: Inventory, run: str, place: str) -> frozenset[str]:
    """The launches of a run that keep, in a place, the checkpoints they would keep if no later launch existed.

    A launch whose trainer is on this node does so in this spool. It does so on a tier only if every node can know of
    it: the latest launch is on this node too, or the launch saved after the latest one had begun. Otherwise the node of
    the latest launch would not know of it, and would prune again and again the checkpoints that this node sends.
    """
    local = frozenset(trainer.attempt for trainer in inventory.spool.alive.get(run, ()))
    if not local:
        return local
    attempts = frozenset[str]().union(*(observed.run(run).attempts for observed in inventory.places.values()))
    latest, newest, ended_launches = (
        max(attempts | local),
        _newest(inventory, run),
        inventory.spool.ended_launches.get(run, frozenset()),
    )
    overlapping = frozenset(
        attempt
        for attempt in attempts - {latest} - ended_launches
        if newest.get(attempt, 0.0) > launch_ms(latest) / 1000
    )
    return overlapping | local if place == SPOOL or latest in local else overlapping


def _has_rival(trainer: Trainer, trainers: Iterable[Trainer]) -> bool:
    # Several attempts alone prove nothing, because the ranks of a launch that restored begin its next attempt one after
    # another. Only two launches have the same rank twice. They may have one attempt, with different world sizes.
    return any(
        rival.rank == trainer.rank and (rival.attempt, rival.world) != (trainer.attempt, trainer.world)
        for rival in trainers
    )


def _described(inventory: Inventory, run: str, attempt: str, place: str, newest: Mapping[str, float]) -> Rival:
    trainers = inventory.spool.alive.get(run, ()) if place == SPOOL else ()
    pids = tuple(trainer.pid for trainer in trainers if trainer.attempt == attempt)
    made_s = newest.get(attempt)
    last = "" if made_s is None else _text(made_s)
    return Rival(run, attempt, place, pids, last)


def _text(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _newest(inventory: Inventory, run: str) -> dict[str, float]:
    """By launch, the time when its newest checkpoint was made; seconds since 1970 by the clock of its node."""
    newest: dict[str, float] = {}
    for place in inventory.places.values():
        for attempt, made_s in place.run(run).newest_times.items():
            newest[attempt] = max(made_s, newest.get(attempt, 0.0))
    return newest


def _save_times(inventory: Inventory, run: str) -> dict[str, list[float]]:
    """By launch, the times when its checkpoints were made, ascending; seconds since 1970 by the clock of its node."""
    by_launch: dict[str, dict[CheckpointId, float]] = {}
    for place in inventory.places.values():
        for copy in place.copies(run):
            if facts := copy.metadata_facts:
                made_s = facts.created.timestamp()
                times = by_launch.setdefault(copy.id.attempt, {})
                times[copy.id] = max(made_s, times.get(copy.id, made_s))
    return {attempt: sorted(times.values()) for attempt, times in by_launch.items()}
