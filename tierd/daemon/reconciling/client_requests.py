"""What this node's trainers and commands ask of the daemon: who is attached, what is held or awaited, space for a save.

Invariants: nothing is deleted because a run counts as finished alone: a tier was seen to hold it. A space request
deletes only copies that `core/planning/eviction.py` names, in its order, each after its tier was asked once more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.eviction import evictable_copies
from tierd.core.storage_faults import lacks_inodes

if TYPE_CHECKING:
    from tierd.daemon.reconciling.reconciler_context import LiveInventory

log = logging.getLogger("tierd.daemon")

_MARGIN = 256 << 10  # bytes for manifest and directories, in addition to a sixteenth of the save's size
_PAUSE_S = 0.5  # seconds between two observations while no copy can be deleted


class TrainerActivity:
    """The attached trainers, by run. `None` stands for a trainer that does not name its run, which may be any."""

    def __init__(self) -> None:
        # When an earlier daemon of this spool last ran, by its clock, in seconds since 1970; `-inf` if none has.
        # Infinite: the wall clock is trusted.
        self.watched_until = math.inf
        self._ahead: dict[str, tuple[float, float]] = {}  # run -> a time that lies ahead, and since when it is known
        self._attached: Counter[str | None] = Counter()
        # Run -> when its last trainer left, or it was asked for; monotonic seconds.
        self._last_activity: dict[str, float] = {}
        self._started_at = time.monotonic()

    def trainer_attached(self, run: str | None) -> None:
        self._attached[run] += 1

    def trainer_detached(self, run: str | None) -> None:
        """Note that a trainer's connection has ended."""
        self._attached -= Counter([run])
        if run is not None:
            self.note_request(run)

    def note_request(self, run: str) -> None:
        """Note a request about a run, for example of a trainer that restores it."""
        self._last_activity[run] = time.monotonic()

    def trainerless_runs(self, runs: Iterable[str], writers: Collection[str]) -> frozenset[str]:
        """Return those of `runs` that no trainer saves.

        Args:
            writers: `PartId.writer` of every trainer that has handed over a snapshot and is still connected.
        """
        if self._attached[None]:
            return frozenset()
        trained = {writer.rpartition(".")[0] for writer in writers}.union(run for run in self._attached if run)
        return frozenset(run for run in runs if run not in trained)

    def quiet_runs(self, touched: Mapping[str, float | None], writers: Collection[str], for_s: float) -> frozenset[str]:
        """Return the runs in `touched` that had neither a trainer nor a new part for `for_s` seconds.

        Args:
            touched: run -> when its newest part was committed, seconds since 1970. None for a run without parts in the
                spool, which counts from when it was last asked for.
            writers: as for `trainerless_runs`.
        """
        ages = {run: self._quiet_s(run, touched[run]) for run in self.trainerless_runs(touched, writers)}
        return frozenset(run for run, age_s in ages.items() if age_s >= for_s)

    def finished_runs(
        self, touched: Mapping[str, float | None], writers: Collection[str], for_s: float
    ) -> frozenset[str]:
        """Return those of `quiet_runs` that are quiet also without the time in which no daemon ran.

        That time is known by two readings of the clock alone, of which one may be wrong by a year.
        """
        here_s = time.monotonic() - self._started_at
        return frozenset(
            run
            for run in self.quiet_runs(touched, writers, for_s)
            if (newest := touched[run]) is None or here_s + max(0.0, self.watched_until - newest) >= for_s
        )

    def _quiet_s(self, run: str, newest: float | None) -> float:
        now = time.monotonic()
        part_s = math.inf if newest is None else time.time() - newest
        if newest is not None and part_s < 0:  # the clock was ahead at that save, or is behind now
            dated, since = self._ahead.get(run, (newest, now))
            self._ahead[run] = newest, since if dated == newest else now
            part_s = now - self._ahead[run][1]
        return min(now - self._last_activity.get(run, self._started_at if newest is None else -math.inf), part_s)


class ClientRequests:
    """The requests under way, and the trainers on this node."""

    def __init__(self) -> None:
        # Returns `PartId.writer` of each rank that will write again.
        self.writers: Callable[[], frozenset[str]] = frozenset
        self.attended: Callable[[], bool] = lambda: True
        self.trainer_activity = TrainerActivity()
        # The checkpoints that are being restored, so that nothing of them is deleted.
        self.held_checkpoints: Counter[CheckpointId] = Counter()
        # The checkpoints for which a restore on another node waits.
        self.needed_checkpoints: Counter[CheckpointId] = Counter()
        self.awaited_parts: Counter[PartId] = Counter()
        self.requested_runs: set[str] = set()  # the runs that a client asked for, in addition to those in the spool
        self._asking: Counter[str] = Counter()  # requests per run that are being answered; a tier may take long

    @contextmanager
    def request_context(self, run: str | None) -> Iterator[None]:
        """Count a request about a run while it is answered. So the run is observed; None asks for the spool's runs."""
        if run is None:
            yield
            return
        self.requested_runs.add(run)
        self.trainer_activity.note_request(run)
        self._asking[run] += 1
        try:
            yield
        finally:
            self._asking -= Counter([run])

    @contextmanager
    def awaiting_flush(self, part: PartId, *, needed: bool) -> Iterator[None]:
        """Count a caller that awaits the flush of a part; `needed` if a restore on another node waits for it."""
        self.needed_checkpoints.update([part.checkpoint] * needed)
        self.awaited_parts[part] += 1
        try:
            yield
        finally:
            self.needed_checkpoints -= Counter([part.checkpoint] * needed)
            self.awaited_parts -= Counter([part])

    def is_trained(self, run: str) -> bool:
        """Whether an attached trainer saves a run, or may."""
        return not self.trainer_activity.trainerless_runs([run], self.writers())

    def lose_interest(self, in_spool: Collection[str], after_s: float) -> None:
        """Forget runs that are not in the spool (`in_spool`) and for which nobody asked for `after_s` seconds."""
        unheld = dict.fromkeys(self.requested_runs.difference(in_spool) - self._asking.keys())
        self.requested_runs -= self.trainer_activity.quiet_runs(unheld, self.writers(), after_s)


@dataclass(frozen=True, slots=True)
class FreedSpace:
    """The result of freeing space. `enough`: whether a second try is worthwhile."""

    freed_bytes: int
    enough: bool


@dataclass(eq=False)
class SpoolSpace:
    """Free disk space, for one save after the other."""

    live: LiveInventory
    # Deletes the spool's copy of a checkpoint if a tier still holds it; returns whether it did.
    release: Callable[[CheckpointId, tuple[str, ...]], Awaitable[bool]]
    wake: Callable[[], None]  # makes flushes proceed at once
    patience_s: float  # how long `make` may take; flushes under way may verify more copies meanwhile
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def make(self, run: str, size_bytes: int, *, quota: bool = False) -> FreedSpace:
        """Delete verified local copies until `size_bytes` and a margin are free, or no more can be deleted.

        Args:
            run: the run whose save found the disk full; it has a trainer, attached or not.
            quota: the free space of the disk is meaningless because of a quota; count the deleted bytes instead. It is
                meaningless as well if the disk lacks inodes.
        """
        target_bytes, freed = size_bytes + size_bytes // 16 + _MARGIN, 0
        # A copy of that size has about as many files as the save needs.
        counts_deleted = quota or lacks_inodes(os.statvfs(self.live.spool.root))

        def is_freed() -> bool:
            return (freed if counts_deleted else self.live.spool.free()[0]) >= target_bytes

        try:
            async with asyncio.timeout(self.patience_s), self._lock:
                if not is_freed():
                    await asyncio.to_thread(self.live.spool.drop_recycled, ())
                while not is_freed():
                    await self.live.observe()
                    size = await self._release_next(run, is_freed)
                    freed += size
                    if not size and not self._has_unverified_copies():
                        break
                    if not size:
                        self.wake()
                        await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            pass
        succeeded = is_freed()
        if freed or not succeeded:
            outcome = "" if succeeded else ", which is not enough: the rest is on no tier yet, or not the spool's"
            message = f"{freed} bytes of verified copies were deleted{outcome}"
            log.warning("the spool's disk is full for a save of %s (%d bytes): %s", run, size_bytes, message)
        return FreedSpace(freed, succeeded or freed > 0)

    async def _release_next(self, run: str, is_freed: Callable[[], bool]) -> int:
        """Delete the next copy that may be deleted; return its size in bytes, 0 if there is none."""
        inventory = self.live.inventory()
        inventory = replace(inventory, trainerless=inventory.trainerless - {run})
        for checkpoint in evictable_copies(inventory, self.live.config):
            size = sum(facts.size for facts in inventory.spool.checkpoints[checkpoint].facts.values())
            try:
                if await self.release(checkpoint, ("the spool's disk is full, and a save needs room",)):
                    return max(size, 1)
            except (TierdError, OSError) as error:  # its tier or its directory failed; the next copy has others
                log.warning("%s stays in the spool: %s", checkpoint, error)
            if is_freed():
                break
        return 0

    def _has_unverified_copies(self) -> bool:
        """Whether a copy may still prove verified: the spool holds one that no tier was seen to have.

        A daemon that has just started has observed no tier yet.
        """
        inventory = self.live.inventory()
        return any(not inventory.is_on_a_tier(copy) for copy in inventory.spool.checkpoints.values())
