"""One copy read again, chunk by chunk, compared with its manifest, and put right.

Law: a chunk that reads wrong is read once more before it is called corrupt: a bit that flips on the way or in memory is
no rot. A place that does not answer proves nothing, and a part that was pruned meanwhile is no finding. What is wrong
is told once, however many manifests name it and however often it is met before it can be mended.
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
from tierd.core.manifest import MANIFEST_NAME, Chunk, File, Manifest
from tierd.core.scrub import Copy
from tierd.core.world import SPOOL
from tierd.daemon.budget import Budget
from tierd.daemon.copies import read_manifest, surely
from tierd.daemon.journal import Journal
from tierd.daemon.mend import Where, get_stored, places
from tierd.daemon.pause import Turn
from tierd.daemon.repair import Repairer
from tierd.daemon.together import to_the_end
from tierd.device import LARGE
from tierd.persist import bad_chunks, open_plain, read_chunk
from tierd.spool import Spool
from tierd.stores.base import Store, weight

log = logging.getLogger("tierd.daemon")

_ROT = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)  # by which a disk says that what lay there is lost


class Reader:
    """Reads copies again, and has repaired what is wrong.

    Args:
        rate: bytes per second, for each copy that is being read.
        turn: awaited before each chunk.
        held: what must not be deleted meanwhile.

    Attributes:
        doubted: told of a tier's checkpoints under whose names objects stay bad: others may name them, too.
    """

    def __init__(
        self,
        spool: Spool,
        stores: Mapping[str, Store],
        repairer: Repairer,
        journal: Journal,
        budget: Budget,
        rate: int,
        turn: Turn,
        held: Counter[CheckpointId],
    ) -> None:
        self._spool, self._stores, self._repairer, self._journal = spool, stores, repairer, journal
        self._budget, self._rate, self._turn, self._held = budget, rate, turn, held
        self._told: set[tuple[str, str]] = set()  # what is known to be corrupt
        self.doubted: Callable[[Copy, set[CheckpointId]], None] = lambda copy, owners: None

    async def read(self, copy: Copy) -> bool:
        """Read all of a copy; whether it is right, maybe by now.

        Raises:
            ObjectNotFound: it was pruned meanwhile.
            StoreUnavailable, StoreRefused, OSError: not all of it could be read, or mended.
        """
        return await (self._read_spool(copy) if copy.place == SPOOL else self._read_tier(copy))

    async def _read_tier(self, copy: Copy) -> bool:
        """Whether all of a tier's copy is right, maybe by now."""
        store, part = self._stores[copy.place], copy.part
        try:
            manifest = await self._manifest(store, part)
        except ManifestError as error:
            self._found(copy, {part.manifest_key: str(error)}, "the manifest")
            with self._holding(part):
                return await self._repairer.rebuild(copy.place, part, str(error), self._turn)
        self._told.discard((copy.place, part.manifest_key))
        bad: dict[Where, tuple[str, str]] = {}
        failed: Exception | None = None
        for where, chunk in places(manifest):
            key = f"{part.checkpoint.run}/{chunk.stored.key}" if chunk.stored else chunk.xxh3_128
            try:
                wrong = await self._reads_wrong(store, part, chunk)
            except (TierdError, OSError) as error:
                failed = error
                break
            if wrong:
                log.error("%s: %s: %s", copy.place, part, wrong)
                bad[where] = (key, wrong)
            else:
                self._told.discard((copy.place, key))
        whole = not bad or await self._repair(copy, manifest, bad)
        if failed:
            raise failed
        return whole

    async def _manifest(self, store: Store, part: PartId) -> Manifest:
        """The tier's manifest; one that describes other content than the spool's is as wrong as a damaged one."""

        manifest = await read_manifest(store, part)
        try:
            local = await self._local_manifest(part)
        except (ObjectNotFound, ManifestError, OSError):
            return manifest
        if not manifest.same_content(local):
            raise ManifestError(f"{part}: its manifest describes other content than the spool's")
        return manifest

    async def _reads_wrong(self, store: Store, part: PartId, chunk: Chunk) -> str:
        """What is wrong with a tier's chunk; empty where it is right."""
        size = chunk.stored.size if chunk.stored else 0
        async with self._reading(size, weight(store, size)):
            try:
                await surely(lambda: get_stored(store, part.checkpoint.run, chunk))
                return ""
            except CorruptChunk as error:
                return str(error)

    async def _repair(self, copy: Copy, manifest: Manifest, bad: Mapping[Where, tuple[str, str]]) -> bool:
        part = copy.part
        with self._holding(part):
            if await self._manifest(self._stores[copy.place], part) != manifest:
                return False  # somebody else was faster: another time
            total = sum(1 for _ in manifest.chunks())
            self._found(copy, dict(bad.values()), f"{len(bad)} of {total} chunks")
            mender = await self._repairer.repair(copy.place, part, manifest, bad, self._turn)
        self._told -= {(copy.place, bad[where][0]) for where in bad.keys() - mender.left}
        stored = [manifest.files[number].chunks[index].stored for number, index in mender.left]
        owners = {chunk_owner(part.checkpoint.run, one.key) for one in stored if one}
        self.doubted(copy, {owner for owner in owners if owner})
        return not mender.lost

    async def is_right(self, part: PartId) -> bool:
        """Whether all of the spool's copy can be read and is right: at full speed, because somebody waits for it."""
        home = self._spool.path(part)
        try:
            manifest = await self._local_manifest(part)
        except (ObjectNotFound, ManifestError, OSError):
            return False
        for file in manifest.files:
            async with self._budget.take(max((chunk.size for chunk in file.chunks), default=0)):
                if await to_the_end(bad_chunks, home / file.path, file):
                    return False
        return True

    async def _read_spool(self, copy: Copy) -> bool:
        """Whether all of the spool's copy is right, maybe by now."""
        part, home = copy.part, self._spool.path(copy.part)
        try:
            manifest = await self._local_manifest(part)
        except ManifestError as error:
            self._found(copy, {f"{part.path}/{MANIFEST_NAME}": str(error)}, "the manifest")
            return await self._heal(part, counted=True)
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
            self._found(copy, wrong, f"{len(wrong)} of {total} chunks")
        elif not any(error.errno in _ROT for error in unreadable):
            if unreadable:
                raise unreadable[0]
            return True
        whole = await self._heal(part, counted=bool(wrong))
        self._told -= {(SPOOL, key) for key in wrong}
        return whole

    async def _local_manifest(self, part: PartId) -> Manifest:
        return await surely(lambda: to_the_end(self._spool.manifest, part))

    async def _wrong_in(self, path: Path, file: File) -> list[tuple[int, CorruptChunk | OSError]]:
        """What reads wrong in a file of the spool, and did so twice. A file that is too long is wrong at its end."""
        if not file.chunks:
            return [(index, reason) for index, _, reason in await to_the_end(bad_chunks, path, file)]
        found = []
        for index, chunk in enumerate(file.chunks):
            reason = None
            for _ in range(2):
                async with self._reading(chunk.size):
                    reason = await to_the_end(_wrong_on_disk, path, file, index)
                if reason is None:
                    break
                log.warning("%s: read once more: %s", path, reason)
            else:
                assert reason is not None
                found.append((index, reason))
        return found

    async def _heal(self, part: PartId, *, counted: bool) -> bool:
        with self._holding(part):
            try:
                await self._repairer.heal(part, counted=counted)
                return True
            except CorruptChunk:
                return False  # told, and set aside

    # -- how --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _reading(self, size: int, memory: int | None = None) -> AsyncIterator[None]:
        """Within, `size` bytes may be read, into as much memory or `memory`; when it ends, they have been paid for in
        time."""
        await self._turn()
        begun = time.monotonic()
        async with self._budget.take(size if memory is None else memory):
            yield
        self._journal.counters["scrubbed_bytes"] += size
        await asyncio.sleep(size / self._rate - (time.monotonic() - begun))

    @contextmanager
    def _holding(self, part: PartId) -> Iterator[None]:
        """Within, the plan deletes no copy of the part's checkpoint."""
        self._held[part.checkpoint] += 1
        try:
            yield
        finally:
            self._held -= Counter([part.checkpoint])

    def _found(self, copy: Copy, bad: Mapping[str, str], what: str) -> None:
        """Tell of what is corrupt, unless that was done."""
        fresh = [why for key, why in bad.items() if (copy.place, key) not in self._told]
        self._told |= {(copy.place, key) for key in bad}
        self._journal.counters["scrub_findings"] += len(fresh)
        if fresh:
            self._journal.counters["corruptions"] += 1
            self._journal.tell("corrupt", copy.place, copy.part, f"scrubbed, {what}: {fresh[0]}")


def _wrong_on_disk(path: Path, file: File, index: int) -> CorruptChunk | OSError | None:
    try:
        size = _uncached(path, file.chunks[index].size < LARGE)
        if index < len(file.chunks) - 1:  # of a file that is cut off or too long, what is there may be right
            file = msgspec.structs.replace(file, size=size)
        read_chunk(path, file, index)
    except (CorruptChunk, OSError) as error:
        return error.with_traceback(None)  # whose frames hold what was read
    return None


def _uncached(path: Path, small: bool) -> int:
    """A file's size. What the page cache holds of it says nothing about the disk; only `small` chunks are read from
    there."""
    fd = open_plain(path)
    try:
        if small:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
