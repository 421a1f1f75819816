"""What a full disk takes, in which order, and which runs leave the spool: never what no tier has."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from support.inventories import attempt, cases, checkpoint, config, facts, part, solo

from tierd.core.ids import CheckpointId
from tierd.core.planning.eviction import evictable_copies, eviction_order
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Discard, Flush, LocalLaunch, Place, Prune
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import RetentionPolicy

OLD, LATE = "old", "late"
SETTINGS = config(RetentionPolicy(keep_last=5), spool=RetentionPolicy(keep_last=5))


def two_runs(**more) -> Inventory:
    """A run that is over, launched first, and one that trains: three checkpoints each, all on the tier."""
    over = [CheckpointId(OLD, attempt(1), step) for step in (1, 2, 3)]
    live = [CheckpointId(LATE, attempt(2), step) for step in (1, 2, 3)]
    both = solo(Place(), *over, *live)
    return Inventory(both, {"a": both}, **more)


def names(found) -> list[tuple[str, int]]:
    return [(one.run, one.step) for one in found]


def local(world: Inventory, settings=SETTINGS) -> list[object]:
    """What the plan deletes in the spool."""
    return [action for action in plan(world, settings, {}, 0.0) if action.tier == SPOOL]


def test_evict_takes_runs_without_a_trainer_first_and_the_newest_of_the_others_last():
    world = two_runs(trainerless=frozenset({LATE}))
    assert names(eviction_order(world, ())) == [(LATE, 1), (LATE, 2), (LATE, 3), (OLD, 1), (OLD, 2), (OLD, 3)]
    world = two_runs(trainerless=frozenset({OLD}))
    assert names(eviction_order(world, ())) == [(OLD, 1), (OLD, 2), (OLD, 3), (LATE, 1), (LATE, 2), (LATE, 3)]
    assert names(eviction_order(two_runs(), ()))[-2:] == [(OLD, 3), (LATE, 3)]


def test_evict_spares_checkpoints_on_no_tier_checkpoints_in_use_and_pins_of_the_spool_alone():
    world = two_runs(trainerless=frozenset({OLD, LATE}))
    a, b, c = sorted(one for one in world.spool.checkpoints if one.run == OLD)
    tier = world.tiers["a"].without(a)
    world = replace(
        world, tiers={"a": tier}, being_restored=frozenset({b}), spool=replace(world.spool, pins=frozenset({c}))
    )
    assert {run for run, _ in names(eviction_order(world, ()))} == {LATE}
    there = replace(world, tiers={"a": replace(tier, pins=frozenset({c}))})
    assert c in eviction_order(there, ()), "the tier keeps the pin"
    assert eviction_order(replace(world, tiers={"a": None}), ()) == ()


def test_a_pinned_copy_of_a_run_that_trains_is_the_last_resort():
    world = two_runs()
    first = min(world.spool.checkpoints)
    tier = replace(world.tiers["a"], pins=frozenset({first}))
    assert eviction_order(replace(world, tiers={"a": tier}), ()).index(first) >= 4


@given(cases())
def test_only_verified_copies_are_taken(case):
    world, _ = case
    for one in eviction_order(replace(world, trainerless=frozenset({"r", "other"})), ()):
        seen = world.spool.checkpoints[one]
        assert any(all(tier.has(p) for p in seen.parts()) for tier in world.tiers.values() if tier)
        assert one not in world.being_restored and all(p.checkpoint != one for p in world.busy)


def retired() -> Inventory:
    """A full disk took the newest copy from the spool; the tier has it, and wants the older ones no more."""
    run = [CheckpointId(OLD, attempt(1), step) for step in (2, 3, 4)]
    return Inventory(solo(Place(), *run[:2]), {"a": solo(Place(), run[2])}, trainerless=frozenset({OLD}))


def test_checkpoint_that_every_tier_has_retired_leaves_a_full_disk_and_with_its_run():
    """It is on no tier and never will be, so nothing else would ever take it from the spool."""
    settings = config(RetentionPolicy(keep_last=1), spool=RetentionPolicy(keep_last=3))
    assert names(evictable_copies(retired(), settings)) == [(OLD, 2), (OLD, 3)]
    assert not local(retired(), settings)
    finished = replace(retired(), finished=frozenset({OLD}))
    assert names(action.checkpoint for action in local(finished, settings)) == [(OLD, 2), (OLD, 3)]
    little = replace(retired(), free=0.01)
    assert names(action.checkpoint for action in local(little, settings)) == [(OLD, 2), (OLD, 3)]
    # A tier that keeps more is still to be sent them.
    settings = config(RetentionPolicy(keep_last=3), spool=RetentionPolicy(keep_last=3))
    assert evictable_copies(retired(), settings) == () and not local(finished, settings)


def taken(*steps: int, ranks=frozenset({0}), number: int = 1, **more) -> Inventory:
    """A full disk took every copy of a run; one tier has all, and the other one these steps."""
    run = [CheckpointId(OLD, attempt(1), step) for step in (1, 2, 3)]
    spool = replace(Place(), launches={OLD: LocalLaunch(attempt(number), {1: ranks})})
    tiers = {"a": solo(Place(), *run), "b": solo(Place(), *(one for one in run if one.step in steps))}
    return Inventory(spool, tiers, trainerless=frozenset({OLD}), **more)


def test_node_that_saved_a_run_still_acts_for_it_when_a_full_disk_has_taken_every_copy():
    """Nobody else sends or deletes it: what one tier wants for good would never come there."""
    settings = config(RetentionPolicy(keep_last=1), RetentionPolicy(keep_last=2, keep_every_steps=1))
    sent = list(plan(taken(3), settings, {}, 0.0))
    run = [CheckpointId(OLD, attempt(1), step) for step in (1, 2, 3)]
    assert sent == [Flush(part(one), "b", relayed=True) for one in run[:2]], "and nothing that is held for it goes"
    there = plan(taken(1, 2, 3), settings, {}, 0.0)
    assert [(type(one), one.checkpoint, one.tier) for one in there] == [(Prune, one, "a") for one in run[:2]]


def test_node_that_saved_other_ranks_an_older_launch_or_nothing_does_not_act_for_the_run():
    settings = config(RetentionPolicy(keep_last=1), RetentionPolicy(keep_last=1))
    for world in (
        replace(taken(1, 2, 3), spool=Place()),
        taken(1, 2, 3, ranks=frozenset({1})),
        taken(1, 2, 3, number=0),
        taken(1, 2, 3, number=2),
    ):
        assert plan(world, settings, {}, 0.0) == ()


def test_record_of_saves_is_forgotten_with_a_finished_run_and_not_before():
    settings = config(RetentionPolicy(keep_last=3), RetentionPolicy(keep_last=3))
    gone = Discard(f"saved/{OLD}/{attempt(1)}")
    assert not local(taken(1, 2, 3), settings), "not before"
    assert local(taken(1, 2, 3, finished=frozenset({OLD})), settings) == [gone]
    assert not local(taken(1, 3, finished=frozenset({OLD})), settings), "the other tier still lacks something"
    down = taken(1, 2, 3, finished=frozenset({OLD}))
    assert not local(replace(down, tiers={**down.tiers, "b": None}), settings), "it may lack something"
    nowhere = replace(down, tiers={"a": Place(), "b": Place()})
    assert local(nowhere, settings) == [gone], "a person deleted the run"


def test_a_finished_run_leaves_the_spool_whole():
    world = two_runs(trainerless=frozenset({OLD}), finished=frozenset({OLD}))
    assert names(action.checkpoint for action in local(world)) == [(OLD, 1), (OLD, 2), (OLD, 3)]
    assert not local(two_runs(trainerless=frozenset({OLD}))), "not before"


def test_finished_run_is_kept_while_a_checkpoint_of_it_is_not_on_a_tier():
    world = two_runs(trainerless=frozenset({OLD}), finished=frozenset({OLD}))
    newest = CheckpointId(OLD, attempt(1), 3)
    assert not local(replace(world, tiers={"a": world.tiers["a"].without(newest)}))
    two = config(RetentionPolicy(keep_last=5), RetentionPolicy(keep_last=5), spool=RetentionPolicy(keep_last=5))
    tiers = {"a": world.tiers["a"], "b": None}
    assert not local(replace(world, tiers=tiers), two), "a tier that does not answer may still want it"
    assert not local(replace(world, tiers={**tiers, "b": Place()}), two), "it is still to be sent there"


def test_its_pins_leave_with_it_where_a_tier_has_them():
    newest = CheckpointId(OLD, attempt(1), 3)
    world = two_runs(trainerless=frozenset({OLD}), finished=frozenset({OLD}))
    world = replace(world, spool=replace(world.spool, pins=frozenset({newest})))
    assert not local(world), "this pin is nowhere else"
    pinned = replace(world, tiers={"a": replace(world.tiers["a"], pins=frozenset({newest}))})
    first, *rest = local(pinned)
    assert first == Discard(f"pins/{OLD}/{newest.name}")
    assert [one.checkpoint.step for one in rest if isinstance(one, Prune)] == [1, 2, 3]


def test_little_free_space_also_takes_the_newest_copy_of_a_run_without_a_trainer():
    low = two_runs(free=0.01)
    assert {(OLD, 3), (LATE, 3)}.isdisjoint(names(action.checkpoint for action in local(low)))
    found = names(action.checkpoint for action in local(replace(low, trainerless=frozenset({OLD}))))
    assert (OLD, 3) in found and (LATE, 3) not in found


def test_a_worlds_pins_are_those_of_every_place():
    one, two = checkpoint(1, 1), checkpoint(1, 2)
    spool = Place.of({part(one): facts()}, pins=frozenset({one}))
    world = Inventory(spool, {"a": Place(pins=frozenset({two})), "b": None})
    assert (world.pins, world.local_pins) == ({one, two}, {one})
