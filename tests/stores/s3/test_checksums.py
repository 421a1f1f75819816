"""What servers do with checksums, and what a put believes of it: a stub that verifies, lies, or knows none."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from stores.s3.test_s3_store import Answer, Headers, against, credentials, error

from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.stores.base import is_key
from tierd.stores.s3 import checksums
from tierd.stores.s3.checksums import CHECKSUMS, MD5, PROBE_NAME
from tierd.stores.s3.http1 import DEFAULT_LIMITS, S3Limits
from tierd.stores.s3.s3_store import S3Store

__all__ = ["credentials"]  # the fixture
ALL = {"crc64nvme", "crc32c", "crc32"}
BY_NAME = {checksum.name: checksum for checksum in CHECKSUMS}

pytestmark = pytest.mark.skipif(len(CHECKSUMS) < 3, reason="awscrt is not installed")


@dataclass
class Server:
    """Answers puts as an S3 server that knows the checksums `knows` and checks those in `verifies`."""

    knows: set[str] = field(default_factory=lambda: set(ALL))
    verifies: set[str] = field(default_factory=lambda: set(ALL))
    ignores: bool = True  # checksums that it does not know, instead of refusing them
    mismatch: str = "BadDigest"
    unknown: tuple[int, str] = (400, "InvalidRequest")
    echo: Callable[[str], str] | None = None
    on_the_way: Callable[[bytes], bytes] = bytes
    down: int = 0  # probes answered with 503
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def respond(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        name = next((n.removeprefix("x-amz-checksum-") for n in headers if n.startswith("x-amz-checksum-")), "")
        key = target.partition("?")[0].rpartition("/")[2]
        self.log.append(f"{method} {key} {name or ('md5' if 'content-md5' in headers else '')}".strip())
        if method == "DELETE":
            self.objects.pop(key, None)
            return 204, ""
        if key == PROBE_NAME and self.down:
            self.down -= 1
            return 503, error("SlowDown")
        body = self.on_the_way(body)
        if name and name not in self.knows and not self.ignores:
            status, code = self.unknown
            return status, error(code, "Unsupported header 'x-amz-sdk-checksum-algorithm'")
        given = headers.get(f"x-amz-checksum-{name}") if name else headers["content-md5"]
        right = BY_NAME[name].value(memoryview(body)) if name else MD5.value(memoryview(body))
        if given != right and (name in self.verifies or not name):
            return 400, error(self.mismatch)
        self.objects[key] = body
        return 200, "", {f"x-amz-checksum-{name}": self.echo(right)} if self.echo and name else {}


def puts(server: Server, *expected: str, keys: str = "abc", limits: S3Limits = DEFAULT_LIMITS) -> None:
    """Put some objects; each put answers as expected, and they alone lie on the server."""

    async def use(store: S3Store) -> None:
        for key, name in zip(keys, expected, strict=False):
            assert await store.put(key, memoryview(key.encode() * 1000)) == name

    against(server.respond, use, limits=limits)
    assert server.objects == {key: key.encode() * 1000 for key in keys[: len(expected)]}


@pytest.mark.parametrize(
    ("name", "expected"), [("crc64nvme", 0xAE8B14860A799888), ("crc32c", 0xE3069283), ("crc32", 0xCBF43926)]
)
def test_each_checksum_equals_its_published_value(name: str, expected: int) -> None:
    check = memoryview(b"123456789")
    assert int.from_bytes(BY_NAME[name].digest(check)) == expected
    assert base64.b64decode(BY_NAME[name].value(check)) == BY_NAME[name].digest(check)
    assert BY_NAME[name].field == f"Checksum{name.upper()}"


def test_strongest_checksum_is_first_and_md5_is_none_of_them() -> None:
    assert [checksum.name for checksum in CHECKSUMS] == ["crc64nvme", "crc32c", "crc32"]
    assert MD5.digest(memoryview(b"x")) == hashlib.md5(b"x").digest()


def test_large_data_is_digested_in_a_thread() -> None:
    for data in (b"123", bytes(2 << 20)):
        given = asyncio.run(BY_NAME["crc32c"].parameters(memoryview(data)))
        assert given == {"ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": BY_NAME["crc32c"].value(memoryview(data))}


@pytest.mark.parametrize("mismatch", ["BadDigest", "XAmzContentChecksumMismatch"])
def test_a_server_that_refuses_a_wrong_checksum_is_believed(mismatch: str) -> None:
    server = Server(mismatch=mismatch)
    puts(server, "crc64nvme", "crc64nvme", "crc64nvme")
    assert server.log == [f"PUT {PROBE_NAME} crc64nvme", *(f"PUT {key} crc64nvme" for key in "abc")]


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("best", ["crc32c", "crc32"])
def test_the_best_that_is_verified_is_taken(best: str, ignores: bool) -> None:
    known = {"crc32"} if best == "crc32" else {"crc32", "crc32c"}
    server = Server(knows=known, verifies=known, ignores=ignores)
    puts(server, best, best)
    assert server.log[-2:] == [f"PUT a {best}", f"PUT b {best}"]


def test_a_server_that_takes_a_wrong_checksum_is_not_believed_for_good() -> None:
    server = Server(verifies=set())
    puts(server, "", "", "")
    probes = [
        f"{method} {PROBE_NAME}{name}" for c in CHECKSUMS for method, name in (("PUT", f" {c.name}"), ("DELETE", ""))
    ]
    assert server.log == [*probes, *(f"PUT {key} crc64nvme" for key in "abc")]


@pytest.mark.parametrize("unknown", [(400, "InvalidArgument"), (501, "NotImplemented"), (400, "InvalidRequest")])
def test_a_server_that_knows_no_checksum_gets_an_md5(unknown: tuple[int, str]) -> None:
    server = Server(knows=set(), verifies=set(), ignores=False, unknown=unknown)
    puts(server, "", "", "")
    assert server.log == [*(f"PUT {PROBE_NAME} {c.name}" for c in CHECKSUMS), *(f"PUT {key} md5" for key in "abc")]


def test_a_probe_without_an_answer_says_nothing_and_is_repeated() -> None:
    server = Server(down=1)
    puts(server, "", "")  # not again at once
    assert server.log == [f"PUT {PROBE_NAME} crc64nvme", "PUT a md5", "PUT b md5"]
    puts(Server(down=2), "", "", "crc64nvme", limits=S3Limits(probe_s=0))


def test_puts_at_once_probe_once() -> None:
    server = Server()

    async def use(store: S3Store) -> None:
        names = await asyncio.gather(*(store.put(f"k{number}", b"data") for number in range(20)))
        assert set(names) == {"crc64nvme"}

    against(server.respond, use)
    assert server.log.count(f"PUT {PROBE_NAME} crc64nvme") == 1


def test_an_answer_that_repeats_another_checksum_is_no_success() -> None:
    puts(Server(echo=lambda right: right), "crc64nvme")

    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable, match="other bytes"):
            await store.put("a", b"data")

    against(Server(echo=lambda right: "AAAAAAAAAAA=").respond, use)


@pytest.mark.parametrize("verifies", [ALL, set[str]()])
def test_changed_body_is_refused_by_server_or_client(verifies: set[str]) -> None:
    server = Server(verifies=set(verifies), echo=lambda right: right)

    async def use(store: S3Store) -> None:
        await store.put("a", b"data" * 100)
        server.on_the_way = lambda body: body[:-1] + b"!"
        with pytest.raises(StoreUnavailable):  # or else the answer's own checksum shows it
            await store.put("b", b"data" * 100)

    against(server.respond, use)
    assert ("b" in server.objects) == (not verifies)


def test_without_awscrt_it_is_a_crc32(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec(checksums.__name__)
    without = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "awscrt", None)
        spec.loader.exec_module(without)
    assert [checksum.name for checksum in without.CHECKSUMS] == ["crc32"]
    monkeypatch.setattr(checksums, "CHECKSUMS", without.CHECKSUMS)
    puts(Server(), "crc32")


def test_a_refusal_that_is_not_about_the_checksum_says_nothing() -> None:
    def respond(method: str, target: str, headers: Headers, body: bytes) -> Answer:
        return (403, error("AccessDenied")) if PROBE_NAME in target else (200, "")

    async def use(store: S3Store) -> None:
        assert await store.put("a", b"1") == ""

    against(respond, use)

    async def refused(store: S3Store) -> None:
        with pytest.raises(StoreRefused):
            await store.put("a", b"1")

    against(lambda *_: (403, error("AccessDenied")), refused)


def test_no_scan_shows_the_probe_and_no_caller_can_name_it() -> None:
    assert not is_key(PROBE_NAME)
