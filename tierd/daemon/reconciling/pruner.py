"""Carry out the prunes of the plan on a tier and in the spool, and report them.

Invariant: no copy is deleted for the sake of another one before that one's place was asked once more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from tierd.core.errors import DeleteRefused, ManifestError, ObjectNotFound, StoreFull, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.planning.copies import CheckpointCopy
from tierd.core.planning.demand import Demand
from tierd.core.planning.eviction import complete_in_spool, superseded_copies
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Prune
from tierd.core.planning.prune_batches import prune_batch
from tierd.core.planning.pruning import relied_copies, tiers_losing
from tierd.daemon.reconciling.reconciler_context import LiveInventory
from tierd.daemon.reconciling.repairs import REFUSED_S, QuarantineReview
from tierd.daemon.reconciling.tier_worker import TierWorker
from tierd.daemon.scrub.scrubber import Scrubber
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.daemon.tiers.tier_prune import quarantine
from tierd.events.journal import Journal
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

_ASKING_S = 10.0  # after which no other tier is asked for a further checkpoint of a batch


@dataclass(eq=False)
class Pruner:
    live: LiveInventory
    tiers: TierOperations
    stores: Mapping[str, Store]
    workers: Mapping[str, TierWorker]
    scrubber: Scrubber
    journal: Journal
    observe: Callable[[str], Awaitable[None]]
    wake: Callable[[], None]
    review: QuarantineReview
    remember: Callable[[Iterable[str], Mapping[str, str]], Awaitable[None]]
    # Checkpoint whose prune waits -> the copy to verify first.
    _copy_to_verify: dict[CheckpointId, PartId] = field(default_factory=dict)
    _rest_until: dict[str, float] = field(default_factory=dict)  # silent tier -> when to ask it again, monotonic
    _refused: set[tuple[str, PartId]] = field(default_factory=set)  # whose quarantine was refused, which was reported

    async def prune(self, action: Prune) -> None:
        """Delete a checkpoint from a tier, or its copy from the spool; what cannot be deleted yet is put off."""
        if action.tier != SPOOL:
            await self._prune_together(action)
            return
        checkpoint, worker = action.checkpoint, self.workers[SPOOL]
        self._copy_to_verify.pop(checkpoint, None)
        try:
            # On a full disk, free space matters more than fast writes into recycled blocks.
            if await self.release(checkpoint, action.reasons, reuse=not self.live.is_disk_low):
                return
        except (DeleteRefused, StoreFull):  # a tier's copy is corrupt, and cannot be quarantined
            worker.defer(checkpoint, REFUSED_S)
            return
        except (TierdError, OSError):  # other copies go first
            worker.defer_stuck(checkpoint)
            raise
        worker.defer(checkpoint, self.tiers.timings.prune_again_s)
        self.wake()

    def waits_for_copy(self, action: Prune) -> bool:
        """Whether a prune in the spool waits for a copy that the scrub cannot read for now."""
        on = self._copy_to_verify.get(action.checkpoint) if action.tier == SPOOL else None
        return on is not None and self.scrubber.postponed_s(on) > 0

    async def _prune_together(self, first: Prune) -> None:
        """Delete a checkpoint from a tier in one pass with others of its run that retention gives up there."""
        live = self.live
        worker, place = self.workers[first.tier], self.tiers.observed.places[first.tier]
        before, run = live.inventory(), first.checkpoint.run
        # Without the checkpoints that a full tier only holds for others: of these, one at a time goes.
        retired = live.retired(first.tier)
        other_prunes = [prune for prune in retired if not worker.is_deferred(prune.checkpoint)]
        prunes = await self.review.proven_corrupt(prune_batch(first, other_prunes, place), place)
        prunes = await self._held_elsewhere(prunes, self._demand(run))

        async def confirm(listed: Collection[CheckpointId]) -> frozenset[CheckpointId]:
            await live.observe()
            inventory = live.inventory()
            attempts = frozenset[str]().union(*(place.run(run).attempts for place in inventory.places.values()))
            if not {checkpoint.attempt for checkpoint in listed} <= attempts:
                return frozenset()  # another node has begun a launch: what it needs is known after an observation
            actions = live.planner.plan(inventory, live.config, {}, 0.0, first.tier)
            return frozenset(
                action.checkpoint for action in actions if isinstance(action, Prune) and action.tier == first.tier
            )

        reasons = {prune.checkpoint: prune.reasons for prune in prunes}

        def record(deleted: Collection[CheckpointId]) -> None:
            """Report each checkpoint once: as soon as its manifests are gone, because what follows may fail."""
            for checkpoint in [checkpoint for checkpoint in reasons if checkpoint in deleted]:
                self._record_pruned(checkpoint, first.tier, reasons.pop(checkpoint), before)
                # Even if what follows fails: the next put says whether there is room.
                live.full_tiers.discard(first.tier)

        try:
            deleted = await self.tiers.prune([prune.checkpoint for prune in prunes], first.tier, confirm, record)
        except DeleteRefused:  # reported once by `SaveEvents.report_append_only`; later plans omit these prunes
            deleted = set()
        record(deleted)  # also those of which only chunks were left
        for prune in prunes:
            if prune.checkpoint not in deleted:
                worker.defer(prune.checkpoint)

    async def _held_elsewhere(self, prunes: Sequence[Prune], demand: Demand) -> list[Prune]:
        """Return the prunes of checkpoints that every other tier holds that wants them, and put off the others.

        The tiers are asked, because their observations may be hours old, and take a manifest for usable that nobody
        has read. They are asked before any mark is put, because marks hold up flushes and pins. Flushes to this tier
        wait as well, so no answer is awaited for long.
        """
        going, lacking_tiers, ends_s = [], set[str](), time.monotonic() + _ASKING_S
        limit_s, rest_s = self.tiers.timings.holds_s, self.tiers.timings.stuck_s / 2
        for prune in prunes:
            worker, relied = self.workers[prune.tier], dict(relied_copies(demand, prune.tier, prune.checkpoint))
            if any(time.monotonic() < self._rest_until.get(name, 0.0) for name in relied):
                worker.defer(prune.checkpoint, rest_s)  # due before the one without an answer, which may never get any
                continue
            lacking, name = set[str](), ""
            try:
                for name, copy in relied.items():
                    if not await self._holds(name, copy):
                        lacking.add(name)
            except (DeleteRefused, StoreFull) as error:  # the copy there is corrupt, and cannot be quarantined
                log.warning("%s: %s is kept, because another copy is corrupt: %s", prune.tier, prune.checkpoint, error)
                worker.defer(prune.checkpoint, REFUSED_S)
            except (TierdError, OSError) as error:
                log.info(
                    "%s: %s is kept, because another tier cannot be asked: %s", prune.tier, prune.checkpoint, error
                )
                self._rest_until[name] = time.monotonic() + rest_s
                worker.defer(prune.checkpoint)
            else:
                lacking_tiers |= lacking
                if lacking:
                    worker.defer(prune.checkpoint)
                else:
                    going.append(prune)
            if time.monotonic() > ends_s or self.live.run_mode.is_ending:  # the others are left to the next batch
                break
        for name in lacking_tiers:
            with suppress(TierdError, OSError):  # then it is unknown; an observation that takes longer goes on
                async with asyncio.timeout(limit_s):
                    await self.observe(name)
        return going

    async def _holds(self, tier: str, copy: CheckpointCopy) -> bool:
        """Whether a tier still holds a checkpoint. A part proven corrupt there is quarantined, so that it is sent
        again."""
        corrupt = await self.tiers.find_corrupt_parts(tier, list(copy.parts()))
        for part, judged in (corrupt or {}).items():
            await self._quarantine(tier, part, judged, "it cannot be read")
        return corrupt == {}

    async def _quarantine(self, tier: str, part: PartId, judged: bytes, why: str) -> None:
        """Quarantine a copy, and report it; one that is refused is reported once, not at each try.

        Args:
            judged: the manifest of the copy that is proven corrupt. Another one is left, because a node put it there.
        """
        record = partial(self.journal.record, "corrupt", tier, part)
        try:
            if await quarantine(self.stores[tier], part, judged):
                record(f"{why}; it will be flushed again")
        except (DeleteRefused, StoreFull) as error:
            if (tier, part) not in self._refused:
                record(f"{why}, and cannot be quarantined: {error}")
            self._refused.add((tier, part))
            raise

    async def release(self, checkpoint: CheckpointId, reasons: tuple[str, ...], *, reuse: bool = False) -> bool:
        """Delete the spool's copy of a checkpoint if the tiers, asked once more, allow it.

        Args:
            reuse: keep the blocks of the copy's largest file for the next write.
        """
        spool, live, requests = self.live.spool, self.live, self.live.requests
        before = live.inventory()
        parts = await self._deletable_parts(checkpoint)
        if (
            parts is None
            or checkpoint in requests.held_checkpoints
            or any(part.checkpoint == checkpoint for part in live.busy)
        ):
            return False  # held or flushed since the tiers were asked; the next plan decides
        if checkpoint.attempt not in before.remembered(checkpoint.run):  # only the copy says what it resumed from
            await self.remember([checkpoint.run], {})
        present = [part for part in parts if spool.has(part)]
        writers = requests.writers() if reuse else frozenset[str]()
        await asyncio.to_thread(spool.remove, parts, writers)
        live.place = live.place.without_parts(parts)  # parts committed meanwhile remain in the inventory
        # A writer that left meanwhile cleaned up before this file existed.
        if not reuse or writers - requests.writers():
            await asyncio.to_thread(spool.drop_recycled, requests.writers() if reuse else ())
        if present:
            self._record_pruned(checkpoint, SPOOL, reasons, before)
        return True

    def _record_pruned(self, checkpoint: CheckpointId, tier: str, reasons: tuple[str, ...], before: Inventory) -> None:
        """Report a deleted copy, and report separately if it was the last copy and some tier wanted it.

        Args:
            before: the inventory on which the deletion was decided.
        """
        journal, live = self.journal, self.live
        journal.counters["pruned"] += 1
        journal.record("pruned", tier, checkpoint, "; ".join(reasons))
        copy = before.places[tier].checkpoints.get(checkpoint) if tier in before.places else None
        if not copy or not (before.silent or before.full):
            return
        if names := tiers_losing(live.inventory(), before, live.config, tier, copy):
            why = f"its last copy was deleted, and {', '.join(names)} wanted it: {'; '.join(reasons)}"
            journal.record("given up", tier, checkpoint, why)

    async def _deletable_parts(self, checkpoint: CheckpointId) -> tuple[PartId, ...] | None:
        """Observe the tiers once more before a local copy is deleted, and return the parts that may be deleted.

        These are the parts for which the tiers were asked, if one tier holds them all or no tier wants them any more;
        otherwise None. Parts that another rank commits meanwhile are not among them.
        """
        live, tiers = self.live, self.tiers
        copy = live.place.checkpoints.get(checkpoint)
        parts = tuple(copy.parts()) if copy else ()
        lacking = await tiers.find_missing_parts(
            {part: await asyncio.to_thread(self._read_local_manifest, part) for part in parts}
        )
        for name, part, judged in lacking or ():
            await self._quarantine(name, part, judged, "chunks are missing")
            tiers.observed.invalidate(name)
        if lacking is not None:
            return None
        if any(all(tiers.observed.has(part, name) for part in parts) for name in tiers.observed.places):
            return parts
        return parts if await self._is_given_up(checkpoint) else None

    async def _is_given_up(self, checkpoint: CheckpointId) -> bool:
        """Whether no tier wants a copy that only the spool has, and the newer ones are right to which it yields."""
        live, tiers = self.live, self.tiers
        if self._are_aged():
            return False
        demand = self._demand(checkpoint.run)
        is_superseded = checkpoint in superseded_copies(demand)
        if is_superseded:
            other_copies = [
                copy for copy in complete_in_spool(demand.inventory, checkpoint.run) if copy.id != checkpoint
            ]
            is_past = await self._verify_spool_copies(
                checkpoint, [part for copy in other_copies for part in copy.parts()]
            )
        else:
            is_past = await tiers.have_newer_copies(checkpoint, demand.inventory)
        if not is_past:
            return False
        # Reading those may have taken minutes. A pin, or another node's restore, that began meanwhile counts.
        await live.observe()
        demand = self._demand(checkpoint.run)
        protected = demand.inventory.pins | demand.inventory.awaited
        is_protected = checkpoint not in superseded_copies(demand) if is_superseded else checkpoint in protected
        return not (is_protected or self._are_aged())

    def _demand(self, run: str) -> Demand:
        return self.live.planner.demand(self.live.inventory(), self.live.config, run)

    def _are_aged(self) -> bool:
        """Whether a tier's observation is too old to delete an only copy by it. If so, it is made anew."""
        observed = self.tiers.observed
        aged = [name for name in observed.places if self.tiers.timings.aged_s < observed.age_s(name) < math.inf]
        for name in aged:
            observed.invalidate(name)
        return bool(aged)

    async def _verify_spool_copies(self, checkpoint: CheckpointId, parts: Iterable[PartId]) -> bool:
        """Whether the spool's copies of `parts`, the reason for which `checkpoint` may be deleted, are intact."""
        for part in parts:
            if not await self.scrubber.is_right(part):
                self._copy_to_verify[checkpoint] = part
                return False
        return True

    def _read_local_manifest(self, part: PartId) -> Manifest | None:
        try:
            return self.live.spool.manifest(part)
        except (ObjectNotFound, ManifestError):
            return None
