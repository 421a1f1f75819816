"""Zip archives, as torch.save (and so Lightning's .ckpt), Keras (.keras) and NumPy (.npz) write them.

Covered: the end records; the central directory; each record's local header, compared with the directory; its data
descriptor; and its content by the CRC-32 in the directory. Not covered: padding, comments and attributes, none of which
a loader reads. Records without a CRC (zero in its place) are not covered either; torch writes them after
`set_crc32_options(False)` and under `skip_data`.

Sources: the format's public description (APPNOTE 6.3), and files of torch 2.13 and Python 3.11. torch puts a data
descriptor after each record, with sizes of 8 bytes for records beyond 4 GiB, and always a zip64 end record.

Bounds: a directory of 1,000,000 records, with about 150 bytes of memory for each. Deflated content is expanded one
piece at a time, to 1000 times the file's size at most.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct

from tierd.formats.byte_source import PIECE_SIZE, ByteSource, DamagedFile, SoundFile, UncheckedFile, read_pieces

ZIP_MAGIC = b"PK\x03\x04"
ZIP_END_MAGIC = b"PK\x05\x06"
_CENTRAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_END64, _LOCATOR = b"PK\x06\x06", b"PK\x06\x07"
_LOCAL_HEADER = Struct("<4s5H3I2H")
_CENTRAL_HEADER = Struct("<4s6H3I5H2I")
_END_RECORD = Struct("<4s4H2IH")
_END64_RECORD = Struct("<4sQ2H2I4Q")
_LOCATOR_RECORD = Struct("<4sIQI")
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _DESCRIBED = 1, 8  # flags
_FULL, _FULL16 = 0xFFFFFFFF, 0xFFFF  # the value of a field whose number is in a zip64 record
_MAX_RECORDS = 1_000_000
_MAX_COMMENT = 0xFFFF
_NEWEST = 63  # version 6.3, the newest one; readers refuse archives that need a newer one
_MAX_EXPANSION = 1000  # times the file's size; content that expands further is not checked
_WINDOW = 1 << 20  # bytes of the directory in memory at a time


@dataclass(frozen=True, slots=True)
class _Record:
    """A record as the central directory describes it. `at` is the offset of that description."""

    at: int
    name: bytes
    flags: int
    method: int
    moment: tuple[int, int]  # time and date, in their encoded form
    crc: int
    packed: int  # bytes of content in the file, maybe compressed
    size: int  # bytes of expanded content
    offset: int  # offset of the local header

    @property
    def label(self) -> str:
        return self.name[:200].decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class _Directory:
    offset: int
    size: int
    records: int


def check_zip(source: ByteSource) -> SoundFile:
    """Check an archive, including each record's content."""
    directory = _find_directory(source)
    if directory.records > _MAX_RECORDS:
        raise UncheckedFile(f"a zip archive of more than {_MAX_RECORDS} records")
    spans: list[tuple[int, int]] = []
    budget = _MAX_EXPANSION * source.size
    bare = 0
    for record in _records(source, directory):
        begin, end = _check_header(source, record, directory.offset)
        budget -= record.size
        if budget < 0:
            raise UncheckedFile(f"its records expand to more than {_MAX_EXPANSION} times its size")
        if record.crc or not record.size:
            _check_content(source, record, begin)
        else:
            bare += 1
        end = _check_descriptor(source, record, end, directory.offset)
        spans.append((record.offset, end))
    spans.sort()
    for (_, end), (begin, _) in pairwise(spans):
        if begin < end:
            raise DamagedFile(begin, "two records of the zip archive overlap")
    return SoundFile("zip", f"{bare} of {len(spans)} records have no CRC" if bare else None)


def read_zip_record(source: ByteSource, ending: str, max_bytes: int) -> bytes | None:
    """Return the content of the first uncompressed record whose name has this ending; None if there is none.

    A record of more than `max_bytes` bytes counts as none. The content is not checked (see `check_zip`).
    """
    directory = _find_directory(source)
    for record in _records(source, directory):
        if record.name.endswith(ending.encode()) and record.method == _STORED and record.size <= max_bytes:
            begin, _ = _check_header(source, record, directory.offset)
            return source.read(begin, record.size)
    return None


def _find_directory(source: ByteSource) -> _Directory:
    """Find the directory through the end record, which is last in the file except for a comment."""
    tail_at = max(0, source.size - _END_RECORD.size - _MAX_COMMENT)
    tail = source.read(tail_at, source.size - tail_at)
    candidate = tail.rfind(ZIP_END_MAGIC)
    while candidate >= 0:
        at = tail_at + candidate
        if source.size - at >= _END_RECORD.size:
            _, *disks, disk_records, records, size, offset, comment = _END_RECORD.unpack_from(tail, candidate)
            if at + _END_RECORD.size + comment == source.size:
                return _directory(source, at, (*disks, disk_records, records, size, offset))
        candidate = tail.rfind(ZIP_END_MAGIC, 0, candidate)
    raise DamagedFile(source.size, "the zip archive has no end record: it is cut off, or its end was overwritten")


def _directory(source: ByteSource, at: int, end: tuple[int, ...]) -> _Directory:
    """Return the directory that the end record at `at`, or the zip64 record before it, names."""
    *disks, disk_records, records, size, offset = end
    ends_at = at
    locator_at = at - _LOCATOR_RECORD.size
    if locator_at >= 0 and source.read(locator_at, 4) == _LOCATOR:
        _, disk, ends_at, total = _LOCATOR_RECORD.unpack(source.read(locator_at, _LOCATOR_RECORD.size))
        if disk or total > 1 or ends_at + _END64_RECORD.size > locator_at:
            raise DamagedFile(locator_at, "the zip64 locator points nowhere")
        wide = _END64_RECORD.unpack(source.read(ends_at, _END64_RECORD.size))
        magic, length, _, _, *disks64, disk_records64, records64, size64, offset64 = wide
        if magic != _END64 or ends_at + 12 + length != locator_at:
            raise DamagedFile(ends_at, "no zip64 end record where the locator says")
        narrow = (
            (disk_records, disk_records64, _FULL16),
            (records, records64, _FULL16),
            (size, size64, _FULL),
            (offset, offset64, _FULL),
        )
        if any(narrow_value not in (full, wide_value) for narrow_value, wide_value, full in narrow):
            raise DamagedFile(at, "the two end records of the zip archive contradict each other")
        disks, disk_records, records, size, offset = [*disks, *disks64], disk_records64, records64, size64, offset64
    if any(disks) or disk_records != records:
        raise DamagedFile(at, "the end record names several volumes")
    if offset + size != ends_at:
        raise DamagedFile(at, f"the zip directory ends at {offset + size} by its end record, which begins at {ends_at}")
    return _Directory(offset, size, records)


def _records(source: ByteSource, directory: _Directory) -> Iterator[_Record]:
    at, end = directory.offset, directory.offset + directory.size
    window, window_at = b"", at
    for _ in range(directory.records):
        if at + _CENTRAL_HEADER.size + 3 * _FULL16 > window_at + len(window) < end:
            window, window_at = source.read(at, min(_WINDOW, end - at)), at
        record, size = _record(window[at - window_at :][: _CENTRAL_HEADER.size + 3 * _FULL16], at)
        at += size
        yield record
    if at != end:
        raise DamagedFile(at, f"the zip directory goes on after its {directory.records} records")


def _record(data: bytes, at: int) -> tuple[_Record, int]:
    if len(data) < _CENTRAL_HEADER.size or data[:4] != _CENTRAL:
        raise DamagedFile(at, "no record of the zip directory where one belongs")
    _, _, version, flags, method, time, date, crc, packed, size, name, extra, comment, disk, _, _, offset = (
        _CENTRAL_HEADER.unpack_from(data)
    )
    if version & 0xFF > _NEWEST:
        raise UncheckedFile(f"a zip archive of version {version & 0xFF}")
    begin = _CENTRAL_HEADER.size
    length = begin + name + extra + comment
    if disk or length > len(data):
        raise DamagedFile(at, "a record of the zip directory is longer than the directory")
    wide = _zip64(data[begin + name : begin + name + extra], at)
    values = []
    for value in (size, packed, offset):
        if value == _FULL:
            if len(wide) < 8:
                raise DamagedFile(at, "a record of the zip directory lacks a zip64 number")
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        values.append(value)
    size, packed, offset = values
    record = _Record(at, data[begin : begin + name], flags, method, (time, date), crc, packed, size, offset)
    return record, length


def _zip64(extra: bytes, at: int) -> bytes:
    """Return the zip64 numbers in an extra field, which is a sequence of (kind, length, content)."""
    while extra:
        length = int.from_bytes(extra[2:4], "little")
        if len(extra) < 4 + length:
            raise DamagedFile(at, "an extra field of a zip record is cut off")
        if extra[:2] == b"\x01\x00":
            return extra[4 : 4 + length]
        extra = extra[4 + length :]
    return b""


def _check_header(source: ByteSource, record: _Record, limit: int) -> tuple[int, int]:
    """Compare the local header with the directory, and return the begin and end of the content."""
    if record.flags & _ENCRYPTED or record.method not in (_STORED, _DEFLATED):
        raise UncheckedFile(f"{record.label} is encrypted, or compressed by method {record.method}")
    if record.method == _STORED and record.packed != record.size:
        raise DamagedFile(record.at, f"{record.label}: stored in {record.packed} bytes, and has {record.size}")
    where = f"{record.label}: no local header where the zip directory says"
    if record.offset + _LOCAL_HEADER.size > limit:
        raise DamagedFile(record.at, where)
    magic, _, flags, method, time, date, crc, packed, size, name, extra = _LOCAL_HEADER.unpack(
        source.read(record.offset, _LOCAL_HEADER.size)
    )
    if magic != ZIP_MAGIC:
        raise DamagedFile(record.offset, where)
    begin = record.offset + _LOCAL_HEADER.size
    data = begin + name + extra
    if data + record.packed > limit:
        raise DamagedFile(record.offset, f"{record.label}: it reaches into the zip directory")
    described = bool(flags & _DESCRIBED)
    sizes = (packed in (record.packed, _FULL) and size in (record.size, _FULL)) or (described and not packed | size)
    same = (flags, method, (time, date)) == (record.flags, record.method, record.moment)
    if not (same and sizes and (crc == record.crc or (described and not crc))):
        raise DamagedFile(
            record.offset, f"{record.label}: its local header and the zip directory contradict each other"
        )
    head = source.read(begin, name + extra)
    if head[:name] != record.name:
        raise DamagedFile(begin, f"{record.label}: another name in its local header")
    _zip64(head[name:], begin + name)
    return data, data + record.packed


def _check_content(source: ByteSource, record: _Record, begin: int) -> None:
    crc = size = 0
    if record.method == _STORED:
        for piece in read_pieces(source, begin, record.packed):
            crc = zlib.crc32(piece, crc)
        size = record.packed
    else:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            for piece in read_pieces(source, begin, record.packed):
                while piece and not inflater.eof and size <= record.size:
                    expanded = inflater.decompress(piece, PIECE_SIZE)
                    crc, size, piece = zlib.crc32(expanded, crc), size + len(expanded), inflater.unconsumed_tail
        except zlib.error as error:
            raise DamagedFile(begin, f"{record.label}: its content cannot be inflated: {error}") from None
        if not inflater.eof or inflater.unused_data:
            raise DamagedFile(begin, f"{record.label}: its deflated content does not end where it should")
    if size != record.size or crc != record.crc:
        raise DamagedFile(begin, f"{record.label}: its {record.packed} bytes of content do not have their CRC-32")


def _check_descriptor(source: ByteSource, record: _Record, end: int, limit: int) -> int:
    """Compare the data descriptor after the content, if there is one, with the directory, and return its end.

    The format makes its signature optional; all known writers of checkpoints include it.
    """
    if not record.flags & _DESCRIBED:
        return end
    for width in (4, 8):
        size = 8 + 2 * width
        if end + size <= limit:
            numbers = (
                record.crc.to_bytes(4, "little"),
                *(n.to_bytes(8, "little")[:width] for n in (record.packed, record.size)),
            )
            if source.read(end, size) == _DESCRIPTOR + b"".join(numbers):
                return end + size
    raise DamagedFile(end, f"{record.label}: its data descriptor and the zip directory contradict each other")
