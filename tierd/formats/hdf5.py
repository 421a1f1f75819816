"""HDF5 (Keras's .weights.h5 and .h5): the superblock, the end address, and the root group's first blocks.

Covered: the signature; the superblock's versions, sizes and addresses, and its checksum (versions 2 and 3); that its
writer closed it; and that the file ends at the end address. Not covered: groups and data sets below the root, and the
data, because a file of the default version holds no digest of them.

Sources: the HDF5 File Format Specification, version 3 (sections II.A and IV.A), and files of h5py 3.16. Those files
show that a killed writer leaves bit 0 of the consistency flags set, also in version 0. The end address is then before
the file's end.

Bound: the check reads a few hundred bytes.
"""

from __future__ import annotations

from tierd.formats.byte_source import ByteSource, DamagedFile, Sound, UncheckedFile, UnfinishedFile, take

MAGIC = b"\x89HDF\r\n\x1a\n"
_OBJECT_HEADER = 16  # bytes of a version 1 object header before its messages
_USER_BLOCKS = (0, *(512 << power for power in range(12)))


def check_hdf5(source: ByteSource) -> Sound:
    """Check a file. Its superblock is at 0, or after a user block.

    Raises:
        DamagedFile: the file is truncated, or the superblock has values that no writer writes.
        UnfinishedFile: its writer has not closed it.
        UncheckedFile: this module does not know its version.
    """
    places = (place for place in _USER_BLOCKS if place + 8 <= source.size and source.read(place, 8) == MAGIC)
    at = next(places, 0)
    if take(source, at, 8, "the signature") != MAGIC:
        raise DamagedFile(at, "no HDF5 signature")
    version = take(source, at + 8, 1, "the superblock")[0]
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
    return Sound("HDF5", "below the root group, the default format holds no digest")


def _is_object(header: bytes) -> bool:
    """Return whether an object header of version 2, or of version 1 (a version, messages, padding), begins there."""
    old = header[:2] == b"\x01\x00" and any(header[2:4]) and any(header[4:8]) and not any(header[12:])
    return old or header[:4] == b"OHDR"


def _sizes(source: ByteSource, at: int, offset: int) -> tuple[int, int]:
    """Return the width in bytes of an address, and of a length."""
    address, length = take(source, at + offset, 2, "the superblock")
    if address not in (2, 4, 8, 16, 32) or length not in (2, 4, 8, 16, 32):
        raise DamagedFile(at + offset, f"addresses of {address} bytes and lengths of {length}")
    return address, length


def _read_old(source: ByteSource, at: int, version: int) -> tuple[int, int, int]:
    """Read flags, end address and root of versions 0 and 1, and check the root group's symbol table entry."""
    width, _ = _sizes(source, at, 13)
    zeros = take(source, at + 9, 4, "the superblock") + take(source, at + 15, 1, "the superblock")
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
    cached = int.from_bytes(take(source, place, 4, "the root group"), "little")
    if cached > 2:
        raise DamagedFile(place, "the root group's entry is of no kind that HDF5 has")
    flags = int.from_bytes(take(source, at + 20, 4, "the superblock"), "little")
    if cached == 1 and max(end, root) <= source.size and not flags:
        for address, magic in zip(_addresses(source, place + 8, width, 2), (b"TREE", b"HEAP"), strict=True):
            if base + address + 4 > source.size or source.read(base + address, 4) != magic:
                raise DamagedFile(place + 8, f"no {magic.decode()} of the root group at {base + address}")
    return flags, end, base + root


def _read_new(source: ByteSource, at: int, version: int) -> tuple[int, int, int]:
    """Read flags, end address and root of versions 2 and 3, and check the superblock's checksum."""
    width, _ = _sizes(source, at, 9)
    size = 12 + 4 * width
    data = take(source, at, size + 4, "the superblock")
    if lookup3(data[:size]) != int.from_bytes(data[size:], "little"):
        raise DamagedFile(at, "the superblock does not have its checksum")
    base, _, end, root = _addresses(source, at + 12, width, 4)
    return data[11], end, base + root


def _addresses(source: ByteSource, at: int, width: int, count: int) -> list[int]:
    data = take(source, at, width * count, "the superblock")
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
