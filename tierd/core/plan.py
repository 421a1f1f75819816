"""The plan: from what was observed to what should be done next. The daemon's only source of decisions.

Law: only `plan` may decide to delete, and only from complete, verified facts: a tier that did not answer is `None` in
the `World` and proves nothing. A manifest that nobody has read counts by its name: it was put after every byte was
verified. Whoever carries a deletion out reads first what it rests on (`daemon/prune.py`, `daemon/tiers.py`) and, where
that cannot be used, deletes nothing and makes it known. Called again on an unchanged world, it gives the same answer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tierd.core.config import Config
from tierd.core.demand import Demand, info_of, lacked, readable
from tierd.core.errors import FormatTooNew, ManifestError
from tierd.core.eviction import evictions, may_leave
from tierd.core.ids import CheckpointId, PartId
from tierd.core.order import Candidate, in_turn
from tierd.core.policies import unknown
from tierd.core.retention import HOPED_FOR, CheckpointInfo, Origins, Ranking, RetentionPolicy, Verdict, decide
from tierd.core.world import SPOOL, Place, Seen, World, is_complete, runs, union

Backoff = Mapping[str, float]  # tier -> monotonic time before which it is left alone, seconds


@dataclass(frozen=True, slots=True)
class Flush:
    """Copy a part to a tier: from the spool, or `relayed` from another tier because the spool has it no more."""

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
    """Remove a stage that its writer left behind in the spool, or a quarantined part that retention has retired."""

    name: str
    tier: str = SPOOL


@dataclass(frozen=True, slots=True)
class Mend:
    """A part's manifest is corrupt in one place: heal it from another, or quarantine it."""

    part: PartId
    tier: str = SPOOL


Action = Flush | Prune | Discard | Mend


def plan(world: World, config: Config, backoff: Backoff, now: float) -> tuple[Action, ...]:
    """What to do next, most urgent first: flushes as `order.in_turn` has it, then deletions oldest first. On a tier
    that is full, deletions come first. Whoever acts lets a deletion have its turn after each flush.

    Args:
        world: what was observed.
        config: the tiers and their policies.
        backoff: tiers to leave alone for now.
        now: monotonic time, seconds; compared with `backoff` only.
    """
    awake = _awake(world, backoff, now)
    demands = _demands(world, config)
    sent = _sent(world, demands, awake)
    mends = [Mend(part) for part in _corrupt(world.spool)]
    anew = {(flush.part, flush.tier) for flush in sent}
    for name, place in awake.items():  # what is flushed anew needs no mending
        mends += [Mend(part, name) for part in _corrupt(place) if (part, name) not in anew and part not in world.busy]
    actions: list[Action] = [*sent, *mends]
    urgent: list[Action] = []
    for name in awake:
        found = [prune for demand in demands.values() for prune in _tier_prunes(demand, name)]
        if name in world.full:
            urgent += found or _given_up(demands.values(), name)
        else:
            actions += found
    for demand in demands.values():
        leaving = demand.run in world.finished and may_leave(world, demand.run, retired(demand))
        leaving = leaving and not _is_owed(demand)
        actions += _departure(world, demand.run) if leaving else _spool_prunes(demand, config)
        actions += _aged_quarantine(demand, config)
    actions += [Discard(name) for name in world.leftovers]
    return (*urgent, *actions)


def flushes(world: World, config: Config, backoff: Backoff, now: float) -> tuple[Flush, ...]:
    """The flushes of `plan` alone."""
    return _sent(world, _demands(world, config), _awake(world, backoff, now))


def _demands(world: World, config: Config) -> dict[str, Demand]:
    return {run: Demand(world, config, run) for run in sorted({*runs(world), *world.spool.launches})}


def _sent(world: World, demands: Mapping[str, Demand], awake: Mapping[str, Place]) -> tuple[Flush, ...]:
    found: list[Flush] = []
    for name, tier in awake.items():
        parts: dict[CheckpointId, list[Flush]] = {}
        candidates: list[Candidate] = []
        for demand in demands.values():
            for candidate, some in _lacked(demand, name, tier):
                candidates.append(candidate)
                parts[candidate.checkpoint] = some
        if candidates:
            newest = {run: one for run in demands if (one := _newest(tier, run))}
            turns = in_turn(candidates, newest, world.sent.get(name), world.needed)
            found += [flush for one in turns for flush in parts[one]]
    return tuple(found)


def _newest(tier: Place, run: str) -> CheckpointId | None:
    return max((seen.id for seen in tier.copies(run) if seen.usable), default=None)


def _begun(tier: Place, run: str) -> dict[CheckpointId, int]:
    """How many parts there are of each checkpoint that is newer than all complete ones, and how many nodes announced
    that they send more. Where saves outrun flushes, nodes that each sent their newest would never send parts of the
    same one; so they finish what most of them began."""
    newest = _newest(tier, run)
    sizes = {
        seen.id: sum(map(len, seen.ranks.values())) - len(seen.defects)
        for seen in tier.copies(run)
        if not seen.usable and (newest is None or seen.id > newest)
    }
    for one, nodes in tier.announced.items():
        if one.run == run and (newest is None or one > newest):
            sizes[one] = sizes.get(one, 0) + len(nodes)
    return {one: size for one, size in sizes.items() if size}


def is_contended(world: World, name: str, part: PartId) -> bool:
    """Whether nodes may differ in what they take for the newest checkpoint: others have ranks of `part`'s, and of
    more than one newer than all that are complete on the tier this spool has parts to send."""
    tier, seen = world.tiers[name], world.spool.checkpoints.get(part.checkpoint)
    if tier is None or seen is None or is_complete(seen.ranks):
        return False
    newest = _newest(tier, part.checkpoint.run)
    waiting = {one.checkpoint for one in pending(world.spool, tier, part.checkpoint.run)}
    return sum(newest is None or one > newest for one in waiting) > 1


def _awake(world: World, backoff: Backoff, now: float) -> dict[str, Place]:
    return {name: place for name, place in world.tiers.items() if place and backoff.get(name, now) <= now}


def _corrupt(place: Place) -> list[PartId]:
    return [part for part, defect in place.defects() if isinstance(defect, ManifestError)]


def _lacked(demand: Demand, name: str, tier: Place) -> Iterator[tuple[Candidate, list[Flush]]]:
    """The checkpoints that a tier wants and of which this daemon has parts to send, with those parts."""
    world, run = demand.world, demand.run
    waiting: dict[CheckpointId, list[Flush]] = {}
    for part in pending(world.spool, tier, run):
        waiting.setdefault(part.checkpoint, []).append(Flush(part, name))
    if not waiting and len(world.places) < 3:  # no other tier answers
        return
    wanted, begun = _wanted(demand, name, tier), _begun(tier, run)
    for part in _relays(demand, tier, wanted):
        waiting.setdefault(part.checkpoint, []).append(Flush(part, name, relayed=True))
    for one, parts in waiting.items():
        if one in wanted:
            copies, at_home = demand.spread(one, name)
            yield Candidate(one, begun.get(one, 0), wanted[one], copies, at_home), parts


def _wanted(demand: Demand, name: str, tier: Place) -> dict[CheckpointId, bool]:
    """What a tier is to be sent as far as it lacks it; whether for good."""
    world, run = demand.world, demand.run
    # A pin or a restore that the janitor does not know of keeps nothing on the tier: it would be sent and pruned.
    pins = tier.pins | world.spool.pins if is_janitor(world, tier, run) else tier.pins
    over = _over(tier, demand.policy(name), run, demand.living(name))
    # Ranks that never come must not keep what is whole already from the tier.
    wanted = {one: good for one, good in demand.wanted(name, pins).items() if one in demand.whole}
    # Of what is in this spool, other spools may hold the rest.
    hoped = demand.wanted(name, pins, {seen.id for seen in world.spool.copies(run) if seen.id.attempt >= over})
    wanted = dict.fromkeys(_begun(tier, run), False) | hoped | wanted
    # A restore elsewhere waits for it, and does not hope for anything newer.
    needed = demand.wanted(name, pins, world.needed) if world.needed else {}
    return {one: good for one, good in needed.items() if one in world.needed} | wanted


def _relays(demand: Demand, tier: Place, wanted: Collection[CheckpointId]) -> Iterator[PartId]:
    """The parts that this daemon copies to `tier` from another one: those of the ranks of the newest launch that were
    saved in its spool; and, for a janitor, of the ranks that this launch does not have, because nobody saves those."""
    world, run = demand.world, demand.run
    newest = max((one.attempt for one in demand.copies), default=None)
    own = [seen.ranks for seen in world.spool.copies(run) if seen.id.attempt == newest]
    own = [] if run in world.spool.restored else own
    launch = world.spool.launches.get(run)
    if launch and launch.attempt == newest:
        own.append(launch.ranks)
    if not own or len(world.places) < 3:
        return  # nobody saves the run here, or there is no other tier
    ranks = frozenset[int]().union(*(some for one in own for some in one.values()))
    beyond = math.inf
    if is_janitor(world, tier, run):
        sizes = [seen.ranks for one, seen in demand.merged.items() if one.attempt == newest]
        beyond = max((size for one in sizes for size in one), default=math.inf)
    for one in demand.whole.intersection(wanted):
        seen = tier.checkpoints.get(one)
        if seen is None or not seen.usable:
            for part in lacked(tier, demand.merged[one], ranks, beyond):
                if not world.spool.lists(part):
                    yield part


def pending(spool: Place, tier: Place, run: str) -> list[PartId]:
    """The readable parts of `run` in the spool that the tier has no usable manifest of."""
    return [
        part
        for seen in spool.copies(run)
        for there in [tier.checkpoints.get(seen.id)]
        for part in seen.facts
        if there is None or not there.has(part)
    ]


def lender(tier: Place, part: PartId) -> PartId | None:
    """Whose chunks a flush of `part` may name where they are equal: the same rank's part of the newest checkpoint that
    is complete on the tier. Nobody's while a part of that rank is set aside there: what is proven bad may be shared."""
    own = part.checkpoint
    if any((one.checkpoint.run, one.rank) == (own.run, part.rank) for one in tier.quarantined):
        return None
    whole = [seen for seen in tier.copies(own.run) if seen.id != own and seen.usable]
    newest = max(whole, key=lambda seen: seen.id, default=None)
    if newest is None:
        return None
    found = (PartId(newest.id, part.rank, world) for world in sorted(newest.ranks))
    return next((one for one in found if tier.has(one)), None)


def judge(demand: Demand, name: str) -> tuple[Verdict, ...]:
    """Retention's verdicts over what a place, the spool or a tier that answers, holds of a run: newest first. A tier
    keeps also what it wants by everything that is known, and what other tiers want and lack."""
    world = demand.world
    tier = None if name == SPOOL else world.tiers[name]
    if tier is None:
        return judge_spool(demand)
    over = _over(tier, demand.policy(name), demand.run, demand.living(name))
    verdicts = judge_tier(world, tier, demand.policy(name), demand.run, demand.living(name))
    return tuple(verdict if verdict.keep else _at_large(demand, name, tier, verdict, over) for verdict in verdicts)


def _at_large(demand: Demand, name: str, tier: Place, verdict: Verdict, over: str) -> Verdict:
    """The verdict over what a tier by itself would delete. What is incomplete may become complete as in `_patient`."""
    one, hoped = verdict.id, verdict.id.attempt >= over
    if reasons := demand.reasons(name, one, hoped=hoped):
        return Verdict(one, True, reasons)
    seen = tier.checkpoints.get(one)
    names = demand.waiting(name, one, seen, hoped=hoped) if seen else ()
    names = tuple(other for other in names if other not in demand.world.silent)
    return Verdict(one, True, (f"held for {', '.join(names)}",), names) if names else verdict


def judge_tier(
    world: World, tier: Place, policy: RetentionPolicy, run: str, living: Collection[str] = ()
) -> tuple[Verdict, ...]:
    """Retention's verdicts over what a tier holds of `run`, by that alone. `living`: as for `Ranking`."""
    over = _over(tier, policy, run, living)
    infos = _infos(tier, run, _pins(world) | world.held)
    verdicts = _patient(infos, policy, world.origins(run), over, living)
    if any(isinstance(defect, FormatTooNew) and part.checkpoint.run == run for part, defect in tier.defects()):
        # Which chunks a newer tierd's manifest names cannot be known, nor what it would keep.
        return tuple(
            verdict if verdict.keep else Verdict(verdict.id, True, ("a newer tierd writes here, or another key",))
            for verdict in verdicts
        )
    return _held(verdicts, world, tier, run)


def _held(verdicts: tuple[Verdict, ...], world: World, tier: Place, run: str) -> tuple[Verdict, ...]:
    """Everything stays on a tier while it is not known what the run wants kept there."""
    why = unknown(tier, run) or unknown(world.spool, run)
    if why is None:
        return verdicts
    reason = (f"what the run keeps is not known: {why}",)
    return tuple(verdict if verdict.keep else Verdict(verdict.id, True, reason) for verdict in verdicts)


def _over(tier: Place, policy: RetentionPolicy, run: str, living: Collection[str] = ()) -> str:
    """The oldest attempt whose checkpoints may still become complete. `keep_last` complete ones of later launches are
    enough: nobody writes the rest of an earlier one's any more, unless it is among the `living`."""
    whole = sorted((seen.id.attempt for seen in tier.copies(run) if seen.usable), reverse=True)
    return min([whole[policy.keep_last - 1], *living]) if len(whole) >= policy.keep_last else ""


def _infos(tier: Place, run: str, pins: frozenset[CheckpointId]) -> list[CheckpointInfo]:
    """What retention is told of a tier."""
    lent = {owner for seen in tier.copies(run) for facts in seen.facts.values() for owner in facts.borrowed}
    aside = {part.checkpoint for part in tier.quarantined}
    extra = aside | (tier.owners - lent - tier.lent) | tier.cut
    infos = [info_of(seen, pins, complete=is_complete(seen.ranks)) for seen in tier.copies(run)]
    known = {info.id for info in infos}
    infos += [
        CheckpointInfo(checkpoint, complete=False, verified=True, pinned=checkpoint in pins, aside=checkpoint in aside)
        for checkpoint in extra - known
        if checkpoint.run == run
    ]
    return infos


def _added(own: Seen | None, local: Seen | None) -> Seen:
    """A tier's copy as it would be with the spool's parts: they are sent where they lack, or cannot be used there."""
    if own is None or local is None:
        found = own or local
        assert found is not None
        return found
    bad = {part: why for part, why in own.defects.items() if part not in local.facts}
    return Seen(own.id, union(own.ranks, local.ranks), {**local.facts, **own.facts}, bad)


def _patient(
    infos: list[CheckpointInfo], policy: RetentionPolicy, origins: Origins, over: str, living: Collection[str]
) -> tuple[Verdict, ...]:
    """Retention's verdicts, but an incomplete checkpoint stays where it would stay if it were whole: another node may
    still hold the rest of it, and would send what is deleted here again and again. Not of attempts before `over`."""
    halves = {
        info.id: replace(info, complete=True)
        for info in infos
        if not info.complete and info.created and info.id.attempt >= over
    }
    reasons: dict[CheckpointId, tuple[str, ...]] = {}
    for some in (infos, [halves.get(info.id, info) for info in infos]):  # each alone, and all of them
        ranking = Ranking(some, policy, origins, living)
        verdicts = [ranking.verdict(half) for half in halves.values()]
        reasons |= {verdict.id: verdict.reasons for verdict in verdicts if verdict.keep}
    return tuple(
        verdict
        if verdict.keep or verdict.id not in reasons
        else Verdict(verdict.id, True, ("incomplete; if the rest comes:", *reasons[verdict.id]))
        for verdict in decide(infos, policy, origins, living)
    )


def _tier_prunes(demand: Demand, name: str) -> Iterator[Prune]:
    world, run, tier = demand.world, demand.run, demand.world.tiers[name]
    if tier is None or name in world.append_only or not is_janitor(world, tier, run):
        return
    going = [verdict for verdict in judge(demand, name) if not verdict.keep]
    if not going:
        return
    # What the spool would send again at once stays, even where the other ranks' parts never came.
    coming = {seen.id for seen in world.spool.copies(run) if seen.facts}.intersection(_wanted(demand, name, tier))
    coming |= {part.checkpoint for part in world.busy}
    if None in world.tiers.values():
        # What leaves the spool does so first: once on no tier, it would stay there for the tier that does not answer.
        coming |= {verdict.id for verdict in judge_spool(demand) if not verdict.keep}
    for verdict in reversed(going):
        if verdict.id not in coming:
            yield Prune(verdict.id, name, verdict.reasons)


def lost_to(world: World, before: World, config: Config, place: str, seen: Seen) -> tuple[str, ...]:
    """The tiers that wanted a checkpoint of which a place has just deleted its copy, `seen`, if no place has another
    one: two places may have deleted theirs at once, each while the other still had it.

    A tier wanted it if it did when its deletion was decided, in `before`, or does without what has gone since. What has
    come since, by `world`, retires nothing: a deletion takes long on a slow tier, and the trainer saves meanwhile.
    """
    left = _without_what_came(world, before)
    if place == SPOOL:
        left = replace(left, spool=_with(left.spool, seen))
    else:
        left = replace(left, tiers={**left.tiers, place: _with(left.tiers[place] or Place(), seen)})
    demand, run = Demand(left, config, seen.id.run), seen.id.run
    if not demand.is_last(place, seen.id):
        return ()
    before = replace(before, tiers={name: tier for name, tier in before.tiers.items() if name in world.tiers})
    wanting = [one.waiting(place, seen.id, seen, hoped=False) for one in (Demand(before, config, run), demand)]
    return tuple(name for name in world.tiers if any(name in names for names in wanting))


def _without_what_came(world: World, before: World) -> World:
    """`world` without the checkpoints that came since to a place that answered before."""
    known = {one for place in before.places.values() for one in place.checkpoints}
    answered = [place for name, place in world.places.items() if name in before.places]
    came = {one for place in answered for one in place.checkpoints} - known

    def rid(place: Place) -> Place:
        return replace(place, checkpoints={one: seen for one, seen in place.checkpoints.items() if one not in came})

    tiers = {name: place and rid(place) for name, place in world.tiers.items()}
    return replace(world, spool=rid(world.spool), tiers=tiers) if came else world


def _with(place: Place, seen: Seen) -> Place:
    return replace(place, checkpoints={**place.checkpoints, seen.id: seen})


def _given_up(demands: Iterable[Demand], name: str) -> list[Prune]:
    """Of what a full tier only holds for others, the oldest. The next one goes when a put has failed once more."""
    held = [
        verdict
        for demand in demands
        for tier in [demand.world.tiers[name]]
        if tier is not None and name not in demand.world.append_only and is_janitor(demand.world, tier, demand.run)
        for verdict in judge(demand, name)
        if verdict.held_for and not any(part.checkpoint == verdict.id for part in demand.world.busy)
    ]
    if not held:
        return []
    oldest = min(held, key=lambda one: (one.id.attempt, one.id.step, one.id.run))
    return [Prune(oldest.id, name, (f"{name} is full; it was {oldest.reasons[0]}",))]


def is_janitor(world: World, tier: Place, run: str) -> bool:
    """Whether this daemon may prune `run` on a shared tier: it saved rank 0 of the newest attempt. If a full disk took
    the copies from its spool, it still is, because nobody else would do what is left. What was only restored to a spool
    makes nobody a janitor, because reading never deletes."""
    mine = {seen.id.attempt for seen in world.spool.copies(run) if any(0 in some for some in seen.ranks.values())}
    known = {seen.id.attempt for place in (world.spool, tier) for seen in place.copies(run)}
    if known and _saved_first(world, run) >= max(known):
        return True
    return bool(known) and max(known) in mine and run not in world.spool.restored


def _saved_first(world: World, run: str) -> str:
    """The newest attempt of which this node saved rank 0, if any place shows anything of it; else empty."""
    launch = world.spool.launches.get(run)
    if launch is None or not any(0 in some for some in launch.ranks.values()):
        return ""
    return launch.attempt if any(one.attempt == launch.attempt for one in world.copies(run)) else ""


def judge_spool(demand: Demand) -> tuple[Verdict, ...]:
    """Retention's verdicts over the spool's copies of a run: a copy counts as verified when a tier verified it, or when
    every tier that is not silent would drop it at once, because newer ones have retired it there. The spool keeps also
    what it would keep if all of it were verified, or if it held everything that is known."""
    world, run, policy = demand.world, demand.run, demand.policy(SPOOL)
    gone, late = retired(demand), superseded(demand)
    pins = _pins(world) | world.held
    infos = {
        seen.id: info_of(
            seen,
            pins,
            complete=is_complete(seen.ranks) or any(_complete_on(seen.id, place) for place in world.tiers.values()),
            verified=world.on_a_tier(seen) or seen.id in gone,
        )
        for seen in world.spool.copies(run)
    }
    living = demand.living(SPOOL)
    verdicts = decide(list(infos.values()), policy, demand.origins, living)
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
    """Of verified copies that only wait for other ranks' parts, `count` stay: where a rank never saves again, they must
    not fill the other nodes' spools. A tier has what goes, or none would keep it."""
    waiting = [verdict.id for verdict in verdicts if verdict.keep and verdict.reasons == (HOPED_FOR,)]
    reason = (f"incomplete, and {count} newer ones wait here, too",)
    gone = set(waiting[count:])
    return tuple(Verdict(verdict.id, False, reason) if verdict.id in gone else verdict for verdict in verdicts)


def _pins(world: World) -> frozenset[CheckpointId]:
    return world.spool.pins.union(*(place.pins for place in world.tiers.values() if place))


def retired(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that no tier needs: every tier that is not silent lacks it and would drop it at once,
    because newer ones have retired it there."""
    world = demand.world
    found = [_retired(demand, name, place) for name, place in world.tiers.items() if name not in world.silent]
    return frozenset.intersection(*found) if found else frozenset()


def complete_here(world: World, run: str) -> list[Seen]:
    """The checkpoints of which the spool holds every rank's part, by their manifests."""
    return [
        seen
        for seen in world.spool.copies(run)
        if is_complete(seen.ranks) and not seen.defects and all(part in seen.facts for part in seen.parts())
    ]


def superseded(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that are on no tier and will be sent to none, because so many newer ones are complete
    in this spool alone that every tier which is not silent wants those instead. So a tier that is slower than the saves
    does not fill the spool. Where other nodes have ranks, only a tier shows what is complete, and `retired` decides."""
    world = demand.world
    there = [(name, place) for name, place in world.tiers.items() if name not in world.silent]
    whole = complete_here(world, demand.run)
    if not there or len(whole) < 2:
        return frozenset()
    found = [_superseded(demand, name, place, whole) for name, place in there]
    return frozenset.intersection(*found) - world.needed


def _superseded(demand: Demand, name: str, tier: Place | None, whole: list[Seen]) -> frozenset[CheckpointId]:
    """Of what is complete in the spool, what a tier has nothing of and would drop if it had all of it."""
    world, run = demand.world, demand.run
    if tier is None or unknown(tier, run) or unknown(world.spool, run):
        return frozenset()
    pins = _pins(world) | world.held
    local = {seen.id: info_of(seen, pins, complete=True) for seen in whole}
    infos = [info for info in _infos(tier, run, pins) if info.id not in local] + list(local.values())
    ranking = Ranking(infos, demand.policy(name), demand.origins, demand.living(SPOOL))
    return frozenset(
        one
        for one, info in local.items()
        if one not in tier.checkpoints and not ranking.verdict(info).keep and not demand.reasons(name, one)
    )


def evictable(world: World, config: Config) -> tuple[CheckpointId, ...]:
    """What a full disk may take, in this order."""
    demands = [Demand(world, config, run) for run in sorted({one.run for one in world.spool.checkpoints})]
    gone = frozenset[CheckpointId]().union(*(retired(one) | superseded(one) for one in demands))
    return evictions(world, gone)


def _retired(demand: Demand, name: str, tier: Place | None) -> frozenset[CheckpointId]:
    """What is in the spool and not on a tier that would drop it at once."""
    if tier is None or unknown(tier, demand.run) or unknown(demand.world.spool, demand.run):
        return frozenset()
    world, run, policy = demand.world, demand.run, demand.policy(name)
    waiting = {part.checkpoint for part in pending(world.spool, tier, run)}
    if not waiting:
        return frozenset()
    # As if only this one were added: others that are merely pending retire nothing.
    living = demand.living(SPOOL)
    pins, over = _pins(world) | world.held, _over(tier, policy, run, living)
    ranking = Ranking(_infos(tier, run, pins), policy, demand.origins, living)
    gone = set()
    for checkpoint in waiting:
        added, hoped = (
            _added(tier.checkpoints.get(checkpoint), readable(world.spool.checkpoints[checkpoint])),
            checkpoint.attempt >= over,
        )
        info = info_of(added, pins, complete=is_complete(added.ranks) or hoped)
        if not ranking.verdict(info).keep and not demand.reasons(name, checkpoint, hoped=hoped):
            gone.add(checkpoint)
    return frozenset(gone)


def _complete_on(checkpoint: CheckpointId, tier: Place | None) -> bool:
    seen = tier.checkpoints.get(checkpoint) if tier else None
    return seen is not None and seen.usable


def _spool_prunes(demand: Demand, config: Config) -> Iterator[Prune]:
    world, verdicts = demand.world, judge_spool(demand)
    busy = {part.checkpoint for part in world.busy} | world.held
    low = world.free * 100 < config.min_free_percent
    gone = retired(demand) if low else frozenset()
    counted = {v.id for v in verdicts if low and (v.id in gone or world.on_a_tier(world.spool.checkpoints[v.id]))}
    trained = demand.run not in world.trainerless  # else nobody is about to restore it, and a tier has it
    spared = _pins(world) | {max(counted, default=None)} if trained else world.local_pins
    for verdict in reversed(verdicts):
        if verdict.id in busy:
            continue
        if not verdict.keep:
            yield Prune(verdict.id, SPOOL, verdict.reasons)
        elif verdict.id in counted and verdict.id not in spared:
            yield Prune(verdict.id, SPOOL, (f"under {config.min_free_percent:g} % of the spool's disk is free",))


def _is_owed(demand: Demand) -> bool:
    """Whether a tier is still to be sent, or to be rid of, something of a run, which only its own node does."""
    there = [(name, place) for name, place in demand.world.tiers.items() if place]
    return any(any(_lacked(demand, name, place)) or any(_tier_prunes(demand, name)) for name, place in there)


def _departure(world: World, run: str) -> Iterator[Prune | Discard]:
    """A finished run leaves the spool whole: its pins, which a tier has, too, its copies, the newest last, and what
    says that it was saved here."""
    for pin in sorted(world.spool.pins):
        if pin.run == run:
            yield Discard(f"pins/{run}/{pin.name}")
    busy = {part.checkpoint for part in world.busy} | world.held
    for one in sorted(seen.id for seen in world.spool.copies(run)):
        if one not in busy:
            yield Prune(one, SPOOL, ("the run is finished, and tiers have what they want of it",))
    if run in world.spool.launches and not any(world.spool.copies(run)):
        yield Discard(f"saved/{run}/{world.spool.launches[run].attempt}")


def _aged_quarantine(demand: Demand, config: Config) -> Iterator[Discard]:
    world, run = demand.world, demand.run
    # Kept for a person to look at until as many newer verified checkpoints exist as the policy keeps.
    aside = [part for part in world.spool.quarantined if part.checkpoint.run == run]
    if not aside:
        return
    verified = sorted(seen.id for seen in world.spool.copies(run) if world.on_a_tier(seen))
    low = world.free * 100 < config.min_free_percent
    for part in aside:
        newer = len(verified) - bisect_right(verified, part.checkpoint)
        if newer >= demand.policy(SPOOL).keep_last or low:
            yield Discard(f"quarantine/{part.path}")
