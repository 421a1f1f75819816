"""A tier that is added later is filled: by the plan with what the node saves, and with `backfill` with other runs, too.

Nothing is pruned for it, and no run of which another node keeps a policy there is touched.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest
from support.doubles import Double, contents, is_chunk
from support.timed import timed
from support.waiting import until
from support.world import attempt, commit, config, converge, part, running, settle, steps_on

from tierd.core.config import Config, TierConfig, from_toml
from tierd.core.errors import ConfigError, StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import LocalLaunch, Place
from tierd.core.planning.plan import flushes
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.timeline.launch_chain import merge_heads
from tierd.daemon import daemon_service
from tierd.daemon.daemon_status import make_status
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.tiers.tier_observations import Observations
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.events.notifier import Notifier
from tierd.spool.spool import Spool

TENS = RetentionPolicy(keep_last=2, keep_every_steps=10)
RUNS = ("first", "second")


def node(spool: Spool, stores, *, backfill: bool = True, policy: RetentionPolicy = TENS) -> Reconciler:
    """A daemon whose tier `new` was added."""
    made = config(spool, *stores)
    tiers = tuple(
        TierConfig(name=name, url=f"file:///{name}", retention=policy, backfill=backfill and name == "new")
        for name in stores
    )
    return Reconciler(msgspec.structs.replace(made, tier=tiers), spool, stores)


async def old_tier(tmp_path, steps=range(1, 26), world: int = 1) -> Double:
    """A tier with two runs that another node saved, each in two launches, and keeps whole."""
    store, spool = Double(), Spool(tmp_path / "elsewhere")
    for run in RUNS:
        for step in steps:
            origin = CheckpointId(run, attempt(1), 12) if step > 12 else None
            for rank in range(world):
                commit(spool, part(step, launch=2 if origin else 1, rank=rank, world=world, run=run), origin=origin)
    await converge(spool, {"old": store})
    store.calls = []
    return store


async def on(store: Double, run: str) -> list[int]:
    return steps_on(key for key in await contents(store.inner) if key.startswith(f"{run}/"))


def is_filled(daemon) -> bool:
    """Whether all runs were listed, so that the next listing is due in a day, and nothing is left to send of any."""
    return daemon._backfill._due > time.monotonic() + 3600 and not daemon._backfill.runs


async def test_new_tier_gets_the_wanted_checkpoints_of_runs_that_nobody_saves_here(tmp_path):
    old, new = await old_tier(tmp_path, world=2), Double()
    await old.inner.delete([key for key in await contents(old) if f"{12:012}.{attempt(1)}" in key])
    async with running(node(Spool(tmp_path / "spool"), {"old": old, "new": new})) as daemon:
        await until(lambda: is_filled(daemon))
        await settle(daemon)
        # They are not observed any more, so a daemon at rest asks nothing for them.
        await until(lambda: daemon.wake() or not daemon.inventory().places["new"].runs)
        # A part that arrived while a worker planned may be sent once more.
        assert 2 * 2 * 4 <= daemon.journal.counters["flushed"] <= 2 * 2 * 4 + 2
    for run in RUNS:
        assert sorted(set(await on(new, run))) == [10, 20, 24, 25]
        place = await TierObserver(new).observe({run}, spare_reads=1000)
        (policy,) = place.policies[run]
        assert policy.retention == TENS and policy.given == "configuration"
        known = merge_heads(place.heads[run])
        assert known[attempt(2)].resumed_from.step == 12 and known[attempt(2)].newest == 25
        assert {one.step for one in place.run(run).usable} == {10, 20, 24, 25}
    theirs, ours = await contents(old.inner), await contents(new.inner)
    assert {key: data for key, data in ours.items() if is_chunk(key)}.items() <= theirs.items()
    assert not old.puts() and not [key for operation, key in old.calls if operation == "delete"]


async def test_tier_is_backfilled_once_another_tier_has_answered(tmp_path):
    old, new = await old_tier(tmp_path, range(1, 4)), Double()
    old.delay = 0.1  # so that the new tier was observed, and lacks nothing, before this one shows what it has
    async with running(node(Spool(tmp_path / "spool"), {"old": old, "new": new})) as daemon:
        await until(lambda: is_filled(daemon))
    assert {run: await on(new, run) for run in RUNS} == {run: [2, 3] for run in RUNS}


@pytest.mark.parametrize("slow", ["old", "new", "both"])
async def test_a_filled_tier_that_takes_long_to_observe_is_not_observed_once_more_to_know_it(
    tmp_path, monkeypatch, slow
):
    def good_for(observed, tier: str) -> float:
        knows = all(observed.has_observed_run(name, RUNS[0]) for name in observed.places)
        return 3600.0 if slow in (tier, "both") and knows else 0.0

    old, new = await old_tier(tmp_path, range(1, 4)), Double()
    monkeypatch.setattr(Observations, "send_validity_s", good_for)
    async with running(node(Spool(tmp_path / "spool"), {"old": old, "new": new})) as daemon:
        await until(lambda: is_filled(daemon))
        # Nothing is sent again because an observation does not show any more what is there.
        assert daemon.journal.counters["flushed"] <= 2 * 2 + 2


async def test_without_backfill_other_runs_are_not_touched(tmp_path):
    old, new, spool = await old_tier(tmp_path, range(1, 4)), Double(), Spool(tmp_path / "spool")
    async with running(node(spool, {"old": old, "new": new}, backfill=False)) as daemon:
        await settle(daemon)
    assert not await contents(new.inner) and not [key for _, key in old.calls if key.startswith(RUNS)]


def serve_until_idle(monkeypatch, spool: Spool, stores: dict[str, Double]) -> tuple[object, ...]:
    """Run a daemon with these stores as `tierd run --until-idle` does; return what it says is left."""

    async def opened(*_: object, **__: object) -> tuple[dict[str, Double], Notifier]:
        return stores, Notifier((), str(spool.root))

    monkeypatch.setattr(daemon_service, "open_all", opened)
    made = config(spool, *stores)
    tiers = tuple(
        TierConfig(name=name, url=f"file:///{name}", retention=TENS, backfill=name == "new") for name in stores
    )
    return asyncio.run(daemon_service.serve(msgspec.structs.replace(made, tier=tiers), until_idle=True))


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_until_idle_names_the_undone_work_of_a_dead_node_at_any_speed_of_tiers(tmp_path, monkeypatch, delay):
    """docs/howto/tiers.md, "Add a tier": `tierd run --until-idle` waits for the parts of other runs, and names those
    that another node was to send."""
    old, new, gone = asyncio.run(old_tier(tmp_path, range(1, 11))), Double(), Spool(tmp_path / "third")
    commit(gone, part(11, launch=3, run="first"), origin=CheckpointId("first", attempt(2), 10))
    asyncio.run(converge(gone, {"new": new}, keep=1))
    old.delay = new.delay = delay
    left = serve_until_idle(monkeypatch, Spool(tmp_path / "spool"), {"old": old, "new": new})
    assert len(left) == 1 and "first/retention/" in str(left[0])
    assert asyncio.run(on(new, "second")) == [9, 10]


async def test_part_that_another_node_may_still_send_is_no_problem(tmp_path, monkeypatch):
    timed(monkeypatch, left_undone_s=1e9)
    old, new = await old_tier(tmp_path, range(1, 11)), Double()
    sender = Spool(tmp_path / "third")
    commit(sender, part(11, launch=3, run="first"), origin=CheckpointId("first", attempt(2), 10))
    await converge(sender, {"new": new}, keep=1)
    async with running(node(Spool(tmp_path / "spool"), {"old": old, "new": new})) as daemon:
        await until(lambda: is_filled(daemon))
        assert not [one for one in make_status(daemon, 0, 0).problems if one.place == "new"]


async def test_the_copies_outlive_a_trainer_that_saves_the_run_elsewhere_later(tmp_path):
    old, new = await old_tier(tmp_path), Double()
    async with running(node(Spool(tmp_path / "spool"), {"old": old, "new": new})) as daemon:
        await until(lambda: is_filled(daemon))
    later = Spool(tmp_path / "later")
    commit(later, part(26, launch=3, run="first"), origin=CheckpointId("first", attempt(2), 25))
    await converge(later, {"new": new}, keep=1)
    # The policies do not want 24 any more. It is held for the old tier, which this node does not name.
    assert await on(new, "first") == [10, 20, 24, 25, 26]


async def test_a_tier_that_does_not_answer_is_filled_from_when_it_does(tmp_path, monkeypatch):
    timed(monkeypatch, list_again_s=0.05)
    old, new = await old_tier(tmp_path, range(1, 4)), Double()
    old.error = StoreUnavailable("it does not answer")
    async with running(node(Spool(tmp_path / "spool"), {"old": old, "new": new})) as daemon:
        await until(lambda: old.calls)
        assert not await contents(new.inner)
        old.error = None
        await until(lambda: daemon.wake() or daemon._backfill.runs or new.puts())
        await until(lambda: not daemon._backfill.runs)
    assert await on(new, "first") == [2, 3] == await on(new, "second")


def test_saves_of_this_node_are_sent_before_other_runs():
    facts = ManifestFacts(datetime(2026, 1, 1, tzinfo=UTC), {}, None, 1, 1, frozenset())

    def place(run: str, steps, launch: int) -> Place:
        return Place.of({part(step, launch=launch, run=run): facts for step in steps})

    spool = replace(place("mine", [1, 2], 1), launches={"mine": LocalLaunch(attempt(1), {1: frozenset({0})})})
    others = place("other", range(10, 41, 10), 9)  # of a later launch, and wanted for good
    tiers = tuple(
        TierConfig(name=name, url=f"file:///{name}", retention=TENS, backfill=name == "new") for name in ("old", "new")
    )
    inventory = Inventory(spool, {"old": others, "new": Place()}, filling=frozenset({"other"}), node_id="0a0a0a0a")
    planned = flushes(inventory, Config(spool="/s", tier=tiers), {}, 0.0)
    on_new = [(one.part.checkpoint.run, one.part.checkpoint.step, one.relayed) for one in planned if one.tier == "new"]
    assert on_new[:2] == [("mine", 2, False), ("mine", 1, False)]
    assert sorted(on_new[2:]) == [("other", step, True) for step in (10, 20, 30, 40)]
    assert {one.part.checkpoint.run for one in planned if one.tier == "old"} == {"mine"}


@pytest.mark.parametrize("backfill", [True, False])
async def test_saves_of_this_node_reach_a_new_tier_after_the_spool_freed_them(tmp_path, backfill):
    """The spool has freed the older ones, which the old tier relays."""
    old, new, spool = Double(), Double(), Spool(tmp_path / "spool")
    for step in range(1, 26):
        commit(spool, part(step))
    await converge(spool, {"old": old}, keep_local=2)
    async with running(node(spool, {"old": old, "new": new}, backfill=backfill)) as daemon:
        await settle(daemon)
    assert await on(new, "run") == [10, 20, 24, 25]


def test_backfill_needs_a_policy():
    tier = 'spool = "/s"\n[[tier]]\nname = "t"\nurl = "file:///t"\nbackfill = true\n'
    with pytest.raises(ConfigError, match=r"tier\[0\].backfill: give this tier a retention"):
        from_toml(tier, "it")
    assert from_toml(f"{tier}retention = {{ keep_last = 2 }}\n", "it").tier[0].backfill
