"""The whole-object checksums that S3 servers support, the best first, and which of them the server verifies.

Invariant: a checksum is computed once, over the caller's own bytes, and counts as proven only after the server has
refused a wrong one. The best runs at the speed of memory and detects most bit flips: CRC-64/NVME, then CRC-32C, both
from awscrt. CRC-32 is in the standard library.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from botocore import exceptions as botocore

from tierd.stores.s3.http1 import S3Limits
from tierd.stores.s3.server_errors import LIBRARY_ERRORS, MISMATCH_CODES

try:
    from awscrt import checksums as _crt
except ImportError:
    _crt = None

_SMALL = 1 << 20  # bytes; computing the checksum of fewer bytes takes no longer than a switch to a thread


@dataclass(frozen=True, slots=True)
class Checksum:
    """One checksum algorithm, by its name in lower case. `field` carries the value in PutObject and in its response."""

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


PROBE_NAME = ".tierd-probe"  # under the store's prefix; not a valid key, so that no scan shows it
UNKNOWN_HEADER_CODES = {"InvalidArgument", "InvalidRequest", "NotImplemented"}

# The store's logger, because collectors of JSON logs see its name.
_log = logging.getLogger("tierd.stores.s3.s3_store")


class ChecksumProbe:
    """Asks the server once, by a put with a wrong checksum.

    Args:
        upload: puts an object of a name, with these bytes and these additional parameters; returns the response.

    Attributes:
        checksum: the one for each upload; MD5 until a probe has found a better one.
        proven: the checksum's name, after the server has refused a wrong one; else empty.
        next_at: monotonic seconds of the next probe; None after a conclusive probe.
    """

    def __init__(
        self,
        url: str,
        name: str,
        upload: Callable[[str, memoryview, dict[str, str]], Awaitable[Any]],
        remove: Callable[[str], Awaitable[None]],
        limits: S3Limits,
    ) -> None:
        self._url, self._name, self._upload, self._remove = url, name, upload, remove
        self.checksum: Checksum = MD5
        self.proven = ""
        self.next_at: float | None = 0.0
        self._again_s = limits.probe_s
        self._probing = asyncio.Lock()

    async def ask(self) -> None:
        """Find the best checksum that the server verifies; else the best that it accepts; else use MD5.

        A server verifies a checksum if it refuses a wrong value.
        """
        if self.next_at is None:
            return
        async with self._probing:
            if self.next_at is None or time.monotonic() < self.next_at:
                return
            self.next_at = time.monotonic() + self._again_s
            accepted: list[Checksum] = []
            for checksum in CHECKSUMS:
                refused = await self._refuses(checksum)
                if refused is None:
                    return  # no conclusion; until the next probe use MD5, which every server supports
                if refused == "mismatch":
                    self.checksum, self.proven, self.next_at = checksum, checksum.name, None
                    return
                if refused == "":
                    accepted.append(checksum)
            self.checksum, self.next_at = accepted[0] if accepted else MD5, None
            _log.info("%s verifies no checksum: what is put is proven by reading it back", self._url)

    async def _refuses(self, checksum: Checksum) -> str | None:
        """Put an object with a wrong checksum.

        Return "mismatch" if the server refused the value, "unknown" if it does not support the algorithm, "" if it
        accepted the object, and None if the request failed for another reason.
        """
        wrong = await checksum.parameters(memoryview(b"other bytes"))
        data = memoryview(b"a put with a wrong checksum, which a server should refuse")
        try:
            answer = await self._upload(self._name, data, wrong)
        except botocore.ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            return "mismatch" if code in MISMATCH_CODES else "unknown" if code in UNKNOWN_HEADER_CODES else None
        except LIBRARY_ERRORS:
            return None
        if "ETag" not in answer:
            return None
        try:
            await self._remove(self._name)
        except LIBRARY_ERRORS:
            _log.info("%s: %s could not be deleted; it means nothing", self._url, PROBE_NAME)
        return ""
