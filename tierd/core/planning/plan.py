"""The plan: the actions that a daemon should take next, as a function of the inventory. The daemon's only source of
decisions.

Invariant: only `plan` may decide to delete, and only from complete, verified facts. A tier that did not answer is
`None` in the `Inventory` and proves nothing. A manifest that was not read counts by its name, because a flush puts it
after it verified every byte. Code that carries out a deletion first reads the manifests that justify it
(`daemon/tiers/prune.py`, `daemon/tiers/tiers.py`). If such a manifest is unusable, that code deletes nothing and
reports this. An unchanged inventory gives an unchanged plan.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tierd.core.config import Config
from tierd.core.errors import FormatTooNew, ManifestError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.demand import Demand, Wanted, info_of, lacked, readable
from tierd.core.planning.eviction import evictions, may_leave
from tierd.core.planning.inventory import SPOOL, CheckpointCopy, Inventory, Place, is_complete, runs, union
from tierd.core.planning.order import FlushCandidate, in_turn
from tierd.core.retention.policies import unknown
from tierd.core.retention.policy import HOPED_FOR, CheckpointInfo, Origins, Ranking, RetentionPolicy, Verdict

_order = operator.attrgetter("order")
Backoff = Mapping[str, float]  # tier -> monotonic time before which no action is planned for it, seconds


@dataclass(frozen=True, slots=True)
class Flush:
    """Copy a part to a tier: from the spool, or `relayed` from another tier if the spool does not have it."""

    part: PartId
    tier: str
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete a checkpoint from a tier, or its copy from the spool (`tier` is then `SPOOL`)."""

    checkpoint: CheckpointId
    tier: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove a file or directory of the spool by `name`: an abandoned stage, an old quarantined part, or a finished
    run's pin or record of its launch."""

    name: str
    tier: str = SPOOL


@dataclass(frozen=True, slots=True)
class RepairCopy:
    """Repair a part whose manifest is corrupt in one place from another copy, or quarantine it."""

    part: PartId
    tier: str = SPOOL


Action = Flush | Prune | Discard | RepairCopy


class RunPlan:
    """The actions for one run, each computed when it is first asked for.

    The plan depends only on this run's part of the inventory and on the configuration.
    """

    def __init__(self, inventory: Inventory, config: Config, run: str, before: Demand | None = None) -> None:
        self.demand, self._config = Demand(inventory, config, run, before), config
        self._sent: dict[str, list[tuple[FlushCandidate, list[Flush]]]] = {}
        self._prunes: dict[str, list[Prune]] = {}

    def sent(self, tier: str) -> list[tuple[FlushCandidate, list[Flush]]]:
        """The checkpoints that a tier wants and of which this daemon has parts to send, with these parts. Empty for a
        tier that does not answer."""
        if tier not in self._sent:
            place = self.demand.inventory.tiers[tier]
            self._sent[tier] = list(_lacked(self.demand, tier, place)) if place else []
        return self._sent[tier]

    def prunes(self, tier: str) -> list[Prune]:
        """The checkpoints to delete from a tier."""
        if tier not in self._prunes:
            self._prunes[tier] = list(_tier_prunes(self.demand, tier))
        return self._prunes[tier]

    @cached_property
    def here(self) -> list[Prune | Discard]:
        """The deletions to make in the spool."""
        demand, inventory = self.demand, self.demand.inventory
        leaving = demand.run in inventory.finished and may_leave(inventory, demand.run, retired(demand))
        leaving = leaving and not self._is_owed()
        gone = _departure(inventory, demand.run) if leaving else _spool_prunes(demand, self._config)
        return [*gone, *_aged_quarantine(demand, self._config)]

    def _is_owed(self) -> bool:
        """Whether a flush or prune of the run on a tier is left, which only this node does."""
        there = [name for name, place in self.demand.inventory.tiers.items() if place]
        return any(self.sent(name) or self.prunes(name) for name in there)


class Planner:
    """A planner that caches each run's plan until that run's part of the inventory, or the configuration, changes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Inventory, Config, RunPlan]] = {}

    def runs(self, inventory: Inventory, config: Config) -> dict[str, RunPlan]:
        """By run, its plan."""
        # Only whether space is low matters, so the exact share must not invalidate the cached plans.
        inventory = replace(inventory, free=0.0 if _is_low(inventory, config) else 1.0)
        found: dict[str, tuple[Inventory, Config, RunPlan]] = {}
        for run in _runs(inventory):
            own, known = inventory.alone(run), self._known.get(run)
            same = known is not None and known[1] is config and known[0] == own
            if known is not None and same:
                found[run] = known
            else:
                found[run] = own, config, RunPlan(own, config, run, known[2].demand if known else None)
        self._known = found
        return {run: plan for run, (_, _, plan) in found.items()}

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
    """The next actions, most urgent first: flushes in the order of `order.in_turn`, then deletions, oldest first.

    On a full tier, deletions are first. The caller carries out one deletion after each flush.

    Args:
        inventory: the observed places.
        config: the tiers and their policies.
        backoff: tiers for which nothing is planned until the given time.
        now: monotonic time in seconds, compared with `backoff` only.
        only: the only place whose actions are wanted; None for all places.
    """
    return _plan(inventory, _run_plans(inventory, config), _awake(inventory, backoff, now), only)


def _plan(
    inventory: Inventory, plans: Mapping[str, RunPlan], awake: Mapping[str, Place], only: str | None
) -> tuple[Action, ...]:
    if only is not None:
        awake = {name: place for name, place in awake.items() if name == only}
    here = only in (None, SPOOL)
    sent = _sent(inventory, plans, awake)
    mends = [RepairCopy(part) for part in _corrupt(inventory.spool)] if here else []
    anew = {(flush.part, flush.tier) for flush in sent}
    for name, place in awake.items():  # a part that is flushed again needs no repair
        mends += [
            RepairCopy(part, name)
            for part in _corrupt(place)
            if (part, name) not in anew and part not in inventory.busy
        ]
    actions: list[Action] = [*sent, *mends]
    urgent: list[Action] = []
    for name in awake:
        found = [prune for one in plans.values() for prune in one.prunes(name)]
        if name in inventory.full:
            urgent += found or _given_up([one.demand for one in plans.values()], name)
        else:
            actions += found
    if here:
        for one in plans.values():
            actions += one.here
        actions += [Discard(name) for name in inventory.leftovers]
    return (*urgent, *actions)


def flushes(inventory: Inventory, config: Config, backoff: Backoff, now: float) -> tuple[Flush, ...]:
    """The flushes of `plan` alone."""
    return _sent(inventory, _run_plans(inventory, config), _awake(inventory, backoff, now))


def _run_plans(inventory: Inventory, config: Config) -> dict[str, RunPlan]:
    return {run: RunPlan(inventory, config, run) for run in _runs(inventory)}


def _runs(inventory: Inventory) -> list[str]:
    return sorted({*runs(inventory), *inventory.spool.launches})


def _sent(inventory: Inventory, plans: Mapping[str, RunPlan], awake: Mapping[str, Place]) -> tuple[Flush, ...]:
    found: list[Flush] = []
    for name, tier in awake.items():
        parts: dict[CheckpointId, list[Flush]] = {}
        candidates: list[FlushCandidate] = []
        for one in plans.values():
            for candidate, some in one.sent(name):
                candidates.append(candidate)
                parts[candidate.checkpoint] = some
        if candidates:
            newest = {run: latest for run in plans if (latest := _newest(tier, run))}
            turns = in_turn(candidates, newest, inventory.sent.get(name), inventory.needed)
            found += [flush for turn in turns for flush in parts[turn]]
    return tuple(found)


def _newest(tier: Place, run: str) -> CheckpointId | None:
    return next(reversed(tier.run(run).whole), None)


def _begun(tier: Place, run: str) -> dict[CheckpointId, int]:
    """For each checkpoint newer than all complete ones on a tier: its number of parts there plus the number of nodes
    whose intents say that they send more.

    If saves outrun flushes, nodes that each sent their own newest checkpoint would never send parts of the same one.
    So all nodes finish the checkpoint that most of them began.
    """
    newest = _newest(tier, run)
    sizes = {
        seen.id: sum(map(len, seen.ranks.values())) - len(seen.defects)
        for seen in tier.run(run).halves
        if newest is None or seen.id > newest
    }
    for one, nodes in tier.announced.items():
        if one.run == run and (newest is None or one > newest):
            sizes[one] = sizes.get(one, 0) + len(nodes)
    return {one: size for one, size in sizes.items() if size}


def is_contended(inventory: Inventory, name: str, part: PartId) -> bool:
    """Whether nodes may disagree about which checkpoint to send next.

    They may if two conditions hold. Other nodes have parts of the checkpoint of `part`. And this spool has parts to
    send of several checkpoints that are newer than every complete one on the tier.
    """
    tier, seen = inventory.tiers[name], inventory.spool.checkpoints.get(part.checkpoint)
    if tier is None or seen is None or is_complete(seen.ranks):
        return False
    newest = _newest(tier, part.checkpoint.run)
    waiting = {one.checkpoint for one in pending(inventory.spool, tier, part.checkpoint.run)}
    return sum(newest is None or one > newest for one in waiting) > 1


def _awake(inventory: Inventory, backoff: Backoff, now: float) -> dict[str, Place]:
    return {name: place for name, place in inventory.tiers.items() if place and backoff.get(name, now) <= now}


def _corrupt(place: Place) -> list[PartId]:
    return [part for part, defect in place.defects() if isinstance(defect, ManifestError)]


def _lacked(demand: Demand, name: str, tier: Place) -> Iterator[tuple[FlushCandidate, list[Flush]]]:
    """The checkpoints that a tier wants and of which this daemon has parts to send, with those parts."""
    inventory, run = demand.inventory, demand.run
    waiting: dict[CheckpointId, list[Flush]] = {}
    for part in pending(inventory.spool, tier, run):
        waiting.setdefault(part.checkpoint, []).append(Flush(part, name))
    if not waiting and len(inventory.places) < 3:  # no other tier answers
        return
    wanted, begun = _wanted(demand, name, tier), _begun(tier, run)
    for part in _relays(demand, tier, wanted):
        waiting.setdefault(part.checkpoint, []).append(Flush(part, name, relayed=True))
    for one, parts in waiting.items():
        if one in wanted.ids:
            copies, at_home = demand.spread(one, name)
            yield FlushCandidate(one, begun.get(one, 0), wanted.is_for_good(one), copies, at_home), parts


def _wanted(demand: Demand, name: str, tier: Place) -> Wanted:
    """The checkpoints that a tier should have, whether it lacks parts of them or not."""
    inventory, run = demand.inventory, demand.run
    # A pin or a restore that the janitor does not know of does not count, because the janitor would prune the copy that
    # this daemon sent.
    pins = tier.pins | inventory.spool.pins if is_janitor(inventory, tier, run) else tier.pins
    over = _over(tier, demand.policy(name), run, demand.living(name))
    # Complete checkpoints are ranked alone first, so that a checkpoint that is never completed displaces none of them.
    wanted = demand.wanted(name, pins) & demand.whole
    # Incomplete checkpoints in this spool count as complete, because other spools may hold their other parts.
    here = inventory.spool.run(run).seen
    wanted = demand.wanted(name, pins, [one for one in demand.halves if one in here and one.attempt >= over]) | wanted
    wanted = Wanted(frozenset(_begun(tier, run)), lambda _: False) | wanted
    # A restore on another node waits for these checkpoints, and needs no newer ones.
    needed = demand.wanted(name, pins, inventory.needed) & inventory.needed if inventory.needed else None
    return needed | wanted if needed else wanted


def _relays(demand: Demand, tier: Place, wanted: Wanted) -> Iterator[PartId]:
    """The parts that this daemon copies to `tier` from another tier.

    These are the parts of the ranks that the newest launch saved in this spool. A janitor also relays the parts of
    ranks that the newest launch does not have, because no node saves those.
    """
    inventory, run = demand.inventory, demand.run
    there = tier.run(run)
    lacking = (demand.whole & wanted.ids).difference(there.whole)
    if not lacking:
        return
    newest = max((one.attempt for one in demand.copies), default=None)
    own = [seen.ranks for seen in inventory.spool.copies(run) if seen.id.attempt == newest]
    own = [] if run in inventory.spool.restored else own
    launch = inventory.spool.launches.get(run)
    if launch and launch.attempt == newest:
        own.append(launch.ranks)
    if not own or len(inventory.places) < 3:
        return  # no trainer saved the newest launch here, or no other tier answers
    ranks = frozenset[int]().union(*(some for one in own for some in one.values()))
    beyond = math.inf
    if is_janitor(inventory, tier, run):
        sizes = [seen.ranks for one, seen in demand.merged.items() if one.attempt == newest]
        beyond = max((size for one in sizes for size in one), default=math.inf)
    for one in lacking:
        for part in lacked(tier, demand.merged[one], ranks, beyond):
            if not inventory.spool.lists(part):
                yield part


def pending(spool: Place, tier: Place, run: str) -> list[PartId]:
    """The parts of `run` that the spool has with a readable manifest and the tier without a usable one."""
    on = tier.run(run).seen
    return [
        part
        for one, seen in spool.run(run).seen.items()
        for there in [on.get(one)]
        if there is None or there.defects or there.ranks != seen.ranks
        for part in seen.facts
        if there is None or not there.has(part)
    ]


def lender(tier: Place, part: PartId) -> PartId | None:
    """The base of a flush of `part`: the part whose equal chunks the flush may name instead of sending its own.

    It is the same rank's part of the newest checkpoint that is complete on the tier. It is None while the tier has a
    quarantined part of that rank, because the base may share a chunk that is proven corrupt.
    """
    own = part.checkpoint
    if any((one.checkpoint.run, one.rank) == (own.run, part.rank) for one in tier.quarantined):
        return None
    newest = next((one for one in reversed(tier.run(own.run).whole) if one != own), None)
    if newest is None:
        return None
    found = (PartId(newest, part.rank, world) for world in sorted(tier.checkpoints[newest].ranks))
    return next((one for one in found if tier.has(one)), None)


def judge(demand: Demand, name: str) -> tuple[Verdict, ...]:
    """Retention's verdicts over the checkpoints of a run in a place, newest first.

    The place is the spool or a tier that answers. A tier also keeps checkpoints that it wants when all places count
    (`Demand`), and checkpoints that other tiers want and lack.
    """
    tier = None if name == SPOOL else demand.inventory.tiers[name]
    return judge_spool(demand) if tier is None else _judge_tier_at_large(demand, name, tier, drops=False)


def given_up(demand: Demand, name: str) -> tuple[Verdict, ...]:
    """The verdicts of `judge` that do not keep. Most kept checkpoints are not judged one by one, which saves time."""
    tier = None if name == SPOOL else demand.inventory.tiers[name]
    verdicts = judge_spool(demand, drops=True) if tier is None else _judge_tier_at_large(demand, name, tier, drops=True)
    return tuple(verdict for verdict in verdicts if not verdict.keep)


def _judge_tier_at_large(demand: Demand, name: str, tier: Place, *, drops: bool) -> tuple[Verdict, ...]:
    over = _over(tier, demand.policy(name), demand.run, demand.living(name))
    verdicts = judge_tier(demand.inventory, tier, demand.policy(name), demand.run, demand.living(name), drops=drops)
    return tuple(verdict if verdict.keep else _at_large(demand, name, tier, verdict, over) for verdict in verdicts)


def _at_large(demand: Demand, name: str, tier: Place, verdict: Verdict, over: str) -> Verdict:
    """The final verdict over a checkpoint that the tier's own contents alone would delete.

    An incomplete checkpoint may still become complete, as in `_patient`.
    """
    one, hoped = verdict.id, verdict.id.attempt >= over
    if reasons := demand.reasons(name, one, hoped=hoped):
        return Verdict(one, True, reasons)
    seen = tier.checkpoints.get(one)
    names = demand.waiting(name, one, seen, hoped=hoped) if seen else ()
    if demand.policy(name).every and (one in demand.whole or hoped):
        # An older checkpoint that only such a tier has moves the whole chain of `keep_every`.
        names += tuple(other for other, place in demand.inventory.tiers.items() if place is None and other not in names)
    names = tuple(other for other in names if other not in demand.inventory.silent)
    return Verdict(one, True, (f"held for {', '.join(names)}",), names) if names else verdict


def judge_tier(
    inventory: Inventory,
    tier: Place,
    policy: RetentionPolicy,
    run: str,
    living: Collection[str] = (),
    *,
    drops: bool = False,
) -> tuple[Verdict, ...]:
    """Retention's verdicts over a tier's checkpoints of `run`, judged by this tier's contents alone.

    Args:
        inventory: the observed places, which give pins and origins.
        tier: the tier.
        policy: the run's policy on the tier.
        run: the run.
        living: the launches that live, as for `Ranking`.
        drops: whether to leave out most verdicts that keep.
    """
    over = _over(tier, policy, run, living)
    infos = _infos(tier, run, _pins(inventory) | inventory.held)
    verdicts = _patient(infos, policy, inventory.origins(run), over, living, drops=drops)
    if any(isinstance(defect, FormatTooNew) and part.checkpoint.run == run for part, defect in tier.defects()):
        # Nothing is deleted, because an unreadable manifest may name any chunk, and a newer tierd may keep more.
        return tuple(
            verdict if verdict.keep else Verdict(verdict.id, True, ("a newer tierd writes here, or another key",))
            for verdict in verdicts
        )
    return _held(verdicts, inventory, tier, run)


def _held(verdicts: tuple[Verdict, ...], inventory: Inventory, tier: Place, run: str) -> tuple[Verdict, ...]:
    """The verdicts, all changed to keep while the run's policy on the tier cannot be read."""
    why = unknown(tier, run) or unknown(inventory.spool, run)
    if why is None:
        return verdicts
    reason = (f"what the run keeps is not known: {why}",)
    return tuple(verdict if verdict.keep else Verdict(verdict.id, True, reason) for verdict in verdicts)


def _over(tier: Place, policy: RetentionPolicy, run: str, living: Collection[str] = ()) -> str:
    """The oldest attempt whose checkpoints may still become complete.

    Once `keep_last` checkpoints of later launches are complete, no trainer writes missing parts of an earlier launch
    any more. A launch among the `living` is an exception.
    """
    whole = tier.run(run).whole
    return min([whole[-policy.keep_last].attempt, *living]) if len(whole) >= policy.keep_last else ""


def _infos(tier: Place, run: str, pins: frozenset[CheckpointId]) -> list[CheckpointInfo]:
    """The input to retention for a tier's checkpoints of a run."""
    here = tier.run(run)
    aside = {part.checkpoint for part in tier.quarantined}
    extra = aside | (tier.owners - here.borrowed - tier.lent) | tier.cut
    infos = [info_of(seen, pins, complete=seen.complete) for seen in tier.copies(run)]
    infos += [
        CheckpointInfo(checkpoint, complete=False, verified=True, pinned=checkpoint in pins, aside=checkpoint in aside)
        for checkpoint in extra - here.seen.keys()
        if checkpoint.run == run
    ]
    return infos


def _added(own: CheckpointCopy | None, local: CheckpointCopy | None) -> CheckpointCopy:
    """A tier's copy after a flush of the spool's parts, which adds missing parts and replaces unusable ones."""
    if own is None or local is None:
        found = own or local
        assert found is not None
        return found
    bad = {part: why for part, why in own.defects.items() if part not in local.facts}
    return CheckpointCopy(own.id, union(own.ranks, local.ranks), {**local.facts, **own.facts}, bad)


def _patient(
    infos: list[CheckpointInfo],
    policy: RetentionPolicy,
    origins: Origins,
    over: str,
    living: Collection[str],
    *,
    drops: bool,
) -> tuple[Verdict, ...]:
    """Retention's verdicts, except that an incomplete checkpoint is kept if it would be kept as a complete one.

    Another node may still hold its other parts, and deleting it here would make nodes send it again and again. The
    exception does not hold for attempts before `over`.
    """
    if drops and len(infos) <= policy.keep_last:
        return ()  # `keep_last` keeps all of them
    alone = Ranking(infos, policy, origins, living)
    judged = [info for info in infos if info.id not in alone.kept] if drops else infos
    judged = sorted(judged, key=_order, reverse=True)
    halves = {
        info.id: replace(info, complete=True)
        for info in infos
        if not info.complete and info.created and info.id.attempt >= over
    }
    reasons: dict[CheckpointId, tuple[str, ...]] = {}
    if any(info.id in halves for info in judged):
        every = Ranking([halves.get(info.id, info) for info in infos], policy, origins, living)
        for ranking in (alone, every):  # as if each alone were complete, then as if all of them were
            verdicts = [ranking.verdict(half) for half in halves.values()]
            reasons |= {verdict.id: verdict.reasons for verdict in verdicts if verdict.keep}
    return tuple(
        verdict
        if verdict.keep or verdict.id not in reasons
        else Verdict(verdict.id, True, ("incomplete; if the rest comes:", *reasons[verdict.id]))
        for verdict in map(alone.verdict, judged)
    )


def _tier_prunes(demand: Demand, name: str) -> Iterator[Prune]:
    inventory, run, tier = demand.inventory, demand.run, demand.inventory.tiers[name]
    if tier is None or name in inventory.append_only or not is_janitor(inventory, tier, run):
        return
    going = given_up(demand, name)
    if not going:
        return
    # A checkpoint that the spool would send again at once is kept, even if the other ranks' parts never arrived.
    here, wanted = inventory.spool.run(run).seen, _wanted(demand, name, tier).ids
    coming = {one.id for one in going if one.id in here and here[one.id].facts and one.id in wanted}
    coming |= {part.checkpoint for part in inventory.busy}
    if None in inventory.tiers.values():
        # A checkpoint that is about to be deleted from the spool is deleted there first. If the tiers deleted theirs
        # first, the spool would keep its copy for the tier that does not answer.
        coming |= {verdict.id for verdict in given_up(demand, SPOOL)}
    for verdict in reversed(going):
        if verdict.id not in coming:
            yield Prune(verdict.id, name, verdict.reasons)


def lost_to(
    inventory: Inventory, before: Inventory, config: Config, place: str, seen: CheckpointCopy
) -> tuple[str, ...]:
    """The tiers that lose a checkpoint that they wanted, because a place deleted the last copy of it.

    Two places may have deleted their copies at the same time, each while the other still had its own. A tier wanted the
    checkpoint if it did when the deletion was decided (`before`). It also did if it wants the checkpoint now, without
    those deleted since. Checkpoints that arrived since then retire nothing, because a deletion takes long on a slow
    tier and the trainer saves meanwhile.

    Args:
        inventory: the places as observed after the deletion.
        before: the places from which the deletion was decided.
        config: the tiers and their policies.
        place: the place that deleted its copy.
        seen: the deleted copy.

    Returns:
        The names of the tiers; empty if another place still completes the checkpoint.
    """
    left = _without_what_came(inventory, before)
    if place == SPOOL:
        left = replace(left, spool=_with(left.spool, seen))
    else:
        left = replace(left, tiers={**left.tiers, place: _with(left.tiers[place] or Place(), seen)})
    demand, run = Demand(left, config, seen.id.run), seen.id.run
    if not demand.is_last(place, seen.id):
        return ()
    before = replace(before, tiers={name: tier for name, tier in before.tiers.items() if name in inventory.tiers})
    wanting = [one.waiting(place, seen.id, seen, hoped=False) for one in (Demand(before, config, run), demand)]
    return tuple(name for name in inventory.tiers if any(name in names for names in wanting))


def _without_what_came(inventory: Inventory, before: Inventory) -> Inventory:
    """`inventory` without the checkpoints that arrived since `before` in a place that answered then."""
    known = {one for place in before.places.values() for one in place.checkpoints}
    answered = [place for name, place in inventory.places.items() if name in before.places]
    came = {one for place in answered for one in place.checkpoints} - known

    def rid(place: Place) -> Place:
        return replace(place, checkpoints={one: seen for one, seen in place.checkpoints.items() if one not in came})

    tiers = {name: place and rid(place) for name, place in inventory.tiers.items()}
    return replace(inventory, spool=rid(inventory.spool), tiers=tiers) if came else inventory


def _with(place: Place, seen: CheckpointCopy) -> Place:
    return replace(place, checkpoints={**place.checkpoints, seen.id: seen})


def _given_up(demands: Iterable[Demand], name: str) -> list[Prune]:
    """The prune of the oldest checkpoint that a full tier only holds for other tiers. The next one is pruned after
    another put has failed."""
    held = [
        verdict
        for demand in demands
        for tier in [demand.inventory.tiers[name]]
        if tier is not None
        and name not in demand.inventory.append_only
        and is_janitor(demand.inventory, tier, demand.run)
        for verdict in judge(demand, name)
        if verdict.held_for and not any(part.checkpoint == verdict.id for part in demand.inventory.busy)
    ]
    if not held:
        return []
    oldest = min(held, key=lambda one: (one.id.attempt, one.id.step, one.id.run))
    return [Prune(oldest.id, name, (f"{name} is full; it was {oldest.reasons[0]}",))]


def is_janitor(inventory: Inventory, tier: Place, run: str) -> bool:
    """Whether this daemon is the janitor of `run`, which may prune the run on a shared tier.

    The janitor is the node that saved rank 0 of the newest attempt. It remains so after a full disk forced it to evict
    its copies, because no other node would finish the work. A part that was only restored to a spool does not make its
    node a janitor, because reading never deletes.
    """
    mine, known = inventory.spool.run(run).led, inventory.spool.run(run).attempts | tier.run(run).attempts
    if known and _saved_first(inventory, run) >= max(known):
        return True
    return bool(known) and max(known) in mine and run not in inventory.spool.restored


def _saved_first(inventory: Inventory, run: str) -> str:
    """The newest attempt of which this node saved rank 0, if any place shows a checkpoint of it; else empty."""
    launch = inventory.spool.launches.get(run)
    if launch is None or not any(0 in some for some in launch.ranks.values()):
        return ""
    return launch.attempt if any(launch.attempt in one.run(run).attempts for one in inventory.places.values()) else ""


def judge_spool(demand: Demand, *, drops: bool = False) -> tuple[Verdict, ...]:
    """Retention's verdicts over the spool's copies of a run.

    A copy counts as verified if a tier has verified it. It also counts as verified if every tier that is not silent
    would prune it at once, because newer checkpoints have retired it there. The spool also keeps copies that it would
    keep if all its copies were verified, or if it held every known checkpoint.

    Args:
        demand: the run's demand.
        drops: whether to leave out most verdicts that keep.
    """
    inventory, run, policy = demand.inventory, demand.run, demand.policy(SPOOL)
    late = superseded(demand)
    if drops and not late and len(inventory.spool.run(run).seen) <= policy.keep_last:
        return ()  # `keep_last` keeps all of them
    gone = retired(demand)
    pins = _pins(inventory) | inventory.held
    infos = {
        seen.id: info_of(
            seen,
            pins,
            complete=seen.complete or any(_complete_on(seen.id, place) for place in inventory.tiers.values()),
            verified=inventory.on_a_tier(seen) or seen.id in gone,
        )
        for seen in inventory.spool.copies(run)
    }
    living = demand.living(SPOOL)
    ranking = Ranking(list(infos.values()), policy, demand.origins, living)
    judged = list(infos.values())
    if drops:
        judged = [info for info in judged if not info.complete or info.id not in ranking.kept or info.id in late]
    verdicts = tuple(map(ranking.verdict, sorted(judged, key=_order, reverse=True)))
    if not late and all(verdict.keep for verdict in verdicts):
        return _bounded(verdicts, policy.keep_last)
    verified = Ranking([replace(info, verified=True) for info in infos.values()], policy, demand.origins, living)

    def at_large(verdict: Verdict) -> Verdict:
        if verdict.keep and verdict.id in late:
            verdict = Verdict(verdict.id, False, ("newer ones are complete here, and no tier wants it any more",))
        if verdict.keep or not infos[verdict.id].complete:
            return verdict
        again = verified.verdict(replace(infos[verdict.id], verified=True))
        reasons = again.reasons if again.keep else demand.reasons(SPOOL, verdict.id)
        return Verdict(verdict.id, True, reasons) if reasons else verdict

    return _bounded(tuple(map(at_large, verdicts)), policy.keep_last)


def _bounded(verdicts: tuple[Verdict, ...], count: int) -> tuple[Verdict, ...]:
    """The verdicts, changed to keep only `count` verified copies that merely wait for other ranks' parts.

    If one rank never saves again, such copies must not fill the other nodes' spools. Deleting them loses nothing,
    because a tier has each of them or no tier would keep it.
    """
    waiting = [verdict.id for verdict in verdicts if verdict.keep and verdict.reasons == (HOPED_FOR,)]
    reason = (f"incomplete, and {count} newer ones wait here, too",)
    gone = set(waiting[count:])
    return tuple(Verdict(verdict.id, False, reason) if verdict.id in gone else verdict for verdict in verdicts)


def _pins(inventory: Inventory) -> frozenset[CheckpointId]:
    return inventory.spool.pins.union(*(place.pins for place in inventory.tiers.values() if place))


def retired(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that no tier needs.

    Every tier that is not silent lacks such a copy and would prune it at once, because newer checkpoints have retired
    it there.
    """
    inventory = demand.inventory
    found = [_retired(demand, name, place) for name, place in inventory.tiers.items() if name not in inventory.silent]
    return frozenset.intersection(*found) if found else frozenset()


def complete_here(inventory: Inventory, run: str) -> list[CheckpointCopy]:
    """The checkpoints of which the spool holds every rank's part, by their manifests."""
    return [seen for seen in inventory.spool.copies(run) if seen.whole]


def superseded(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that are on no tier and will be sent to none.

    So many newer checkpoints are complete in this spool alone that every tier that is not silent wants those instead.
    So a tier that is slower than the saves does not fill the spool. If other nodes have ranks, only a tier shows which
    checkpoints are complete, and `retired` decides.
    """
    inventory = demand.inventory
    there = [(name, place) for name, place in inventory.tiers.items() if name not in inventory.silent]
    whole = complete_here(inventory, demand.run)
    if not there or len(whole) < 2:
        return frozenset()
    found = [_superseded(demand, name, place, whole) for name, place in there]
    return frozenset.intersection(*found) - inventory.needed


def _superseded(demand: Demand, name: str, tier: Place | None, whole: list[CheckpointCopy]) -> frozenset[CheckpointId]:
    """The checkpoints complete in the spool that a tier has no part of, and would prune if it had all in `whole`."""
    inventory, run = demand.inventory, demand.run
    if tier is None or unknown(tier, run) or unknown(inventory.spool, run):
        return frozenset()
    there = tier.run(run).seen
    if not (lacking := [seen.id for seen in whole if seen.id not in there and not demand.keeps(name, seen.id)]):
        return frozenset()
    pins = _pins(inventory) | inventory.held
    local = {seen.id: info_of(seen, pins, complete=True) for seen in whole}
    infos = [info for info in _infos(tier, run, pins) if info.id not in local] + list(local.values())
    ranking = Ranking(infos, demand.policy(name), demand.origins, demand.living(SPOOL))
    return frozenset(one for one in lacking if not ranking.verdict(local[one]).keep and not demand.reasons(name, one))


def evictable(inventory: Inventory, config: Config) -> tuple[CheckpointId, ...]:
    """The spool's copies that the daemon may evict when the disk is full, in the order of eviction."""
    demands = [Demand(inventory, config, run) for run in sorted({one.run for one in inventory.spool.checkpoints})]
    gone = frozenset[CheckpointId]().union(*(retired(one) | superseded(one) for one in demands))
    return evictions(inventory, gone)


def _retired(demand: Demand, name: str, tier: Place | None) -> frozenset[CheckpointId]:
    """The checkpoints in the spool that a tier lacks and would prune at once."""
    if tier is None or unknown(tier, demand.run) or unknown(demand.inventory.spool, demand.run):
        return frozenset()
    inventory, run, policy = demand.inventory, demand.run, demand.policy(name)
    waiting = {part.checkpoint for part in pending(inventory.spool, tier, run)}
    waiting = {one for one in waiting if not demand.keeps(name, one)}
    if not waiting:
        return frozenset()
    # Each checkpoint is judged as if it alone were added, because others that are merely pending must not retire it.
    living = demand.living(SPOOL)
    pins, over = _pins(inventory) | inventory.held, _over(tier, policy, run, living)
    ranking = Ranking(_infos(tier, run, pins), policy, demand.origins, living)
    gone = set()
    for checkpoint in waiting:
        added, hoped = (
            _added(tier.checkpoints.get(checkpoint), readable(inventory.spool.checkpoints[checkpoint])),
            checkpoint.attempt >= over,
        )
        info = info_of(added, pins, complete=is_complete(added.ranks) or hoped)
        if not ranking.verdict(info).keep and not demand.reasons(name, checkpoint, hoped=hoped):
            gone.add(checkpoint)
    return frozenset(gone)


def _is_low(inventory: Inventory, config: Config) -> bool:
    return inventory.free * 100 < config.min_free_percent


def _complete_on(checkpoint: CheckpointId, tier: Place | None) -> bool:
    seen = tier.checkpoints.get(checkpoint) if tier else None
    return seen is not None and seen.usable


def _spool_prunes(demand: Demand, config: Config) -> Iterator[Prune]:
    inventory = demand.inventory
    busy = {part.checkpoint for part in inventory.busy} | inventory.held
    low = _is_low(inventory, config)
    verdicts = judge_spool(demand, drops=not low)
    gone = retired(demand) if low else frozenset()
    counted = {
        v.id for v in verdicts if low and (v.id in gone or inventory.on_a_tier(inventory.spool.checkpoints[v.id]))
    }
    trained = demand.run not in inventory.trainerless  # without a trainer no restore is imminent, and a tier has a copy
    spared = _pins(inventory) | {max(counted, default=None)} if trained else inventory.local_pins
    for verdict in reversed(verdicts):
        if verdict.id in busy:
            continue
        if not verdict.keep:
            yield Prune(verdict.id, SPOOL, verdict.reasons)
        elif verdict.id in counted and verdict.id not in spared:
            yield Prune(verdict.id, SPOOL, (f"under {config.min_free_percent:g} % of the spool's disk is free",))


def _departure(inventory: Inventory, run: str) -> Iterator[Prune | Discard]:
    """The deletion of a finished run from the spool: its pins, which a tier has too, then its copies, the newest last,
    then the record that the run was saved here."""
    for pin in sorted(inventory.spool.pins):
        if pin.run == run:
            yield Discard(f"pins/{run}/{pin.name}")
    busy = {part.checkpoint for part in inventory.busy} | inventory.held
    for one in sorted(seen.id for seen in inventory.spool.copies(run)):
        if one not in busy:
            yield Prune(one, SPOOL, ("the run is finished, and tiers have what they want of it",))
    if run in inventory.spool.launches and not any(inventory.spool.copies(run)):
        yield Discard(f"saved/{run}/{inventory.spool.launches[run].attempt}")


def _aged_quarantine(demand: Demand, config: Config) -> Iterator[Discard]:
    inventory, run = demand.inventory, demand.run
    # Kept for a person to examine until `keep_last` newer verified checkpoints exist.
    aside = [part for part in inventory.spool.quarantined if part.checkpoint.run == run]
    if not aside:
        return
    verified = sorted(seen.id for seen in inventory.spool.copies(run) if inventory.on_a_tier(seen))
    low = _is_low(inventory, config)
    for part in aside:
        newer = len(verified) - bisect_right(verified, part.checkpoint)
        if newer >= demand.policy(SPOOL).keep_last or low:
            yield Discard(f"quarantine/{part.path}")
