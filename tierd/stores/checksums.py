"""The checksums over whole objects that S3 servers know, the best first.

Law: a checksum is taken once, over the caller's own bytes. Best is what runs at the speed of memory and tells most bit
flips: CRC-64/NVME, then CRC-32C, both from awscrt; CRC-32 is what the standard library has.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass

try:
    from awscrt import checksums as _crt
except ImportError:
    _crt = None

_SMALL = 1 << 20  # bytes: the loop is held no longer by a checksum of these than by the way to a thread


@dataclass(frozen=True, slots=True)
class Checksum:
    """One algorithm; `field` is the parameter and the part of the answer of PutObject that carry its value."""

    name: str
    field: str
    digest: Callable[[memoryview], bytes]

    def value(self, view: memoryview) -> str:
        """As it stands in a header."""
        return base64.b64encode(self.digest(view)).decode()

    async def parameters(self, view: memoryview) -> dict[str, str]:
        """What PutObject must be given, so that the server checks `view`."""
        value = self.value(view) if len(view) < _SMALL else await asyncio.to_thread(self.value, view)
        if self is MD5:
            return {self.field: value}
        # Ceph checks the value only when the algorithm is named as well.
        return {"ChecksumAlgorithm": self.name.upper(), self.field: value}


def _md5(view: memoryview) -> bytes:
    return hashlib.md5(view, usedforsecurity=False).digest()


def _known() -> tuple[Checksum, ...]:
    known = [Checksum("crc32", "ChecksumCRC32", lambda view: zlib.crc32(view).to_bytes(4, "big"))]
    if _crt is not None:
        crc32c, crc64 = _crt.crc32c, _crt.crc64nvme
        known.insert(0, Checksum("crc32c", "ChecksumCRC32C", lambda view: crc32c(view).to_bytes(4, "big")))
        known.insert(0, Checksum("crc64nvme", "ChecksumCRC64NVME", lambda view: crc64(view).to_bytes(8, "big")))
    return tuple(known)


MD5 = Checksum("md5", "ContentMD5", _md5)  # every server knows it; it is slow, and none is held to have proven it
CHECKSUMS = _known()
