"""S3Store against answers that a real server is hard to bring to: a stub on loopback says what the test wants said."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Awaitable, Callable

import pytest
from botocore.loaders import JSONFileLoader
from stores.conformance import keys

from tierd.core.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.urls import parse_url
from tierd.stores.base import list_children
from tierd.stores.s3.checksums import CHECKSUMS, PROBE_NAME
from tierd.stores.s3.http1 import DEFAULT_LIMITS, S3Limits
from tierd.stores.s3.s3_store import S3Store

Headers = dict[str, str]
Answer = tuple[int, str] | tuple[int, str, Headers]
Respond = Callable[[str, str, Headers, bytes], Answer]  # method, target, headers, body


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def against(
    respond: Respond, use: Callable[[S3Store], Awaitable[None]], query: str = "", limits: S3Limits = DEFAULT_LIMITS
) -> None:
    """Use a store whose server answers each request with what `respond` returns: a status and a body."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                method, target, _ = first.split(" ")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                assert "expect" not in headers
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                status, text, *more = respond(method, target, headers, body)
                extra = "".join(f"{name}: {value}\r\n" for name, value in (more[0] if more else {}).items())
                answer = f'HTTP/1.1 {status} X\r\nETag: "e"\r\n{extra}Content-Length: {len(text)}\r\n\r\n'
                writer.write((answer + text * (method != "HEAD")).encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def whole() -> None:
        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        store = S3Store(parse_url(f"s3://bucket/p?endpoint=http://127.0.0.1:{port}{query}"), limits)
        try:
            await use(store)
        finally:
            await store.aclose()
            server.close()
            await asyncio.sleep(0.01)  # let the connections end

    asyncio.run(whole())


def error(code: str, message: str = "as the test wants it") -> str:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"


ANSWERS = [
    (404, "NoSuchBucket", StoreRefused, "no such bucket"),
    (403, "AccessDenied", StoreRefused, "credentials"),
    (403, "InvalidAccessKeyId", StoreRefused, "credentials"),
    (403, "SignatureDoesNotMatch", StoreRefused, "credentials"),
    (400, "ExpiredToken", StoreRefused, "credentials"),
    (401, "Unauthorized", StoreRefused, "credentials"),
    (403, "RequestTimeTooSkewed", StoreUnavailable, "clock"),
    (403, "QuotaExceeded", StoreUnavailable, "full"),
    (507, "InsufficientStorage", StoreUnavailable, "full"),
    (500, "InternalError", StoreUnavailable, "InternalError 500"),
    (500, "Whatever", StoreUnavailable, "Whatever 500"),
    (503, "SlowDown", StoreUnavailable, "SlowDown"),
    (503, "Whatever", StoreUnavailable, "Whatever 503"),
    (429, "TooManyRequests", StoreUnavailable, "429"),
    (400, "RequestTimeout", StoreUnavailable, "RequestTimeout"),
    (400, "BadDigest", StoreUnavailable, "BadDigest"),
    (409, "OperationAborted", StoreUnavailable, "OperationAborted"),
    (301, "PermanentRedirect", StoreRefused, "region"),
    (400, "AuthorizationHeaderMalformed", StoreRefused, "region"),
    (400, "InvalidStorageClass", StoreRefused, "InvalidStorageClass"),
    (400, "InvalidArgument", StoreRefused, "InvalidArgument"),
    (405, "MethodNotAllowed", StoreRefused, "405"),
    (501, "NotImplemented", StoreRefused, "501"),
]


def test_answers_of_s3_are_translated_to_tierds_errors() -> None:
    answer = (0, "")

    async def use(store: S3Store) -> None:
        nonlocal answer
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put("k", b"1"),
            lambda: store.get("k"),
            lambda: store.delete(["k"]),
            lambda: keys(store),
        ]
        for status, code, expected, says in ANSWERS:
            answer = (status, error(code))
            for call in calls:
                with pytest.raises(expected) as caught:
                    await call()
                assert says in str(caught.value), (status, code)
                assert "s3://bucket/p" in str(caught.value)

    against(lambda *_: answer, use)


@pytest.mark.parametrize("body", ["", "<html>proxy says no</html>", "not xml <"])
def test_an_answer_that_is_not_s3s(body: str) -> None:
    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable):
            await store.get("k")
        with pytest.raises(StoreUnavailable):
            await keys(store)

    against(lambda *_: (502, body), use)


def test_each_request_is_sent_once() -> None:
    requests: list[str] = []

    def respond(method: str, target: str, *_: object) -> Answer:
        if PROBE_NAME not in target:
            requests.append(method)
        return 503, error("SlowDown")

    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable):
            await store.get("k")
        with pytest.raises(StoreUnavailable):
            await store.put("k", b"1")

    against(respond, use)
    assert requests == ["GET", "PUT"]


def test_put_sends_key_body_and_configured_headers() -> None:
    seen: list[tuple[str, Headers, bytes]] = []

    def respond(method: str, target: str, headers: Headers, body: bytes) -> Answer:
        if PROBE_NAME in target:
            return 400, error("BadDigest")
        seen.append((f"{method} {target}", headers, body))
        return 200, ""

    async def use(store: S3Store) -> None:
        assert await store.put("run/k", memoryview(b"bytes")) == CHECKSUMS[0].name

    against(respond, use, "&storage_class=STANDARD_IA&sse_kms_key_id=alias/mine&addressing=path&region=eu-north-1")
    [(request, headers, body)] = seen
    assert (request, body) == ("PUT /bucket/p/run/k", b"bytes")
    assert headers["x-amz-storage-class"] == "STANDARD_IA"
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/mine"
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert headers["content-length"] == "5"
    assert f"x-amz-checksum-{CHECKSUMS[0].name}" in headers["authorization"]
    assert "/eu-north-1/s3/aws4_request" in headers["authorization"]
    assert "transfer-encoding" not in headers


def listing(*names: str, more: str = "") -> str:
    items = "".join(f"<Contents><Key>p/{name}</Key><Size>1</Size><ETag>e</ETag></Contents>" for name in names)
    token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    token += f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
    return f"<?xml version='1.0'?><ListBucketResult>{items}{token}</ListBucketResult>"


def test_a_listing_out_of_order_is_refused() -> None:
    async def use(store: S3Store) -> None:
        with pytest.raises(StoreRefused, match="out of order"):
            await keys(store)

    against(lambda *_: (200, listing("b", "a")), use)


@pytest.mark.parametrize(("whole", "damaged"), [("<Size>1<", "<Size>x<"), ("2026-01", "2 26-01"), ("<Key>", "<Kex>")])
def test_a_damaged_listing_says_nothing(whole: str, damaged: str) -> None:
    body = listing("a").replace("<Size>", "<LastModified>2026-01-01T00:00:00Z</LastModified><Size>")

    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable):
            await keys(store)

    against(lambda *_: (200, body.replace(whole, damaged)), use)


def test_empty_page_does_not_end_a_listing() -> None:
    def respond(method: str, target: str, headers: Headers, body: bytes) -> Answer:
        if "continuation-token=two" in target:
            return 200, listing("c", "d")
        return 200, listing(more="two") if "continuation-token=one" in target else listing("a", "b", more="one")

    async def use(store: S3Store) -> None:
        assert await keys(store) == ["a", "b", "c", "d"]

    against(respond, use)


def test_children_ask_for_short_pages() -> None:
    targets: list[str] = []

    def respond(method: str, target: str, headers: Headers, body: bytes) -> Answer:
        targets.append(target)
        return 200, listing() if "start-after" in target else listing("run/chunks/1", "run/chunks/2", more="x")

    async def use(store: S3Store) -> None:
        assert [name async for name in list_children(store, "run/")] == ["chunks"]

    against(respond, use)
    assert len(targets) == 2
    assert all("max-keys=16" in target for target in targets)


@pytest.mark.parametrize("ignores", [False, True])
def test_names_are_listed_by_a_delimiter_also_of_a_server_that_ignores_it(ignores: bool) -> None:
    targets: list[str] = []

    def respond(method: str, target: str, headers: Headers, body: bytes) -> Answer:
        targets.append(target)
        more = "" if "continuation-token" in target else "x"
        if ignores:
            return 200, listing("run/b/1", "run/b/2", more=more) if more else listing("run/c/1", "run/d")
        prefix = f"<CommonPrefixes><Prefix>p/run/{'b' if more else 'c'}/</Prefix></CommonPrefixes></ListBucketResult>"
        return 200, listing(*() if more else ("run/d",), more=more).replace("</ListBucketResult>", prefix)

    async def use(store: S3Store) -> None:
        assert sorted(await store.directories("run/") or ()) == ["b", "c", "d"]

    against(respond, use)
    assert len(targets) == 2
    assert all("delimiter=%2F" in target and "prefix=p%2Frun%2F" in target for target in targets)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("AccessDenied", StoreRefused), ("InternalError", StoreUnavailable), ("SlowDown", StoreUnavailable)],
)
def test_a_key_that_could_not_be_deleted_is_named(code: str, expected: type[Exception]) -> None:
    body = f"<DeleteResult><Error><Key>p/b</Key><Code>{code}</Code><Message>no</Message></Error></DeleteResult>"

    async def use(store: S3Store) -> None:
        with pytest.raises(expected, match="delete p/b"):
            await store.delete(["a", "b"])

    against(lambda *_: (200, body), use)


def test_a_delete_brings_an_md5_and_no_newer_checksum() -> None:
    seen: list[Headers] = []

    def respond(method: str, target: str, headers: Headers, body: bytes) -> Answer:
        seen.append(headers)
        assert headers["content-md5"] == base64.b64encode(hashlib.md5(body).digest()).decode()
        assert not any(name.startswith(("x-amz-checksum", "x-amz-sdk-checksum")) for name in headers)
        first, *others = re.findall(r"<Key>([^<]+)</Key>", body.decode())
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in others)
        return 200, f"<DeleteResult>{gone}<Error><Key>{first}</Key><Code>NoSuchKey</Code></Error></DeleteResult>"

    async def use(store: S3Store) -> None:
        await store.delete([f"k{number}" for number in range(2001)])

    against(respond, use)
    assert len(seen) == 3


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (501, ""), (400, "InvalidArgument")])
def test_store_asks_server_without_conditional_puts_once(refusal: tuple[int, str]) -> None:
    conditions: list[str | None] = []

    def respond(method: str, target: str, headers: Headers, body: bytes) -> Answer:
        if PROBE_NAME not in target:
            conditions.append(headers.get("if-none-match"))
        text = error(refusal[1]) if refusal[1] else ""
        return (refusal[0], text) if "if-none-match" in headers else (200, "")

    async def use(store: S3Store) -> None:
        for _ in range(3):
            assert await store.put_if_absent("k", b"1") == ""

    against(respond, use)
    assert conditions == ["*", None, None, None]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((412, "PreconditionFailed"), None),
        ((409, "ConditionalRequestConflict"), StoreUnavailable),
        ((503, "SlowDown"), StoreUnavailable),
        ((403, "AccessDenied"), StoreRefused),
        ((501, "NotImplemented"), StoreRefused),
    ],
)
def test_answers_to_a_conditional_put(answer: tuple[int, str], expected: type[Exception] | None) -> None:
    """Of an error that a plain put has, too, nothing is concluded about conditions."""

    def respond(method: str, target: str, headers: Headers, body: bytes) -> Answer:
        return (200, "") if PROBE_NAME in target else (answer[0], error(answer[1]))

    async def use(store: S3Store) -> None:
        for _ in range(2):
            if expected is None:
                assert await store.put_if_absent("k", b"1") is None
                continue
            with pytest.raises(expected):
                await store.put_if_absent("k", b"1")

    against(respond, use)


@pytest.mark.parametrize("answer", ["", "<html>please log in</html>", "<DeleteResult/>"])
def test_answer_200_that_does_not_name_the_deleted_keys_is_no_answer(answer: str) -> None:
    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable):
            await store.delete(["k"])

    against(lambda *_: (200, answer), use)


PAGES = ["", "404 page not found", "<html><body>Not Found</body></html>"]  # Envoy, Traefik, nginx


@pytest.mark.parametrize("page", PAGES)
def test_404_that_names_no_error_of_s3s_is_no_word_on_the_object(page: str) -> None:
    """Something before the store may have answered: a restore would take an older checkpoint, a prune too much."""

    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable, match="something before it may have answered"):
            await store.get("k")
        with pytest.raises(StoreRefused):
            await keys(store)

    against(lambda *_: (404, page), use)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    ("shown", "expected"), [((), ObjectNotFound), (("kk",), ObjectNotFound), (("k", "kk"), StoreUnavailable)]
)
def test_bare_404_is_judged_by_the_listing(page: str, shown: tuple[str, ...], expected: type[Exception]) -> None:
    """Some servers send no body with their own."""

    async def use(store: S3Store) -> None:
        with pytest.raises(expected):
            await store.get("k")

    against(lambda method, target, *_: (200, listing(*shown)) if "list-type" in target else (404, page), use)


def test_a_missing_object_that_is_named_costs_one_request() -> None:
    targets: list[str] = []

    def respond(method: str, target: str, *_: object) -> Answer:
        targets.append(target)
        return 404, error("NoSuchKey")

    async def use(store: S3Store) -> None:
        with pytest.raises(ObjectNotFound):
            await store.get("k")

    against(respond, use)
    assert len(targets) == 1


def test_second_store_parses_no_description_of_api_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    load_file = JSONFileLoader.load_file

    def counted(self: JSONFileLoader, file_path: str) -> object:
        parsed.append(file_path)
        return load_file(self, file_path)

    async def use(store: S3Store) -> None:
        await store.get_client()

    against(lambda *_: (200, ""), use)
    monkeypatch.setattr(JSONFileLoader, "load_file", counted)
    against(lambda *_: (200, ""), use)
    assert parsed == []
