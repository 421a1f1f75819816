"""TensorFlow's checkpoints, `<prefix>.index` and `<prefix>.data-R-of-N`; `manifest.ocdbt`, the root of the database in
which Orbax stores arrays; and the CRC-32C of both.

The index is a sorted table as LevelDB's: blocks of keys and values, each with a CRC-32C, and a footer. Covered: every
byte of it; that each shard exists and holds the ranges that the index names, without overlap. Each tensor's CRC-32C is
covered only if awscrt is installed (`tierd[s3]`), because Python takes 200 s for a GB. Not covered: bytes between
tensors, and tensors of variants. Of Orbax, every byte of the manifest is covered, by its length and its CRC-32C; the
tree and the arrays in `d/` are not, because finding them needs a full reader of the format.

Sources: LevelDB's doc/table_format.md, to which tensorflow/core/lib/io/table_format.txt refers, and
tensorflow/core/lib/io/format.cc; tensorflow/core/util/tensor_bundle/tensor_bundle.cc (`BundleWriter`) and
core/protobuf/tensor_bundle.proto; tensorstore/kvstore/ocdbt/index.rst ("Manifest format"). Data files are written as
`.tempstate…` and renamed, the index last. A string tensor's CRC covers its lengths as 4 or 8 bytes each, their masked
CRC, and its text.

Bound: a table of 256 MiB, of which one block and the index are in memory at a time; a manifest of 64 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tierd.formats.byte_source import ByteSource, DamagedFile, SoundFile, UncheckedFile, read_exactly, read_pieces

_TABLE = list(range(256))
for _ in range(8):
    _TABLE = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in _TABLE]  # Castagnoli's polynomial, reflected


def slow_crc32c(data: bytes, before: int = 0) -> int:
    """Compute the CRC-32C of `data` as the continuation of bytes whose CRC-32C is `before`."""
    value = before ^ 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def fast_crc32c() -> Callable[[bytes, int], int] | None:
    """Return awscrt's CRC-32C, which runs at memory speed; None if awscrt is not installed."""
    try:
        from awscrt.checksums import crc32c
    except ImportError:
        return None
    return crc32c  # type: ignore[no-any-return]


def mask_crc(crc: int) -> int:
    """Mask a CRC as it is stored: TensorFlow's `crc32c::Mask` (tensorflow/core/lib/hash/crc32c.h)."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


TABLE_MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER = 48
_TRAILER = 5  # bytes after each block: its compression and its CRC
_MAX_TABLE = 256 << 20
_LONGEST_VARINT = 10


def read_table(source: ByteSource) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table, in order. When the iterator ends, the whole table was checked."""
    if source.size > _MAX_TABLE:
        raise UncheckedFile(f"a table of {source.size} bytes, more than {_MAX_TABLE}")
    footer_at = source.size - _FOOTER
    footer = source.read(footer_at, _FOOTER) if footer_at >= 0 else b""
    if footer[-8:] != TABLE_MAGIC:
        raise DamagedFile(source.size, "the table has no footer: it is cut off, or its end was overwritten")
    meta, at = _handle(footer, 0, footer_at)
    index, at = _handle(footer, at, footer_at)
    if any(footer[at:-8]):
        raise DamagedFile(footer_at + at, "the table's footer holds more than two handles")
    end = 0
    for _, value in _entries(_block(source, *index), index[0]):
        handle, used = _handle(value, 0, index[0])
        if handle[0] != end or used != len(value):
            raise DamagedFile(index[0], f"a block of the table at {handle[0]}, where the one before ends at {end}")
        yield from _entries(_block(source, *handle), handle[0])
        end = handle[0] + handle[1] + _TRAILER
    for handle in (meta, index):
        if handle[0] != end:
            raise DamagedFile(footer_at, f"the table's footer names a block at {handle[0]}, where one ends at {end}")
        end = handle[0] + handle[1] + _TRAILER
    list(_entries(_block(source, *meta), meta[0]))
    if end != footer_at:
        raise DamagedFile(end, "the table holds bytes of no block")


def _handle(data: bytes, at: int, place: int) -> tuple[tuple[int, int], int]:
    offset, at = read_varint(data, at, place)
    size, at = read_varint(data, at, place)
    return (offset, size), at


def read_varint(data: bytes, at: int, place: int) -> tuple[int, int]:
    """Decode the number at `at`, and return it with the position after it; `data` begins at `place` in the file."""
    value = 0
    for index in range(_LONGEST_VARINT):
        if at + index >= len(data):
            break
        value |= (data[at + index] & 0x7F) << 7 * index
        if data[at + index] < 0x80 and value < 1 << 64:
            return value, at + index + 1
    raise DamagedFile(place, "a number is cut off, or has more than 64 bits")


def _block(source: ByteSource, offset: int, size: int) -> bytes:
    if offset + size + _TRAILER > source.size - _FOOTER:
        why = f"a block of the table, of {size} bytes at {offset}, reaches over its end"
        raise DamagedFile(min(offset, source.size), why)
    data = source.read(offset, size + _TRAILER)
    if mask_crc((fast_crc32c() or slow_crc32c)(data[:-4], 0)) != int.from_bytes(data[-4:], "little"):
        raise DamagedFile(offset, f"the table's block of {size} bytes does not have its CRC-32C")
    if data[size]:
        raise UncheckedFile("a compressed table")
    return data[:size]


def _entries(block: bytes, place: int) -> Iterator[tuple[bytes, bytes]]:
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if len(block) < 4 or end < 0:
        raise DamagedFile(place, "a block of the table is too short for its restart points")
    at, key = 0, b""
    while at < end:
        shared, at = read_varint(block, at, place)
        suffix_size, at = read_varint(block, at, place)
        size, at = read_varint(block, at, place)
        if shared > len(key) or at + suffix_size + size > end:
            raise DamagedFile(place, "a block of the table holds an entry that reaches over its end")
        key = key[:shared] + block[at : at + suffix_size]
        at += suffix_size + size
        yield key, block[at - size : at]


_STRING, _VARIANT = 7, 21  # data types of tensorflow/core/framework/types.proto
_MAX_SHARDS = 100_000
_MAX_STRINGS = 64 << 20  # bytes of a string tensor, which is read as a whole
_Fields = list[tuple[int, int | bytes]]


@dataclass(frozen=True, slots=True, order=True)
class BundleEntry:
    """A tensor's place in a shard. `elements` is None if the shape does not define it."""

    offset: int
    size: int
    crc: int
    dtype: int
    elements: int | None
    name: str


def read_bundle_index(source: ByteSource) -> dict[int, list[BundleEntry]]:
    """Read the entries of each shard, by its number. The result names all shards."""
    shards: dict[int, list[BundleEntry]] | None = None
    for key, value in read_table(source):
        fields = list(_fields(value))
        if shards is None:
            count = _number(fields, 1)
            if key or not 0 < count <= _MAX_SHARDS:
                raise DamagedFile(0, f"the index begins with no header, or one of {count} shards")
            shards = {shard: [] for shard in range(count)}
        elif not any(field == 7 for field, _ in fields):  # each slice of a sliced tensor has its own entry
            shard = _number(fields, 3)
            if shard not in shards:
                raise DamagedFile(0, f"the index names shard {shard} of {len(shards)}")
            name = key[:200].decode("utf-8", "backslashreplace")
            numbers = (_number(fields, 4), _number(fields, 5), _number(fields, 6), _number(fields, 1))
            shards[shard].append(BundleEntry(*numbers, _elements(fields), name))
    if shards is None:
        raise DamagedFile(0, "the index is empty")
    return shards


def check_bundle_shard(source: ByteSource, entries: Iterable[BundleEntry]) -> SoundFile:
    crc, at, plain = fast_crc32c(), 0, False
    for entry in sorted(entries):
        where, end = f"tensor {entry.name!a}", entry.offset + entry.size
        if end > source.size:
            why = f"the file ends there, before {where} of {entry.size} bytes at {entry.offset}"
            raise DamagedFile(source.size, why)
        if entry.offset < at and entry.size:
            raise DamagedFile(entry.offset, f"{where} overlaps the one before it")
        at = max(at, end)
        has_strings = entry.elements is not None and entry.elements <= entry.size <= _MAX_STRINGS
        if crc is None or entry.dtype == _VARIANT or (entry.dtype == _STRING and not has_strings):
            plain = True
        elif mask_crc(_crc_of(source, entry, crc)) != entry.crc:
            raise DamagedFile(entry.offset, f"{where}: its {entry.size} bytes do not have their CRC-32C")
    reason = "the tensors' CRC-32C is checked only with awscrt (tierd[s3])" if crc is None else "tensors of variants"
    return SoundFile("TensorFlow shard", reason if plain else None)


def _crc_of(source: ByteSource, entry: BundleEntry, crc: Callable[[bytes, int], int]) -> int:
    checksum = 0
    if entry.dtype != _STRING:
        for piece in read_pieces(source, entry.offset, entry.size):
            checksum = crc(piece, checksum)
        return checksum
    data, at, lengths = source.read(entry.offset, entry.size), 0, b""
    for _ in range(entry.elements or 0):
        length, at = read_varint(data, at, entry.offset)
        lengths += length.to_bytes(4 if length < 1 << 32 else 8, "little")
    checksum = crc(lengths, 0)
    return crc(data[at:], checksum)


def _elements(fields: _Fields) -> int | None:
    shape = next((value for field, value in fields if field == 2 and isinstance(value, bytes)), b"")
    dims = [list(_fields(value)) for field, value in _fields(shape) if field == 2 and isinstance(value, bytes)]
    sizes = [_number(dim, 1) for dim in dims]
    return math.prod(sizes) if all(0 <= size < 1 << 40 for size in sizes) and len(sizes) < 256 else None


def _number(fields: _Fields, number: int) -> int:
    """Return a field's value; 0 if it is absent, as in protobuf."""
    return next((value for field, value in fields if field == number and isinstance(value, int)), 0)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protobuf message: numbers as int, and length-delimited fields as bytes."""
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at, 0)
        width = {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 0:
            value, at = read_varint(data, at, 0)
            yield tag >> 3, value
        elif tag & 7 == 2:
            size, at = read_varint(data, at, 0)
            yield tag >> 3, data[at : at + size]
            at += size
        elif width is not None:
            yield tag >> 3, int.from_bytes(data[at : at + width], "little")
            at += width
        else:
            raise DamagedFile(0, "an entry of the index is no message of protobuf")
    if at != len(data):
        raise DamagedFile(0, "an entry of the index is cut off")


_MAGIC = 0x0CDB3A2A.to_bytes(4, "big")
_MAX_MANIFEST = 64 << 20
_SHORTEST = 18  # bytes of magic, length, version, compression and CRC


def check_ocdbt_manifest(source: ByteSource) -> SoundFile:
    head = read_exactly(source, 0, _SHORTEST, "the manifest's header")
    if head[:4] != _MAGIC:
        raise DamagedFile(0, "no OCDBT manifest")
    length = int.from_bytes(head[4:12], "little")
    if length != source.size:
        raise DamagedFile(min(length, source.size), f"a manifest of {length} bytes in a file of {source.size}")
    if length > _MAX_MANIFEST:
        raise UncheckedFile(f"a manifest of {length} bytes, more than {_MAX_MANIFEST}")
    data = source.read(0, length)
    if (fast_crc32c() or slow_crc32c)(data[:-4], 0) != int.from_bytes(data[-4:], "little"):
        raise DamagedFile(0, "the manifest does not have its CRC-32C")
    return SoundFile("OCDBT manifest", "the arrays below it are not read")
