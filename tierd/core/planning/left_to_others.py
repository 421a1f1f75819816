"""Runs that this daemon does not copy to a tier with `backfill`, because another node recorded a policy there."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.core.config import Config
from tierd.core.ids import retention_key
from tierd.core.planning.demand import Demand
from tierd.core.planning.flush_candidates import wanted_on
from tierd.core.planning.inventory import Inventory
from tierd.core.retention.stored import StoredRetention


@dataclass(frozen=True, slots=True)
class LeftToNode:
    """Checkpoints of a run that a tier wants and lacks, and that another node is to send there.

    Attributes:
        run: the run.
        tier: the tier.
        count: how many complete checkpoints the tier lacks.
        made_s: when the newest of them was made, by its trainer's clock, seconds since 1970; 0 if that is not known.
        records: what other nodes recorded on the tier.
    """

    run: str
    tier: str
    count: int
    made_s: float
    records: tuple[StoredRetention, ...]

    def __str__(self) -> str:
        nodes = ", ".join(
            sorted({f"{record.by} ({record.host})" if record.host else record.by for record in self.records})
        )
        keys = " and ".join(retention_key(record.run, record.by, record.given) for record in self.records)
        lacks = "1 checkpoint" if self.count == 1 else f"{self.count} checkpoints"
        return (
            f"run {self.run} lacks {lacks} here, which node {nodes} is to send, because it recorded a policy; "
            f"if that node is gone, delete {keys} on this tier, and reload: then this node sends them"
        )


def left_to_node(inventory: Inventory, config: Config, run: str, tier: str) -> LeftToNode | None:
    """Return what a tier with `backfill` lacks of a run that is left to another node; None if it lacks nothing."""
    place = inventory.tiers.get(tier)
    if place is None or run not in inventory.filling or not config.named(tier).backfill:
        return None
    records = place.policies.get(run, ())
    if run in inventory.spool.launches or not records or any(record.by == inventory.who for record in records):
        return None
    demand = Demand(inventory, config, run)
    lacking = (demand.whole & wanted_on(demand, tier, place).ids).difference(place.run(run).whole)
    facts = [spoken for checkpoint in lacking if (spoken := demand.merged[checkpoint].spoken)]
    made_s = max((part_facts.created.timestamp() for part_facts in facts), default=0.0)
    return LeftToNode(run, tier, len(lacking), made_s, records) if lacking else None
