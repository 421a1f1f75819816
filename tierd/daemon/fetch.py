"""Tier -> spool: make a part whole again, chunk by chunk, from whichever tier has each chunk right.

Law: nothing is given up before every tier was asked, and nothing is called corrupt while one of them could not be: then
the answer is `StoreUnavailable`. Bytes are verified as stored, as raw, and again by whoever reads them from the spool.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierd.codec import RAW, ZSTD, decode
from tierd.core.errors import (
    CorruptChunk,
    ManifestError,
    ObjectNotFound,
    SpoolFull,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import PartId, chunk_key
from tierd.core.manifest import MANIFEST_NAME, Chunk, File, Manifest, Stored
from tierd.core.manifest import decode as decode_manifest
from tierd.core.manifest import encode as encode_manifest
from tierd.core.world import SPOOL
from tierd.daemon.together import together
from tierd.device import write_all
from tierd.persist import bad_chunks, digest, sync_directory, write_file
from tierd.spool import Spool, translated
from tierd.stage import Stage
from tierd.stores.base import Buffer, Store

_CHUNKS = 3  # chunks in hand at once
_SPARE = 64 << 20  # bytes left free on the spool's disk beside what is fetched


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

    async def ask(self) -> None:
        """Read the part's manifest on every tier."""
        for name, store in self.stores.items():
            try:
                self.manifests[name] = decode_manifest(bytes(await store.get(self.part.manifest_key)), self.part)
            except ObjectNotFound:
                pass
            except ManifestError as error:
                self.defects[name] = str(error)
            except TierdError as error:  # unavailable, refused, or of a newer format: says nothing about the bytes
                self.unavailable[name] = str(error)

    def agree(self, reference: Manifest) -> None:
        """Set aside tiers whose manifest describes other content than `reference`."""
        self.reference = reference
        for name, manifest in list(self.manifests.items()):
            if not manifest.same_content(reference):
                del self.manifests[name]
                self.defects[name] = f"{name}: its manifest describes other content than the other copies"

    async def chunk(self, file: int, index: int, path: str) -> Buffer:
        """The raw bytes of one chunk, verified, from the first tier that has them right.

        Raises:
            CorruptChunk: every copy is proven bad or missing.
            StoreUnavailable: none was right, and not all could be asked.
        """
        unavailable = dict(self.unavailable)
        for name, manifest in self.manifests.items():
            chunk = manifest.files[file].chunks[index]
            key = f"{self.part.checkpoint.run}/{chunk.stored.key}" if chunk.stored else ""
            try:
                data = await self.stores[name].get(key) if key else b""
                raw = await asyncio.to_thread(decode, chunk, data, name)
                self.used.add(name)
                return raw
            except ObjectNotFound:
                self.defects[name] = f"{name}: {key} is missing"
            except CorruptChunk as error:
                self.defects[name] = str(error)
            except TierdError as error:
                unavailable[name] = str(error)
        for name in self.stores:
            if name not in self.manifests and name not in self.unavailable:
                found = await self._by_digest(name, file, index, unavailable)
                if found is not None:
                    return found
        self.give_up(f"chunk {index} of {path}", unavailable)
        raise AssertionError

    async def _by_digest(self, name: str, file: int, index: int, unavailable: dict[str, str]) -> Buffer | None:
        """A chunk from a tier whose manifest is lost or wrong: the digest in its key is proof enough."""
        assert self.reference is not None
        wanted = self.reference.files[file].chunks[index]
        for codec in (RAW, ZSTD):
            key = chunk_key(self.part, wanted.xxh3_128, codec)
            try:
                data = await self.stores[name].get(f"{self.part.checkpoint.run}/{key}")
                stored = Stored(codec=codec, size=len(data), xxh3_128=digest(data), key=key)
                chunk = Chunk(size=wanted.size, xxh3_128=wanted.xxh3_128, stored=stored)
                raw = await asyncio.to_thread(decode, chunk, data, name)
                self.used.add(name)
                return raw
            except (ObjectNotFound, CorruptChunk):
                continue
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


@dataclass(frozen=True, slots=True)
class Fetched:
    """`tiers` gave chunks; `defects` are tiers whose copy was found proven bad on the way; `chunks` were written."""

    tiers: tuple[str, ...]
    defects: Mapping[str, str]
    chunks: int


async def fetch(spool: Spool, part: PartId, stores: Mapping[str, Store]) -> Fetched:
    """Make the spool's copy of `part` whole, whatever of it is there.

    Raises:
        CorruptChunk: no copy, and no mixture of copies, is right; says why for each.
        StoreUnavailable: not known, since a tier could not be asked.
        SpoolFull: there is no room.
    """
    copies = Copies(part, stores)
    await copies.ask()
    local, defect = await asyncio.to_thread(_local_manifest, spool, part)
    reference = local or next(iter(copies.manifests.values()), None)
    if reference is None:
        if isinstance(defect, OSError):  # a disk that does not answer proves nothing about the bytes
            copies.unavailable[SPOOL] = f"local: {defect}"
        copies.give_up(str(defect or "the spool has no copy"), copies.unavailable)
        raise AssertionError
    copies.agree(reference)
    home = spool.path(part)
    with translated(f"spool {home}"):
        if home.is_dir():
            written = await _heal(home, reference, copies, rewrite_manifest=local is None)
        else:
            written = await _download(spool, part, reference, copies)
    return Fetched(tuple(name for name in stores if name in copies.used), copies.defects, written)


def _local_manifest(spool: Spool, part: PartId) -> tuple[Manifest | None, ManifestError | OSError | None]:
    try:
        return spool.manifest(part), None
    except ObjectNotFound:
        return None, None
    except (ManifestError, OSError) as error:
        return None, error


async def _heal(home: Path, manifest: Manifest, copies: Copies, *, rewrite_manifest: bool) -> int:
    """Write the chunks that are bad over themselves. They are bad already: a cut in between leaves nothing worse."""
    written = 0
    for number, file in enumerate(manifest.files):
        path = home / file.path
        await asyncio.to_thread(_make_way, home, file.path)
        if not file.chunks:
            await asyncio.to_thread(_patch, path, file, 0, b"")
            continue
        for index, offset, reason in await asyncio.to_thread(bad_chunks, path, file):
            try:
                raw = await copies.chunk(number, index, file.path)
            except CorruptChunk as error:
                if isinstance(reason, OSError):  # a disk that does not answer proves nothing about the bytes
                    raise StoreUnavailable(f"local: {reason}; {error}") from error
                raise CorruptChunk(f"local: {reason}; {error}") from error
            await asyncio.to_thread(_patch, path, file, offset, raw)
            written += 1
    if rewrite_manifest:
        await asyncio.to_thread(_replace_manifest, home, manifest)
    return written


async def _download(spool: Spool, part: PartId, manifest: Manifest, copies: Copies) -> int:
    free, _ = spool.free()
    if manifest.size + _SPARE > free:
        raise SpoolFull(f"spool {spool.root}: {part} needs {manifest.size} bytes and {free} are free")
    stage = spool.stage(part)
    try:
        await download(stage.path, manifest, copies, lambda size: None)
    except BaseException:
        await asyncio.to_thread(stage.abandon)
        raise
    await asyncio.to_thread(_commit, stage, manifest)
    return sum(len(file.chunks) for file in manifest.files)


def _commit(stage: Stage, manifest: Manifest) -> None:
    # In one thread: a caller that is cancelled meanwhile must not abandon what is just being renamed.
    with stage:
        stage.commit(manifest)


async def download(home: Path, manifest: Manifest, copies: Copies, arrived: Callable[[int], None]) -> None:
    """Write every file of `manifest` under `home` from the tiers, durably; `arrived` is told each chunk's bytes."""

    async def one(number: int, index: int, file: File, offset: int) -> None:
        raw = await copies.chunk(number, index, file.path)
        await asyncio.to_thread(_patch, home / file.path, file, offset, raw)
        arrived(len(raw))

    work = []
    for number, file in enumerate(manifest.files):
        (home / file.path).parent.mkdir(parents=True, exist_ok=True)
        _patch(home / file.path, file, 0, b"")
        offset = 0
        for index, chunk in enumerate(file.chunks):
            work.append(one(number, index, file, offset))
            offset += chunk.size
    await together(_CHUNKS, work)


def _make_way(home: Path, name: str) -> None:
    """Remove what no writer leaves on a file's path: a link, a directory in its place, a file in a directory's."""
    here = home
    for piece in name.split("/")[:-1]:
        here /= piece
        if here.is_symlink() or (here.exists() and not here.is_dir()):
            here.unlink()
    path = home / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or (path.exists() and not path.is_file()):
        path.unlink()


def _patch(path: Path, file: File, offset: int, raw: Buffer) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(fd).st_size != file.size:
            os.ftruncate(fd, file.size)
        write_all(fd, raw, offset)
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(path.parent)


def _replace_manifest(home: Path, manifest: Manifest) -> None:
    fresh = home / f"{MANIFEST_NAME}.new"
    for name in (fresh.name, MANIFEST_NAME):
        _make_way(home, name)
    fresh.unlink(missing_ok=True)
    write_file(fresh, MANIFEST_NAME, encode_manifest(manifest))
    fresh.replace(home / MANIFEST_NAME)
    sync_directory(home)
