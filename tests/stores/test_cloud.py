"""CloudStore keeps the contract over obstore, and says in tierd's words what Google Cloud Storage and Azure answer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from stores.conformance import Conformance, keys
from support.s3stub import Bucket, serving

import tierd
from tierd.cli import run
from tierd.cli.command_runtime import EXIT_ALERT, EXIT_WARNING
from tierd.core.errors import ConfigError, DeleteRefused, ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.core.installation import install_command
from tierd.core.urls import parse_url
from tierd.stores.base import BucketAbsent, Store, list_children
from tierd.stores.cloud.cloud_store import _LAST, CloudStore, _offset
from tierd.stores.open import open_store
from tierd.stores.retry import StoreThrottled, UnnamedNotFound

SECRET = "sv=2023&sig=c2VjcmV0"
KEY = "c2VjcmV0IGtleQ=="


class TestCloudStoreOverMemory(Conformance):
    many = 1200

    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        return lambda: CloudStore(parse_url("gs://bucket"), lambda url: MemoryStore())


class TestCloudStoreOverHttp(Conformance):
    """Google's XML interface speaks as S3 does, as far as obstore asks it, so the S3 stub answers for it."""

    many, operations = 300, 100

    @pytest.fixture
    def make(self, google: Bucket) -> Callable[[], Store]:
        return lambda: CloudStore(parse_url(place(google)))


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket on loopback, and an account that needs no token for it."""
    account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": "", "gcs_base_url": ""}
    with serving(Bucket()) as bucket:
        account["gcs_base_url"] = f"http://127.0.0.1:{bucket.port}"
        (tmp_path / "account.json").write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        yield bucket


def place(bucket: Bucket) -> str:
    return f"gs://bucket/p?endpoint=http://127.0.0.1:{bucket.port}"


def azure(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    return f"az://bucket/p?account=devaccount&endpoint=http://127.0.0.1:{bucket.port}"


OPERATIONS = ("put", "get", "scan", "delete")


def attempt(store: Store, operation: str) -> None:
    async def call() -> None:
        match operation:
            case "put":
                await store.put("k/x", b"data")
            case "get":
                await store.get("k/x")
            case "scan":
                await keys(store, "k/")
            case "delete":
                await store.delete(["k/x", "k/y"])

    asyncio.run(call())


EXPECTED: dict[int, dict[str, type[TierdError]]] = {
    400: dict.fromkeys(OPERATIONS, StoreRefused),
    401: dict.fromkeys(OPERATIONS, StoreRefused),
    403: {**dict.fromkeys(OPERATIONS, StoreRefused), "delete": DeleteRefused},
    404: {**dict.fromkeys(OPERATIONS, BucketAbsent), "get": UnnamedNotFound},
    429: dict.fromkeys(OPERATIONS, StoreThrottled),
    500: dict.fromkeys(OPERATIONS, StoreUnavailable),
    503: dict.fromkeys(OPERATIONS, StoreThrottled),
}


@pytest.mark.parametrize("scheme", ["gs", "az"])
@pytest.mark.parametrize("status", EXPECTED)
def test_statuses_of_a_cloud_are_translated_to_tierds_errors(
    google: Bucket, monkeypatch: pytest.MonkeyPatch, scheme: str, status: int
) -> None:
    url = place(google) if scheme == "gs" else azure(google, monkeypatch)
    for operation, expected in EXPECTED[status].items():
        if operation == "delete" and (scheme == "az" or status == 404):  # see below; and what is gone is deleted
            continue
        google.deny("PutObject", "GetObject", "ListBucket", "DeleteObject", status=status, code="Custom")
        google.asked.clear()
        with pytest.raises(TierdError) as caught:
            attempt(CloudStore(parse_url(url)), operation)
        assert type(caught.value) is expected, caught.value
        assert all(part in str(caught.value) for part in (url.split("?")[0], operation, str(status), "Custom"))
        if operation != "delete":  # of which two begin
            confirmed = (operation, status) == ("get", 404)  # by a listing
            assert google.asked.total() == 1 + confirmed, "nothing is tried again below RetryingStore"


def test_missing_object_counts_as_deleted(google: Bucket) -> None:
    google.deny("DeleteObject", status=404, code="NoSuchKey")
    attempt(CloudStore(parse_url(place(google))), "delete")
    assert google.asked["DeleteObject"] == 2


@pytest.mark.parametrize(("left", "expected"), [((), None), (("k/x",), UnnamedNotFound)])
def test_bare_404_of_a_cloud_is_judged_by_the_listing(
    google: Bucket, left: tuple[str, ...], expected: type[Exception] | None
) -> None:
    """Something before the store may have answered."""
    google.objects |= {f"p/{key}": b"data" for key in (*left, "k/xx", "k/a")}
    google.deny("GetObject", "DeleteObject", status=404, code="")
    with pytest.raises(expected or ObjectNotFound):
        attempt(CloudStore(parse_url(place(google))), "get")
    with pytest.raises(expected) if expected else nullcontext():
        attempt(CloudStore(parse_url(place(google))), "delete")


def test_a_missing_bucket_is_no_missing_object(google: Bucket) -> None:
    for code in ("NoSuchBucket", "ContainerNotFound"):
        google.deny("GetObject", status=404, code=code)
        with pytest.raises(StoreRefused, match="no such bucket"):
            attempt(CloudStore(parse_url(place(google))), "get")


def test_a_server_that_is_not_there_is_unavailable(google: Bucket) -> None:
    nobody = place(google).replace(f":{google.port}", ":1")
    for operation in OPERATIONS:
        with pytest.raises(StoreUnavailable, match="no answer"):
            attempt(CloudStore(parse_url(nobody)), operation)


def test_a_body_that_breaks_off_is_never_taken_for_the_object(google: Bucket) -> None:
    google.objects["p/k/x"] = b"x" * 5000
    google.headers["Content-Range"] = "bytes 0-99/5000"
    store = CloudStore(parse_url(place(google)))
    try:
        found = bytes(asyncio.run(store.get("k/x")))
    except StoreUnavailable:
        return
    assert found == google.objects["p/k/x"]


# -- credentials -------------------------------------------------------------------------------------------------------


def test_unusable_configuration_is_refused_at_the_first_call_and_tried_again(
    google: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "account.json"
    account = path.read_text()
    path.write_text(f"{{{SECRET}")
    store = CloudStore(parse_url(place(google)))
    with pytest.raises(StoreRefused, match="GOOGLE_APPLICATION_CREDENTIALS") as caught:
        attempt(store, "put")
    assert SECRET not in str(caught.value)
    path.write_text(account)
    attempt(store, "put")
    assert google.objects == {"p/k/x": b"data"}


def test_credentials_are_read_again_after_a_refusal(google: Bucket) -> None:
    made = []

    def opening(url: object) -> MemoryStore:
        made.append(url)
        return MemoryStore()

    store = CloudStore(parse_url("gs://bucket"), opening)
    attempt(store, "put"), attempt(store, "get")
    assert len(made) == 1
    for status, again in (("503 Busy", False), ("403 Forbidden", True)):
        with pytest.raises(TierdError), store._translated("put k"):
            raise OSError(f"Error performing PUT http://h/k in 1ms - Server returned non-2xx status code: {status}: no")
        attempt(store, "put")
        assert len(made) == 1 + again


# -- listings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "after", "expected"),
    [
        ("", "", None),
        ("run/", "", None),
        ("run/", "run/a", "run/a"),
        ("run/", "run/a/\x7f", "run/a/" + _LAST),
        ("run/", "run/a/", "run/a"),
        ("", "\x7f", _LAST),
        ("run/ch", "", "run/cg" + _LAST),
        ("run/ch", "run/chunks", "run/chunks"),
        ("run/-x", "", "run/-w" + _LAST),
        ("x/0", "", None),
        ("", "a//b", None),
        ("", "/", None),
    ],
)
def test_where_a_listing_begins(prefix: str, after: str, expected: str | None) -> None:
    assert _offset(prefix, after) == expected


def test_a_run_is_passed_over_without_listing_its_chunks(google: Bucket) -> None:
    """`list_children` skips from name to name, and the server is asked to begin there."""
    for name in ("a", "b", "c"):
        google.objects |= {f"p/{name}/chunks/{number:04}": b"" for number in range(500)}
    store = CloudStore(parse_url(place(google)))

    async def work() -> list[str]:
        return [name async for name in list_children(store, "")]

    assert asyncio.run(work()) == ["a", "b", "c"]
    assert google.asked["ListBucket"] == 4


def test_keys_that_are_out_of_order_are_refused() -> None:
    class Unordered(MemoryStore):
        pass

    async def work(monkeypatch: pytest.MonkeyPatch) -> None:
        async def listing(*_: object, **__: object):
            yield [{"path": key, "size": 0, "e_tag": "e"} for key in ("a/b", "a-b")]

        monkeypatch.setattr("tierd.stores.cloud.cloud_store.obstore.list", listing)
        with pytest.raises(StoreRefused, match="hierarchical"):
            await keys(CloudStore(parse_url("az://container?account=name"), lambda url: Unordered()))

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(work(patch))


def test_a_put_sends_a_copy() -> None:
    """obstore may read a cancelled request's bytes after the call, when the buffer is the caller's again."""
    sent = []

    async def work(monkeypatch: pytest.MonkeyPatch) -> None:
        async def put(store: object, name: str, data: bytes, **_: object) -> None:
            sent.append(data)
            await asyncio.sleep(10)

        monkeypatch.setattr("tierd.stores.cloud.cloud_store.obstore.put_async", put)
        buffer = bytearray(b"right")
        task = asyncio.create_task(CloudStore(parse_url("gs://bucket"), lambda url: None).put("k", buffer))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        buffer[:] = b"wrong"

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(work(patch))
    assert sent == [b"right"]


# -- the rest of tierd -------------------------------------------------------------------------------------------------


def test_it_is_opened_by_its_url_and_nothing_is_read_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/nonexistent")
    for url in ("gs://bucket/p", "az://container/p?account=name"):
        store = open_store(parse_url(url), up=1000)
        assert url in repr(store)
        asyncio.run(store.aclose())


def test_without_obstore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "tierd.stores.cloud.cloud_store")
    with pytest.raises(
        ConfigError, match=re.escape(f"gs://bucket needs the package obstore: {install_command('obstore')}")
    ):
        open_store(parse_url("gs://bucket"))


def test_a_process_that_used_it_ends_as_it_should() -> None:
    """Of 25 processes that ended right after eight requests 7 were aborted, by a thread of obstore's."""
    account = '{"gcs_base_url": "", "disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}'
    code = """
import asyncio
from tierd.core.urls import parse_url
from tierd.stores.cloud.cloud_store import CloudStore

async def work():
    store = CloudStore(parse_url("gs://bucket?endpoint=http://127.0.0.1:1"))
    await asyncio.gather(*(store.put(f"k{one}", b"1") for one in range(8)), return_exceptions=True)

asyncio.run(work())
"""
    environment = {**os.environ, "GOOGLE_SERVICE_ACCOUNT_KEY": account}
    ends = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=150).returncode
        for _ in range(14)
    ]
    assert ends == [0] * 14


def test_doctor_tries_it(google: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", place(google), "--json"]) in (0, EXIT_WARNING)
    found = {one["finding"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert "read-write" in found and found & {"measured", "slow"} and google.objects == {}
    google.deny("PutObject", status=403)
    assert run(["doctor", place(google), "--json"]) == EXIT_ALERT


def test_a_daemon_flushes_and_a_fresh_node_restores(google: Bucket, tmp_path: Path) -> None:
    code = """
import sys, torch, tierd
state = {"weights": torch.arange(100_000, dtype=torch.float32)}
with tierd.Checkpointer(sys.argv[1], "run", to=[sys.argv[2]]) as ckpt:
    for step in (1, 2):
        ckpt.save(step, state).wait("gs", timeout=60)
back = {"weights": torch.zeros(100_000)}
with tierd.Checkpointer(sys.argv[1] + "-fresh", "run", to=[sys.argv[2]]) as ckpt:
    found = ckpt.restore(back)
assert (found.step, found.tier) == (2, "gs") and torch.equal(back["weights"], state["weights"]), found
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "spool"), place(google)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    with tierd.open(place(google), run="run") as reader:
        assert sorted(one.step for one in reader.checkpoints()) == [1, 2]
