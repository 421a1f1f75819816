"""`config check --reach`: which mode a tier is in, found by trying, and nothing left where it may go."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest
from stores.s3.test_s3_store import credentials
from support.s3stub import Bucket, serving

from tierd.cli import run
from tierd.core.errors import DeleteRefused, StoreFull, StoreRefused, StoreUnavailable, TierdError
from tierd.core.urls import parse_url
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.tiers.tier_probes import TierAccess, probe_access
from tierd.stores.base import Store
from tierd.stores.file_store import FileStore
from tierd.stores.file_tree import FileTree
from tierd.stores.memory_store import MemoryStore
from tierd.stores.s3.s3_store import S3Store

__all__ = ["credentials"]  # the fixture
PROBE = "p/.tierd-probe"  # stays on a server that verifies no checksum and lets nothing be deleted


def reached(bucket: Bucket) -> tuple[TierAccess, set[str]]:
    """What is found, and which objects are there afterwards that were not before."""

    async def work() -> TierAccess:
        store = S3Store(parse_url(bucket.url()))
        try:
            return await probe_access(store)
        finally:
            await store.aclose()

    before = set(bucket.objects)
    with serving(bucket):
        found = asyncio.run(work())
    return found, bucket.objects.keys() - before


def test_read_write_leaves_nothing_behind() -> None:
    assert reached(Bucket()) == (TierAccess("read-write"), set())


@pytest.mark.parametrize("introduced", [True, False])
def test_append_only_leaves_the_tiers_readme(introduced: bool) -> None:
    bucket = Bucket()
    bucket.deny("DeleteObject")
    bucket.objects |= {"p/README.md": b"an older one"} if introduced else {}
    found, left = reached(bucket)
    assert found.mode == "append-only"
    assert "s3:DeleteObject" in found.why
    assert left - {PROBE} == (set() if introduced else {"p/README.md"})


@pytest.mark.parametrize("denied", [("PutObject",), ("PutObject", "DeleteObject")])
def test_read_only_leaves_nothing_behind(denied: tuple[str, ...]) -> None:
    bucket = Bucket()
    bucket.deny(*denied)
    found, left = reached(bucket)
    assert found.mode == "read-only"
    assert "s3:PutObject" in found.why
    assert not left


@pytest.mark.parametrize(
    ("action", "code", "says"),
    [
        ("ListBucket", "AccessDenied", "s3:ListBucket"),
        ("GetObject", "AccessDenied", "s3:GetObject"),
        ("GetObject", "InvalidObjectState", "archived"),
        ("GetObject", "KMS.DisabledException", "kms:Decrypt"),
    ],
)
def test_unreadable_place_is_no_tier(action: str, code: str, says: str) -> None:
    bucket = Bucket()
    bucket.deny(action, code=code)
    found, left = reached(bucket)
    assert found.mode is None
    assert says in found.why
    assert not left


@pytest.mark.parametrize(
    ("code", "says"), [("InvalidStorageClass", "storage_class"), ("KMS.NotFoundException", "sse_kms_key_id")]
)
def test_reach_tries_the_permissions_of_a_put_too(code: str, says: str) -> None:
    bucket = Bucket()
    bucket.deny("PutObject", status=400, code=code)
    assert says in reached(bucket)[0].why


class Locked(MemoryStore):
    """Lets nothing be deleted that is there; `silent`: and does not say so."""

    silent = False

    async def delete(self, keys) -> None:
        if any([info.key in keys async for info in self.scan("")]) and not self.silent:
            raise DeleteRefused("locked")


@pytest.mark.parametrize("silent", [True, False])
def test_reach_detects_an_object_lock(silent: bool) -> None:
    store = Locked()
    store.silent = silent
    assert asyncio.run(probe_access(store)).mode == "append-only"
    assert asyncio.run(TierObserver(store).runs()) == set()  # what it left is no run


@pytest.mark.parametrize("run", ["", "demo"])
@pytest.mark.parametrize("kind", ["manifests", "chunks", "pruning"])
def test_tier_that_keeps_some_kinds_of_objects_is_append_only_and_names_them(run: str, kind: str) -> None:
    """A daemon prunes nothing there, so read-write was no word for it."""

    class Partly(MemoryStore):
        async def delete(self, keys) -> None:
            if any(f"{run or 'none'}/{kind}/" in key for key in keys):
                raise DeleteRefused("AccessDenied")
            await super().delete(keys)

    async def work() -> tuple[TierAccess, list[str]]:
        store = Partly()
        if run:
            await store.put(f"{run}/pins/x", b"")
        return await probe_access(store), list(store.keys)

    found, left = asyncio.run(work())
    assert found.mode == "append-only"
    assert kind in found.why and "AccessDenied" in found.why
    assert [key for key in left if "/" in key] == ([f"{run}/pins/x"] if run else [])


def test_a_directory_that_is_mounted_read_only_answers_and_takes_nothing(tmp_path: Path, monkeypatch) -> None:
    def refuse(self, *_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(FileTree, "put", refuse)
    monkeypatch.setattr(FileTree, "delete", refuse)
    found = asyncio.run(probe_access(FileStore(tmp_path)))
    assert found.mode == "read-only" and "mounted read-only" in found.why


def test_tier_that_refuses_to_list_is_distinguished_from_a_silent_tier() -> None:
    class Silent(MemoryStore):
        error: type[TierdError] = StoreUnavailable

        def scan(self, prefix, after=""):
            raise self.error("injected")

    class Refusing(Silent):
        error = StoreRefused

    class Full(Silent):
        error = StoreFull

    for store, failure in ((Silent(), "no answer"), (Refusing(), "refused"), (Full(), "full")):
        assert asyncio.run(probe_access(store)) == TierAccess(None, "injected", failure)


def test_a_directory_whose_entries_cannot_be_removed_is_append_only(tmp_path: Path, monkeypatch) -> None:
    real = os.unlink

    def unlink(path, *, dir_fd=None) -> None:
        if path == "README.md.check":
            raise PermissionError(errno.EPERM, "injected")
        real(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    (tmp_path / "tier").mkdir()
    (tmp_path / "tierd.toml").write_text(f'spool = "/s"\n[[tier]]\nname = "nas"\nurl = "{tmp_path / "tier"}"\n')
    assert run(["config", "check", str(tmp_path / "tierd.toml"), "--reach"]) == 0
    assert asyncio.run(probe_access(FileStore(tmp_path / "tier"))).mode == "append-only"


def test_reach_requires_a_put_to_read_back_and_leaves_no_object() -> None:
    class Forgetful(MemoryStore):
        async def put(self, key, data) -> str:
            return await super().put(key, b"other")

    store = Forgetful()
    assert asyncio.run(probe_access(store)).mode is None
    assert store.objects == {}


@pytest.mark.parametrize("moment", ["deleted after the put", "replaced after the put", "put again after the deletion"])
def test_another_node_that_tries_at_the_same_moment_is_no_fault(moment: str) -> None:
    class Shared(MemoryStore):
        """Here the other node acts once."""

        left = 1

        async def put(self, key, data) -> str:
            found = await super().put(key, data)
            if self.left and moment.endswith("put"):
                self.left = 0
                if moment.startswith("deleted"):
                    await super().delete([key])
                else:
                    await super().put(key, b"the other's")
            return found

        async def delete(self, keys) -> None:
            there = any([info.key in keys async for info in self.scan("")])
            await super().delete(keys)
            if self.left and there and moment.endswith("deletion"):
                self.left = 0
                await super().put(keys[0], b"the other's")

    store = Shared()
    assert asyncio.run(probe_access(store)) == TierAccess("read-write")
    assert not store.left and not list(store.keys)


def test_a_store_that_refuses_all_is_no_error() -> None:
    class Closed(MemoryStore):
        async def put(self, key, data) -> str:
            raise StoreRefused("no")

    closed: Store = Closed()
    assert asyncio.run(probe_access(closed)) == TierAccess("read-only", "no")


def test_the_command_says_which_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tierd.toml"
    (tmp_path / "tier").mkdir()
    with serving(Bucket()) as bucket:
        bucket.deny("DeleteObject")
        tiers = {"nas": str(tmp_path / "tier"), "s3": bucket.url()}
        named = "".join(f'[[tier]]\nname = "{name}"\nurl = "{url}"\n' for name, url in tiers.items())
        file.write_text(f'spool = "/s"\n{named}')
        assert run(["config", "check", str(file), "--reach"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "answers; read-write" in shown
        assert "answers; append-only: " in shown
        assert not list((tmp_path / "tier").glob("[!.]*"))
        bucket.deny("PutObject")
        assert run(["config", "check", str(file), "--reach", "--json"]) == 6
        reported = json.loads(capsys.readouterr().out)
        assert reported["reach"] == {"nas": "answers", "s3": "answers"}
        assert reported["modes"]["nas"] == {"mode": "read-write", "why": "", "failure": None}
        assert reported["modes"]["s3"]["mode"] == "read-only"
