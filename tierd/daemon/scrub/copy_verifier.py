"""Verify one copy chunk by chunk against its manifest, and repair it.

Invariant: a chunk counts as corrupt only once two reads gave the same wrong bytes (`core.corruption`). A bit that
flips in transfer or in memory is not corruption of the stored bytes. A place that does not answer proves nothing, and
a part that was pruned meanwhile is no finding. Each corrupt object is reported once, however many manifests name it
and however often it is read before its repair.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, TierdError
from tierd.core.ids import CheckpointId, PartId, chunk_owner
from tierd.core.manifest import MANIFEST_NAME, Chunk, ChunkPlace, File, Manifest
from tierd.core.planning.background_schedule import ScrubbedCopy
from tierd.core.planning.place import SPOOL
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.tiers.tier_objects import find_chunk_defect, read_manifest, read_until_certain
from tierd.daemon.tiers.tier_pauses import Pause
from tierd.spool.direct_io import LARGE
from tierd.spool.file_io import open_plain
from tierd.spool.verified_reads import bad_chunks, read_chunk
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

_ROT = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)  # errors by which a disk reports that the stored bytes are lost


class CopyVerifier:
    """Reads copies again, and repairs corrupt ones.

    Args:
        rate: bytes per second, for each copy that is being read.
        holds: checkpoints that must not be deleted during a repair.
    """

    def __init__(self, repairer: Repairer, rate: int, pause: Pause, holds: Counter[CheckpointId]) -> None:
        self._spool, self._stores, self._journal = repairer.spool, repairer.stores, repairer.journal
        self._repairer, self._budget = repairer, repairer.budget
        self._rate, self._pause, self._holds = rate, pause, holds
        self._reported: set[tuple[str, str]] = set()  # (place, object) that were reported as corrupt
        # Called with a tier's copy and the checkpoints under whose keys objects are still bad, because other manifests
        # may name these objects.
        self.on_doubt: Callable[[ScrubbedCopy, set[CheckpointId]], None] = lambda copy, owners: None

    async def read(self, copy: ScrubbedCopy) -> bool:
        """Read and repair all of a copy.

        Returns:
            Whether the copy is right, at once or after a repair.

        Raises:
            ObjectNotFound: the copy was pruned meanwhile.
            StoreUnavailable, StoreRefused, OSError: not all of the copy could be read or repaired.
        """
        return await (self._read_spool(copy) if copy.place == SPOOL else self._read_tier(copy))

    async def _read_tier(self, copy: ScrubbedCopy) -> bool:
        """Verify and repair a tier's copy. Returns whether it is right, at once or after a repair."""
        store, part = self._stores[copy.place], copy.part
        try:
            manifest = await self._manifest(store, part)
        except ManifestError as error:
            self._report_corrupt(copy, {part.manifest_key: str(error)}, "the manifest")
            with self._hold_part(part):
                return await self._repairer.rebuild(copy.place, part, str(error), self._pause)
        self._reported.discard((copy.place, part.manifest_key))
        defects: dict[ChunkPlace, tuple[str, str]] = {}
        failed: Exception | None = None
        for where, chunk in manifest.places():
            try:
                defect = await self._defect(store, part, chunk)
            except (TierdError, OSError) as error:
                failed = error
                break
            if defect:
                log.error("%s: %s: %s", copy.place, part, defect[1])
                defects[where] = defect
            else:
                self._reported -= {(copy.place, f"{part.checkpoint.run}/{stored.key}") for stored in chunk.objects()}
        is_right = not defects or await self._repair(copy, manifest, defects)
        if failed:
            raise failed
        return is_right

    async def _manifest(self, store: Store, part: PartId) -> Manifest:
        """Read the tier's manifest. One that contradicts the spool's manifest counts as damaged."""

        manifest = await read_manifest(store, part)
        try:
            local = await self._local_manifest(part)
        except (ObjectNotFound, ManifestError, OSError):
            return manifest
        if not manifest.same_content(local):
            raise ManifestError(f"{part}: its manifest describes other content than the spool's")
        return manifest

    async def _defect(self, store: Store, part: PartId, chunk: Chunk) -> tuple[str, str] | None:
        """Return the key and the defect of the first of a chunk's objects that is not right; None if all are."""
        run = part.checkpoint.run
        for link in chunk.chain():
            size = link.stored.size if link.stored else 0
            async with self._throttled_read(size, store.memory_for(size)):
                if defect := await find_chunk_defect(store, run, link):
                    return f"{run}/{link.stored.key}" if link.stored else link.xxh3_128, defect
        return None

    async def _repair(
        self, copy: ScrubbedCopy, manifest: Manifest, defects: Mapping[ChunkPlace, tuple[str, str]]
    ) -> bool:
        part = copy.part
        with self._hold_part(part):
            if await self._manifest(self._stores[copy.place], part) != manifest:
                return False  # another process has replaced the manifest: the copy is read again later
            total = sum(1 for _ in manifest.chunks())
            self._report_corrupt(copy, dict(defects.values()), f"{len(defects)} of {total} chunks")
            work = await self._repairer.repair(copy.place, part, manifest, defects, self._pause)
        self._reported -= {(copy.place, defects[where][0]) for where in defects.keys() - work.unrepaired}
        unrepaired = [manifest.files[number].chunks[index] for number, index in work.unrepaired]
        owners = {chunk_owner(part.checkpoint.run, stored.key) for chunk in unrepaired for stored in chunk.objects()}
        self.on_doubt(copy, {owner for owner in owners if owner})
        return not work.lost_reasons

    async def is_right(self, part: PartId) -> bool:
        """Whether all of the spool's copy can be read and is right. Reads at full speed, because a request waits."""
        home = self._spool.path(part)
        try:
            manifest = await self._local_manifest(part)
        except (ObjectNotFound, ManifestError, OSError):
            return False
        for file in manifest.files:
            async with self._budget.take(max((chunk.size for chunk in file.chunks), default=0)):
                if await thread_uncancelled(bad_chunks, home / file.path, file):
                    return False
        return True

    async def _read_spool(self, copy: ScrubbedCopy) -> bool:
        """Verify and repair the spool's copy. Returns whether it is right, at once or after a repair."""
        part, home = copy.part, self._spool.path(copy.part)
        try:
            manifest = await self._local_manifest(part)
        except ManifestError as error:
            self._report_corrupt(copy, {f"{part.path}/{MANIFEST_NAME}": str(error)}, "the manifest")
            return await self._repair_spool(part, counted=True)
        wrong: dict[str, str] = {}
        unreadable: list[OSError] = []
        for file in manifest.files:
            for index, reason in await self._wrong_in(home / file.path, file):
                if isinstance(reason, OSError):
                    unreadable.append(reason)
                else:
                    log.error("%s: %s: %s", SPOOL, part, reason)
                    wrong[f"{part.path}/{file.path}:{index}"] = str(reason)
        if not home.is_dir():
            raise ObjectNotFound(f"{part} is not in the spool any more")
        if wrong:
            total = sum(1 for _ in manifest.chunks())
            self._report_corrupt(copy, wrong, f"{len(wrong)} of {total} chunks")
        elif not any(error.errno in _ROT for error in unreadable):
            if unreadable:
                raise unreadable[0]
            return True
        is_right = await self._repair_spool(part, counted=bool(wrong))
        self._reported -= {(SPOOL, key) for key in wrong}
        return is_right

    async def _local_manifest(self, part: PartId) -> Manifest:
        return await read_until_certain(lambda: thread_uncancelled(self._spool.manifest, part))

    async def _wrong_in(self, path: Path, file: File) -> list[tuple[int, CorruptChunk | OSError]]:
        """Return the chunks of a file in the spool that are proven wrong, or cannot be read.

        A file that is too long is wrong in its last chunk.
        """
        if not file.chunks:
            return [(index, reason) for index, _, reason in await thread_uncancelled(bad_chunks, path, file)]
        wrong = []
        for index, chunk in enumerate(file.chunks):
            async with self._throttled_read(chunk.size):
                reason = await thread_uncancelled(_wrong_on_disk, path, file, index)
            if reason is not None:
                async with self._throttled_read(chunk.size):  # it was read again, so its rate is that of two reads
                    wrong.append((index, reason))
        return wrong

    async def _repair_spool(self, part: PartId, *, counted: bool) -> bool:
        with self._hold_part(part):
            try:
                await self._repairer.repair_spool(part, counted=counted)
                return True
            except CorruptChunk:
                return False  # reported and quarantined by `repair_spool`

    # -- rate, holds and events -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _throttled_read(self, size: int, memory: int | None = None) -> AsyncIterator[None]:
        """A context for reading `size` bytes with `memory` bytes of the budget. Its end waits to keep the rate."""
        await self._pause()
        started_s = time.monotonic()
        async with self._budget.take(size if memory is None else memory):
            yield
        self._journal.counters["scrubbed_bytes"] += size
        await asyncio.sleep(size / self._rate - (time.monotonic() - started_s))

    @contextmanager
    def _hold_part(self, part: PartId) -> Iterator[None]:
        """A context within which the plan deletes no copy of the part's checkpoint."""
        self._holds[part.checkpoint] += 1
        try:
            yield
        finally:
            self._holds -= Counter([part.checkpoint])

    def _report_corrupt(self, copy: ScrubbedCopy, defects: Mapping[str, str], subject: str) -> None:
        """Report corrupt objects that were not reported before."""
        fresh = [why for key, why in defects.items() if (copy.place, key) not in self._reported]
        self._reported |= {(copy.place, key) for key in defects}
        self._journal.counters["scrub_findings"] += len(fresh)
        if fresh:
            self._journal.counters["corruptions"] += 1
            self._journal.record("corrupt", copy.place, copy.part, f"scrubbed, {subject}: {fresh[0]}")


def _wrong_on_disk(path: Path, file: File, index: int) -> CorruptChunk | OSError | None:
    try:
        size = _drop_cached(path, file.chunks[index].size < LARGE)
        if index < len(file.chunks) - 1:  # a truncated or overlong file may still have this chunk right
            file = msgspec.structs.replace(file, size=size)
        read_chunk(path, file, index)
    except (CorruptChunk, OSError) as error:
        return error.with_traceback(None)  # the traceback's frames would keep the read bytes in memory
    return None


def _drop_cached(path: Path, small: bool) -> int:
    """Return a file's size, after dropping the file from the page cache if `small`.

    The cache says nothing about the bytes on the disk, and only small chunks are read through it.
    """
    fd = open_plain(path)
    try:
        if small:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
