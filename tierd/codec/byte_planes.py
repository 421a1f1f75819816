"""The codec `planes`: store numbers as byte planes.

Invariant: equal bytes give equal objects, and no object is longer than its bytes. Each block is read again as soon as
it is written, and compared. So no object is made that does not give its bytes back, whether this module errs or the
processor. Reading an object allocates at most `size` bytes and a few blocks, even if the object claims more. Anything
that FORMAT.md does not allow raises `ValueError`.

The exponents of trained numbers repeat, while their mantissas are noise. So a block is split into its elements' top
bytes, the bytes below, and the 16-bit words under those. Only planes that shrink in a sample are compressed. If both
signs occur, the top word is first rotated left by one bit (as in ZipNN, arXiv:2411.05239). The rotation puts the whole
exponent into one byte. Nearly all exponents are among 15 neighbouring values, so two of them fit into a byte. That
halves the work of zstd's Huffman coder and leaves it hardly any match to search for.
"""

from __future__ import annotations

import logging
import struct
import threading
from typing import Any

import numpy as np
import zstandard

from tierd.codec import numpy_loops
from tierd.codec.number_layout import WIDTHS, Bytes, NumberLayout, detect_layout, neighbour_base
from tierd.codec.zstd_frames import expand_frame
from tierd.spool.direct_io import libc, memory_for

try:
    from tierd.codec import _plane_loops
except ImportError:  # installed without a compiler; `tierd doctor` says so
    loops = numpy_loops
else:
    loops = _plane_loops if _plane_loops.vectorised else numpy_loops

log = logging.getLogger("tierd.daemon")

Buffer = bytes | bytearray | memoryview

MAGIC = b"TPL1"
HEAD = struct.Struct("<4sIB3s")  # magic, raw size, log2 of the block size, zeros
BLOCK_HEAD = struct.Struct("<BB")  # width of an element, plus FOLDED; bytes before the first one
PLANE_HEAD = struct.Struct("<BI")  # kind, length of the body
PAIRS_HEAD = struct.Struct("<BI")  # the lowest of the 15 neighbours, number of others
RAW, ZSTD, PAIRS = 0, 1, 2
FOLDED = 0x80
BLOCK_LOG = 20  # measured: with smaller blocks Python's overhead shows, larger ones exceed the CPU caches
BLOCK_LOGS = range(12, 21)

_STRETCH = 8  # blocks that share one detected layout, unless one of them compresses differently
_ESCAPE_SHARE = 8  # at most one byte in this many may lie outside the 15 neighbours
_MIN_PAIRS_BYTES = 512  # bytes of a plane below which pairs are not worth their header
_EDGE = 64  # bytes; an upper bound for the headers and edges of a block
_WINDOW = 1 << 20
_MAPPED = 8 << 20  # bytes; malloc serves smaller sizes faster, and retains less of them


class _Tools(threading.local):
    """Compressors and scratch memory of one thread, because two threads must not share either."""

    def __init__(self) -> None:
        # With these parameters zstd searches for almost no matches (64 hash entries, at least 7 bytes each), so Huffman
        # coding does the work.
        # `target_length` must stay 0, because above 0 this strategy leaves literals uncompressed.
        entropy = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, window_log=18, hash_log=6, min_match=7, target_length=0
        )
        self.entropy = zstandard.ZstdCompressor(compression_params=entropy)
        self.search = zstandard.ZstdCompressor(level=1)
        self.expander = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self.scratch = [np.empty(1 << BLOCK_LOG, np.uint8) for _ in range(2)]
        self.read_back = np.empty(1 << BLOCK_LOG, np.uint8)


tools = _Tools()


def mapped_memory(size: int) -> memoryview:
    # Mapped, because malloc would retain up to a chunk of freed memory per thread, and a daemon has dozens of threads.
    return memory_for(size) if size >= _MAPPED else np.empty(size, np.uint8).data


# -- writing ----------------------------------------------------------------------------------------------------------


def packing_size(size: int) -> int:
    """Return the bytes of memory that `pack` needs for the object that holds `size` bytes."""
    return size + _EDGE * ((size >> BLOCK_LOG) + 2)


def pack(raw: Buffer, into: memoryview | None = None) -> memoryview | None:
    """Return the object that holds `raw` (at most 4 GiB), or None if it would not be at least 1/64 shorter.

    The object is in `into`, of `packing_size` bytes, or in new memory.
    """
    data = np.frombuffer(raw, np.uint8)
    size = 1 << BLOCK_LOG
    out = Writer(mapped_memory(packing_size(len(data))) if into is None else into)
    out.put(HEAD.pack(MAGIC, len(data), BLOCK_LOG, bytes(3)))
    layout, age, expected = NumberLayout(), 0, 0
    for start in range(0, len(data), size):
        block, at = data[start : start + size], out.at
        fresh = layout.width == 1 or age == _STRETCH
        if fresh:
            layout = detect_layout(block)
        top = write_block(out, block, layout)
        # The numbers differ from those in the block from which the layout was detected.
        if not fresh and abs(top - expected) * 8 > expected:
            fresh = True
            detected = detect_layout(block)
            if detected != layout:
                layout, out.at = detected, at
                top = write_block(out, block, layout)
        if not _block_reads_back(out.view[at : out.at], block):
            log.error("a block of %d bytes does not come back from %s, and is not split", len(block), layout)
            out.at = at
            write_block(out, block, NumberLayout())
            if not _block_reads_back(out.view[at : out.at], block):
                return None
        age, expected = (1, top) if fresh else (age + 1, expected)
    return out.view[: out.at] if out.at < len(data) - len(data) // 64 else None


def _block_reads_back(encoded: memoryview, block: Bytes) -> bool:
    """Whether reading a block that was just written gives its bytes."""
    decoded, reader = tools.read_back[: len(block)], Reader(encoded)
    try:
        read_block(reader, decoded)
        reader.end()
    except Exception as error:  # whatever a fault here or in the processor raises
        log.error("a block cannot be read as it was written: %r", error)
        return False
    # Not by NumPy, which would make an array of its answers.
    return not int(libc.memcmp(decoded.ctypes.data, block.ctypes.data, len(block)))


class Writer:
    """The object so far is `array[:at]`. New memory beyond it is untouched, so the kernel has not allocated it."""

    def __init__(self, memory: memoryview) -> None:
        self.view = memory
        self.array: Bytes = np.frombuffer(self.view, np.uint8)
        self.at = 0

    def put(self, data: Buffer) -> None:
        self.view[self.at : self.at + len(data)] = data
        self.at += len(data)

    def put_plane(self, kind: int, *bodies: Buffer) -> None:
        self.put(PLANE_HEAD.pack(kind, sum(map(len, bodies))))
        for body in bodies:
            self.put(body)

    def room(self, size: int) -> Bytes:
        """Reserve a raw plane of `size` bytes. Returns its memory, which the caller fills."""
        self.put(PLANE_HEAD.pack(RAW, size))
        self.at += size
        return self.array[self.at - size : self.at]


def write_block(out: Writer, block: Bytes, layout: NumberLayout) -> int:
    # Returns the length of the top plane's body.
    width, lead = layout.width, layout.lead
    count = max(0, len(block) - lead) // width
    end = lead + count * width
    out.put(BLOCK_HEAD.pack(width | FOLDED * layout.folded, lead))
    if width == 1:
        return write_plane(out, block, tools.search)
    out.put(block[:lead].data)
    out.put(block[end:].data)
    elements, (first, second) = block[lead:end], tools.scratch
    for index, worth in enumerate(layout.words):
        word = first[: 2 * count] if worth else out.room(2 * count)
        loops.take_words(elements, width, index, word)
        if worth:
            write_plane(out, word, tools.search)
    low = first[:count] if layout.low else out.room(count)
    high = second[:count]
    loops.split_top(elements, width, layout.folded, low, high)
    if layout.low:
        write_plane(out, low, tools.entropy)
    return write_pairs(out, high)


def write_plane(out: Writer, plane: Bytes, compressor: zstandard.ZstdCompressor) -> int:
    packed = compressor.compress(plane.data)
    if len(packed) < len(plane):
        out.put_plane(ZSTD, packed)
        return len(packed)
    out.room(len(plane))[:] = plane
    return len(plane)


def write_pairs(out: Writer, plane: Bytes) -> int:
    if len(plane) < _MIN_PAIRS_BYTES:
        return write_plane(out, plane, tools.entropy)
    base, most = neighbour_base(plane), len(plane) // _ESCAPE_SHARE
    half = (len(plane) + 1) // 2
    halves, escapes = tools.scratch[0][:half], tools.scratch[0][half : half + most]
    number = loops.pack_pairs(plane, base, halves, escapes)
    if number < 0:
        return write_plane(out, plane, tools.entropy)
    packed = tools.entropy.compress(halves.data)
    start = out.at
    out.put_plane(PAIRS, PAIRS_HEAD.pack(base, number))
    if number:
        write_plane(out, escapes[:number], tools.search)
    out.put(packed)
    if (length := out.at - start - PLANE_HEAD.size) >= len(plane):
        out.at = start
        return write_plane(out, plane, tools.entropy)
    PLANE_HEAD.pack_into(out.array.data, start, PAIRS, length)
    return length


# -- reading ----------------------------------------------------------------------------------------------------------


def unpack(data: Buffer, size: int, into: memoryview | None = None) -> memoryview:
    """Return the `size` bytes that the object `data` holds, in `into` or in new memory. After an error it is undefined.

    Raises ValueError if `data` is not an object of exactly `size` bytes.
    """
    reader = Reader(data)
    magic, promised, log, zeros = reader.heads(HEAD)
    if magic != MAGIC or promised != size or log not in BLOCK_LOGS or any(zeros):
        raise ValueError(f"its head does not promise {size} bytes")
    memory = mapped_memory(size)[:size] if into is None else into
    out = np.frombuffer(memory, np.uint8)
    for start in range(0, size, 1 << log):
        read_block(reader, out[start : start + (1 << log)])
    reader.end()
    return memory


class Reader:
    """Parse an object from front to back."""

    def __init__(self, data: Buffer) -> None:
        self._data, self.at = memoryview(data), 0

    def bytes(self, size: int) -> memoryview:
        if size > len(self._data) - self.at:
            raise ValueError("it ends too early")
        self.at += size
        return self._data[self.at - size : self.at]

    def heads(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.bytes(form.size))

    def end(self) -> None:
        if self.at != len(self._data):
            raise ValueError("something follows its end")

    def plane(self, size: int) -> Bytes:
        """Return the next plane, of `size` bytes, which must not consist of pairs."""
        return self._plain(size, *self._body())

    def top_plane(self, size: int) -> Bytes:
        """Return the next plane, of `size` bytes, which may consist of pairs; valid until the next call."""
        kind, body = self._body()
        return _unpack_pairs(body, size) if kind == PAIRS else self._plain(size, kind, body)

    def _body(self) -> tuple[int, memoryview]:
        kind, length = self.heads(PLANE_HEAD)
        return kind, self.bytes(length)

    def _plain(self, size: int, kind: int, body: memoryview) -> Bytes:
        if kind == RAW and len(body) == size:
            return np.frombuffer(body, np.uint8)
        if kind == ZSTD:
            return _expand(body, size)
        raise ValueError(f"a plane is of kind {kind} and {len(body)} bytes long")


def _expand(body: memoryview, size: int) -> Bytes:
    try:
        return np.frombuffer(expand_frame(body, size, tools.expander), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane is no zstd frame: {error}") from error


def _unpack_pairs(body: memoryview, size: int) -> Bytes:
    reader = Reader(body)
    base, number = reader.heads(PAIRS_HEAD)
    if number > size:
        raise ValueError(f"{number} of {size} bytes are other ones")
    escapes = reader.plane(number) if number else np.empty(0, np.uint8)
    halves = _expand(reader.bytes(len(body) - reader.at), (size + 1) // 2)
    plane = tools.scratch[0][:size]
    if not loops.unpack_pairs(halves, base, escapes, plane):
        raise ValueError(f"its codes need another number of other bytes than {number}")
    return plane


def read_block(reader: Reader, out: Bytes) -> None:
    form, lead = reader.heads(BLOCK_HEAD)
    width, folded = form & ~FOLDED, bool(form & FOLDED)
    if width not in WIDTHS or lead >= width or lead > len(out) or (folded and width == 1):
        raise ValueError(f"elements of form {form:#x} after {lead} bytes")
    if width == 1:
        out[:] = reader.plane(len(out))
        return
    count = (len(out) - lead) // width
    end = lead + count * width
    out[:lead] = np.frombuffer(reader.bytes(lead), np.uint8)
    out[end:] = np.frombuffer(reader.bytes(len(out) - end), np.uint8)
    below = [reader.plane(2 * count) for _ in range(width // 2 - 1)]
    low = reader.plane(count)
    high = reader.top_plane(count)
    loops.join(out[lead:end], width, folded, low, high, *below)
