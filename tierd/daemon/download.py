"""Tiers -> a part's directory, chunk by chunk, and only those chunks that are not right there already.

Law: what lies there is trusted only once its digests were checked in this very call, and nothing is written that was
not verified in memory. Bad chunks are overwritten in place: they are bad already, so a cut in between leaves nothing
worse, and the next call goes on from what is right. A file is synced once, when its last chunk is in. Where that fails,
a file that is no committed part's is removed: what a page cache shows of it proves nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tierd.core.errors import ConfigError, CorruptChunk, StoreUnavailable
from tierd.core.manifest import DRAFT_NAME, File, Manifest, encode
from tierd.daemon.budget import Budget
from tierd.daemon.copies import Copies
from tierd.daemon.together import to_the_end, together
from tierd.device import LARGE, PAGE, PIECE, memory_for, reserve, set_direct, write_all
from tierd.persist import Buffer, flat, make_private, private, read_chunk, remove, sync_directory

_HANDS = 8  # chunks on their way at once, as far as the budget goes
_FULL = (errno.ENOSPC, errno.EDQUOT)

Wanted: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]  # a file's path -> (first, end) of runs of its chunks


@dataclass(slots=True)
class Progress:
    """How far it is, in raw bytes: `done` of `total` are right in place, `kept` of them were there before. `tiers` gave
    the others, `written` chunks. `told` is called when it has moved."""

    told: Callable[[Progress], None] = lambda progress: None
    done: int = 0
    total: int = 0
    kept: int = 0
    written: int = 0
    tiers: tuple[str, ...] = ()

    def begin(self, total: int) -> None:
        self.done = self.kept = self.written = 0
        self.total = total
        self.told(self)


@dataclass(slots=True)
class _Target:
    """A file of the part. `found`: it was there. It is synced when all chunks that are `todo` are right."""

    number: int
    file: File
    path: Path
    found: bool
    todo: set[int]
    fd: int = -1  # open from the first write to the sync, so that no failed write-back goes unnoticed

    def open(self, flags: int = os.O_WRONLY) -> None:
        if self.fd < 0:
            self.fd = os.open(self.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)

    def sync(self) -> None:
        self.open(os.O_RDONLY)  # where nothing was written, nobody need be allowed to
        os.fsync(self.fd)
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


async def download(
    home: Path,
    manifest: Manifest,
    copies: Copies,
    budget: Budget,
    progress: Progress,
    *,
    committed: bool = False,
    wanted: Wanted | None = None,
    public: bool = False,
) -> None:
    """Make every file of `manifest` under `home` right and durable.

    Args:
        committed: `home` is a part of the spool, whole or damaged. If not, it is a place for this download alone, and
            whatever else lies there goes.
        wanted: only these chunks. Where not `committed`, nothing is synced then, files have holes, and the manifest
            stays beside them.
        public: files and directories have the modes that the umask gives them, and are not this user's alone.

    Raises:
        ConfigError: `wanted` names what the part does not have.
        CorruptChunk: no copy of a chunk is right; where `committed`, says what is wrong with the one here, too.
        StoreUnavailable: not known, since a tier could not be asked.
        OSError: as the system reports it.
    """
    work = _Download(home, copies, budget, progress, committed, wanted, public)
    targets = await to_the_end(work.lay_out, manifest)
    todo = _chunks(targets)

    async def hand() -> None:
        for target, index, offset in todo:
            await work.bring(target, index, offset)

    try:
        await together(_HANDS, [hand() for _ in range(_HANDS)])
    finally:
        for target in targets:
            target.close()
    if not committed and wanted is not None:
        return
    if not committed:
        (home / DRAFT_NAME).unlink()
    await to_the_end(_sync_directories, home)


def wanted_size(manifest: Manifest, wanted: Wanted | None) -> int:
    """The raw bytes of the chunks that are wanted; raises `ConfigError` where the part has no such chunk."""
    if wanted is None:
        return manifest.size
    files = {file.path: file for file in manifest.files}
    for path, runs in wanted.items():
        if path not in files or any(end > len(files[path].chunks) for _, end in runs):
            raise ConfigError(f"{manifest.part}: it has no such chunk: {path!r} {list(runs)[:3]}")
    return sum(files[path].chunks[index].size for path, runs in wanted.items() for index in _numbers(runs))


def missing(home: Path, manifest: Manifest) -> int:
    """The bytes of disk that a download into `home` still needs, at most."""
    there = 0
    for file in manifest.files:
        try:
            there += min((home / file.path).lstat().st_blocks * 512, file.size)
        except OSError:
            continue
    return manifest.size - there


class _Download:
    """One part on its way into `home`."""

    def __init__(
        self,
        home: Path,
        copies: Copies,
        budget: Budget,
        progress: Progress,
        committed: bool,
        wanted: Wanted | None,
        public: bool,
    ) -> None:
        self._private = not public
        self._home, self._copies, self._budget, self._progress = home, copies, budget, progress
        self._committed, self._wanted = committed, wanted

    def lay_out(self, manifest: Manifest) -> list[_Target]:
        """Give every file its place, size and blocks, so that a full disk says so first."""
        if not self._committed:
            _remove_strangers(self._home, {DRAFT_NAME, *(file.path for file in manifest.files)})
        targets = [
            self._target(number, file)
            for number, file in enumerate(manifest.files)
            if self._wanted is None or file.path in self._wanted
        ]
        if not self._committed:
            self._draft(encode(manifest))
        return targets

    def _draft(self, data: bytes) -> None:
        """Put the manifest there, for whoever reads along: never a part of it, since somebody may be reading now."""
        make_way(self._home, DRAFT_NAME)
        fresh = self._home / f"{DRAFT_NAME}.new"
        with open(fresh, "wb", opener=private) as file:
            file.write(data)
        fresh.replace(self._home / DRAFT_NAME)

    def _target(self, number: int, file: File) -> _Target:
        path = self._home / file.path
        make_way(self._home, file.path)
        try:
            size = path.lstat().st_size
        except FileNotFoundError:
            size = -1
        if size != file.size:
            if self._private:
                make_private(path.parent)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600 if self._private else 0o644
            )
            try:
                if file.size >= LARGE and self._wanted is None:
                    reserve(fd, file.size)
                os.ftruncate(fd, file.size)  # it is too long, or its file system reserves nothing
                if not file.chunks:
                    os.fsync(fd)
            finally:
                os.close(fd)
        todo = range(len(file.chunks)) if self._wanted is None else _numbers(self._wanted[file.path])
        return _Target(number, file, path, size >= 0, set(todo))

    async def bring(self, target: _Target, index: int, offset: int) -> None:
        """Have one chunk right in its place, and the file synced if it was the last."""
        size = target.file.chunks[index].size
        async with self._budget.take(self._copies.weight(target.number, index)) as hold:
            bad = await to_the_end(self._defect, target, index, offset)
            if bad is None:
                self._progress.kept += size
            else:
                raw = await self._fetched(target, index, offset, bad)
                hold.keep(size + min(size, PIECE))  # the stored bytes are gone; some may go through another buffer
                target.open()
                await to_the_end(self._write, target, raw, offset)
                self._progress.written += 1
        target.todo.discard(index)
        if not target.todo and (self._committed or self._wanted is None):
            # Even if nothing was written: what an interrupted one left may lie in the page cache alone.
            await to_the_end(self._sync, target)
        self._progress.tiers = tuple(name for name in self._copies.stores if name in self._copies.used)
        self._progress.done += size
        self._progress.told(self._progress)

    def _defect(self, target: _Target, index: int, offset: int) -> CorruptChunk | OSError | None:
        if not target.found:
            return CorruptChunk(f"{target.path}: the file was missing")
        try:
            if not self._committed and _is_hole(target.path, offset, target.file.chunks[index].size):
                return CorruptChunk(f"{target.path}: nothing was written there yet")
            read_chunk(target.path, target.file, index)
        except (CorruptChunk, OSError) as error:
            return error.with_traceback(None)  # whose frames hold what was read
        return None

    async def _fetched(self, target: _Target, index: int, offset: int, bad: CorruptChunk | OSError) -> Buffer:
        try:
            return await self._copies.chunk(target.number, index, target.file.path, offset % PAGE)
        except CorruptChunk as error:
            if isinstance(bad, OSError):  # a disk that does not answer proves nothing about the bytes
                raise StoreUnavailable(f"local: {bad}; {error}") from error
            if self._committed:
                raise CorruptChunk(f"local: {bad}; {error}") from error
            raise

    def _write(self, target: _Target, raw: Buffer, offset: int) -> None:
        try:
            _write_at(target.path, flat(raw), offset)
        except OSError as error:
            if not self._committed and error.errno not in _FULL:
                target.path.unlink(missing_ok=True)
            raise

    def _sync(self, target: _Target) -> None:
        try:
            target.sync()
        except OSError:
            if not self._committed:
                target.path.unlink(missing_ok=True)
            elif target.fd >= 0:  # the next one is to see what the disk has
                os.posix_fadvise(target.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            raise


def _numbers(runs: Sequence[tuple[int, int]]) -> set[int]:
    return {index for first, end in runs for index in range(first, end)}


def _chunks(targets: list[_Target]) -> Iterator[tuple[_Target, int, int]]:
    for target in targets:
        offset = 0
        for index, chunk in enumerate(target.file.chunks):
            if index in target.todo:
                yield target, index, offset
            offset += chunk.size


def _is_hole(path: Path, offset: int, size: int) -> bool:
    """Whether nothing of a range was ever written, as far as the file system says."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + size
    except OSError as error:
        return error.errno == errno.ENXIO  # a hole up to the end
    finally:
        os.close(fd)


def _write_at(path: Path, data: memoryview, offset: int) -> None:
    """Write past the page cache what are whole pages of the file; neighbours that share a page with a chunk are written
    at the same time, through the cache. A descriptor of its own: O_DIRECT belongs to the descriptor."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        edge = -offset % PAGE if len(data) >= LARGE else len(data)
        write_all(fd, data[:edge], offset)
        body, offset = data[edge:], offset + edge
        if body and set_direct(fd, True) and not _is_aligned(body):
            spare = memory_for(PIECE)
            while body:
                piece = spare[: min(PIECE, len(body))]
                piece[:] = body[: len(piece)]
                write_all(fd, piece, offset)
                body, offset = body[len(piece) :], offset + len(piece)
        write_all(fd, body, offset)
    finally:
        os.close(fd)


def _is_aligned(data: memoryview) -> bool:
    return not data.readonly and ctypes.addressof(ctypes.c_char.from_buffer(data)) % PAGE == 0


def make_way(home: Path, name: str) -> None:
    """Remove what no writer leaves on a file's path: a link, a directory in its place, a file in a directory's."""
    here = home
    for piece in name.split("/")[:-1]:
        here /= piece
        if here.is_symlink() or (here.exists() and not here.is_dir()):
            here.unlink()
    path = home / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        remove(path)


def _remove_strangers(home: Path, files: set[str]) -> None:
    """Remove what is none of `files`, from a directory that is to hold nothing else."""
    above = {name.rsplit("/", depth)[0] for name in files for depth in range(1, name.count("/") + 1)}
    for directory, names, leaves in os.walk(home):
        here = Path(directory)
        for name in (*names, *leaves):
            inside = (here / name).relative_to(home).as_posix()
            if inside in files or inside in above:
                continue
            remove(here / name)
            if name in names:  # what is gone is not walked into
                names.remove(name)


def _sync_directories(home: Path) -> None:
    for directory, _, _ in os.walk(home, topdown=False):
        sync_directory(Path(directory))
