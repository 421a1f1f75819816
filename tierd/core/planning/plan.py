"""The plan: the actions that a daemon should take next, as a function of the inventory. The daemon's only source of
decisions.

Invariant: only `plan` may decide to delete, and only from complete, verified facts. A tier that did not answer is
`None` in the `Inventory` and proves nothing. A manifest that was not read counts by its name, because a flush puts it
after it verified every byte. Code that carries out a deletion first reads the manifests that justify it
(`daemon/tiers/tier_prune.py`, `daemon/tiers/tier_operations.py`). If such a manifest is unusable, that code deletes
nothing and reports this. An unchanged inventory gives an unchanged plan.

The spool deletes what retention gives up, copies of finished runs and old quarantined parts, and more of each while its
disk is nearly full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tierd.core.config import Config
from tierd.core.errors import ManifestError
from tierd.core.ids import CheckpointId, PartId, retention_key
from tierd.core.planning.demand import Demand
from tierd.core.planning.eviction import is_disk_low, may_leave_spool, retired_copies
from tierd.core.planning.flush_order import (
    FlushCandidate,
    candidates_of,
    demanded_on,
    newest_complete_on,
    order_flushes,
)
from tierd.core.planning.inventory import Inventory, observed_runs
from tierd.core.planning.place import SPOOL, Action, Discard, Flush, Place, Prune, RepairCopy
from tierd.core.planning.pruning import (
    aged_quarantine,
    finished_run_deletions,
    prunes_when_full,
    spool_prunes,
    tier_prunes,
)
from tierd.core.retention.policy import StoredRetention


@dataclass(frozen=True, slots=True)
class ForeignRunBacklog:
    """Checkpoints of a run that a tier wants and lacks, and that another node is to send there.

    `made_s` is when the newest of them was made, by its trainer's clock, seconds since 1970; 0 if that is not known.
    `records` is what other nodes recorded on the tier.
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


def foreign_run_backlog(inventory: Inventory, config: Config, run: str, tier: str) -> ForeignRunBacklog | None:
    """Return what a tier with `backfill` lacks of a run that is left to another node; None if it lacks nothing."""
    place = inventory.tiers.get(tier)
    if place is None or run not in inventory.filling or not config.tier_named(tier).backfill:
        return None
    records = place.policies.get(run, ())
    if run in inventory.spool.launches or not records or any(record.by == inventory.node_id for record in records):
        return None
    demand = Demand(inventory, config, run)
    lacking = (demand.complete_ids & demanded_on(demand, tier, place).ids).difference(place.run(run).usable)
    facts = [spoken for checkpoint in lacking if (spoken := demand.merged[checkpoint].metadata_facts)]
    made_s = max((part_facts.created.timestamp() for part_facts in facts), default=0.0)
    return ForeignRunBacklog(run, tier, len(lacking), made_s, records) if lacking else None


Backoff = Mapping[str, float]  # tier -> monotonic time before which no action is planned for it, seconds


class RunPlan:
    """The actions for one run, computed when first asked for, from this run's part of the inventory alone."""

    def __init__(self, inventory: Inventory, config: Config, run: str, before: Demand | None = None) -> None:
        self.demand, self._config = Demand(inventory, config, run, before), config
        self._sent: dict[str, list[tuple[FlushCandidate, list[Flush]]]] = {}
        self._prunes: dict[str, list[Prune]] = {}

    def flushes(self, tier: str) -> list[tuple[FlushCandidate, list[Flush]]]:
        """The checkpoints that a tier wants and of which this daemon has parts to send, with these parts. Empty for a
        tier that does not answer."""
        if tier not in self._sent:
            place = self.demand.inventory.tiers[tier]
            self._sent[tier] = list(candidates_of(self.demand, tier, place)) if place else []
        return self._sent[tier]

    def prunes(self, tier: str) -> list[Prune]:
        """The checkpoints to delete from a tier."""
        if tier not in self._prunes:
            self._prunes[tier] = list(tier_prunes(self.demand, tier))
        return self._prunes[tier]

    @cached_property
    def spool_deletions(self) -> list[Prune | Discard]:
        """The deletions to make in the spool."""
        demand, inventory = self.demand, self.demand.inventory
        if demand.run in inventory.spool.local_only:
            return []
        leaving = demand.run in inventory.finished and may_leave_spool(inventory, demand.run, retired_copies(demand))
        leaving = leaving and not self._is_owed()
        prunes = finished_run_deletions(inventory, demand.run) if leaving else spool_prunes(demand, self._config)
        return [*prunes, *aged_quarantine(demand, self._config)]

    def _is_owed(self) -> bool:
        """Whether a flush or prune of the run on a tier is left, which only this node does."""
        answering = [name for name, place in self.demand.inventory.tiers.items() if place]
        return any(self.flushes(name) or self.prunes(name) for name in answering)


class Planner:
    """A planner that caches each run's plan until that run's part of the inventory, or the configuration, changes."""

    def __init__(self) -> None:
        self._cached_plans: dict[str, tuple[Inventory, Config, RunPlan]] = {}

    def runs(self, inventory: Inventory, config: Config) -> dict[str, RunPlan]:
        # Only whether space is low matters, so the exact share must not invalidate the cached plans.
        inventory = replace(inventory, free=0.0 if is_disk_low(inventory, config) else 1.0)
        plans: dict[str, tuple[Inventory, Config, RunPlan]] = {}
        for run in _runs(inventory):
            run_inventory, cached = inventory.of_run(run), self._cached_plans.get(run)
            same = cached is not None and cached[1] is config and cached[0] == run_inventory
            if cached is not None and same:
                plans[run] = cached
            else:
                plans[run] = (
                    run_inventory,
                    config,
                    RunPlan(run_inventory, config, run, cached[2].demand if cached else None),
                )
        self._cached_plans = plans
        return {run: plan for run, (_, _, plan) in plans.items()}

    def adopt(self, other: Planner) -> None:
        """Begin with the plans that another planner has cached."""
        self._cached_plans = other._cached_plans

    def demand(self, inventory: Inventory, config: Config, run: str) -> Demand:
        """A run's demand, from its cached plan."""
        plan = self.runs(inventory, config).get(run)
        return plan.demand if plan else Demand(inventory, config, run)

    def retired(self, inventory: Inventory, config: Config, name: str) -> list[Prune]:
        """The copies that retention gives up on a tier, from cached plans. Empty for a tier that does not answer."""
        plans = self.runs(inventory, config).values() if inventory.tiers[name] else ()
        return [prune for plan in plans for prune in plan.prunes(name)]

    def plan(
        self, inventory: Inventory, config: Config, backoff: Backoff, now: float, only: str | None = None
    ) -> tuple[Action, ...]:
        """Plan like the function `plan`, from cached plans."""
        return _plan(inventory, self.runs(inventory, config), _awake(inventory, backoff, now), only)

    def flushes(self, inventory: Inventory, config: Config) -> tuple[Flush, ...]:
        """The flushes like the function `flushes`, for all tiers and from cached plans."""
        return _sent(inventory, self.runs(inventory, config), _awake(inventory, {}, 0.0))


def plan(
    inventory: Inventory, config: Config, backoff: Backoff, now: float, only: str | None = None
) -> tuple[Action, ...]:
    """The next actions, most urgent first: flushes in the order of `order_flushes`, then deletions, oldest first.

    On a full tier, deletions are first. The caller carries out one deletion after each flush. Nothing is planned for a
    tier before its time in `backoff`, by the clock of `now`. `only` names the only place whose actions are wanted.
    """
    return _plan(inventory, _run_plans(inventory, config), _awake(inventory, backoff, now), only)


def _plan(
    inventory: Inventory, plans: Mapping[str, RunPlan], awake: Mapping[str, Place], only: str | None
) -> tuple[Action, ...]:
    if only is not None:
        awake = {name: place for name, place in awake.items() if name == only}
    for_spool = only in (None, SPOOL)
    sent = _sent(inventory, plans, awake)
    repairs = [RepairCopy(part) for part in _corrupt(inventory.spool)] if for_spool else []
    flushed = {(flush.part, flush.tier) for flush in sent}
    for name, place in awake.items():  # a part that is flushed again needs no repair
        repairs += [
            RepairCopy(part, name)
            for part in _corrupt(place)
            if (part, name) not in flushed and part not in inventory.busy
        ]
    actions: list[Action] = [*sent, *repairs]
    urgent: list[Action] = []
    for name in awake:
        prunes = [prune for plan in plans.values() for prune in plan.prunes(name)]
        if name in inventory.full:
            urgent += prunes + prunes_when_full([plan.demand for plan in plans.values()], name)
        else:
            actions += prunes
    if for_spool:
        for plan in plans.values():
            actions += plan.spool_deletions
        actions += [Discard(name) for name in inventory.leftovers]
    return (*urgent, *actions)


def flushes(inventory: Inventory, config: Config, backoff: Backoff, now: float) -> tuple[Flush, ...]:
    """The flushes of `plan` alone."""
    return _sent(inventory, _run_plans(inventory, config), _awake(inventory, backoff, now))


def _run_plans(inventory: Inventory, config: Config) -> dict[str, RunPlan]:
    return {run: RunPlan(inventory, config, run) for run in _runs(inventory)}


def _runs(inventory: Inventory) -> list[str]:
    return sorted({*observed_runs(inventory), *inventory.spool.launches})


def _sent(inventory: Inventory, plans: Mapping[str, RunPlan], awake: Mapping[str, Place]) -> tuple[Flush, ...]:
    flushes: list[Flush] = []
    for name, tier in awake.items():
        parts: dict[CheckpointId, list[Flush]] = {}
        local: list[FlushCandidate] = []
        filled: list[FlushCandidate] = []  # after all others, because nobody here waits for them
        for plan in plans.values():
            for candidate, candidate_flushes in plan.flushes(name):
                (filled if plan.demand.fills(name) else local).append(candidate)
                parts[candidate.checkpoint] = candidate_flushes
        newest = {run: latest for run in plans if (latest := newest_complete_on(tier, run))} if parts else {}
        for candidates in (local, filled):
            sent = inventory.sent.get(name)
            turns = order_flushes(candidates, newest, sent, inventory.awaited, newest_first=inventory.node_ends)
            flushes += [flush for turn in turns for flush in parts[turn]]
    return tuple(flushes)


def _awake(inventory: Inventory, backoff: Backoff, now: float) -> dict[str, Place]:
    return {name: place for name, place in inventory.tiers.items() if place and backoff.get(name, now) <= now}


def _corrupt(place: Place) -> list[PartId]:
    return [part for part, defect in place.defects() if isinstance(defect, ManifestError)]
