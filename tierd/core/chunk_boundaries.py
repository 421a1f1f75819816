"""Chunking: a file is cut into chunks at its tensors, so that unchanged tensors give unchanged chunks; and whether a
flush compresses them.

Invariant: the cuts are a pure function of a file's bytes. Whatever the bytes are, the chunks add up to the file's size,
and none is empty or larger than the limit. A wrong cut only shares fewer bytes, so no file is ever refused.

A file is a sequence of records: headers, tensors, and the bytes between. A grain is 1 MiB, or more in files of more
than 32 GiB. A record of at least a grain has its own chunks, cut every `limit` bytes from its own beginning. So neither
a trained neighbour nor a moved offset changes these chunks, and the untouched rows of a growing table remain the same
chunks.

Smaller records are packed with their neighbours. A pack of at least half a grain ends where the element size changes,
or before a record that is chosen by a hash of its key. So packs after an insertion soon coincide with the former ones
again. Records known to change at every step are packed into full chunks, because full chunks are fewest.

A pack ends where replicated tensors begin or end, that is, tensors that several ranks hold with the same bytes. So
every rank that writes them makes the same chunks of them, and they are stored once.

There are at most 2 * size / grain + 3 chunks for a limit of two grains or more.

In a flush, reading, encoding and putting overlap, so the slowest of them sets the throughput. Let E be the encoder's
rate and L the link's rate in bytes per second, and r the stored bytes per raw byte. A raw byte then takes max(1/E, r/L)
seconds compressed and 1/L uncompressed. So for r < 1 compressing is faster exactly if E > L, whatever r is.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import xxhash
from msgspec import Meta

from tierd.core.manifest import CHUNK_SIZE, chunk_sizes

GRAIN = 1 << 20  # bytes; a tensor of this size has chunks of its own
_GRAINS = 32768  # the most in a file, because a manifest of many more chunks would be too large to be read
MAX_HEAD = 16 << 20  # the longest safetensors header that is parsed, in bytes: a streamed file's first piece
_MAX_TENSORS = MAX_HEAD // 48  # in a header, because each tensor's description takes at least 48 bytes
_MAX_MARKS = 200_000  # the most records that are read from the archives of one file
MOVING = "tierd.moving"  # in a safetensors file's metadata: the range that changes at every step, "begin:end"
HOMES = "tierd.homes"  # there: the ranges of replicated tensors, each with its home, "begin:end:home,…"
_MAX_HOMES = 4096  # ranges that are read

# (offset, length) -> those bytes of a file; fewer if fewer are available
ReadRange: TypeAlias = Callable[[int, int], bytes | bytearray | memoryview]


class FileRecord(NamedTuple):
    """A range of a file, which begins where the one before ends. `size` and `width`, the size of an element, are in
    bytes.

    `key` does not change when a record is inserted elsewhere; it is empty if there is none. A `moving` record is known
    to change at every step. `home` is the lowest of the ranks that hold the same bytes; None if only one does.
    """

    size: int
    key: bytes = b""
    width: int = 0
    moving: bool = False
    home: int | None = None


class HomeRange(NamedTuple):
    """A range of a tensor file in which all tensors are replicated: `home` is the lowest rank that holds them."""

    begin: int  # bytes from the file's first one
    end: int
    home: int


def content_chunk_sizes(read: ReadRange, size: int, limit: int = CHUNK_SIZE) -> list[int]:
    """The sizes in bytes of a file's chunks, of at most `limit` bytes. `read` may give fewer bytes than it is asked
    for.
    """
    grain = grain_of(size, limit)
    if size <= grain:
        return chunk_sizes(size, limit)
    try:
        records = safetensors_records(read, size) or zip_records(read, size)
    except (msgspec.DecodeError, struct.error, ValueError, RecursionError):
        records = None
    return cut_records(records, limit, grain) if records else chunk_sizes(size, limit)


def grain_of(size: int, limit: int = CHUNK_SIZE) -> int:
    """The least size in bytes of a record with its own chunks, in a file of `size` bytes: a power of two."""
    return min(limit, max(GRAIN, 1 << (-(-size // _GRAINS) - 1).bit_length()))


def cut_records(records: Iterable[FileRecord], limit: int, grain: int) -> list[int]:
    """The sizes in bytes of the chunks of these records. `grain` must not exceed `limit`."""
    sizes: list[int] = []
    pack = 0
    last = FileRecord(0)
    for record in records:
        if not record.size:
            continue
        alone = record.size >= grain and not record.moving
        full = not record.moving and pack + record.size > limit
        ripe = 2 * pack >= grain and (record.width != last.width or _ends_a_pack(record, grain))
        if pack and (alone or full or ripe or (record.moving, record.home) != (last.moving, last.home)):
            sizes.append(pack)
            pack = 0
        pack += record.size
        if alone or pack >= limit:
            *full_ones, remainder = chunk_sizes(pack, limit)
            sizes += full_ones
            pack = remainder
        if alone or pack == limit:
            sizes.append(pack)
            pack = 0
        last = record
    return [*sizes, pack] if pack else sizes


def _ends_a_pack(record: FileRecord, grain: int) -> bool:
    """Whether a pack may end before this record: with a probability in proportion to its size, once per `grain`."""
    return bool(record.key) and not record.moving and xxhash.xxh3_64_intdigest(record.key) * grain < record.size << 64


# ---- safetensors


class _Described(msgspec.Struct):
    """A tensor in a safetensors header; or the metadata, of which only `MOVING` is read."""

    dtype: str = ""
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]] = (0, 0)
    moving: str = msgspec.field(name=MOVING, default="")
    homes: str = msgspec.field(name=HOMES, default="")


_header = msgspec.json.Decoder(dict[str, _Described])


def safetensors_records(read: ReadRange, size: int) -> list[FileRecord] | None:
    """The header and the tensors of a safetensors file; None for another file, or one with a gap between tensors.

    Raises `msgspec.DecodeError`, ValueError or RecursionError for a file that only begins like one.
    """
    if (header := _safetensors_header(read, size)) is None:
        return None
    start, described = header
    metadata = described.pop("__metadata__", _Described())
    begin, end = _moving(metadata.moving)
    homes = iter(_homes(metadata.homes, 0, size))
    home = next(homes, None)
    records, at = [FileRecord(start)], 0
    for name, tensor in sorted(described.items(), key=lambda item: item[1].data_offsets):
        first, last = tensor.data_offsets
        if first != at or last < first:
            return None
        while home and home.end <= first:
            home = next(homes, None)
        rank = home.home if home and home.begin <= first and last <= home.end else None
        moves = begin <= first and last <= end
        records.append(FileRecord(last - first, name.encode(), _width(tensor.dtype), moves, rank))
        at = last
    return records if start + at == size else None


def home_ranges(read: ReadRange, size: int) -> list[HomeRange]:
    """The ranges of replicated tensors in a tensor file that `save` wrote, in order; none in any other file."""
    try:
        header = _safetensors_header(read, size)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []
    if header is None or "__metadata__" not in header[1]:
        return []
    return _homes(header[1]["__metadata__"].homes, header[0], size)


def _homes(text: str, start: int, size: int) -> list[HomeRange]:
    """Parse `HOMES`. A range that is empty, not in order or not in the file ends the list, because it is only a hint
    for storing less."""
    ranges: list[HomeRange] = []
    at = start
    for piece in text.split(",", _MAX_HOMES)[:_MAX_HOMES]:
        match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18}):([0-9]{1,5})", piece)
        if match is None:
            break
        begin, end = start + int(match[1]), start + int(match[2])
        if not at <= begin < end <= size:
            break
        ranges.append(HomeRange(begin, end, int(match[3])))
        at = end
    return ranges


def _safetensors_header(read: ReadRange, size: int) -> tuple[int, dict[str, _Described]] | None:
    """The offset of the first tensor, and the header; None for another file.

    Raises `msgspec.DecodeError`, ValueError or RecursionError for a file that only begins like one.
    """
    prefix = bytes(read(0, 9))
    start = 8 + int.from_bytes(prefix[:8], "little")
    if len(prefix) < 9 or prefix[8:] != b"{" or start > min(MAX_HEAD, size):
        return None
    head = bytes(read(8, start - 8))
    if len(head) < start - 8 or head.count(b"{") > _MAX_TENSORS:
        return None
    return start, _header.decode(head)


def _moving(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _width(dtype: str) -> int:
    """The size in bytes of an element of "F32", "BF16", "F8_E4M3", "BOOL" or a later dtype."""
    bits = re.search("[0-9]{1,4}", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


# ---- zip: the format of torch.save; torch.distributed.checkpoint writes several archives into one file

_END = Struct("<4s4H2IH")
_LOCATOR = Struct("<4sIQI")
_END64 = Struct("<4sQ2H2I4Q")
_ENTRY = Struct("<4s6H3I5H2I")
_LOCAL = Struct("<4s5H3I2H")
_TAIL = _END64.size + _LOCATOR.size + _END.size


def zip_records(read: ReadRange, size: int) -> list[FileRecord] | None:
    """The records of the zip archives at the end of a file; None if the file does not end in an archive.

    An entry's header and its content are separate records. The header contains the file's own name and the entry's
    number, which may change when the content does not. The bytes before the archives are one record.
    Raises `struct.error` for a file that only ends like an archive.
    """
    marks: dict[int, bytes] = {}
    end = size
    while end and len(marks) < _MAX_MARKS:
        archive = dict(_archive_marks(read, end))
        if not archive:
            break
        marks |= archive
        end = min(archive)
    if not marks:
        return None
    places = [*sorted({0: b""} | marks), size]
    return [FileRecord(after - start, marks.get(start, b"")) for start, after in pairwise(places)]


def _archive_marks(read: ReadRange, end: int) -> Iterator[tuple[int, bytes]]:
    """The offset and key of each record of the archive that ends at `end`; none if no archive ends there."""
    tail = bytes(read(max(0, end - _TAIL), min(end, _TAIL)))
    if len(tail) < _END.size:
        return
    name, _, _, _, count, length, offset, comment = _END.unpack(tail[-_END.size :])
    behind = end - _END.size
    if name != b"PK\5\6" or comment:
        return
    if len(tail) == _TAIL and tail.startswith(b"PK\6\6") and tail[_END64.size :].startswith(b"PK\6\7"):
        *_, count, length, offset = _END64.unpack(tail[: _END64.size])
        behind = end - _TAIL
    begin = behind - length - offset  # of the archive, from which its own offsets count
    if begin < 0 or count > _MAX_MARKS or length > _MAX_MARKS * 256:
        return
    directory = bytes(read(behind - length, length))
    yield begin, b""
    yield behind - length, b""
    at = 0
    for _ in range(count):
        name, *_, check, stored, full_size, name_length, extra, comment, _, _, _, local = _ENTRY.unpack_from(
            directory, at
        )
        at += _ENTRY.size
        if 0xFFFFFFFF in (full_size, stored, local):
            local = _long_offset(directory[at + name_length : at + name_length + extra], (full_size, stored, local))
        at += name_length + extra + comment
        head = bytes(read(begin + local, _LOCAL.size)) if local < offset else b""
        if name == b"PK\1\2" and head.startswith(b"PK\3\4"):
            *_, name_length, extra = _LOCAL.unpack(head)
            content = local + _LOCAL.size + name_length + extra
            yield begin + local, b""
            if content < offset:
                yield begin + content, check.to_bytes(4, "little")


def _long_offset(extra: bytes, short: tuple[int, int, int]) -> int:
    """An entry's offset from the ZIP64 extra field, which has numbers that exceed 32 bits."""
    at = 0
    while short[2] == 0xFFFFFFFF and at + 4 <= len(extra):
        kind, length = int.from_bytes(extra[at : at + 2], "little"), int.from_bytes(extra[at + 2 : at + 4], "little")
        if kind == 1:
            at += 4 + 8 * sum(number == 0xFFFFFFFF for number in short[:2])
            return int.from_bytes(extra[at : at + 8], "little")
        at += 4 + length
    return short[2]


_MARGIN = 1.2  # the factor by which a rate has to exceed the other to change the choice, so that it does not oscillate
_GAIN, _GAIN_AGAIN = 0.98, 0.96  # above these ratios, the time to encode and to decode again is not worth the bytes


@dataclass(frozen=True, slots=True)
class CompressionChoice:
    """Whether to compress (`pack`) the next chunks for a tier, and why, in one line for people."""

    pack: bool
    why: str


def compression_choice(
    link: float | None, encoder: float | None, ratio: float | None, before: bool = True
) -> CompressionChoice:
    """Whether to compress.

    An unknown rate leads to compressing, because its time is spent once, and an object's size remains.

    Args:
        link: stored bytes per second that the tier takes from all workers together. None or 0: not measured yet.
        encoder: raw bytes per second of all encoding threads together. None or 0: not measured yet.
        ratio: the recent number of stored bytes per raw byte of compressed chunks. None: not measured yet. A caller
            that stopped compressing still has to compress a chunk now and then, to notice when the ratio changes.
        before: the last choice, which stands until the other choice is better by a fifth.
    """
    if ratio is not None and ratio > (_GAIN if before else _GAIN_AGAIN):
        return CompressionChoice(False, f"not compressing: {ratio:.0%} would be left")
    if not link or not encoder:
        return CompressionChoice(True, "compressing: the rates are not known yet")
    pack = encoder * _MARGIN >= link if before else encoder > link * _MARGIN
    word = "compressing" if pack else "not compressing"
    return CompressionChoice(pack, f"{word}: the link takes {_rate(link)}, the encoder makes {_rate(encoder)}")


def _rate(rate: float) -> str:
    # 180 MB/s, 1.2 GB/s
    return f"{rate / 1e9:.1f} GB/s" if rate >= 999.5e6 else f"{rate / 1e6:.0f} MB/s"
