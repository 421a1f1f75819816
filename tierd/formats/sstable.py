"""Sorted tables of LevelDB and TensorFlow: blocks of keys and values, each with a CRC-32C, and a footer.

Covered: every byte. Blocks follow each other without a gap up to the footer, and each has its CRC.

Sources: LevelDB's doc/table_format.md, to which tensorflow/core/lib/io/table_format.txt refers, and
tensorflow/core/lib/io/format.cc. Bound: a table of 256 MiB; one block and the index are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tierd.formats.byte_source import ByteSource, DamagedFile, UncheckedFile
from tierd.formats.crc32c import fast_crc32c, masked, slow_crc32c

MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER = 48
_TRAILER = 5  # bytes after each block: its compression and its CRC
_MAX = 256 << 20
_LONGEST_VARINT = 10


def read_table(source: ByteSource) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table, in order. When the iterator ends, the whole table was checked.

    Raises:
        DamagedFile: the table is truncated, or a block's CRC does not match.
        UncheckedFile: the table is too large, or compressed.
    """
    if source.size > _MAX:
        raise UncheckedFile(f"a table of {source.size} bytes, more than {_MAX}")
    footer_at = source.size - _FOOTER
    footer = source.read(footer_at, _FOOTER) if footer_at >= 0 else b""
    if footer[-8:] != MAGIC:
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
    offset, at = varint(data, at, place)
    size, at = varint(data, at, place)
    return (offset, size), at


def varint(data: bytes, at: int, place: int) -> tuple[int, int]:
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
        raise DamagedFile(
            min(offset, source.size), f"a block of the table, of {size} bytes at {offset}, reaches over its end"
        )
    data = source.read(offset, size + _TRAILER)
    crc: Callable[[bytes, int], int] = fast_crc32c() or slow_crc32c
    if masked(crc(data[:-4], 0)) != int.from_bytes(data[-4:], "little"):
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
        shared, at = varint(block, at, place)
        suffix_size, at = varint(block, at, place)
        size, at = varint(block, at, place)
        if shared > len(key) or at + suffix_size + size > end:
            raise DamagedFile(place, "a block of the table holds an entry that reaches over its end")
        key = key[:shared] + block[at : at + suffix_size]
        at += suffix_size + size
        yield key, block[at - size : at]
