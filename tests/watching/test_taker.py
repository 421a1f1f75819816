"""Several nodes watch one directory: one node reads each unit, and none is lost when that node or the tier is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.timed import Ticking, timed
from support.waiting import wait_until
from support.watched_run import RUN, flush, take, watching
from support.world import Daemon

from tierd.core.errors import DeleteRefused, StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.intake import unit_watch
from tierd.daemon.tiers.announcements import IngestClaim
from tierd.spool.spool import Spool
from tierd.stores.base import ObjectInfo, Store
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore

ONE, TWO = (CheckpointId(RUN, f"0123456789ab-{n:08x}", n) for n in (1, 2))
TIMINGS = DaemonTimings(renew_s=30.0, silent_s=180.0, yield_s=3600.0, wall_ns=Ticking())


def taker(store: Store | None, who: str) -> IngestClaim:
    return IngestClaim(RUN, who * 8, lambda: store, TIMINGS)


async def keys(store: Store) -> list[str]:
    return [info.key async for info in store.scan(f"{RUN}/")]


async def test_one_node_takes_and_the_other_waits_until_it_is_done() -> None:
    store = MemoryStore()
    one, two = taker(store, "a"), taker(store, "b")
    assert await one.may_take(ONE, 0.0) and one.is_claimed
    for now_s in (0.0, 20.0, 40.0):
        assert not await two.may_take(TWO, now_s), "one node takes at a time from a run, whatever the names"
    await one.release()
    assert await keys(store) == []
    assert await two.may_take(ONE, 60.0) and two.is_claimed and not one.is_claimed


async def test_an_announcement_that_is_not_renewed_is_a_dead_nodes() -> None:
    store = MemoryStore()
    dead, two = taker(store, "a"), taker(store, "b")
    assert await dead.may_take(ONE, 0.0)
    assert not await two.may_take(ONE, 1000.0), "the time counts from when this node saw it"
    assert not await two.may_take(ONE, 1179.0)
    assert await two.may_take(ONE, 1200.0) and two.is_claimed


async def test_a_living_nodes_unit_is_left_to_it_for_an_hour() -> None:
    store = MemoryStore()
    stuck, two = taker(store, "a"), taker(store, "b")
    assert await stuck.may_take(ONE, 0.0)
    for now_s in range(0, 3600, 60):
        await stuck.renew()
        assert len(await keys(store)) == 1
        assert not await two.may_take(ONE, float(now_s))
    assert await two.may_take(ONE, 3600.0) and not two.is_claimed
    assert not await two.may_take(TWO, 3601.0), "the next one is left to it again"


async def test_two_nodes_that_announce_at_the_same_time_both_withdraw() -> None:
    class Board(MemoryStore):
        """Both nodes have put their announcement before either lists again."""

        def __init__(self) -> None:
            super().__init__()
            self.puts, self.met = 0, asyncio.Event()

        async def put(self, key, data, *args, **kwargs):  # type: ignore[no-untyped-def]
            await super().put(key, data, *args, **kwargs)
            self.puts += 1
            if self.puts == 2:
                self.met.set()
            await self.met.wait()

    store = Board()
    one, two = taker(store, "a"), taker(store, "b")
    assert await asyncio.gather(one.may_take(ONE, 0.0), two.may_take(ONE, 0.0)) in ([False, False], [True, False])
    assert not (one.is_claimed and two.is_claimed)
    for now_s in range(10, 1000, 10):
        if await one.may_take(ONE, float(now_s)):
            break
    assert one.is_claimed and not await two.may_take(ONE, 2000.0)


async def test_a_tier_that_does_not_answer_keeps_no_unit_from_being_taken() -> None:
    class Down(MemoryStore):
        async def scan(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
            raise StoreUnavailable("down")
            yield

    for store in (None, Down()):
        one = taker(store, "a")
        assert await one.may_take(ONE, 0.0) and not one.is_claimed


async def test_nothing_is_announced_again_where_nothing_can_be_deleted() -> None:
    class AppendOnly(MemoryStore):
        async def delete(self, keys):  # type: ignore[no-untyped-def]
            raise DeleteRefused("append-only")

    store = AppendOnly()
    one = taker(store, "a")
    assert await one.may_take(ONE, 0.0)
    await one.renew()
    for now_s in (100.0, 200.0, 300.0):
        await one.renew()
        await one.release()
        assert await one.may_take(TWO, now_s) and not one.is_claimed
    assert len(await keys(store)) == 2


async def test_an_announcement_is_renewed_and_withdrawn_on_the_store_that_a_reload_opened(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    stores = [FileStore(tmp_path / "tier")]
    one = IngestClaim(RUN, "a" * 8, lambda: stores[-1], TIMINGS)
    assert await one.may_take(ONE, 0.0) and one.is_claimed
    before = await keys(stores[0])
    await stores[0].aclose()
    stores.append(FileStore(tmp_path / "tier"))
    await one.renew()
    after = await keys(stores[1])
    assert len(after) == 1 and after != before
    await stores[1].aclose()
    stores.append(FileStore(tmp_path / "tier"))
    await one.release()
    assert await keys(stores[2]) == []
    await stores[2].aclose()


async def test_a_release_on_a_closed_store_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    store = FileStore(tmp_path / "tier")
    found: list[Store | None] = [store]
    one = IngestClaim(RUN, "a" * 8, lambda: found[-1], TIMINGS)
    assert await one.may_take(ONE, 0.0) and one.is_claimed
    await store.aclose()
    found.append(None)  # a reload opened another, which is not observed yet
    await one.release()
    assert not one.is_claimed


async def test_an_error_that_nobody_foresaw_does_not_end_the_announcements(caplog: pytest.LogCaptureFixture) -> None:
    store, broken = MemoryStore(), [0]
    one = IngestClaim(RUN, "a" * 8, lambda: store if not broken[-1] else 1 // 0, replace(TIMINGS, renew_s=0.01))  # type: ignore[arg-type,return-value]
    assert await one.may_take(ONE, 0.0) and one.is_claimed
    before = await keys(store)
    broken.append(1)
    renewing = asyncio.ensure_future(one.keep_renewing())
    while "ZeroDivisionError" not in caplog.text:
        await asyncio.sleep(0.01)
    broken.append(0)
    while await keys(store) == before:
        assert not renewing.done()
        await asyncio.sleep(0.01)
    renewing.cancel()


# -- daemons ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each unit was read, by its path."""
    found: Counter[str] = Counter()
    stage_unit = unit_watch.stage_unit

    def counted(tree, unit, *arguments):  # type: ignore[no-untyped-def]
        found[unit.path] += 1
        return stage_unit(tree, unit, *arguments)

    monkeypatch.setattr(unit_watch, "stage_unit", counted)
    return found


def save(root: Path, *steps: int) -> None:
    for step in steps:
        torch.save({"w": torch.rand(3000)}, root / f"model_step{step}.pt")


def manifests(home: Path) -> int:
    return len(list((home / "tier" / RUN).glob("manifests/*/*.json")))


def settled(*daemons: Daemon) -> bool:
    return not any(daemon.intake.busy for daemon in daemons)  # type: ignore[attr-defined]


def test_each_unit_is_read_by_one_of_two_nodes(root: Path, reads: Counter[str], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    timed(monkeypatch, watch_s=0.02, settle_s=0.05, renew_s=0.3, silent_s=3600.0)
    home = root.parent
    (home / "tier").mkdir()
    save(root, 1, 2, 3)
    with watching(home, "one") as one, watching(home, "two") as two:
        wait_until(lambda: manifests(home) == 3 and settled(one, two))
        for count in (4, 5, 6):
            save(root, count)
            wait_until(lambda n=count: manifests(home) == n and settled(one, two))
        wait_until(lambda: not list((home / "tier" / RUN).glob("flushing/*/*")))
    assert set(reads.values()) == {1} and len(reads) == 6
    found = [CheckpointId.parse(RUN, path.name) for path in (home / "tier" / RUN / "manifests").iterdir()]
    assert len({one.attempt for one in found if one}) == 1, "all are of one attempt, because the nodes take turns"


KILLED = """
import sys, time
from support.timed import give
from tierd.cli import run
from tierd.daemon.intake import unit_watch
give(watch_s=0.02, renew_s=0.1, settle_s=0.05)

def stuck(*arguments):
    print("taking", flush=True)
    time.sleep(3600)

unit_watch.stage_unit = stuck
run(["watch", sys.argv[1], "--run", "r", "--to", sys.argv[2], "--spool", sys.argv[3]])
"""


def test_a_node_that_is_killed_while_it_takes_is_followed_by_another(
    root: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, watch_s=0.02, settle_s=0.05, renew_s=0.1, silent_s=2.0)
    home = root.parent
    (home / "tier").mkdir()
    save(root, 1)
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", KILLED, str(root), f"file://{home}/tier", str(home / "one")]
    environment = {**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        while killed.stdout.readline().strip() not in ("taking", ""):
            pass
        with watching(home, "two") as two:
            assert not two.intake.busy or not reads  # type: ignore[attr-defined]
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            wait_until(lambda: manifests(home) == 1 and settled(two))
    assert reads == {"model_step1.pt": 1}


def test_node_lists_the_units_of_another_taker_while_it_waits_for_its_turn(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, watch_s=0.02, settle_s=0.05, renew_s=0.1, silent_s=3600.0)
    home = root.parent
    (home / "tier").mkdir()

    async def hold() -> None:
        """Announce, as a node does that goes on to take."""
        store = FileStore(home / "tier")
        assert await taker(store, "a").may_take(ONE, 0.0)
        await store.aclose()

    asyncio.run(hold())
    with watching(home, "two", rescan="1s") as two:
        for step in (1, 2):
            save(root, step)
            wait_until(lambda: two.intake.busy)  # type: ignore[attr-defined]
            other = Spool(home / f"other{step}")
            take(other, root)
            flush(other, home / "tier")
            wait_until(lambda: settled(two))
        assert not list(two.spool.parts(RUN))


def test_a_tier_that_is_down_loses_nothing(root: Path, reads: Counter[str], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    timed(monkeypatch, watch_s=0.02, settle_s=0.05, renew_s=0.1, silent_s=3600.0, backoff_s=0.05)
    home = root.parent
    save(root, 1)
    down = [True]
    for name in ("scan", "put"):
        whole = getattr(FileStore, name)

        def failing(store, *arguments, whole=whole, **more):  # type: ignore[no-untyped-def]
            if down:
                raise StoreUnavailable("down")
            return whole(store, *arguments, **more)

        monkeypatch.setattr(FileStore, name, failing)
    (home / "tier").mkdir()
    with watching(home, "one") as one, watching(home, "two") as two:
        wait_until(lambda: reads["model_step1.pt"] == 2)
        down.clear()
        wait_until(lambda: manifests(home) == 1 and settled(one, two))
    assert manifests(home) == 1
