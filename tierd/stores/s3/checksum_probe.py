"""Which whole-object checksum to upload with, and whether the server verifies it.

Invariant: a checksum counts as proven only after the server has refused a wrong one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from botocore import exceptions as botocore

from tierd.stores.s3.answers import FOREIGN, MISMATCH
from tierd.stores.s3.checksums import CHECKSUMS, MD5, Checksum
from tierd.stores.s3.limits import S3Limits

PROBE = ".tierd-probe"  # under the store's prefix; not a valid key, so that no scan shows it
_UNKNOWN_CHECKSUM = {"InvalidArgument", "InvalidRequest", "NotImplemented"}

# The store's logger, because collectors of JSON logs see its name.
_log = logging.getLogger("tierd.stores.s3.s3_store")


class ChecksumProbe:
    """Asks the server once, by a put with a wrong checksum.

    Args:
        url: the store, for the log.
        name: the object to put.
        upload: puts an object of this name, with these bytes and these additional parameters; returns the response.
        remove: deletes an object.
        limits: of the client.

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

        Returns:
            "mismatch" if the server refused the value, "unknown" if it does not support the algorithm, "" if it
            accepted the object. None if the request failed for another reason.
        """
        wrong = await checksum.parameters(memoryview(b"other bytes"))
        data = memoryview(b"a put with a wrong checksum, which a server should refuse")
        try:
            answer = await self._upload(self._name, data, wrong)
        except botocore.ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            return "mismatch" if code in MISMATCH else "unknown" if code in _UNKNOWN_CHECKSUM else None
        except FOREIGN:
            return None
        if "ETag" not in answer:
            return None
        try:
            await self._remove(self._name)
        except FOREIGN:
            _log.info("%s: %s could not be deleted; it means nothing", self._url, PROBE)
        return ""
