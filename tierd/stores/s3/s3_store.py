"""Objects in an S3 bucket, through aiobotocore.

Invariant: one object is one request, so no partial object can exist. Every upload carries a checksum over the whole
object, computed here. The store trusts the server's check only after the server has refused a wrong checksum.

One module, `server_errors`, translates all errors of S3, botocore and the transport, and keeps secrets out of the
messages. botocore's own retries are off, because `RetryingStore` retries.

Uploads have no payload signature, because SHA-256 costs as much as the rest of a put. Instead the checksum is a signed
header; for servers that support none, the MD5 is. Use https on a network that is not your own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

from aiobotocore.config import AioConfig
from botocore import exceptions as botocore

from tierd.core.errors import ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.core.urls import StoreUrl
from tierd.stores.base import (
    LARGEST,
    Buffer,
    ObjectInfo,
    check_key,
    check_size,
    destination,
    flatten,
    is_key,
    may_hold_keys,
    ns_since_1970,
    octets,
)
from tierd.stores.retry import ForeignStore, confirm_absence
from tierd.stores.s3.checksums import MD5, PROBE_NAME, UNKNOWN_HEADER_CODES, ChecksumProbe
from tierd.stores.s3.connection import SLOWEST_RATE, error_origin
from tierd.stores.s3.credentials import RenewableCredentials, check_ca_bundle
from tierd.stores.s3.http1 import DEFAULT_LIMITS, S3Limits
from tierd.stores.s3.http_exchanges import RequestBody
from tierd.stores.s3.server_errors import (
    CREDENTIAL_CODES,
    LIBRARY_ERRORS,
    no_response_error,
    response_error,
    silence_error,
)
from tierd.stores.s3.transport import DirectSession, HttpResponse, ProxiedSession, http_session, response_scope

_DELETE_BATCH = 1000  # S3's own limit
_log = logging.getLogger(__name__)

for _library in ("botocore", "aiobotocore"):  # at DEBUG they log session tokens, and the secrets in responses of STS;
    logging.getLogger(_library).setLevel(logging.WARNING)  # at INFO with each client that credentials were found


class S3Store(ForeignStore):
    """A `Store` in the bucket, and under the prefix, that `url` names. Connects at the first call."""

    # Bytes/s; the transport itself gives up stalled transfers, so no deadline may cut off one that progresses.
    slowest_rate = SLOWEST_RATE
    has_pages = True

    def __init__(self, url: StoreUrl, limits: S3Limits = DEFAULT_LIMITS) -> None:
        self._url, self._limits = url, limits
        self._base = f"{url.prefix}/" if url.prefix else ""
        self._extra: dict[str, str] = {}  # additional parameters of each PutObject
        if url.storage_class:
            self._extra["StorageClass"] = url.storage_class
        if url.sse_kms_key_id:
            self._extra |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": url.sse_kms_key_id}
        self._if_absent = {"IfNoneMatch": "*"}  # parameters; empty once the server was seen not to know the header
        self.probe = ChecksumProbe(str(url), self._base + PROBE_NAME, self._put, self._remove, limits)
        self._client: Any = None
        self._session: DirectSession | ProxiedSession | None = None
        self._chain = RenewableCredentials(limits)
        self._heard = False  # whether the server has ever responded
        self._opening = asyncio.Lock()
        self._closing = AsyncExitStack()

    @property
    def signs_of_life(self) -> int:
        return self._session.signs_of_life if isinstance(self._session, DirectSession) else 0

    @property
    def hides_progress(self) -> bool:
        """Whether bytes that move are no sign of life: aiohttp, which is used through a proxy, does not count them."""
        return isinstance(self._session, ProxiedSession)

    def __repr__(self) -> str:
        return f"S3Store({str(self._url)!r})"

    async def put(self, key: str, data: Buffer) -> str:
        async with self.translating_errors(f"put {key}"):
            return await self._put_checked(check_key(key), octets(data), {})

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        view = octets(data)
        async with self.translating_errors(f"put {key}"):
            try:
                return await self._put_checked(check_key(key), view, self._if_absent)
            except botocore.ClientError as error:
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                if status == 412:
                    return None
                is_unknown = status == 501 or error.response.get("Error", {}).get("Code") in UNKNOWN_HEADER_CODES
                if not self._if_absent or not is_unknown:
                    raise
            checksum = await self._put_checked(key, view, {})
            self._if_absent = {}
            _log.info("%s supports no If-None-Match of a put: nodes that put the same chunk replace it", self._url)
            return checksum

    async def _put_checked(self, key: str, view: memoryview, condition: dict[str, str]) -> str:
        await self.probe.ask()
        checksum, proven = self.probe.checksum, self.probe.proven
        parameters = await checksum.parameters(view)
        answer = await self._put(self._base + key, view, parameters | condition)
        self._check_whose(answer, "ETag", f"put {key}")
        echoed = answer.get(checksum.field)
        if echoed is not None and echoed != parameters[checksum.field]:
            raise StoreUnavailable(f"{self._url}: put {key}: the server took other bytes than were sent")
        return proven

    async def _put(self, name: str, view: memoryview, parameters: dict[str, str]) -> Any:
        client = await self.get_client()
        return await client.put_object(
            Bucket=self._url.bucket, Key=name, Body=RequestBody(view), **parameters, **self._extra
        )

    async def _remove(self, name: str) -> None:
        client = await self.get_client()
        await client.delete_object(Bucket=self._url.bucket, Key=name)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        async with confirm_absence(self.names, key), self.translating_errors(f"get {key}"):
            return await self._get(check_key(key), f"get {key}", into)

    async def get_range(self, info: ObjectInfo, offset: int, into: memoryview) -> None:
        doing = f"get {info.key!a}"
        ends = {"Range": f"bytes={offset}-{offset + into.nbytes - 1}", "IfMatch": f'"{info.token}"'}
        async with confirm_absence(self.names, info.key), self.translating_errors(doing):
            try:
                answer = await self._get(info.key, doing, into, **ends)
            except botocore.ClientError as error:
                if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
                    raise ObjectNotFound(f"{self._url}: {doing}: another object has its name now") from None
                raise
        if memoryview(answer).nbytes != into.nbytes:
            raise StoreUnavailable(f"{self._url}: {doing}: the server sent another range than {ends['Range']}")

    async def _get(self, key: str, doing: str, into: memoryview | None, **options: str) -> Buffer:
        client = await self.get_client()
        with self._parsed(doing):
            answer = await client.get_object(Bucket=self._url.bucket, Key=self._base + key, **options)
        async with answer["Body"] as body:  # an unread and unclosed body would hold its connection forever
            self._check_whose(answer, "ETag", doing)
            return await self._read(body.raw_stream, answer.get("ContentLength"), into, f"{self._url}: {doing}")

    @staticmethod
    async def _read(raw: Any, size: int | None, into: memoryview | None, doing: str) -> Buffer:
        if into is None:
            check_size(size or 0, doing)
        if isinstance(raw, HttpResponse) and size is not None and size >= 0:
            view = memoryview(bytearray(size)) if into is None else destination(into, size, doing)
            count = await raw.readinto(view)
        else:  # through a proxy, or chunked
            view = memoryview(await _bounded(raw, 1 + (LARGEST if into is None else into.nbytes)))
            count = len(view)
            if into is None and count > LARGEST:
                raise StoreUnavailable(f"{doing}: a body without an end, of which {LARGEST} bytes were read")
            if into is not None:
                data, view = view, destination(into, count, doing)
                view[:] = data
        if size is not None and count != size:
            raise StoreUnavailable(f"{doing}: {count} of {size} bytes came")
        return view

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        return flatten(self.scan_pages(prefix, after))

    def names(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """List every object, also those whose names are no keys; otherwise as `scan`."""
        return flatten(self._name_pages(prefix, after))

    async def scan_pages(self, prefix: str, after: str = "") -> AsyncGenerator[Sequence[ObjectInfo], None]:
        if not may_hold_keys(prefix):
            return
        async with aclosing(self._name_pages(prefix, after)) as listing:
            async for page in listing:
                yield [info for info in page if is_key(info.key)]

    async def _name_pages(self, prefix: str, after: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        page: dict[str, Any] = {"MaxKeys": self._limits.first_page}
        if after:
            page["StartAfter"] = self._base + after
        last = None
        while True:
            async with self.translating_errors(f"scan {prefix}"):
                client = await self.get_client()
                with self._parsed(f"scan {prefix}"):
                    answer = await client.list_objects_v2(Bucket=self._url.bucket, Prefix=self._base + prefix, **page)
                self._check_whose(answer, "IsTruncated", f"scan {prefix}")
                items = [
                    (item["Key"], item["Size"], item["ETag"], item.get("LastModified"))
                    for item in answer.get("Contents", ())
                ]
                token = answer["NextContinuationToken"] if answer["IsTruncated"] else None
            infos = []
            for name, size, etag, modified in items:
                key = name[len(self._base) :]
                if last is not None and key <= last:
                    raise StoreRefused(f"{self._url} lists keys out of order, as S3 Express directory buckets do")
                last = key
                if key > after:
                    infos.append(ObjectInfo(key, size, etag.strip('"'), ns_since_1970(modified)))
            yield infos
            if token is None:
                return
            page = {"ContinuationToken": token}

    async def directories(self, prefix: str) -> list[str] | None:
        if not may_hold_keys(prefix):
            return []
        names: dict[str, None] = {}
        page: dict[str, Any] = {}
        while True:
            doing = f"scan {prefix}"
            async with self.translating_errors(doing):
                client = await self.get_client()
                with self._parsed(doing):
                    answer = await client.list_objects_v2(
                        Bucket=self._url.bucket, Prefix=self._base + prefix, Delimiter="/", **page
                    )
                self._check_whose(answer, "IsTruncated", doing)
                found = [item["Key"] for item in answer.get("Contents", ())]
                found += [item["Prefix"] for item in answer.get("CommonPrefixes", ())]
                token = answer["NextContinuationToken"] if answer["IsTruncated"] else None
            # By their first component also where a server ignores the delimiter.
            inside = (name[len(self._base) + len(prefix) :].partition("/")[0] for name in found)
            names |= dict.fromkeys(name for name in inside if name and is_key(name))
            if token is None:
                return list(names)
            page = {"ContinuationToken": token}

    async def delete(self, keys: Sequence[str]) -> None:
        names = [{"Key": self._base + check_key(key)} for key in keys]
        for start in range(0, len(names), _DELETE_BATCH):
            batch = names[start : start + _DELETE_BATCH]
            async with self.translating_errors("delete"):
                client = await self.get_client()
                answer = await client.delete_objects(Bucket=self._url.bucket, Delete={"Objects": batch})
            refusals = answer.get("Errors", ())
            for refusal in refusals:
                code = refusal.get("Code", "")
                if code != "NoSuchKey":
                    raise response_error(
                        str(self._url), f"delete {refusal.get('Key')}", code, 0, refusal.get("Message") or ""
                    )
            answered = {entry.get("Key") for entry in (*answer.get("Deleted", ()), *refusals)}
            # A response that leaves a key out is not from an S3 server.
            if missing := [entry["Key"] for entry in batch if entry["Key"] not in answered]:
                raise StoreUnavailable(f"{self._url}: delete {missing[0]}: the answer does not say what became of it")

    async def aclose(self) -> None:
        await self._closing.aclose()
        self._client = None

    async def get_client(self) -> Any:
        """Return the library's client, which is made at the first call."""
        async with self._opening:
            if self._client is None:
                config = AioConfig(
                    http_session_cls=self._open_session,
                    max_pool_connections=self._limits.connections,
                    connect_timeout=self._limits.connect_s,
                    read_timeout=self._limits.answer_s,
                    retries={"total_max_attempts": 1},
                    request_checksum_calculation="when_required",  # some servers reject headers that they don't know
                    response_checksum_validation="when_required",  # tierd's own digests are stronger
                    parameter_validation=False,  # botocore's validation does not accept a memoryview
                    s3={"addressing_style": self._url.addressing, "payload_signing_enabled": False},
                )
                session = self._chain.session()
                if not (self._url.endpoint or "").startswith("http://"):
                    await check_ca_bundle(session)
                creating = session.create_client(
                    "s3", region_name=self._url.region, endpoint_url=self._url.endpoint, config=config
                )
                client = await self._closing.enter_async_context(creating)
                client.meta.events.register("before-call.s3.DeleteObjects", _with_md5)
                client.meta.events.register("before-call.s3.HeadBucket", _without_redirect)
                self._client = client
            return self._client

    def _open_session(self, **options: Any) -> DirectSession | ProxiedSession:
        self._session = http_session(self._limits, **options)
        return self._session

    def _check_whose(self, answer: dict[str, Any], member: str, doing: str) -> None:
        """Check that a success has a member that every S3 server sends, because a proxy's "200 OK" proves nothing."""
        if member not in answer:
            raise StoreUnavailable(f"{self._url}: {doing}: a success without {member}, which is no S3 server's")

    @contextmanager
    def _parsed(self, doing: str) -> Iterator[None]:
        """Translate the ValueError that botocore raises if a response holds invalid sizes or times."""
        try:
            yield
        except LIBRARY_ERRORS:
            raise
        except ValueError as error:
            raise StoreUnavailable(f"{self._url}: {doing}: what came is no answer of S3's: {error}") from None

    @asynccontextmanager
    async def translating_errors(self, doing: str) -> AsyncGenerator[None, None]:
        """Translate the errors of requests to the server; `doing` is for their messages."""
        # At least 1, because the first credentials are found during the first call.
        began = max(self._chain.generation, 1)
        try:
            with response_scope(f"{self._url}: {doing}"):
                yield
            self._heard = True
        except botocore.ClientError as error:
            self._heard = True
            answer = error.response.get("Error", {})
            sent = error.response.get("ResponseMetadata", {})
            status, headers = sent.get("HTTPStatusCode", 0), sent.get("HTTPHeaders", {})
            after, date = headers.get("retry-after", ""), headers.get("date", "")
            code = str(answer.get("Code", ""))
            if code in CREDENTIAL_CODES and await self._have_changed(began):
                raise StoreUnavailable(f"{self._url}: {doing}: {code}: there are other credentials by now") from None
            region = headers.get("x-amz-bucket-region", "")
            message = str(answer.get("Message") or "")
            raise response_error(str(self._url), doing, code, status, message, after, date, region) from error
        except LIBRARY_ERRORS as error:
            # The error's text may quote the output of a credential helper.
            raise no_response_error(str(self._url), doing, error, heard=self._heard) from None
        except StoreUnavailable as error:
            raise silence_error(str(self._url), doing, error, heard=self._heard) from error.__cause__
        except TierdError:
            raise
        except Exception as error:  # the library took an invalid response for one of S3's, and failed on it
            raise StoreUnavailable(
                f"{self._url}: {doing}: what came is no answer of S3's: {error_origin(error)}"
            ) from None

    async def _have_changed(self, generation: int) -> bool:
        """Search the chain again, and return whether its credentials differ from those of `generation`."""
        with suppress(*LIBRARY_ERRORS):
            await self._chain.renew()
        return self._chain.generation != generation


async def _bounded(raw: Any, max_bytes: int) -> Buffer:
    """Read a body of unknown size, or its first `max_bytes` bytes."""
    if isinstance(raw, HttpResponse):
        return await raw.read(max_bytes)
    data = bytearray()
    while len(data) < max_bytes and (piece := await raw.content.read(max_bytes - len(data))):
        data += piece
    return data


def _with_md5(params: dict[str, Any], **_: Any) -> None:
    """Put an MD5 into DeleteObjects, which needs a checksum; not every server supports botocore's choice, CRC-32."""
    params["context"].pop("checksum", None)
    params["headers"]["Content-MD5"] = MD5.value(memoryview(params["body"]))


def _without_redirect(params: dict[str, Any], **_: Any) -> None:
    """Stop botocore from asking HeadBucket for the region after a redirect, which it would do forever after another
    one.
    """
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
