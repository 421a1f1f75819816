"""Two directories do not become one run: a second one is refused while the first is watched, and named after that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace as replace_timings
from pathlib import Path
from threading import Event

import msgspec
import pytest
from msgspec.structs import replace
from support import layouts
from support.timed import Ticking, timed
from support.waiting import BOUND_S, wait_until
from support.watched_run import RUN, watching

from tierd.cli import run
from tierd.core.errors import StoreUnavailable
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.intake import watch_records
from tierd.daemon.intake.active_watch import DirectoryId, RunNotWatched, compare_directories, identify_directory
from tierd.daemon.intake.watch_records import RunWatchClaim
from tierd.spool.spool import Spool
from tierd.stores.base import ObjectInfo, Store, octets
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore

TIMINGS = DaemonTimings(silent_s=180.0, wall_ns=Ticking())
A = DirectoryId(node="one", boot="boot-1", path="/data/a", device=8, inode=128, kind="ext4")
B = replace(A, path="/data/b", inode=200)


class Node:
    """One node's watch of the run; with `visible` its spool's lock can be seen by the others."""

    def __init__(
        self,
        store: Store | Callable[[], Store] | None,
        home: Path,
        who: str,
        *,
        visible: bool = True,
        timings: DaemonTimings = TIMINGS,
    ) -> None:
        self.spool = Spool(home / who)
        with self.spool.lock():
            pass
        self.watches = RunWatchClaim(RUN, who * 8, self.spool, store if callable(store) else lambda: store, timings)
        if not visible:
            seen = self.watches._record
            self.watches._record = lambda directory: replace(seen(directory), spool="/elsewhere")  # type: ignore[method-assign]

    async def asks(self, directory: DirectoryId, now_s: float = 0.0) -> bool:
        return await self.watches.confirm_alone(directory, now_s)


async def records(store: Store) -> list[str]:
    return [info.key async for info in store.scan(f"{RUN}/watching/")]


FUSE = replace(B, kind="fuse.sshfs")
NFS = replace(A, node="two", boot="boot-2", path="/mnt/a", device=61, kind="nfs4")


@pytest.mark.parametrize(
    ("one", "other", "likeness"),
    [
        (A, replace(A, path="/link/to/a"), "same"),
        (A, B, "different"),
        (A, replace(A, device=9), "different"),
        (A, NFS, "same"),  # the first exports what the second mounts
        (NFS, replace(NFS, boot="boot-3", path="/other/mount", device=70), "same"),
        (NFS, replace(NFS, device=70), "unknown"),
        (NFS, replace(NFS, boot="boot-3", inode=129), "different"),
        (A, replace(A, node="two", boot="boot-2"), "different"),  # two disks on which the same was done
        (A, replace(A, boot="boot-2", device=9), "same"),  # after a reboot
        (A, FUSE, "unknown"),
        (A, replace(B, kind=""), "unknown"),
        (replace(A, boot=""), replace(B, boot=""), "different"),
    ],
)
def test_likeness_of_two_directories_is_symmetric(one: DirectoryId, other: DirectoryId, likeness: str) -> None:
    assert compare_directories(one, other) == compare_directories(other, one) == likeness


def test_a_directory_is_the_same_by_every_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    a, b, link = (identify_directory(tmp_path / name) for name in ("a", "b", "link"))
    assert compare_directories(a, link) == "same" and compare_directories(a, b) in ("different", "unknown")


async def test_another_directory_is_refused_while_the_first_is_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    one, two = Node(store, tmp_path, "a"), Node(store, tmp_path, "b")
    with one.spool.lock():
        assert await one.asks(A)
        with pytest.raises(RunNotWatched, match=r"'r'.*one:/data/a.*one:/data/b.*--run"):
            await two.asks(B)
        assert await records(store) == ["r/watching/aaaaaaaa.json"], "the first one's record alone is left"
        assert await one.asks(A)
    assert "goes on" not in caplog.text
    assert await two.asks(B, 1.0), "the first daemon was killed: its lock is free, although its record says nothing"
    assert "run 'r' was the run of one:/data/a, and one:/data/b goes on with it" in caplog.text
    assert await records(store) == ["r/watching/bbbbbbbb.json"], "so that the next start does not say it again"


async def test_a_spool_on_a_dead_mount_counts_as_unseen_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, asked = Event(), []

    def hangs(root: Path, lock: tuple[int, int]) -> bool:
        asked.append(root)
        alive.wait(60)
        return True

    store = MemoryStore()
    one, two = Node(store, tmp_path, "a"), Node(store, tmp_path, "b")
    assert await one.asks(A)
    monkeypatch.setattr(watch_records, "is_spool_held", hangs)
    for now_s in (0.0, 1.0):
        assert not await two.asks(B, now_s) and two.watches.awaited
    assert asked == [one.spool.root], "no thread is left behind each time"
    alive.set()
    while not all(answer.done() for answer in two.watches._asked.values()):
        await asyncio.sleep(0.01)
    with pytest.raises(RunNotWatched):
        async with asyncio.timeout(BOUND_S):
            while True:  # on a busy machine the answer may be late
                await two.asks(B, 2.0)


async def test_directory_that_moved_continues_with_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    one, two = Node(store, tmp_path, "a", visible=False), Node(store, tmp_path, "b")
    assert await one.asks(A)
    await one.watches.end()
    assert await two.asks(B), "it ended in order"
    await two.watches.end()
    assert caplog.text.count("goes on") == 1
    assert await Node(store, tmp_path, "b").asks(A), "by the same node"
    assert caplog.text.count("goes on") == 2


async def test_watch_that_cannot_be_checked_is_awaited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    one, two = Node(store, tmp_path, "a", visible=False), Node(store, tmp_path, "b")
    assert await one.asks(A)
    for now_s in (0.0, 3.0, 100.0):
        assert not await two.asks(B, now_s) and "one:/data/a" in two.watches.awaited
    assert caplog.text.count("nothing is taken") == 1
    await one.watches.renew(90.0)
    for now_s in (101.0, 200.0):
        with pytest.raises(RunNotWatched, match="--run"):
            await two.asks(B, now_s)
    assert await records(store) == ["r/watching/aaaaaaaa.json"]
    assert await two.asks(B, 281.0) and not two.watches.awaited, "it has been silent for three minutes"
    assert "goes on" in caplog.text


def test_nodes_that_watch_one_directory_continue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        store = MemoryStore()
        nodes = [Node(store, tmp_path, who) for who in "abc"]
        mounted = (NFS, replace(NFS, node="three", boot="boot-3", path="/scratch/a"), A)
        for node, directory in zip(nodes, mounted, strict=True):
            with node.spool.lock():
                assert await node.asks(directory)
        assert len(await records(store)) == 3

    asyncio.run(play())
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


async def test_two_watches_that_begin_at_the_same_time_do_not_both_continue(tmp_path: Path) -> None:
    class NoteExchange(MemoryStore):
        """Both watches have put their record before either lists again."""

        def __init__(self) -> None:
            super().__init__()
            self.puts, self.met = 0, asyncio.Event()

        async def put(self, key, data, *args, **kwargs):  # type: ignore[no-untyped-def]
            await super().put(key, data, *args, **kwargs)
            self.puts += 1
            if self.puts == 2:
                self.met.set()
            await self.met.wait()
            return ""

    store = NoteExchange()
    one, two = Node(store, tmp_path, "a"), Node(store, tmp_path, "b")
    with one.spool.lock(), two.spool.lock():
        found = await asyncio.gather(one.asks(A), two.asks(B), return_exceptions=True)
    assert sum(isinstance(each, RunNotWatched) for each in found) >= 1


async def test_a_watch_that_did_not_run_for_long_is_compared_again(tmp_path: Path) -> None:
    store = MemoryStore()
    stopped, two = Node(store, tmp_path, "a", visible=False), Node(store, tmp_path, "b")
    assert await stopped.asks(A)
    assert not await two.asks(B, 0.0) and await two.asks(B, 180.0)
    await stopped.watches.renew(90.0)
    with two.spool.lock(), pytest.raises(RunNotWatched):
        await stopped.asks(A, 400.0)


async def test_a_watch_with_nothing_to_take_renews_its_record_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may be over for months, and each request costs. Others wait as long as the record says."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.extend([seconds] if seconds else [])  # a store in memory sleeps for none
        if len(slept) == 8:
            raise asyncio.CancelledError

    store = MemoryStore()
    one, two = Node(store, tmp_path, "a", visible=False), Node(store, tmp_path, "b")
    assert await one.asks(A)
    monkeypatch.setattr(watch_records.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await one.watches.keep_renewing(lambda: len(slept) < 6)
    monkeypatch.undo()
    assert slept == [90.0, 180.0, 360.0, 600.0, 600.0, 600.0, 90.0, 90.0]
    await one.watches.renew(600.0)
    assert not await two.asks(B, 0.0) and not await two.asks(B, 1199.0)
    assert await two.asks(B, 1200.0)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_record_is_renewed_on_the_store_that_a_reload_opened(elsewhere: bool, tmp_path: Path) -> None:
    """The former store is closed then. On another first tier the others are compared anew."""

    async def record() -> bytes:
        return bytes(octets(await stores[-1].get("r/watching/aaaaaaaa.json")))

    tiers = [tmp_path / "tier", tmp_path / "other" if elsewhere else tmp_path / "tier"]
    for tier in tiers:
        tier.mkdir(exist_ok=True)
    stores = [FileStore(tiers[0])]
    one = Node(lambda: stores[-1], tmp_path, "a", visible=False)
    assert await one.asks(A)
    await stores[0].aclose()
    stores.append(FileStore(tiers[1]))
    assert await one.asks(A), "which puts it at once"
    for _ in range(2):
        before = await record()
        await one.watches.renew(90.0)
        assert await record() != before
    await one.watches.end()
    assert b'"ended":true' in await record()
    await stores[1].aclose()


async def test_an_error_that_nobody_foresaw_does_not_end_the_renewals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(MemoryStore):
        broken = True

        async def put(self, key, data, *args, **kwargs):  # type: ignore[no-untyped-def]
            if self.broken and "aaaaaaaa" in key:
                raise RuntimeError("nobody foresaw it")
            return await super().put(key, data, *args, **kwargs)

    store = Broken()
    store.broken = False
    one = Node(store, tmp_path, "a", timings=replace_timings(TIMINGS, silent_s=0.02))
    assert await one.asks(A)
    before = await store.get("r/watching/aaaaaaaa.json")
    store.broken = True
    renewing = asyncio.ensure_future(one.watches.keep_renewing(lambda: False))
    while "nobody foresaw it" not in caplog.text:
        await asyncio.sleep(0.01)
    store.broken = False
    while await store.get("r/watching/aaaaaaaa.json") == before:
        assert not renewing.done()
        await asyncio.sleep(0.01)
    renewing.cancel()


async def test_directory_that_is_made_anew_is_the_watched_directory(tmp_path: Path) -> None:
    store = MemoryStore()
    one, two = Node(store, tmp_path, "a"), Node(store, tmp_path, "b")
    with one.spool.lock():
        assert await one.asks(A) and await one.asks(replace(A, inode=130))
        await one.watches.renew(90.0)
        assert await two.asks(replace(A, inode=130))


async def test_a_tier_that_is_away_is_asked_when_it_answers(tmp_path: Path) -> None:
    class Away(MemoryStore):
        away = True

        async def scan(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
            if self.away:
                raise StoreUnavailable("away")
            async for info in super().scan(prefix, after):
                yield info

    store = Away()
    one, two = Node(store, tmp_path, "a"), Node(store, tmp_path, "b")
    assert await one.asks(A) and await two.asks(B)
    store.away = False
    with one.spool.lock():
        assert await one.asks(A)
        with pytest.raises(RunNotWatched):
            await two.asks(B)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 100, b'{"version":2,"directory":"x"}', b"[" * 70000])
async def test_a_record_that_cannot_be_read_counts_as_absent(data: bytes, tmp_path: Path) -> None:
    store = MemoryStore()
    await store.put("r/watching/cccccccc.json", data)
    await store.put("r/watching/other", data)
    assert await Node(store, tmp_path, "a").asks(A)


def test_a_second_command_on_another_directory_ends_with_3(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed(monkeypatch, watch_s=0.02)
    home = root.parent
    (home / "tier").mkdir()
    (home / "second").mkdir()
    layouts.torch_save(home / "second")
    with watching(home, "one"):
        wait_until(lambda: list((home / "tier" / RUN).glob("watching/*")))
        assert run(["watch", str(home / "second"), "--run", RUN, "--to", f"file://{home}/tier", "--until-idle"]) == 3
    reported = capsys.readouterr().err
    assert all(text in reported for text in (f":{root},", f":{home}/second ", "--run")), reported
    assert not list((home / "tier" / RUN).glob("manifests/*/*"))


async def test_node_with_the_same_id_on_another_machine_is_refused_while_the_first_watches(tmp_path: Path) -> None:
    """One spool is a copy of the other's volume. The second one took the record for its own, and pruned the first's."""
    elsewhere = replace(B, boot="boot-2")

    store = MemoryStore()
    one, two = Node(store, tmp_path / "one", "a"), Node(store, tmp_path / "two", "a")
    with one.spool.lock():
        assert await one.asks(A)
        before = await store.get("r/watching/aaaaaaaa.json")
        assert not await two.asks(elsewhere) and two.watches.awaited
        assert await store.get("r/watching/aaaaaaaa.json") == before, "the second one replaced the first's record"
        await one.watches.renew(90.0)
        with pytest.raises(RunNotWatched, match="one:/data/a"):
            await two.asks(elsewhere, 60.0)
        assert await one.asks(A, 61.0)


async def test_dead_watch_of_a_spool_of_equal_path_and_lock_on_another_machine_refuses_nothing(
    tmp_path: Path,
) -> None:
    """Machines of one kind give a spool one path and its lock one number; this daemon itself holds the lock here."""

    store = MemoryStore()
    node = Node(store, tmp_path, "b")
    with node.spool.lock():
        record = node.watches._record(replace(A, node="two", boot="boot-2"))
        await store.put("r/watching/cccccccc.json", msgspec.json.encode(record))
        assert not await node.asks(B)
        assert await node.asks(B, 2 * record.every_s)


async def test_restart_on_one_machine_watches_another_directory_at_once(tmp_path: Path) -> None:
    store = MemoryStore()
    node = Node(store, tmp_path, "a")
    with node.spool.lock():
        assert await node.asks(A)
        node.watches = RunWatchClaim(RUN, "aaaaaaaa", node.spool, lambda: store, TIMINGS)  # it was killed
        assert await node.asks(B)
