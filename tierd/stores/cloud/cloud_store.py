"""Objects in a bucket of Google Cloud Storage, or in a container of Azure Blob Storage, through obstore."""

from __future__ import annotations

import asyncio
import atexit
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from tierd.core.errors import DeleteRefused, ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.core.urls import StoreUrl
from tierd.stores.base import (
    PAGE,
    BucketAbsent,
    Buffer,
    ObjectInfo,
    check_key,
    check_size,
    destination,
    is_key,
    may_hold_keys,
    ns_since_1970,
    octets,
    scan_keys,
)
from tierd.stores.retry import UNNAMED, ForeignStore, StoreThrottled, UnnamedNotFound, confirm_absence

_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_NO_OBJECT = {"NoSuchKey", "BlobNotFound"}
_LATER = {"ContainerBeingDeleted", "AccountBeingCreated", "OperationTimedOut"}  # 409 or 500, and over soon
# How obstore's texts tell that the source of the credentials failed, and not the store.
_CREDENTIALS = re.compile(r"token request|credential|managed identity|//169\.254\.169\.254|//metadata\.google", re.I)
# A key or an address in these texts: an account, a bucket, a run may have any of those words for its name.
_NAMES = re.compile(r"(?<=location ).*?(?= not found: | already exists: | not modified: )|(?<=path ).*?(?=: Error )")
_ADDRESS = re.compile(r"(?<=performing )[A-Z]+ https?://(?!169\.254\.169\.254|metadata\.google)\S+")
_ACTIONS = {
    "gs": {
        "put": "storage.objects.create and storage.objects.delete, which replacing an object needs as well",
        "get": "storage.objects.get",
        "scan": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    "az": dict.fromkeys(("put", "get", "scan", "delete"), "a role such as Storage Blob Data Contributor"),
}
CREDENTIAL_SOURCES = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, gcloud's default credentials, or the instance's service account",
    "az": "AZURE_STORAGE_ACCOUNT_KEY, AZURE_CLIENT_ID with AZURE_CLIENT_SECRET and AZURE_TENANT_ID, a federated token, "
    "or the instance's managed identity",
}


@dataclass(frozen=True, slots=True)
class ErrorText:
    """What obstore's text tells of a response."""

    status: int
    code: str  # the server's error code; empty if it sent none
    is_of_credentials: bool  # whether the source of the credentials responded, or failed to


def parse_error_text(text: str) -> ErrorText:
    """Read the text of an error of obstore."""
    summary = text.partition("Debug source")[0]  # what follows repeats it in another form
    status, code = _STATUS.search(summary), _CODE.search(summary)
    head = summary[: status.start()] if status else summary
    bare = _ADDRESS.sub("", _NAMES.sub("", head))
    return ErrorText(int(status[1]) if status else 0, code[1] if code else "", _CREDENTIALS.search(bare) is not None)


def error_from_obstore(place: str, doing: str, error: BaseException) -> TierdError:
    """Return the error that corresponds to an error of obstore.

    `place` is the store's URL, `doing` the operation and the key: ``put``, ``get``, ``scan`` or ``delete`` first.
    """
    answer, name = parse_error_text(str(error)), type(error).__name__
    if isinstance(error, FileNotFoundError) and not answer.status:  # a store in memory, or one key of a batch
        answer = ErrorText(404, "NoSuchKey", is_of_credentials=False)
    kind, advice = _condition(place.partition(":")[0], doing.partition(" ")[0], answer, str(error))
    codes = " ".join(filter(None, (answer.code, str(answer.status or ""))))
    return kind(f"{place}: {doing}: {codes or name}{advice}")


def _condition(scheme: str, action: str, answer: ErrorText, text: str) -> tuple[type[TierdError], str]:
    status, code = answer.status, answer.code
    if answer.is_of_credentials:
        return _without_credentials(scheme, status)
    if code in _NO_BUCKET or (status == 404 and action in ("put", "scan")):
        return BucketAbsent, ": there is no such bucket or container; create it, or check its name and the account"
    if status == 404:
        return (ObjectNotFound, "") if code in _NO_OBJECT else (UnnamedNotFound, UNNAMED)
    if status in (429, 503):
        return StoreThrottled, ""
    if status == 408 or status >= 500 or code in _LATER:
        return StoreUnavailable, ""
    if status == 0 and "certificate" in text.lower():
        return StoreRefused, ": the server's certificate does not verify"
    if status == 0:
        return StoreUnavailable, ": no answer, or not all of it"
    if status == 401:
        return StoreRefused, f": check the credentials: {CREDENTIAL_SOURCES[scheme]}"
    if action == "delete" and status in (403, 405, 409, 412):
        return DeleteRefused, (
            ": the credentials, a retention policy, a hold or a lease allow no deletion; without it this tier is "
            "append-only, and nothing is pruned there"
        )
    if status == 403:
        return (
            StoreRefused,
            f": check the credentials, and what they are allowed: this needs {_ACTIONS[scheme][action]}",
        )
    return StoreRefused, ""


def _without_credentials(scheme: str, status: int) -> tuple[type[TierdError], str]:
    if 400 <= status < 500 and status not in (408, 429):
        return StoreRefused, f": no credentials are found, or they are refused: {CREDENTIAL_SOURCES[scheme]}"
    return StoreUnavailable, f": the source of the credentials does not answer: {CREDENTIAL_SOURCES[scheme]}"


_CONNECT_TIMEOUT_S, _TIMEOUT_S = 10, 3600  # the latter is longer than any deadline of `RetryingStore`
_PIECE = 1 << 20  # bytes of a body that arrive together
_DELETES = 16  # concurrent deletions; a request deletes one object
_UNSAFE = re.compile(r"[^A-Za-z0-9._/-]")  # obstore would encode these, and they would sort elsewhere
_LAST = "z" * 256  # sorts after each name of a key

_SETTLE_S = 0.25  # from the end of a request until obstore's threads certainly hold nothing of Python's

Opening = Callable[[StoreUrl], Any]


class _LastRequest:
    """When the last request of this process ended, in monotonic seconds."""

    ended_at = -_SETTLE_S


@atexit.register
def _settle() -> None:
    """Wait until obstore's threads are done with the interpreter, because one that needs it while it ends aborts the
    process (github.com/PyO3/pyo3-async-runtimes/issues/40)."""
    time.sleep(max(0.0, _LastRequest.ended_at + _SETTLE_S - time.monotonic()))


class CloudStore(ForeignStore):
    """A `Store` in the bucket, and under the prefix, that `url` names. Connects at the first call.

    `opening` makes obstore's store; tests give another.
    """

    copies_in_memory = 2  # while an object is put there is a copy of it

    def __init__(self, url: StoreUrl, opening: Opening | None = None) -> None:
        self._url = url
        self._opening = opening or _open_store
        self._store: Any = None
        self._pieces = 0  # of bodies that arrived

    def __repr__(self) -> str:
        return f"CloudStore({str(self._url)!r})"

    @property
    def hides_progress(self) -> bool:
        """Always true, because obstore does not say how much of a put it has sent."""
        return True

    @property
    def signs_of_life(self) -> int:
        return self._pieces

    async def put(self, key: str, data: Buffer) -> str:
        name, copy = check_key(key), bytes(octets(data))
        with self._translated(f"put {key}"):
            await obstore.put_async(self._connected(), name, copy, use_multipart=False)
        return ""

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        name, copy = check_key(key), bytes(octets(data))
        with self._translated(f"put {key}"):
            try:
                await obstore.put_async(self._connected(), name, copy, use_multipart=False, mode="create")
            except AlreadyExistsError:
                return None
        return ""

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        name, doing = check_key(key), f"{self._url}: get {key}"
        async with self._confirmed(name, f"get {key}"):
            answer = await obstore.get_async(self._connected(), name)
            size = int(answer.meta["size"])
            if into is None:
                check_size(size, doing)
            view = memoryview(bytearray(size)) if into is None else destination(into, size, doing)
            await self._fill(view, answer, doing)
        return view

    async def get_range(self, info: ObjectInfo, offset: int, into: memoryview) -> None:
        doing, ends = f"get {info.key!a}", (offset, offset + into.nbytes)
        async with self._confirmed(info.key, doing):
            try:
                options: Any = {"range": ends, "if_match": f'"{info.token}"'}
                answer = await obstore.get_async(self._connected(), info.key, options=options)
            except PreconditionError:
                raise ObjectNotFound(f"{self._url}: {doing}: another object has its name now") from None
            if tuple(answer.range) != ends or str(answer.meta["e_tag"]).strip('"') != info.token:
                raise StoreUnavailable(f"{self._url}: {doing}: the server sent other bytes than these {ends}")
            await self._fill(octets(into), answer, f"{self._url}: {doing}")

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        return scan_keys(self.names, prefix, after)

    async def names(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """List every object, also those whose names are no keys; otherwise as `scan`."""
        # obstore lists whole directories, from any name on.
        directory, offset, last = prefix.rpartition("/")[0], _offset(prefix, after), ""
        with self._translated(f"scan {prefix}"):
            listing = obstore.list(self._connected(), directory or None, offset=offset, chunk_size=PAGE)
        while True:
            with self._translated(f"scan {prefix}"):
                try:
                    page = await anext(listing)
                except StopAsyncIteration:
                    return
            for meta in page:
                key = meta["path"]
                if key <= last:
                    raise StoreRefused(f"{self._url} lists keys out of order, as Azure's hierarchical namespaces do")
                last = key
                if not key.startswith(prefix):
                    if key > prefix:
                        return
                elif key > after:
                    etag = str(meta["e_tag"]).strip('"')
                    yield ObjectInfo(key, meta["size"], etag, ns_since_1970(meta.get("last_modified")))

    async def directories(self, prefix: str) -> list[str] | None:
        if not may_hold_keys(prefix):
            return []
        with self._translated(f"scan {prefix}"):
            answer = await obstore.list_with_delimiter_async(self._connected(), prefix.rstrip("/") or None)
        paths = [*answer["common_prefixes"], *(meta["path"] for meta in answer["objects"])]
        names = (path[len(prefix) :].partition("/")[0] for path in paths if path.startswith(prefix))
        return [name for name in dict.fromkeys(names) if is_key(name)]

    async def delete(self, keys: Sequence[str]) -> None:
        names, slots = [check_key(key) for key in keys], asyncio.Semaphore(_DELETES)

        async def delete_name(name: str) -> None:
            async with slots:
                try:
                    async with self._confirmed(name, f"delete {name}"):
                        await obstore.delete_async(self._connected(), name)
                except ObjectNotFound:
                    pass

        tasks = [asyncio.ensure_future(delete_name(name)) for name in names]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # those that a failure left

    async def _fill(self, view: memoryview, answer: Any, doing: str) -> None:
        """Fill `view` from the body of an answer, which is exactly as long."""
        count, size = 0, view.nbytes
        async for piece in answer.stream(min_chunk_size=_PIECE):
            self._pieces += 1
            end = count + len(piece)
            if end > size:
                raise StoreUnavailable(f"{doing}: more than {size} bytes came")
            view[count:end] = memoryview(piece)
            count = end
        if count != size:
            raise StoreUnavailable(f"{doing}: {count} of {size} bytes came")

    async def aclose(self) -> None:
        self._store = None  # its connections end with it

    def _connected(self) -> Any:
        """Return obstore's store, which is made at the first call, and after its credentials were refused."""
        if self._store is None:
            self._store = self._opening(self._url)
        return self._store

    @asynccontextmanager
    async def _confirmed(self, key: str, doing: str) -> AsyncGenerator[None, None]:
        """Translate the errors of obstore, and confirm a 404 that names no error of the store."""
        async with confirm_absence(self.names, key):
            with self._translated(doing):
                yield

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Translate the errors of obstore; `doing` is for their messages."""
        try:
            yield
        except (BaseError, OSError) as error:  # obstore's "not found" is a FileNotFoundError
            answer = parse_error_text(str(error))
            if answer.is_of_credentials or answer.status in (401, 403):
                self._store = None  # other credentials may be there at the next call
            raise error_from_obstore(str(self._url), doing, error) from None
        finally:
            _LastRequest.ended_at = time.monotonic()


def _offset(prefix: str, after: str) -> str | None:
    """Return a name at which a listing may begin: not after `after`, nor after the first key with `prefix`."""
    before = prefix[:-1] + chr(ord(prefix[-1]) - 1) + _LAST if prefix and not prefix.endswith("/") else ""
    start = max(after, before)
    if unsafe := _UNSAFE.search(start):
        start = start[: unsafe.start()] + (_LAST if unsafe[0] > "z" else "")
    start = start.rstrip("/")
    return start if start and "//" not in start and not start.startswith("/") else None


def _open_store(url: StoreUrl) -> Any:
    """Make obstore's store for `url`, with credentials from the environment. Raises `StoreRefused` if these are
    unusable.
    """
    from obstore.store import AzureStore, GCSStore

    options = {
        "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=_TIMEOUT_S),
        "allow_http": (url.endpoint or "").startswith("http://"),
    }
    retries = {"max_retries": 0, "retry_timeout": timedelta(seconds=_TIMEOUT_S)}
    place: Any = {"account_name": url.account}
    if url.endpoint:
        place["endpoint"] = url.endpoint
    common: dict[str, Any] = {"prefix": url.prefix or None, "client_options": options, "retry_config": retries}
    try:
        if url.scheme == "gs":
            return GCSStore(url.bucket, config={"base_url": url.endpoint} if url.endpoint else {}, **common)
        return AzureStore(url.bucket, config=place, **common)
    except (BaseError, OSError, ValueError) as error:
        raise StoreRefused(
            f"{url}: {type(error).__name__}: what the environment says of credentials cannot be used; they come from "
            f"{CREDENTIAL_SOURCES[url.scheme]}"
        ) from None
