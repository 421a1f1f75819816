"""A daemon with `[http]` in this process, and a client that sends whatever a test wants sent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from support.waiting import until

from tierd.core.config import from_toml
from tierd.daemon import daemon_service
from tierd.daemon.http.http_server import HttpServer
from tierd.spool.spool import Spool


class Answer(NamedTuple):
    """An answer, whole. `status` is 0 if the server closed the connection without one."""

    status: int
    headers: dict[str, str]
    body: bytes


async def sent(address: tuple[str, int], data: bytes, tls=None) -> Answer:
    """Send bytes, and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*address, ssl=tls)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(60):
            found = await reader.read()
    except ConnectionError:
        found = b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, body = found.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return Answer(int(first.split()[1]) if first else 0, headers, body)


async def get(
    address: tuple[str, int], path: str, *, method="GET", host="localhost", tls=None, **headers: str
) -> Answer:
    lines = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host is not None else [])]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return await sent(address, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), tls)


@contextlib.asynccontextmanager
async def serving(spool: Spool, tier: Path, *, http: str = 'listen = "127.0.0.1:0"') -> AsyncIterator[HttpServer]:
    """A whole daemon over a spool and a tier, as `tierd run` has it; its HTTP server."""
    tier.mkdir(exist_ok=True)
    text = f'spool = "{spool.root}"\nrescan = "1h"\ndrain = "5s"\nscrub = "0s"\n[http]\n{http}\n'
    text += f'[[tier]]\nname = "disk"\nurl = "file://{tier}"\nretention = {{ keep_last = 100 }}\n'
    made: list[HttpServer] = []
    real = HttpServer.__init__

    def init(self: HttpServer, *arguments) -> None:
        real(self, *arguments)
        made.append(self)

    with mock.patch.object(HttpServer, "__init__", init):
        daemon = asyncio.ensure_future(daemon_service.serve(from_toml(text, "tierd.toml")))
        await until(lambda: daemon.done() or (made and made[-1].address))
    try:
        if daemon.done():
            daemon.result()
        yield made[-1]
    finally:
        if not daemon.done():
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(60):
                await daemon
