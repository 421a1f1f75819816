"""A pause: the tiers stay as they are, whatever becomes of the daemon; saves and restores do not notice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import UTC, datetime, timedelta

import pytest
from support.doubles import Double, contents, is_chunk, is_manifest
from support.timed import timed
from support.waiting import until, wait_until
from support.world import (
    Daemon,
    commit,
    config,
    content,
    corrupt,
    part,
    read,
    reconciler,
    running,
    settle,
    steps_in,
    steps_on,
)

from tierd.core.errors import SpoolUnusable
from tierd.daemon import daemon_service
from tierd.daemon.scrub.scrub_history import ScrubHistory
from tierd.daemon.tiers.tier_pauses import TierPause as State
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Attach, CandidatesRequest, Fetch, Pause, Resume, StatusRequest, Wait
from tierd.spool.spool import Spool


def ask(spool: Spool, request) -> dict:
    with DaemonConnection(spool) as link:
        return link.ask(request, 60)


def paused(spool: Spool) -> str | None:
    return ask(spool, StatusRequest())["status"]["paused"]


# -- the state --------------------------------------------------------------------------------------------------------


def test_pause_that_is_off_does_not_wait(spool):
    state = State(spool)
    with pytest.raises(StopIteration):
        state.wait().send(None)  # it ends without giving the loop a turn
    assert (state.paused, state.until, state.remaining_s) == (False, None, 0.0)


def test_a_pause_outlives_its_daemon_until_it_is_resumed(spool):
    state = State(spool)
    asyncio.run(state.begin(None))
    for again in (state, State(spool)):
        assert (again.paused, again.until) == (True, "until resumed")
    asyncio.run(State(spool).end())
    assert not State(spool).paused
    assert not list(spool.control.glob("paused*"))


def test_end_of_a_pause_outlives_its_daemon(spool):
    state = State(spool)
    asyncio.run(state.begin(3600))
    again = State(spool)
    for one in (state, again):
        assert 3500 < one.remaining_s <= 3600
        ends = datetime.fromisoformat(one.until)
        assert timedelta(seconds=3500) < ends - datetime.now(UTC) <= timedelta(seconds=3600)
    asyncio.run(again.begin(0.05))
    again = State(spool)
    asyncio.run(again.wait())
    assert (again.paused, again.until) == (False, None)
    assert not State(spool).paused, "the file tells of a pause that is over"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", float("inf")),
        ("\n", float("inf")),
        ("2h", float("inf")),
        ("\x00\xff", float("inf")),
        ("9" * 500, float("inf")),
        ("2001-01-01T00:00:00+00:00", 0),
        ("0001-01-01T00:00:00+14:00", float("inf")),
        ("2001-01-01T00:00:00Z\n", 0),
    ],
)
def test_pause_file_with_any_content_is_a_pause_that_can_be_ended(spool, text, left):
    (spool.control / "paused").write_text(text, encoding="latin-1")
    state = State(spool)
    assert state.remaining_s == left
    asyncio.run(state.end())
    assert not State(spool).paused


def test_a_file_that_cannot_be_read_is_named(spool):
    (spool.control / "paused").mkdir()
    with pytest.raises(SpoolUnusable, match="paused: Is a directory"):
        State(spool)


async def test_waiter_of_a_pause_continues_when_it_is_resumed_or_shortened(spool):
    state = State(spool)
    for change in (state.end, lambda: state.begin(0.01)):
        await state.begin(None)
        waiting = [asyncio.ensure_future(state.wait()) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(one.done() for one in waiting)
        await state.begin(3600)
        await asyncio.sleep(0.05)
        assert not any(one.done() for one in waiting)
        await change()
        async with asyncio.timeout(60):
            await asyncio.gather(*waiting)


# -- the daemon -------------------------------------------------------------------------------------------------------


def test_paused_nothing_is_flushed_and_resumed_it_is(spool):
    store = Double()
    with Daemon(spool.root, {"tier": store}) as daemon:
        assert paused(spool) is None
        assert ask(spool, Pause()) == {"ok": True, "paused": "until resumed"}
        commit(spool, part(1))
        daemon.loop.call_soon_threadsafe(daemon.reconciler.wake)
        wait_until(lambda: len(daemon.reconciler.backlog.pending_sizes("tier")) == 1)
        wait_until(
            lambda: daemon.reconciler.workers["tier"].doing is None and ("scan", "run/manifests/") in store.calls
        )
        with DaemonConnection(spool) as link, pytest.raises(TimeoutError, match="paused until resumed"):
            link.ask(Wait(part=part(1), tier="tier", timeout_s=0.5))
        assert not store.puts()
        assert paused(spool) == "until resumed"
        assert ask(spool, Resume()) == {"ok": True, "paused": None}
        assert ask(spool, Wait(part=part(1), tier="tier", timeout_s=60))["ok"]
        assert paused(spool) is None


def test_a_pause_with_an_end_ends_by_itself_however_seldom_the_daemon_looks(spool):
    store = Double()
    with Daemon(spool.root, {"tier": store}, rescan="12h") as daemon:
        daemon.settle()
        ends = ask(spool, Pause(for_s=1.0))["paused"]
        assert abs(datetime.fromisoformat(ends) - datetime.now(UTC)) < timedelta(seconds=10)
        commit(spool, part(1))
        daemon.loop.call_soon_threadsafe(daemon.reconciler.wake)
        assert ask(spool, Wait(part=part(1), tier="tier", timeout_s=60))["ok"]
        assert not daemon.reconciler.pause.paused


def test_a_pause_that_began_before_the_daemon_holds(spool):
    store = Double()
    commit(spool, part(1))
    asyncio.run(State(spool).begin(3600))
    with Daemon(spool.root, {"tier": store}) as daemon:
        wait_until(lambda: len(daemon.reconciler.backlog.pending_sizes("tier")) == 1)
        time.sleep(0.2)
        assert not store.puts() and paused(spool) is not None
        ask(spool, Resume())
        daemon.settle()
    assert steps_on(asyncio.run(contents(store.inner))) == [1]


async def test_paused_flush_stops_after_its_chunks_in_hand_and_continues_where_it_was(spool):
    store = Double()
    pieces = {"weights.bin": os.urandom(30_000)}
    async with running(reconciler(spool, {"tier": store})) as daemon:
        begun, go = asyncio.Event(), asyncio.Event()
        real = store.inner.put

        async def slow(key, data):
            if is_chunk(key):
                begun.set()
                await go.wait()
            return await real(key, data)

        store.inner.put = slow
        commit(spool, part(1), pieces)
        daemon.wake()
        await begun.wait()
        await daemon.pause.begin(None)
        go.set()
        await asyncio.sleep(0.3)
        assert 0 < len(store.puts(is_chunk)) < 30, "those in hand were finished, no others were begun"
        assert not store.puts(is_manifest)
        await daemon.pause.end()
        await settle(daemon)
        assert daemon.tiers.observed.has(part(1), "tier")
        assert len(store.puts(is_chunk)) == len(set(store.puts(is_chunk))) == 30


def test_paused_a_tier_is_not_pruned_and_the_spool_is(spool):
    store = Double()
    for step in range(4):
        commit(spool, part(step))
    with Daemon(spool.root, {"tier": store}) as daemon:
        daemon.settle()
    asyncio.run(State(spool).begin(None))
    store.calls.clear()
    store.delay = 0.2  # what the tier holds is seen last, long before the next rescan
    with Daemon(spool.root, {"tier": store}, keep=2) as daemon:
        wait_until(lambda: steps_in(spool) == [2, 3])
        store.delay = 0.0
        assert steps_on(daemon.call(contents(store.inner))) == [0, 1, 2, 3]
        assert {operation for operation, _ in store.calls} <= {"scan", "get"}
        ask(spool, Resume())
        daemon.settle()
        assert steps_on(daemon.call(contents(store.inner))) == [2, 3]


def test_restore_while_paused_is_answered_and_repaired(spool):
    store = Double()
    commit(spool, part(1))
    with Daemon(spool.root, {"tier": store}) as daemon:
        daemon.settle()
        ask(spool, Pause())
        corrupt(spool.path(part(1)) / "weights.bin")
        found = ask(spool, CandidatesRequest(run="run"))["sight"]
        assert found["whole"] == {"1": {part(1).checkpoint.attempt: [1]}}
        assert ask(spool, Fetch(part=part(1)))["tiers"] == ["tier"]
        assert read(spool, part(1)) == content(1)
        spool.remove([part(1)])
        assert ask(spool, Fetch(part=part(1)))["tiers"] == ["tier"]
        assert read(spool, part(1)) == content(1)


# -- the service, whole -----------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch):
    found = Double()

    async def opened(config, stack, *, trial):
        return {"tier": found}

    monkeypatch.setattr(daemon_service, "open_tiers", opened)
    timed(monkeypatch, grace_s=0.3)
    return found


def test_sigterm_while_paused_ends_at_once_and_the_pause_is_kept(spool, store):
    asyncio.run(State(spool).begin(None))
    commit(spool, part(1))

    async def work():
        daemon = asyncio.ensure_future(daemon_service.serve(config(spool, "tier", drain="1d")))
        await until(spool.socket.exists)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await daemon

    asyncio.run(work())
    assert not store.puts()
    assert State(spool).paused


@pytest.mark.parametrize("backlog", [True, False])
def test_a_paused_daemon_with_a_backlog_does_not_end_idle(spool, store, backlog):
    asyncio.run(State(spool).begin(None))
    if backlog:
        commit(spool, part(1))

    async def work():
        daemon = asyncio.ensure_future(daemon_service.serve(config(spool, "tier"), until_idle=True))
        await until(spool.socket.exists)
        await asyncio.to_thread(ask, spool, Attach())
        if backlog:
            await asyncio.sleep(1.5)
            assert not daemon.done() and not store.puts()
            await asyncio.to_thread(ask, spool, Resume())
        async with asyncio.timeout(60):
            await daemon

    asyncio.run(work())
    assert bool(store.puts(is_manifest)) == backlog


async def test_changes_at_once_leave_file_and_memory_agreeing(spool):
    for _ in range(20):
        state = State(spool)
        await asyncio.gather(state.begin(None), state.begin(3600), state.end(), state.begin(100), state.end())
        assert state.paused == State(spool).paused


def test_a_clock_that_was_set_back_makes_no_pause_longer(spool, monkeypatch):
    asyncio.run(State(spool).begin(3600))

    class Back(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(1970, 1, 1, tzinfo=tz)

    monkeypatch.setattr("tierd.daemon.tiers.tier_pauses.datetime", Back)
    assert 3500 < State(spool).remaining_s < 3601  # a file's clock may be a tick ahead


@pytest.mark.parametrize("name", ["paused", "scrubbed.json"])
@pytest.mark.timeout(60)
def test_fifo_in_the_place_of_a_remembered_file_is_not_waited_for(spool, name):
    os.mkfifo(spool.control / name)
    State(spool)
    ScrubHistory(spool.control / "scrubbed.json").load()
