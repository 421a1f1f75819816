"""Where a file is cut into chunks: at its tensors, so that bytes which did not change are chunks that did not change.

Law: cuts are a pure function of a file's bytes. Whatever those claim, the cuts add up to the file's size and none is
empty or passes the limit; a wrong cut costs only what a right one would have saved, so nothing is ever refused.

A file is a row of records: headers, tensors, whatever lies between. A record of at least a grain (1 MiB, more in files
of more than 32 GiB) is chunks of its own, cut every `limit` bytes from its own beginning: neither a neighbour that was
trained nor an offset that moved touches it, and the untouched rows of a growing table stay whole chunks. Smaller ones
are packed with their neighbours. A pack of half a grain ends where the element size changes, or before a record whose
key says so: after an insertion the packs fall into step again. What is known to change at every step is packed into
full chunks, for those are few.

At most 2 * size / grain + 3 chunks for a limit of two grains or more.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from struct import Struct
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import xxhash
from msgspec import Meta

from tierd.core.manifest import CHUNK_SIZE, chunk_sizes

GRAIN = 1 << 20  # bytes; a tensor of this size has chunks of its own
_GRAINS = 32768  # in a file, at most: a manifest of many more chunks would be too large to be read
MAX_HEAD = 16 << 20  # bytes of a safetensors header, with its length, that are looked at: a streamed file's first piece
_MAX_TENSORS = MAX_HEAD // 48  # in a header: no tensor is described by fewer bytes
_MAX_MARKS = 200_000  # places in the archives of one file that are looked at
MOVING = "tierd.moving"  # in a safetensors file's metadata: "begin:end", as in `data_offsets`

# (offset, length) -> those bytes of a file; fewer where fewer are at hand
Read: TypeAlias = Callable[[int, int], bytes | bytearray | memoryview]


class Record(NamedTuple):
    """A stretch of a file; one begins where the one before it ends.

    Attributes:
        size: bytes.
        key: what stays the same when something is inserted elsewhere; empty for what has no such thing.
        width: bytes of an element; 0 where that is not known.
        moving: known to change at every step.
    """

    size: int
    key: bytes = b""
    width: int = 0
    moving: bool = False


def cut(read: Read, size: int, limit: int = CHUNK_SIZE) -> list[int]:
    """The sizes of the chunks of a file, which `read` gives as far as it is at hand. Raises what `read` raises."""
    grain = grain_of(size, limit)
    if size <= grain:
        return chunk_sizes(size, limit)
    try:
        records = safetensors_records(read, size) or zip_records(read, size)
    except (msgspec.DecodeError, struct.error, ValueError, RecursionError):
        records = None
    return cut_records(records, limit, grain) if records else chunk_sizes(size, limit)


def grain_of(size: int, limit: int = CHUNK_SIZE) -> int:
    """From how many bytes on a record has chunks of its own, in a file of `size` bytes: a power of two."""
    return min(limit, max(GRAIN, 1 << (-(-size // _GRAINS) - 1).bit_length()))


def cut_records(records: Iterable[Record], limit: int, grain: int) -> list[int]:
    """The sizes of the chunks of these records; `grain` is at most `limit`."""
    sizes: list[int] = []
    pack = 0
    last = Record(0)
    for record in records:
        if not record.size:
            continue
        alone = record.size >= grain and not record.moving
        full = not record.moving and pack + record.size > limit
        ripe = 2 * pack >= grain and (record.width != last.width or _ends_a_pack(record, grain))
        if pack and (alone or full or ripe or record.moving != last.moving):
            sizes.append(pack)
            pack = 0
        pack += record.size
        if alone or pack >= limit:
            *full_ones, rest = chunk_sizes(pack, limit)
            sizes += full_ones
            pack = rest
        if alone or pack == limit:
            sizes.append(pack)
            pack = 0
        last = record
    return [*sizes, pack] if pack else sizes


def _ends_a_pack(record: Record, grain: int) -> bool:
    """Whether a pack may end before this record: the likelier the longer it is, every `grain` bytes on average."""
    return bool(record.key) and not record.moving and xxhash.xxh3_64_intdigest(record.key) * grain < record.size << 64


# ---- safetensors


class _Described(msgspec.Struct):
    """A tensor; or the metadata, of which one entry is looked at."""

    dtype: str = ""
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]] = (0, 0)
    moving: str = msgspec.field(name=MOVING, default="")


_header = msgspec.json.Decoder(dict[str, _Described])


def safetensors_records(read: Read, size: int) -> list[Record] | None:
    """The header and the tensors of a safetensors file; None for any other, or one with a hole in it.

    Raises:
        msgspec.DecodeError, ValueError, RecursionError: it only looks like one.
    """
    prefix = bytes(read(0, 9))
    start = 8 + int.from_bytes(prefix[:8], "little")
    if len(prefix) < 9 or prefix[8:] != b"{" or start > min(MAX_HEAD, size):
        return None
    head = bytes(read(8, start - 8))
    if len(head) < start - 8 or head.count(b"{") > _MAX_TENSORS:
        return None
    described = _header.decode(head)
    begin, end = _moving(described.pop("__metadata__", _Described()).moving)
    records, at = [Record(start)], 0
    for name, tensor in sorted(described.items(), key=lambda item: item[1].data_offsets):
        first, last = tensor.data_offsets
        if first != at or last < first:
            return None
        records.append(Record(last - first, name.encode(), _width(tensor.dtype), begin <= first and last <= end))
        at = last
    return records if start + at == size else None


def _moving(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _width(dtype: str) -> int:
    """Bytes of an element of "F32", "BF16", "F8_E4M3", "BOOL" or what may still come."""
    bits = re.search("[0-9]{1,4}", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


# ---- zip: what torch.save writes, once or several times into one file (torch.distributed.checkpoint)

_END = Struct("<4s4H2IH")
_LOCATOR = Struct("<4sIQI")
_END64 = Struct("<4sQ2H2I4Q")
_ENTRY = Struct("<4s6H3I5H2I")
_LOCAL = Struct("<4s5H3I2H")
_TAIL = _END64.size + _LOCATOR.size + _END.size


def zip_records(read: Read, size: int) -> list[Record] | None:
    """What lies in the archives that a file ends in; None where it ends in none.

    The header before an entry is a record apart from its content: it holds the file's own name and the entry's number,
    which change when the content does not. What lies before the archives is one record.

    Raises:
        struct.error: it only looks like one.
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
    return [Record(after - here, marks.get(here, b"")) for here, after in pairwise(places)]


def _archive_marks(read: Read, end: int) -> Iterator[tuple[int, bytes]]:
    """Where the records of the archive that ends at `end` begin, with their keys; nothing where none ends there."""
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
    begin = behind - length - offset  # of the archive: its own offsets are counted from there
    if begin < 0 or count > _MAX_MARKS or length > _MAX_MARKS * 256:
        return
    directory = bytes(read(behind - length, length))
    yield begin, b""
    yield behind - length, b""
    at = 0
    for _ in range(count):
        name, *_, check, stored, whole, named, extra, comment, _, _, _, local = _ENTRY.unpack_from(directory, at)
        at += _ENTRY.size
        if 0xFFFFFFFF in (whole, stored, local):
            local = _long_offset(directory[at + named : at + named + extra], (whole, stored, local))
        at += named + extra + comment
        head = bytes(read(begin + local, _LOCAL.size)) if local < offset else b""
        if name == b"PK\1\2" and head.startswith(b"PK\3\4"):
            *_, named, extra = _LOCAL.unpack(head)
            content = local + _LOCAL.size + named + extra
            yield begin + local, b""
            if content < offset:
                yield begin + content, check.to_bytes(4, "little")


def _long_offset(extra: bytes, short: tuple[int, int, int]) -> int:
    """An entry's offset from the field that holds what 32 bits do not."""
    at = 0
    while short[2] == 0xFFFFFFFF and at + 4 <= len(extra):
        kind, length = int.from_bytes(extra[at : at + 2], "little"), int.from_bytes(extra[at + 2 : at + 4], "little")
        if kind == 1:
            at += 4 + 8 * sum(number == 0xFFFFFFFF for number in short[:2])
            return int.from_bytes(extra[at : at + 8], "little")
        at += 4 + length
    return short[2]
