"""Which retention policy holds for a run in a place.

Invariant: every decision to keep or to delete calls this module, so that the daemon, `ls` and `prune` cannot disagree.
If several policies hold, each checkpoint that any of them keeps is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierd.core.config import Config
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Place
from tierd.core.retention.policy import RetentionPolicy, merged
from tierd.core.retention.stored import StoredRetention

DEFAULT = RetentionPolicy()
EVERYTHING = RetentionPolicy(keep_last=1 << 31)


def policy_for(inventory: Inventory, config: Config, run: str, place: str) -> RetentionPolicy:
    """The policy of `run` in `place`, the spool or a tier of the configuration.

    A tier that does not answer, and whose policy is not known here, counts as wanting everything. The policy stored
    there may keep much, and other tiers hold the checkpoints that this tier wants.
    """
    silent = place != SPOOL and inventory.tiers.get(place) is None
    return known_policy(inventory, config, run, place) or (EVERYTHING if silent else DEFAULT)


def known_policy(inventory: Inventory, config: Config, run: str, place: str) -> RetentionPolicy | None:
    """The policy that was given to `run` in `place`, or was recorded there; None if the default holds.

    In the spool the configuration's policy holds, because it is written for that disk; without one, the trainer's. On a
    tier the policies of all nodes hold together. A recorded default holds if no node gave a policy.
    """
    if place == SPOOL:
        return config.retention or trainers_policy(inventory, run)
    tier = inventory.tiers.get(place)
    stored = list(_standing(inventory, config, run, place, tier)) if tier else []
    local_policies = own_policies(inventory, config, run, place).values()
    given_policies = [
        *local_policies,
        *(record.retention for record in stored if record.given != "default" and record.retention),
    ]
    return merged(given_policies) or merged(record.retention for record in stored if record.retention)


def own_policies(inventory: Inventory, config: Config, run: str, tier: str) -> dict[str, RetentionPolicy]:
    """The policies that this node gives `run` on a tier, by origin: `configuration` or `trainer`."""
    policies = {"configuration": config.named(tier).retention, "trainer": trainers_policy(inventory, run)}
    return {source: policy for source, policy in policies.items() if policy}


def trainers_policy(inventory: Inventory, run: str) -> RetentionPolicy | None:
    """The policy that this node's trainer gave `run`; None if there is none or it cannot be read."""
    return merged(record.retention for record in inventory.spool.policies.get(run, ()) if record.retention)


def unknown(place: Place, run: str) -> str | None:
    """Why the policy of `run` in a place is not known; None if it is known. While it is unknown, nothing of the run may
    be deleted there."""
    reasons = [record.why for record in place.policies.get(run, ()) if record.retention is None]
    return reasons[0] if reasons else None


def disagreeing(place: Place, run: str) -> tuple[StoredRetention, ...]:
    """The policies given to `run` in a place, if they differ or one cannot be read; otherwise none."""
    records = tuple(
        record for record in place.policies.get(run, ()) if record.given != "default" or record.retention is None
    )
    return records if len({record.retention for record in records}) > 1 or unknown(place, run) else ()


def unnamed(inventory: Inventory, tier: Place, run: str) -> tuple[str, ...]:
    """The tiers on which another node keeps the run, by its record on `tier`, and that this node does not name.

    What such a tier wants is not known here. None are unnamed if the inventory is no node's, because a command that was
    given URLs makes up their names.
    """
    tier_names = {
        name
        for record in tier.policies.get(run, ())
        if record.by != inventory.who or record.contested
        for name in record.tiers
    }
    return tuple(sorted(tier_names.difference(inventory.tiers))) if inventory.who else ()


def _standing(inventory: Inventory, config: Config, run: str, tier: str, place: Place) -> Iterator[StoredRetention]:
    """The policies stored on a tier, without this node's records of policies that it gives itself now, which may have
    changed since."""
    own_sources = own_policies(inventory, config, run, tier)
    for record in place.policies.get(run, ()):
        if record.by != inventory.who or record.contested or record.given not in own_sources:
            yield record
