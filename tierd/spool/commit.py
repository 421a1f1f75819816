"""Turn a snapshot in memory into a committed part, for the trainer's thread and for the daemon.

Invariant: a committed part was written from memory, whole, in one try. After EIO the whole try is abandoned, because a
failed write or fsync proves nothing about the bytes it left. The part is then written once more, into new blocks. After
a full disk the part is also written anew, once, if the caller made room.
"""

from __future__ import annotations

import errno
import logging
import mmap
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from tierd.core.chunk_boundaries import HomeRange, ReadRange, home_ranges
from tierd.core.errors import StepRefused
from tierd.core.ids import PartId
from tierd.core.manifest import CHUNK_SIZE, TENSORS, Chunk, File, Manifest
from tierd.spool.direct_io import LARGE
from tierd.spool.file_io import Buffer, FileWriter, flat_bytes
from tierd.spool.spool import Spool
from tierd.spool.spool_access import is_disk_full

log = logging.getLogger("tierd")


class Pieces(Protocol):
    """A file's bytes that are never in memory all at once. A second write iterates over them again.

    Each piece except the last consists of whole pages. A piece is valid until the next one is requested. The first
    piece decides the chunking of the file.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[memoryview]: ...


FileSource: TypeAlias = Buffer | Pieces

# Called with the part, its size in bytes, and whether a quota is used up (otherwise the disk is full). It may take
# seconds. It returns whether there is room now, so that a second try can succeed.
SpaceMaker: TypeAlias = Callable[[PartId, int, bool], bool]


@dataclass(frozen=True, slots=True)
class CommittedPart:
    """How a part was written."""

    size: int
    direct: bool
    recycled: bool  # whether the largest file overwrote the blocks of a removed file
    # the save's metrics, if the caller reports them
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    # the time for which the save blocked training, in seconds; None: not known
    blocked_s: float | None = field(default=None, compare=False)
    # the time from the call of `save` until the commit, in seconds; None: not known
    durable_s: float | None = field(default=None, compare=False)
    origin: str = ""  # where the files are from, in words; empty: from the process that saved them


def write_part(
    spool: Spool, manifest: Manifest, files: Mapping[str, FileSource], chunk_size: int = CHUNK_SIZE
) -> CommittedPart:
    """Write `files`, by path inside the part, and commit them as the part of `manifest`, whose files are filled in.

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
        except StepRefused:  # the first try was renamed into place and could not be taken back; raise its error
            raise error from None


def write_making_room(
    write: Callable[[], CommittedPart], part: PartId, files: Mapping[str, FileSource], room: SpaceMaker | None
) -> CommittedPart:
    """Call `write`, which is `write_part` of these `files`; call it again if the disk is full and `room` frees space.

    Raises OSError as `write_part` does, also if the disk is still full.
    """
    try:
        return write()
    except OSError as error:
        size = sum(map(len, files.values()))
        if not is_disk_full(error) or room is None or not room(part, size, error.errno == errno.EDQUOT):
            raise
        log.warning("%s: %s; room was made, and it is written anew", part, error)
    return write()


def _write(
    spool: Spool, manifest: Manifest, sources: Mapping[str, Pieces], chunk_size: int, *, reuse: bool
) -> CommittedPart:
    described: list[File] = []
    largest = max(sources, key=lambda name: len(sources[name]), default=None)
    direct = recycled = False
    with spool.stage(manifest.part) as stage:
        for name, source in sources.items():
            path, size = stage.path / name, len(source)
            is_recycled = reuse and name == largest and size >= LARGE and _take(spool, manifest.part, path)
            with FileWriter(path, name, size, chunk_size, recycled=is_recycled) as writer:
                homes: list[HomeRange] = []
                for number, piece in enumerate(source):
                    if not number and name == TENSORS and manifest.world_size > 1:
                        homes = home_ranges(_range_of(piece), size)
                    writer.write(piece)
                described.append(_with_homes(writer.finish(), homes, manifest.world_size))
            if name == largest:
                direct, recycled = writer.direct, writer.recycled
        stage.commit(msgspec.structs.replace(manifest, files=tuple(described)))
    return CommittedPart(sum(file.size for file in described), direct, recycled)


def _range_of(piece: memoryview) -> ReadRange:
    return lambda offset, length: piece[offset : offset + length]


def _with_homes(file: File, homes: Collection[HomeRange], world: int) -> File:
    """Note in a tensor file's chunks which of them other ranks hold, too, by the file's own header."""
    if not homes:
        return file
    chunks, ranges, at = list[Chunk](), deque(homes), 0
    for chunk in file.chunks:
        end = at + chunk.size
        while ranges and ranges[0].end <= at:
            ranges.popleft()
        inside = ranges and ranges[0].begin <= at and end <= ranges[0].end and ranges[0].home < world
        chunks.append(msgspec.structs.replace(chunk, home=ranges[0].home) if inside else chunk)
        at = end
    return msgspec.structs.replace(file, chunks=tuple(chunks))


def _take(spool: Spool, part: PartId, path: Path) -> bool:
    spare = spool.recycled(part)
    try:
        if spare:
            spare.rename(path)
            return True
    except FileNotFoundError:  # another writer claimed the file first, or `drop_recycled` deleted it
        pass
    return False


def _pieces(source: FileSource) -> Pieces:
    return (
        _SinglePiece(flat_bytes(source)) if isinstance(source, bytes | bytearray | memoryview | mmap.mmap) else source
    )


@dataclass(frozen=True, slots=True)
class _SinglePiece:
    """Bytes that are in memory, as one piece."""

    view: memoryview

    def __len__(self) -> int:
        return len(self.view)

    def __iter__(self) -> Iterator[memoryview]:
        yield self.view
