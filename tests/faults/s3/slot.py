"""A place for one S3 trial at a time: a bucket of its own, a store that reaches it through the proxy, and a mirror.

Invariant: the mirror holds what the server was seen to take and not to delete. It is the test's own truth, and is
compared with the server's listing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.rounds import Lost
from faults.s3.proxy import Answer, Fault, Proxy, Request
from support.by_hand import digest, entries

from tierd.core.urls import parse_url
from tierd.stores.retry import RetryingStore
from tierd.stores.s3.http1 import S3Limits
from tierd.stores.s3.s3_store import S3Store
from tierd.stores.store_wrappers import LimitedStore

BUCKETS = "tierd-faults-"
PREFIX = "p/"  # of the store, in its bucket
ATTEMPTS, DEADLINE_S = 6, 3.0
LIMITS = S3Limits(connections=3, answer_s=0.8, stall_s=0.8, first_page=3)  # a connection that is lost is soon missed


def soon() -> float:
    """A random part of a delay before the next attempt, which is short: the order of things stays."""
    return random.random() / 60


_PROBE = f"{PREFIX}.tierd-probe"
_LEAKS = re.compile(r"AWS4-HMAC-SHA256|Signature=|x-amz-security-token", re.IGNORECASE)

Judge = Callable[[Request], Fault | None]


def calm(request: Request) -> Fault | None:
    """Nothing goes wrong."""
    return None


class Secrets(logging.Handler):
    """Hears every log record at every level; `found` are those that tell a secret."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.forbidden = ""
        self.found: list[str] = []

    def __enter__(self) -> Secrets:
        self._before = logging.getLogger().level
        logging.getLogger().addHandler(self)
        logging.getLogger().setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        logging.getLogger().setLevel(self._before)

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if record.exc_info and record.exc_info[1]:
            said += "".join(traceback.format_exception(record.exc_info[1]))
        if self.tells(said):
            self.found.append(f"{record.name}: {said[:300]}")

    def tells(self, said: str) -> bool:
        return bool(_LEAKS.search(said)) or self.forbidden in said


class Slot:
    """One bucket and its store. `count` and `notes`: the faults that were done in the trial under way."""

    def __init__(self, bucket: str, admin: Any, proxy: Proxy, room: Path) -> None:
        self.bucket, self.admin, self.proxy, self.room = bucket, admin, proxy, room
        self.judge: Judge = calm
        self.mirror: dict[str, bytes] = {}
        self.broken: list[str] = []
        self.reported: list[str] = []
        self.count = 0
        self.notes: Counter[str] = Counter()
        self._uploads: dict[str, list[str]] = {}
        self._open()

    def _open(self) -> None:
        url = f"s3://{self.bucket}/{PREFIX[:-1]}?endpoint=http://127.0.0.1:{self.proxy.port}&addressing=path"
        self.s3 = S3Store(parse_url(f"{url}&region=us-east-1"), LIMITS)
        retrying = RetryingStore(self.s3, attempts=ATTEMPTS, deadline_s=DEADLINE_S, rng=soon)
        self.store = LimitedStore(retrying, 1 << 33, 1 << 33)

    async def renew(self) -> None:
        """A store that a failed trial has not touched."""
        await self.aclose()
        await self.empty()
        self._open()

    async def aclose(self) -> None:
        await self.store.aclose()

    def begin(self) -> None:
        self.judge, self.count = calm, 0
        self.broken, self.reported = [], []
        self.notes, self._uploads = Counter(), {}
        self.proxy.forget(self.bucket)

    def story(self) -> str:
        return "what happened: " + "; ".join(self.reported[-60:])

    # -- what the proxy tells ---------------------------------------------------------------------------------------

    def injected(self, request: Request, fault: Fault) -> None:
        self.count += 1
        self.notes[f"{request.operation}: {fault.name}"] += 1
        self.notes.update([place] if (place := self._place(request)) else [])
        self.reported.append(f"{fault.name} ({fault.at:.3f}) on {request.operation} {request.name}")

    def _place(self, request: Request) -> str:
        """Which of several requests of a kind that one is, where it matters: tierd puts a part object by object."""
        if request.operation == "ListObjectsV2":
            return f"page {'2 or later' if 'continuation-token=' in request.target else '1'} of a listing"
        if request.operation != "PutObject":
            return ""
        if request.name == _PROBE:
            return "the probe of checksums"
        if "/manifests/" in request.name:
            return "a manifest's upload"
        if "/chunks/" not in request.name:
            return ""
        known = self._uploads.setdefault(request.name.rpartition("/")[0], [])
        if request.name not in known:
            known.append(request.name)
        return f"upload {known.index(request.name) + 1} of a part"

    def heard(self, request: Request, answer: Answer) -> None:
        """What the server did with a request, whatever became of its answer."""
        self.reported.append(f"{answer.status} to {request.operation} {request.name}")
        if request.operation == "DeleteObjects" and any("/chunks/" in key for key in request.keys):
            self.notes["chunks deleted by a prune"] += answer.status < 300
        self._place(request)
        if answer.status >= 300:
            return
        match request.operation:
            case "PutObject":
                self.mirror[request.name] = request.body
                self._check_put(request.name, request.body)
            case "DeleteObject":
                self.gone([request.name])
            case "DeleteObjects":
                self.gone(list(request.keys))

    def gone(self, keys: list[str]) -> None:
        for key in keys:
            self.mirror.pop(key, None)
        chunks = {key for key in keys if "/chunks/" in key}
        for name, data in self.mirror.items() if chunks else ():
            if "/manifests/" in name and (lost := chunks & set(chunks_of(name, data))):
                self.broken.append(f"{min(lost)} was deleted, and {name} names it")

    def _check_put(self, name: str, data: bytes) -> None:
        if "/quarantine/" in name:
            self.broken.append(f"{name} was set aside, and nothing is corrupt")
        if "/manifests/" in name:
            for key, (size, expected) in chunks_of(name, data).items():
                found = self.mirror.get(key)
                if found is None or len(found) != size or digest(found) != expected:
                    self.broken.append(f"{name} was put and names {key}, which is {'wrong' if found else 'not there'}")

    # -- how it stands ----------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """As `compared`; then all goes, for the next trial."""
        await self.compared()
        await self.empty()

    async def compared(self) -> None:
        """Wait until no request is on its way; then the server itself says that it holds what the mirror does, and
        nothing else, and that no upload is open."""
        self.judge = calm
        for _ in range(12_000):
            if not self.proxy.busy[self.bucket]:
                break
            await asyncio.sleep(0.01)
        else:
            raise Lost("a request that never ends")
        if self.broken:
            raise Lost("; ".join(self.broken[:3]))
        found: dict[str, str] = {}
        async for page in self.admin.get_paginator("list_objects_v2").paginate(Bucket=self.bucket):
            found |= {item["Key"]: item["ETag"].strip('"') for item in page.get("Contents", ())}
        wanted = {key: hashlib.md5(data, usedforsecurity=False).hexdigest() for key, data in self.mirror.items()}
        if found != wanted:
            wrong = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
            raise Lost(f"the server does not hold what it took: {wrong[:5]}")
        if odd := [key for key in found if key.startswith(_PROBE)]:
            raise Lost(f"left over: {odd}")
        await check_uploads(self.admin, self.bucket)

    async def empty(self) -> None:
        """Remove all that the server is known to hold here, for the next trial."""
        keys = [{"Key": key} for key in self.mirror]
        for start in range(0, len(keys), 1000):
            await self.admin.delete_objects(Bucket=self.bucket, Delete={"Objects": keys[start : start + 1000]})
        self.mirror.clear()

    def below(self, prefix: str) -> dict[str, bytes]:
        """What the server holds under a prefix of the store, by the store's keys."""
        whole = PREFIX + prefix
        return {key[len(PREFIX) :]: data for key, data in self.mirror.items() if key.startswith(whole)}


def chunks_of(name: str, manifest: bytes) -> dict[str, tuple[int, str]]:
    """What a manifest names: the key in its bucket -> size and digest of the object."""
    run = name.removeprefix(PREFIX).partition("/")[0]
    named = entries(json.loads(manifest))
    return {f"{PREFIX}{run}/{one['key']}": (one["size"], one["xxh3_128"]) for one in named}


async def check_uploads(admin: Any, bucket: str) -> None:
    """No upload is open there, by the server's word."""
    if left := (await admin.list_multipart_uploads(Bucket=bucket)).get("Uploads"):
        raise Lost(f"{len(left)} uploads were left open: {[one['Key'] for one in left[:5]]}")


async def administer(admin: Any, bucket: str) -> None:
    """Remove a bucket with all that is in it."""
    await check_uploads(admin, bucket)
    async for page in admin.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        if keys := [{"Key": item["Key"]} for item in page.get("Contents", ())]:
            await admin.delete_objects(Bucket=bucket, Delete={"Objects": keys})
    await admin.delete_bucket(Bucket=bucket)
