"""What `doctor` observes of a tier: a bucket with every setting that fights retention, and servers that are wrong."""

from __future__ import annotations

import asyncio
import datetime
import errno
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest
from stores.s3.test_s3_store import credentials
from support.s3stub import Bucket, serving
from support.tls import Authority

from tierd.core.diagnosis.findings import FINDINGS, Finding
from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.core.urls import parse_url
from tierd.doctor import tier_checks
from tierd.doctor.examination import ExaminationScope, examine
from tierd.doctor.tier_checks import Endpoint, ExaminedTier
from tierd.doctor.tier_checks import examine_endpoint as examine_endpoint
from tierd.stores.file_store import FileStore
from tierd.stores.file_tree import FileTree
from tierd.stores.memory_store import MemoryStore
from tierd.stores.s3.s3_store import S3Store

__all__ = ["credentials"]  # the fixture

LIFECYCLE = b"""<LifecycleConfiguration>
<Rule><ID>old</ID><Status>Enabled</Status><Filter><Prefix>p/</Prefix></Filter>
<Expiration><Days>30</Days></Expiration></Rule>
<Rule><ID>off</ID><Status>Disabled</Status><Filter></Filter><Expiration><Days>1</Days></Expiration></Rule>
</LifecycleConfiguration>"""
TAGGED = b"""<LifecycleConfiguration><Rule><ID>t</ID><Status>Enabled</Status>
<Filter><And><Prefix>p</Prefix><Tag><Key>a</Key><Value>b</Value></Tag></And></Filter>
<Expiration><Days>30</Days></Expiration></Rule></LifecycleConfiguration>"""
CLEANED = b"""<LifecycleConfiguration><Rule><ID>t</ID><Status>Enabled</Status><Prefix></Prefix>
<NoncurrentVersionExpiration><NoncurrentDays>3</NoncurrentDays></NoncurrentVersionExpiration>
</Rule></LifecycleConfiguration>"""
LOCK = b"""<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule><DefaultRetention>
<Mode>COMPLIANCE</Mode><Days>30</Days></DefaultRetention></Rule></ObjectLockConfiguration>"""
VERSIONS = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
UPLOADS = b"""<ListMultipartUploadsResult><Upload><Key>p/x</Key><UploadId>1</UploadId>
<Initiated>2026-01-02T03:04:05.000Z</Initiated></Upload></ListMultipartUploadsResult>"""


async def all_of(source: AsyncIterator[Finding]) -> dict[str, Finding]:
    return {one.check: one async for one in source}


def judged(bucket: Bucket, *sources: str) -> dict[str, Finding]:
    """The findings about a bucket, by check."""

    async def work() -> dict[str, Finding]:
        url = parse_url(bucket.url())
        subject, found = ExaminedTier("t", url, S3Store(url), None), dict[str, Finding]()
        for source in sources:
            found |= await all_of(getattr(tier_checks, source)(subject))
        await subject.store.aclose()
        return found

    with serving(bucket):
        return asyncio.run(work())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ("no rules", "no lock", "no versions", "no uploads")),
        ({"lifecycle": LIFECYCLE, "object-lock": LOCK}, ("expires", "lock by default", "no versions", "no uploads")),
        ({"lifecycle": TAGGED, "versioning": VERSIONS}, ("no rules", "no lock", "old versions stay", "no uploads")),
        ({"lifecycle": CLEANED, "versioning": VERSIONS}, ("no rules", "no lock", "old versions expire", "no uploads")),
        ({"uploads": UPLOADS}, ("no rules", "no lock", "no versions", "leftover uploads")),
        (
            {
                "lifecycle": (404, "NoSuchLifecycleConfiguration"),
                "object-lock": (404, "ObjectLockConfigurationNotFoundError"),
            },
            ("no rules", "no lock", "no versions", "no uploads"),
        ),
        (
            dict.fromkeys(("lifecycle", "object-lock", "versioning", "uploads"), (403, "AccessDenied")),
            ("rules unknown", "lock unknown", "versioning unknown", "uploads unknown"),
        ),
    ],
)
def test_bucket_settings_are_findings(settings, names: tuple[str, ...]) -> None:
    bucket = Bucket()
    bucket.settings = settings
    found = judged(bucket, "examine_bucket")
    assert tuple(one.finding for one in found.values()) == names
    assert not bucket.objects


def test_a_bucket_that_works_is_tried_and_left_as_it_was() -> None:
    bucket = Bucket()
    bucket.objects["p/r/pins/x"] = b""
    found = judged(bucket, "examine_server", "examine_credentials", "examine_operations")
    assert {check: one.finding for check, one in found.items()} == {
        "DNS": "resolves",
        "TLS": "plain on loopback",
        "connection": "connects",
        "clock": "in time",
        "credentials": "credentials",
        "operations": "read-write",
        "checksums": "verifies none",
        "conditions": "leaves objects",
        "throughput": found["throughput"].finding,
    }
    assert found["throughput"].finding in ("measured", "slow")
    assert list(bucket.objects) == ["p/r/pins/x"]
    assert "secret" not in json.dumps([one.found for one in found.values()])


def test_store_that_replaces_an_object_in_spite_of_the_condition_is_a_note() -> None:
    bucket = Bucket()
    bucket.ignores_conditions = True
    assert judged(bucket, "examine_operations")["conditions"].finding == "replaces objects"
    assert not bucket.objects


@pytest.mark.parametrize(
    ("denied", "names"),
    [
        (("DeleteObject",), ["append-only", "verifies none", "leaves objects", "not measured"]),
        (("PutObject",), ["takes nothing", "not measured"]),
        (("ListBucket",), ["refused"]),
    ],
)
def test_operation_that_a_tier_does_not_allow_is_a_finding(denied: tuple[str, ...], names: list[str]) -> None:
    bucket = Bucket()
    bucket.deny(*denied)
    assert [one.finding for one in judged(bucket, "examine_operations").values()] == names
    assert set(bucket.objects) <= {"p/README.md", "p/.tierd-probe"}


def test_credentials_of_a_session_that_nobody_renews_and_none_at_all(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ID-OF-A-KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "A-SECRET")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "A-TOKEN")
    (found,) = judged(Bucket(), "examine_credentials").values()
    assert found.finding == "credentials expire"
    assert not [one for one in ("ID-OF-A-KEY", "A-SECRET", "A-TOKEN") if one in str(found)]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert [one.finding for one in judged(Bucket(), "examine_credentials").values()] == ["no credentials"]
    (tmp_path / "config").write_text("[default]\ncredential_process = /bin/sh -c 'echo A-SECRET >&2; exit 1'\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (found,) = judged(Bucket(), "examine_credentials").values()
    assert found.finding == "credentials unknown" and "A-SECRET" not in str(found)


def test_a_proxy_of_the_environment_is_not_passed_by(monkeypatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:A-SECRET@127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "")
    found = judged(Bucket(), "examine_server")
    assert [one.finding for one in found.values()] == ["by proxy"]
    assert "A-SECRET" not in str(found)


@contextmanager
def answering(head: bytes, context=None) -> Iterator[int]:
    """A server on loopback that answers each connection with `head`; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) if context else plain as client:
                    client.recv(4096)
                    client.sendall(head)
            except OSError:
                pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


def way(url: str, authorities: str = "", answer_s: float = 10.0) -> dict[str, str]:
    found = asyncio.run(all_of(examine_endpoint(Endpoint("t", url, authorities, answer_s))))
    return {check: one.finding for check, one in found.items()}


@pytest.mark.parametrize(
    ("off", "name"),
    [(0, "in time"), (-200, "clock off"), (200, "clock off"), (2000, "clock too far off"), (None, "clock unknown")],
)
def test_the_servers_clock_is_compared(off: int | None, name: str) -> None:
    date = b"" if off is None else f"Date: {formatdate(time.time() + off, usegmt=True)}\r\n".encode()
    with answering(b"HTTP/1.1 403 Forbidden\r\n" + date + b"\r\n") as port:
        assert way(f"http://127.0.0.1:{port}")["clock"] == name


@pytest.mark.parametrize("answer", [b"", b"\x00\xff" * 100_000, b"HTTP/1.1 200 OK\r\nDate: soon\r\n\r\n"])
def test_a_server_that_says_nothing_of_use_has_no_clock(answer: bytes) -> None:
    with answering(answer) as port:
        assert way(f"http://127.0.0.1:{port}")["clock"] == "clock unknown"


@pytest.mark.parametrize(
    ("days", "trusted", "name"),
    [(90, True, "encrypted"), (3, True, "certificate expires"), (-1, True, "no TLS"), (90, False, "no TLS")],
)
def test_certificate_is_verified_and_its_expiry_reported(tmp_path: Path, days: int, trusted: bool, name: str) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir(), other.mkdir()
    authority, stranger = Authority(mine), Authority(other)
    day = datetime.timedelta(days=1)
    context = authority.server("127.0.0.1", begins=-3 * day, ends=days * day)
    with answering(b"HTTP/1.1 403 Forbidden\r\n\r\n", context) as port:
        bundle = str((authority if trusted else stranger).bundle)
        assert way(f"https://127.0.0.1:{port}", bundle)["TLS"] == name


def test_a_name_that_does_not_resolve_and_a_port_where_nobody_listens(monkeypatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        assert way("http://no-such-host.invalid") == {"DNS": "does not resolve"}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert way(f"http://127.0.0.1:{port}") == {"DNS": "resolves", "connection": "no connection"}


def test_a_server_that_accepts_and_never_answers_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = way(f"http://127.0.0.1:{listener.getsockname()[1]}", answer_s=0.1)
    assert found == {"DNS": "resolves", "TLS": "plain on loopback", "connection": "silent server"}


def test_a_server_that_cannot_be_reached_is_one_finding_and_nothing_of_it_blames_permissions(credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = parse_url(f"s3://bucket/p?endpoint=http://127.0.0.1:{port}")

    async def work() -> list[Finding]:
        store = S3Store(url)
        found = await examine(ExaminationScope(None, 3, 60.0, [ExaminedTier("t", url, store, None)]))
        await store.aclose()
        return found

    found = asyncio.run(work())
    (wrong,) = [one for one in found if one.severity in ("warning", "error")]
    assert wrong.finding == "no connection" and f"127.0.0.1:{port}" in wrong.found
    assert all(one in wrong.do for one in ("server runs", "port", "HTTPS_PROXY"))
    skipped = {one.check: one for one in found if one.finding == "not tried"}
    assert set(skipped) == {"operations", "lifecycle", "object lock", "versioning", "multipart"}
    assert {(one.found, one.do) for one in skipped.values()} == {("not tried, because the tier did not answer", "")}


def at(path: Path, spool: Path | None = None) -> dict[str, str]:
    """The findings about a file tier."""

    async def work() -> dict[str, Finding]:
        store = FileStore(path)
        found = await all_of(
            tier_checks.examine_directory(ExaminedTier("t", parse_url(f"file://{path}"), store, spool))
        )
        await store.aclose()
        return found

    return {check: one.finding for check, one in asyncio.run(work()).items()}


@pytest.mark.parametrize(("state", "name"), [(4 << 20, "nearly full"), (3 << 20, "room there"), (None, "room unknown")])
def test_a_directory_with_less_room_than_one_state_is_an_error(
    tmp_path: Path, monkeypatch, state: int | None, name: str
) -> None:
    """The trial's object of 1 MiB fits, and the next flush would not."""
    real = os.statvfs(tmp_path)
    members = list(real)[:10]
    members[0:5] = [4096, 4096, 16384, 2000, 3 * 256]  # sizes of blocks; all, free, and free for this account
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(members))

    async def work() -> dict[str, Finding]:
        store = FileStore(tmp_path)
        found = await all_of(
            tier_checks.examine_directory(ExaminedTier("t", parse_url(f"file://{tmp_path}"), store, None), state)
        )
        await store.aclose()
        return found

    found = asyncio.run(work())
    assert (found["room"].finding, found["operations"].finding) == (name, "read-write")
    assert found["room"].found.startswith("3.0 MiB of 64.0 MiB free")


@pytest.mark.parametrize("below", ["", "tier", ".."])
def test_a_tier_in_its_spool_is_an_error(tmp_path: Path, below: str) -> None:
    spool = tmp_path / "above" / "spool"
    (spool / "tier").mkdir(parents=True)
    assert at((spool / below).resolve(), spool)["directory"] == "in the spool"
    assert FINDINGS["in the spool"].severity == "error"
    (tmp_path / "beside").mkdir()
    assert at(tmp_path / "beside", spool)["directory"] != "in the spool"


def test_a_tier_that_is_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert at(tmp_path / "file")["directory"] == "no directory"


@pytest.mark.parametrize("name", ["put", "scan"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_refuses_says_why_and_where(tmp_path: Path, monkeypatch, name: str, number: int) -> None:
    """A file system that is mounted read-only refuses the trial's deletion first; that is an answer."""

    def refuse(self, *_: object) -> None:
        raise OSError(number, os.strerror(number))

    for call in {"put": ("put", "delete"), "scan": ("list_page", "list_keys")}[name]:
        monkeypatch.setattr(FileTree, call, refuse)

    async def work() -> dict[str, Finding]:
        store = FileStore(tmp_path)
        found = await all_of(
            tier_checks.examine_directory(ExaminedTier("t", parse_url(f"file://{tmp_path}"), store, None))
        )
        await store.aclose()
        return found

    found = asyncio.run(work())["operations"]
    assert (found.finding, found.severity) == ("not writable", "error")
    assert str(tmp_path) in found.found and os.strerror(number) in found.found
    assert f"belongs to uid {os.geteuid()}" in found.found and "remount,rw" in found.do and "chown" in found.do


@pytest.mark.parametrize(
    ("number", "name", "does"),
    [(errno.ENOSPC, "full", "Free space"), (errno.EDQUOT, "full", "quota"), (errno.EIO, "mount fails", "findmnt")],
)
def test_full_directory_is_distinguished_from_a_failing_disk(
    tmp_path: Path, monkeypatch, number: int, name: str, does: str
) -> None:
    """A full directory was "no answer", and doctor advised about firewalls."""

    def refuse(self, *_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileTree, "put", refuse)
    assert at(tmp_path)["operations"] == name
    assert does in FINDINGS[name].do and "firewall" not in FINDINGS[name].do


def test_a_directory_that_is_not_there_is_one_finding(tmp_path: Path) -> None:
    assert at(tmp_path / "none") == {"directory": "directory absent"}


def test_directory_that_refuses_writes_is_distinguished_from_a_bucket(tmp_path: Path, monkeypatch) -> None:
    async def refused(self, key, data) -> str:
        raise StoreRefused(f"{key}: permission denied")

    monkeypatch.setattr(FileStore, "put", refused)
    assert at(tmp_path)["operations"] == "not writable"
    assert "s3" not in FINDINGS["not writable"].do


def test_a_failure_of_the_timed_object_leaves_nothing_behind() -> None:
    class Failing(MemoryStore):
        async def put(self, key, data) -> str:
            found = await super().put(key, data)
            if memoryview(data).nbytes > 1 << 19:
                raise StoreUnavailable("injected")
            return found

    store = Failing()
    found = asyncio.run(all_of(tier_checks.examine_operations(ExaminedTier("t", parse_url("/t"), store, None))))
    assert found["operations"].finding == "read-write" and found["throughput"].finding == "not measured"
    assert not list(store.keys)
