"""Settle which objects a prune deletes, after its marks are put, from manifests that were read or are read now.

Invariant: a chunk is deleted only if every manifest that names it is deleted too. Before that, the chunk's checkpoint
is marked and all other manifests are listed. Chunks of a checkpoint whose own manifests are kept are all kept.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from tierd.core.errors import ManifestError, ObjectNotFound, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import CheckpointCopy
from tierd.core.planning.place import Place
from tierd.daemon.concurrency import for_each_limited
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.daemon.tiers.intents import Marks, sweep, why_kept
from tierd.daemon.tiers.manifest_index import ManifestIndex
from tierd.daemon.tiers.manifest_listing import MAX_MANIFEST_READS, ListedManifest, ManifestListing
from tierd.daemon.tiers.shared_chunks import NamedChunks, SharedChunks, chunks_named_by
from tierd.daemon.tiers.tier_objects import manifest_bytes, read_manifest
from tierd.stores.base import ObjectInfo, Store

# Given the surviving checkpoints that have a manifest, returns the checkpoints that are still to be deleted.
Confirm: TypeAlias = Callable[[Collection[CheckpointId]], Awaitable[frozenset[CheckpointId]]]


@dataclass(slots=True)
class ListedManifests:
    """The result of listing all manifests of a run."""

    named_chunks: NamedChunks  # the chunks that surviving manifests name
    # Checkpoint to delete -> the keys of its manifests.
    deleted_keys: dict[CheckpointId, list[str]] = field(default_factory=dict)
    shared: list[SharedChunks] = field(default_factory=list)  # the shared chunks that the checkpoints to delete name
    # The surviving checkpoints, those included of which a manifest is about to be put.
    surviving: set[CheckpointId] = field(default_factory=set)
    # The surviving checkpoints that have a manifest, each with its ranks by world size.
    surviving_ranks: dict[CheckpointId, dict[int, set[int]]] = field(default_factory=dict)
    # The summaries that were listed before the manifests.
    summaries: dict[CheckpointId, ObjectInfo] = field(default_factory=dict)
    # Checkpoints to delete that have more parts than the decision knew -> how that is known.
    grown_reasons: dict[CheckpointId, str] = field(default_factory=dict)

    @property
    def bases(self) -> set[CheckpointId]:
        """The checkpoints whose chunks the deleted checkpoints share."""
        return set().union(*(shared_chunks.owners for shared_chunks in self.shared))

    def orphans(self, to_delete: Collection[CheckpointId]) -> dict[CheckpointId, frozenset[int]]:
        """Return, by checkpoint, the chunks that only `to_delete` name and whose own checkpoint has no manifest."""
        orphans = {}
        for owner in self.bases - self.surviving - set(to_delete):
            marks = frozenset[int]().union(
                *((shared_chunks.chunks or {}).get(owner, ()) for shared_chunks in self.shared)
            )
            if unnamed := marks - self.named_chunks.of_owner(owner):
                orphans[owner] = unnamed
        return orphans


@dataclass(slots=True)
class Deletions:
    """The objects that one prune deletes, settled after the marks: no surviving manifest names them."""

    to_delete: set[CheckpointId]
    listed: ListedManifests
    orphans: dict[CheckpointId, frozenset[int]]  # chunks of other, already pruned checkpoints that are deleted too
    cut: dict[CheckpointId, list[str]]  # checkpoint -> the marks of an earlier interrupted deletion
    # Checkpoints that are kept although they were to be deleted, each with the reason.
    kept_reasons: dict[CheckpointId, str]
    is_stale: bool  # whether the tier has lost a checkpoint that the decision counted on

    def is_deleted(self, owner: CheckpointId, mark: int) -> bool:
        """Whether a chunk stored under `owner` is deleted."""
        if owner in self.to_delete:
            return mark not in self.listed.named_chunks.of_owner(owner)
        return mark in self.orphans.get(owner, ())


@dataclass(slots=True)
class PrunePass:
    """One prune's decision about which objects it can delete.

    Invariant: it puts marks first and lists afterwards, again after each further mark. So a flush or a pin that the
    listing does not show sees the marks.
    """

    store: Store
    to_delete: set[CheckpointId]
    who: str
    manifest_index: ManifestIndex
    marks: Marks
    decided_on: Place
    confirm: Confirm | None = None
    timings: DaemonTimings = USUAL

    async def settle(self, *, listed: bool) -> Deletions:
        """Put marks and list until every chunk to delete belongs to a marked checkpoint.

        Args:
            listed: whether the decision rests on the present listing, instead of on `decided_on`.
        """
        run, owners, remembered = self.marks.run, *self._remembered()
        why_held: dict[CheckpointId, str] = {}
        is_stale = False
        await self.marks.put_marks(self.to_delete | remembered)
        while True:
            swept = await sweep(self.store, run, self.who, self.timings)
            cut = {
                checkpoint: other_keys
                for checkpoint, keys in swept.cut.items()
                if (other_keys := sorted({*keys} - {*self.marks.keys}))
            }
            self.manifest_index.cut[run] = set(cut)
            manifests = ListedManifests(NamedChunks(owners))
            await self._read_intents(manifests, swept.intents)
            await self._list(manifests, owners, listed=listed)
            if manifests.grown_reasons:
                self.to_delete -= manifests.grown_reasons.keys()
                why_held |= manifests.grown_reasons
            elif not manifests.bases <= owners:
                owners |= manifests.bases
            elif not (orphans := manifests.orphans(self.to_delete)).keys() <= self.marks.owners:
                await self.marks.put_marks(orphans.keys())
            elif missing_part := await self._find_missing_part(manifests.surviving_ranks):
                is_stale = True
                why_held |= dict.fromkeys(self.to_delete, f"{missing_part}, which was to stay, is not there any more")
                self.to_delete.clear()
            elif mismatched := self._find_mismatched():
                is_stale = True
                why_held |= dict.fromkeys(self.to_delete, f"{mismatched}, which was to stay, cannot be restored")
                self.to_delete.clear()
            elif spared := await self._spared(swept.pins, manifests.surviving_ranks):
                self.to_delete -= spared.keys()
                why_held |= spared
            else:
                return Deletions(self.to_delete, manifests, orphans, cut, why_held, is_stale)

    async def _find_missing_part(
        self, listed_ranks: Mapping[CheckpointId, Mapping[int, Collection[int]]]
    ) -> PartId | None:
        """Return a part that the decision counted on and the tier has no more: another node may have quarantined it.

        A part that the listing does not show is read, because some stores list what is there only after a while. The
        first lost part ends the reads, because the marks hold up flushes and pins meanwhile.
        """
        unseen = [
            PartId(copy.id, rank, world)
            for copy in self._counted()
            for world, ranks in copy.ranks.items()
            for rank in ranks.difference(listed_ranks.get(copy.id, {}).get(world, ()))
        ]
        missing: list[PartId] = []

        async def read(part: PartId) -> None:
            if missing:
                return
            try:
                await manifest_bytes(self.store, part)
            except ObjectNotFound:
                missing.append(part)

        await for_each_limited(MAX_MANIFEST_READS, read, unseen)
        return min(missing, default=None)

    def _find_mismatched(self) -> CheckpointId | None:
        """Return a checkpoint that the decision counted on, and whose parts, as was read now, do not match."""
        return next((copy.id for copy in self._counted() if self.manifest_index.mismatched(copy.id)), None)

    def _counted(self) -> list[CheckpointCopy]:
        """Return the copies on which the decision counts; none if nothing is left to delete, so `settle` ends."""
        copies = self.decided_on.copies(self.marks.run) if self.to_delete else ()
        return [copy for copy in copies if copy.usable and copy.id not in self.to_delete]

    async def _spared(
        self, pins: Collection[CheckpointId], listed: Collection[CheckpointId]
    ) -> dict[CheckpointId, str]:
        """Return the checkpoints that have become wanted since the decision: marks and listings take long on a
        slow tier. Asked last, so that only the deletions themselves come after it."""
        if pinned := self.to_delete.intersection(pins):
            return dict.fromkeys(pinned, "it is pinned")
        if self.confirm is None or not self.to_delete:
            return {}
        confirmed = await self.confirm(listed)
        return dict.fromkeys(self.to_delete.difference(confirmed), "it is wanted since it was to be deleted")

    def _remembered(self) -> tuple[set[CheckpointId], set[CheckpointId]]:
        """Return, from manifests read before, the owners of all chunks that the checkpoints to delete name.

        The second set holds the owners that have chunks to delete with them.
        """
        manifests = ListedManifests(NamedChunks(()))
        surviving: list[SharedChunks] = []
        for checkpoint, shared in self.manifest_index.shared_by_checkpoint(self.marks.run):
            (manifests.shared if checkpoint in self.to_delete else surviving).append(shared)
            manifests.surviving.add(checkpoint)
        owners = manifests.bases | self.to_delete
        if owners <= manifests.surviving:
            return owners, set()
        manifests.named_chunks = NamedChunks(owners)
        for shared in surviving:
            manifests.named_chunks.add(shared)
        return owners, set(manifests.orphans(self.to_delete))

    async def _read_intents(self, manifests: ListedManifests, intents: list[tuple[str, PartId]]) -> None:
        """Read the intents, that is the manifests that are about to be put.

        Intents are read before manifests are listed. If an intent was deleted in between, the listing shows its
        manifest.
        """

        async def read(intent: tuple[str, PartId]) -> None:
            try:
                manifests.named_chunks.add(
                    chunks_named_by(await read_manifest(self.store, None, intent[0]), include_own=True)
                )
            except ObjectNotFound:
                await self._check_gone(intent[0])

        await for_each_limited(MAX_MANIFEST_READS, read, intents)
        for checkpoint, why in why_kept(intents).items():
            if checkpoint in self.to_delete:
                manifests.grown_reasons[checkpoint] = why
            else:
                manifests.surviving.add(checkpoint)

    async def _check_gone(self, key: str) -> None:
        """Check that a listed object that was not found is not listed any more: the chunks that it names must stay.

        Raises:
            StoreUnavailable: the object is listed still, as on a directory tier that remembers a missing name.
        """
        async with aclosing(self.store.scan(key)) as listing:
            first = await anext(listing, None)
        if first is not None and first.key == key:
            raise StoreUnavailable(
                f"{key} is listed, but cannot be found; nothing is deleted without reading it. If that does not end, "
                "delete this key in the store, or repair the store's index"
            )

    async def _list(self, manifests: ListedManifests, owners: Collection[CheckpointId], *, listed: bool) -> None:
        index = self.manifest_index

        async def unknown() -> AsyncGenerator[tuple[ObjectInfo, CheckpointId]]:
            async with aclosing(ManifestListing(self.store, self.marks.run)) as listing:
                await listing.read_summaries()
                manifests.summaries = listing.summaries
                async with aclosing(listing.checkpoints()) as checkpoints:
                    async for owner, group in checkpoints:
                        for entry in self._note_listed(manifests, owner, group, owners, listed=listed):
                            yield entry

        async def read(entry: tuple[ObjectInfo, CheckpointId]) -> None:
            info, owner = entry
            if owner in self.to_delete:
                with suppress(ObjectNotFound, ManifestError):  # a damaged manifest names no chunk
                    manifests.shared.append(await index.read(info))
                return
            try:
                manifests.named_chunks.add(await index.read(info))
            except ObjectNotFound:
                await self._check_gone(info.key)

        async with aclosing(unknown()) as todo:
            await for_each_limited(MAX_MANIFEST_READS, read, todo)

    def _note_listed(
        self,
        manifests: ListedManifests,
        owner: CheckpointId,
        group: list[ListedManifest],
        owners: Collection[CheckpointId],
        *,
        listed: bool,
    ) -> Iterator[tuple[ObjectInfo, CheckpointId]]:
        """Note a checkpoint's listed manifests, and yield those whose chunks are not known."""
        summarised = self.manifest_index.shared_chunks_of_all(owner, group)
        is_known = summarised is not None and summarised.chunks is not None
        for info, _, rank, world in group:
            shared = summarised if is_known else self.manifest_index.shared_chunks(owner, info) or summarised
            if owner in self.to_delete:
                manifests.deleted_keys.setdefault(owner, []).append(info.key)
                if not listed and not self.decided_on.lists(PartId(owner, rank, world)):
                    manifests.grown_reasons[owner] = "more of it has come since it was looked at"
                if shared and shared.chunks is not None:
                    manifests.shared.append(shared)
                else:
                    yield info, owner
                continue
            manifests.surviving.add(owner)
            manifests.surviving_ranks.setdefault(owner, {}).setdefault(world, set()).add(rank)
            if shared is None or (shared.chunks is None and not shared.owners.isdisjoint(owners)):
                yield info, owner
            else:
                manifests.named_chunks.add(shared)
