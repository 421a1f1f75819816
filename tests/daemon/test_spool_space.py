"""A disk that is full gives up what a tier has, at once, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path

import pytest
from support.doubles import Double, contents
from support.smalldisk import SmallDisk
from support.timed import timed
from support.waiting import until, wait_until
from support.world import Daemon, commit, converge, part, reconciler, running, steps_on

from tierd.core.errors import StoreUnavailable
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Attach, MakeRoom

MIB = 1 << 20


@pytest.fixture
def disk(spool, monkeypatch):
    return SmallDisk(monkeypatch, spool.root, 6 * MIB)


def fill(spool, *which) -> None:
    for one in which:
        commit(spool, one, {"weights": bytes(MIB)})


def runs(spool) -> list[tuple[str, int]]:
    return sorted((one.checkpoint.run, one.checkpoint.step) for one in spool.parts())


def test_runs_without_a_trainer_give_way_first(spool, disk):
    fill(spool, part(1, launch=2, run="old"), part(2, launch=2, run="old"), part(1), part(2))
    for which in spool.parts():
        an_hour_ago = time.time() - 3600
        os.utime(spool.path(which) / "manifest.json", (an_hour_ago, an_hour_ago))
    with Daemon(spool.root, {"tier": Double()}) as daemon, DaemonConnection(spool) as link:
        link.ask(Attach(run="run"))
        daemon.settle()
        answer = link.ask(MakeRoom(run="run", size_bytes=12 * MIB // 5))
        assert answer["enough"] and answer["freed_bytes"] >= MIB
        assert runs(spool) == [("old", 2), ("run", 1), ("run", 2)]
        assert daemon.reconciler.journal.counters["pruned"] == 1
        link.ask(MakeRoom(run="run", size_bytes=3 * MIB))
        assert runs(spool) == [("run", 1), ("run", 2)]


def test_the_newest_of_a_run_that_trains_is_the_last_resort(spool, disk):
    fill(spool, part(1), part(2), part(3))
    with Daemon(spool.root, {"tier": Double()}) as daemon, DaemonConnection(spool) as link:
        link.ask(Attach(run="run"))
        daemon.settle()
        link.ask(MakeRoom(run="run", size_bytes=4 * MIB))
        assert runs(spool) == [("run", 3)]
        link.ask(MakeRoom(run="run", size_bytes=5 * MIB))
        assert runs(spool) == []
        assert steps_on(asyncio.run(contents(daemon.reconciler.stores["tier"].inner))) == [1, 2, 3]


def test_tier_that_was_down_gets_its_wanted_checkpoints_of_a_run_whose_last_local_copy_was_evicted(spool, disk):
    """Only the node that saved a run sends it from tier to tier; what a full disk takes must not end that."""
    near, far = Double(), Double()
    far.error = StoreUnavailable("down")
    old = [part(step, run="old") for step in (1, 2, 3)]
    fill(spool, *old)
    stores = {"near": near, "far": far}
    with Daemon(spool.root, stores) as daemon, DaemonConnection(spool) as link:
        wait_until(lambda: all(daemon.reconciler.tiers.observed.has(one, "near") for one in old))
        link.ask(MakeRoom(run="run", size_bytes=5 * MIB))
        assert runs(spool) == []
        wait_until(lambda: not (spool.root / "old").exists())
        far.error = None
        daemon.loop.call_soon_threadsafe(daemon.reconciler.retry_now)
        wait_until(lambda: all(daemon.reconciler.tiers.observed.has(one, "far") for one in old))
    assert steps_on(asyncio.run(contents(far.inner))) == [1, 2, 3]
    assert runs(spool) == []


def test_copy_on_no_tier_is_not_evicted_and_the_wait_for_room_is_bounded(spool, disk, monkeypatch):
    timed(monkeypatch, room_s=0.3)
    store = Double()
    store.error = StoreUnavailable("down")
    fill(spool, part(1), part(2))
    with Daemon(spool.root, {"tier": store}), DaemonConnection(spool) as link:
        answer = link.ask(MakeRoom(run="run", size_bytes=5 * MIB))
        assert (answer["enough"], answer["freed_bytes"]) == (False, 0)
    assert runs(spool) == [("run", 1), ("run", 2)]


def test_copy_that_its_tier_lost_is_not_evicted(spool, disk, monkeypatch):
    """The look goes by names; the tier is asked once more."""
    timed(monkeypatch, room_s=0.3)
    store = Double()
    fill(spool, part(1))
    with Daemon(spool.root, {"tier": store}) as daemon, DaemonConnection(spool) as link:
        daemon.settle()
        store.error = StoreUnavailable("down")
        link.ask(MakeRoom(run="run", size_bytes=6 * MIB))
        assert runs(spool) == [("run", 1)]


@pytest.mark.parametrize(("fault", "seconds"), [(StoreUnavailable("down"), 0.0), (None, 60.0)], ids=["fails", "stalls"])
def test_copy_is_evicted_although_the_first_of_its_tiers_does_not_answer(spool, disk, fault, seconds):
    """`faults simulation --only 1000145`: the save met a full disk twice, though another tier held verified copies."""
    near, far = Double(), Double()
    fill(spool, part(1), part(2), part(3))
    with Daemon(spool.root, {"near": near, "far": far}) as daemon, DaemonConnection(spool) as link:
        link.ask(Attach(run="run"))
        daemon.settle()
        near.error, near.delay = fault, seconds
        answer = link.ask(MakeRoom(run="run", size_bytes=5 * MIB // 2))
        assert answer["enough"] and runs(spool) == [("run", 2), ("run", 3)]
        assert ("get", part(1).manifest_key) in far.calls
        near.delay = 0.0


def test_room_under_a_quota_counts_the_deleted_bytes(spool, monkeypatch):
    """The file system has much free; this user has not."""
    fill(spool, part(1), part(2), part(3))
    with Daemon(spool.root, {"tier": Double()}) as daemon, DaemonConnection(spool) as link:
        daemon.settle()
        assert link.ask(MakeRoom(run="run", size_bytes=1000))["freed_bytes"] == 0
        assert link.ask(MakeRoom(run="run", size_bytes=1000, quota=True))["freed_bytes"] == MIB
        assert runs(spool) == [("run", 2), ("run", 3)]


async def test_a_copy_that_cannot_be_removed_holds_up_no_other(spool, monkeypatch):
    stores = {"tier": Double()}
    for run in ("a", "b"):
        for step in range(4):
            commit(spool, part(step, run=run))
    await converge(spool, stores, keep_local=100)
    rename, stuck = Path.rename, spool.path(part(0, run="a"))

    def refuse(path, target):
        if path == stuck:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    async with running(reconciler(spool, stores, keep_local=2)) as daemon:
        await until(lambda: runs(spool) == [("a", 0), ("a", 2), ("a", 3), ("b", 2), ("b", 3)])
        await daemon.room.make("b", 1 << 50)
        assert runs(spool) == [("a", 0)]


def test_disk_without_inodes_gives_up_a_copy_although_it_has_space(spool, monkeypatch):
    fill(spool, part(1), part(2), part(3))
    full = os.statvfs(spool.root)
    members = [getattr(full, name) for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail")]
    members += [10**6, 3, 3, full.f_flag, full.f_namemax]
    with Daemon(spool.root, {"tier": Double()}) as daemon, DaemonConnection(spool) as link:
        link.ask(Attach(run="run"))
        daemon.settle()
        assert link.ask(MakeRoom(run="run", size_bytes=MIB // 2))["freed_bytes"] == 0
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(members))
        assert link.ask(MakeRoom(run="run", size_bytes=MIB // 2))["freed_bytes"] >= MIB
        assert runs(spool) == [("run", 2), ("run", 3)]
