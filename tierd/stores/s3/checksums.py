"""The whole-object checksums that S3 servers support, the best first.

Invariant: a checksum is computed once, over the caller's own bytes. The best is the one that runs at the speed of
memory and detects most bit flips: CRC-64/NVME, then CRC-32C, both from awscrt. CRC-32 is in the standard library.
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

_SMALL = 1 << 20  # bytes; computing the checksum of fewer bytes takes no longer than a switch to a thread


@dataclass(frozen=True, slots=True)
class Checksum:
    """One checksum algorithm.

    Attributes:
        name: the algorithm's name in lower case.
        field: the parameter of PutObject, and the member of its response, that carry the value.
        digest: computes the checksum's bytes.
    """

    name: str
    field: str
    digest: Callable[[memoryview], bytes]

    def value(self, view: memoryview) -> str:
        """Compute the header value: the checksum in base64."""
        return base64.b64encode(self.digest(view)).decode()

    async def parameters(self, view: memoryview) -> dict[str, str]:
        """Return the parameters of PutObject that make the server check `view`."""
        value = self.value(view) if len(view) < _SMALL else await asyncio.to_thread(self.value, view)
        if self is MD5:
            return {self.field: value}
        # Ceph checks the value only if the request also names the algorithm.
        return {"ChecksumAlgorithm": self.name.upper(), self.field: value}


def _md5(view: memoryview) -> bytes:
    return hashlib.md5(view, usedforsecurity=False).digest()


def _available_checksums() -> tuple[Checksum, ...]:
    checksums = [Checksum("crc32", "ChecksumCRC32", lambda view: zlib.crc32(view).to_bytes(4, "big"))]
    if _crt is not None:
        crc32c, crc64 = _crt.crc32c, _crt.crc64nvme
        checksums.insert(0, Checksum("crc32c", "ChecksumCRC32C", lambda view: crc32c(view).to_bytes(4, "big")))
        checksums.insert(0, Checksum("crc64nvme", "ChecksumCRC64NVME", lambda view: crc64(view).to_bytes(8, "big")))
    return tuple(checksums)


MD5 = Checksum("md5", "ContentMD5", _md5)  # every server supports it; it is slow, and never counts as proven
CHECKSUMS = _available_checksums()
