"""Try the way to a server: its name, its certificate, and its clock."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from tierd.core.diagnosis import tier
from tierd.core.diagnosis.findings import Finding, finding
from tierd.doctor.bounded import within

_HEAD = 16 << 10  # bytes of an answer that are read for its Date
_LINGER_S = 1.0  # seconds for the end of a connection
_CONNECT_S = 10.0  # for a connection with its handshake


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is.

    Attributes:
        place: the tier's name.
        url: `http(s)://host[:port]`.
        authorities: the file of CA certificates.
        answer_s: seconds for the head of an answer.
    """

    place: str
    url: str
    authorities: str
    answer_s: float = 10.0

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def encrypted(self) -> bool:
        return urlsplit(self.url).scheme == "https"

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or (443 if self.encrypted else 80)


async def examine(where: Endpoint) -> AsyncIterator[Finding]:
    """Yield the findings about the way to a server, as far as it goes."""
    place, loop = where.place, asyncio.get_running_loop()
    try:
        resolved = await loop.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        yield finding(place, "does not resolve", f"{where.host}: {getattr(error, 'strerror', None) or error}")
        return
    addresses = sorted({str(address[4][0]) for address in resolved})
    yield finding(place, "resolves", f"{where.host} is {', '.join(addresses[:4])}{' ...' * (len(addresses) > 4)}")
    try:
        context = ssl.create_default_context(cafile=where.authorities) if where.encrypted else None
        name = where.host if context else None
        connecting = asyncio.open_connection(where.host, where.port, ssl=context, server_hostname=name)
        reader, writer = await within(connecting, _CONNECT_S)
    except ssl.SSLError as error:
        yield finding(place, "no TLS", f"{where.url}: {_reason(error)}")
        return
    except TimeoutError:
        yield finding(place, "no connection", f"{where.url}: no connection within {_CONNECT_S:.0f} s")
        return
    except OSError as error:
        yield finding(place, "no connection", f"{where.url}: {_os_reason(error)}")
        return
    try:
        yield _encryption(where, writer, addresses)
        ahead_s = await within(_skew(where, reader, writer), where.answer_s)
        yield finding(place, "connects", where.url)
        yield tier.skew(place, ahead_s)
    except TimeoutError:
        text = f"{where.url}: it accepts a connection, and sends no answer within {where.answer_s:.0f} s"
        yield finding(place, "silent server", text)
    finally:
        writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await writer.wait_closed()


def _os_reason(error: OSError) -> str:
    """Describe why no connection was made; asyncio joins the errors of several addresses without their numbers."""
    return os.strerror(error.errno) if error.errno else str(error)


def _reason(error: ssl.SSLError) -> str:
    """Describe an error of TLS by OpenSSL's own words, which repeat nothing of ours."""
    return getattr(error, "verify_message", "") or error.reason or type(error).__name__


def _encryption(where: Endpoint, writer: asyncio.StreamWriter, addresses: list[str]) -> Finding:
    tls = writer.get_extra_info("ssl_object")
    if tls is None:
        near = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
        text = f"http://{where.host}: " + ("this machine only" if near else "whoever is on the way reads and changes")
        return finding(where.place, "plain on loopback" if near else "not encrypted", text)
    ends = (tls.getpeercert() or {}).get("notAfter")
    left_s = ssl.cert_time_to_seconds(str(ends)) - time.time() if ends else None
    return tier.certificate(where.place, str(tls.version()), left_s)


async def _skew(where: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float | None:
    """Ask the server for its time, by a request that needs no credentials; None if it does not say it.

    The answer's Date has whole seconds, so half a second is added. Half of the time that the answer took is subtracted.
    """
    began = time.time()
    writer.write(f"HEAD / HTTP/1.1\r\nHost: {where.host}\r\nConnection: close\r\n\r\n".encode())
    try:
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        head = await reader.read(_HEAD)
    except asyncio.IncompleteReadError as error:
        head = error.partial
    except OSError:
        return None
    end = time.time()
    for line in head.decode("latin-1").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "date":
            with suppress(ValueError, OverflowError):
                date = parsedate_to_datetime(value.strip()).replace(tzinfo=UTC).timestamp() + 0.5
                return (began + end) / 2 - date
    return None
