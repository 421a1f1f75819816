"""Which retention policy holds for a run in a place.

Law: every decision to keep or to delete asks here, so that the daemon, `ls` and `prune` cannot disagree. Where several
policies hold, whatever any of them keeps is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierd.core.config import Config
from tierd.core.retention import RetentionPolicy, merged
from tierd.core.run_retention import StoredRetention
from tierd.core.world import SPOOL, Place, World

DEFAULT = RetentionPolicy()
EVERYTHING = RetentionPolicy(keep_last=1 << 31)


def policy_for(world: World, config: Config, run: str, place: str) -> RetentionPolicy:
    """The policy of `run` in `place`, the spool or a tier of the configuration.

    A tier that does not answer, and of which nobody here says what it keeps, counts as wanting everything: the policy
    that is stored there may be a rich one, and other tiers hold what it wants.
    """
    silent = place != SPOOL and world.tiers.get(place) is None
    return known_policy(world, config, run, place) or (EVERYTHING if silent else DEFAULT)


def known_policy(world: World, config: Config, run: str, place: str) -> RetentionPolicy | None:
    """The policy that somebody gave `run` in `place`, or that was recorded there; None where the default holds.

    In the spool the configuration decides, because it knows the disk; without one, the trainer. On a tier everybody's
    policy counts; a recorded default counts where nobody gave one.
    """
    if place == SPOOL:
        return config.retention or trainers_policy(world, run)
    here = world.tiers.get(place)
    stored = list(_standing(world, config, run, place, here)) if here else []
    own = own_policies(world, config, run, place).values()
    given = [*own, *(one.retention for one in stored if one.given != "default" and one.retention)]
    return merged(given) or merged(one.retention for one in stored if one.retention)


def own_policies(world: World, config: Config, run: str, tier: str) -> dict[str, RetentionPolicy]:
    """The policies that this node gives `run` on a tier, by where each comes from."""
    found = {"configuration": config.named(tier).retention, "trainer": trainers_policy(world, run)}
    return {given: policy for given, policy in found.items() if policy}


def trainers_policy(world: World, run: str) -> RetentionPolicy | None:
    """The policy that this node's trainer gave `run`, where it can be read."""
    return merged(one.retention for one in world.spool.policies.get(run, ()) if one.retention)


def unknown(place: Place, run: str) -> str | None:
    """Why it is not known what `run` keeps in a place; None where it is known. Nothing may be deleted there then."""
    lost = [one.why for one in place.policies.get(run, ()) if one.retention is None]
    return lost[0] if lost else None


def disagreeing(place: Place, run: str) -> tuple[StoredRetention, ...]:
    """The policies given to `run` in a place, where they are not all the same or one cannot be read; else none."""
    given = tuple(one for one in place.policies.get(run, ()) if one.given != "default" or one.retention is None)
    return given if len({one.retention for one in given}) > 1 or unknown(place, run) else ()


def _standing(world: World, config: Config, run: str, tier: str, place: Place) -> Iterator[StoredRetention]:
    """What lies on a tier, but for what this node recorded and has changed since."""
    own = own_policies(world, config, run, tier)
    for one in place.policies.get(run, ()):
        if one.by != world.who or one.given not in own:
            yield one
