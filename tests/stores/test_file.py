"""FileStore keeps the contract, syncs in the right order, and stays inside its root."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import itertools
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from stores.conformance import Conformance, keys

from tierd.core.errors import DeleteRefused, ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.spool.direct_io import LARGE, PAGE, PIECE, memory_for
from tierd.spool.spool import Spool
from tierd.stores import file_descriptors
from tierd.stores.base import ObjectInfo, Store
from tierd.stores.file_store import FileStore
from tierd.stores.file_tree import FileTree

TEMP = "0123456789abcdef" * 2


class TestFileStore(Conformance):
    can_digest = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: FileStore(tmp_path)


def refuse_to_unlink(monkeypatch: pytest.MonkeyPatch, number: int, *names: str) -> None:
    """Files of these names cannot be removed; none outside `.tmp` where none is named."""
    real = os.unlink

    def unlink(path, *, dir_fd=None) -> None:
        here = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
        if not here.endswith("/.tmp") and (path in names or not names):
            os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            raise OSError(number, "injected")
        real(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)


def put(root: Path, key: str, data: bytes = b"data") -> None:
    asyncio.run(FileStore(root).put(key, data))


def get(root: Path, key: str) -> bytes:
    return bytes(asyncio.run(FileStore(root).get(key)))


def listed(root: Path) -> list[str]:
    return asyncio.run(keys(FileStore(root)))


def temps(root: Path) -> list[str]:
    return sorted(os.listdir(root / ".tmp"))


def test_objects_are_plain_files(tmp_path: Path) -> None:
    put(tmp_path, "run/chunks/1", b"content")
    assert (tmp_path / "run/chunks/1").read_bytes() == b"content"
    assert temps(tmp_path) == []


def test_a_missing_root_is_refused_and_never_made(tmp_path: Path) -> None:
    root = tmp_path / "missing"
    for call in (lambda: put(root, "k"), lambda: get(root, "k"), lambda: listed(root)):
        with pytest.raises(StoreRefused, match="mkdir"):
            call()
    with pytest.raises(StoreRefused, match="mkdir"):
        asyncio.run(keys(FileStore(root), "no key/"))
    with pytest.raises(StoreRefused):
        asyncio.run(FileStore(root).delete(["k"]))
    assert not root.exists()


@pytest.mark.parametrize("below", ["file", "file/tier"])
def test_a_root_that_is_a_file_is_refused_and_shows_no_object_as_absent(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    store = FileStore(tmp_path / below)
    calls = (store.put("k", b""), store.get("k"), store.get("a/k", memory_for(8)), keys(store), store.delete(["k"]))
    for call in calls:
        with pytest.raises(StoreRefused, match=r"file.* is not a directory"):
            asyncio.run(call)


@pytest.mark.parametrize("replacement", [True, False], ids=["another directory in its place", "nothing in its place"])
async def test_a_root_that_vanishes_is_unavailable_until_it_is_back(tmp_path: Path, replacement: bool) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    root.mkdir()

    store = FileStore(root)
    await store.put("a/b", b"1")
    root.rename(away)  # as an unmount shows what lies below the mount point, or nothing
    if replacement:
        root.mkdir()
    for call in (store.put("a/b", b"2"), store.get("a/b"), store.delete(["a/b"]), keys(store)):
        with pytest.raises(StoreUnavailable, match="mounted"):
            await call
    if replacement:
        assert os.listdir(root) == []
        root.rmdir()
    away.rename(root)
    assert bytes(await store.get("a/b")) == b"1"


async def test_a_trial_where_a_mount_is_missing_does_not_make_it_the_tier(tmp_path: Path) -> None:
    """`tierd doctor` made the mark on an empty disk, and the daemon flushed there (a reader on a bare machine)."""
    (root := tmp_path / "tier").mkdir()
    daemon = FileStore(root)

    await daemon.put("run/a", b"data")
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    trial = FileStore(root, trial=True)
    await trial.put("README.md.check", b"data")
    assert bytes(await trial.get("README.md.check")) == b"data"
    with pytest.raises(StoreUnavailable, match=r"has lost its \.tmp"):
        await daemon.put("run/b", b"data")
    await trial.delete(["README.md.check"])
    await trial.aclose()
    assert list(root.iterdir()) == []
    with pytest.raises(StoreUnavailable, match=r"has lost its \.tmp"):
        await daemon.put("run/b", b"data")
    await daemon.aclose()


def test_a_trial_of_a_tier_uses_its_mark(tmp_path: Path) -> None:
    put(tmp_path, "run/a")

    async def work() -> None:
        trial = FileStore(tmp_path, trial=True)
        await trial.put("run/b", b"data")
        await trial.aclose()

    asyncio.run(work())
    assert listed(tmp_path) == ["run/a", "run/b"] and sorted(os.listdir(tmp_path)) == [".tmp", "run"]


def test_a_root_that_vanishes_under_a_scan_does_not_shorten_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in "abcdefghijklmnopqrst":  # more than a scan reads ahead at its beginning
        put(root, f"{name}/f")

    async def whole() -> None:
        store, seen = FileStore(root), []
        with pytest.raises(StoreUnavailable):
            async for info in store.scan(""):
                seen.append(info.key)
                if len(seen) == 1:
                    root.rename(tmp_path / "away")
                    root.mkdir()
        assert 0 < len(seen) < 20

    asyncio.run(whole())


def test_a_scan_reads_small_directories_together_and_few_for_one_object(tmp_path: Path, monkeypatch) -> None:
    for number in range(100):
        (tmp_path / f"d{number:02}").mkdir()
        for name in "abc":
            (tmp_path / f"d{number:02}" / name).write_bytes(b"1")
    counts: list[int] = []
    list_page = FileTree.list_page

    def counted(*given: Any) -> Sequence[ObjectInfo]:
        counts.append(len(found := list_page(*given)))
        return found

    monkeypatch.setattr(FileTree, "list_page", counted)

    async def first() -> str:
        async with aclosing(FileStore(tmp_path).scan("")) as listing:
            return (await anext(listing)).key

    assert asyncio.run(first()) == "d00/a"
    assert len(counts) == 1 and counts[0] < 20
    counts.clear()
    assert listed(tmp_path) == [f"d{number:02}/{name}" for number in range(100) for name in "abc"]
    assert sum(counts) == 300 and len(counts) < 5


def test_the_order_of_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "old/x")
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tmp_path)
        done.append("temp file" if path.parts[:1] == (".tmp",) else f"{path}/")
        fsync(fd)

    def spy_rename(*args: object, **kwargs: object) -> None:
        done.append("rename")
        rename(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)

    async def whole() -> None:
        store = FileStore(tmp_path)
        await store.put("old/new/er/f", b"1")
        # `old` was there, but this store has not seen it synced
        assert done == ["temp file", "./", "old/", "old/new/", "rename", "old/new/er/"]
        done.clear()
        await store.put("old/new/er/g", b"1")
        assert done == ["temp file", "rename", "old/new/er/"]
        done.clear()
        await store.delete(["old/new/er/g", "old/new/er/f"])
        assert done == ["old/new/er/"]
        assert os.listdir(tmp_path / "old") == ["x"]
        assert store._tree._durable == {"old"}  # what is gone is not remembered
        done.clear()
        await store.put("old/new/er/f", b"1")
        assert done == ["temp file", "old/", "old/new/", "rename", "old/new/er/"]

    asyncio.run(whole())


@pytest.mark.parametrize("number", [0, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV])
def test_object_that_replaces_none_is_durable_and_without_hard_links_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def spy_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tmp_path)
        done.append("temp file" if path.parts[:1] == (".tmp",) else f"{path}/")
        fsync(fd)

    def spy_link(*args: object, **kwargs: object) -> None:
        done.append("link")
        if number:
            raise OSError(number, "injected")
        link(*args, **kwargs)  # type: ignore[arg-type]

    async def whole() -> None:
        store = FileStore(tmp_path)
        await store.put("d/first", b"1")
        monkeypatch.setattr(os, "fsync", spy_fsync)
        monkeypatch.setattr(os, "link", spy_link)
        assert await store.put_if_absent("d/k", b"1") == ""
        assert done == ["temp file", "link", "d/"]
        assert await store.put_if_absent("d/k", b"2") == ("" if number else None)

    asyncio.run(whole())
    assert get(tmp_path, "d/k") == (b"2" if number else b"1")
    assert temps(tmp_path) == [] and (tmp_path / "d/k").stat().st_nlink == 1


def test_a_node_that_never_prunes_remembers_no_more_directories_than_a_bound(tmp_path: Path) -> None:
    tree = FileTree(tmp_path, trial=False, remembered=10)
    for step in range(50):
        tree.put(f"run/chunks/{step}/x", memoryview(b"1"), threading.Event())
        assert len(tree._durable) <= 10


def test_a_failed_fsync_is_never_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "k", b"old")
    synced, fsync = [], os.fsync

    def fail(fd: int) -> None:
        synced.append(fd)
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreUnavailable, match="Input/output"):
        put(tmp_path, "k", b"new")
    assert len(synced) == 1
    assert temps(tmp_path) == []
    monkeypatch.setattr(os, "fsync", fsync)
    assert get(tmp_path, "k") == b"old"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_file_that_may_not_be_removed_is_a_refusal_to_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """`chattr +a`, a sticky directory, an export that lets nothing be removed: it can still be added to."""
    put(tmp_path, "run/a/1"), put(tmp_path, "run/a/2")
    refuse_to_unlink(monkeypatch, number, "1")
    with pytest.raises(DeleteRefused, match=r"delete run/a/1: .* append-only"):
        asyncio.run(FileStore(tmp_path).delete(["run/a/1", "run/a/2"]))
    assert listed(tmp_path) == ["run/a/1"], "what may go is gone"
    put(tmp_path, "run/a/3")


def test_a_file_system_that_is_read_only_is_not_append_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host kit, seeds 26 and 36: its flags did not show the remount yet, and for ten minutes nothing was pruned."""
    put(tmp_path, "run/1")
    refuse_to_unlink(monkeypatch, errno.EROFS, "1")
    with pytest.raises(StoreRefused) as caught:
        asyncio.run(FileStore(tmp_path).delete(["run/1"]))
    assert not isinstance(caught.value, DeleteRefused)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, StoreUnavailable),
        (errno.EDQUOT, StoreUnavailable),
        (errno.EIO, StoreUnavailable),
        (errno.ESTALE, StoreUnavailable),
        (errno.ETIMEDOUT, StoreUnavailable),
        (errno.EMFILE, StoreUnavailable),
        (errno.EACCES, StoreRefused),
        (errno.EROFS, StoreRefused),
        (errno.EPERM, StoreRefused),
        (errno.EFBIG, StoreRefused),
    ],
)
def test_errnos_are_translated_to_tierds_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, "injected")

    put(tmp_path, "k", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(expected) as caught:
            put(tmp_path, "k", b"new")
    assert str(tmp_path) in str(caught.value)
    assert ("keep less on this tier" in str(caught.value)) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert temps(tmp_path) == []
    assert get(tmp_path, "k") == b"old"
    for name in ("open", "scandir"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(expected):
                listed(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        with pytest.raises(expected):
            asyncio.run(FileStore(tmp_path).delete(["k"]))
    assert get(tmp_path, "k") == b"old"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:1000], offset))
    put(tmp_path, "k", bytes(range(256)) * 40)
    assert get(tmp_path, "k") == bytes(range(256)) * 40


@pytest.mark.parametrize("lead", [0, 1, 64, PAGE - 1])
@pytest.mark.parametrize("size", [LARGE, LARGE + 1, PIECE - 1, PIECE + 5 * PAGE + 7])
def test_bytes_that_begin_anywhere_in_memory_are_put_whole(tmp_path: Path, lead: int, size: int) -> None:
    memory = memory_for(lead + size)
    memory[:] = random.Random(size).randbytes(len(memory))
    asyncio.run(FileStore(tmp_path).put("k", memory[lead : lead + size]))
    assert (tmp_path / "k").read_bytes() == memory[lead : lead + size]


def test_a_key_cannot_be_the_directory_of_another(tmp_path: Path) -> None:
    put(tmp_path, "a/b")
    put(tmp_path, "c")
    for key in ("a", "c/d"):
        with pytest.raises(StoreRefused):
            put(tmp_path, key)
    assert listed(tmp_path) == ["a/b", "c"]
    assert temps(tmp_path) == []


def test_symlinks_and_odd_files_lead_nowhere(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "run").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "run/link").symlink_to(outside / "secret")
    (root / "run/dir").symlink_to(outside)
    os.mkfifo(root / "run/fifo")
    (root / "run/white space").touch()
    (root / "run/.nfs0001").touch()
    put(root, "run/real")
    assert listed(root) == ["run/real"]
    for key in ("run/link", "run/dir/secret", "run/fifo"):
        with pytest.raises((ObjectNotFound, StoreRefused)):
            get(root, key)
    with pytest.raises(StoreRefused):
        put(root, "run/dir/new")
    put(root, "run/link", b"replaces the link")
    asyncio.run(FileStore(root).delete(["run/dir/secret"]))
    assert os.listdir(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert get(root, "run/link") == b"replaces the link"
    (root / ".tmp").rmdir()
    (root / ".tmp").symlink_to(outside)
    with pytest.raises(StoreRefused):
        put(root, "run/real")
    assert os.listdir(outside) == ["secret"]


@pytest.mark.parametrize("operation", ["put", "get", "scan", "delete"])
@pytest.mark.parametrize("swapped", ["run", "run/chunks", ".tmp"])
def test_a_link_planted_between_any_two_steps_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, swapped: str
) -> None:
    """In a directory that others may write to: at every call of an operation, a directory becomes a link."""
    for when in itertools.count(1):
        root, outside = tmp_path / f"root{when}", tmp_path / f"outside{when}"
        root.mkdir()
        put(root, "run/chunks/one", b"inside")
        shutil.copytree(root / swapped, outside)
        for path in outside.rglob("one"):
            path.write_bytes(b"outside")
        before = {path.relative_to(outside): path.is_file() and path.read_bytes() for path in outside.rglob("*")}
        calls = 0

        def plant(real, *args, root=root, outside=outside, when=when, **kwargs):
            nonlocal calls
            if threading.current_thread().name.startswith("tierd-file"):
                calls += 1
                if calls == when:
                    Path(root / swapped).rename(root / "aside")
                    Path(root / swapped).symlink_to(outside)
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            for name in ("open", "mkdir", "rename", "unlink", "rmdir", "stat", "scandir"):
                patch.setattr(os, name, functools.partial(plant, getattr(os, name)))
            try:
                match operation:
                    case "put":
                        put(root, "run/chunks/two", b"new")
                    case "get":
                        assert get(root, "run/chunks/one") == b"inside"
                    case "scan":
                        listed(root)
                    case "delete":
                        asyncio.run(FileStore(root).delete(["run/chunks/one"]))
            except TierdError:
                pass
        assert before == {p.relative_to(outside): p.is_file() and p.read_bytes() for p in outside.rglob("*")}
        if calls < when:
            assert when > 3
            return


def test_the_root_itself_may_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to("disk")
    put(tmp_path / "root", "k")
    assert listed(tmp_path / "disk") == ["k"]


def test_leftovers_of_the_dead_are_swept_and_the_living_are_not(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    dead, living, foreign = (tmp_path / ".tmp" / name for name in (TEMP, TEMP[::-1], "notes.txt"))
    for path in (dead, living, foreign):
        path.write_bytes(b"x")
    with living.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        put(tmp_path, "k")
        assert temps(tmp_path) == sorted([living.name, foreign.name])
    put(tmp_path, "k")
    assert temps(tmp_path) == [foreign.name]
    assert listed(tmp_path) == ["k"]


@pytest.mark.parametrize("again", [0, 1], ids=["once", "also as it is swept"])
async def test_temporary_file_that_could_not_be_removed_is_removed_by_a_later_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """ "disk" seed 21: it stayed for as long as the process lived."""
    store, refused = FileStore(tmp_path), [errno.EIO] * (1 + again)
    unlink, fsync, failing = os.unlink, os.fsync, [errno.EIO]

    def refusing(name: str, *, dir_fd: int) -> None:
        if refused:
            raise OSError(refused.pop(), "injected")
        unlink(name, dir_fd=dir_fd)

    def failing_once(fd: int) -> None:
        if failing:
            raise OSError(failing.pop(), "injected")
        fsync(fd)

    await store.put("k", b"data")
    monkeypatch.setattr(os, "unlink", refusing)
    monkeypatch.setattr(os, "fsync", failing_once)
    with pytest.raises(StoreUnavailable):
        await store.put("k", b"data")
    assert len(temps(tmp_path)) == 1
    for _ in range(1 + again):
        await store.put("k", b"data")
    assert temps(tmp_path) == []
    await store.aclose()


def test_a_put_whose_temp_file_was_swept_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, renames = os.rename, []

    def swept(name: str, *args: object, src_dir_fd: int, **kwargs: object) -> None:
        renames.append(name)
        if len(renames) < 3:
            os.unlink(name, dir_fd=src_dir_fd)
        rename(name, *args, src_dir_fd=src_dir_fd, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", swept)
    put(tmp_path, "a/k")
    assert len(set(renames)) == 3
    assert get(tmp_path, "a/k") == b"data"


def test_a_directory_that_keeps_vanishing_ends_a_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanished(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "injected")

    monkeypatch.setattr(os, "rename", vanished)
    with pytest.raises(StoreUnavailable, match="vanishing"):
        put(tmp_path, "a/k")
    assert temps(tmp_path) == []


async def test_a_cancelled_put_that_wakes_up_late_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that hangs does not hold the cancelled call either."""
    fsync, hung, go_on, awake = os.fsync, threading.Event(), threading.Event(), threading.Event()

    def hang(fd: int) -> None:
        if not hung.is_set() and "/.tmp/" in os.readlink(f"/proc/self/fd/{fd}"):
            hung.set()
            go_on.wait(60)
            awake.set()
        fsync(fd)

    monkeypatch.setattr(os, "fsync", hang)

    store = FileStore(tmp_path)
    task = asyncio.create_task(store.put("k", b"first"))
    await asyncio.to_thread(hung.wait, 60)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and not awake.is_set()
    await store.put("k", b"second")
    go_on.set()
    for _ in range(500):
        if not temps(tmp_path):
            break
        await asyncio.sleep(0.01)
    assert temps(tmp_path) == []
    assert bytes(await store.get("k")) == b"second"


def test_a_cancelled_deletion_that_wakes_up_late_removes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush may name those objects again by then."""
    unlink, delete, hung, go_on, ended = os.unlink, FileTree.delete, *(threading.Event() for _ in range(3))

    def hang(name: str, *, dir_fd: int) -> None:
        hung.set()
        go_on.wait(60)
        unlink(name, dir_fd=dir_fd)

    def end(*args: object) -> None:
        delete(*args)  # type: ignore[arg-type]
        ended.set()

    several = ["a/1", "a/2", "b/3", "b/4"]
    for key in several:
        put(tmp_path, key)
    monkeypatch.setattr(os, "unlink", hang)
    monkeypatch.setattr(FileTree, "delete", end)

    async def whole() -> None:
        task = asyncio.create_task(FileStore(tmp_path).delete(several))
        await asyncio.to_thread(hung.wait, 60)
        task.cancel()
        await asyncio.wait([task])
        go_on.set()
        assert await asyncio.to_thread(ended.wait, 60)

    asyncio.run(whole())
    assert len(listed(tmp_path)) == 3


def test_a_scan_lists_no_directory_that_cannot_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in "abc":
        for step in range(3):
            put(tmp_path, f"{run}/chunks/{step}/x")
            put(tmp_path, f"{run}/manifests/{step}/x")
    scandir, seen = os.scandir, []

    def spy(fd: int) -> object:
        seen.append(str(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tmp_path)))
        return scandir(fd)

    monkeypatch.setattr(os, "scandir", spy)

    async def whole() -> None:
        store = FileStore(tmp_path)
        assert await keys(store, "b/manifests/", "b/manifests/1/x") == ["b/manifests/2/x"]
        assert seen == ["b/manifests", "b/manifests/1", "b/manifests/2"]
        seen.clear()
        assert await keys(store, "c/m", "c/chunks/2/x") == [f"c/manifests/{step}/x" for step in range(3)]
        assert seen == ["c", "c/manifests", "c/manifests/0", "c/manifests/1", "c/manifests/2"]

    asyncio.run(whole())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreRefused):
        put(tmp_path, "k")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own, mounted at the returned path."""
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tierd-test", mount], check=True)
    yield mount
    subprocess.run(["umount", mount], check=False, capture_output=True)


@pytest.mark.system
def test_a_full_file_system_is_unavailable_and_keeps_no_scrap(mounted: Path) -> None:
    put(mounted, "run/small", b"x" * 100_000)
    with pytest.raises(StoreUnavailable, match="full"):
        put(mounted, "run/small", b"y" * (2 << 20))
    assert temps(mounted) == []
    assert get(mounted, "run/small") == b"x" * 100_000


@pytest.mark.system
@pytest.mark.parametrize("below", ["", "tierd"], ids=["root is the mount point", "root is below the mount point"])
async def test_unmounted_store_is_unavailable_and_nothing_is_written_to_the_disk_below(
    mounted: Path, below: str
) -> None:
    root = mounted / below
    root.mkdir(exist_ok=True)

    store = FileStore(root)
    await store.put("run/k", b"1")
    await asyncio.to_thread(subprocess.run, ["umount", mounted], check=True)
    for call in (store.put("run/k", b"2"), store.get("run/k"), store.delete(["run/k"]), keys(store)):
        with pytest.raises(StoreUnavailable, match="mounted"):
            await call
    assert os.listdir(mounted) == []
    with pytest.raises(StoreRefused if below else ObjectNotFound):  # a new store knows it only where the root is gone
        await FileStore(root).get("run/k")


def test_mark_made_between_a_call_and_its_check_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two first puts at once: one finds no mark, the other makes it, and the first goes on."""
    store, observe = FileStore(tmp_path), os.stat

    def late(path: str | Path, **kwargs: object) -> os.stat_result:
        try:
            return observe(path, **kwargs)  # type: ignore[arg-type]
        except FileNotFoundError:
            monkeypatch.setattr(os, "stat", observe)
            asyncio.run(store.put("other", b"1"))
            raise

    monkeypatch.setattr(os, "stat", late)
    asyncio.run(store.put("k", b"1"))
    assert listed(tmp_path) == ["k", "other"]


def test_object_whose_kind_cannot_be_read_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 39 of the disk faults: a stale NFS handle, say, and a descriptor was left open for every try."""
    put(tmp_path, "k")

    real = os.fstat

    def fail(fd: int) -> os.stat_result:
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "k"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(StoreUnavailable, match="Stale"):
            get(tmp_path, "k")
    held = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    assert str(tmp_path / "k") not in [os.readlink(fd) for fd in held if fd.is_symlink()]


def test_a_large_object_is_digested_past_the_page_cache(tmp_path, monkeypatch):
    """What memory still has of a put says nothing about the device."""
    asked = []
    real = file_descriptors.set_direct
    monkeypatch.setattr(file_descriptors, "set_direct", lambda fd, on: asked.append(on) or real(fd, on))

    async def work() -> None:
        store = FileStore(tmp_path)
        await store.put("large", bytes(LARGE))
        assert (await store.digest("large"))[0] == LARGE
        await store.aclose()

    asyncio.run(work())
    assert asked == [True]


async def test_an_object_that_becomes_shorter_while_it_is_digested_says_nothing_about_it(tmp_path, monkeypatch):
    monkeypatch.setattr(file_descriptors, "read_into", lambda *_: 0)

    store = FileStore(tmp_path)
    await store.put("k", b"bytes")
    with pytest.raises(StoreUnavailable):
        await store.digest("k")
    await store.aclose()


@pytest.mark.parametrize("where", ["spool", "spool/run/chunks", "link"])
def test_spool_is_refused_as_a_tier_and_above_or_below_it(tmp_path, where):
    Spool(tmp_path / "spool")
    (tmp_path / "spool/run/chunks").mkdir(parents=True)
    (tmp_path / "link").symlink_to("spool/run")
    key = "run/manifests/000000000001.001800000001-00000001/00000-of-00001.json"
    before = sorted(tmp_path.rglob("*"))
    for attempt in (put, lambda root, key: asyncio.run(FileStore(root).delete([key]))):
        with pytest.raises(StoreRefused, match=r"must not be the spool .*/spool or lie in it.* by --spool"):
            attempt(tmp_path / where, key)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "tier").mkdir()
    put(tmp_path / "tier", key)
    assert get(tmp_path / "tier", key) == b"data"


@pytest.mark.parametrize("left", ["nothing", "an empty directory"])
def test_scan_lists_directories_that_replaced_removed_directories(tmp_path, monkeypatch, left: str) -> None:
    """A reader that listed the names of two checkpoints found neither these, which were pruned, nor the newer ones."""
    for step in (1, 3, 4):
        put(tmp_path, f"m/{step}/x")
    scandir, moved = os.scandir, []

    def change(fd: int) -> object:
        if not moved and os.readlink(f"/proc/self/fd/{fd}").endswith("/m/3"):
            moved.append(fd)
            for step in (5, 6):
                put(tmp_path, f"m/{step}/x")
            for step in (3, 4):
                (tmp_path / "m" / f"{step}" / "x").unlink()
                if left == "nothing":
                    (tmp_path / "m" / f"{step}").rmdir()
        return scandir(fd)

    monkeypatch.setattr(os, "scandir", change)

    async def whole() -> None:
        store = FileStore(tmp_path)
        assert await keys(store, "m/") == ["m/1/x", "m/5/x", "m/6/x"]
        assert await keys(store, "m/") == ["m/1/x", "m/5/x", "m/6/x"]

    asyncio.run(whole())


def test_calls_that_wait_when_the_store_is_closed_fail_and_cancel_nobody(tmp_path: Path) -> None:
    """A watch that renews its record during a reload goes on to renew it in the store of the new configuration."""

    async def close_under_calls() -> list[object]:
        store = FileStore(tmp_path)
        calls: list[Awaitable[object]] = [store.put(f"run/{number}", b"x") for number in range(200)]
        calls += [store.get(f"run/{number}") for number in range(200)]
        waiting = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)
        await store.aclose()
        return [*await waiting, *await asyncio.gather(store.get("run/0"), return_exceptions=True)]

    results = asyncio.run(close_under_calls())
    failures = [result for result in results if isinstance(result, BaseException)]
    assert {type(failure) for failure in failures} <= {StoreUnavailable, ObjectNotFound}
    assert isinstance(results[-1], StoreUnavailable)  # of the others a busy machine may have answered all
