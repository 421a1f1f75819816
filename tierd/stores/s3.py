"""Objects in an S3 bucket, through aiobotocore.

Law: one object is one request, so that nothing partial can exist; every upload brings a checksum over the whole object,
taken here; that the server checks it is believed only after it has refused a wrong one. Whatever S3, botocore or the
transport say is translated in one place, `answers`, and no secret can get into what is said. botocore's own retries
are off: retrying is `RetryingStore`'s concern.

Uploads are not signed over their payload (SHA-256 costs as much as the rest of a put): the checksum, or on servers that
know none the MD5, is a signed header instead. Use https where the network is not your own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import aiohttp
from aiobotocore.config import AioConfig
from botocore import exceptions as botocore
from botocore.parsers import ResponseParserError

from tierd.core.errors import StoreRefused, StoreUnavailable, TierdError
from tierd.core.urls import StoreUrl
from tierd.stores.answers import MISMATCH, STRANGER, said, silent, unanswered
from tierd.stores.base import FIRST_PAGE, LARGEST, Buffer, ObjectInfo, check_key, check_size, is_key, octets, room
from tierd.stores.checksums import CHECKSUMS, MD5, Checksum
from tierd.stores.connection import SLOWEST, where
from tierd.stores.credentials import Chain, check_bundle
from tierd.stores.line import Body
from tierd.stores.transport import Answer, exchanges, http_session

_CONNECTIONS = 32
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10, 60  # the latter until an answer begins; see `transport`
_DELETE_BATCH = 1000  # S3's own limit
_FIRST_PAGE = FIRST_PAGE
_PROBE = ".tierd-probe"  # under the store's prefix; no key, so that no scan shows it
_PROBE_AGAIN_S = 60.0  # after one that the server did not answer
_FOREIGN = (botocore.ClientError, botocore.BotoCoreError, ResponseParserError, aiohttp.ClientError, OSError)

_UNKNOWN_CHECKSUM = {"InvalidArgument", "InvalidRequest", "NotImplemented"}

_log = logging.getLogger(__name__)

for _library in ("botocore", "aiobotocore"):  # at DEBUG they log session tokens, and the secrets that STS answers with
    logging.getLogger(_library).setLevel(logging.INFO)


class S3Store:
    """A `Store` in the bucket, and under the prefix, that `url` names. Connects at the first call."""

    slowest = SLOWEST  # bytes/s: its transport itself gives up what stalls, so that bytes that flow are not cut off

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._base = f"{url.prefix}/" if url.prefix else ""
        self._extra: dict[str, str] = {}  # of each PutObject
        if url.storage_class:
            self._extra["StorageClass"] = url.storage_class
        if url.sse_kms_key_id:
            self._extra |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": url.sse_kms_key_id}
        self._checksum: Checksum = MD5  # of each upload, until the server is known
        self._proven = ""  # the checksum's name, once the server has refused a wrong one
        self._probe_at: float | None = 0.0  # when to ask, by the monotonic clock; None: it has answered
        self._probing = asyncio.Lock()
        self._client: Any = None
        self._chain = Chain()
        self._heard = False  # whether the server has ever answered
        self._opening = asyncio.Lock()
        self._closing = AsyncExitStack()

    def __repr__(self) -> str:
        return f"S3Store({str(self._url)!r})"

    async def put(self, key: str, data: Buffer) -> str:
        name, view = self._base + check_key(key), octets(data)
        async with self._translated(f"put {key}"):
            await self._probe()
            checksum, proven = self._checksum, self._proven
            parameters = await checksum.parameters(view)
            answer = await self._put(name, view, parameters)
            self._check_whose(answer, "ETag", f"put {key}")
            echoed = answer.get(checksum.field)
            if echoed is not None and echoed != parameters[checksum.field]:
                raise StoreUnavailable(f"{self._url}: put {key}: the server took other bytes than were sent")
            return proven

    async def _put(self, name: str, view: memoryview, checksum: dict[str, str]) -> Any:
        client = await self._connected()
        return await client.put_object(Bucket=self._url.bucket, Key=name, Body=Body(view), **checksum, **self._extra)

    async def _probe(self) -> None:
        """Find the best checksum that the server refuses when it is wrong; else the best that it takes; else MD5."""
        if self._probe_at is None:
            return
        async with self._probing:
            if self._probe_at is None or time.monotonic() < self._probe_at:
                return
            self._probe_at = time.monotonic() + _PROBE_AGAIN_S
            taken: list[Checksum] = []
            for checksum in CHECKSUMS:
                refused = await self._refuses(checksum)
                if refused is None:
                    return  # it says nothing; meanwhile an MD5 is understood by all
                if refused == "mismatch":
                    self._checksum, self._proven, self._probe_at = checksum, checksum.name, None
                    return
                if refused == "":
                    taken.append(checksum)
            self._checksum, self._probe_at = taken[0] if taken else MD5, None
            _log.info("%s verifies no checksum: what is put is proven by reading it back", self._url)

    async def _refuses(self, checksum: Checksum) -> str | None:
        """Put a wrong checksum: "mismatch", "unknown", "" when it was taken, None when that was not the question."""
        wrong, name = await checksum.parameters(memoryview(b"other bytes")), self._base + _PROBE
        data = memoryview(b"a put with a wrong checksum, which a server should refuse")
        try:
            answer = await self._put(name, data, wrong)
        except botocore.ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            return "mismatch" if code in MISMATCH else "unknown" if code in _UNKNOWN_CHECKSUM else None
        except _FOREIGN:
            return None
        if "ETag" not in answer:
            return None
        try:
            client = await self._connected()
            await client.delete_object(Bucket=self._url.bucket, Key=name)
        except _FOREIGN:
            _log.info("%s: %s could not be deleted; it means nothing", self._url, _PROBE)
        return ""

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        name = self._base + check_key(key)
        async with self._translated(f"get {key}"):
            client = await self._connected()
            with self._parsed(f"get {key}"):
                answer = await client.get_object(Bucket=self._url.bucket, Key=name)
            async with answer["Body"] as body:  # left unread and unclosed, it would keep its connection for good
                self._check_whose(answer, "ETag", f"get {key}")
                return await self._read(body.raw_stream, answer.get("ContentLength"), into, f"{self._url}: get {key}")

    @staticmethod
    async def _read(raw: Any, size: int | None, into: memoryview | None, doing: str) -> Buffer:
        if into is None:
            check_size(size or 0, doing)
        if isinstance(raw, Answer) and size is not None and size >= 0:
            view = memoryview(bytearray(size)) if into is None else room(into, size, doing)
            count = await raw.readinto(view)
        else:  # through a proxy, or in pieces that have an end of their own
            view = memoryview(await _bounded(raw, 1 + (LARGEST if into is None else into.nbytes)))
            count = len(view)
            if into is None and count > LARGEST:
                raise StoreUnavailable(f"{doing}: a body without an end, of which {LARGEST} bytes were read")
            if into is not None:
                data, view = view, room(into, count, doing)
                view[:] = data
        if size is not None and count != size:
            raise StoreUnavailable(f"{doing}: {count} of {size} bytes came")
        return view

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        page: dict[str, Any] = {"MaxKeys": _FIRST_PAGE}
        if after:
            page["StartAfter"] = self._base + after
        last = None
        while True:
            async with self._translated(f"scan {prefix}"):
                client = await self._connected()
                with self._parsed(f"scan {prefix}"):
                    answer = await client.list_objects_v2(Bucket=self._url.bucket, Prefix=self._base + prefix, **page)
                self._check_whose(answer, "IsTruncated", f"scan {prefix}")
                items = [(item["Key"], item["Size"], item["ETag"]) for item in answer.get("Contents", ())]
                token = answer["NextContinuationToken"] if answer["IsTruncated"] else None
            for name, size, etag in items:
                key = name[len(self._base) :]
                if last is not None and key <= last:
                    raise StoreRefused(f"{self._url} lists keys out of order, as S3 Express directory buckets do")
                last = key
                if key > after and is_key(key):
                    yield ObjectInfo(key, size, etag.strip('"'))
            if token is None:
                return
            page = {"ContinuationToken": token}

    async def delete(self, keys: Sequence[str]) -> None:
        names = [{"Key": self._base + check_key(key)} for key in keys]
        for start in range(0, len(names), _DELETE_BATCH):
            batch = names[start : start + _DELETE_BATCH]
            async with self._translated("delete"):
                client = await self._connected()
                answer = await client.delete_objects(Bucket=self._url.bucket, Delete={"Objects": batch})
            refusals = answer.get("Errors", ())
            for refusal in refusals:
                code = refusal.get("Code", "")
                if code != "NoSuchKey":
                    raise said(str(self._url), f"delete {refusal.get('Key')}", code, 0, refusal.get("Message", ""))
            told = {one.get("Key") for one in (*answer.get("Deleted", ()), *refusals)}
            if missing := [one["Key"] for one in batch if one["Key"] not in told]:  # whoever says so is no S3 server
                raise StoreUnavailable(f"{self._url}: delete {missing[0]}: the answer does not say what became of it")

    async def aclose(self) -> None:
        await self._closing.aclose()
        self._client = None

    async def _connected(self) -> Any:
        async with self._opening:
            if self._client is None:
                config = AioConfig(
                    http_session_cls=http_session,
                    max_pool_connections=_CONNECTIONS,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    read_timeout=_READ_TIMEOUT_S,
                    retries={"total_max_attempts": 1},
                    request_checksum_calculation="when_required",  # some servers reject what they don't know
                    response_checksum_validation="when_required",  # tierd's own digests are stronger
                    parameter_validation=False,  # it knows no memoryview
                    s3={"addressing_style": self._url.addressing, "payload_signing_enabled": False},
                )
                session = self._chain.session()
                if not (self._url.endpoint or "").startswith("http://"):
                    await check_bundle(session)
                creating = session.create_client(
                    "s3", region_name=self._url.region, endpoint_url=self._url.endpoint, config=config
                )
                client = await self._closing.enter_async_context(creating)
                client.meta.events.register("before-call.s3.DeleteObjects", _with_md5)
                client.meta.events.register("before-call.s3.HeadBucket", _without_redirect)
                self._client = client
            return self._client

    def _check_whose(self, answer: dict[str, Any], member: str, doing: str) -> None:
        """Every S3 server says this of a success; "200 OK" from somebody else on the way means nothing."""
        if member not in answer:
            raise StoreUnavailable(f"{self._url}: {doing}: a success without {member}, which is no S3 server's")

    @contextmanager
    def _parsed(self, doing: str) -> Iterator[None]:
        """Around what brings sizes and times, which botocore raises a ValueError over where they are none."""
        try:
            yield
        except _FOREIGN:
            raise
        except ValueError as error:
            raise StoreUnavailable(f"{self._url}: {doing}: what came is no answer of S3's: {error}") from None

    @asynccontextmanager
    async def _translated(self, doing: str) -> AsyncGenerator[None, None]:
        began = max(self._chain.generation, 1)  # the first are found while the first call is under way
        try:
            with exchanges(f"{self._url}: {doing}"):
                yield
            self._heard = True
        except botocore.ClientError as error:
            self._heard = True
            answer = error.response.get("Error", {})
            sent = error.response.get("ResponseMetadata", {})
            status, headers = sent.get("HTTPStatusCode", 0), sent.get("HTTPHeaders", {})
            after, date = headers.get("retry-after", ""), headers.get("date", "")
            code = str(answer.get("Code", ""))
            if code in STRANGER and await self._have_changed(began):
                raise StoreUnavailable(f"{self._url}: {doing}: {code}: there are other credentials by now") from None
            raise said(str(self._url), doing, code, status, str(answer.get("Message", "")), after, date) from error
        except _FOREIGN as error:
            # Its text may quote what a credential helper printed.
            raise unanswered(str(self._url), doing, error, heard=self._heard) from None
        except StoreUnavailable as error:
            raise silent(str(self._url), doing, error, heard=self._heard) from error.__cause__
        except TierdError:
            raise
        except Exception as error:  # the library takes an answer for one of S3's that is none, and stumbles
            raise StoreUnavailable(f"{self._url}: {doing}: what came is no answer of S3's: {where(error)}") from None

    async def _have_changed(self, generation: int) -> bool:
        """Whether the chain has other credentials than at a moment; it is looked at again."""
        with suppress(*_FOREIGN):
            await self._chain.renew()
        return self._chain.generation != generation


async def _bounded(raw: Any, most: int) -> Buffer:
    """A body, or the first `most` bytes of it, where nobody says how long it is."""
    if isinstance(raw, Answer):
        return await raw.read(most)
    data = bytearray()
    while len(data) < most and (piece := await raw.content.read(most - len(data))):
        data += piece
    return data


def _with_md5(params: dict[str, Any], **_: Any) -> None:
    """DeleteObjects must bring a checksum; MD5 is the one that every server knows, CRC-32 is botocore's choice."""
    params["context"].pop("checksum", None)
    params["headers"]["Content-MD5"] = MD5.value(memoryview(params["body"]))


def _without_redirect(params: dict[str, Any], **_: Any) -> None:
    """On a redirect botocore asks HeadBucket for the region; were that redirected too, it would ask without end."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
