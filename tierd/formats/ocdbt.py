"""`manifest.ocdbt`, the root of the database in which Orbax stores arrays by default.

Covered: every byte of it, by its length and its CRC-32C. Not covered: the tree and the arrays in `d/`, because finding
them needs a full reader of the format.

Source: tensorstore/kvstore/ocdbt/index.rst ("Manifest format"). Bound: a manifest of 64 MiB.
"""

from __future__ import annotations

from tierd.formats.byte_source import ByteSource, DamagedFile, Sound, UncheckedFile, take
from tierd.formats.crc32c import fast_crc32c, slow_crc32c

_MAGIC = 0x0CDB3A2A.to_bytes(4, "big")
_MAX = 64 << 20
_SHORTEST = 18  # bytes of magic, length, version, compression and CRC


def check_manifest(source: ByteSource) -> Sound:
    """Check a manifest.

    Raises:
        DamagedFile: the manifest is truncated, or its CRC-32C does not match.
        UncheckedFile: the manifest is too large.
    """
    head = take(source, 0, _SHORTEST, "the manifest's header")
    if head[:4] != _MAGIC:
        raise DamagedFile(0, "no OCDBT manifest")
    length = int.from_bytes(head[4:12], "little")
    if length != source.size:
        raise DamagedFile(min(length, source.size), f"a manifest of {length} bytes in a file of {source.size}")
    if length > _MAX:
        raise UncheckedFile(f"a manifest of {length} bytes, more than {_MAX}")
    data = source.read(0, length)
    if (fast_crc32c() or slow_crc32c)(data[:-4], 0) != int.from_bytes(data[-4:], "little"):
        raise DamagedFile(0, "the manifest does not have its CRC-32C")
    return Sound("OCDBT manifest", "the arrays below it are not read")
