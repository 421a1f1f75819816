"""What is worked out by what has changed is what is worked out anew: the same actions in the same order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.inventories import attempt, cases, checkpoint, config, facts, held, part, policies, remade

from tierd.core.errors import ManifestError
from tierd.core.ids import CheckpointId
from tierd.core.planning.demand import Demand
from tierd.core.planning.inventory import Inventory, LastSent, observed_runs
from tierd.core.planning.place import SPOOL, LocalLaunch, Place, Trainer
from tierd.core.planning.plan import Planner, flushes, plan
from tierd.core.planning.pruning import deletion_verdicts, judge_place
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.retention.retention_verdicts import CheckpointInfo, Ranking


@st.composite
def observed(draw) -> tuple[Inventory, object]:
    """A world of one or two runs in which everything that a plan hangs on may be set."""
    world, settings = draw(cases(tiers=3))
    owners = sorted({p.checkpoint for place in world.places.values() for p in place.parts()})
    few = st.frozensets(st.sampled_from(owners), max_size=2) if owners else st.just(frozenset())
    names, shown = [tier.name for tier in settings.tier], observed_runs(world) or ["r"]
    rare = st.sampled_from([True, False, False])
    launches, alive = {}, {}
    for run in shown:
        one = attempt(draw(st.integers(1, 3)))
        launches |= {run: LocalLaunch(one, {1: frozenset({0})})} if draw(st.booleans()) else {}
        alive |= {run: (Trainer(one, 0, 1),)} if draw(rare) else {}
    spool = replace(world.spool, launches=launches, alive=alive, restored=frozenset(shown if draw(rare) else ()))
    tiers = {
        name: place
        and replace(place, announced={one: frozenset({"x"}) for one in draw(few)}, interrupted_prunes=draw(few))
        for name, place in world.tiers.items()
    }
    return replace(
        world,
        spool=spool,
        tiers=tiers,
        awaited=draw(few),
        trainerless=frozenset(shown if draw(rare) else ()),
        finished=frozenset(shown if draw(rare) else ()),
        silent=frozenset(name for name, place in tiers.items() if place is None and draw(st.booleans())),
        full=frozenset(names[:1] if draw(rare) else ()),
        append_only=frozenset(names[-1:] if draw(rare) else ()),
        sent={name: LastSent(draw(st.sampled_from(owners))) for name in names if owners and draw(st.booleans())},
    ), settings


def changed(draw, place: Place, others: list[Place]) -> Place:
    """A place after something came, went, was found corrupt or was pinned; nearly all that it holds is the same."""
    known = held(place)
    away = [part for other in others for part, found in held(other).items() if found and part not in known]
    what = draw(st.sampled_from(["comes", "comes", "goes", "rots", "pin", "same"]))
    if what == "comes" and away:
        part = draw(st.sampled_from(sorted(away)))
        return place.adding(part, next(found for other in others if (found := other.facts(part))))
    if what == "goes" and place.checkpoints:
        return place.without(draw(st.sampled_from(sorted(place.checkpoints))))
    if what == "rots" and known:
        part = draw(st.sampled_from(sorted(known)))
        return remade(place, {**known, part: None}, {part: ManifestError("rotten")})
    if what == "pin" and place.checkpoints:
        return replace(place, pins=place.pins ^ {draw(st.sampled_from(sorted(place.checkpoints)))})
    return replace(place)


@given(observed(), st.data())
@settings(deadline=None)
def test_planner_plans_after_any_change_the_same_as_a_fresh_plan(case, data):
    (world, asked), planner = case, Planner()
    for _ in range(data.draw(st.integers(1, 6))):
        whole = plan(world, asked, {}, 0.0)
        assert planner.plan(world, asked, {}, 0.0) == whole
        for name in (SPOOL, *world.tiers):
            assert planner.plan(world, asked, {}, 0.0, name) == tuple(one for one in whole if one.tier == name)
        assert planner.flushes(world, asked) == flushes(world, asked, {}, 0.0)
        names = [name for name, place in world.places.items() if place]
        name = data.draw(st.sampled_from(names))
        places = list(world.places.values())
        fresh = changed(data.draw, world.places[name], places)
        world = replace(world, spool=fresh) if name == SPOOL else replace(world, tiers={**world.tiers, name: fresh})
        match data.draw(st.integers(0, 9)):
            case 0:
                world = replace(world, free=data.draw(st.sampled_from([1.0, 0.5, 0.01])))
            case 1:
                world = replace(world, tiers={**world.tiers, data.draw(st.sampled_from(sorted(world.tiers))): None})
            case 2:
                world = replace(world, busy=frozenset(list(world.spool.parts())[:1]))
            case 3:
                world = replace(world, being_restored=frozenset(list(world.spool.checkpoints)[:1]))


def test_a_run_of_which_nothing_changed_is_not_planned_again(monkeypatch):
    def own(run, step):
        return part(checkpoint(1, step, run))

    made = []
    monkeypatch.setattr("tierd.core.planning.plan.Demand", lambda *given: made.append(given[2]) or Demand(*given))
    place = Place.of({part: facts() for part in (own("a", 1), own("b", 1))})
    settled, planner = config(RetentionPolicy()), Planner()
    world = Inventory(place, {"a": Place()})
    planner.plan(world, settled, {}, 0.0)
    planner.plan(replace(world, free=0.9), settled, {}, 0.0)
    assert made == ["a", "b"]
    planner.plan(replace(world, spool=place.adding(own("b", 2), facts())), settled, {}, 0.0)
    assert made == ["a", "b", "b"]


@given(observed())
@settings(deadline=None)
def test_not_kept_equals_the_verdicts_that_do_not_keep(case):
    world, asked = case
    for run in observed_runs(world):
        demand = Demand(world, asked, run)
        for name in world.places:
            assert deletion_verdicts(demand, name) == tuple(one for one in judge_place(demand, name) if not one.keep)


@given(observed(), policies, st.booleans())
@settings(deadline=None)
def test_ranking_keeps_the_same_as_each_verdict(case, policy, lives):
    world, asked = case
    for run in observed_runs(world):
        demand = Demand(world, asked, run)
        live = {one.attempt for one in demand.copies} if lives else ()
        infos = [replace(info, pinned=info.id.step == 3) for info in demand._infos.values()]
        ranking = Ranking(infos, policy, demand.origins, live)
        assert ranking.kept_ids == {info.id for info in infos if ranking.verdict(info).keep}


def test_ranking_keeps_the_timeline_as_each_verdict_says():
    """A launch that resumed from step 1 goes on beside steps 2 and 3, which it left behind."""
    early, late = (f"{number:012x}-{number:08x}" for number in (1, 2))
    origin = CheckpointId("run", early, 1)
    infos = [CheckpointInfo(CheckpointId("run", early, step), True, True) for step in (1, 2, 3)]
    ranking = Ranking(infos, RetentionPolicy(keep_last=1), {early: None, late: origin})
    assert ranking.kept_ids == {infos[0].id, infos[2].id} == {one.id for one in infos if ranking.verdict(one).keep}
