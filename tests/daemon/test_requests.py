"""What trainers and the command line ask for: a part to hold, candidates, pins; answered from a fresh look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from support.doubles import Double, contents, is_manifest
from support.waiting import wait_until
from support.world import RUN, Daemon, commit, content, part, read

from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.core.timeline.run_view import RunView
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.message_codec import read_member
from tierd.ipc.messages import CandidatesRequest, Fetch, Pin, ReportRequest, StatusRequest
from tierd.spool.spool import Spool
from tierd.stores.base import ObjectInfo
from tierd.stores.memory_store import MemoryStore


def test_fetched_part_of_a_connection_is_held_until_it_ends(spool):
    store = Double()
    for step in range(4):
        commit(spool, part(step))
    with Daemon(spool.root, {"tier": store}) as daemon:
        daemon.settle()
    with Daemon(spool.root, {"tier": store}, keep=100, keep_local=1) as daemon:
        daemon.settle()
        assert daemon.spool.parts() == [part(3)]
        with DaemonConnection(spool) as link:
            assert link.ask(Fetch(part=part(0)))["tiers"] == ["tier"]
            daemon.settle()
            assert read(spool, part(0)) == content(0)
        wait_until(lambda: daemon.spool.parts() == [part(3)])


def test_fetch_whose_caller_disconnects_ends_its_hold(spool):
    store = Double()
    commit(spool, part(0))
    with Daemon(spool.root, {"tier": store}) as daemon:
        daemon.settle()
        spool.remove([part(0)])
        store.delay = 0.3
        link = DaemonConnection(spool)
        with pytest.raises(TimeoutError):
            link.ask(Fetch(part=part(0)), 0.2)
        link.close()
        wait_until(lambda: not daemon.reconciler.requests.held_checkpoints)
        store.delay = 0.0
        with DaemonConnection(spool) as again:
            assert again.ask(Fetch(part=part(0)), 60)["ok"]
        assert read(spool, part(0)) == content(0)


def test_a_part_that_nobody_has_is_not_there_and_not_corrupt(spool):
    """It may have been pruned since it was seen."""
    with Daemon(spool.root, {"tier": Double()}) as daemon, DaemonConnection(spool) as link:
        with pytest.raises(ObjectNotFound, match="neither the spool nor any tier has a copy"):
            link.ask(Fetch(part=part(9)), 60)
        assert link.ask(StatusRequest())["ok"]
        assert not daemon.reconciler.journal.counters["corruptions"]


def test_candidates_are_listed_afresh_for_a_run_that_the_spool_does_not_have(spool, tmp_path):
    store = Double()
    other = Spool(tmp_path / "other")
    commit(other, part(5))
    with Daemon(other.root, {"tier": store}) as daemon:
        daemon.settle()
    with Daemon(spool.root, {"tier": store}), DaemonConnection(spool) as link:
        assert list(read_member(link.ask(CandidatesRequest(run=RUN)), "sight", RunView).complete(RUN)) == [
            part(5).checkpoint
        ]
        store.error = StoreUnavailable("down")
        assert read_member(link.ask(CandidatesRequest(run=RUN)), "sight", RunView).unreached == ("tier",)
        assert link.ask(ReportRequest(run=RUN))["report"]["unreached"] == ["tier"]


def test_pin_reaches_the_spool_and_every_tier_and_is_removed_again(spool):
    stores = {"one": Double(), "two": Double()}
    commit(spool, part(1))
    with Daemon(spool.root, stores) as daemon, DaemonConnection(spool) as link:
        daemon.settle()
        for pinned in (True, False):
            link.ask(Pin(checkpoint=part(1).checkpoint, pinned=pinned))
            assert (part(1).checkpoint in spool.pins()) == pinned
            for store in stores.values():
                objects = daemon.call(contents(store.inner))
                assert any("/pins/" in key for key in objects) == pinned
                assert any(is_manifest(key) for key in objects)


def test_listing_that_began_earlier_never_hides_a_later_listing(spool):
    """A slow look of one asker ends after a quick one of another began and ended: the later one's word stands."""
    store = Double()
    commit(spool, part(1))

    async def overtaken(daemon: Daemon) -> bool:
        reconciler = daemon.reconciler
        await reconciler.observe("tier")
        eye = reconciler.tiers._observers["tier"]
        real, gate = eye.observe, asyncio.Event()

        async def slow(*asked, **more):
            place = await real(*asked, **more)
            await gate.wait()
            return place

        eye.observe = slow
        first = asyncio.ensure_future(reconciler.observe("tier"))
        await asyncio.sleep(0.1)
        eye.observe = real
        await store.inner.delete([part(1).manifest_key])
        await reconciler.observe("tier")
        assert not reconciler.tiers.observed.has(part(1), "tier")
        gate.set()
        await first
        return reconciler.tiers.observed.has(part(1), "tier")

    with Daemon(spool.root, {"tier": store}) as daemon:
        daemon.settle()
        daemon.reconciler._phase.draining = True  # nothing but the looks below
        assert not daemon.call(overtaken(daemon))


class Counted(MemoryStore):
    """Counts what its listings show."""

    shown = 0

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        async for info in super().scan(prefix, after):
            self.shown += 1
            yield info


def test_a_look_lists_no_more_than_a_page_of_a_checkpoints_chunks():
    """A tier with millions of them would never answer in time."""
    store, sizes = Counted(), (1, 5000, 3, 999, 1000, 1001, 5000)

    async def work():
        for step, chunks in enumerate(sizes):
            for number in range(chunks):
                await store.put(f"{RUN}/chunks/{part(step).checkpoint.name}/00000/{number:032x}.raw", b"")
        return await TierObserver(store).observe({RUN})

    assert asyncio.run(work()).owners == {part(step).checkpoint for step in range(len(sizes))}
    assert store.shown < 1001 * len(sizes)
