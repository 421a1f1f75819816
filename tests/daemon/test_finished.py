"""A node serves job after job: finished runs leave its spool, once a tier was seen to hold them, and no others do."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import msgspec
from support.doubles import Double, contents, is_chunk
from support.timed import timed
from support.waiting import until
from support.world import Daemon, commit, converge, part, reconciler, running, settle, steps_in, steps_on

from tierd.core.config import from_urls
from tierd.core.errors import StoreUnavailable
from tierd.core.ids import pin_key
from tierd.core.planning.demand import Demand
from tierd.core.planning.eviction import superseded_copies
from tierd.daemon import daemon_service
from tierd.daemon.reconciling.client_requests import TrainerActivity
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Attach, CandidatesRequest, Pin
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore

DAYS = 2 * 86400


def age(spool, seconds: float = DAYS) -> None:
    """As if everything in the spool had been committed that long ago."""
    for which in spool.parts():
        path = spool.path(which) / "manifest.json"
        os.utime(path, (time.time() - seconds,) * 2)
    for mark in (spool.control / "saved").glob("*/*"):
        os.utime(mark, (time.time() - seconds,) * 2)


def test_finished_run_leaves_the_spool_and_is_kept_on_the_tier(spool):
    store = Double()
    for step in (1, 2, 3):
        commit(spool, part(step))
    asyncio.run(converge(spool, {"tier": store}))
    assert steps_in(spool) == [1, 2, 3], "it may go on"
    age(spool)
    daemon = asyncio.run(converge(spool, {"tier": store}))
    assert steps_in(spool) == [] and not (spool.root / "run").exists()
    assert steps_on(asyncio.run(contents(store))) == [1, 2, 3]
    assert daemon.journal.counters["pruned"] == 3
    assert all(event.place == "local" for event in daemon.journal.events if event.what == "pruned")


def test_tier_of_a_run_that_left_the_spool_is_not_observed_any_more(spool):
    store = Double()
    commit(spool, part(1))
    asyncio.run(converge(spool, {"tier": store}))
    age(spool)

    async def at_rest() -> list[str]:
        async with running(await converge(spool, {"tier": store})) as daemon:
            await settle(daemon)
            store.calls.clear()
            for _ in range(3):
                await daemon.observe("tier")
            return [key for _, key in store.calls]

    assert asyncio.run(at_rest()) == []


async def test_no_run_leaves_that_is_not_verified_on_a_tier(spool):
    store = Double()
    for step in (1, 2):
        commit(spool, part(step))
    age(spool)
    store.error = StoreUnavailable("down")
    async with running(reconciler(spool, {"tier": store})) as daemon:
        await until(lambda: daemon.workers["tier"].last_error)
        await daemon.observe("local")
        daemon.wake()
        await until(lambda: not daemon.workers["local"].wake.is_set())
    assert steps_in(spool) == [1, 2]


def test_chunk_that_a_tier_lost_is_detected_before_the_run_leaves(spool):
    """A look goes by names: the chunks are asked for once more before the only other copy goes."""
    store = Double()
    commit(spool, part(1))
    asyncio.run(converge(spool, {"tier": store}))
    lost = next(key for key in sorted(asyncio.run(contents(store))) if is_chunk(key))
    asyncio.run(store.inner.delete([lost]))
    age(spool)
    asyncio.run(converge(spool, {"tier": store}))
    assert lost in asyncio.run(contents(store)), "it was sent again first"
    assert steps_in(spool) == []


def test_pins_leave_the_spool_with_the_run_and_are_kept_on_the_tier(spool):
    store = Double()
    for step in (1, 2, 3):
        commit(spool, part(step))
    with Daemon(spool.root, {"tier": store}) as daemon, DaemonConnection(spool) as link:
        daemon.settle()
        link.ask(Pin(checkpoint=part(1).checkpoint, pinned=True))
    age(spool)
    asyncio.run(converge(spool, {"tier": store}))
    assert steps_in(spool) == [] and not spool.pins() and not (spool.root / "run").exists()
    found = asyncio.run(contents(store))
    assert pin_key(part(1).checkpoint) in found and steps_on(found) == [1, 2, 3]


def test_run_with_a_trainer_is_kept_and_leaves_after_the_trainer_ended(spool, monkeypatch):
    store, other = Double(), part(7, run="other")
    for which in (part(1), other):
        commit(spool, which)
    with Daemon(spool.root, {"tier": store}) as daemon:
        with DaemonConnection(spool) as link:
            link.ask(Attach(run="run"))
            age(spool)
            daemon.settle()
            assert [one.checkpoint.run for one in spool.parts()] == ["run"]
            monkeypatch.setattr(TrainerActivity, "note_request", lambda self, run: None)  # as if it had left a day ago
        daemon.settle()
        daemon.call(until(lambda: not spool.parts()))


def test_runs_are_kept_while_a_trainer_does_not_say_its_run(spool):
    commit(spool, part(1))
    with Daemon(spool.root, {"tier": Double()}) as daemon, DaemonConnection(spool) as link:
        link.ask(Attach())
        age(spool)
        daemon.settle()
        assert steps_in(spool) == [1]


def test_interest_in_a_run_that_the_spool_has_nothing_of_is_lost(spool):
    with Daemon(spool.root, {"tier": Double()}, finished="0s") as daemon, DaemonConnection(spool) as link:
        link.ask(CandidatesRequest(run="elsewhere"))
        daemon.call(daemon.reconciler.observe("local"))
        assert not daemon.reconciler.requests.requested_runs


def test_a_run_is_looked_for_until_the_slowest_tier_has_answered(spool, tmp_path):
    """Else the answer is that no tier has it, and the restore is a fresh start. Simulation, seed 1000016."""
    there = MemoryStore()
    fill = Spool(tmp_path / "another")
    commit(fill, part(1, run="elsewhere"))
    asyncio.run(flush(fill, part(1, run="elsewhere"), TierUploadContext(there)))
    slow = Double()
    stores = {"quick": there, "slow": slow}
    with Daemon(spool.root, stores, finished="0s") as daemon, DaemonConnection(spool) as link:
        daemon.settle()
        slow.delay = 1.0
        views: list[dict] = []
        asked = threading.Thread(target=lambda: views.append(link.ask(CandidatesRequest(run="elsewhere"))["sight"]))
        asked.start()
        while asked.is_alive():
            daemon.call(daemon.reconciler.observe("quick"))
            time.sleep(0.02)  # a daemon that observes without a pause takes a core
    assert views[0].get("whole")


def test_attach_returns_the_number_of_checkpoints_that_the_spool_keeps(spool):
    with Daemon(spool.root, {"tier": Double()}, keep=7, keep_local=2), DaemonConnection(spool) as link:
        assert link.ask(Attach(run="run"))["keep_last"] == 2


def test_only_copy_is_not_deleted_because_of_an_old_listing_of_a_tier(spool, monkeypatch):
    """As when a daemon goes on after hours in which it was stopped (simulation, seed 1000160): others have pruned the
    tier since, and what retired the copy there is gone."""
    timed(monkeypatch, aged_s=0.0)
    store = Double()
    for step in (2, 3):
        commit(spool, part(step))
    asyncio.run(converge(spool, {"tier": store}, keep=3))
    spool.remove([part(2), part(3)])
    for step in (1, 4):
        commit(spool, part(step))

    async def work() -> None:
        daemon = reconciler(spool, {"tier": store}, keep=3)
        await daemon.observe("tier")
        await daemon._live.observe()
        assert part(1).checkpoint in superseded_copies(Demand(daemon.inventory(), daemon.config, "run"))
        for key in await contents(store):
            await store.delete([key])
        assert not await daemon._pruner.release(part(1).checkpoint, ())
        await daemon.observe("tier")
        assert not await daemon._pruner.release(part(1).checkpoint, ())

    asyncio.run(work())
    assert steps_in(spool) == [1, 4]


def test_daemon_whose_clock_is_year_ahead_deletes_no_run_from_spool(spool, tmp_path, monkeypatch):
    """docs/explanation/deletion.md, "A finished run leaves the spool": the clock of one daemon finishes no run."""
    (tmp_path / "tier").mkdir()
    config = msgspec.structs.replace(from_urls(str(spool.root), [f"file://{tmp_path}/tier"]), min_free_percent=0.0)
    commit(spool, part(1))

    def serve_until_idle() -> list[int]:
        asyncio.run(daemon_service.serve(config, until_idle=True))
        return steps_in(spool)

    now = time.time
    assert serve_until_idle() == [1]
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now() + 365 * 86400)
        assert serve_until_idle() == [1], "its checkpoint was made seconds ago"
    assert serve_until_idle() == [1]
    age(spool)
    # A daemon that is idle does not wait for its prunes, so on a busy machine a later one makes them.
    assert any(serve_until_idle() == [] for _ in range(10)), "the daemon before has seen that it is old"
