"""At rest: with no trainer and nothing to do, a daemon makes at most 60 requests an hour, and wakes at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.doubles import Counting, Double
from support.timed import timed
from support.waiting import until
from support.world import commit, converge, part, reconciler, running, settle

from tierd.daemon.daemon_timings import USUAL
from tierd.daemon.reconciling.tier_worker import TierWorker
from tierd.daemon.scrub.scrubber import Scrubber
from tierd.daemon.tiers import tier_observer
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush

RUNS, HOURS = 20, 24


class Resting:
    """Simulated hours: the rests of tier workers take no time, and pass on this clock."""

    def __init__(self, monkeypatch) -> None:
        self.rests: dict[str, list[float]] = {}
        self.begins: Callable[[str], object] = lambda name: None  # called before a tier's first rest
        self.hours = 0.0
        real = TierWorker.wait

        async def rest(lane: TierWorker, rescan: float) -> None:
            if lane.name == "local" or self.now(lane.name) >= HOURS:
                self.hours = min(map(self.now, self.rests), default=0.0)
                await real(lane, math.inf)
                return
            if self.rests.setdefault(lane.name, [0.0]) == [0.0]:
                self.begins(lane.name)
            self.rests[lane.name].append(rescan)
            await asyncio.sleep(0)

        monkeypatch.setattr(TierWorker, "wait", rest)
        # Its tier workers ask no tier at rest.
        monkeypatch.setattr(Scrubber, "run", lambda scrubber: asyncio.sleep(3600))
        monkeypatch.setattr(
            tier_observer, "time", SimpleNamespace(monotonic=lambda: 3600 * max(map(self.now, self.rests)))
        )

    def now(self, name: str) -> float:
        return sum(self.rests.get(name, [])) / 3600


@pytest.mark.parametrize("tiers", [["a"], ["a", "b"]])
async def test_daemon_at_rest_makes_at_most_60_requests_an_hour_with_any_spool(spool, monkeypatch, tiers):
    stores = {name: Counting() for name in tiers}
    for number in range(RUNS):
        commit(spool, part(1, run=f"run{number}"))
        for store in stores.values():
            await flush(spool, part(1, run=f"run{number}"), TierUploadContext(store))
    resting = Resting(monkeypatch)
    resting.rests = {name: [0.0] for name in tiers}
    daemon = reconciler(spool, stores, rescan="30s")
    daemon.requests.attended = lambda: False
    # The first look reads every manifest, and what an earlier daemon may have left is looked for once.
    resting.begins = lambda name: stores[name].taken()

    def a_day(name: str) -> float:
        """Requests that the first 24 hours took; each tier worker has hours of its own."""
        made = sum(stores[name].count.values())
        return made * HOURS / max(resting.now(name), HOURS)

    async with running(daemon):
        await until(
            lambda: sum(map(a_day, tiers)) > 60 * HOURS + 500 or all(resting.now(name) >= HOURS for name in tiers)
        )
    an_hour = sum(map(a_day, tiers)) / HOURS
    assert an_hour <= 60, f"{an_hour:.0f} requests an hour"
    assert an_hour >= 15, "and it goes on looking"


async def test_with_a_trainer_a_daemon_looks_at_every_rescan(spool, monkeypatch):
    store = Counting()
    commit(spool, part(1))
    await converge(spool, {"a": store})
    resting = Resting(monkeypatch)
    resting.rests = {"a": [0.0]}
    daemon = reconciler(spool, {"a": store}, rescan="30s")
    daemon.requests.attended = lambda: True
    async with running(daemon):
        await until(lambda: len(resting.rests["a"]) > 50)
    assert set(resting.rests["a"][1:]) == {30.0}


async def test_deletion_that_an_earlier_daemon_began_is_not_forgotten_at_rest(spool, monkeypatch):
    """Seed 0 of `python -m faults kills`: its mark was too young at the first look, and the next came much later."""
    old_min, rescan_min = 5.0, 0.5
    store = Double()
    commit(spool, part(3))
    await converge(spool, {"a": store}, keep=1)
    resting = Resting(monkeypatch)
    resting.rests = {"a": [0.0]}
    timed(
        monkeypatch,
        own_stale_ms=USUAL.own_stale_ms,
        wall_ns=lambda: int((0x19 + 60_000 * (old_min + 60 * resting.now("a"))) * 1e6),
    )
    daemon = reconciler(spool, {"a": store}, keep=1, rescan="30s")
    daemon.requests.attended = lambda: False
    mark = f"{part(1).checkpoint.run}/pruning/{part(1).checkpoint.name}.{0x19:012x}-{daemon.tiers.who}"
    await store.put(mark, b"")
    done_min = []

    def note(operation: str, key: str) -> None:
        if operation == "delete" and key == mark:
            done_min.append(60 * resting.now("a"))

    store.before = note
    async with running(daemon):
        await until(lambda: done_min or resting.now("a") >= 1)
    assert done_min and done_min[0] <= 15 - old_min + 2 * rescan_min


async def test_an_event_ends_the_rest_at_once(spool):
    store = Counting()
    commit(spool, part(1))
    daemon = reconciler(spool, {"a": store}, rescan="30s")
    daemon.requests.attended = lambda: False
    async with running(daemon):
        await settle(daemon)
        store.taken()
        commit(spool, part(2))
        daemon.wake()  # what watching the spool does
        await until(lambda: daemon.tiers.observed.has(part(2), "a"))
