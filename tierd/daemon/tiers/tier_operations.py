"""The operations of the daemon on its tiers, besides flushes: prunes, and this node's records there."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from tierd.core.config import Config
from tierd.core.errors import FormatTooNew, ManifestError, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId, pruning_prefix, summary_key
from tierd.core.manifest import Manifest
from tierd.core.planning.inventory import Inventory, fills_tier, is_janitor, policy_for
from tierd.core.planning.place import Place
from tierd.daemon.concurrency import gather_limited, suspend_aware_timeout
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.daemon.tiers.intents import sweep
from tierd.daemon.tiers.manifest_listing import MAX_MANIFEST_READS
from tierd.daemon.tiers.node_records import NodeIdentity, sweep_rank_notes
from tierd.daemon.tiers.prune_pass import Confirm
from tierd.daemon.tiers.summaries import due_summaries, put_summaries
from tierd.daemon.tiers.tier_identity import check_identities
from tierd.daemon.tiers.tier_observations import Observations
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.tiers.tier_probes import find_missing_parts, is_part_held
from tierd.daemon.tiers.tier_prune import prune
from tierd.daemon.tiers.tier_run_records import due_head, due_policies, put_head, put_policy, why_rolled_back
from tierd.stores.base import Store, delete_if_permitted
from tierd.stores.store_wrappers import CountedStore, DeletionGuard

log = logging.getLogger("tierd.daemon")


class TierOperations:
    """Every tier of a configuration, by name."""

    def __init__(
        self, config: Config, stores: Mapping[str, Store], identity: NodeIdentity, timings: DaemonTimings = USUAL
    ) -> None:
        self._config, self.identity, self.timings = config, identity, timings
        self._guards = {name: DeletionGuard(store, timings.refused_s) for name, store in stores.items()}
        self.stores = {name: CountedStore(guard) for name, guard in self._guards.items()}  # count what they are asked
        self._observers = {
            name: TierObserver(store, prunes=True, own=partial(self.identity.mark_contested, name))
            for name, store in self.stores.items()
        }
        self.observed = Observations(self._observers, timings.answers_s)
        self._comparing = asyncio.Lock()
        self._summary_requests = Counter[str]()  # by tier, those of `requests` that made summaries
        self._untidy = set(stores)  # tiers where an operation of this node or of its earlier daemon may be cut off

    @property
    def who(self) -> str:
        """The id of this node among the nodes that share a tier, 8 hex digits."""
        return self.identity.id

    def requests(self, tier: str) -> int:
        """How many requests observations, flushes and prunes have made to a tier; scrubs and restores do not count."""
        return self.stores[tier].requests if tier in self.stores else 0

    def resting_requests(self, tier: str) -> int:
        """As `requests`, without those that made summaries, which are no part of any later observation."""
        return self.requests(tier) - self._summary_requests[tier]

    def requests_by_kind(self, tier: str) -> dict[str, int]:
        """As `requests`, by kind: `put`, `get`, `list`, `delete`."""
        return dict(self.stores[tier].counts) if tier in self.stores else {}

    def refusal(self, tier: str) -> str:
        """The reason that a tier gave last for refusing deletions; empty if it is not known to refuse them."""
        return self._guards[tier].refused if tier in self._guards else ""

    def retry_after_s(self, tier: str) -> float:
        """For how many seconds more a tier gets no requests, because the tier asked for a pause."""
        return self.stores[tier].retry_after_s if tier in self.stores else 0.0

    @property
    def append_only(self) -> frozenset[str]:
        """The tiers that get no deletions for now, because they refuse them."""
        return frozenset(name for name, guard in self._guards.items() if guard.is_resting)

    async def put_policies(self, tier: str, inventory: Inventory, config: Config, runs: Iterable[str]) -> None:
        """Write this node's records of the policies of `runs` to a tier."""
        place = self.observed.places[tier]
        fresh = [policy for run in runs if place for policy in due_policies(inventory, config, tier, place, run)]
        named = {(policy.run, policy.by, policy.given) for policy in fresh}
        fresh += [
            policy
            for policy in self.identity.records_to_put(tier)
            if place and (policy.run, policy.by, policy.given) not in named
        ]
        try:
            fresh = [self.identity.note_put(tier, policy) for policy in fresh]
            for policy in fresh:
                await put_policy(self.stores[tier], tier, policy)
        except StoreRefused:
            if not self.refusal(tier):
                raise
            return  # a policy is useless there, because the tier deletes and replaces nothing
        if fresh:
            self.observed.apply_change(tier, lambda place: place.with_policies(fresh))

    async def write_heads(self, tier: str, inventory: Inventory, runs: Iterable[str]) -> None:
        """Write this node's heads of `runs` to a tier."""
        for run in runs:
            place = self.observed.places[tier]
            if place and (
                head := due_head(inventory, place, run, fills=fills_tier(inventory, self._config, run, tier))
            ):
                launches = [stored.launches for stored in place.heads.get(run, ()) if stored.by == head.by]
                if self.refusal(tier) and launches == [head.launches]:
                    continue  # already said; `due_head` repeats it because merged heads of others cannot be deleted
                await put_head(self.stores[tier], head, place.heads.get(run, ()))
                self.observed.apply_change(tier, partial(Place.with_heads, run=head.run, heads=(head,)))

    async def write_summaries(self, tier: str, inventory: Inventory, runs: Iterable[str]) -> None:
        """Put summaries of the checkpoints of `runs` on a tier, if this node is the run's janitor there."""
        place, index, before = self.observed.places[tier], self._observers[tier].manifests, self.requests(tier)
        if place is None or self.refusal(tier):
            return
        for run in runs:
            if is_janitor(inventory, place, run):
                orphans = [summary_key(own) for own in index.summaries.orphans(run, place.checkpoints)]
                if orphans:
                    await delete_if_permitted(self.stores[tier], orphans)
                await put_summaries(self.stores[tier], index, due_summaries(place, index, run, self.timings))
        self._summary_requests[tier] += self.requests(tier) - before

    async def why_rolled_back(self, tier: str, run: str, spool: Place) -> str | None:
        """Why the history of `run` on a tier is older than the spool remembers; None if it is not."""
        place, url = self.observed.places[tier], self._config.tier_named(tier).url
        if place is None:
            return None
        remembered = next((head.tiers.get(url) for head in spool.heads.get(run, ())), None)
        return await why_rolled_back(self.stores[tier], run, remembered, place.heads.get(run, ()))

    async def sweep_leftovers(self, tier: str, runs: Iterable[str]) -> None:
        """Remove intents and marks that interrupted operations of this node have left, after a start or a failure.

        Checkpoints whose deletion was cut off are added to the inventory of the tier.
        """
        place, guard = self.observed.places[tier], self._guards[tier]
        if guard.has_refused:  # intents of finished flushes, for example
            self._untidy.add(tier)
        if tier not in self._untidy or place is None or guard.is_resting:
            return
        store, tidy, cut_checkpoints = self.stores[tier], True, frozenset[CheckpointId]()
        guard.has_refused = False
        for run in runs:
            is_swept, _, cut, _ = await sweep(store, run, self.who, self.timings)
            await sweep_rank_notes(store, run)
            # A checkpoint whose manifest is still there is left to the plan, so its mark is removed.
            await delete_if_permitted(
                store, [mark for checkpoint, marks in cut.items() if checkpoint in place.checkpoints for mark in marks]
            )
            self._observers[tier].manifests.cut[run] = run_cut = cut.keys() - place.checkpoints.keys()
            tidy, cut_checkpoints = tidy and is_swept, cut_checkpoints | run_cut
        self.observed.apply_change(
            tier, lambda place: replace(place, interrupted_prunes=place.interrupted_prunes | cut_checkpoints)
        )
        if tidy and not guard.has_refused:
            self._untidy.discard(tier)

    def has_leftovers(self, tier: str) -> bool:
        """Whether this node has objects to remove from a tier that are too young to be removed yet."""
        guard = self._guards[tier]
        return (tier in self._untidy or guard.has_refused) and not guard.refused

    def note_failure(self, tier: str) -> None:
        """Note that an operation on a tier may have been cut off, so that `sweep_leftovers` goes over it."""
        self._untidy.add(tier)

    async def prune(
        self,
        checkpoints: Collection[CheckpointId],
        tier: str,
        confirm: Confirm | None = None,
        deleted: Callable[[Collection[CheckpointId]], None] = lambda checkpoints: None,
    ) -> set[CheckpointId]:
        """Prune checkpoints of one run from a tier as `tier_prune.prune` does.

        Invariant: nothing is deleted while it is unknown which chunks the surviving manifests name.

        Returns:
            The checkpoints of which anything was deleted.

        Raises:
            ConfigError: the tier is the place of another one under another name, so nothing is deleted there.
            DeleteRefused: the tier refuses deletions; no mark is left there.
        """
        if len(self.stores) > 1 and not await self._is_separate_place(tier):
            log.info("%s: not pruned yet, because another tier that may be this place does not answer", tier)
            return set()
        eye = self._observers[tier]
        # Before any mark is put, because a mark that cannot be deleted would block flushes.
        for run in {checkpoint.run for checkpoint in checkpoints}:
            await self._guards[tier].check(f"{pruning_prefix(run)}none")
        try:
            pruned, bare, _, is_stale, _ = await prune(
                self.stores[tier],
                checkpoints,
                self.who,
                eye.manifests,
                self.observed.places[tier],
                confirm,
                self.timings,
                deleted,
            )
        except (ManifestError, FormatTooNew) as error:  # of a surviving manifest: flushes need not wait for it
            names = ", ".join(str(checkpoint) for checkpoint in sorted(checkpoints)[:3]) + (
                ", …" if len(checkpoints) > 3 else ""
            )
            log.warning("%s: not pruned yet: %s: %s", tier, names, error)
            return set()
        if is_stale:
            self.observed.invalidate(tier)
        for checkpoint in {*checkpoints, *bare}:
            eye.forget(checkpoint)  # also where only shared chunks are left, which is known now
        for checkpoint in {*pruned, *bare}:
            self.observed.apply_change(tier, partial(Place.without, checkpoint=checkpoint))
        return pruned

    async def _is_separate_place(self, tier: str) -> bool:
        """Whether a tier is known to be a place of its own, or the tiers that do not answer are not relied upon.

        Asked before each prune, because a mount or a link may make two tiers one place at any time. What a tier wants
        that has not answered yet is held anyhow. One that was observed may be this very place, so its copies may be
        those that are about to be deleted.
        """
        async with self._comparing:
            silent = await check_identities(self._config.urls(), self.stores, tier)
            return all(self.observed.places[name] is None for name in silent)

    async def have_newer_copies(self, checkpoint: CheckpointId, inventory: Inventory) -> bool:
        """Whether each tier that is not silent has as many usable newer checkpoints as its retention counts on.

        To be asked before a copy is deleted that no tier has. Manifests that were not read yet are read now, because an
        unusable one does not count.
        """
        for name, place in self.observed.places.items():
            if name in inventory.silent:
                continue
            keep = policy_for(inventory, self._config, checkpoint.run, name).keep_last
            copies = place.copies(checkpoint.run) if place else ()
            newer = sorted(copy.id for copy in copies if copy.usable and copy.id > checkpoint)
            if len(newer) < keep:
                return False
            # Check the newest, and those next to `checkpoint`, because the newest may be on another branch.
            for counted in sorted({*newer[:keep], *newer[-keep:]}):
                if not await self._observers[name].manifests.are_usable(counted):
                    self.observed.invalidate(name)
                    return False
        return True

    async def find_corrupt_parts(self, tier: str, parts: Collection[PartId]) -> dict[PartId, bytes] | None:
        """Ask a tier whether it holds all of these parts.

        Returns:
            The parts whose copies there are proven corrupt, each with its manifest's bytes; None if one of the parts is
                not there any more, or was replaced just now.

        Raises:
            TierdError, OSError: the tier failed, or gave no answer for `holds_s`.
        """
        store, limit_s = self.stores[tier], self.timings.holds_s

        async def ask_part(part: PartId) -> bool | bytes:
            try:
                # At each answer, because a part may have many pages.
                async with suspend_aware_timeout(limit_s) as begin_anew:
                    return await is_part_held(store, part, None, begin_anew)
            except TimeoutError as error:
                raise StoreUnavailable(f"{tier}: did not answer within {limit_s:g} s") from error
            except FormatTooNew:  # a newer tierd reads it, or one with another key
                return True

        answers = await gather_limited(MAX_MANIFEST_READS, [ask_part(part) for part in parts])
        if any(answer is False for answer in answers):
            return None
        return {part: answer for part, answer in zip(parts, answers, strict=True) if isinstance(answer, bytes)}

    async def find_missing_parts(
        self, local: Mapping[PartId, Manifest | None]
    ) -> list[tuple[str, PartId, bytes]] | None:
        """Check the tiers once more before the spool's copies are deleted.

        Returns:
            None if a tier holds all of these parts, or if no tier was seen to have them. Otherwise the tiers and parts
            that lack a chunk that their manifest names, each with that manifest's bytes.
        """
        names = [name for name in self.observed.places if all(self.observed.has(part, name) for part in local)]
        return await find_missing_parts({name: self.stores[name] for name in names}, local)
