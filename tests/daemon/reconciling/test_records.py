"""What a spool remembers of its tiers."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from support.inventories import checkpoint, config, solo

from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.reconciling import flusher
from tierd.daemon.tiers.tier_run_records import next_head


async def test_of_two_tiers_that_are_done_at_the_same_time_both_heads_are_remembered(monkeypatch):
    saved = solo(Place(), checkpoint(1, 1))

    def tier(by: str) -> Place:
        return saved.with_heads("r", (next_head(Inventory(saved, {"x": saved}, node_id=by), saved, "r", by, ()),))

    tiers, made = {"a": tier("0000000a"), "b": tier("0000000b")}, config(RetentionPolicy(), RetentionPolicy())
    live = SimpleNamespace(place=saved, config=made, spool=SimpleNamespace(control=None))
    live.inventory = lambda: Inventory(live.place, tiers, node_id="0000000a")
    monkeypatch.setattr(flusher, "record_head", lambda *_: time.sleep(0.05))
    kept = flusher.RunRecords(live, None, None)
    await asyncio.gather(kept._remember("a", ["r"]), kept._remember("b", ["r"]))
    assert sorted(live.place.heads["r"][0].tiers) == ["/tier/0", "/tier/1"]
