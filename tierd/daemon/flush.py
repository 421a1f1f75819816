"""Spool -> tier: read, verify, encode, put, make sure, manifest last.

Law: a manifest is put only after every chunk that it names is known to lie on the tier as it should: read back and
compared, or taken by a server that has shown that it checks what it takes against a checksum. The same is known of the
manifest before a part counts as flushed. So a manifest on a tier means a verified copy, whoever looks and whenever. A
flush that was cut off goes on where it stopped: a chunk that already lies there is compared, not sent. A large chunk
that the newest complete checkpoint has is named, not sent, as far as `core/sharing.py` allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Protocol, TypeAlias

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
from tierd.core.ids import README_KEY, CheckpointId, PartId, chunk_key, chunk_owner
from tierd.core.manifest import Chunk, File, Manifest, Stored
from tierd.core.manifest import encode as encode_manifest
from tierd.core.sharing import shareable
from tierd.core.world import Facts
from tierd.daemon.budget import Budget
from tierd.daemon.copies import put_manifest
from tierd.daemon.observe import chunks_there, missing_chunks
from tierd.daemon.pace import Pace
from tierd.daemon.pause import Turn, at_once
from tierd.daemon.together import to_the_end, together
from tierd.daemon.turns import left_over, naming
from tierd.persist import read_chunk
from tierd.spool import Spool
from tierd.stores.base import Buffer, Store, clear, weight

_CHUNKS = 8  # on their way at once, as far as the budget goes
_ANSWER = 60.0  # seconds that a chunk waits for another tier's form of it

Where: TypeAlias = tuple[int, int]  # a chunk in a manifest: the file's number, the chunk's index in it


@dataclass(frozen=True, slots=True)
class Flushed:
    """What one flush moved, in bytes: `raw` of the part, `stored` on the tier, `sent` put for it (less where some was
    there), `shared` raw bytes that another checkpoint's chunks already hold. `facts`: of the manifest on the tier."""

    raw: int
    stored: int
    sent: int
    shared: int
    facts: Facts


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
    spool: Spool,
    part: PartId,
    way: Way,
    *,
    twin: Twin | None = None,
    lender: Manifest | None = None,
    worn_out: Collection[CheckpointId] = (),
) -> Flushed:
    """Copy a committed part to a tier.

    Args:
        twin: where a tier holds the part already: chunks are stored as there, even if today's encoder packs otherwise.
        lender: another checkpoint's manifest on this tier, at the same rank: large chunks that are equal are named, not
            sent.
        worn_out: checkpoints whose chunks are not named, because enough others depend on them (`sharing.worn`).

    Raises:
        ObjectNotFound: the part is not in the spool any more.
        CorruptChunk, ManifestError: the spool's copy is proven bad; nothing was made visible on the tier.
        StoreUnavailable, StoreRefused: the tier did not take it.
    """
    manifest = await asyncio.to_thread(spool.manifest, part)
    if twin and not twin.manifest.same_content(manifest):
        twin = None
    return await send(manifest, part, way, _Spooled(spool, part, way, twin), lender, worn_out)


async def send(
    manifest: Manifest,
    part: PartId,
    way: Way,
    source: Source,
    lender: Manifest | None,
    worn_out: Collection[CheckpointId],
) -> Flushed:
    """Put what a part's manifest describes on a tier, and the manifest last; `lender` and `worn_out` as for `flush`."""
    await _introduce(way.store)
    there: dict[str, list[str]] = {}  # digest -> keys of what earlier tries have put
    for key in await chunks_there(way.store, part.rank, [part.checkpoint]):
        there.setdefault(key.rpartition("/")[2].partition(".")[0], []).append(key)
    lent = await _lent(way.store, part, lender, worn_out)
    work: dict[tuple[str, int], _Chunk] = {}  # a chunk that the part holds twice is one object
    for number, file in enumerate(manifest.files):
        for index, chunk in enumerate(file.chunks):
            if _holds(chunk) not in work:
                work[_holds(chunk)] = _Chunk(source, way, part, there, (number, index), file, lent)
    sent = await together(_CHUNKS, [chunk.send() for chunk in work.values()])
    tiered = _with_stored(manifest, {held: chunk.encoded for held, chunk in work.items()})
    await _show(way, part, tiered)
    await clear(way.store, [part.quarantine_key])
    shared = sum(chunk.shared for chunk in work.values())
    return Flushed(manifest.size, tiered.stored_size, sum(sent), shared, Facts.of(tiered))


class Source(Protocol):
    """Where the chunks of a part come from. `copies`: how many of a chunk are in memory at once."""

    copies: int

    async def read(self, where: Where, file: File) -> Encoded:
        """A chunk as it shall lie on the tier, under a key of this part; verified.

        Raises:
            CorruptChunk: no copy of it is right.
            ObjectNotFound: the part is gone.
        """


class _Chunk:
    """One chunk on its way. After `send`, `encoded` is its entry for the manifest."""

    def __init__(
        self,
        source: Source,
        way: Way,
        part: PartId,
        there: Mapping[str, list[str]],
        where: Where,
        file: File,
        lent: Mapping[tuple[str, int], Chunk],
    ) -> None:
        self._source, self._way, self._part, self._there = source, way, part, there
        self._where, self._file = where, file
        self.encoded: Chunk = file.chunks[where[1]]
        self._lent = lent.get(_holds(self.encoded))
        self.shared = 0

    async def send(self) -> int:
        """Put the chunk unless it lies there intact; the number of bytes put."""
        await self._way.turn()
        if self._lent is not None:
            self.encoded, self.shared = self._lent, self._lent.size
            return 0
        async with self._way.budget.take(self._source.copies * self.encoded.size) as hold:
            if await self._lies_there():
                return 0
            encoded = await self._source.read(self._where, self._file)
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


class _Spooled:
    """The spool's copy of a part, encoded as the twin has it."""

    def __init__(self, spool: Spool, part: PartId, way: Way, twin: Twin | None) -> None:
        self._home, self._part, self._way, self._twin = spool.path(part), part, way, twin
        self.copies = 3 if twin else 2

    async def read(self, where: Where, file: File) -> Encoded:
        return await self._as_the_twin(where, await to_the_end(self._encode, file, where[1]))

    def _encode(self, file: File, index: int) -> Encoded:
        try:
            raw = read_chunk(self._home / file.path, file, index)
        except CorruptChunk:
            if not self._home.is_dir():
                raise ObjectNotFound(f"{self._part} is not in the spool any more") from None
            raise
        return self._way.pace.encode(self._part, file.chunks[index], raw)

    async def _as_the_twin(self, where: Where, encoded: Encoded) -> Encoded:
        twin = self._twin
        chunk = twin.manifest.files[where[0]].chunks[where[1]] if twin else None
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
        return stored_as(self._part, chunk, data)


def stored_as(part: PartId, chunk: Chunk, data: Buffer) -> Encoded:
    """What another tier stores of a chunk, under the key that it has in `part`."""
    assert chunk.stored is not None
    key = chunk_key(part, chunk.xxh3_128, chunk.stored.codec)
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


async def _lent(
    store: Store, part: PartId, lender: Manifest | None, worn_out: Collection[CheckpointId]
) -> dict[tuple[str, int], Chunk]:
    """The chunks of `lender` that may be named and lie on the tier, by what they hold."""
    if lender is None or lender.rank != part.rank:
        return {}
    offered = {f"{lender.run}/{chunk.stored.key}": chunk for chunk in shareable(lender, worn_out) if chunk.stored}
    if not offered:
        return {}
    owners = {chunk_owner(*key.split("/", 1)) for key in offered} - await left_over(store, lender.run)
    there = await chunks_there(store, part.rank, [owner for owner in owners if owner])
    return {
        _holds(chunk): chunk for key, chunk in offered.items() if chunk.stored and there.get(key) == chunk.stored.size
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
    await store.put(README_KEY, introduction())


def introduction() -> bytes:
    """What a tier's README.md says."""
    return resources.files("tierd").joinpath("TIER_README.md").read_bytes()
