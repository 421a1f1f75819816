"""Saves of several ranks on two nodes, and what comes of them. Kills: `python -m faults launchers`."""

from __future__ import annotations

from datetime import UTC, datetime

from support.world import part

from tierd.core.config import Config, TierConfig
from tierd.core.ids import PartId
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Flush, Place
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import RetentionPolicy


def test_saves_that_outrun_flushes_still_leave_whole_checkpoints_on_the_tier():
    """Two nodes, two ranks each; a node flushes one part while both of its ranks save one more."""
    policy = RetentionPolicy(keep_last=3)
    config = Config(spool="/spool", tier=(TierConfig(name="tier", url="file:///tier", retention=policy),))
    facts = ManifestFacts(datetime(2026, 1, 1, tzinfo=UTC), {}, None, 1, 1, frozenset())
    spools: list[dict[PartId, ManifestFacts]] = [{}, {}]
    tier: dict[PartId, ManifestFacts] = {}
    for step in range(1, 31):
        for node, spool in enumerate(spools):
            spool |= {part(step, rank=rank, world=4): facts for rank in (2 * node, 2 * node + 1)}
            actions = plan(Inventory(Place.of(spool), {"tier": Place.of(tier)}), config, {}, 0.0)
            tier |= {next(action.part for action in actions if isinstance(action, Flush)): facts}
    found = Place.of(tier).checkpoints
    assert max((one.step for one, seen in found.items() if seen.usable), default=0) > 20, sorted(found)
