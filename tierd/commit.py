"""A snapshot in memory becomes a committed part: the one way, for the trainer's thread and for the daemon alike.

Law: what is committed was written from memory, whole, by one try. After EIO everything of that try is abandoned: what a
failed write or fsync left behind proves nothing, so all is written anew, once, into blocks of its own. So it is after a
full disk, where somebody made room.
"""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from tierd.core.errors import StepRefused
from tierd.core.ids import PartId
from tierd.core.manifest import CHUNK_SIZE, File, Manifest
from tierd.device import LARGE
from tierd.persist import Buffer, FileWriter, flat
from tierd.spool import Spool, is_full

log = logging.getLogger("tierd")


class Pieces(Protocol):
    """A file's bytes that are never in memory at once; gone through again where a write has to be.

    A piece is whole pages, unless it is the last, and is done with when the next one is asked for. The first one
    decides where the file is cut.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[memoryview]: ...


Source: TypeAlias = Buffer | Pieces

# Called with the part, its size in bytes, and whether a quota is used up (else the disk is full); may take seconds.
# Whether there is room now, so that a second try is worth it.
Room: TypeAlias = Callable[[PartId, int, bool], bool]


@dataclass(frozen=True, slots=True)
class Written:
    """How a part was written.

    Attributes:
        size: of all files, bytes.
        direct: whether its largest file went past the page cache.
        recycled: whether that file lies in the blocks of a removed one.
    """

    size: int
    direct: bool
    recycled: bool


def write_part(spool: Spool, manifest: Manifest, files: Mapping[str, Source], chunk_size: int = CHUNK_SIZE) -> Written:
    """Write `files` and commit them as the part of `manifest`, which is filled in with what they are.

    Raises:
        StepRefused: this attempt has committed the part before.
        OSError: as the spool's file system reports it; nothing of the part is left.
    """
    sources = {name: _pieces(source) for name, source in sorted(files.items())}
    try:
        return _write(spool, manifest, sources, chunk_size, reuse=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        log.warning("%s: %s; writing it anew", manifest.part, error)
        try:
            return _write(spool, manifest, sources, chunk_size, reuse=False)
        except StepRefused:  # it was renamed into place, and may not stay there: the first try's error says so
            raise error from None


def write_with_room(
    write: Callable[[], Written], part: PartId, files: Mapping[str, Source], room: Room | None
) -> Written:
    """Call `write`, which is `write_part` of these `files`; a second time where the disk is full and `room` makes room.

    Raises:
        As `write_part`: OSError where the disk is full and stays so.
    """
    try:
        return write()
    except OSError as error:
        size = sum(map(len, files.values()))
        if not is_full(error) or room is None or not room(part, size, error.errno == errno.EDQUOT):
            raise
        log.warning("%s: %s; room was made, and it is written anew", part, error)
    return write()


def _write(spool: Spool, manifest: Manifest, sources: Mapping[str, Pieces], chunk_size: int, *, reuse: bool) -> Written:
    described: list[File] = []
    largest = max(sources, key=lambda name: len(sources[name]), default=None)
    direct = recycled = False
    with spool.stage(manifest.part) as stage:
        for name, source in sources.items():
            path, size = stage.path / name, len(source)
            again = reuse and name == largest and size >= LARGE and _take(spool, manifest.part, path)
            with FileWriter(path, name, size, chunk_size, recycled=again) as writer:
                for piece in source:
                    writer.write(piece)
                described.append(writer.finish())
            if name == largest:
                direct, recycled = writer.direct, writer.recycled
        stage.commit(msgspec.structs.replace(manifest, files=tuple(described)))
    return Written(sum(file.size for file in described), direct, recycled)


def _take(spool: Spool, part: PartId, path: Path) -> bool:
    found = spool.recycled(part)
    try:
        if found:
            found.rename(path)
            return True
    except FileNotFoundError:  # another writer was there first, or it was dropped
        pass
    return False


def _pieces(source: Source) -> Pieces:
    return _Whole(flat(source)) if isinstance(source, bytes | bytearray | memoryview | mmap.mmap) else source


@dataclass(frozen=True, slots=True)
class _Whole:
    """Bytes that are in memory, as one piece."""

    view: memoryview

    def __len__(self) -> int:
        return len(self.view)

    def __iter__(self) -> Iterator[memoryview]:
        yield self.view
