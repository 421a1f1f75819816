"""The files under a part's directory into which a download writes. Synchronous."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierd.core.manifest import File
from tierd.spool.direct_io import write_pages
from tierd.spool.file_io import remove, sync_directory


@dataclass(slots=True)
class Target:
    """A file of the part.

    Attributes:
        number: its number in the manifest.
        file: its description.
        path: its path on the disk.
        found: whether the file existed before.
        todo: the chunks that must still be right before the file is synced.
        shared: whether another program may know the file by a second name, so that it must not be written.
        right: index and offset of the chunks that were found right while the file was shared.
        lock: held while the file is replaced by a copy of its own.
    """

    number: int
    file: File
    path: Path
    found: bool
    todo: set[int]
    shared: bool = False
    right: list[tuple[int, int]] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    fd: int = -1  # open from the first write to the sync, so that a failed write-back is noticed

    def open(self, flags: int = os.O_WRONLY) -> None:
        if self.fd < 0:
            self.fd = os.open(self.path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def sync(self) -> None:
        self.open(os.O_RDONLY)  # read-only, because a file without writes may not be writable
        os.fsync(self.fd)
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def chunks_to_do(targets: list[Target]) -> Iterator[tuple[Target, int, int]]:
    for target in targets:
        offset = 0
        for index, chunk in enumerate(target.file.chunks):
            if index in target.todo:
                yield target, index, offset
            offset += chunk.size


def is_hole(path: Path, offset: int, size: int) -> bool:
    """Whether the file system reports that a range of a file was never written."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + size
    except OSError as error:
        return error.errno == errno.ENXIO  # a hole up to the end
    finally:
        os.close(fd)


def write_at(path: Path, data: memoryview, offset: int) -> None:
    """Write at a file's offset. Each call opens its own descriptor, because O_DIRECT belongs to the descriptor."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        write_pages(fd, data, offset)
    finally:
        os.close(fd)


def make_way(home: Path, name: str) -> None:
    """Remove obstacles from a file's path: a link, a directory in the file's place, a file in a directory's place."""
    parent = home
    for piece in name.split("/")[:-1]:
        parent /= piece
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            parent.unlink()
    path = home / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        remove(path)


def remove_strangers(home: Path, files: set[str]) -> None:
    """Remove everything except `files` from a directory that must hold nothing else."""
    above = {name.rsplit("/", depth)[0] for name in files for depth in range(1, name.count("/") + 1)}
    for directory, names, leaves in os.walk(home):
        parent = Path(directory)
        for name in (*names, *leaves):
            inside = (parent / name).relative_to(home).as_posix()
            if inside in files or inside in above:
                continue
            remove(parent / name)
            if name in names:  # so that os.walk does not enter the removed directory
                names.remove(name)


def sync_directories(home: Path) -> None:
    for directory, _, _ in os.walk(home, topdown=False):
        sync_directory(Path(directory))
