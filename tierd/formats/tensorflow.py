"""TensorFlow's checkpoints: `<prefix>.index`, a table with each tensor's place, and `<prefix>.data-R-of-N`.

Covered: every byte of the index; that each shard exists and holds the ranges that the index names, without overlap.
Each tensor's CRC-32C is covered only if awscrt is installed (`tierd[s3]`), because Python takes 200 s for a GB. Not
covered: bytes between tensors, and tensors of variants.

Sources: tensorflow/core/util/tensor_bundle/tensor_bundle.cc (`BundleWriter`) and core/protobuf/tensor_bundle.proto.
Data files are written as `.tempstate…` and renamed, the index last. A string tensor's CRC covers its lengths as 4 or 8
bytes each, their masked CRC, and its text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tierd.formats.byte_source import ByteSource, DamagedFile, Sound, pieces
from tierd.formats.crc32c import fast_crc32c, masked
from tierd.formats.sstable import read_table, varint

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


def read_index(source: ByteSource) -> dict[int, list[BundleEntry]]:
    """Read the entries of each shard, by its number. The result names all shards.

    Raises:
        DamagedFile: the index is damaged.
        UncheckedFile: the index is too large, or compressed.
    """
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


def check_shard(source: ByteSource, entries: Iterable[BundleEntry]) -> Sound:
    """Check a shard against the index. Raises `DamagedFile`."""
    crc, at, plain = fast_crc32c(), 0, False
    for entry in sorted(entries):
        where, end = f"tensor {entry.name!a}", entry.offset + entry.size
        if end > source.size:
            raise DamagedFile(
                source.size, f"the file ends there, before {where} of {entry.size} bytes at {entry.offset}"
            )
        if entry.offset < at and entry.size:
            raise DamagedFile(entry.offset, f"{where} overlaps the one before it")
        at = max(at, end)
        if crc is None or entry.dtype == _VARIANT or (entry.dtype == _STRING and not _has_strings(entry)):
            plain = True
        elif masked(_crc_of(source, entry, crc)) != entry.crc:
            raise DamagedFile(entry.offset, f"{where}: its {entry.size} bytes do not have their CRC-32C")
    reason = "the tensors' CRC-32C is checked only with awscrt (tierd[s3])" if crc is None else "tensors of variants"
    return Sound("TensorFlow shard", reason if plain else None)


def _has_strings(entry: BundleEntry) -> bool:
    return entry.elements is not None and entry.elements <= entry.size <= _MAX_STRINGS


def _crc_of(source: ByteSource, entry: BundleEntry, crc: Callable[[bytes, int], int]) -> int:
    checksum = 0
    if entry.dtype != _STRING:
        for piece in pieces(source, entry.offset, entry.size):
            checksum = crc(piece, checksum)
        return checksum
    data, at, lengths = source.read(entry.offset, entry.size), 0, b""
    for _ in range(entry.elements or 0):
        length, at = varint(data, at, entry.offset)
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
        tag, at = varint(data, at, 0)
        width = {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 0:
            value, at = varint(data, at, 0)
            yield tag >> 3, value
        elif tag & 7 == 2:
            size, at = varint(data, at, 0)
            yield tag >> 3, data[at : at + size]
            at += size
        elif width is not None:
            yield tag >> 3, int.from_bytes(data[at : at + width], "little")
            at += width
        else:
            raise DamagedFile(0, "an entry of the index is no message of protobuf")
    if at != len(data):
        raise DamagedFile(0, "an entry of the index is cut off")
