"""Tiers -> a part's directory, chunk by chunk, limited to the chunks that are not right there already.

Invariant: a chunk on the disk is trusted only after its digest was checked in this call. Nothing is written that was
not verified in memory. Bad chunks are overwritten in place. They are bad already, so an interruption leaves nothing
worse, and the next call continues from the right chunks. A file is synced once, after its last chunk. If the sync
fails, the file is removed unless it belongs to a committed part, because the page cache then proves nothing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tierd.core.errors import ConfigError, CorruptChunk, StoreUnavailable
from tierd.core.manifest import DRAFT_NAME, ContentId, File, Manifest
from tierd.core.manifest_codec import encode
from tierd.daemon.concurrency import MemoryBudget, gather_limited, thread_uncancelled
from tierd.daemon.transfer.local_files import (
    TargetFile,
    chunks_to_write,
    clear_path,
    is_hole,
    remove_other_files,
    sync_directories,
    write_at,
)
from tierd.daemon.transfer.replicas import Replicas
from tierd.spool.direct_io import LARGE, PAGE, PIECE, reserve
from tierd.spool.file_io import Buffer, drop_cached, flat_bytes, make_private, replace_private
from tierd.spool.foreign_files import is_shared, unshare
from tierd.spool.spool_access import is_disk_full
from tierd.spool.verified_reads import read_chunk

_HANDS = 8  # chunks in transfer at once, as far as the budget permits

ChunkRuns: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]  # a file's path -> (first, end) of ranges of its chunks
# Content that other ranks hold, too -> a written file, its entry in the manifest, and the index of the chunk.
Twins: TypeAlias = dict[ContentId, tuple[Path, File, int]]


@dataclass(slots=True)
class Progress:
    """The progress of a download, in raw bytes."""

    on_progress: Callable[[Progress], None] = lambda progress: None
    done: int = 0  # bytes that are right in place
    total: int = 0
    kept_bytes: int = 0  # bytes of `done` that were in place before
    written_chunks: int = 0
    tiers: tuple[str, ...] = ()
    # By tier, the manifest that was read there, if it was readable.
    manifests: Mapping[str, Manifest] = field(default_factory=dict)

    def begin(self, total: int) -> None:
        self.done = self.kept_bytes = self.written_chunks = 0
        self.total = total
        self.on_progress(self)


async def download(
    home: Path,
    manifest: Manifest,
    copies: Replicas,
    budget: MemoryBudget,
    progress: Progress,
    *,
    committed: bool = False,
    chunk_runs: ChunkRuns | None = None,
    public: bool = False,
    twins: Twins | None = None,
) -> None:
    """Make every file of `manifest` under `home` right and durable.

    Args:
        committed: `home` is a part of the spool, whole or damaged. If False, `home` is for this download only, and all
            other files there are removed.
        chunk_runs: only these chunks. Unless `committed`, nothing is synced then, files have holes, and the manifest is
            kept in `home`.
        public: give files and directories the modes of the umask. If False, only this user can access them.
        twins: given if several ranks' parts are downloaded, one after the other: the chunks that they share, which are
            read from a tier once. This call adds its own.

    Raises:
        ConfigError: `chunk_runs` names a chunk that the part does not have.
        CorruptChunk: no copy of a chunk is right; if `committed`, the message also says what is wrong with the local
            chunk.
        StoreUnavailable: a tier could not be asked, so the result is unknown.
    """
    work = _Download(home, copies, budget, progress, committed, chunk_runs, public, twins)
    targets = await thread_uncancelled(work.lay_out, manifest)
    work.queue.extend(chunks_to_write(targets))

    async def hand() -> None:
        while work.queue:
            await work.bring(*work.queue.popleft())

    try:
        await gather_limited(_HANDS, [hand() for _ in range(_HANDS)])
    finally:
        for target in targets:
            target.close()
    if not committed and chunk_runs is not None:
        return
    if not committed:
        (home / DRAFT_NAME).unlink()
    await thread_uncancelled(sync_directories, home)


def chunk_runs_size(manifest: Manifest, chunk_runs: ChunkRuns | None) -> int:
    """Return the raw bytes of the wanted chunks; raises `ConfigError` if the part has no such chunk."""
    if chunk_runs is None:
        return manifest.size
    files = {file.path: file for file in manifest.files}
    for path, runs in chunk_runs.items():
        if path not in files or any(end > len(files[path].chunks) for _, end in runs):
            raise ConfigError(f"{manifest.part}: it has no such chunk: {path!r} {list(runs)[:3]}")
    return sum(files[path].chunks[index].size for path, runs in chunk_runs.items() for index in _numbers(runs))


def missing_bytes(home: Path, manifest: Manifest) -> int:
    """Return the most bytes of disk space that a download into `home` still needs."""
    allocated = 0
    for file in manifest.files:
        try:
            allocated += min((home / file.path).lstat().st_blocks * 512, file.size)
        except OSError:
            continue
    return manifest.size - allocated


@dataclass(slots=True)
class _Download:
    """The download of one part into `home`."""

    home: Path
    copies: Replicas
    budget: MemoryBudget
    progress: Progress
    committed: bool
    chunk_runs: ChunkRuns | None
    public: bool
    twins: Twins | None
    queue: deque[tuple[TargetFile, int, int]] = field(default_factory=deque)

    def lay_out(self, manifest: Manifest) -> list[TargetFile]:
        """Create every file with its size and blocks, so that a full disk fails before any transfer."""
        if not self.committed:
            remove_other_files(self.home, {DRAFT_NAME, *(file.path for file in manifest.files)})
        targets = [
            self._target(number, file)
            for number, file in enumerate(manifest.files)
            if self.chunk_runs is None or file.path in self.chunk_runs
        ]
        if not self.committed:
            clear_path(self.home, DRAFT_NAME)
            replace_private(self.home / DRAFT_NAME, encode(manifest))  # readers use it meanwhile
        return targets

    def _target(self, number: int, file: File) -> TargetFile:
        path = self.home / file.path
        clear_path(self.home, file.path)
        try:
            size = path.lstat().st_size
        except FileNotFoundError:
            size = -1
        if size != file.size:
            if self.committed:
                unshare(path)  # a part of a watched run may be a link to the program's own file
            if self.public:
                path.parent.mkdir(parents=True, exist_ok=True)
            else:
                make_private(path.parent)
            fd = os.open(
                path,
                os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                0o644 if self.public else 0o600,
            )
            try:
                if file.size >= LARGE and self.chunk_runs is None:
                    reserve(fd, file.size)
                os.ftruncate(fd, file.size)  # the file is too long, or its file system cannot reserve blocks
                if not file.chunks:
                    os.fsync(fd)
            finally:
                os.close(fd)
        todo = range(len(file.chunks)) if self.chunk_runs is None else _numbers(self.chunk_runs[file.path])
        return TargetFile(number, file, path, size >= 0, set(todo), self.committed and is_shared(path))

    async def bring(self, target: TargetFile, index: int, offset: int) -> None:
        """Make one chunk right in place, and sync the file after its last chunk."""
        chunk = target.file.chunks[index]
        size, twins = chunk.size, self.twins if chunk.home is not None else None
        twin_weight = 2 * size if twins and chunk.content in twins else 0
        async with self.budget.take(max(self.copies.weight(target.number, index), twin_weight)) as hold:
            defect = await self._find_defect(target, index, offset)
            if defect is None:
                self.progress.kept_bytes += size
            else:
                lead = offset % PAGE  # aligned as in the file, so that O_DIRECT needs no further copy
                with self.budget.buffers.hold(lead + size) as memory:
                    raw = await self._fetch_chunk(target, index, memory[lead:], defect)
                    # The stored bytes are released; some raw bytes may pass through another buffer.
                    hold.shrink_to(size + min(size, PIECE))
                    await self._own(target)
                    target.open()
                    await thread_uncancelled(self._write, target, raw, offset)
                self.progress.written_chunks += 1
        if twins is not None:
            twins.setdefault(chunk.content, (target.path, target.file, index))
        target.todo.discard(index)
        if not target.todo and (self.committed or self.chunk_runs is None):
            # Also if nothing was written, because an interrupted download may have left bytes in the page cache only.
            await thread_uncancelled(self._sync, target)
        self.progress.tiers = tuple(name for name in self.copies.stores if name in self.copies.used_tiers)
        self.progress.done += size
        self.progress.on_progress(self.progress)

    async def _find_defect(self, target: TargetFile, index: int, offset: int) -> CorruptChunk | OSError | None:
        """Return why a chunk is not right in the file that is at the path once this returns."""
        while True:
            shared = target.shared
            defect = await thread_uncancelled(self._defect, target, index, offset)
            if shared == target.shared:  # otherwise the file was replaced meanwhile
                break
        if shared and defect is None:
            target.right_chunks.append((index, offset))
        return defect

    async def _own(self, target: TargetFile) -> None:
        """Replace a shared file by a copy before the first write; the chunks that were right are checked again there.

        Not earlier, because a copy of each healthy file of a watched run would double its disk space.
        """
        async with target.lock:
            if not target.shared:
                return
            await thread_uncancelled(unshare, target.path)
            target.shared = False
            for index, offset in target.right_chunks:
                size = target.file.chunks[index].size
                self.progress.done -= size
                self.progress.kept_bytes -= size
                target.todo.add(index)
                self.queue.append((target, index, offset))
            target.right_chunks.clear()

    def _defect(self, target: TargetFile, index: int, offset: int) -> CorruptChunk | OSError | None:
        if not target.existed:
            return CorruptChunk(f"{target.path}: the file was missing")
        try:
            if not self.committed and is_hole(target.path, offset, target.file.chunks[index].size):
                return CorruptChunk(f"{target.path}: nothing was written there yet")
            try:
                read_chunk(target.path, target.file, index)
            except CorruptChunk:
                if not self.committed:
                    raise
                drop_cached(target.path)  # one wrong read proves nothing about the disk
                read_chunk(target.path, target.file, index)
        except (CorruptChunk, OSError) as error:
            return error.with_traceback(None)  # the traceback's frames would keep the read bytes in memory
        return None

    async def _fetch_chunk(
        self, target: TargetFile, index: int, into: memoryview, defect: CorruptChunk | OSError
    ) -> Buffer:
        if self.twins and (twin := self.twins.get(target.file.chunks[index].content)):
            with suppress(CorruptChunk, OSError):
                return await thread_uncancelled(read_chunk, *twin)
        try:
            return await self.copies.chunk(target.number, index, target.file.path, into, self.budget.buffers)
        except CorruptChunk as error:
            if isinstance(defect, OSError):  # a disk error proves nothing about the bytes
                raise StoreUnavailable(f"local: {defect}; {error}") from error
            if self.committed:
                raise CorruptChunk(f"local: {defect}; {error}") from error
            raise

    def _write(self, target: TargetFile, raw: Buffer, offset: int) -> None:
        try:
            write_at(target.path, flat_bytes(raw), offset)
        except OSError as error:
            if not self.committed and not is_disk_full(error):
                target.path.unlink(missing_ok=True)
            raise

    def _sync(self, target: TargetFile) -> None:
        try:
            target.sync()
        except OSError:
            if not self.committed:
                target.path.unlink(missing_ok=True)
            elif target.fd >= 0:  # so that the next read comes from the disk
                os.posix_fadvise(target.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            raise


def _numbers(runs: Sequence[tuple[int, int]]) -> set[int]:
    return {index for first, end in runs for index in range(first, end)}
