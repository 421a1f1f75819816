"""The input of every format check, and the results that it can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import xxhash

PIECE_SIZE = 1 << 20  # bytes read at a time while content is checked


class ByteSource(Protocol):
    """A file, or a range of one, that is read by offset."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly these bytes, all of which are below `size`."""
        ...


class DigestedSource:
    """A source that is read past its cache, if it has one. Everything that is read updates `digest`."""

    def __init__(self, source: ByteSource, digest: xxhash.xxh3_128) -> None:
        self._source, self._digest, self.size = source, digest, source.size
        if isinstance(source, CachedSource):
            source.drop_cached()

    def read(self, offset: int, length: int) -> bytes:
        data = self._source.read(offset, length)
        self._digest.update(data)
        return data


@runtime_checkable
class CachedSource(Protocol):
    """A source with a cache between it and its device."""

    def drop_cached(self) -> None:
        """Have the next reads come from the device."""
        ...


class DamagedFile(Exception):
    """No writer of the format that has finished leaves such bytes. `reason` describes it without file and offset."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"byte {offset}: {reason}")
        self.offset, self.reason = offset, reason


class UnfinishedFile(Exception):
    """The file itself says that its writer has not finished: it is being written, or its writer died."""


class UncheckedFile(Exception):
    """The check cannot decide whether the bytes are right. This is no evidence against them."""


class UnknownFormat(UncheckedFile):
    """Neither the name nor the first bytes indicate a format that can be checked."""


@dataclass(frozen=True, slots=True)
class SoundFile:
    """The result of a check that found no fault; `uncovered` is one reason for all content without a digest."""

    kind: str
    uncovered: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class SubSource:
    """A range of another source. Offsets in errors count from the range's start."""

    parent: ByteSource
    offset: int
    size: int

    def read(self, offset: int, length: int) -> bytes:
        return self.parent.read(self.offset + offset, length)


def read_exactly(source: ByteSource, offset: int, length: int, label: str) -> bytes:
    """Return these bytes; raise `DamagedFile`, which names them by `label`, if the source ends before."""
    if offset + length > source.size:
        raise DamagedFile(source.size, f"the file ends there, within {label} of {length} bytes at {offset}")
    return source.read(offset, length)


def read_pieces(source: ByteSource, offset: int, length: int) -> Iterator[bytes]:
    end = offset + length
    while offset < end:
        size = min(PIECE_SIZE, end - offset)
        yield source.read(offset, size)
        offset += size
