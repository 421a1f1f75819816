"""Compare the replicas of each checkpoint between its ranks, report differences, and end alerts when they are equal.

An observation gives a digest of the fingerprints of rank 0 and of the ranks in the spool, at no further cost. Only
different digests cause reads. Parts in the spool are compared when no more are expected, a tier's when it lists all.

Invariants: a checkpoint is reported once for each place, and only if the place adds ranks to those that were reported.
The alert of a run ends when each tensor that differed was compared again, without a difference, in complete checkpoints
that are newer than all that differ. It also ends after `_EQUAL_CHECKPOINTS` of them, because a tensor may be gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId, checkpoint_order
from tierd.core.planning.copies import CheckpointCopy, changed_checkpoints
from tierd.core.planning.place import SPOOL
from tierd.core.replicas.replica_comparison import ReplicaDifferences
from tierd.core.replicas.replica_digests import compared_worlds, unequal_worlds
from tierd.core.replicas.shares import ROUNDS
from tierd.daemon.reconciling.reconciler_context import LiveInventory
from tierd.daemon.reconciling.replica_reader import ReplicaReader
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.events.journal import Journal

log = logging.getLogger("tierd.daemon")

_EQUAL_CHECKPOINTS = 64  # without a difference that end an alert, whichever tensors they compare
_MAX_TENSORS = 1000  # whose names an alert remembers; one of more tensors lasts for `_EQUAL_CHECKPOINTS`
_PATIENCE_S = 600.0  # for which a comparison waits for each rank's manifest, until it leaves out those that fail
_ADVICE = (
    "test the GPU and the memory of {suspects}, replace what is faulty, and restart from an older checkpoint with "
    "`restore(step=N)` or `tierd restore --step N`: as each save has fingerprints of some tensors only, the difference "
    f"may be {ROUNDS} saves old"
)

Copies = Mapping[CheckpointId, CheckpointCopy]


class _Comparison(NamedTuple):
    """The ranks of one world size of a checkpoint, in a place."""

    place: str
    checkpoint: CheckpointId
    world: int


@dataclass(slots=True)
class _Suspicion:
    """Digests that differ, first noted at `since`. They are not read before `retry_at`; both in monotonic seconds."""

    since: float
    retry_at: float = 0.0


@dataclass(slots=True)
class _Divergence:
    """What an alert of a run waits for."""

    newest: CheckpointId  # the newest checkpoint that differs
    tensors: set[str] | None  # those that differed and were not equal since; None if they are too many
    # the newer complete checkpoints that were compared without a difference
    equal: set[CheckpointId] = field(default_factory=set)
    why: str = ""  # how the newest one differs, for people

    def add(self, checkpoint: CheckpointId, tensors: frozenset[str], why: str) -> None:
        """Add a further checkpoint that differs."""
        if checkpoint_order(checkpoint) >= checkpoint_order(self.newest):
            self.newest, self.why = checkpoint, f"{checkpoint}: {why}"
        if self.tensors is not None:
            self.tensors |= tensors
            if len(self.tensors) > _MAX_TENSORS:
                self.tensors = None
        self.equal.clear()


class ReplicaMonitor:
    """The replicas of all runs that the spool or a tier shows.

    Args:
        tiers: gives the tiers of the present configuration.
        arrive_s: how long parts of a checkpoint may follow each other into the spool.
    """

    def __init__(
        self, live: LiveInventory, journal: Journal, tiers: Callable[[], TierOperations], arrive_s: float
    ) -> None:
        self._live, self._journal, self._tiers, self._arrive_s = live, journal, tiers, arrive_s
        self._reader = ReplicaReader(live.spool, tiers)
        self._observed, self._comparing = asyncio.Event(), asyncio.Lock()
        self._copies: dict[str, Copies] = {}  # by place, as last compared
        self._suspicions: dict[_Comparison, _Suspicion] = {}
        self._results: dict[_Comparison, bool] = {}  # of digests that differ: whether tensors do
        # By checkpoint and world size, the ranks that were reported.
        self._reported: dict[tuple[CheckpointId, int], set[int]] = defaultdict(set)
        self._divergences: dict[str, _Divergence] = {}  # by run

    def wake(self) -> None:
        """Compare soon, because a place was observed."""
        self._observed.set()

    async def run(self) -> None:
        """Compare after each observation until cancelled."""
        while True:
            waits = any(comparison.place == SPOOL for comparison in self._suspicions)
            try:
                async with asyncio.timeout(self._arrive_s if waits else None):
                    await self._observed.wait()
            except TimeoutError:
                pass
            try:
                await self.compare()
            except Exception:  # a comparison must not end the daemon
                log.exception("replicas were not compared")
                await asyncio.sleep(self._arrive_s)

    async def compare(self) -> None:
        """Compare what was observed since the last call, and what could not be compared then."""
        async with self._comparing:
            await self._compare()

    async def _compare(self) -> None:
        self._observed.clear()
        for place, copies in self._observed_copies().items():
            self._note_suspicions(place, copies)
        for comparison in sorted(self._suspicions, key=lambda comparison: checkpoint_order(comparison.checkpoint)):
            copy = self._copies.get(comparison.place, {}).get(comparison.checkpoint)
            if copy is None or comparison.world not in unequal_worlds(copy):
                del self._suspicions[comparison]
            elif self._is_due(comparison, copy):
                await self._judge(comparison, copy)
        for run in list(self._divergences):
            await self._review(run)
        self._forget_deleted()

    # -- what differs -----------------------------------------------------------------------------------------------

    def _observed_copies(self) -> dict[str, Copies]:
        """By place, the copies as last observed. A tier that does not answer has those of before."""
        live = self._live
        spool = {**live.place.checkpoints, **live.local_only} if live.local_only else live.place.checkpoints
        tiers = self._tiers().observed.places
        self._copies = {place: copies for place, copies in self._copies.items() if place in (SPOOL, *tiers)}
        return {SPOOL: spool} | {name: place.checkpoints for name, place in tiers.items() if place is not None}

    def _note_suspicions(self, place: str, copies: Copies) -> None:
        before, self._copies[place] = self._copies.get(place, {}), copies
        for checkpoint in changed_checkpoints(before, copies):
            if copy := copies.get(checkpoint):
                for world in unequal_worlds(copy):
                    comparison = _Comparison(place, checkpoint, world)
                    if comparison not in self._results:
                        self._suspicions.setdefault(comparison, _Suspicion(time.monotonic()))

    def _is_due(self, comparison: _Comparison, copy: CheckpointCopy) -> bool:
        """Whether no further part is expected that would tell more."""
        suspicion, now = self._suspicions[comparison], time.monotonic()
        if comparison.place != SPOOL:
            is_listed = len(copy.ranks[comparison.world]) == comparison.world
            return is_listed and now >= suspicion.retry_at and not self._live.run_mode.pause.paused
        has_arrived = now - suspicion.since >= self._arrive_s
        return has_arrived or copy.complete or self._has_newer(comparison.checkpoint)

    def _has_newer(self, checkpoint: CheckpointId) -> bool:
        order = checkpoint_order(checkpoint)
        return any(other.run == checkpoint.run and checkpoint_order(other) > order for other in self._copies[SPOOL])

    async def _judge(self, comparison: _Comparison, copy: CheckpointCopy) -> None:
        suspicion = self._suspicions[comparison]
        is_patient = time.monotonic() - suspicion.since < _PATIENCE_S
        try:
            differences = await self._reader.compare(comparison.place, copy, comparison.world, patient=is_patient)
        except (TierdError, OSError) as error:
            suspicion.retry_at = time.monotonic() + self._arrive_s
            log.info("%s: %s: its replicas are compared later: %s", comparison.place, comparison.checkpoint, error)
            return
        del self._suspicions[comparison]
        if differences is not None:  # else the next change of the copy is compared
            self._results[comparison] = bool(differences.tensors)
            if differences.tensors:
                self._report(comparison, differences)

    def _report(self, comparison: _Comparison, differences: ReplicaDifferences) -> None:
        place, checkpoint, world = comparison
        reported = self._reported[checkpoint, world]
        if differences.compared <= reported:
            return
        reported |= differences.compared
        divergence = self._divergences.setdefault(checkpoint.run, _Divergence(checkpoint, set()))
        why = f"{differences}: {self._advice(checkpoint, differences)}"
        divergence.add(checkpoint, differences.tensors, why)
        self._journal.record_differences(place, checkpoint, world, differences, why, alert_why=divergence.why)

    def _advice(self, checkpoint: CheckpointId, differences: ReplicaDifferences) -> str:
        ranks = {rank for difference in differences.described for rank in difference.differ if difference.agree}
        if not ranks:
            return _ADVICE.format(suspects="each of these ranks")
        local = self._live.place.ranks.get(checkpoint.run, frozenset()) & ranks
        names = ", ".join(f"{rank} (on this node)" if rank in local else str(rank) for rank in sorted(ranks))
        return _ADVICE.format(suspects=f"rank {names}" if len(ranks) == 1 else f"ranks {names}")

    # -- what is equal again ----------------------------------------------------------------------------------------

    async def _review(self, run: str) -> None:
        """End the alert of a run if newer checkpoints show that all its tensors are equal, or if the run is gone."""
        divergence = self._divergences[run]
        newer, exists = set[CheckpointId](), False
        for place, copies in self._copies.items():
            for checkpoint, copy in copies.items():
                exists |= checkpoint.run == run
                if checkpoint.run == run and checkpoint_order(checkpoint) > checkpoint_order(divergence.newest):
                    newer |= {checkpoint} if self._is_equal(place, copy) else set()
        for checkpoint in sorted(newer - divergence.equal, key=checkpoint_order):
            try:
                names = await self._reader.names(self._copies, checkpoint)
            except (TierdError, OSError) as error:
                log.info("%s: its replicas are compared later: %s", checkpoint, error)
                continue
            divergence.equal.add(checkpoint)
            if divergence.tensors is not None:
                divergence.tensors -= names
        left = math.inf if divergence.tensors is None else len(divergence.tensors)
        if exists and left and len(divergence.equal) < _EQUAL_CHECKPOINTS:
            return
        del self._divergences[run]
        count = len(divergence.equal)
        why = f"{count} newer complete checkpoints have equal replicas" if exists else "no place has the run any more"
        self._journal.record_equal_replicas(run, why)

    def _is_equal(self, place: str, copy: CheckpointCopy) -> bool:
        """Whether a complete copy was compared, and no place's comparison of the checkpoint showed a difference."""
        worlds = compared_worlds(copy)
        unequal = unequal_worlds(copy)
        return bool(worlds) and not any(
            (copy.id, world) in self._reported
            or (world in unequal and self._results.get(_Comparison(place, copy.id, world), True))
            for world in worlds
        )

    def _forget_deleted(self) -> None:
        """Forget the checkpoints that no place shows any more."""
        for comparison in [key for key in self._results if key.checkpoint not in self._copies.get(key.place, {})]:
            del self._results[comparison]
        for checkpoint, world in list(self._reported):
            if not any(checkpoint in copies for copies in self._copies.values()):
                del self._reported[checkpoint, world]
