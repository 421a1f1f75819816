"""Tier -> spool: make a part whole again from any tiers that have its chunks right, or fetch some of its chunks.

Invariant: a part appears in the spool whole or not at all. An interrupted fetch leaves its chunks under a fixed name.
The next fetch of the part finds that name and keeps the chunks whose digests are right. Bytes are verified as stored,
as raw, and again by the process that reads them from the spool.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, SpoolFull
from tierd.core.ids import PartId
from tierd.core.manifest import DRAFT_NAME, MANIFEST_NAME, Manifest
from tierd.core.manifest_codec import encode as encode_manifest
from tierd.core.planning.place import SPOOL
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.download import Progress, Wanted, download, missing, wanted_size
from tierd.daemon.transfer.download_files import make_way
from tierd.daemon.transfer.memory_budget import Budget
from tierd.daemon.transfer.replicas import ANSWER_S, Replicas
from tierd.spool.conditions import translated
from tierd.spool.file_io import drop_cached, sync_directory, write_file
from tierd.spool.spool import Spool
from tierd.spool.stage import Stage, make_locked
from tierd.stores.base import Store

_SPARE = 64 << 20  # bytes left free on the spool's disk besides the fetch, at most
_SPARE_SHARE = 32  # on a small disk, this fraction (1/32) of it is left free


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of a fetch.

    Attributes:
        tiers: the tiers that provided chunks.
        defects: by tier, why its copy was found to be bad.
        chunks: the number of chunks that were written.
    """

    tiers: tuple[str, ...]
    defects: Mapping[str, str]
    chunks: int


async def fetch(
    spool: Spool,
    part: PartId,
    stores: Mapping[str, Store],
    budget: Budget | None = None,
    progress: Progress | None = None,
    wanted: Wanted | None = None,
    partial: Partial | None = None,
    answer_s: float = ANSWER_S,
) -> FetchResult:
    """Make the spool's copy of `part` whole, from any state including an absent copy.

    Args:
        spool: the spool.
        part: the part.
        stores: the tiers.
        budget: the memory budget.
        progress: updated during the fetch, for observers.
        wanted: fetch only these chunks; a part that is not in the spool is kept in `partial`, and is not committed.
        partial: the stage in which the part is assembled. If given, the caller releases its lock, unless the part was
            committed.
        answer_s: seconds that a tier may take for its manifest.

    Raises:
        ConfigError: `wanted` names a chunk that the part does not have.
        CorruptChunk: no copy, and no mixture of copies, is right; the message says why for each.
        ObjectNotFound: no place has a copy.
        StoreUnavailable: a tier could not be asked, so the result is unknown.
        SpoolFull: the disk lacks space.
    """
    progress = progress or Progress()
    copies = Replicas(part, stores, answer_s=answer_s)
    await copies.ask()
    progress.manifests = dict(copies.manifests)
    local, defect = await to_the_end(_local_manifest, spool, part)
    contents = [local] if local else copies.contents()  # the spool's manifest takes precedence
    if not contents:
        if isinstance(defect, OSError):  # a disk error proves nothing about the bytes
            copies.unavailable[SPOOL] = f"local: {defect}"
        if not (defect or copies.unavailable or copies.defects):  # nothing is wrong: the part was pruned, for example
            raise ObjectNotFound(f"{part}: neither the spool nor any tier has a copy")
        raise copies.lost(str(defect or "the spool has no copy"), copies.unavailable)
    budget, home = budget or Budget(), spool.path(part)
    for reference in contents:
        copies.trust(reference)
        progress.begin(wanted_size(reference, wanted))
        try:
            with translated(f"spool {home}", home):
                if spool.holds(part):
                    to_fetch = wanted if reference is local else None  # a new manifest requires all chunks
                    await download(home, reference, copies, budget, progress, committed=True, wanted=to_fetch)
                    if reference is not local:
                        await to_the_end(_replace_manifest, spool, part, reference)
                    break
                place = partial or Partial(spool, part)
                try:
                    await _download(spool, place, reference, copies, budget, progress, wanted)
                    break
                finally:
                    if partial is None:
                        place.leave()
        except CorruptChunk:
            if reference is contents[-1]:
                raise
    return FetchResult(progress.tiers, copies.defects, progress.written)


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
        make_way(home, name)
    fresh.unlink(missing_ok=True)
    write_file(fresh, MANIFEST_NAME, encode_manifest(manifest))
    fresh.replace(home / MANIFEST_NAME)
    sync_directory(home)


class Partial(Stage):
    """A stage that the next fetch of its part finds again. While it is locked, no sweep removes it."""

    def __init__(self, spool: Spool, part: PartId) -> None:
        self.part, self._target, self._spool = part, spool.path(part), spool
        self._committed = lambda: None  # a fetched part was not saved here
        self.path, self._fd = spool.fetching(part), -1

    def take(self) -> None:
        """Create the stage, or find it again, and lock it.

        This is not part of the constructor, so that a caller that is cancelled here has an object to release.
        """
        self._spool.check_way(self.part.checkpoint.run)
        if self._fd < 0:
            self._fd = make_locked(self.path)

    def commit(self, manifest: Manifest) -> None:
        self._spool.clear_way(self.part)
        super().commit(manifest)

    def leave(self) -> None:
        """Release the lock, and keep the chunks; harmless after `commit` and `abandon`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


async def _download(
    spool: Spool,
    partial: Partial,
    manifest: Manifest,
    copies: Replicas,
    budget: Budget,
    progress: Progress,
    chunk_runs: Wanted | None,
) -> None:
    try:
        await to_the_end(partial.take)
        await to_the_end(_make_room, spool, partial, manifest, chunk_runs)
        await download(partial.path, manifest, copies, budget, progress, wanted=chunk_runs)
        if chunk_runs is None:
            await to_the_end(partial.commit, manifest)
    except CorruptChunk:
        await to_the_end(partial.abandon)  # no tier has the part right, so no later fetch will want it
        raise


def _make_room(spool: Spool, partial: Partial, manifest: Manifest, chunk_runs: Wanted | None) -> None:
    """Check that the disk has space for the missing chunks. If not, first delete other interrupted fetches."""
    spare = min(_SPARE, spool.free()[1] // _SPARE_SHARE)
    needed_bytes = min(missing(partial.path, manifest), wanted_size(manifest, chunk_runs)) + spare
    if needed_bytes > spool.free()[0]:
        for name in spool.leftovers():
            if name.startswith("fetch/"):
                spool.discard(name)
    free, _ = spool.free()
    if needed_bytes > free:
        need = f"{needed_bytes} bytes more, {spare} of them to spare"
        raise SpoolFull(f"spool {spool.root}: {partial.part} needs {need}, and {free} are free")
