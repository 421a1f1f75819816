"""What a spool remembers of its tiers."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from support.doubles import Double
from support.inventories import checkpoint, config, solo
from support.world import attempt, commit, part, reconciler

from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.reconciling import flusher
from tierd.daemon.tiers.tier_run_records import next_head
from tierd.spool.run_records import recorded_heads


async def test_of_two_tiers_that_are_done_at_the_same_time_both_heads_are_remembered(monkeypatch):
    saved = solo(Place(), checkpoint(1, 1))

    def tier(by: str) -> Place:
        return saved.with_heads("r", (next_head(Inventory(saved, {"x": saved}, node_id=by), saved, "r", by, ()),))

    tiers, made = {"a": tier("0000000a"), "b": tier("0000000b")}, config(RetentionPolicy(), RetentionPolicy())
    live = SimpleNamespace(place=saved, config=made, spool=SimpleNamespace(control=None))
    live.inventory = lambda: Inventory(live.place, tiers, node_id="0000000a")
    monkeypatch.setattr(flusher, "record_head", lambda *_: time.sleep(0.05))
    kept = flusher.RunRecords(live, None, None)
    await asyncio.gather(kept.remember(["r"], {"a": "/tier/0"}), kept.remember(["r"], {"b": "/tier/1"}))
    assert sorted(live.place.heads["r"][0].tiers) == ["/tier/0", "/tier/1"]


async def test_spool_records_origin_of_a_launch_before_its_last_copy_is_deleted(spool):
    """Simulation, seed 300304: the launch was over between two observations of the tier, and its node was lost."""
    daemon = reconciler(spool, {"tier": Double()}, keep=1, keep_local=1)
    commit(spool, part(1))
    await daemon.observe("tier")
    commit(spool, part(2, 2), origin=part(1).checkpoint)
    for step in (3, 4):
        commit(spool, part(step, 3), origin=part(2, 2).checkpoint)
    await daemon._live.observe()
    assert await daemon._pruner.release(part(2, 2).checkpoint, ())
    (head,) = recorded_heads(spool.control)["run"]
    assert {launch: record.resumed_from for launch, record in head.launches.items()}[attempt(2)] is not None
