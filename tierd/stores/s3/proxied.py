"""HTTP for the S3 client where `transport` has no way: through a proxy, or with a client certificate, over aiohttp."""

from __future__ import annotations

import asyncio
from typing import Any

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession

from tierd.stores.s3.connection import StallTimer
from tierd.stores.s3.http1 import LONGEST_REPLY, NoResponse, check_xml
from tierd.stores.s3.limits import S3Limits


class ProxiedSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore's own session, with the limits of `transport.DirectSession` on responses that are not objects.

    The limits are on bytes, and on time by a `StallTimer`.
    """

    def __init__(self, limits: S3Limits, **options: Any) -> None:
        super().__init__(**options)
        self._stall_s = limits.stall_s

    async def send(self, request: Any) -> AioAWSResponse:
        """Send one of botocore's prepared requests.

        Raises:
            botocore.HTTPClientError: there is no response, or none that can be used.
        """
        if request.stream_output:
            return await super().send(request)
        request.stream_output = True  # so that aiohttp reads nothing of the body yet
        try:
            response = await super().send(request)
        finally:
            request.stream_output = False
        try:
            response._content = body = await _reply(response.raw, self._stall_s)
        except BaseException:
            response.raw.close()
            raise
        if body and response.status_code == 200:
            check_xml(body)
        return response


async def _reply(raw: Any, stall_s: float) -> bytes:
    """Read through aiohttp the body of a response that is not an object."""
    if (size := raw.content_length or 0) > LONGEST_REPLY:
        raise NoResponse(f"an answer of {size} bytes, where no more than {LONGEST_REPLY} make sense")
    loop, data = asyncio.get_running_loop(), bytearray()
    watch = StallTimer(stall_s, loop.time(), 0, "in the middle of an answer")
    while len(data) <= LONGEST_REPLY:
        try:
            async with asyncio.timeout(watch.left_s(loop.time(), len(data))):
                piece = await raw.content.read(LONGEST_REPLY + 1 - len(data))
        except TimeoutError:
            continue  # the timer raises with the reason
        if not piece:
            return bytes(data)
        data += piece
    raise NoResponse(f"an answer without an end, of which {LONGEST_REPLY} bytes were read")
