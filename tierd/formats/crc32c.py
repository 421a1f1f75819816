"""CRC-32C, and the mask that TensorFlow and LevelDB apply to it.

In Python, 5 MB take a second; with awscrt (`tierd[s3]`) the time is negligible.
"""

from __future__ import annotations

from collections.abc import Callable

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def slow_crc32c(data: bytes, before: int = 0) -> int:
    """Compute the CRC-32C of `data` as the continuation of bytes whose CRC-32C is `before`."""
    table, value = _TABLE, before ^ 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def fast_crc32c() -> Callable[[bytes, int], int] | None:
    """Return awscrt's CRC-32C, which runs at memory speed; None if awscrt is not installed."""
    try:
        from awscrt.checksums import crc32c
    except ImportError:
        return None
    return crc32c  # type: ignore[no-any-return]


def masked(crc: int) -> int:
    """Mask a CRC as it is stored: TensorFlow's `crc32c::Mask` (tensorflow/core/lib/hash/crc32c.h)."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
