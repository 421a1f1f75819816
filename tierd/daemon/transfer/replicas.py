"""The tiers' copies of one part, and access to any chunk of it from a tier that has it right.

Invariant: a chunk is given up only after every tier was asked. A chunk is called corrupt only if every tier could be
asked; otherwise the error is `StoreUnavailable`. Bytes are verified as stored and as raw before they are returned. A
digest is sufficient proof: a chunk is right under any key, and regardless of the state of the manifest that named it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from tierd.codec.chunk_codec import RAW, decode
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreUnavailable, TierdError
from tierd.core.ids import (
    CheckpointId,
    PartId,
    chunk_directories,
    chunk_group,
    chunk_groups,
    chunks_prefix,
    group_owner,
)
from tierd.core.manifest import Chunk, ChunkPlace, ContentId, Manifest, is_patch
from tierd.daemon.concurrency import Buffers, gather_limited, thread_uncancelled
from tierd.daemon.tiers.tier_objects import get_object, get_recognized, read_manifest, read_until_certain
from tierd.stores.base import Buffer, ObjectInfo, Store, list_groups

# Seconds that a tier has for a manifest, all retries included, because another tier may have the whole part.
_ELSEWHERE = 1000  # checkpoints whose keys are searched for a lost chunk, newest first

ANSWER_S = 120.0  # that a tier may take for its manifest, all retries included


@dataclass(slots=True)
class Replicas:
    """The tiers' copies of one part."""

    part: PartId
    stores: Mapping[str, Store]
    # By tier, a readable manifest that agrees with the reference.
    manifests: dict[str, Manifest] = field(default_factory=dict)
    defects: dict[str, str] = field(default_factory=dict)  # by tier, why its copy is proven bad
    unavailable: dict[str, str] = field(default_factory=dict)  # by tier, why it could not be asked
    used_tiers: set[str] = field(default_factory=set)
    reference: Manifest | None = None  # the manifest with which the others must agree
    answer_s: float = ANSWER_S
    # Returns the raw bytes of a chunk that the caller holds already, verified by the call; None if it does not.
    held: Callable[[Chunk], Buffer | None] | None = None
    read_object: Callable[..., Awaitable[Buffer]] = get_object  # as `get_object`, perhaps from a cache
    # By tier, every readable manifest, also if it contradicts the reference.
    _readable: dict[str, Manifest] = field(default_factory=dict)
    # Tier -> other checkpoints that have chunks there, the newest first -> the prefixes of these chunks.
    _other_owners: dict[str, dict[CheckpointId, set[str]]] = field(default_factory=dict)

    async def read_manifests(self) -> None:
        """Read the part's manifest on every tier."""
        answers = await gather_limited(len(self.stores), [self._answer(name) for name in self.stores])
        for name, answer in zip(self.stores, answers, strict=True):
            match answer:
                case Manifest():
                    self.manifests[name] = answer
                case ObjectNotFound():
                    pass
                case ManifestError():
                    self.defects[name] = str(answer)
                case _:  # unavailable, refused, or of a newer format: says nothing about the bytes
                    self.unavailable[name] = str(answer)

    async def _answer(self, name: str) -> Manifest | TierdError:
        try:
            async with asyncio.timeout(self.answer_s):
                return await read_manifest(self.stores[name], self.part)
        except TimeoutError:
            return StoreUnavailable(f"{name}: did not answer within {self.answer_s:.0f} s")
        except TierdError as error:
            return error

    def first_content(self) -> Manifest:
        """Return the first of `contents`. Raises `lost_error` if there is none."""
        for manifest in self.contents():
            return manifest
        raise self.lost_error("its manifest", self.unavailable)

    def contents(self) -> list[Manifest]:
        """Return one manifest for each distinct content that the tiers' manifests describe.

        If two manifests contradict each other, one is wrong. Manifests that only this node's key can have made come
        first.
        """
        distinct: list[Manifest] = []
        readable = (self._readable or self.manifests).items()
        for _, manifest in sorted(readable, key=lambda item: not self.stores[item[0]].is_authentic):
            if not any(manifest.same_content(earlier) for earlier in distinct):
                distinct.append(manifest)
        return distinct

    def trust(self, reference: Manifest) -> None:
        """Take `reference` as right, and record tiers whose manifest describes other content as defective."""
        self.reference = reference
        self._readable = self._readable or dict(self.manifests)
        for name, manifest in self._readable.items():
            if manifest.same_content(reference):
                self.manifests[name] = manifest
                self.defects.pop(name, None)
            else:
                self.manifests.pop(name, None)
                self.defects[name] = f"{name}: its manifest describes other content than the other copies"

    def weight(self, file: int, index: int) -> int:
        """Return the bytes of memory that reading a chunk takes: raw bytes and, in another encoding, stored bytes."""
        assert self.reference is not None
        raw = self.reference.files[file].chunks[index].size
        stored = [manifest.files[file].chunks[index].stored for manifest in self.manifests.values()]
        if any(encoded and encoded.base for encoded in stored):
            return 3 * raw  # of the base and of the chunk, and the blocks that differ
        if stored and all(encoded and encoded.codec == RAW for encoded in stored):
            return max(store.memory_for(raw) for store in self.stores.values())
        return raw + max([raw, *(encoded.size for encoded in stored if encoded)])

    async def chunk(
        self, file: int, index: int, path: str, into: memoryview | None = None, buffers: Buffers | None = None
    ) -> Buffer:
        """Return the verified raw bytes of one chunk, from the first tier that has them right.

        Args:
            into: memory of the chunk's size in which the bytes may be placed. The caller must not use it until the call
                ends. Only the result says where the bytes are.
            buffers: memory for the stored bytes.

        Raises:
            CorruptChunk: every copy is proven bad or missing.
            StoreUnavailable: no copy was right, and not all tiers could be asked.
        """
        assert self.reference is not None
        expected = self.reference.files[file].chunks[index]
        if (raw := await self._held(expected)) is not None:
            return raw
        unavailable = dict(self.unavailable)
        for name, manifest in list(self.manifests.items()):
            read = partial(self._read, name, manifest.files[file].chunks[index], (file, index), into, buffers)
            try:
                return await read_until_certain(read)
            except CorruptChunk as error:
                self.defects[name] = str(error)
            except TierdError as error:
                unavailable[name] = str(error)
                self.manifests[name] = self.manifests.pop(name)  # for the next chunk the other tiers are asked first
        for elsewhere in (False, True):
            for name in self.stores:
                if name not in self.unavailable:
                    raw = await self._by_digest(name, expected, unavailable, elsewhere=elsewhere)
                    if raw is not None:
                        return raw
        raise self.lost_error(f"chunk {index} of {path}", unavailable)

    async def link(self, name: str, link: Chunk, where: ChunkPlace) -> Buffer:
        """Return the verified raw bytes of one link of a chunk's chain: from a tier, or else from any other tier.

        Args:
            name: the tier whose manifest names the link.

        Raises:
            CorruptChunk: no tier has the link right.
            StoreUnavailable, StoreRefused: no copy was right, and not all tiers could be asked.
        """
        return await read_until_certain(lambda: self._link(name, link, where, None, Buffers(), {}))

    async def _read(
        self, name: str, chunk: Chunk, where: ChunkPlace, into: memoryview | None, buffers: Buffers | None
    ) -> Buffer:
        return await self._get(name, chunk, where, into, buffers or Buffers(), {})

    async def _link(
        self,
        name: str,
        link: Chunk,
        where: ChunkPlace,
        into: memoryview | None,
        buffers: Buffers,
        failed: dict[ContentId, TierdError],
    ) -> Buffer:
        """Do the work of `link`. `failed` are the contents that no tier had right during this read, and why."""
        if (raw := await self._held(link)) is not None:
            return raw
        if link.content in failed:
            raise failed[link.content]
        errors: list[TierdError] = []
        for tier, entry in self._places(name, link, where):
            try:
                return await self._get(tier, entry, where, into, buffers, failed)
            except TierdError as error:
                errors.append(error)
        # A tier that could not be asked may have the link, so the others prove nothing.
        why = next((error for error in errors if not isinstance(error, CorruptChunk)), errors[0])
        failed[link.content] = why
        raise why

    async def _held(self, chunk: Chunk) -> Buffer | None:
        return await thread_uncancelled(self.held, chunk) if self.held else None

    def _places(self, name: str, link: Chunk, where: ChunkPlace) -> Iterator[tuple[str, Chunk]]:
        """Yield where a link's bytes may be: each tier, and the entry of its object there."""
        yield name, link
        for tier, manifest in self.manifests.items():
            if tier != name:
                chain = manifest.chunk(where).chain()
                yield from ((tier, entry) for entry in chain if entry.content == link.content)
        if link.stored:
            yield from ((tier, link) for tier in self.stores if tier != name)

    async def _get(
        self,
        name: str,
        chunk: Chunk,
        where: ChunkPlace,
        into: memoryview | None,
        buffers: Buffers,
        failed: dict[ContentId, TierdError],
    ) -> Buffer:
        stored = chunk.stored
        if stored is None:
            return decode(chunk, b"", name)  # raises an error that names the defect
        base = await self._link(name, stored.base, where, into, buffers, failed) if stored.base else None
        get = partial(
            self.read_object, self.stores[name], f"{self.part.checkpoint.run}/{stored.key}", stored, f"{name}: "
        )
        if stored.codec == RAW:
            is_read_in_place = into is not None and stored.size == len(into)
            raw = await thread_uncancelled(decode, chunk, await get(into if is_read_in_place else None), name)
        else:
            with buffers.hold(stored.size) as memory:
                raw = await thread_uncancelled(decode, chunk, await get(memory), name, into, base)
        self.used_tiers.add(name)
        return raw

    async def _by_digest(
        self, name: str, expected: Chunk, unavailable: dict[str, str], *, elsewhere: bool
    ) -> Buffer | None:
        """Search a chunk that no manifest of this part names, by the digest in its key; None if it is not found.

        The part's own checkpoint is searched in every encoding. With `elsewhere`, other checkpoints are searched,
        because equal chunks are shared.
        """
        try:
            async for info in self._objects_with_digest(name, expected, elsewhere=elsewhere):
                try:
                    _, raw = await get_recognized(self.stores[name], info.key, expected, name)
                except (ObjectNotFound, CorruptChunk):
                    continue
                except TierdError as error:
                    unavailable[name] = str(error)
                    continue
                self.used_tiers.add(name)
                return raw
        except TierdError as error:
            unavailable[name] = str(error)
        return None

    async def _objects_with_digest(self, name: str, expected: Chunk, *, elsewhere: bool) -> AsyncIterator[ObjectInfo]:
        """List the objects on a tier whose keys contain the digest of `expected`."""
        run, store = self.part.checkpoint.run, self.stores[name]
        ranks = {self.part.rank} if expected.home is None else {expected.home, self.part.rank}
        if elsewhere and name not in self._other_owners:
            groups = await list_groups(store, chunks_prefix(run), partial(chunk_group, run))
            owners = {owner for group in groups if (owner := group_owner(run, group))} - {self.part.checkpoint}
            newest = sorted(owners, reverse=True)[:_ELSEWHERE]
            self._other_owners[name] = {owner: groups.intersection(chunk_groups(owner)) for owner in newest}
        searched: Mapping[CheckpointId, Collection[str] | None] = (
            self._other_owners[name] if elsewhere else {self.part.checkpoint: None}
        )
        prefixes = [
            f"{run}/{directory}"
            for owner, groups_of_owner in searched.items()
            for directory in chunk_directories(owner, ranks, self.part.rank)
            if groups_of_owner is None or chunk_group(run, f"{run}/{directory}") in groups_of_owner
        ]
        for prefix in prefixes:
            async for info in store.scan(f"{prefix}{expected.xxh3_128}."):
                # No encoder makes a chunk longer than that, and the base of a patch is not known.
                if info.size <= 2 * expected.size and not is_patch(info.key.rpartition(".")[2]):
                    yield info

    def lost_error(self, subject: str, unavailable: Mapping[str, str]) -> CorruptChunk | StoreUnavailable:
        """Return the error for a chunk that no tier has right: `CorruptChunk` only if every tier answered."""
        if unavailable:
            reasons = "; ".join(unavailable.values())
            return StoreUnavailable(
                f"{self.part}: {subject} is not right here, and a tier's copy could not be read: {reasons}"
            )
        reasons = "; ".join(self.defects.values()) or "no tier has a copy"
        return CorruptChunk(f"{subject}: {reasons}")
