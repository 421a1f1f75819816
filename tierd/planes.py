"""Numbers <-> byte planes: what the codec `planes` stores, and how it is found without knowing what a chunk holds.

Law: equal bytes give equal objects, and none is longer than its bytes. Reading one allocates no more than `size` and a
few blocks, whatever it claims; what is not as FORMAT.md says is a `ValueError`.

The exponents of trained numbers repeat, their mantissas are noise. So a block is cut into its elements' top byte, the
byte below, and the 16-bit words under those; only what a sample says would shrink is compressed. Where both signs
occur the top word is first turned left by one bit, which gives the whole exponent to one byte (as in ZipNN,
arXiv:2411.05239). Nearly all exponents lie among 15 neighbours: two of them fit a byte, which halves what zstd's
Huffman coder has to do and leaves it hardly any match to look for.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from tierd.device import memory_for
from tierd.layout import WIDTHS, Bytes, Layout, look, neighbours

Buffer = bytes | bytearray | memoryview

MAGIC = b"TPL1"
HEAD = struct.Struct("<4sIB3s")  # magic, raw size, log2 of the block size, zeros
BLOCK_HEAD = struct.Struct("<BB")  # width of an element, plus FOLDED; bytes before the first one
PLANE_HEAD = struct.Struct("<BI")  # kind, length of the body
PAIRS_HEAD = struct.Struct("<BI")  # the lowest of the 15 neighbours, number of others
RAW, ZSTD, PAIRS = 0, 1, 2
FOLDED = 0x80
BLOCK_LOG = 20  # measured: below it Python's part of the work shows, above it the caches are too small
BLOCK_LOGS = range(12, 21)

_STRETCH = 8  # blocks that one look serves, unless one of them comes out otherwise
_OTHERS = 8  # one in so many bytes may lie outside the 15 neighbours
_FEW = 512  # bytes of a plane below which pairs are not worth their head
_EDGE = 64  # bytes: more than the heads and edges of a block
_WINDOW = 1 << 20
_MAPPED = 8 << 20  # bytes; what is less malloc gives faster, and keeps less of


class _Tools(threading.local):
    """Compressors and scratch memory; neither may be used by two threads at once."""

    def __init__(self) -> None:
        # No match is looked for in earnest: 64 places of memory, 7 bytes at least. What is left is Huffman's work.
        # `target_length` must stay 0: above it this strategy leaves literals uncompressed.
        entropy = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, window_log=18, hash_log=6, min_match=7, target_length=0
        )
        self.entropy = zstandard.ZstdCompressor(compression_params=entropy)
        self.search = zstandard.ZstdCompressor(level=1)
        self.expander = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self.scratch = [np.empty(1 << BLOCK_LOG, np.uint8) for _ in range(4)]


_tools = _Tools()


def _memory(size: int) -> memoryview:
    # Of what a thread frees, malloc would keep as much as a chunk for it, and a daemon has dozens of threads.
    return memory_for(size) if size >= _MAPPED else np.empty(size, np.uint8).data


# -- writing ----------------------------------------------------------------------------------------------------------


def pack(raw: Buffer) -> memoryview | None:
    """The object that holds `raw` (at most 4 GiB), or None where it would not be at least 1/64 shorter."""
    data = np.frombuffer(raw, np.uint8)
    size = 1 << BLOCK_LOG
    out = _Writer(len(data) + _EDGE * (len(data) // size + 2))
    out.put(HEAD.pack(MAGIC, len(data), BLOCK_LOG, bytes(3)))
    layout, age, expected = Layout(), 0, 0
    for start in range(0, len(data), size):
        block, at = data[start : start + size], out.at
        fresh = layout.width == 1 or age == _STRETCH
        if fresh:
            layout = look(block)
        top = _write_block(out, block, layout)
        if not fresh and abs(top - expected) * 8 > expected:  # the numbers are others than in the block that was seen
            fresh = True
            other = look(block)
            if other != layout:
                layout, out.at = other, at
                top = _write_block(out, block, layout)
        age, expected = (1, top) if fresh else (age + 1, expected)
    return out.view[: out.at] if out.at < len(data) - len(data) // 64 else None


class _Writer:
    """The object so far: `array[:at]`. Its memory is untouched, so not used, beyond that."""

    def __init__(self, bound: int) -> None:
        self.view = _memory(bound)
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
        """Where a raw plane of `size` bytes goes; the caller fills it."""
        self.put(PLANE_HEAD.pack(RAW, size))
        self.at += size
        return self.array[self.at - size : self.at]


def _write_block(out: _Writer, block: Bytes, layout: Layout) -> int:
    # The length of the top plane's body.
    width, lead = layout.width, layout.lead
    count = max(0, len(block) - lead) // width
    end = lead + count * width
    out.put(BLOCK_HEAD.pack(width | FOLDED * layout.folded, lead))
    if width == 1:
        return _write_plane(out, block, _tools.search)
    out.put(block[:lead].data)
    out.put(block[end:].data)
    spare = _tools.scratch
    elements = block[lead:end].view(f"<u{width}")
    if not elements.flags.aligned:
        elements = _copied(elements.view(np.uint8), spare[0]).view(f"<u{width}")
    words = elements.view("<u2").reshape(count, width // 2)
    for index, worth in enumerate(layout.words):
        if worth:
            word = spare[1][: 2 * count].view("<u2")
            np.copyto(word, words[:, index])
            _write_plane(out, word.view(np.uint8), _tools.search)
        else:
            np.copyto(out.room(2 * count).view("<u2"), words[:, index])
    top = words[:, -1]
    if width > 2:
        top = spare[1][: 2 * count].view("<u2")
        np.copyto(top, words[:, -1])
    return _write_top(out, top, layout)


def _copied(data: Bytes, to: Bytes) -> Bytes:
    to[: len(data)] = data
    return to[: len(data)]


def _write_top(out: _Writer, top: npt.NDArray[Any], layout: Layout) -> int:
    # The low byte of the top words, then the high one; the length of the latter's body.
    spare, count = _tools.scratch, len(top)
    turned = top
    if layout.folded:
        turned, sign = spare[2][: 2 * count].view("<u2"), spare[3][: 2 * count].view("<u2")
        np.left_shift(top, 1, out=turned)
        np.right_shift(top, 15, out=sign)
        np.bitwise_or(turned, sign, out=turned)
    low = spare[3][:count] if layout.low else out.room(count)
    np.copyto(low, turned, casting="unsafe")
    if layout.low:
        _write_plane(out, low, _tools.entropy)
    shifted = spare[2][: 2 * count].view("<u2")
    np.right_shift(turned, 8, out=shifted)
    high = spare[3][:count]
    np.copyto(high, shifted, casting="unsafe")
    return _write_pairs(out, high)


def _write_plane(out: _Writer, plane: Bytes, compressor: zstandard.ZstdCompressor) -> int:
    packed = compressor.compress(plane.data)
    if len(packed) < len(plane):
        out.put_plane(ZSTD, packed)
        return len(packed)
    out.room(len(plane))[:] = plane
    return len(plane)


def _write_pairs(out: _Writer, plane: Bytes) -> int:
    if len(plane) < _FEW:
        return _write_plane(out, plane, _tools.entropy)
    base = neighbours(plane)
    spare = _tools.scratch
    codes = spare[2][: len(plane) + len(plane) % 2]
    codes[-1] = 0  # an odd one's partner
    near = codes[: len(plane)]
    np.subtract(plane, np.uint8(base), out=near)
    others = np.flatnonzero(near > 14)
    if len(others) * _OTHERS > len(plane):
        return _write_plane(out, plane, _tools.entropy)
    near[others] = 15
    pairs, shifted = codes.view("<u2"), spare[1][: len(codes)].view("<u2")
    np.right_shift(pairs, 4, out=shifted)
    np.bitwise_or(pairs, shifted, out=pairs)
    halves = spare[1][: len(pairs)]
    np.copyto(halves, pairs, casting="unsafe")
    packed = _tools.entropy.compress(halves.data)
    start = out.at
    out.put_plane(PAIRS, PAIRS_HEAD.pack(base, len(others)))
    if len(others):
        _write_plane(out, plane[others], _tools.search)
    out.put(packed)
    if (length := out.at - start - PLANE_HEAD.size) >= len(plane):
        out.at = start
        return _write_plane(out, plane, _tools.entropy)
    PLANE_HEAD.pack_into(out.array.data, start, PAIRS, length)
    return length


# -- reading ----------------------------------------------------------------------------------------------------------


def unpack(data: Buffer, size: int) -> memoryview:
    """The `size` bytes that the object `data` holds, in new memory.

    Raises:
        ValueError: `data` is not an object of exactly that many bytes.
    """
    reader = _Reader(data)
    magic, promised, log, zeros = reader.heads(HEAD)
    if magic != MAGIC or promised != size or log not in BLOCK_LOGS or any(zeros):
        raise ValueError(f"its head does not promise {size} bytes")
    memory = _memory(size)[:size]
    out = np.frombuffer(memory, np.uint8)
    for start in range(0, size, 1 << log):
        _read_block(reader, out[start : start + (1 << log)])
    reader.end()
    return memory


class _Reader:
    """Takes an object apart from front to back."""

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

    def plane(self, size: int, top: bool = False) -> Bytes:
        """The next plane, of `size` bytes; only a top one may be of pairs, and is gone when the next one is read."""
        kind, length = self.heads(PLANE_HEAD)
        body = self.bytes(length)
        if kind == RAW and length == size:
            return np.frombuffer(body, np.uint8)
        if kind == ZSTD:
            return _expand(body, size)
        if kind == PAIRS and top:
            return _read_pairs(body, size)
        raise ValueError(f"a plane is of kind {kind} and {length} bytes long")


def _expand(body: memoryview, size: int) -> Bytes:
    # Exactly one frame of `size` bytes; the size that it names is compared before a byte is expanded.
    try:
        if zstandard.get_frame_parameters(bytes(body[:32])).content_size != size:
            raise ValueError(f"a frame does not promise {size} bytes")
        raw = _tools.expander.decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane is no zstd frame: {error}") from error
    if len(raw) != size:
        raise ValueError(f"a plane has {len(raw)} bytes, not {size}")
    return np.frombuffer(raw, np.uint8)


def _read_pairs(body: memoryview, size: int) -> Bytes:
    reader = _Reader(body)
    base, number = reader.heads(PAIRS_HEAD)
    if number > size:
        raise ValueError(f"{number} of {size} bytes are other ones")
    others = reader.plane(number) if number else np.empty(0, np.uint8)
    halves = _expand(reader.bytes(len(body) - reader.at), (size + 1) // 2)
    pairs = _tools.scratch[0][: 2 * len(halves)].view("<u2")
    shifted = _tools.scratch[1][: 2 * len(halves)].view("<u2")
    np.copyto(pairs, halves)
    np.left_shift(pairs, 4, out=shifted)
    np.bitwise_or(pairs, shifted, out=pairs)
    np.bitwise_and(pairs, 0x0F0F, out=pairs)
    plane = pairs.view(np.uint8)[:size]
    places = np.flatnonzero(plane == 15)
    if len(places) != number:
        raise ValueError(f"{len(places)} other bytes are needed, not {number}")
    plane += np.uint8(base)
    plane[places] = others
    return plane


def _read_block(reader: _Reader, out: Bytes) -> None:
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
    words = out[lead:end].view("<u2").reshape(count, width // 2)
    for index in range(width // 2 - 1):
        words[:, index] = reader.plane(2 * count).view("<u2")
    low = reader.plane(count)
    top = _tools.scratch[2][: 2 * count].view("<u2")
    np.copyto(top, reader.plane(count, top=True))
    np.left_shift(top, 8, out=top)
    np.bitwise_or(top, low, out=top)
    if folded:
        sign = _tools.scratch[3][: 2 * count].view("<u2")
        np.left_shift(top, 15, out=sign)
        np.right_shift(top, 1, out=top)
        np.bitwise_or(top, sign, out=top)
    words[:, -1] = top
