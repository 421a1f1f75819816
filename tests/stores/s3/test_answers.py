"""What S3 says when it says no, and what is said where nobody answers: each with its way out."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from stores.s3.test_s3_store import against, credentials, error
from support.s3stub import Bucket, serving

from tierd.core.errors import ConfigError, DeleteRefused, StoreRefused, StoreUnavailable
from tierd.core.urls import parse_url
from tierd.stores.retry import RetryingStore
from tierd.stores.s3 import credentials as chain
from tierd.stores.s3.http1 import S3Limits
from tierd.stores.s3.s3_store import S3Store
from tierd.stores.s3.server_errors import response_error

__all__ = ["credentials"]  # the fixture

AT_ONCE = S3Limits(credentials_s=0.0)


def refusal(status: int, code: str, message: str = "") -> StoreRefused | StoreUnavailable:
    """What a get raises that is answered so."""
    caught: list[StoreRefused | StoreUnavailable] = []

    async def use(store: S3Store) -> None:
        with pytest.raises((StoreRefused, StoreUnavailable)) as raised:
            await store.get("k")
        caught.append(raised.value)

    against(lambda *_: (status, error(code, message)), use)
    return caught[0]


def test_an_archived_object_is_no_matter_of_credentials() -> None:
    raised = refusal(403, "InvalidObjectState", "The operation is not valid for the object's storage class")
    assert isinstance(raised, StoreRefused)
    assert "credentials" not in str(raised)
    assert "archived" in str(raised)
    assert "restore-object" in str(raised)


@pytest.mark.parametrize("code", ["KMS.ThrottlingException", "KMS.InternalException", "KMS.DependencyTimeoutException"])
def test_a_kms_that_is_busy_is_tried_again(code: str) -> None:
    raised = refusal(400, code)
    assert isinstance(raised, StoreUnavailable)
    assert "KMS" in str(raised)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "KMS.DisabledException", "arn:aws:kms:eu-north-1:1:key/1 is disabled."),
        (400, "KMS.NotFoundException", ""),
        (400, "KMS.KMSInvalidStateException", ""),
        (403, "AccessDenied", "User: u is not authorized to perform: kms:GenerateDataKey on the resource"),
    ],
)
def test_a_kms_key_that_cannot_be_used_is_named(status: int, code: str, message: str) -> None:
    raised = refusal(status, code, message)
    assert isinstance(raised, StoreRefused)
    assert "sse_kms_key_id" in str(raised)
    assert "kms:Decrypt" in str(raised)


def test_a_denial_names_the_action_that_was_denied() -> None:
    async def use(store: S3Store) -> None:
        calls: list[tuple[Callable[[], Awaitable[object]], str]] = [
            (lambda: store.put("k", b"1"), "s3:PutObject"),
            (lambda: store.get("k"), "s3:GetObject"),
            (lambda: anext(store.scan("")), "s3:ListBucket"),
            (lambda: store.delete(["k"]), "s3:DeleteObject"),
        ]
        for call, action in calls:
            with pytest.raises(StoreRefused, match=action) as raised:
                await call()
            assert isinstance(raised.value, DeleteRefused) == (action == "s3:DeleteObject")

    against(lambda *_: (403, error("AccessDenied")), use)


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SlowDown", "NoSuchBucket"])
def test_not_every_delete_that_failed_was_denied(code: str) -> None:
    async def use(store: S3Store) -> None:
        with pytest.raises((StoreRefused, StoreUnavailable)) as raised:
            await store.delete(["k"])
        assert not isinstance(raised.value, DeleteRefused)

    against(lambda *_: (503 if code == "SlowDown" else 403, error(code)), use)


@pytest.mark.parametrize("archive", ["GLACIER", "DEEP_ARCHIVE"])
def test_a_class_that_cannot_be_read_at_once_is_refused_at_once(archive: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read at once.*GLACIER_IR"):
        parse_url(f"s3://bucket/p?storage_class={archive}")
    assert parse_url("s3://bucket/p?storage_class=GLACIER_IR").storage_class == "GLACIER_IR"


# -- TLS on one side, certificates ----------------------------------------------------------------------------------


def unheard(scheme: str, port: int) -> str:
    async def use() -> str:
        store = S3Store(parse_url(f"s3://bucket/p?endpoint={scheme}://127.0.0.1:{port}&addressing=path"))
        try:
            with pytest.raises((StoreRefused, StoreUnavailable)) as raised:
                await store.get("k")
            return f"{type(raised.value).__name__} {raised.value}"
        finally:
            await store.aclose()

    return asyncio.run(use())


def test_https_to_a_server_without_tls() -> None:
    with serving(Bucket()) as bucket:
        reported = unheard("https", bucket.port)
    assert reported.startswith("StoreRefused")
    assert "does not speak TLS" in reported
    assert "http://" in reported


def test_http_to_a_server_with_tls() -> None:
    async def whole() -> str:
        # A fatal alert is what a server that speaks TLS answers to what is no handshake.
        async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"\x15\x03\x01\x00\x02\x02\x46\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(alert, "127.0.0.1", 0)
        try:
            return await asyncio.to_thread(unheard, "http", server.sockets[0].getsockname()[1])
        finally:
            server.close()

    reported = asyncio.run(whole())
    assert reported.startswith("StoreRefused")
    assert "speaks TLS" in reported
    assert "https://" in reported


def test_http_to_a_port_that_wants_tls_and_says_so_in_html() -> None:
    async def use(store: S3Store) -> None:
        with pytest.raises(StoreRefused, match="https://"):
            await store.get("k")

    html = "<html><head><title>400 The plain HTTP request was sent to HTTPS port</title></head><hr></html>"
    against(lambda *_: (400, html), use)


def test_who_was_never_heard_may_be_somewhere_else() -> None:
    assert "check host, port, and whether it is http" in unheard("http", 1)


def test_who_answered_before_is_where_it_should_be() -> None:
    asked: list[str] = []

    def respond(method: str, *_: object) -> tuple[int, str]:
        asked.append(method)
        if len(asked) == 1:
            return 503, error("SlowDown")
        raise ConnectionError

    async def use(store: S3Store) -> None:
        for says in ("SlowDown", "ended the connection"):
            with pytest.raises(StoreUnavailable, match=says) as raised:
                await store.get("k")
            assert "check host" not in str(raised.value)

    against(respond, use)


@pytest.mark.parametrize(("content", "says"), [(None, "No such file"), ("no certificate", "PEM"), ("", "PEM")])
def test_a_bundle_that_cannot_be_used_is_named(
    content: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_text(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    reported = unheard("https", 1)
    assert reported.startswith("StoreRefused")
    assert "AWS_CA_BUNDLE" in reported
    assert str(bundle) in reported
    assert says in reported


async def test_bundle_that_appears_later_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundle.pem"
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))

    store = S3Store(parse_url("s3://bucket/p?endpoint=https://127.0.0.1:1&addressing=path"))
    with pytest.raises(StoreRefused, match="AWS_CA_BUNDLE"):
        await store.get("k")
    bundle.write_bytes(Path(ssl.get_default_verify_paths().cafile or bundled()).read_bytes())
    with pytest.raises(StoreUnavailable, match="EndpointConnectionError"):
        await store.get("k")
    await store.aclose()


def bundled() -> str:
    from botocore.httpsession import where

    return str(where())


# -- credentials that come late ---------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the credentials will lie; the environment has none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path / "credentials"


def written(file: Path, key: str) -> None:
    file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")


def test_credentials_that_appear_after_the_start_are_used(file: Path) -> None:
    async def use(bucket: Bucket) -> None:
        patient, store = S3Store(parse_url(bucket.url())), S3Store(parse_url(bucket.url()), AT_ONCE)
        for one in (patient, store):
            with pytest.raises(StoreRefused, match="NoCredentialsError"):
                await one.put("k", b"1")
        written(file, "first")
        with pytest.raises(StoreRefused, match="NoCredentialsError"):  # a moment ago there were none
            await patient.put("k", b"1")
        await store.put("k", b"1")
        for one in (patient, store):
            await one.aclose()

    with serving(Bucket()) as bucket:
        asyncio.run(use(bucket))
    assert bucket.objects["p/k"] == b"1"


def test_refusal_without_a_text_is_reported_without_text(file: Path) -> None:
    written(file, "first")

    async def use(bucket: Bucket) -> None:
        bucket.deny("GetObject", status=503, code="SlowDown")
        store = S3Store(parse_url(bucket.url()))
        with pytest.raises(StoreUnavailable, match=r"SlowDown 503$"):
            await store.get("k")
        await store.aclose()

    with serving(Bucket()) as bucket:
        asyncio.run(use(bucket))


def test_credentials_that_were_replaced_are_taken_up_within_the_call(file: Path) -> None:
    written(file, "first")

    async def use(bucket: Bucket) -> None:
        store = RetryingStore(S3Store(parse_url(bucket.url()), AT_ONCE), sleep=lambda _: asyncio.sleep(0))
        await store.put("k", b"1")
        written(file, "second")
        bucket.keys = {"second"}
        await asyncio.gather(*(store.put(f"k{number}", b"2") for number in range(8)))
        bucket.keys = set()
        with pytest.raises(StoreRefused, match="credentials"):  # there are no others
            await store.get("k")
        await store.aclose()

    with serving(Bucket()) as bucket:
        asyncio.run(use(bucket))
    assert len([key for key in bucket.objects if key.startswith("p/k")]) == 9


def test_the_chain_is_looked_at_seldom(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observations = []
    session = chain.get_session

    def counted() -> object:
        observations.append(time.monotonic())
        return session()

    async def use(bucket: Bucket) -> None:
        store = S3Store(parse_url(bucket.url()))
        monkeypatch.setattr(chain, "get_session", counted)
        for _ in range(20):
            with pytest.raises(StoreRefused, match="NoCredentialsError"):
                await store.get("k")
        await store.aclose()

    with serving(Bucket()) as bucket:
        asyncio.run(use(bucket))
    assert len(observations) == 2  # the client's own, and one for all twenty


@pytest.mark.parametrize("code", ["PermanentRedirect", "301"])
def test_redirect_names_the_region_of_the_bucket_and_the_url_parameter(code: str) -> None:
    raised = response_error("s3://b", "get k", code, 301, "", region="eu-central-1")
    assert isinstance(raised, StoreRefused)
    assert "the bucket is in eu-central-1: add ?region=eu-central-1 to the URL" in str(raised)


def test_other_refusals_name_no_region() -> None:
    assert "eu-central-1" not in str(response_error("s3://b", "get k", "AccessDenied", 403, "", region="eu-central-1"))
