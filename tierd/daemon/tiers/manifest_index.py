"""A tier's manifests: which ones exist, and the facts from those that were read.

Invariant: names alone show whether a checkpoint is complete. So an observation lists every name, or a summary that
stands for a checkpoint's names, and reads few manifests: one for each checkpoint, and those of ranks whose parts the
caller has. Each is read once, and again only when a listing shows that it was replaced.

A prune reads the unread manifests before it deletes anything, because their chunks are unknown; it records them here.
For every manifest read, the shared chunks that it names are remembered, so that no prune reads it again. A summary
takes the place of that only while a listing shows exactly the manifests that its maker read.

The module is longer than 300 lines because observations and prunes use the same listings and reads.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId, manifests_prefix
from tierd.core.manifest_codec import decode
from tierd.core.planning.checkpoint_summary import CheckpointSummary
from tierd.core.planning.copies import CheckpointCopy, ManifestFacts, is_complete
from tierd.daemon.concurrency import for_each_limited
from tierd.daemon.tiers.manifest_listing import (
    MAX_MANIFEST_READS,
    ListedCheckpoint,
    ListedManifest,
    ManifestListing,
    list_checkpoints,
)
from tierd.daemon.tiers.shared_chunks import (
    ManifestRecords,
    ReadManifest,
    SharedChunks,
    chunks_named_by,
    strip_traceback,
)
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.stores.base import PAGE, ObjectInfo, Store

_BATCH = 32  # manifests that are read together, where the store reads small objects so
_SLOW_BYTES = 16 << 10
_LISTINGS = 5  # of a run in one observation, because a prune may delete what was listed before it is read
# Seconds from one listing of all names of a run with summaries to the next: a minute for each of its requests.
_PER_PAGE_S, _LEAST_S, _MOST_S = 60.0, 600.0, 86_400.0
# Of its own, because a reader may run in a training process, whose generator is the user's.
_jitter = random.Random()  # noqa: S311


class ManifestIndex(ManifestRecords):
    """The manifests of one tier, as far as they were listed and read.

    Args:
        strict: whether an observation fails if listed manifests vanish again and again before they are read. A reader's
            does, because an older checkpoint that is kept would pass for the newest; a daemon goes on.
    """

    def __init__(self, store: Store, *, strict: bool = True) -> None:
        super().__init__(store)
        self._strict = strict
        # World size -> all its ranks, one object shared by all checkpoints.
        self._full_rank_sets: dict[int, frozenset[int]] = {}
        self._absent: dict[str, set[str]] = {}  # run -> the keys that the last listing showed, without an object
        # Run -> the checkpoints of the last observation for which a summary stood.
        self._unlisted: dict[str, set[CheckpointId]] = {}
        # Runs with summaries -> when all their names are listed again, monotonic seconds.
        self._list_all_at: dict[str, float] = {}

    # -- observing --------------------------------------------------------------------------------------------------

    async def observe(
        self,
        run: str,
        own_ranks: Collection[int],
        *,
        spare_reads: int = 0,
        on_answer: Callable[[], None] = lambda: None,
    ) -> dict[CheckpointId, CheckpointCopy]:
        """Return every checkpoint of `run` that has any manifest.

        Args:
            own_ranks: the ranks whose manifests are all read.
            spare_reads: also read all others if they are at most this many.

        Raises:
            StoreUnavailable: listed manifests vanished again and again before they were read, if `strict`.
        """
        # Taken first, because a concurrent observation may add more.
        before = {checkpoint for checkpoint in self._read if checkpoint.run == run}
        self._memory.count()
        listed = await self._list_and_read(run, own_ranks, spare_reads, on_answer)
        for pruned in before - {entry.id for entry in listed}:
            self._read.pop(pruned, None)
        for entry in listed:
            if entry.id in self._read:
                self._read[entry.id].listed = sum(map(len, entry.ranks.values()))
        self._listed.add(run)
        self._unlisted[run] = {entry.id for entry in listed if entry.token}
        return {entry.id: entry.as_copy(self.mismatched(entry.id)) for entry in listed if any(entry.ranks.values())}

    async def observe_listed(
        self, checkpoints: Collection[CheckpointId], own_ranks: Collection[int], on_answer: Callable[[], None]
    ) -> dict[CheckpointId, CheckpointCopy | None]:
        """List those of these checkpoints again for which a summary stood; None for one that has no manifest."""
        copies: dict[CheckpointId, CheckpointCopy | None] = {}
        for checkpoint in sorted(checkpoints):
            if checkpoint not in self._unlisted.get(checkpoint.run, ()):
                continue
            entry = await self._list_one(checkpoint, own_ranks, on_answer)
            if entry:
                await self._read_listed([entry], on_answer)
                self._read[checkpoint].listed = sum(map(len, entry.ranks.values()))
            is_there = entry is not None and any(entry.ranks.values())
            copies[checkpoint] = entry.as_copy(self.mismatched(checkpoint)) if entry and is_there else None
        return copies

    def mismatched(self, checkpoint: CheckpointId) -> Mapping[PartId, PartId]:
        """Return the parts that do not belong to those of other ranks, by all manifests that were ever read."""
        return self._read[checkpoint].mismatched if checkpoint in self._read else {}

    def list_all(self, run: str | None = None) -> None:
        """List all names of a run, or of every run, at the next observation, because a summary may be wrong."""
        for listed_run in [run] if run else list(self._list_all_at):
            self._list_all_at[listed_run] = -math.inf

    async def _list_and_read(
        self, run: str, own_ranks: Collection[int], spare_limit: int, on_answer: Callable[[], None]
    ) -> list[ListedCheckpoint]:
        """List a run and read manifests, again if one that was listed is gone, because newer ones may not be listed.

        A key that an earlier listing showed without an object does not count: that listing is late.
        """
        for _ in range(_LISTINGS):
            listed = await self._list(run, own_ranks, spare_limit, on_answer)
            await self._read_listed(listed, on_answer)
            absent_before = self._absent.get(run, set())
            absent = self._absent[run] = set[str]().union(*(entry.absent for entry in listed))
            if absent <= absent_before:
                return listed
        if self._strict:
            raise StoreUnavailable(
                f"run {run!r}: checkpoints were pruned while they were listed, {_LISTINGS} times; try again"
            )
        return listed

    async def _read_listed(self, listed: Collection[ListedCheckpoint], on_answer: Callable[[], None]) -> None:
        async def read(batch: Sequence[tuple[ListedCheckpoint, ObjectInfo, PartId]]) -> None:
            objects = await self.store.get_small([info.key for _, info, _ in batch])
            for (entry, info, part), data in zip(batch, objects, strict=True):
                if data and len(data) > _SLOW_BYTES:
                    await asyncio.sleep(0)  # others may run between two that take a millisecond each
                try:
                    self._note_manifest(entry, info, part, decode(data or b"", part))
                except (ManifestError, FormatTooNew):  # read alone, twice if it is wrong
                    await self._read_listed_manifest(entry, info, part)
                on_answer()

        todo = [(entry, info, part) for entry in listed for info, part in entry.todo]
        size = min(_BATCH, 1 + len(todo) // MAX_MANIFEST_READS)
        await for_each_limited(
            MAX_MANIFEST_READS, read, [todo[start : start + size] for start in range(0, len(todo), size)]
        )
        for entry in listed:
            if not any(isinstance(outcome, ManifestFacts) for outcome in entry.outcomes.values()):
                await self._find_usable_manifest(entry)

    async def _list(
        self, run: str, own_ranks: Collection[int], spare_limit: int, on_answer: Callable[[], None]
    ) -> list[ListedCheckpoint]:
        async with aclosing(ManifestListing(self.store, run, on_answer=on_answer)) as listing:
            await listing.read_summaries()
            await self.summaries.read(run, listing.summaries, on_answer)
            is_summarised = any(self.summaries.get(checkpoint) for checkpoint in listing.summaries)
            next_s = self._next_time(run, listing)
            if is_summarised and time.monotonic() < self._list_all_at.setdefault(run, next_s):
                listed = await self._list_by_summaries(run, own_ranks, spare_limit, on_answer)
                if listed is not None:
                    return listed
            listed, spare = [], list[tuple[ListedCheckpoint, ListedManifest]]()
            async with aclosing(listing.checkpoints()) as checkpoints:
                async for checkpoint, manifests in checkpoints:
                    listed.append(self._note_listed(checkpoint, manifests, own_ranks))
                    if spare_limit:
                        chosen = {info.key for info, _ in listed[-1].todo}
                        spare += [
                            (listed[-1], manifest)
                            for manifest in manifests
                            if manifest.info.key not in chosen
                            and PartId(checkpoint, manifest.rank, manifest.world) not in listed[-1].outcomes
                        ]
                    if len(spare) > spare_limit:
                        spare, spare_limit = [], 0
            if listing.summaries:
                self._list_all_at[run] = self._next_time(run, listing)
        for entry, manifest in spare:
            entry.todo.append((manifest.info, PartId(entry.id, manifest.rank, manifest.world)))
        return listed

    def _next_time(self, run: str, listing: ManifestListing) -> float:
        """Return when to list all names of a run again that has summaries."""
        names = sum(
            found[1].world_size for checkpoint in listing.summaries if (found := self.summaries.get(checkpoint))
        )
        pause_s = min(_MOST_S, max(_LEAST_S, _PER_PAGE_S * max(listing.pages, names // PAGE)))
        return time.monotonic() + pause_s * _jitter.uniform(0.8, 1.0)

    async def _list_by_summaries(
        self, run: str, own_ranks: Collection[int], spare_limit: int, on_answer: Callable[[], None]
    ) -> list[ListedCheckpoint] | None:
        """List the checkpoints' names, and the manifests of those alone that have no summary.

        Returns:
            None if that is not possible, or costs more than to list all manifests.
        """
        names = await self.store.directories(manifests_prefix(run))
        if names is None:
            return None
        on_answer()
        checkpoints = [parsed for name in sorted(names) if (parsed := CheckpointId.parse(run, name))]
        worlds = [found[1].world_size for checkpoint in checkpoints if (found := self.summaries.get(checkpoint))]
        others, most = len(checkpoints) - len(worlds), max(worlds, default=0)
        if others * (1 + most // PAGE) > 1 + sum(worlds) // PAGE or sum(worlds) <= spare_limit:
            return None
        listed = []
        for checkpoint in checkpoints:
            found = self.summaries.get(checkpoint)
            entry = (
                self._note_summarised(checkpoint, *found, own_ranks)
                if found
                else await self._list_one(checkpoint, own_ranks, on_answer)
            )
            if entry:
                listed.append(entry)
        return listed

    async def _list_one(
        self, checkpoint: CheckpointId, own_ranks: Collection[int], on_answer: Callable[[], None]
    ) -> ListedCheckpoint | None:
        entry = None
        async for _, manifests in list_checkpoints(self.store, checkpoint.run, checkpoint, on_answer):
            entry = self._note_listed(checkpoint, manifests, own_ranks)
        return entry

    def _note_summarised(
        self, checkpoint: CheckpointId, token: str, summary: CheckpointSummary, own_ranks: Collection[int]
    ) -> ListedCheckpoint:
        """Take a summary for the listing of a checkpoint. Manifests that were read count as they were then."""
        world = summary.world_size
        entry = ListedCheckpoint(checkpoint, {world: self._all_ranks(world)}, token=token)
        read = self._use_summary(checkpoint, summary)
        assert read.summary_facts is not None
        entry.outcomes[PartId(checkpoint, 0, world)] = read.summary_facts
        todo = {PartId(checkpoint, rank, world) for rank in own_ranks if rank < world}
        for name, (_, outcome) in read.cached_facts.items():
            pair = PartId.parse_name(name)
            if pair and pair[1] == world:
                part = PartId(checkpoint, *pair)
                if isinstance(outcome, ManifestError):
                    todo.add(part)
                else:
                    entry.outcomes[part] = outcome
                    todo.discard(part)
        entry.todo = [(ObjectInfo(part.manifest_key, 0, ""), part) for part in sorted(todo)]
        return entry

    def _note_listed(
        self, checkpoint: CheckpointId, manifests: list[ListedManifest], own_ranks: Collection[int]
    ) -> ListedCheckpoint:
        """Compare a checkpoint's listed manifests with what is known of them; the result's `todo` are to be read."""
        by_world: dict[int, set[int]] = {}
        for manifest in manifests:
            by_world.setdefault(manifest.world, set()).add(manifest.rank)
        entry = ListedCheckpoint(
            checkpoint,
            {
                world: self._all_ranks(world) if len(ranks) == world else frozenset(ranks)
                for world, ranks in by_world.items()
            },
        )
        summary = self._confirmed_summary(checkpoint, manifests)
        read = self._use_summary(checkpoint, summary)
        if summary and read.summary_facts:
            entry.outcomes[PartId(checkpoint, 0, summary.world_size)] = read.summary_facts
        cached, is_first = read.cached_facts, summary is None
        for info, name, rank, world in manifests:
            old = cached.get(name)
            if old and summary and not old[0]:
                old = cached[name] = info.token, old[1]
            is_cached = old is not None and old[0] == info.token
            # A damaged manifest is read until it is usable: S3 gives the same token to the repaired object.
            if old and is_cached and not isinstance(old[1], ManifestError):
                entry.outcomes[PartId(checkpoint, rank, world)] = old[1]
            elif is_first or is_cached or rank in own_ranks:
                entry.todo.append((info, PartId(checkpoint, rank, world)))
            is_first = False
        return entry

    def _all_ranks(self, world: int) -> frozenset[int]:
        # One object for nearly all checkpoints.
        return self._full_rank_sets.get(world) or self._full_rank_sets.setdefault(world, frozenset(range(world)))

    async def _read_listed_manifest(self, entry: ListedCheckpoint, info: ObjectInfo, part: PartId) -> None:
        try:
            manifest = await read_manifest(self.store, part, info.key, info.size)
        except ObjectNotFound:  # pruned between the listing and now
            entry.ranks[part.world] = entry.ranks[part.world] - {part.rank}
            entry.absent.add(info.key)
            if entry.token:
                self.summaries.distrust(entry.id)
            return
        except (ManifestError, FormatTooNew) as error:
            why = strip_traceback(error)
            self._note_unusable(entry.id, info, why)
            entry.outcomes[part] = why
        else:
            self._note_manifest(entry, info, part, manifest)

    async def _find_usable_manifest(self, entry: ListedCheckpoint) -> None:
        """Read the manifests of further ranks until one is usable, because one is needed to know the timeline."""
        async with aclosing(self.store.scan(f"{manifests_prefix(entry.id.run)}{entry.id.name}/")) as listing:
            async for info in listing:
                part = PartId.parse_key(info.key)
                if part and part not in entry.outcomes and part.rank in entry.ranks.get(part.world, ()):
                    await self._read_listed_manifest(entry, info, part)
                    if isinstance(entry.outcomes.get(part), ManifestFacts):
                        return

    # -- for deletions ----------------------------------------------------------------------------------------------

    async def read_all(self, run: str, to_delete: Collection[CheckpointId]) -> None:
        """Read all manifests of a run that were not read yet.

        Args:
            to_delete: the checkpoints to delete, whose damaged manifests are ignored.

        Raises:
            ManifestError: a manifest that is not one of `to_delete` is damaged.
            FormatTooNew: any manifest needs a newer tierd.
        """

        count: Counter[CheckpointId] = Counter()

        async def unknown() -> AsyncGenerator[ObjectInfo]:
            async with aclosing(ManifestListing(self.store, run)) as listing:
                await listing.read_summaries()
                await self.summaries.read(run, listing.summaries)
                async with aclosing(listing.checkpoints()) as checkpoints:
                    async for owner, manifests in checkpoints:
                        count[owner] = len(manifests)
                        summarised = self.shared_chunks_of_all(owner, manifests)
                        for manifest in manifests:
                            shared = self.shared_chunks(owner, manifest.info) or summarised
                            if shared is None or (shared.chunks is None and owner in to_delete):
                                yield manifest.info

        async def learn(info: ObjectInfo) -> None:
            part = PartId.parse_key(info.key)
            try:
                await self.read(info)
            except ObjectNotFound:
                pass
            except ManifestError:
                if part is None or part.checkpoint not in to_delete:
                    raise

        async with aclosing(unknown()) as todo:
            await for_each_limited(MAX_MANIFEST_READS, learn, todo)
        for owner, listed in count.items():
            self._read.setdefault(owner, ReadManifest()).listed = listed
        self._listed.add(run)

    async def read(self, info: ObjectInfo) -> SharedChunks:
        """Read a manifest for the shared chunks that it names; remember them, or that it is unusable."""
        part = PartId.parse_key(info.key)
        try:
            manifest = await read_manifest(self.store, part, info.key, info.size)
        except (ManifestError, FormatTooNew) as error:
            if part:
                self._note_unusable(part.checkpoint, info, strip_traceback(error))
            raise
        shared = chunks_named_by(manifest)
        self._remember(manifest.part.checkpoint, info, shared)
        self._read[manifest.part.checkpoint].bases |= shared.owners
        self._read[manifest.part.checkpoint].note_division(manifest.part, manifest.division)
        return shared

    async def are_usable(self, checkpoint: CheckpointId) -> bool:
        """Whether all manifests of a checkpoint are there, usable and of one state; those not read yet are read now."""
        ranks: dict[int, set[int]] = {}
        todo = []
        async with aclosing(self.store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/")) as listing:
            async for info in listing:
                part = PartId.parse_key(info.key)
                if part:
                    ranks.setdefault(part.world, set()).add(part.rank)
                    if self.shared_chunks(checkpoint, info) is None:
                        todo.append(info)
        try:
            await for_each_limited(MAX_MANIFEST_READS, self.read, todo)
        except (ObjectNotFound, ManifestError, FormatTooNew):
            return False
        return is_complete(ranks) and not self.mismatched(checkpoint)
