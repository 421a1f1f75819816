"""Which node's daemon may prune a run on a tier that several nodes share, and which one fills a tier with it."""

from __future__ import annotations

from tierd.core.config import Config
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place


def is_janitor(inventory: Inventory, tier: Place, run: str) -> bool:
    """Whether this daemon is the janitor of `run`, which may prune the run on a shared tier.

    The janitor is the node that saved rank 0 of the newest attempt. It remains so after a full disk forced it to evict
    its copies, because no other node would finish the work. A part that was only restored to a spool does not make its
    node a janitor, because reading never deletes.
    """
    led_here, attempts = inventory.spool.run(run).led, inventory.spool.run(run).attempts | tier.run(run).attempts
    if attempts and _saved_first(inventory, run) >= max(attempts):
        return True
    return bool(attempts) and max(attempts) in led_here and run not in inventory.spool.restored


def fills(inventory: Inventory, config: Config, run: str, tier: str) -> bool:
    """Whether this daemon copies a run that it never saved from other tiers to `tier`, because the tier has `backfill`.

    It does not if another node has recorded a policy of the run there, because that node sends what the run needs. This
    daemon records its own policy before it copies, so that no node which saves the run later prunes the copies at once.
    Nor does it once the tiers have all that they want, because it observes the run on none of them from then on.
    """
    if run not in inventory.filling:
        return False
    place = inventory.tiers.get(tier)
    if place is None or not config.named(tier).backfill or run in inventory.spool.launches:
        return False
    by = {record.by for record in place.policies.get(run, ())}
    return not by or inventory.who in by


def _saved_first(inventory: Inventory, run: str) -> str:
    """The newest attempt of which this node saved rank 0, if any place shows a checkpoint of it; else empty."""
    launch = inventory.spool.launches.get(run)
    if launch is None or not any(0 in ranks for ranks in launch.ranks.values()):
        return ""
    return (
        launch.attempt if any(launch.attempt in place.run(run).attempts for place in inventory.places.values()) else ""
    )
