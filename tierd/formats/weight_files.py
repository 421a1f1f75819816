"""safetensors, and HDF5 (Keras's .weights.h5 and .h5): what can be checked of files of weights without a digest.

safetensors is a length of 8 bytes, a JSON header, and the tensors' bytes without a gap. Covered: the header's length,
syntax, offsets and duplicate names, each tensor's size by its dtype and shape, and the file's size. Not covered: the
tensors' bytes and names. Sources: the format's description and the checks of its library (huggingface/safetensors,
`SafeTensors::read_metadata` and `Metadata::validate`). The library refuses a header of more than 100 MB, and offsets
that leave a hole or overlap. It also refuses a file that does not end with the last tensor. Bound: a header of 100 MB;
reading takes about ten times its size in memory.

Of HDF5 are covered: the signature; the superblock's versions, sizes and addresses, and its checksum (versions 2 and 3);
that its writer closed it; that the file ends at the end address; and the root group's first blocks. Not covered: groups
and data sets below the root, and the data, because a file of the default version holds no digest of them. Sources: the
HDF5 File Format Specification, version 3 (sections II.A and IV.A), and files of h5py 3.16. Those files show that a
killed writer leaves bit 0 of the consistency flags set, also in version 0. The end address is then before the file's
end. Bound: the check reads a few hundred bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from tierd.formats.byte_source import ByteSource, DamagedFile, SoundFile, UncheckedFile, UnfinishedFile, read_exactly

_MAX_HEADER = 100_000_000
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class TensorPlace(msgspec.Struct, gc=False):
    """A tensor, and the range of its bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of a file, whose first tensor's bytes begin at `begin`."""

    begin: int
    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]


def looks_like_safetensors(head: bytes, size: int) -> bool:
    """Whether a file that begins with `head`, of 9 bytes or more, may be safetensors."""
    return size > 9 and head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= size - 8


def check_safetensors(source: ByteSource, expected: Collection[str] = (), by: str = "") -> SoundFile:
    """Check a file, also for the tensors that the index `by` places in it."""
    header = read_safetensors_header(source)
    begin = header.begin
    tensors = sorted(header.tensors.items(), key=lambda entry: entry[1].data_offsets)
    at = 0
    for name, tensor in tensors:
        where, (first, last) = f"tensor {name[:200]!a}", tensor.data_offsets
        if first != at or last < first:
            how = "overlaps the one before it" if first < at else "leaves a hole before it"
            raise DamagedFile(begin + min(first, at), f"{where} {how}: bytes {first} to {last} of the data, after {at}")
        bits = _BITS.get(tensor.dtype)
        if any(dimension < 0 for dimension in tensor.shape) or (
            bits is not None and math.prod(tensor.shape) * bits != 8 * (last - first)
        ):
            raise DamagedFile(8, f"{where}: {last - first} bytes for {tensor.dtype} of shape {list(tensor.shape)[:16]}")
        at = last
    if begin + at != source.size:
        place = f"its tensors end at byte {begin + at}, and the file at {source.size}"
        raise DamagedFile(
            min(begin + at, source.size), f"{place}: {'it is cut off' if begin + at > source.size else 'it goes on'}"
        )
    if lacking := set(expected).difference(name for name, _ in tensors):
        raise DamagedFile(8, f"it lacks tensor {min(lacking)[:200]!a}, which {by[:200]!a} places in it")
    if unknown := {tensor.dtype for _, tensor in tensors} - _BITS.keys():
        raise UncheckedFile(f"a tensor of dtype {min(unknown)[:100]!a}")
    return SoundFile("safetensors", "the format holds no digest of the tensors")


def read_safetensors_header(source: ByteSource) -> SafetensorsHeader:
    length = int.from_bytes(read_exactly(source, 0, 8, "the header's length"), "little")
    if length > min(_MAX_HEADER, source.size - 8):
        raise DamagedFile(
            0, f"a header of {length} bytes in a file of {source.size}; it is cut off, or never was safetensors"
        )
    return _parse_header(source.read(8, length))


def _parse_header(header: bytes) -> SafetensorsHeader:
    try:
        if not header.startswith(b"{"):
            raise ValueError("it does not begin with a brace")
        members = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        json.loads(header, object_pairs_hook=_refuse_duplicates)  # msgspec takes the last of equal names
        metadata = members.pop("__metadata__", None)
        texts = msgspec.json.decode(metadata, type=dict[str, str] | None) if metadata is not None else None
        tensors = {name: msgspec.json.decode(raw, type=TensorPlace) for name, raw in members.items()}
        return SafetensorsHeader(8 + len(header), tensors, texts or {})
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedFile(8, f"the header is no JSON of tensors: {str(error)[:300]}") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Raise `ValueError` if an object of the header has a name twice, because readers then differ in what they take."""
    names = set[str]()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"it has {name[:200]!a} twice")
        names.add(name)


HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_OBJECT_HEADER = 16  # bytes of a version 1 object header before its messages
_USER_BLOCKS = (0, *(512 << power for power in range(12)))


def check_hdf5(source: ByteSource) -> SoundFile:
    """Check a file. Its superblock is at 0, or after a user block."""
    places = (place for place in _USER_BLOCKS if place + 8 <= source.size and source.read(place, 8) == HDF5_MAGIC)
    at = next(places, 0)
    if read_exactly(source, at, 8, "the signature") != HDF5_MAGIC:
        raise DamagedFile(at, "no HDF5 signature")
    version = read_exactly(source, at + 8, 1, "the superblock")[0]
    if version > 3:
        raise UncheckedFile(f"HDF5 with a superblock of version {version}")
    flags, end, root = (_read_old if version < 2 else _read_new)(source, at, version)
    if at + end == source.size:  # some writers count it from the superblock, h5py from the file's beginning
        end += at
    if end > source.size:
        raise DamagedFile(source.size, f"the file ends there; its end address is {end}: it is cut off")
    if flags:
        raise UnfinishedFile("its writer has not closed it: it is being written, or its writer died")
    if end < source.size:
        raise UnfinishedFile(
            f"it goes on for {source.size - end} bytes after its end address, as where its writer died"
        )
    if not at < root <= end - _OBJECT_HEADER or not _is_object(source.read(root, _OBJECT_HEADER)):
        raise DamagedFile(at, f"no root group at {root}, where the superblock says")
    return SoundFile("HDF5", "below the root group, the default format holds no digest")


def _is_object(header: bytes) -> bool:
    """Return whether an object header of version 2, or of version 1 (a version, messages, padding), begins there."""
    old = header[:2] == b"\x01\x00" and any(header[2:4]) and any(header[4:8]) and not any(header[12:])
    return old or header[:4] == b"OHDR"


def _sizes(source: ByteSource, at: int, offset: int) -> tuple[int, int]:
    """Return the width in bytes of an address, and of a length."""
    address, length = read_exactly(source, at + offset, 2, "the superblock")
    if address not in (2, 4, 8, 16, 32) or length not in (2, 4, 8, 16, 32):
        raise DamagedFile(at + offset, f"addresses of {address} bytes and lengths of {length}")
    return address, length


def _read_old(source: ByteSource, at: int, version: int) -> tuple[int, int, int]:
    """Read flags, end address and root of versions 0 and 1, and check the root group's symbol table entry."""
    width, _ = _sizes(source, at, 13)
    zeros = read_exactly(source, at + 9, 4, "the superblock") + read_exactly(source, at + 15, 1, "the superblock")
    if any(zeros):
        raise DamagedFile(at + 9, "the superblock names versions that no HDF5 has")
    first = at + (24 if version == 0 else 28)
    base, free, end, driver, _, root = _addresses(source, first, width, 6)
    nowhere = (1 << 8 * width) - 1
    if base != at:
        raise DamagedFile(first, f"a base address of {base} in a superblock at {at}")
    if (free, driver) != (nowhere, nowhere):
        raise UncheckedFile("HDF5 with a driver or free space of its own")
    place = first + 6 * width
    cached = int.from_bytes(read_exactly(source, place, 4, "the root group"), "little")
    if cached > 2:
        raise DamagedFile(place, "the root group's entry is of no kind that HDF5 has")
    flags = int.from_bytes(read_exactly(source, at + 20, 4, "the superblock"), "little")
    if cached == 1 and max(end, root) <= source.size and not flags:
        for address, magic in zip(_addresses(source, place + 8, width, 2), (b"TREE", b"HEAP"), strict=True):
            if base + address + 4 > source.size or source.read(base + address, 4) != magic:
                raise DamagedFile(place + 8, f"no {magic.decode()} of the root group at {base + address}")
    return flags, end, base + root


def _read_new(source: ByteSource, at: int, version: int) -> tuple[int, int, int]:
    """Read flags, end address and root of versions 2 and 3, and check the superblock's checksum."""
    width, _ = _sizes(source, at, 9)
    size = 12 + 4 * width
    data = read_exactly(source, at, size + 4, "the superblock")
    if lookup3(data[:size]) != int.from_bytes(data[size:], "little"):
        raise DamagedFile(at, "the superblock does not have its checksum")
    base, _, end, root = _addresses(source, at + 12, width, 4)
    return data[11], end, base + root


def _addresses(source: ByteSource, at: int, width: int, count: int) -> list[int]:
    data = read_exactly(source, at, width * count, "the superblock")
    return [int.from_bytes(data[width * index : width * (index + 1)], "little") for index in range(count)]


def lookup3(data: bytes) -> int:
    """Compute Bob Jenkins' lookup3 hash ("hashlittle", initial value 0), the checksum of HDF5's metadata."""
    mask = 0xFFFFFFFF

    def rotate(value: int, bits: int) -> int:
        return ((value << bits) | (value >> (32 - bits))) & mask

    a = b = c = (0xDEADBEEF + len(data)) & mask
    while len(data) > 12:
        a, b, c = (
            (word + int.from_bytes(data[4 * n : 4 * n + 4], "little")) & mask for n, word in enumerate((a, b, c))
        )
        for bits in (4, 6, 8, 16, 19, 4):
            a = ((a - c) & mask) ^ rotate(c, bits)
            c = (c + b) & mask
            a, b, c = b, c, a
        data = data[12:]
    if not data:
        return c
    data = data.ljust(12, b"\0")
    a, b, c = ((word + int.from_bytes(data[4 * n : 4 * n + 4], "little")) & mask for n, word in enumerate((a, b, c)))
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - rotate(b, bits)) & mask
        a, b, c = b, c, a
    return b
