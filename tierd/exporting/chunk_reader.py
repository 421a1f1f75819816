"""Read ranges of a checkpoint's files, and keep a few chunks, because neighbouring ranges share them."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from typing import Any

from tierd.client.restoring.ranged_reader import PartRanges, Span
from tierd.core.ids import PartId
from tierd.spool.direct_io import memory_for

CACHED_BYTES = 192 << 20  # of chunks that are kept

_Key = tuple[PartId, str, int]  # a file, and the offset of a chunk in it


class ChunkReader:
    """Verified ranges of files. Each chunk of a file that is read in order is fetched once. For one thread at a time.

    Raises (each method): as `PartRanges.fill`.
    """

    def __init__(self, files: PartRanges) -> None:
        self._files = files
        self._kept: OrderedDict[_Key, bytes] = OrderedDict()
        self._size = 0

    def read(self, part: PartId, path: str, offset: int, length: int) -> memoryview:
        """Return `length` bytes at `offset`, in memory that nothing else writes to."""
        if not length:
            return memoryview(b"")
        span = self._files.span(part, path, offset, length)
        memory = memory_for(span.stop - span.start)
        missing: list[Span] = []
        at = span.start
        edges: list[tuple[int, int]] = []
        for chunk in span.file.chunks[span.first : span.end]:
            cached = self._kept.get((part, path, at))
            if cached is not None:
                memory[at - span.start : at - span.start + len(cached)] = cached
                self._kept.move_to_end((part, path, at))
            else:
                missing.append(self._files.span(part, path, at, chunk.size))
            edges.append((at, chunk.size))
            at += chunk.size
        if missing:
            self._files.fill(memory, missing, base=span.start)
        for begin, size in {edges[0], edges[-1]}:
            if begin < offset or begin + size > offset + length:  # a neighbouring range shares no other chunk
                self._cache_chunk((part, path, begin), memory[begin - span.start : begin - span.start + size])
        return memory[offset - span.start : offset - span.start + length]

    def size(self, part: PartId, path: str) -> int:
        """Return the size of a file."""
        return self._files.span(part, path).length

    def _cache_chunk(self, key: _Key, chunk: memoryview) -> None:
        if key in self._kept or len(chunk) > CACHED_BYTES:
            return
        self._kept[key] = bytes(chunk)
        self._size += len(chunk)
        while self._size > CACHED_BYTES:
            _, old = self._kept.popitem(last=False)
            self._size -= len(old)


class RangeStream(io.RawIOBase):
    """A range of a file as a stream, which reads only the bytes that are asked for."""

    def __init__(self, reader: ChunkReader, part: PartId, path: str, offset: int, length: int) -> None:
        super().__init__()
        self._reader, self._part, self._path, self._offset, self._length = reader, part, path, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        count = max(0, min(len(into), self._length - self._at))
        into[:count] = self._reader.read(self._part, self._path, self._offset + self._at, count)
        self._at += count
        return count
