"""Spool -> tier: read, verify, encode, put, make sure, manifest last.

Law: a manifest is put only after every chunk that it names is known to lie on the tier as it should: read back and
compared, or taken by a server that has shown that it checks what it takes against a checksum. The same is known of the
manifest before a part counts as flushed. So a manifest on a tier means a verified copy, whoever looks and whenever. A
flush that was cut off goes on where it stopped: a chunk that already lies there is compared, not sent. What the newest
complete checkpoint has is named, not sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

import msgspec

from tierd.codec import Encoded, check_stored, decode, recognize
from tierd.core.errors import (
    CorruptChunk,
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import PartId, chunk_key
from tierd.core.manifest import Chunk, File, Manifest, Stored
from tierd.core.manifest import encode as encode_manifest
from tierd.daemon.budget import Budget
from tierd.daemon.copies import put_manifest
from tierd.daemon.observe import chunks_there, missing_chunks
from tierd.daemon.pace import Pace
from tierd.daemon.pause import Turn, at_once
from tierd.daemon.together import to_the_end, together
from tierd.daemon.turns import left_over, naming
from tierd.persist import read_chunk
from tierd.spool import Spool
from tierd.stores.base import Store, weight

_CHUNKS = 8  # on their way at once, as far as the budget goes
_ANSWER = 60.0  # seconds that a chunk waits for another tier's form of it
README_KEY = "README.md"


@dataclass(frozen=True, slots=True)
class Flushed:
    """What one flush moved, in bytes: `raw` of the part, `stored` on the tier, `sent` put for it (less where some was
    there), `shared` raw bytes that another checkpoint's chunks already hold."""

    raw: int
    stored: int
    sent: int
    shared: int


@dataclass(slots=True)
class Twin:
    """Another tier's copy of the part: while that answers, what it stores is stored here too, byte for byte."""

    store: Store
    manifest: Manifest
    answers: bool = True


@dataclass(frozen=True, slots=True)
class Way:
    """How bytes get to one tier.

    Attributes:
        store: the tier's.
        tier: its name.
        who: 8 hex digits, this node's own; random where nobody comes back to sweep.
        reread: read everything back, even where the server shows that it verifies.
        budget, pace: what all flushes of a daemon share.
        turn: awaited before each chunk: the daemon may be paused.
    """

    store: Store
    tier: str = ""
    who: str = ""
    reread: bool = False
    budget: Budget = field(default_factory=Budget)
    pace: Pace = field(default_factory=Pace)
    turn: Turn = at_once


async def flush(
    spool: Spool, part: PartId, way: Way, *, twin: Twin | None = None, lender: Manifest | None = None
) -> Flushed:
    """Copy a committed part to a tier.

    Args:
        twin: where a tier holds the part already: chunks are stored as there, even if today's encoder packs otherwise.
        lender: another checkpoint's manifest on this tier, at the same rank: chunks that are equal are named, not sent.

    Raises:
        ObjectNotFound: the part is not in the spool any more.
        CorruptChunk, ManifestError: the spool's copy is proven bad; nothing was made visible on the tier.
        StoreUnavailable, StoreRefused: the tier did not take it.
    """
    manifest = await asyncio.to_thread(spool.manifest, part)
    await _introduce(way.store)
    if twin and not twin.manifest.same_content(manifest):
        twin = None
    there: dict[str, list[str]] = {}  # digest -> keys of what earlier tries have put
    for key in await chunks_there(way.store, part.rank, [part.checkpoint]):
        there.setdefault(key.rpartition("/")[2].partition(".")[0], []).append(key)
    lent = await _lent(way.store, part, lender)
    work: dict[tuple[str, int], _Chunk] = {}  # a chunk that the part holds twice is one object
    for number, file in enumerate(manifest.files):
        for index, chunk in enumerate(file.chunks):
            if _holds(chunk) not in work:
                work[_holds(chunk)] = _Chunk(spool, way, part, there, twin, number, index, file, lent)
    sent = await together(_CHUNKS, [chunk.send() for chunk in work.values()])
    tiered = _with_stored(manifest, {held: chunk.encoded for held, chunk in work.items()})
    await _show(way, part, tiered)
    await way.store.delete([part.quarantine_key])
    return Flushed(manifest.size, tiered.stored_size, sum(sent), sum(chunk.shared for chunk in work.values()))


class _Chunk:
    """One chunk on its way. After `send`, `encoded` is its entry for the manifest."""

    def __init__(
        self,
        spool: Spool,
        way: Way,
        part: PartId,
        there: Mapping[str, list[str]],
        twin: Twin | None,
        number: int,
        index: int,
        file: File,
        lent: Mapping[tuple[str, int], Chunk],
    ) -> None:
        self._way, self._part, self._there, self._file, self._index = way, part, there, file, index
        self._twin, self._other = twin, twin.manifest.files[number].chunks[index] if twin else None
        self._home = spool.path(part)
        self.encoded: Chunk = file.chunks[index]
        self._lent = lent.get(_holds(self.encoded))
        self.shared = 0

    async def send(self) -> int:
        """Put the chunk unless it lies there intact; the number of bytes put."""
        await self._way.turn()
        if self._lent is not None:
            self.encoded, self.shared = self._lent, self._lent.size
            return 0
        async with self._way.budget.take((3 if self._twin else 2) * self.encoded.size) as hold:
            if await self._lies_there():
                return 0
            encoded = await self._as_the_twin(await to_the_end(self._read))
            self.encoded, stored, data = encoded.chunk, encoded.stored, encoded.data
            del encoded
            hold.keep(weight(self._way.store, stored.size))  # the raw bytes are gone
            key = f"{self._part.checkpoint.run}/{stored.key}"
            with self._way.pace.link(self._way.tier).moving(stored.size):
                checked = await self._way.store.put(key, data)
            del data  # what is read back takes its place
            if checked and not self._way.reread:
                stored = msgspec.structs.replace(stored, checked=checked)
                self.encoded = msgspec.structs.replace(self.encoded, stored=stored)
            else:
                await self._read_back(key, stored)
            return stored.size

    async def _lies_there(self) -> bool:
        """Whether an earlier try has put the chunk, in whichever form; then that form is taken."""
        for key in self._there.get(self.encoded.xxh3_128, ()):
            try:
                data = await self._way.store.get(key)
                codec, own = key.rpartition(".")[2], key.partition("/")[2]
                self.encoded, _ = await to_the_end(recognize, self.encoded, codec, own, data, self._way.tier)
            except (ObjectNotFound, CorruptChunk, FormatTooNew):
                continue
            return True
        return False

    async def _read_back(self, key: str, stored: Stored) -> None:
        try:
            await to_the_end(check_stored, stored, await self._way.store.get(key), key)
        except (ObjectNotFound, CorruptChunk) as error:
            raise StoreUnavailable(f"{key}: what was read back differs from what was put") from error

    def _read(self) -> Encoded:
        try:
            raw = read_chunk(self._home / self._file.path, self._file, self._index)
        except CorruptChunk:
            if not self._home.is_dir():
                raise ObjectNotFound(f"{self._part} is not in the spool any more") from None
            raise
        return self._way.pace.encode(self._part, self._file.chunks[self._index], raw)

    async def _as_the_twin(self, encoded: Encoded) -> Encoded:
        twin, chunk = self._twin, self._other
        if not (twin and twin.answers and chunk and chunk.stored) or chunk.stored.form == encoded.stored.form:
            return encoded
        try:
            async with asyncio.timeout(_ANSWER):
                data = await twin.store.get(f"{self._part.checkpoint.run}/{chunk.stored.key}")
            await to_the_end(decode, chunk, data, "the other tier")
        except (ObjectNotFound, CorruptChunk, FormatTooNew):
            return encoded  # better right in other bytes than late
        except (TierdError, TimeoutError):
            twin.answers = False  # not every chunk waits for that
            return encoded
        key = chunk_key(self._part, chunk.xxh3_128, chunk.stored.codec)
        own = msgspec.structs.replace(chunk.stored, key=key, checked="")
        return Encoded(msgspec.structs.replace(chunk, stored=own), data)


def _holds(chunk: Chunk) -> tuple[str, int]:
    """What a chunk holds: the digest and size of its raw bytes."""
    return chunk.xxh3_128, chunk.size


def _with_stored(manifest: Manifest, chunks: Mapping[tuple[str, int], Chunk]) -> Manifest:
    files = tuple(
        File(path=file.path, size=file.size, chunks=tuple(chunks[_holds(chunk)] for chunk in file.chunks))
        for file in manifest.files
    )
    return msgspec.structs.replace(manifest, files=files)


async def _lent(store: Store, part: PartId, lender: Manifest | None) -> dict[tuple[str, int], Chunk]:
    """The chunks of `lender` that lie on the tier, by what they hold."""
    if lender is None or lender.rank != part.rank:
        return {}
    there = await chunks_there(store, part.rank, lender.owners - await left_over(store, lender.run))
    return {
        _holds(chunk): chunk
        for chunk in lender.chunks()
        if chunk.stored and there.get(f"{lender.run}/{chunk.stored.key}") == chunk.stored.size
    }


async def _show(way: Way, part: PartId, manifest: Manifest) -> None:
    """Put the manifest and make sure of it, while nobody deletes what it names, if all of that is still there."""
    try:
        data = encode_manifest(manifest)
    except ManifestError as error:  # as the spool has it, it is right; with keys it is more than a reader takes
        raise StoreRefused(f"{part}: no tier can describe it: {error}") from error
    async with naming(way.store, part, data, manifest.owners, way.who):
        missing = await missing_chunks(way.store, manifest)
        if not missing:
            await put_manifest(way.store, part.manifest_key, data, reread=way.reread)
    if missing:
        raise StoreUnavailable(f"{part}: {len(missing)} chunks were deleted while it was being flushed")


async def _introduce(store: Store) -> None:
    # Whoever finds the bucket in five years should be able to recover from it by hand.
    async for info in store.scan(README_KEY):
        if info.key == README_KEY:
            return
    await store.put(README_KEY, resources.files("tierd").joinpath("TIER_README.md").read_bytes())
