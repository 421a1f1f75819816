"""Try one tier: its directory or its server, its credentials, every operation, and how its bucket is set up."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierd.core.diagnosis import node, tier
from tierd.core.diagnosis.findings import Finding, finding
from tierd.core.diagnosis.node import Mount
from tierd.core.errors import TierdError
from tierd.core.ids import CHECK_KEY, README_KEY
from tierd.core.urls import StoreUrl
from tierd.daemon.tiers.reach import TierAccess, reach
from tierd.daemon.transfer.flush import introduction
from tierd.doctor import endpoint
from tierd.doctor.bounded import in_thread
from tierd.doctor.disk import nearest
from tierd.spool.mounts import mount_of
from tierd.stores.base import Store, clear

_PROBE = 1 << 20  # bytes of the object that is timed
_DIRECTORY_S = 10.0  # seconds for the mount of a tier's directory to answer
_CLEAN_S = 5.0  # seconds for the deletion of the timed object


@dataclass(frozen=True, slots=True)
class Subject:
    """A tier to be tried.

    Attributes:
        place: the tier's name.
        url: where it is.
        store: the open store.
        spool: the spool's directory, which may be absent; None: no spool was named.
    """

    place: str
    url: StoreUrl
    store: Store
    spool: Path | None


async def directory(of: Subject, state: int | None = None) -> AsyncIterator[Finding]:
    """Yield the findings about the directory of a file tier, then about its operations.

    A directory that does not answer is not touched again, because a thread that hangs in it would keep this process.

    Args:
        state: the size of the largest state in the spool, bytes; None: not known.
    """
    path = Path(of.url.path)

    def examine() -> list[Finding]:
        try:
            status, mount, disk = path.stat(), mount_of(path), os.statvfs(path)
        except FileNotFoundError:
            return [finding(of.place, "directory absent", f"{path} does not exist")]
        except OSError:
            return []  # the operations say what is wrong
        if not stat.S_ISDIR(status.st_mode):
            return [finding(of.place, "no directory", f"{path} is not a directory")]
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        return [describe_place(status, mount), tier.room(of.place, free, total, state)]

    def describe_place(status: os.stat_result, mount: Mount | None) -> Finding:
        text = f"{path}, {mount.kind} on {mount.source}" if mount else str(path)
        if of.spool and _overlap(path.resolve(), of.spool.resolve()):
            return finding(of.place, "in the spool", f"{path} and the spool {of.spool} are one, or one holds the other")
        if mount and node.is_in_memory(mount):
            return finding(of.place, "tier in memory", text)
        if of.spool and status.st_dev == nearest(of.spool).stat().st_dev:
            return finding(of.place, "the spool's disk", f"{text}: the file system on which the spool lies")
        return finding(of.place, "own disk", text)

    findings = await in_thread(examine, _DIRECTORY_S)
    for each_finding in findings:
        yield each_finding
    if not tier.is_reached(findings):
        return
    async for each_finding in operations(of):
        yield each_finding


def _overlap(first: Path, second: Path) -> bool:
    return first.is_relative_to(second) or second.is_relative_to(first)


async def operations(of: Subject) -> AsyncIterator[Finding]:
    """Yield the findings of put, get, list and delete, of checksums, and of the time that one object takes."""
    tried = await reach(of.store)
    yield _operations_finding(of, tried)
    if tried.mode == "read-write":
        async for each_finding in _time_object(of):
            yield each_finding
        return
    if tried.mode == "append-only":  # the README is put again, because nothing else may be left there
        yield tier.verified_by(of.place, await of.store.put(README_KEY, introduction()))
    if tried.mode is not None:
        yield finding(of.place, "not measured", "nothing may be put there that could not be deleted again")


def _operations_finding(of: Subject, tried: TierAccess) -> Finding:
    if tried.mode == "read-write":
        return finding(of.place, "read-write", "put, get, list and delete work")
    local, text = of.url.is_directory, f"{tried.mode or tried.failure}: {tried.why}"
    if tried.mode == "append-only":
        return finding(of.place, "append-only", text)
    if tried.failure == "full":
        return finding(of.place, "full", text)
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


async def _time_object(of: Subject) -> AsyncIterator[Finding]:
    data = os.urandom(_PROBE)
    try:
        began = time.monotonic()
        checksum = await of.store.put(CHECK_KEY, data)
        put_end_s = time.monotonic()
        content = await of.store.get(CHECK_KEY)
        get_end_s = time.monotonic()
    except TierdError as error:
        yield finding(of.place, "not measured", str(error))
        return
    finally:
        with suppress(TimeoutError, TierdError):
            async with asyncio.timeout(_CLEAN_S):
                await clear(of.store, [CHECK_KEY])
    yield tier.verified_by(of.place, checksum)
    if memoryview(content).nbytes == _PROBE:
        yield tier.throughput(of.place, _PROBE, put_end_s - began, get_end_s - put_end_s)
    else:  # the object of another node
        yield finding(of.place, "not measured", "another node tries this tier at the same moment; try again")


async def server(of: Subject) -> AsyncIterator[Finding]:
    """Yield the findings about the way to the server of an S3 tier."""
    from tierd.stores.s3.bucket import Bucket, authorities, is_proxied

    bucket = Bucket(of.url)
    try:
        url = await bucket.endpoint()
        if is_proxied(url):
            yield finding(of.place, "by proxy", f"{url} is reached through a proxy of the environment")
            return
        async for each_finding in endpoint.examine(endpoint.Endpoint(of.place, url, await authorities())):
            yield each_finding
    except TierdError as error:
        yield finding(of.place, "no TLS", str(error))
    finally:
        await bucket.aclose()


async def credentials(of: Subject) -> AsyncIterator[Finding]:
    """Yield the finding about the credentials of an S3 tier."""
    from tierd.stores.s3.bucket import credentials as found

    try:
        yield tier.credentials(of.place, await found(of.url))
    except TierdError as error:
        yield finding(of.place, "credentials unknown", str(error))


async def bucket(of: Subject) -> AsyncIterator[Finding]:
    """Yield the findings about the rules by which an S3 bucket keeps and deletes objects."""
    from tierd.stores.s3.bucket import Bucket

    bucket_client, place = Bucket(of.url), of.place

    async def lifecycle() -> Finding:
        return tier.lifecycle(place, await bucket_client.rules(), bucket_client.base)

    async def lock() -> Finding:
        return tier.object_lock(place, *await bucket_client.lock())

    async def versions() -> Finding:
        status = await bucket_client.versions()
        rules = await bucket_client.rules() if status == "Enabled" else []
        return tier.versioning(place, status, rules, bucket_client.base)

    async def uploads() -> Finding:
        return tier.uploads(place, *await bucket_client.uploads(), bucket_client.base)

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
