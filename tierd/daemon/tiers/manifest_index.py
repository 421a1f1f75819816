"""A tier's manifests: which ones exist, and the facts from those that were read.

Invariant: names alone show whether a checkpoint is complete. So an observation lists every name and reads few
manifests: one for each checkpoint, and those of ranks whose parts the caller has. Each is read once, and again only
when its listing shows that it was replaced.

A prune reads the unread manifests before it deletes anything, because their chunks are unknown; it records them here.
For every manifest read, the shared chunks that it names are remembered, so that no prune reads it again.

The module is longer than 300 lines because observations and prunes fill and use one record of each checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

import xxhash

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId, manifests_prefix
from tierd.core.planning.copies import CheckpointCopy, ManifestFacts, is_complete
from tierd.daemon.concurrency import for_each_limited
from tierd.daemon.tiers.shared_chunks import SharedChunks, SharedChunkTable, chunks_named_by
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.stores.base import ObjectInfo, Store

MAX_MANIFEST_READS = 8  # manifests read at once
_LISTINGS = 5  # of a run in one observation, because a prune may delete what was listed before it is read

Unusable: TypeAlias = ManifestError | FormatTooNew


@dataclass(slots=True)
class _ReadManifest:
    """The facts known from one checkpoint's manifests."""

    # File name -> the token of the object read, and its facts or its defect. It holds the manifests that observations
    # read, and all unusable ones.
    cached_facts: dict[str, tuple[str, ManifestFacts | Unusable]] = field(default_factory=dict)
    # Digest of name and token -> the shared chunks of a usable manifest. Of a million manifests, only this is kept.
    shared: dict[bytes, SharedChunks] = field(default_factory=dict)
    # The owners of shared chunks in the manifests that prunes read.
    bases: set[CheckpointId] = field(default_factory=set)
    listed: int = 0  # how many manifests the last listing showed


@dataclass(slots=True)
class _ListedCheckpoint:
    """One checkpoint in a listing: the ranks whose manifests were listed, the facts of those that were read, and the
    keys of those that were gone by then.
    """

    id: CheckpointId
    ranks: dict[int, set[int] | frozenset[int]] = field(default_factory=dict)
    outcomes: dict[PartId, ManifestFacts | Unusable] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    todo: list[tuple[ObjectInfo, PartId]] = field(default_factory=list)

    def as_copy(self) -> CheckpointCopy:
        return CheckpointCopy(
            self.id,
            {world: frozenset(world_ranks) for world, world_ranks in self.ranks.items() if world_ranks},
            {part: facts for part, facts in self.outcomes.items() if isinstance(facts, ManifestFacts)},
            {part: defect for part, defect in self.outcomes.items() if not isinstance(defect, ManifestFacts)},
        )


class ManifestIndex:
    """The manifests of one tier, as far as they were listed and read.

    Args:
        strict: whether an observation fails if listed manifests vanish again and again before they are read. A reader's
            does, because an older checkpoint that is kept would pass for the newest; a daemon goes on.
    """

    def __init__(self, store: Store, *, strict: bool = True) -> None:
        self.store = store
        self._strict = strict
        self.cut: dict[str, set[CheckpointId]] = {}  # run -> the checkpoints whose deletion was cut off
        self._read: dict[CheckpointId, _ReadManifest] = {}
        # World size -> all its ranks, one object shared by all checkpoints.
        self._full_rank_sets: dict[int, frozenset[int]] = {}
        self._memory = SharedChunkTable()
        self._listed: set[str] = set()  # runs whose names were all listed
        self._absent: dict[str, set[str]] = {}  # run -> the keys that the last listing showed, without an object

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
        return {entry.id: entry.as_copy() for entry in listed if any(entry.ranks.values())}

    async def _list_and_read(
        self, run: str, own_ranks: Collection[int], spare_limit: int, on_answer: Callable[[], None]
    ) -> list[_ListedCheckpoint]:
        """List a run and read manifests, again if one that was listed is gone, because newer ones may not be listed.

        A key that an earlier listing showed without an object does not count: that listing is late.
        """

        async def hear(todo: tuple[_ListedCheckpoint, ObjectInfo, PartId]) -> None:
            await self._read_listed_manifest(*todo)
            on_answer()

        for _ in range(_LISTINGS):
            listed = await self._list(run, own_ranks, spare_limit, on_answer)
            await for_each_limited(
                MAX_MANIFEST_READS, hear, ((entry, info, part) for entry in listed for info, part in entry.todo)
            )
            for entry in listed:
                if not any(isinstance(outcome, ManifestFacts) for outcome in entry.outcomes.values()):
                    await self._find_usable_manifest(entry)
            absent_before = self._absent.get(run, set())
            absent = self._absent[run] = set[str]().union(*(entry.absent for entry in listed))
            if absent <= absent_before:
                return listed
        if self._strict:
            raise StoreUnavailable(
                f"run {run!r}: checkpoints were pruned while they were listed, {_LISTINGS} times; try again"
            )
        return listed

    async def _list(
        self, run: str, own_ranks: Collection[int], spare_limit: int, on_answer: Callable[[], None]
    ) -> list[_ListedCheckpoint]:
        listed: list[_ListedCheckpoint] = []
        spare: list[tuple[_ListedCheckpoint, ObjectInfo, PartId]] = []
        cached: dict[str, tuple[str, ManifestFacts | Unusable]] = {}
        async with aclosing(self.list_manifests(run)) as walk:
            async for info, checkpoint, name, rank, world in walk:
                if not listed or listed[-1].id != checkpoint:
                    self._share(listed[-1:])
                    listed.append(_ListedCheckpoint(checkpoint))
                    cached = self._read.setdefault(checkpoint, _ReadManifest()).cached_facts
                    on_answer()
                entry = listed[-1]
                first, old = not entry.ranks, cached.get(name)
                # Becomes a shared frozenset when complete.
                entry.ranks.setdefault(world, set()).add(rank)  # type: ignore[union-attr]
                is_cached = old is not None and old[0] == info.token
                # A damaged manifest is read until it is usable: S3 gives the same token to the repaired object.
                if old and is_cached and not isinstance(old[1], ManifestError):
                    entry.outcomes[PartId(checkpoint, rank, world)] = old[1]
                elif first or is_cached or rank in own_ranks:
                    entry.todo.append((info, PartId(checkpoint, rank, world)))
                elif spare_limit:
                    spare.append((entry, info, PartId(checkpoint, rank, world)))
                    if len(spare) > spare_limit:
                        spare, spare_limit = [], 0
        self._share(listed[-1:])
        for entry, info, part in spare:
            entry.todo.append((info, part))
        return listed

    async def list_manifests(self, run: str) -> AsyncGenerator[tuple[ObjectInfo, CheckpointId, str, int, int], None]:
        """Yield each manifest's listing with the parts of its key: checkpoint, file name, rank and world size.

        Names are parsed once, because there may be a million keys.
        """
        prefix = manifests_prefix(run)
        names: dict[str, tuple[int, int] | None] = {}
        current: str | None = None
        checkpoint: CheckpointId | None = None
        async with aclosing(self.store.scan(prefix)) as listing:
            async for info in listing:
                directory, _, name = info.key.rpartition("/")
                if directory != current:
                    current, checkpoint = directory, CheckpointId.parse(run, directory[len(prefix) :])
                if name not in names:
                    names[name] = PartId.parse_name(name)
                pair = names[name]
                if pair and checkpoint:
                    yield info, checkpoint, name, *pair

    def _share(self, completed: list[_ListedCheckpoint]) -> None:
        for entry in completed:
            for world, ranks in entry.ranks.items():
                if len(ranks) == world:  # true of nearly all checkpoints
                    entry.ranks[world] = self._full_rank_sets.setdefault(world, frozenset(range(world)))
                else:
                    entry.ranks[world] = frozenset(ranks)

    async def _read_listed_manifest(self, entry: _ListedCheckpoint, info: ObjectInfo, part: PartId) -> None:
        try:
            manifest = await read_manifest(self.store, part, info.key, info.size)
        except ObjectNotFound:  # pruned between the listing and now
            entry.ranks[part.world] = entry.ranks[part.world] - {part.rank}
            entry.absent.add(info.key)
            return
        except (ManifestError, FormatTooNew) as error:
            why = _strip_traceback(error)
            self._note_unusable(entry.id, info, why)
            entry.outcomes[part] = why
        else:
            entry.outcomes[part] = facts = ManifestFacts.of(manifest)
            self._remember(entry.id, info, chunks_named_by(manifest))
            self._read[entry.id].cached_facts[_name(info)] = info.token, facts

    async def _find_usable_manifest(self, entry: _ListedCheckpoint) -> None:
        """Read the manifests of further ranks until one is usable, because one is needed to know the timeline."""
        async with aclosing(self.store.scan(f"{manifests_prefix(entry.id.run)}{entry.id.name}/")) as listing:
            async for info in listing:
                part = PartId.parse_key(info.key)
                if part and part not in entry.outcomes and part.rank in entry.ranks.get(part.world, ()):
                    await self._read_listed_manifest(entry, info, part)
                    if isinstance(entry.outcomes.get(part), ManifestFacts):
                        return

    def bases(self, checkpoints: Collection[CheckpointId]) -> frozenset[CheckpointId]:
        """Return the checkpoints whose chunks are named by those manifests of `checkpoints` that prunes read."""
        return frozenset[CheckpointId]().union(
            *(self._read[checkpoint].bases for checkpoint in checkpoints if checkpoint in self._read)
        )

    # -- for deletions ----------------------------------------------------------------------------------------------

    def unread_count(self, run: str) -> float:
        """Estimate how many listed manifests of a run were not read yet; infinite if the run was never listed."""
        if run not in self._listed:
            return math.inf
        return sum(
            max(0, read.listed - len(read.shared)) for checkpoint, read in self._read.items() if checkpoint.run == run
        )

    def is_read(self, checkpoint: CheckpointId) -> bool:
        """Whether all listed manifests of a checkpoint were read, and all their shared chunks are remembered."""
        read = self._read.get(checkpoint, _ReadManifest())
        with_chunks = [shared for shared in read.shared.values() if shared.chunks is not None]
        return checkpoint.run in self._listed and len(with_chunks) >= read.listed

    def shared_by_checkpoint(self, run: str) -> Iterator[tuple[CheckpointId, SharedChunks]]:
        """Yield the remembered shared chunks of a run's manifests, each with the checkpoint that names them."""
        for checkpoint, read in self._read.items():
            if checkpoint.run == run:
                yield from ((checkpoint, shared) for shared in read.shared.values())

    def shared_chunks(self, checkpoint: CheckpointId, info: ObjectInfo) -> SharedChunks | None:
        """Return the shared chunks that a listed manifest names; None if it was not read or is unusable."""
        read = self._read.get(checkpoint)
        return read.shared.get(_mark(info)) if read else None

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
            async with aclosing(self.list_manifests(run)) as listing:
                async for info, owner, _, _, _ in listing:
                    count[owner] += 1
                    shared = self.shared_chunks(owner, info)
                    if shared is None or (shared.chunks is None and owner in to_delete):
                        yield info

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
            self._read.setdefault(owner, _ReadManifest()).listed = listed
        self._listed.add(run)

    async def read(self, info: ObjectInfo) -> SharedChunks:
        """Read a manifest for the shared chunks that it names; remember them, or that it is unusable."""
        part = PartId.parse_key(info.key)
        try:
            manifest = await read_manifest(self.store, part, info.key, info.size)
        except (ManifestError, FormatTooNew) as error:
            if part:
                self._note_unusable(part.checkpoint, info, _strip_traceback(error))
            raise
        shared = chunks_named_by(manifest)
        self._remember(manifest.part.checkpoint, info, shared)
        self._read[manifest.part.checkpoint].bases |= shared.owners
        return shared

    def _remember(self, checkpoint: CheckpointId, info: ObjectInfo, shared: SharedChunks) -> None:
        self._read.setdefault(checkpoint, _ReadManifest()).shared[_mark(info)] = self._memory.deduplicate(shared)

    def _note_unusable(self, checkpoint: CheckpointId, info: ObjectInfo, why: Unusable) -> None:
        read = self._read.setdefault(checkpoint, _ReadManifest())
        read.cached_facts[_name(info)] = info.token, why
        read.shared.pop(_mark(info), None)

    async def are_usable(self, checkpoint: CheckpointId) -> bool:
        """Whether all manifests of a checkpoint are there and usable; those not read yet are read now."""
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
        return is_complete(ranks)


def _strip_traceback(error: Unusable) -> Unusable:
    """Copy an error without its traceback and causes, because their frames keep the manifest in memory."""
    return type(error)(str(error))


def _name(info: ObjectInfo) -> str:
    return info.key.rpartition("/")[2]


def _mark(info: ObjectInfo) -> bytes:
    return xxhash.xxh3_128_digest(f"{_name(info)} {info.token}".encode())
