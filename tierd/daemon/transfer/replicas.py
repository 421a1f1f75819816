"""The tiers' copies of one part, and access to any chunk of it from a tier that has it right.

Invariant: a chunk is given up only after every tier was asked. A chunk is called corrupt only if every tier could be
asked; otherwise the error is `StoreUnavailable`. Bytes are verified as stored and as raw before they are returned. A
digest is sufficient proof: a chunk is right under any key, and regardless of the state of the manifest that named it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

from tierd.codec.codec import RAW, decode, recognize
from tierd.core.errors import (
    CorruptChunk,
    ManifestError,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import CheckpointId, PartId, chunks_prefix, manifests_prefix
from tierd.core.manifest import Chunk, Manifest, Stored, is_patch
from tierd.core.manifest_codec import decode as decode_manifest
from tierd.core.seal import MAX_MANIFEST_SIZE
from tierd.daemon.transfer.buffers import Buffers
from tierd.daemon.transfer.concurrency import to_the_end, together
from tierd.daemon.transfer.shared_encoding import Content, content
from tierd.spool.direct_io import memory_for
from tierd.stores.base import Buffer, ObjectInfo, Store, children, is_authentic, octets, weight

log = logging.getLogger("tierd.daemon")
T = TypeVar("T")
Where: TypeAlias = tuple[int, int]  # a chunk in a manifest: the file's number, the chunk's index in it

# Seconds that a tier has for a manifest, all retries included, because another tier may have the whole part.
_ANSWER = 120.0
_ELSEWHERE = 1000  # checkpoints whose keys are searched for a lost chunk, newest first


async def surely(read: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `read`; if it finds corruption, the result of a second call.

    A bit that flipped in transfer is not corruption of the stored bytes.
    """
    try:
        return await read()
    except (CorruptChunk, ManifestError) as error:
        log.warning("read once more: %s", error)
    return await read()  # outside the handler, where the error no longer keeps the first bytes in memory


async def read_manifest(store: Store, part: PartId | None, key: str = "", size: int = 0) -> Manifest:
    """Read a part's manifest from its place on a tier, or from `key`.

    Args:
        store: the tier's store.
        part: the part; None to accept any part.
        key: the object to read; empty for the part's own key.
        size: the object's listed size in bytes; an object that is too large for a manifest is not read.

    Raises:
        ObjectNotFound, ManifestError, FormatTooNew: the manifest is absent or, after two reads, not usable.
        StoreUnavailable, StoreRefused: the tier could not be asked; this says nothing about the manifest.
    """
    key = key or (part.manifest_key if part else "")

    if size > MAX_MANIFEST_SIZE:
        raise ManifestError(f"{key}: it has {size} bytes, and a manifest at most {MAX_MANIFEST_SIZE}")

    async def read() -> Manifest:
        try:
            data = await store.get(key)
        except CorruptChunk as error:  # larger than any object of tierd's
            raise ManifestError(str(error)) from error
        return decode_manifest(bytes(data), part)

    return await surely(read)


async def put_manifest(store: Store, key: str, data: Buffer, *, reread: bool = False) -> None:
    """Put a manifest, or the rest of one, and confirm it.

    It is confirmed because it may be the only record of its attempt once the node that wrote it is lost.

    Args:
        store: the tier's store.
        key: the object's key.
        data: the manifest.
        reread: read it back, even if the server shows that it verifies.

    Raises:
        StoreUnavailable: the manifest is not on the tier as it should be, or that is not known.
    """
    if await store.put(key, data) and not reread:
        return
    try:
        if octets(await store.get(key)) == octets(data):
            return
    except (ObjectNotFound, CorruptChunk, ManifestError):
        pass
    raise StoreUnavailable(f"{key}: what was read back differs from what was put")


async def get_object(store: Store, key: str, stored: Stored, where: str = "", into: memoryview | None = None) -> Buffer:
    """Read a chunk's object. The caller must compare it with `stored`.

    Args:
        store: the tier's store.
        key: the object's key.
        stored: the object's entry in the manifest.
        where: a prefix of the key in messages.
        into: memory of the object's size to read into; if None, memory is allocated.

    Raises:
        CorruptChunk: the object is missing, or longer than `stored` says.
        StoreUnavailable, StoreRefused: the object could not be read; this says nothing about the bytes.
    """
    try:
        return await store.get(key, memory_for(max(stored.size, 1))[: stored.size] if into is None else into)
    except ObjectNotFound:
        raise CorruptChunk(f"{where}{key} is missing") from None
    except StoreRefused:
        # An object that is too long is proven bad; any other refusal of a store proves nothing.
        async for info in store.scan(key):
            if info.key == key and info.size > stored.size:
                raise CorruptChunk(f"{where}{key}: {info.size} bytes, not the {stored.size} of its manifest") from None
            break
        raise


async def is_there(stores: Mapping[str, Store], checkpoint: CheckpointId, world: int) -> bool:
    """Whether the tiers together still list a manifest of every rank. A prune deletes manifests first.

    Raises:
        StoreUnavailable, StoreRefused: a tier could not be listed.
    """
    ranks: set[int] = set()
    for store in stores.values():
        async for info in store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/"):
            part = PartId.parse_key(info.key)
            if part and part.world == world:
                ranks.add(part.rank)
    return len(ranks) == world


@dataclass(slots=True)
class Replicas:
    """The tiers' copies of one part.

    Attributes:
        part: the part.
        stores: by tier, its store.
        manifests: by tier, a readable manifest that agrees with the reference.
        defects: by tier, why its copy is proven bad.
        unavailable: by tier, why it could not be asked.
        used: the tiers that provided chunks.
        reference: the manifest with which the others must agree.
    """

    part: PartId
    stores: Mapping[str, Store]
    manifests: dict[str, Manifest] = field(default_factory=dict)
    defects: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    reference: Manifest | None = None
    # By tier, every readable manifest, also if it contradicts the reference.
    _told: dict[str, Manifest] = field(default_factory=dict)
    _others: dict[str, list[str]] = field(default_factory=dict)  # tier -> prefixes where the rank's chunks may be

    async def ask(self) -> None:
        """Read the part's manifest on every tier."""
        answers = await together(len(self.stores), [self._answer(name) for name in self.stores])
        for name, found in zip(self.stores, answers, strict=True):
            match found:
                case Manifest():
                    self.manifests[name] = found
                case ObjectNotFound():
                    pass
                case ManifestError():
                    self.defects[name] = str(found)
                case _:  # unavailable, refused, or of a newer format: says nothing about the bytes
                    self.unavailable[name] = str(found)

    async def _answer(self, name: str) -> Manifest | TierdError:
        try:
            async with asyncio.timeout(_ANSWER):
                return await read_manifest(self.stores[name], self.part)
        except TimeoutError:
            return StoreUnavailable(f"{name}: did not answer within {_ANSWER:.0f} s")
        except TierdError as error:
            return error

    def contents(self) -> list[Manifest]:
        """Return one manifest for each distinct content that the tiers' manifests describe.

        If two manifests contradict each other, one is wrong. Manifests that only this node's key can have made come
        first.
        """
        found: list[Manifest] = []
        told = (self._told or self.manifests).items()
        for _, manifest in sorted(told, key=lambda item: not is_authentic(self.stores[item[0]])):
            if not any(manifest.same_content(other) for other in found):
                found.append(manifest)
        return found

    def agree(self, reference: Manifest) -> None:
        """Take `reference` as right, and record tiers whose manifest describes other content as defective."""
        self.reference = reference
        self._told = self._told or dict(self.manifests)
        for name, manifest in self._told.items():
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
        if any(one and one.base for one in stored):
            return 3 * raw  # of the base and of the chunk, and the blocks that differ
        if stored and all(one and one.codec == RAW for one in stored):
            return max(weight(store, raw) for store in self.stores.values())
        return raw + max([raw, *(one.size for one in stored if one)])

    async def chunk(
        self, file: int, index: int, path: str, into: memoryview | None = None, buffers: Buffers | None = None
    ) -> Buffer:
        """Return the verified raw bytes of one chunk, from the first tier that has them right.

        Args:
            file: the file's number in the manifest.
            index: the chunk's index in the file.
            path: the file's path, for messages.
            into: memory of the chunk's size in which the bytes may be placed. The caller must not use it until the call
                ends. Only the result says where the bytes are.
            buffers: memory for the stored bytes.

        Raises:
            CorruptChunk: every copy is proven bad or missing.
            StoreUnavailable: no copy was right, and not all tiers could be asked.
        """
        unavailable = dict(self.unavailable)
        for name, manifest in list(self.manifests.items()):
            read = partial(self._read, name, manifest.files[file].chunks[index], (file, index), into, buffers)
            try:
                return await surely(read)
            except CorruptChunk as error:
                self.defects[name] = str(error)
            except TierdError as error:
                unavailable[name] = str(error)
                self.manifests[name] = self.manifests.pop(name)  # for the next chunk the other tiers are asked first
        assert self.reference is not None
        wanted = self.reference.files[file].chunks[index]
        for elsewhere in (False, True):
            for name in self.stores:
                if name not in self.unavailable:
                    found = await self._by_digest(name, wanted, unavailable, elsewhere=elsewhere)
                    if found is not None:
                        return found
        self.give_up(f"chunk {index} of {path}", unavailable)
        raise AssertionError

    async def link(self, name: str, link: Chunk, where: Where) -> Buffer:
        """Return the verified raw bytes of one link of a chunk's chain: from a tier, or else from any other tier.

        Args:
            name: the tier whose manifest names the link.
            link: the link.
            where: the chunk's place in the manifest.

        Raises:
            CorruptChunk: no tier has the link right.
            StoreUnavailable, StoreRefused: no copy was right, and not all tiers could be asked.
        """
        return await surely(lambda: self._link(name, link, where, None, Buffers(), {}))

    async def _read(
        self, name: str, chunk: Chunk, where: Where, into: memoryview | None, buffers: Buffers | None
    ) -> Buffer:
        return await self._get(name, chunk, where, into, buffers or Buffers(), {})

    async def _link(
        self,
        name: str,
        link: Chunk,
        where: Where,
        into: memoryview | None,
        buffers: Buffers,
        failed: dict[Content, TierdError],
    ) -> Buffer:
        """Do the work of `link`. `failed` are the contents that no tier had right during this read, and why."""
        if content(link) in failed:
            raise failed[content(link)]
        errors: list[TierdError] = []
        for tier, one in self._places(name, link, where):
            try:
                return await self._get(tier, one, where, into, buffers, failed)
            except TierdError as error:
                errors.append(error)
        # A tier that could not be asked may have the link, so the others prove nothing.
        why = next((error for error in errors if not isinstance(error, CorruptChunk)), errors[0])
        failed[content(link)] = why
        raise why

    def _places(self, name: str, link: Chunk, where: Where) -> Iterator[tuple[str, Chunk]]:
        """Yield where a link's bytes may be: each tier, and the entry of its object there."""
        yield name, link
        for tier, manifest in self.manifests.items():
            if tier != name:
                chain = manifest.files[where[0]].chunks[where[1]].chain()
                yield from ((tier, one) for one in chain if content(one) == content(link))
        if link.stored and not is_patch(link.stored.codec):  # a patch has another key on each tier
            yield from ((tier, link) for tier in self.stores if tier != name)

    async def _get(
        self,
        name: str,
        chunk: Chunk,
        where: Where,
        into: memoryview | None,
        buffers: Buffers,
        failed: dict[Content, TierdError],
    ) -> Buffer:
        stored = chunk.stored
        if stored is None:
            return decode(chunk, b"", name)  # raises an error that names the defect
        base = await self._link(name, stored.base, where, into, buffers, failed) if stored.base else None
        get = partial(get_object, self.stores[name], f"{self.part.checkpoint.run}/{stored.key}", stored, f"{name}: ")
        if stored.codec == RAW:
            fits = into is not None and stored.size == len(into)
            raw = await to_the_end(decode, chunk, await get(into if fits else None), name)
        else:
            with buffers.lend(stored.size) as memory:
                raw = await to_the_end(decode, chunk, await get(memory), name, into, base)
        self.used.add(name)
        return raw

    async def _by_digest(
        self, name: str, wanted: Chunk, unavailable: dict[str, str], *, elsewhere: bool
    ) -> Buffer | None:
        """Search a chunk that no manifest of this part names, by the digest in its key; None if it is not found.

        The part's own checkpoint is searched in every encoding. With `elsewhere`, other checkpoints are searched,
        because equal chunks are shared.
        """
        try:
            async for info in self._named(name, wanted, elsewhere=elsewhere):
                found = await self._unnamed(name, info, wanted, unavailable)
                if found is not None:
                    return found
        except TierdError as error:
            unavailable[name] = str(error)
        return None

    async def _named(self, name: str, wanted: Chunk, *, elsewhere: bool) -> AsyncIterator[ObjectInfo]:
        """List the objects on a tier whose keys contain the digest of `wanted`."""
        own, store = self.part.checkpoint, self.stores[name]
        base, rank = chunks_prefix(own.run), f"{self.part.rank:05}"
        if not elsewhere:
            prefixes = [f"{base}{own.name}/{rank}/"]
        elif name in self._others:
            prefixes = self._others[name]
        else:
            found = [CheckpointId.parse(own.run, one) async for one in children(store, base)]
            others = sorted((one for one in found if one and one != own), reverse=True)[:_ELSEWHERE]
            prefixes = self._others[name] = [f"{base}{other.name}/{rank}/" for other in others]
        for prefix in prefixes:
            async for info in store.scan(f"{prefix}{wanted.xxh3_128}."):
                # No encoder makes a chunk longer than that, and the base of a patch is not known.
                if info.size <= 2 * wanted.size and not is_patch(info.key.rpartition(".")[2]):
                    yield info

    async def _unnamed(self, name: str, info: ObjectInfo, wanted: Chunk, unavailable: dict[str, str]) -> Buffer | None:
        try:
            data = await self.stores[name].get(info.key)
            key, codec = info.key.removeprefix(f"{self.part.checkpoint.run}/"), info.key.rpartition(".")[2]
            _, raw = await to_the_end(recognize, wanted, codec, key, data, name)
            self.used.add(name)
            return raw
        except (ObjectNotFound, CorruptChunk):
            return None
        except TierdError as error:
            unavailable[name] = str(error)
            return None

    def give_up(self, what: str, unavailable: Mapping[str, str]) -> None:
        """Raise the error for a chunk that no tier has right: `CorruptChunk` only if every tier answered."""
        if unavailable:
            reasons = "; ".join(unavailable.values())
            raise StoreUnavailable(f"{self.part}: {what} is not right here, and a tier could not be asked: {reasons}")
        reasons = "; ".join(self.defects.values()) or "no tier has a copy"
        raise CorruptChunk(f"{what}: {reasons}")
