"""What the tiers have of one part, and any chunk of it from whichever of them has it right.

Law: nothing is given up before every tier was asked, and nothing is called corrupt while one of them could not be: then
the answer is `StoreUnavailable`. Bytes are verified as stored and as raw before anybody gets them. A digest is proof
enough: a chunk is right wherever it lies and whatever became of the manifest that named it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from tierd.codec import RAW, decode, recognize
from tierd.core.errors import (
    CorruptChunk,
    ManifestError,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import CheckpointId, PartId, chunks_prefix, manifests_prefix
from tierd.core.manifest import Chunk, Manifest, Stored
from tierd.core.manifest import decode as decode_manifest
from tierd.core.seal import MAX_MANIFEST_SIZE
from tierd.daemon.together import to_the_end, together
from tierd.device import memory_for
from tierd.stores.base import Buffer, ObjectInfo, Store, children, is_authentic, octets, weight

log = logging.getLogger("tierd.daemon")
T = TypeVar("T")

_ANSWER = 120.0  # seconds that a tier is given for a manifest, above all retries: others may have all of it
_ELSEWHERE = 1000  # checkpoints under whose names a lost chunk is looked for, newest first


async def surely(read: Callable[[], Awaitable[T]]) -> T:
    """What `read` gives; where that is corrupt, what it gives the second time: a bit flipped on its way is no rot."""
    try:
        return await read()
    except (CorruptChunk, ManifestError) as error:
        log.warning("read once more: %s", error)
    return await read()  # out here, where the error no longer holds what was read first


async def read_manifest(store: Store, part: PartId | None, key: str = "", size: int = 0) -> Manifest:
    """A part's manifest, from where it lies on a tier or from `key`. Nothing is read of what is, by its listed
    `size`, too large for one.

    Raises:
        ObjectNotFound, ManifestError, FormatTooNew: it is not there or, read twice, cannot be used.
        StoreUnavailable, StoreRefused: says nothing about it.
    """
    key = key or (part.manifest_key if part else "")

    if size > MAX_MANIFEST_SIZE:
        raise ManifestError(f"{key}: it has {size} bytes, and a manifest at most {MAX_MANIFEST_SIZE}")

    async def read() -> Manifest:
        try:
            data = await store.get(key)
        except CorruptChunk as error:  # larger than anything of tierd's
            raise ManifestError(str(error)) from error
        return decode_manifest(bytes(data), part)

    return await surely(read)


async def put_manifest(store: Store, key: str, data: Buffer, *, reread: bool = False) -> None:
    """Put a manifest, or what is left of one, and make sure of it. It may be all that tells of its attempt, once the
    node that wrote it is gone.

    Args:
        reread: read it back, even where the server shows that it verifies.

    Raises:
        StoreUnavailable: it is not there as it should be, or that is not known.
    """
    if await store.put(key, data) and not reread:
        return
    try:
        if octets(await store.get(key)) == octets(data):
            return
    except (ObjectNotFound, CorruptChunk, ManifestError):
        pass
    raise StoreUnavailable(f"{key}: what was read back differs from what was put")


async def get_object(store: Store, key: str, stored: Stored, where: str = "", lead: int = 0) -> Buffer:
    """A chunk's object, not compared with `stored` yet, in memory of its own that begins `lead` bytes into a page.

    Args:
        where: goes before the key in messages.

    Raises:
        CorruptChunk: it is missing, or longer than `stored` says.
        StoreUnavailable, StoreRefused: says nothing about the bytes.
    """
    try:
        return await store.get(key, memory_for(max(lead + stored.size, 1))[lead : lead + stored.size])
    except ObjectNotFound:
        raise CorruptChunk(f"{where}{key} is missing") from None
    except StoreRefused:
        # More than there is room for is proof; anything else that a store refuses is none.
        async for info in store.scan(key):
            if info.key == key and info.size > stored.size:
                raise CorruptChunk(f"{where}{key}: {info.size} bytes, not the {stored.size} of its manifest") from None
            break
        raise


async def is_there(stores: Mapping[str, Store], checkpoint: CheckpointId, world: int) -> bool:
    """Whether the tiers together still list a manifest of every rank: what is pruned loses its manifests first.

    Raises:
        StoreUnavailable, StoreRefused: a tier does not say.
    """
    ranks: set[int] = set()
    for store in stores.values():
        async for info in store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/"):
            part = PartId.parse_key(info.key)
            if part and part.world == world:
                ranks.add(part.rank)
    return len(ranks) == world


@dataclass(slots=True)
class Copies:
    """What the tiers have of one part: readable manifests, proven defects, and who could not be asked."""

    part: PartId
    stores: Mapping[str, Store]
    manifests: dict[str, Manifest] = field(default_factory=dict)
    defects: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    reference: Manifest | None = None
    _told: dict[str, Manifest] = field(default_factory=dict)  # every readable manifest, whatever it describes
    _others: dict[str, list[str]] = field(default_factory=dict)  # tier -> prefixes where the rank's chunks may lie

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
        """One manifest for each content that the tiers' describe: where two contradict each other, one lies. First what
        only this node's key can have made."""
        found: list[Manifest] = []
        told = (self._told or self.manifests).items()
        for _, manifest in sorted(told, key=lambda item: not is_authentic(self.stores[item[0]])):
            if not any(manifest.same_content(other) for other in found):
                found.append(manifest)
        return found

    def agree(self, reference: Manifest) -> None:
        """Set aside tiers whose manifest describes other content than `reference`."""
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
        """The bytes that getting a chunk takes in memory: raw and, where that is another form, stored."""
        assert self.reference is not None
        raw = self.reference.files[file].chunks[index].size
        stored = [manifest.files[file].chunks[index].stored for manifest in self.manifests.values()]
        if stored and all(one and one.codec == RAW for one in stored):
            return max(weight(store, raw) for store in self.stores.values())
        return raw + max([raw, *(one.size for one in stored if one)])

    async def chunk(self, file: int, index: int, path: str, lead: int = 0) -> Buffer:
        """The raw bytes of one chunk, verified, from the first tier that has them right.

        Args:
            lead: where in a page of memory they had best begin, to go to a disk without another copy.

        Raises:
            CorruptChunk: every copy is proven bad or missing.
            StoreUnavailable: none was right, and not all could be asked.
        """
        unavailable = dict(self.unavailable)
        for name, manifest in list(self.manifests.items()):
            chunk = manifest.files[file].chunks[index]
            try:
                return await surely(partial(self._get, name, chunk, lead))
            except CorruptChunk as error:
                self.defects[name] = str(error)
            except TierdError as error:
                unavailable[name] = str(error)
                self.manifests[name] = self.manifests.pop(name)  # the next chunk is asked of the others first
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

    async def _get(self, name: str, chunk: Chunk, lead: int) -> Buffer:
        stored = chunk.stored
        if stored is None:
            return decode(chunk, b"", name)  # which says what is wrong
        lead = lead if stored.codec == RAW else 0
        data = await get_object(
            self.stores[name], f"{self.part.checkpoint.run}/{stored.key}", stored, f"{name}: ", lead
        )
        raw = await to_the_end(decode, chunk, data, name)
        self.used.add(name)
        return raw

    async def _by_digest(
        self, name: str, wanted: Chunk, unavailable: dict[str, str], *, elsewhere: bool
    ) -> Buffer | None:
        """A chunk that no manifest of this part leads to, by the digest in its key: under the part's own checkpoint,
        in whichever form, or `elsewhere`, since equal chunks are shared."""
        try:
            async for info in self._named(name, wanted, elsewhere=elsewhere):
                found = await self._unnamed(name, info, wanted, unavailable)
                if found is not None:
                    return found
        except TierdError as error:
            unavailable[name] = str(error)
        return None

    async def _named(self, name: str, wanted: Chunk, *, elsewhere: bool) -> AsyncIterator[ObjectInfo]:
        """The objects on a tier whose keys say that they hold `wanted`."""
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
                if info.size <= 2 * wanted.size:  # no encoder makes more of it
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
        """Say that no tier could help: as corruption only when every one of them answered."""
        if unavailable:
            reasons = "; ".join(unavailable.values())
            raise StoreUnavailable(f"{self.part}: {what} is not right here, and a tier could not be asked: {reasons}")
        reasons = "; ".join(self.defects.values()) or "no tier has a copy"
        raise CorruptChunk(f"{what}: {reasons}")
