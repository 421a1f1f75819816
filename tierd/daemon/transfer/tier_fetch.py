"""Parts from other tiers: fetched into the spool, whole or in chunks, or relayed to a tier that wants them.

Invariants: a part appears in the spool whole or not at all, and an interrupted fetch leaves its chunks under a fixed
name, which the next fetch finds. A relay is a flush whose stored bytes are copied unchanged. Every chunk is compared
with its digest; it is called corrupt only if no tier has it right.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tierd.codec.chunk_codec import EncodedChunk
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, SpoolFull, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import DRAFT_NAME, MANIFEST_NAME, ChunkPlace, File, Manifest
from tierd.core.manifest_codec import encode as encode_manifest
from tierd.core.planning.place import SPOOL
from tierd.daemon.concurrency import MemoryBudget, thread_uncancelled
from tierd.daemon.tiers.tier_objects import get_stored
from tierd.daemon.transfer.chunk_source import ChunkSource, TierUploadContext, stored_as
from tierd.daemon.transfer.download import ChunkRuns, Progress, chunk_runs_size, download, missing_bytes
from tierd.daemon.transfer.flush import FlushResult, send_part
from tierd.daemon.transfer.local_files import clear_path
from tierd.daemon.transfer.replicas import ANSWER_S, Replicas
from tierd.spool.file_io import drop_cached, sync_directory, write_file
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors
from tierd.spool.stage import Stage, make_locked_directory
from tierd.stores.base import Store

_SPARE = 64 << 20  # bytes left free on the spool's disk besides the fetch, at most
_SPARE_SHARE = 32  # on a small disk, this fraction (1/32) of it is left free


@dataclass(frozen=True, slots=True)
class FetchResult:
    tiers: tuple[str, ...]
    defects: Mapping[str, str]  # by tier, why its copy was found to be bad
    chunks: int  # the number of chunks that were written


async def fetch(
    spool: Spool,
    part: PartId,
    stores: Mapping[str, Store],
    budget: MemoryBudget | None = None,
    progress: Progress | None = None,
    chunk_runs: ChunkRuns | None = None,
    partial: PartialFetch | None = None,
    answer_s: float = ANSWER_S,
) -> FetchResult:
    """Make the spool's copy of `part` whole, from any state including an absent copy.

    Args:
        chunk_runs: fetch only these chunks; a part that is not in the spool is kept in `partial`, and is not committed.
        partial: the stage in which the part is assembled. If given, the caller releases its lock, unless the part was
            committed.

    Raises:
        ConfigError: `chunk_runs` names a chunk that the part does not have.
        CorruptChunk: no copy, and no mixture of copies, is right; the message says why for each.
        ObjectNotFound: no place has a copy.
        StoreUnavailable: a tier could not be asked, so the result is unknown.
        SpoolFull: the disk lacks space.
    """
    progress = progress or Progress()
    copies = Replicas(part, stores, answer_s=answer_s)
    await copies.read_manifests()
    progress.manifests = dict(copies.manifests)
    local, defect = await thread_uncancelled(_local_manifest, spool, part)
    contents = [local] if local else copies.contents()  # the spool's manifest takes precedence
    if not contents:
        if isinstance(defect, OSError):  # a disk error proves nothing about the bytes
            copies.unavailable[SPOOL] = f"local: {defect}"
        if not (defect or copies.unavailable or copies.defects):  # nothing is wrong: the part was pruned, for example
            raise ObjectNotFound(f"{part}: neither the spool nor any tier has a copy")
        raise copies.lost_error(str(defect or "the spool has no copy"), copies.unavailable)
    budget, home = budget or MemoryBudget(), spool.path(part)
    for reference in contents:
        copies.trust(reference)
        progress.begin(chunk_runs_size(reference, chunk_runs))
        try:
            with spool_errors(f"spool {home}", home):
                if spool.holds(part):
                    to_fetch = chunk_runs if reference is local else None  # a new manifest requires all chunks
                    await download(home, reference, copies, budget, progress, committed=True, chunk_runs=to_fetch)
                    if reference is not local:
                        await thread_uncancelled(_replace_manifest, spool, part, reference)
                    break
                place = partial or PartialFetch(spool, part)
                try:
                    await _download(spool, place, reference, copies, budget, progress, chunk_runs)
                    break
                finally:
                    if partial is None:
                        place.leave()
        except CorruptChunk:
            if reference is contents[-1]:
                raise
    return FetchResult(progress.tiers, copies.defects, progress.written_chunks)


def _local_manifest(spool: Spool, part: PartId) -> tuple[Manifest | None, ManifestError | OSError | None]:
    try:
        try:
            return spool.manifest(part), None
        except ManifestError:
            drop_cached(spool.path(part) / MANIFEST_NAME)  # one wrong read proves nothing about the disk
            return spool.manifest(part), None
    except ObjectNotFound:
        return None, None
    except (ManifestError, OSError) as error:
        return None, error


def _replace_manifest(spool: Spool, part: PartId, manifest: Manifest) -> None:
    home = spool.path(part)
    fresh = home / DRAFT_NAME
    for name in (fresh.name, MANIFEST_NAME):
        clear_path(home, name)
    fresh.unlink(missing_ok=True)
    write_file(fresh, MANIFEST_NAME, encode_manifest(manifest))
    fresh.replace(home / MANIFEST_NAME)
    sync_directory(home)


class PartialFetch(Stage):
    """A stage that the next fetch of its part finds again. While it is locked, no sweep removes it."""

    def __init__(self, spool: Spool, part: PartId) -> None:
        self.part, self._target, self._spool = part, spool.path(part), spool
        self._committed = lambda: None  # a fetched part was not saved here
        self.path, self._fd = spool.fetch_directory(part), -1

    def take(self) -> None:
        """Create the stage, or find it again, and lock it.

        This is not part of the constructor, so that a caller that is cancelled here has an object to release.
        """
        self._spool.check_run_directory(self.part.checkpoint.run)
        if self._fd < 0:
            self._fd = make_locked_directory(self.path)

    def commit(self, manifest: Manifest) -> None:
        self._spool.remove_obstacles(self.part)
        super().commit(manifest)

    def leave(self) -> None:
        """Release the lock, and keep the chunks; harmless after `commit` and `abandon`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


async def _download(
    spool: Spool,
    partial: PartialFetch,
    manifest: Manifest,
    copies: Replicas,
    budget: MemoryBudget,
    progress: Progress,
    chunk_runs: ChunkRuns | None,
) -> None:
    try:
        await thread_uncancelled(partial.take)
        await thread_uncancelled(_make_room, spool, partial, manifest, chunk_runs)
        await download(partial.path, manifest, copies, budget, progress, chunk_runs=chunk_runs)
        if chunk_runs is None:
            await thread_uncancelled(partial.commit, manifest)
    except CorruptChunk:
        await thread_uncancelled(partial.abandon)  # no tier has the part right, so no later fetch will want it
        raise


def _make_room(spool: Spool, partial: PartialFetch, manifest: Manifest, chunk_runs: ChunkRuns | None) -> None:
    """Check that the disk has space for the missing chunks. If not, first delete other interrupted fetches."""
    spare = min(_SPARE, spool.free()[1] // _SPARE_SHARE)
    needed_bytes = min(missing_bytes(partial.path, manifest), chunk_runs_size(manifest, chunk_runs)) + spare
    if needed_bytes > spool.free()[0]:
        for name in spool.leftovers():
            if name.startswith("fetch/"):
                spool.discard(name)
    free, _ = spool.free()
    if needed_bytes > free:
        need = f"{needed_bytes} bytes more, {spare} of them to spare"
        raise SpoolFull(f"spool {spool.root}: {partial.part} needs {need}, and {free} are free")


async def relay(
    stores: Mapping[str, Store],
    part: PartId,
    route: TierUploadContext,
    *,
    base: Manifest | None = None,
    worn_out: Collection[CheckpointId] = (),
    run: str = "",
    read: Callable[[int], None] = lambda size: None,
) -> FlushResult:
    """Copy a part to a tier from the other tiers that have it.

    Args:
        base, worn_out: as for `flush.flush`.
        run: the run's name on the tier; empty for the part's own run.
        read: called with the raw bytes of each chunk that was read from another tier.

    Raises:
        ObjectNotFound: no other tier has the part.
        CorruptChunk: every copy of a chunk, or of the manifest, is proven bad; nothing was made visible.
    """
    copies = Replicas(part, stores)
    await copies.read_manifests()
    if not (copies.manifests or copies.unavailable or copies.defects):
        raise ObjectNotFound(f"{part} is on no other tier")
    manifest = copies.first_content()
    copies.trust(manifest)
    manifest = manifest.under(run or manifest.run)
    return await send_part(
        manifest, manifest.part, route, _TierChunkSource(copies, manifest.part, route, read), base, worn_out
    )


class _TierChunkSource(ChunkSource):
    """The other tiers' copies of a part, in order of preference.

    Args:
        part: the part's name on the tier to which it is sent.
    """

    def __init__(self, copies: Replicas, part: PartId, route: TierUploadContext, read: Callable[[int], None]) -> None:
        self._copies, self._part, self._route, self._on_read = copies, part, route, read

    @asynccontextmanager
    async def read(self, where: ChunkPlace, file: File) -> AsyncIterator[EncodedChunk]:
        yield await self._read(where, file)
        self._on_read(file.chunks[where[1]].size)

    async def _read(self, where: ChunkPlace, file: File) -> EncodedChunk:
        for name, manifest in list(self._copies.manifests.items()):
            chunk = manifest.chunk(where)
            if chunk.stored is None or chunk.stored.base:
                break  # the base may not be on this tier
            try:
                store, source = self._copies.stores[name], self._copies.part.checkpoint.run
                data = await get_stored(store, source, chunk)
            except CorruptChunk as error:
                self._copies.defects[name] = str(error)
            except TierdError:
                continue  # `chunk` below asks this tier again, and keeps its error
            else:
                return stored_as(self._part, file.chunks[where[1]], chunk.stored, data)
        number, index = where
        raw = await self._copies.chunk(number, index, file.path)
        throughput = self._route.throughput
        return await thread_uncancelled(
            throughput.encode, self._part, file.chunks[index], raw, throughput.should_compress()
        )
