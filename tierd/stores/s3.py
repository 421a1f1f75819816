"""Objects in an S3 bucket, through aiobotocore.

Law: one object is one request, so that nothing partial can exist; the server checks every upload against a checksum
taken here; whatever S3, botocore or aiohttp say is translated in one place, `_condition`, and no secret can get into
what is said. botocore's own retries are off: retrying is `RetryingStore`'s concern.

Uploads are not signed over their payload (SHA-256 costs as much as the rest of a put): the CRC-32, or on servers that
don't know it the MD5, is a signed header instead. Use https where the network is not your own.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore import exceptions as botocore
from botocore.parsers import ResponseParserError

from tierd.core.errors import ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.core.urls import StoreUrl
from tierd.stores.base import Buffer, ObjectInfo, check_key, is_key, octets

_CONNECTIONS = 32
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 10, 60  # the latter between two reads; RetryingStore bounds the whole
_DELETE_BATCH = 1000  # S3's own limit
_FIRST_PAGE = 16  # keys: `children` needs one key of a listing, and a full page costs some 20 ms to parse
_FOREIGN = (botocore.ClientError, botocore.BotoCoreError, ResponseParserError, aiohttp.ClientError, OSError)

_NOT_NOW = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted", "Throttling"}
_NOT_NOW |= {"ThrottlingException", "TooManyRequests", "ConditionalRequestConflict"}
_NOT_NOW |= {"BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody"}  # damaged or cut on the way
_CREDENTIALS = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_PLACE = {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "InvalidRegion"}
_UNKNOWN_CHECKSUM = {"InvalidArgument", "InvalidRequest", "NotImplemented"}

for _library in ("botocore", "aiobotocore"):  # at DEBUG they log session tokens, and the secrets that STS answers with
    logging.getLogger(_library).setLevel(logging.INFO)


class S3Store:
    """A `Store` in the bucket, and under the prefix, that `url` names. Connects at the first call."""

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._base = f"{url.prefix}/" if url.prefix else ""
        self._extra: dict[str, str] = {}  # of each PutObject
        if url.storage_class:
            self._extra["StorageClass"] = url.storage_class
        if url.sse_kms_key_id:
            self._extra |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": url.sse_kms_key_id}
        self._knows_crc = True  # until the server refuses one
        self._client: Any = None
        self._opening = asyncio.Lock()
        self._closing = AsyncExitStack()

    def __repr__(self) -> str:
        return f"S3Store({str(self._url)!r})"

    async def put(self, key: str, data: Buffer) -> None:
        name, view = self._base + check_key(key), octets(data)
        with self._translated(f"put {key}"):
            if self._knows_crc:
                try:
                    return await self._put(name, view, await _crc32(view))
                except botocore.ClientError as error:
                    if error.response.get("Error", {}).get("Code") not in _UNKNOWN_CHECKSUM:
                        raise
            await self._put(name, view, await _md5(view))
            self._knows_crc = False
            return None

    async def _put(self, name: str, view: memoryview, checksum: dict[str, str]) -> None:
        client = await self._connected()
        await client.put_object(Bucket=self._url.bucket, Key=name, Body=view, **checksum, **self._extra)

    async def get(self, key: str) -> Buffer:
        name = self._base + check_key(key)
        with self._translated(f"get {key}"):
            client = await self._connected()
            answer = await client.get_object(Bucket=self._url.bucket, Key=name)
            async with answer["Body"] as body:  # left unread and unclosed, it would keep its connection for good
                data: bytes = await body.read()
            size = answer.get("ContentLength", len(data))  # absent in a chunked answer, which has an end of its own
            if len(data) != size:
                raise StoreUnavailable(f"{self._url}: get {key}: {len(data)} of {size} bytes came")
            return data

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        page: dict[str, Any] = {"MaxKeys": _FIRST_PAGE}
        if after:
            page["StartAfter"] = self._base + after
        last = None
        while True:
            with self._translated(f"scan {prefix}"):
                client = await self._connected()
                answer = await client.list_objects_v2(Bucket=self._url.bucket, Prefix=self._base + prefix, **page)
            for item in answer.get("Contents", ()):
                key = item["Key"][len(self._base) :]
                if last is not None and key <= last:
                    raise StoreRefused(f"{self._url} lists keys out of order, as S3 Express directory buckets do")
                last = key
                if key > after and is_key(key):
                    yield ObjectInfo(key, item["Size"], item["ETag"].strip('"'))
            if not answer.get("IsTruncated"):
                return
            page = {"ContinuationToken": answer["NextContinuationToken"]}

    async def delete(self, keys: Sequence[str]) -> None:
        names = [{"Key": self._base + check_key(key)} for key in keys]
        for start in range(0, len(names), _DELETE_BATCH):
            batch = {"Objects": names[start : start + _DELETE_BATCH], "Quiet": True}
            with self._translated("delete"):
                client = await self._connected()
                answer = await client.delete_objects(Bucket=self._url.bucket, Delete=batch)
            for refusal in answer.get("Errors", ()):
                code = refusal.get("Code", "")
                if code != "NoSuchKey":
                    raise self._said(f"delete {refusal.get('Key')}", code, 0, refusal.get("Message", ""))

    async def aclose(self) -> None:
        await self._closing.aclose()
        self._client = None

    async def _connected(self) -> Any:
        async with self._opening:
            if self._client is None:
                config = AioConfig(
                    max_pool_connections=_CONNECTIONS,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    read_timeout=_READ_TIMEOUT_S,
                    retries={"total_max_attempts": 1},
                    request_checksum_calculation="when_required",  # some servers reject what they don't know
                    response_checksum_validation="when_required",  # tierd's own digests are stronger
                    parameter_validation=False,  # it knows no memoryview
                    s3={"addressing_style": self._url.addressing, "payload_signing_enabled": False},
                )
                creating = get_session().create_client(
                    "s3", region_name=self._url.region, endpoint_url=self._url.endpoint, config=config
                )
                client = await self._closing.enter_async_context(creating)
                client.meta.events.register("before-call.s3.DeleteObjects", _with_md5)
                client.meta.events.register("before-call.s3.HeadBucket", _without_redirect)
                self._client = client
            return self._client

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except botocore.ClientError as error:
            said = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise self._said(doing, str(said.get("Code", "")), status, str(said.get("Message", ""))) from error
        except _FOREIGN as error:
            raise self._failed(doing, error) from None  # its text may quote what a credential helper printed

    def _said(self, doing: str, code: str, status: int, message: str) -> TierdError:
        """What the server's answer means."""
        kind, advice = _condition(doing, code, status)
        answer = f"{code} {status or ''}".strip()
        return kind(f"{self._url}: {doing}: {answer}{advice}{f' ({message[:200]})' if message else ''}")

    def _failed(self, doing: str, error: BaseException) -> TierdError:
        """What it means that there was no answer."""
        name = type(error).__name__
        if isinstance(error, (botocore.MetadataRetrievalError, botocore.CredentialRetrievalError)):
            return StoreUnavailable(f"{self._url}: {doing}: {name}: the source of the credentials does not answer")
        if isinstance(error, (botocore.NoCredentialsError, botocore.PartialCredentialsError, botocore.ProfileNotFound)):
            return StoreRefused(
                f"{self._url}: {doing}: {name}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
                "or give the node a role"
            )
        if isinstance(error, botocore.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
            return StoreRefused(f"{self._url}: {doing}: the server's certificate does not verify; see AWS_CA_BUNDLE")
        unheard = (botocore.ConnectionError, botocore.HTTPClientError, botocore.IncompleteReadError)
        if isinstance(error, botocore.BotoCoreError) and not isinstance(error, unheard):
            return StoreRefused(f"{self._url}: {doing}: {name}: check the AWS configuration")
        return StoreUnavailable(f"{self._url}: {doing}: {name}: no answer, or not all of it")


def _condition(doing: str, code: str, status: int) -> tuple[type[TierdError], str]:
    """The error that an S3 answer amounts to, and what to check."""
    if code == "NoSuchKey" or (status == 404 and code in ("404", "NotFound") and doing.startswith("get ")):
        return ObjectNotFound, ""
    if code == "NoSuchBucket" or status == 404:
        return StoreRefused, ": there is no such bucket; create it, or check its name, the endpoint and the region"
    if code == "RequestTimeTooSkewed":
        return StoreUnavailable, ": this node's clock and the server's differ too much; is NTP running?"
    if code == "QuotaExceeded" or status == 507:
        return StoreUnavailable, ": the bucket is full"
    if code in _NOT_NOW or status in (408, 429) or (status >= 500 and status != 501):
        return StoreUnavailable, ""
    if code in _PLACE or 300 <= status < 400:
        return StoreRefused, ": the bucket lives elsewhere; check region and endpoint in the URL"
    if code in _CREDENTIALS or status in (401, 403):
        return StoreRefused, ": check the credentials, and what the bucket's policy allows them"
    return StoreRefused, ""


async def _crc32(view: memoryview) -> dict[str, str]:
    digest = await asyncio.to_thread(zlib.crc32, view)
    # Ceph checks the value only when the algorithm is named as well.
    return {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": base64.b64encode(digest.to_bytes(4, "big")).decode()}


async def _md5(view: memoryview) -> dict[str, str]:
    digest = await asyncio.to_thread(hashlib.md5, view, usedforsecurity=False)
    return {"ContentMD5": base64.b64encode(digest.digest()).decode()}


def _with_md5(params: dict[str, Any], **_: Any) -> None:
    """DeleteObjects must bring a checksum; MD5 is the one that every server knows, CRC-32 is botocore's choice."""
    params["context"].pop("checksum", None)
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _without_redirect(params: dict[str, Any], **_: Any) -> None:
    """On a redirect botocore asks HeadBucket for the region; were that redirected too, it would ask without end."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
