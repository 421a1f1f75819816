"""Try one tier: its directory or server, its credentials, every operation, and how its bucket is set up."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from tierd.core.diagnosis import machine_findings, tier_findings
from tierd.core.diagnosis.findings import Finding, finding
from tierd.core.diagnosis.machine_findings import Mount
from tierd.core.errors import TierdError
from tierd.core.ids import CHECK_KEY, README_KEY
from tierd.core.urls import StoreUrl
from tierd.daemon.tiers.tier_identity import tier_readme
from tierd.daemon.tiers.tier_probes import TierAccess, probe_access
from tierd.doctor.node_checks import nearest_existing
from tierd.stores.base import Store, delete_if_permitted
from tierd.stores.mounted_directories import mount_of, unmounted_point
from tierd.threads import call_in_thread, within_deadline

_PROBE = 1 << 20  # bytes of the object that is timed
_DIRECTORY_S = 10.0  # seconds for the mount of a tier's directory to answer
_CLEAN_S = 5.0  # seconds for the deletion of the timed object


@dataclass(frozen=True, slots=True)
class ExaminedTier:
    """A tier to be tried: `place` is its name. The spool's directory may be absent; None: no spool was named."""

    place: str
    url: StoreUrl
    store: Store
    spool: Path | None


async def examine_directory(of: ExaminedTier, state: int | None = None) -> AsyncIterator[Finding]:
    """Yield the findings about the directory of a file tier, then about its operations.

    A directory that does not answer is not touched again, because a thread that hangs in it would keep this process.
    `state` is the size of the largest state in the spool in bytes, if it is known.
    """
    path = Path(of.url.path)

    def examine() -> list[Finding]:
        try:
            status, mount, disk = path.stat(), mount_of(path), os.statvfs(path)
        except FileNotFoundError:
            return [_absence_finding(of.place, path)]
        except OSError:
            return []  # the operations say what is wrong
        if not stat.S_ISDIR(status.st_mode):
            return [finding(of.place, "no directory", f"{path} is not a directory")]
        if point := unmounted_point(path):
            return [finding(of.place, "not mounted", f"{path}: /etc/fstab mounts {point}, and it is not mounted")]
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        return [describe_place(status, mount), tier_findings.directory_room(of.place, free, total, state)]

    def describe_place(status: os.stat_result, mount: Mount | None) -> Finding:
        text = f"{path}, {mount.kind} on {mount.source}" if mount else str(path)
        if of.spool and _overlap(path.resolve(), of.spool.resolve()):
            return finding(of.place, "in the spool", f"{path} and the spool {of.spool} are one, or one holds the other")
        if mount and machine_findings.is_in_memory(mount):
            return finding(of.place, "tier in memory", text)
        if of.spool and status.st_dev == nearest_existing(of.spool).stat().st_dev:
            return finding(of.place, "the spool's disk", f"{text}: the file system on which the spool lies")
        return finding(of.place, "own disk", text)

    findings = await call_in_thread(examine, _DIRECTORY_S)
    for each_finding in findings:
        yield each_finding
    if not tier_findings.is_reached(findings):
        return
    async for each_finding in examine_operations(of):
        yield each_finding


def _absence_finding(place: str, path: Path) -> Finding:
    if point := unmounted_point(path):
        return finding(place, "not mounted", f"{path} does not exist: /etc/fstab mounts {point}, and it is not mounted")
    return finding(place, "directory absent", f"{path} does not exist")


def _overlap(first: Path, second: Path) -> bool:
    return first.is_relative_to(second) or second.is_relative_to(first)


async def examine_operations(of: ExaminedTier) -> AsyncIterator[Finding]:
    """Yield the findings of put, get, list and delete, of checksums, and of the time that one object takes."""
    tried = await probe_access(of.store)
    yield _operations_finding(of, tried)
    if tried.mode == "read-write":
        async for each_finding in _time_object(of):
            yield each_finding
        return
    if tried.mode == "append-only":  # the README is put again, because nothing else may be left there
        yield tier_findings.verified_by(of.place, await of.store.put(README_KEY, tier_readme()))
        answer = await of.store.put_if_absent(README_KEY, tier_readme())
        yield tier_findings.conditions(of.place, is_honored=answer is None)
    if tried.mode is not None:
        yield finding(of.place, "not measured", "nothing may be put there that could not be deleted again")


def _operations_finding(of: ExaminedTier, tried: TierAccess) -> Finding:
    if tried.mode == "read-write":
        return finding(of.place, "read-write", "put, get, list and delete work")
    local, text = of.url.is_directory, f"{tried.mode or tried.failure}: {tried.why}"
    if tried.mode == "append-only":
        return finding(of.place, "append-only", text)
    if tried.failure in ("full", "no bucket"):
        return finding(of.place, tried.failure, tried.why)
    if tried.failure == "no answer":
        return finding(of.place, "mount fails" if local else "no answer", text, "operations")
    if local:
        return finding(of.place, "not writable", f"{text}{_owner(Path(of.url.path))}")
    return finding(of.place, "takes nothing" if tried.mode else "refused", text)


def _owner(path: Path) -> str:
    """Say whose a tier's directory is, and who asks; nothing of a file system that is read-only for everybody."""
    try:
        status, read_only = path.stat(), os.statvfs(path).f_flag & os.ST_RDONLY
    except OSError:
        return f"; this is uid {os.geteuid()}, which may not look at {path}"
    whose = f"{path} belongs to uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):03o}"
    return "" if read_only else f"; {whose}; this is uid {os.geteuid()}"


async def _time_object(of: ExaminedTier) -> AsyncIterator[Finding]:
    data = os.urandom(_PROBE)
    try:
        began = time.monotonic()
        checksum = await of.store.put(CHECK_KEY, data)
        put_end_s = time.monotonic()
        content = await of.store.get(CHECK_KEY)
        get_end_s = time.monotonic()
        is_honored = await of.store.put_if_absent(CHECK_KEY, b"") is None
    except TierdError as error:
        yield finding(of.place, "not measured", str(error))
        return
    finally:
        with suppress(TimeoutError, TierdError):
            async with asyncio.timeout(_CLEAN_S):
                await delete_if_permitted(of.store, [CHECK_KEY])
    yield tier_findings.verified_by(of.place, checksum)
    yield tier_findings.conditions(of.place, is_honored=is_honored)
    if memoryview(content).nbytes == _PROBE:
        yield tier_findings.throughput(of.place, _PROBE, put_end_s - began, get_end_s - put_end_s)
    else:  # the object of another node
        yield finding(of.place, "not measured", "another node tries this tier at the same moment; try again")


async def examine_server(of: ExaminedTier) -> AsyncIterator[Finding]:
    """Yield the findings about the way to the server of an S3 tier."""
    from tierd.stores.s3.bucket_setup import BucketSetup, ca_certificates_path, is_proxied

    bucket = BucketSetup(of.url)
    try:
        url = await bucket.endpoint()
        if is_proxied(url):
            yield finding(of.place, "by proxy", f"{url} is reached through a proxy of the environment")
            return
        async for each_finding in examine_endpoint(Endpoint(of.place, url, await ca_certificates_path())):
            yield each_finding
    except TierdError as error:
        yield finding(of.place, "no TLS", str(error))
    finally:
        await bucket.aclose()


async def examine_credentials(of: ExaminedTier) -> AsyncIterator[Finding]:
    """Yield the finding about the credentials of an S3 tier."""
    from tierd.stores.s3.bucket_setup import describe_credentials as found

    try:
        yield tier_findings.credentials(of.place, await found(of.url))
    except TierdError as error:
        yield finding(of.place, "credentials unknown", str(error))


async def examine_bucket(of: ExaminedTier) -> AsyncIterator[Finding]:
    """Yield the findings about the rules by which an S3 bucket keeps and deletes objects."""
    from tierd.stores.s3.bucket_setup import BucketSetup

    bucket_client, place = BucketSetup(of.url), of.place

    async def lifecycle() -> Finding:
        return tier_findings.lifecycle(place, await bucket_client.lifecycle_rules(), bucket_client.base)

    async def lock() -> Finding:
        return tier_findings.object_lock(place, *await bucket_client.default_retention())

    async def versions() -> Finding:
        status = await bucket_client.versioning()
        rules = await bucket_client.lifecycle_rules() if status == "Enabled" else []
        return tier_findings.versioning(place, status, rules, bucket_client.base)

    async def uploads() -> Finding:
        return tier_findings.uploads(place, *await bucket_client.unfinished_uploads(), bucket_client.base)

    questions: dict[str, Callable[[], Awaitable[Finding]]] = {
        "rules unknown": lifecycle,
        "lock unknown": lock,
        "versioning unknown": versions,
        "uploads unknown": uploads,
    }
    try:
        for unknown, ask in questions.items():
            try:
                yield await ask()
            except TierdError as error:
                yield finding(place, unknown, str(error))
    finally:
        await bucket_client.aclose()


_HEAD = 16 << 10  # bytes of an answer that are read for its Date
_LINGER_S = 1.0  # seconds for the end of a connection
_CONNECT_S = 10.0  # for a connection with its handshake


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server of the tier `place` is: `http(s)://host[:port]`, with the file of CA certificates.

    `answer_s` are the seconds for the head of an answer.
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


async def examine_endpoint(where: Endpoint) -> AsyncIterator[Finding]:
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
        reader, writer = await within_deadline(connecting, _CONNECT_S)
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
        ahead_s = await within_deadline(_skew(where, reader, writer), where.answer_s)
        yield finding(place, "connects", where.url)
        yield tier_findings.clock_skew(place, ahead_s)
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
    return tier_findings.certificate(where.place, str(tls.version()), left_s)


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
