"""plan(): what is sent, what is deleted, and above all what is not. Properties over random worlds; see worlds.py."""

from __future__ import annotations

import random
import sys
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.inventories import (
    Cluster,
    cases,
    checkpoint,
    config,
    facts,
    held,
    newer_whole,
    newer_whole_in,
    part,
    remade,
    solo,
    whole,
)
from support.seeds import examples

from tierd.core.errors import FormatTooNew, ManifestError
from tierd.core.planning.copies import CheckpointCopy
from tierd.core.planning.flush_order import base_part
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Discard, Flush, Place, Prune, RepairCopy
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import Best, RetentionPolicy
from tierd.core.run_report import make_report
from tierd.core.timeline.restore_order import restore_candidates

LAST1 = RetentionPolicy(keep_last=1)
A100, A200, A300 = (checkpoint(1, step) for step in (100, 200, 300))


def test_rank_has_no_base_part_while_a_part_of_it_is_quarantined():
    whole = Place.of({part(A100, rank, 2): facts() for rank in (0, 1)})
    assert base_part(whole, part(A200, 1, 2)) == part(A100, 1, 2)
    quarantined = replace(whole, quarantined={part(A300, 1, 2): facts()})
    assert base_part(quarantined, part(A200, 1, 2)) is None
    assert base_part(quarantined, part(A200, 0, 2)) == part(A100, 0, 2)


@pytest.mark.parametrize("quarantined_facts", [None, replace(facts(), homed_sizes={0: 8})])
def test_no_rank_has_a_base_part_while_a_part_is_quarantined_whose_chunks_it_may_hold(quarantined_facts):
    place = Place.of(
        {part(A100, rank, 2): facts() for rank in (0, 1)}, quarantined={part(A300, 1, 2): quarantined_facts}
    )
    assert base_part(place, part(A200, 0, 2)) is base_part(place, part(A200, 1, 2)) is None


def planned(world, settings, backoff=None, now=0.0):
    return plan(world, settings, backoff or {}, now)


def prunes(actions, tier=None):
    return [a for a in actions if isinstance(a, Prune) and tier in (None, a.tier)]


# -- what holds in every world ----------------------------------------------------------------------------------------


def a_local_copy_goes_only_when_a_tier_has_it_or_every_tier_is_or_will_be_past_it(world, settings):
    """P5. Written against the world alone, not against plan.py's own ideas of 'verified' and 'retired'."""
    for prune in prunes(planned(world, settings), SPOOL):
        own = [p for p in world.spool.parts() if p.checkpoint == prune.checkpoint]
        on_one = any(tier and all(tier.facts(p) for p in own) for tier in world.tiers.values())
        past_all = all(
            tier is not None and newer_whole(tier, prune.checkpoint) >= settings.tier_named(name).retention.keep_last
            for name, tier in world.tiers.items()
        )
        will_be = whole(world.spool, prune.checkpoint) and all(
            tier is not None
            and len(newer_whole_in(tier, prune.checkpoint) | newer_whole_in(world.spool, prune.checkpoint))
            >= settings.tier_named(name).retention.keep_last
            for name, tier in world.tiers.items()
        )
        event(f"local prune: on a tier {on_one}, all tiers past it {past_all}, or will be {will_be}")
        assert own
        assert on_one or past_all or will_be


def a_tier_keeps_its_newest_verified_and_what_is_pinned_held_or_arriving(world, settings):
    for prune in prunes(planned(world, settings)):
        if prune.tier == SPOOL:
            continue
        tier, policy = world.tiers[prune.tier], settings.tier_named(prune.tier).retention
        event("tier prune")
        assert newer_whole(tier, prune.checkpoint) >= policy.keep_last
        assert prune.checkpoint not in tier.pins | world.spool.pins | world.being_restored
        assert prune.checkpoint not in {p.checkpoint for p in world.busy}
        rules = policy.keep_every_steps or ()
        for steps in (rules,) if isinstance(rules, int) else rules:
            assert not (whole(tier, prune.checkpoint) and prune.checkpoint.step % steps == 0)


def nothing_held_busy_or_pinned_is_pruned_from_the_spool(world, settings):
    pruned = {p.checkpoint for p in prunes(planned(world, settings), SPOOL)}
    assert not pruned & (world.being_restored | {p.checkpoint for p in world.busy})
    if world.free > 0.05:
        assert not pruned & world.spool.pins


def a_tier_that_did_not_answer_is_not_touched_and_proves_nothing(world, settings):
    """With every tier dark, nothing at all is deleted for a tier's sake."""
    dark = {name for name, tier in world.tiers.items() if tier is None}
    assert not [a for a in planned(world, settings) if a.tier in dark]
    blind = replace(world, tiers=dict.fromkeys(world.tiers), free=1.0, leftovers=())
    assert not [a for a in planned(blind, settings) if isinstance(a, Prune | Discard | Flush)]


def the_plan_is_a_function_of_what_was_seen_not_of_its_order(world, settings):
    rng = random.Random(len(held(world.spool)))
    first = planned(world, settings)
    assert planned(world, settings) == first

    def shuffled(place):
        if place is None:
            return None
        parts = list(held(place).items())
        rng.shuffle(parts)
        return remade(place, dict(parts))

    other = replace(
        world, spool=shuffled(world.spool), tiers={name: shuffled(tier) for name, tier in world.tiers.items()}
    )
    assert set(planned(other, settings)) == set(first)
    assert len(first) == len(set(first))


def begun(tier, owner):
    """The readable parts of a checkpoint that is newer than all that a tier can resume from."""
    if any(seen.usable and seen.id >= owner for seen in tier.copies(owner.run)):
        return 0
    return sum(tier.facts(p) is not None for p in tier.parts() if p.checkpoint == owner)


def flushes_come_first_and_only_what_is_readable_and_missing(world, settings):
    """The newest of each run that is newer than all that the tier has, and before it what another node has begun."""
    actions = planned(world, settings)
    flushes = [a for a in actions if isinstance(a, Flush)]
    assert list(actions[: len(flushes)]) == flushes
    for flush in flushes:
        others = [tier for name, tier in world.tiers.items() if tier and name != flush.tier]
        sources = others if flush.relayed else [world.spool]
        assert any(place.facts(flush.part) for place in sources)
        assert not (flush.relayed and world.spool.lists(flush.part))
        assert not world.tiers[flush.tier].facts(flush.part)
    for name in world.tiers:
        owners = [f.part.checkpoint for f in flushes if f.tier == name]
        if ahead := [c for c in owners if not newer_whole(world.tiers[name], c)]:
            assert owners[0] in ahead
            tier = world.tiers[name]
            assert owners[0].attempt == max(c.attempt for c in ahead)
            same = [c for c in ahead if (c.run, c.attempt) == (owners[0].run, owners[0].attempt)]
            assert owners[0] == max(same, key=lambda c: (begun(tier, c), c.step))


def the_newest_local_checkpoint_is_always_wanted_by_every_tier(world, settings):
    readable = [p for p, found in held(world.spool).items() if found and p.checkpoint.run == "r"]
    tiers = {name: tier for name, tier in world.tiers.items() if tier}
    places = (world.spool, *tiers.values())
    seen = [p for place in places for p in place.parts() if p.checkpoint.run == "r"]
    if not readable or max(seen).checkpoint != max(readable).checkpoint:
        event("the newest is not local")
        return
    newest = [p for p in readable if p.checkpoint == max(readable).checkpoint]
    if not all(held(place).get(p, True) for place in places for p in newest):
        return
    event("the newest is local")
    flushes = {(a.part, a.tier) for a in planned(world, settings) if isinstance(a, Flush)}
    for name, tier in tiers.items():
        for p in newest:
            assert (p, name) in flushes or tier.lists(p)  # also while another tier is being sent it


LAWS = (
    a_local_copy_goes_only_when_a_tier_has_it_or_every_tier_is_or_will_be_past_it,
    a_tier_keeps_its_newest_verified_and_what_is_pinned_held_or_arriving,
    nothing_held_busy_or_pinned_is_pruned_from_the_spool,
    a_tier_that_did_not_answer_is_not_touched_and_proves_nothing,
    the_plan_is_a_function_of_what_was_seen_not_of_its_order,
    flushes_come_first_and_only_what_is_readable_and_missing,
    the_newest_local_checkpoint_is_always_wanted_by_every_tier,
)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_every_law_holds_in_every_world(case):
    for law in LAWS:
        law(*case)


# -- doing what it says ends ------------------------------------------------------------------------------------------


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases(), st.data())
def test_plan_in_any_order_ends_and_sends_nothing_twice(case, data):
    """Spool and tiers keep different amounts, in either direction: no flush undoes a prune or the reverse. Every state
    on the way keeps the newest verified checkpoint of each tier."""
    world, settings = case
    cluster = Cluster([world.spool], dict(world.tiers), settings)
    done = []
    for _ in range(400):
        lanes = cluster.lanes()
        if not lanes:
            break
        node, action = data.draw(st.sampled_from(lanes))
        before = dict(cluster.tiers)
        cluster.act(node, action)
        done.append(action)
        assert max(cluster.flushed.values(), default=0) <= 1, "\n".join(map(str, done))
        _same_newest(before, cluster.tiers)
    else:
        pytest.fail("no rest after 400 actions, at last:\n" + "\n".join(map(str, done[-12:])))
    assert planned(cluster.inventory(0), settings) == ()


def _same_newest(before, after):
    for name, tier in before.items():
        for run in ("r", "other"):
            found = [p.checkpoint for p in (tier.parts() if tier else ()) if p.checkpoint.run == run]
            verified = [c for c in found if whole(tier, c)]
            if verified:
                assert whole(after[name], max(verified))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases(flawed=False, dark=False), st.data())
def test_plans_of_two_daemons_on_shared_tiers_end_too(case, data):
    """Each node holds its own rank's parts, and knows of the other's only what the tiers show. Ranks that never come
    are among the worlds: found that one node went on sending for ever what the other retired as incomplete."""
    world, settings = case
    spools = [Place.of({p: f for p, f in held(world.spool).items() if p.rank == rank}) for rank in (0, 1)]
    cluster = Cluster(spools, dict(world.tiers), settings)
    for _ in range(400):
        lanes = cluster.lanes()
        if not lanes:
            break
        cluster.act(*data.draw(st.sampled_from(lanes)))
        assert max(cluster.flushed.values(), default=0) <= 2  # again at most once, after the other node had retired it
    else:
        pytest.fail("no rest after 400 actions")


# -- single rules, as examples ----------------------------------------------------------------------------------------


def test_only_the_daemon_with_rank_0_of_the_newest_attempt_prunes_a_shared_tier():
    tier = solo(Place(), A100, A200)
    mine = Inventory(solo(Place(), A200), {"a": tier})
    assert prunes(planned(mine, config(LAST1)), "a") == [
        Prune(A100, "a", ("older than the last 1, and no rule keeps it",))
    ]
    rank1 = Inventory(Place.of({part(A200, 1, 2): facts()}), {"a": tier})
    assert prunes(planned(rank1, config(LAST1))) == []
    relaunched_elsewhere = Inventory(solo(Place(), A200), {"a": solo(tier, checkpoint(2, 5))})
    assert prunes(planned(relaunched_elsewhere, config(LAST1)), "a") == []
    assert prunes(planned(Inventory(Place(), {"a": tier}), config(LAST1))) == []


def test_verified_local_copies_are_pruned_early_with_little_room_but_never_the_newest_or_the_unverified():
    spool, tier = solo(Place(), A100, A200, A300), solo(Place(), A100, A200)
    keep3 = RetentionPolicy(keep_last=3)
    assert prunes(planned(Inventory(spool, {"a": tier}, free=0.06), config(keep3))) == []
    low = planned(Inventory(spool, {"a": tier}, free=0.04), config(keep3))
    assert prunes(low) == [Prune(A100, SPOOL, ("under 5 % of the spool's disk is free",))]
    assert Flush(part(A300), "a") in low
    assert prunes(planned(Inventory(spool, {"a": tier}, free=0.04), config(keep3, low=0))) == []
    assert (
        prunes(planned(Inventory(spool, {"a": tier}, free=0.04, being_restored=frozenset({A100})), config(keep3))) == []
    )


def test_incomplete_checkpoint_on_a_tier_retires_once_enough_newer_checkpoints_are_complete():
    half = Place.of({part(A100, 1, 2): facts()})
    keep2 = RetentionPolicy(keep_last=2)
    one = Inventory(solo(Place(), A200), {"a": solo(half, A200)})
    assert prunes(planned(one, config(keep2))) == []
    two = Inventory(solo(Place(), A300), {"a": solo(half, A200, A300)})
    assert prunes(planned(two, config(keep2))) == [
        Prune(A100, "a", ("incomplete, and 2 newer complete ones are verified",))
    ]


def test_an_incomplete_checkpoint_that_a_rule_would_keep_whole_waits_for_its_other_ranks():
    """A slower node may still hold them; and whatever is retired here it would send again and again."""
    half = Place.of({part(A100, 1, 2): facts()})
    every = RetentionPolicy(keep_last=1, keep_every_steps=100)
    world = Inventory(solo(Place(), A300), {"a": solo(half, A200, A300)})
    assert prunes(planned(world, config(every))) == []
    assert [p.checkpoint for p in prunes(planned(world, config(LAST1)))] == [A100, A200]


@pytest.mark.parametrize("shared", [False, True])
def test_chunks_that_no_manifest_names_retire_with_age_unless_a_survivor_borrows_them(shared):
    tier = solo(Place(owners=frozenset({A100, A200})), A200, bases=[A100] if shared else ())
    found = prunes(planned(Inventory(solo(Place(), A200), {"a": tier}), config(LAST1)))
    assert [p.checkpoint for p in found] == ([] if shared else [A100])


def test_interrupted_deletion_is_repeated_though_a_survivor_shares_its_chunks():
    tier = solo(Place(owners=frozenset({A100, A200}), interrupted_prunes=frozenset({A100, A200})), A200, bases=[A100])
    found = prunes(planned(Inventory(solo(Place(), A200), {"a": tier}), config(LAST1)))
    assert [p.checkpoint for p in found] == [A100]


def test_an_incomplete_checkpoint_is_not_sent_and_pruned_in_turn():
    """Found by the executor above: rank 1 never came, keep_every_steps wants the step, age retires it."""
    every = RetentionPolicy(keep_last=1, keep_every_steps=100)
    spool = remade(solo(Place(), A200), {part(A100, 0, 2): facts(), part(A200): facts()})
    cluster = Cluster([spool], {"a": solo(Place(), A200)}, config(every, spool=RetentionPolicy(keep_last=3)))
    assert planned(cluster.inventory(0), cluster.settings) == (Flush(part(A100, 0, 2), "a"),)
    cluster.act(0, Flush(part(A100, 0, 2), "a"))
    assert planned(cluster.inventory(0), cluster.settings) == ()


def test_checkpoint_that_a_restore_elsewhere_waits_for_is_sent_though_a_newer_may_become_complete():
    """Whole only across spools, beside a newer half on the tier. Seed 700217 of the simulation."""
    spool = Place.of({part(A100, 0, 2): facts(), part(A200, 0, 2): facts()})
    tiers = {"a": Place.of({part(A200, 0, 2): facts()})}
    assert planned(Inventory(spool, tiers), config(LAST1)) == ()
    assert planned(Inventory(spool, tiers, awaited=frozenset({A100})), config(LAST1)) == (Flush(part(A100, 0, 2), "a"),)
    retired = {"a": solo(Place(), A300)}  # it would be sent and pruned in turn
    assert not any(
        isinstance(one, Flush) for one in planned(Inventory(spool, retired, awaited=frozenset({A100})), config(LAST1))
    )


def test_corrupt_manifest_is_sent_again_where_the_spool_has_it_right_and_repaired_otherwise():
    bad = Place.of({part(A200): None}, {part(A200): ManifestError("its bytes differ")})
    assert planned(Inventory(solo(Place(), A200), {"a": bad}), config(LAST1)) == (Flush(part(A200), "a"),)
    assert planned(Inventory(Place(), {"a": bad}), config(LAST1)) == (RepairCopy(part(A200), "a"),)
    assert planned(Inventory(bad, {"a": solo(Place(), A200)}), config(LAST1)) == (RepairCopy(part(A200), SPOOL),)


def test_corrupt_manifest_that_nothing_wants_is_repaired_before_prunes_need_to_read_it():
    """Found by the executor above: the prune of another checkpoint cannot go on past an unreadable survivor."""
    tier = solo(Place.of({part(A200): None}, {part(A200): ManifestError("its bytes differ")}), A100, A300)
    world = Inventory(solo(Place(), A200, A300), {"a": tier})
    assert planned(world, config(LAST1, spool=RetentionPolicy(keep_last=9)))[0] == RepairCopy(part(A200), "a")


def test_a_newer_format_is_left_alone_and_stops_prunes_of_its_run():
    """What a newer tierd's manifest borrows, or would keep, cannot be known."""
    tier = solo(Place.of({part(A100): None}, {part(A100): FormatTooNew("format version 2")}), A200, A300)
    assert planned(Inventory(solo(Place(), A300), {"a": tier}), config(LAST1)) == ()
    assert planned(Inventory(remade(tier, {part(A100): None}), {"a": Place()}), config(LAST1)) == ()


def test_backoff_leaves_a_tier_alone_until_its_time_but_still_uses_its_last_listing():
    world = Inventory(solo(Place(), A100, A200), {"a": solo(Place(), A100, A200), "b": Place()})
    both = config(LAST1, LAST1, spool=LAST1)
    waiting = planned(world, both, {"a": 10.0, "b": 10.0}, 9.0)
    assert waiting == (Prune(A100, SPOOL, ("older than the last 1, and no rule keeps it",)),)
    assert {a.tier for a in planned(world, both, {"a": 10.0, "b": 10.0}, 10.0)} == {"a", "b", SPOOL}


def test_leftovers_of_a_dead_writer_are_discarded_last():
    world = Inventory(solo(Place(), A100), {"a": Place()}, leftovers=("stage/x", "trash/y"))
    assert planned(world, config(LAST1)) == (Flush(part(A100), "a"), Discard("stage/x"), Discard("trash/y"))


def test_quarantined_part_is_kept_until_enough_newer_checkpoints_are_verified():
    quarantined = Place(quarantined={part(A100): None})
    keep2 = RetentionPolicy(keep_last=2)
    one = Inventory(solo(quarantined, A200), {"a": solo(Place(), A200)})
    assert planned(one, config(keep2, spool=keep2)) == ()
    two = Inventory(solo(quarantined, A200, A300), {"a": solo(Place(), A200, A300)})
    assert planned(two, config(keep2, spool=keep2)) == (Discard(f"quarantine/{part(A100).path}"),)


def test_checkpoint_in_the_spool_alone_is_pruned_when_newer_complete_checkpoints_end_every_tiers_demand():
    steps = [checkpoint(1, step) for step in range(1, 7)]
    settings = config(RetentionPolicy(keep_last=2), spool=RetentionPolicy(keep_last=1))

    def going(tier=Place(), spool=solo(Place(), *steps), **more):  # noqa: B008
        return [one.checkpoint.step for one in prunes(planned(Inventory(spool, {"a": tier}, **more), settings), SPOOL)]

    assert going() == [1, 2, 3, 4]  # the tier wants 5 and 6
    assert going(tier=solo(Place(), steps[0])) == [2, 3, 4]  # 1 is verified, and the newest that is
    assert going(busy=frozenset({part(steps[1])})) == [1, 3, 4]  # being sent
    assert going(awaited=frozenset({steps[1]})) == [1, 3, 4]  # a restore elsewhere waits for it
    assert going(tier=None) == []  # what it holds and wants is not known
    pinned = replace(solo(Place(), *steps), pins=frozenset({steps[2]}))
    assert going(spool=pinned) == [1, 2, 4]
    half = remade(Place(), {part(one, 0, 2): facts(one.step) for one in steps})
    assert going(spool=half) == []  # another node has the other rank: what is complete, a tier will show
    newest_bad = remade(solo(Place(), *steps), {part(one): facts(one.step) if one.step < 6 else None for one in steps})
    assert going(spool=newest_bad) == [1, 2, 3]  # 6 cannot be read, so 4 and 5 are wanted


def test_a_rule_of_a_tier_that_keeps_for_good_keeps_it_in_the_spool_until_it_is_there():
    steps = [checkpoint(1, step) for step in range(1, 9)]
    settings = config(RetentionPolicy(keep_last=1, keep_every_steps=3), spool=RetentionPolicy(keep_last=1))
    world = Inventory(solo(Place(), *steps), {"a": Place()})
    assert [one.checkpoint.step for one in prunes(planned(world, settings), SPOOL)] == [1, 2, 4, 5, 7]


def test_slow_tier_does_not_want_a_checkpoint_that_it_would_drop_at_once():
    """After an outage only what retention keeps is sent; the rest leaves the spool, but not while a tier is silent."""
    spool = solo(Place(), A100, A200, A300)
    caught_up = Inventory(spool, {"a": solo(Place(), A300)})
    assert planned(caught_up, config(LAST1, spool=LAST1)) == tuple(
        Prune(c, SPOOL, ("older than the last 1, and no rule keeps it",)) for c in (A100, A200)
    )
    late = ("newer ones are complete here, and no tier wants it any more",)
    assert planned(Inventory(spool, {"a": Place()}), config(LAST1, spool=LAST1)) == (
        Flush(part(A300), "a"),
        *(Prune(c, SPOOL, late) for c in (A100, A200)),
    )
    half_blind = Inventory(spool, {"a": solo(Place(), A300), "b": None})
    assert planned(half_blind, config(LAST1, LAST1, spool=LAST1)) == ()


def test_while_a_tier_does_not_answer_the_spool_frees_a_copy_before_a_tier_deletes_its_own():
    """Else it would be on no tier, and stay in the spool for as long as the other one does not answer."""
    both = solo(Place(), A100, A200)
    last1 = config(LAST1, LAST1, spool=LAST1)
    why = ("older than the last 1, and no rule keeps it",)
    assert planned(Inventory(both, {"a": both, "b": None}), last1) == (Prune(A100, SPOOL, why),)
    freed = solo(Place(), A200)
    assert planned(Inventory(freed, {"a": both, "b": None}), last1) == (Prune(A100, "a", why),)


def test_best_unsent_checkpoint_is_sent_even_when_it_is_old():
    spool = Place.of({part(c): facts(metrics={"loss": loss}) for c, loss in ((A100, 1.0), (A200, 3.0), (A300, 2.0))})
    best = RetentionPolicy(keep_last=1, keep_best=Best(metric="loss"))
    assert planned(Inventory(spool, {"a": Place()}), config(best)) == (Flush(part(A300), "a"), Flush(part(A100), "a"))


@pytest.mark.parametrize("how", ["read", "corrupt", "aside", "all aside"])
def test_origin_of_the_newest_launch_is_kept_whichever_of_its_manifests_names_it(how):
    """Retention and a resume know the same timeline."""
    launched = checkpoint(2, 3)
    first = [checkpoint(1, step) for step in (1, 2, 3, 4, 5)]
    parts = {part(one, rank, 2): facts(one.step) for one in first for rank in (0, 1)}
    late = {part(launched, rank, 2): facts(6 + rank, origin=first[1]) for rank in (0, 1)}
    quarantined = {
        one: found for one, found in late.items() if how == "all aside" or (how == "aside" and one.rank == 0)
    }
    parts |= {one: found for one, found in late.items() if one not in quarantined}
    if how == "corrupt":
        parts[part(launched, 0, 2)] = None
    tier = Place.of(parts, quarantined=quarantined)
    janitor = Place.of({part(first[2] if how == "all aside" else launched, 0, 2): None})
    world = Inventory(janitor, {"a": tier})
    assert first[1] in [one.checkpoint for one in restore_candidates(world, "r").candidates][:2]
    gone = [action.checkpoint for action in prunes(planned(world, config(RetentionPolicy(keep_last=2))), "a")]
    assert first[1] not in gone and gone


def test_part_that_a_node_sends_is_not_pruned_by_another_node():
    """Both rank by the same timeline, also where the newest launch has nothing whole."""
    a1, a2, a3, a4 = (checkpoint(1, step) for step in (1, 2, 3, 4))
    b3 = checkpoint(2, 3)
    settings = config(RetentionPolicy(keep_last=2))
    there = {part(one, rank, 3): facts(one.step) for one in (a2, a4) for rank in range(3)}
    there |= {part(a3, 1, 3): facts(3), part(b3, 0, 3): facts(9, origin=a2)}
    sender = Inventory(Place.of({part(a1, 1, 3): facts(1)}), {"a": Place.of(there)})
    sent = [a for a in planned(sender, settings) if isinstance(a, Flush)]
    janitor = Inventory(
        Place.of({part(b3, 0, 3): facts(9, origin=a2)}), {"a": Place.of({**there, part(a1, 1, 3): facts(1)})}
    )
    assert not (sent and a1 in [one.checkpoint for one in prunes(planned(janitor, settings), "a")])


# -- at size ----------------------------------------------------------------------------------------------------------

RANKS, LOCAL = 1024, range(8)
OWN = [checkpoint(1 + step // 100, step) for step in range(400)]


def many(steps, lacking=()):
    """A tier with every rank's parts; read is what a daemon of eight ranks reads, and each hundredth began anew."""
    whole = frozenset(range(RANKS))
    found = {}
    for step in steps:
        origin = OWN[step // 100 * 100 - 1] if step >= 100 else None
        said = {part(OWN[step], rank, RANKS): facts(step, origin=origin) for rank in LOCAL}
        found[OWN[step]] = CheckpointCopy(OWN[step], {RANKS: whole - {RANKS - 1} if step in lacking else whole}, said)
    return Place(found)


def local(steps):
    return Place.of({p: f for seen in many(steps).checkpoints.values() for p, f in seen.facts.items()})


def events(work) -> int:
    """Count the lines and calls of Python that `work` executes, which a slow machine does not change."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("spooled", "there", "lacking", "keep_all"),
    [
        (lambda n: range(n - 3, n), range, lambda n: (), False),
        (range, range, lambda n: (), True),
        (range, lambda n: range(0), lambda n: (), True),
        (range, lambda n: range(0, n, 2), lambda n: (), True),
        (range, range, lambda n: range(0, n, 2), False),
    ],
    ids=["few", "all", "nothing sent", "half sent", "half incomplete"],
)
def test_work_and_memory_grow_no_faster_than_checkpoints_of_a_thousand_ranks(spooled, there, lacking, keep_all):
    def counted(steps: int) -> list[int]:
        settings = config(RetentionPolicy(keep_last=steps if keep_all else 3), spool=RetentionPolicy(keep_last=3))
        tracemalloc.start()
        world = Inventory(local(spooled(steps)), {"a": many(there(steps), lacking(steps))})
        plan(world, settings, {}, 0.0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5e5 * steps  # bytes
        return [
            events(lambda: plan(world, settings, {}, 0.0)),
            events(lambda: make_report(world, settings)),
            events(lambda: restore_candidates(world, "r")),
        ]

    fewer, more = counted(100), counted(400)
    # Four times as many, sorted, are 5.2 times the work; compared each with each they are 16 times.
    assert all(late <= 6 * early for early, late in zip(fewer, more, strict=True)), (fewer, more)
