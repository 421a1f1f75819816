"""Retention over all places: nothing that a tier wants is deleted from its last place, and every tier comes to have it.

The oracle asks `judge_checkpoints` alone, about every complete checkpoint that any place shows, and nothing of plan.py.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.inventories import (
    Cluster,
    checkpoint,
    config,
    facts,
    held,
    histories,
    judge_checkpoints,
    part,
    places,
    policies,
    remade,
    solo,
    whole,
)
from support.seeds import examples

from tierd.core.planning.demand import Demand
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Flush, Place, Prune
from tierd.core.planning.plan import plan
from tierd.core.planning.pruning import judge_place, prunes_when_full, relied_copies, tiers_losing
from tierd.core.retention.policy import Best, RetentionPolicy, StoredRetention
from tierd.core.retention.retention_verdicts import CheckpointInfo
from tierd.core.run_report import make_report

LAST1, LAST3 = RetentionPolicy(keep_last=1), RetentionPolicy(keep_last=3)
TENS = RetentionPolicy(keep_last=1, keep_every_steps=10)
C = {step: checkpoint(1, step) for step in range(1, 60)}


def planned(world, settings):
    return plan(world, settings, {}, 0.0)


def prunes(world, settings, tier=None):
    return [a for a in planned(world, settings) if isinstance(a, Prune) and tier in (None, a.tier)]


def wanted(world: Inventory, policy: RetentionPolicy) -> set:
    """What a policy keeps of every complete checkpoint that any place shows."""
    known: dict = {}
    for place in world.places.values():
        for p in place.parts():
            if place.facts(p) and p not in known:
                known[p] = place.facts(p)
    infos = []
    for owner in {p.checkpoint for p in known}:
        own = sorted(p for p in known if p.checkpoint == owner)
        if any({p.rank for p in own if p.world == w} == set(range(w)) for w in {p.world for p in own}):
            reported = known[own[0]]
            infos.append(
                CheckpointInfo(
                    owner, True, True, created=reported.created, metrics=reported.metrics, origin=reported.origin
                )
            )
    return {verdict.id for verdict in judge_checkpoints(infos, policy, world.origins("r")) if verdict.keep}


def shown(world: Inventory) -> set:
    """Every checkpoint that all places together show whole."""
    found: dict = {}
    for place in world.places.values():
        for p in place.parts():
            if place.facts(p):
                found.setdefault((p.checkpoint, p.world), set()).add(p.rank)
    return {owner for (owner, size), ranks in found.items() if len(ranks) == size}


@st.composite
def clusters(draw):
    """A node that saved the newest launch, and two or three tiers with rules of their own."""
    history = draw(histories(max_world=1))
    tiers = draw(st.integers(2, 3))
    made = config(*(draw(policies) for _ in range(tiers)), spool=draw(policies))
    spool = replace(draw(places(history, flawed=False)), owners=frozenset())
    newest = max(history)
    spool = spool.adding(newest, history[newest])
    return Cluster([spool], {tier.name: draw(places(history, flawed=False)) for tier in made.tier}, made)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(clusters(), st.data())
def test_plan_ends_with_every_wanted_checkpoint_on_its_tier_and_none_of_them_deleted(cluster, data):
    policies_of = {tier.name: tier.retention for tier in cluster.settings.tier}
    done = []
    for _ in range(400):
        lanes = cluster.lanes()
        if not lanes:
            break
        node, action = data.draw(st.sampled_from(lanes))
        before = cluster.inventory(0)
        cluster.act(node, action)
        done.append(action)
        after = cluster.inventory(0)
        assert max(cluster.flushed.values(), default=0) <= 1, "\n".join(map(str, done))
        for lost in shown(before) - shown(after):
            event("a checkpoint left its last place")
            for name, policy in policies_of.items():
                assert lost not in wanted(before, policy), f"{name} wanted {lost}\n" + "\n".join(map(str, done))
    else:
        pytest.fail("no rest after 400 actions, at last:\n" + "\n".join(map(str, done[-12:])))
    world = cluster.inventory(0)
    for name, policy in policies_of.items():
        for owner in wanted(world, policy):
            assert whole(world.tiers[name], owner), f"{name} lacks {owner}\n" + "\n".join(map(str, done))


# -- row 2: what counts -----------------------------------------------------------------------------------------------


def test_the_chain_of_keep_every_in_the_spool_starts_at_the_oldest_known_verified_or_not():
    """A backlog: the tier has verified only the middle. 07:34 is due, since 01:34 is the oldest."""
    at = {94: C[1], 300: C[2], 454: C[3], 500: C[4], 520: C[5]}  # minutes of a day
    parts = {part(owner): facts(minute) for minute, owner in at.items()}
    spool = Place.of(parts)
    sixth = RetentionPolicy(keep_last=1, keep_every="6h")
    verified = Place.of({part(C[step]): parts[part(C[step])] for step in (2, 3, 4)})
    world = Inventory(spool, {"a": verified})
    assert C[3] not in [one.checkpoint for one in prunes(world, config(LAST3, spool=sixth), SPOOL)]
    # Where the oldest is on a tier alone, it is known, too.
    world = Inventory(Place.of({p: f for p, f in parts.items() if p.checkpoint != C[1]}), {"a": Place.of(parts)})
    assert [one.checkpoint for one in prunes(world, config(RetentionPolicy(keep_last=9), spool=sixth), SPOOL)] == [C[4]]


def test_the_chain_of_keep_every_on_a_tier_is_not_cut_while_a_tier_does_not_answer_where_it_may_begin():
    """Step 1 is on `b` alone: an hour after it came step 3, and an hour after step 2 nothing."""
    at = {C[1]: 0, C[2]: 30, C[3]: 65, C[4]: 90}
    hourly = RetentionPolicy(keep_last=1, keep_every="1h")
    made = config(hourly, LAST1, spool=LAST1)

    def of(*steps: int) -> Place:
        return Place.of({part(C[step]): facts(at[C[step]]) for step in steps})

    tier = of(2, 3, 4)
    assert prunes(Inventory(of(4), {"a": tier, "b": of(1, 4)}), made, "a") == []
    down = Inventory(of(4), {"a": tier, "b": None})
    assert prunes(down, made, "a") == []
    assert [v.waiting_tiers for v in judge_place(Demand(down, made, "r"), "a") if v.id == C[3]] == [("b",)]
    silent = replace(down, silent=frozenset({"b"}))
    assert [one.checkpoint for one in prunes(silent, made, "a")] == [C[3]]


def test_unverified_newer_checkpoint_pushes_nothing_out():
    """`keep_last` counts what is verified in that place."""
    spool, tier = solo(Place(), C[1], C[2], C[3]), solo(Place(), C[1])
    assert prunes(Inventory(spool, {"a": tier}), config(LAST3, spool=LAST1)) == []
    tiers = {"a": solo(Place(), C[1]), "b": solo(Place(), C[2], C[3])}
    assert prunes(Inventory(spool, tiers), config(LAST1, LAST3, spool=LAST3), "a") == []


# -- holds ------------------------------------------------------------------------------------------------------------


def test_tier_holds_checkpoint_that_another_tier_wants_and_lacks_and_says_so():
    fast, slow = solo(Place(), *(C[step] for step in range(9, 14))), solo(Place(), C[13])
    world = Inventory(solo(Place(), C[12], C[13]), {"nfs": fast, "s3": slow})
    made = config(LAST1, TENS, spool=RetentionPolicy(keep_last=2))
    made = type(made)(
        spool="/spool",
        tier=tuple(
            type(t)(name=n, url=t.url, retention=t.retention) for n, t in zip(("nfs", "s3"), made.tier, strict=True)
        ),
        retention=made.retention,
    )
    assert [one.checkpoint for one in prunes(world, made, "nfs")] == [C[9], C[11], C[12]]

    held = {verdict.id: verdict for verdict in judge_place(Demand(world, made, "r"), "nfs")}[C[10]]
    assert held.keep and held.reasons == ("held for s3",) and held.waiting_tiers == ("s3",)
    copies = next(one for one in make_report(world, made).checkpoints if one.step == 10).copies
    assert [(one.place, one.reasons) for one in copies] == [("nfs", ("held for s3",))]
    assert Flush(part(C[10]), "s3", relayed=True) in planned(world, made)


def lost(world, made, prune):
    """The tiers that want what a prune deletes the last copy of."""
    seen = world.places[prune.tier].checkpoints[prune.checkpoint]
    return tiers_losing(without(world, prune.tier, prune.checkpoint), world, made, prune.tier, seen)


def without(world, place, *gone):
    """The world after a place has deleted these."""
    left = world.places[place]
    for one in gone:
        left = left.without(one)
    return replace(world, tiers={**world.tiers, place: left}) if place != SPOOL else replace(world, spool=left)


def test_a_tier_that_does_not_answer_is_held_for_until_it_is_silent():
    fast = solo(Place(), C[10], C[11])
    world = Inventory(solo(Place(), C[11]), {"a": fast, "b": None})
    made = config(LAST1, TENS)
    assert prunes(world, made) == []
    silent = replace(world, silent=frozenset({"b"}))
    (gone,) = prunes(silent, made)
    assert (gone.checkpoint, gone.tier, lost(silent, made, gone)) == (C[10], "a", ("b",))


def test_checkpoint_that_no_tier_wants_is_not_lost_to_any_tier():
    world = Inventory(solo(Place(), C[11]), {"a": solo(Place(), C[9], C[11]), "b": None}, silent=frozenset({"b"}))
    made = config(LAST1, TENS)
    (gone,) = prunes(world, made)
    assert (gone.checkpoint, lost(world, made, gone)) == (C[9], ())


def test_save_during_the_deletion_of_a_last_copy_does_not_hide_that_a_tier_wanted_it():
    """A pass over a slow tier takes long, and the trainer saves meanwhile."""
    tier = solo(Place(), C[9], C[10], C[11], C[12])
    world = Inventory(solo(Place(), C[12]), {"a": tier, "b": None}, silent=frozenset({"b"}))
    made = config(LAST1, RetentionPolicy(keep_last=2))
    going = [one.checkpoint for one in prunes(world, made, "a")]
    assert going == [C[9], C[10], C[11]]
    after = without(world, "a", *going)
    for come in (after, replace(after, spool=solo(after.spool, C[13], C[14]))):
        lost = {one: tiers_losing(come, world, made, "a", tier.checkpoints[one]) for one in going}
        # With 11 gone, each of the others alone would be the second newest.
        assert lost == dict.fromkeys(going, ("b",))
    # It came to the tier, too; but where the one that did not answer turns out to have newer ones, it has them.
    both = replace(after, spool=solo(after.spool, C[13]), tiers={"a": solo(after.tiers["a"], C[13]), "b": None})
    assert tiers_losing(both, world, made, "a", tier.checkpoints[C[10]]) == ("b",)
    back = replace(after, tiers={**after.tiers, "b": solo(Place(), C[13], C[14])})
    assert tiers_losing(back, world, made, "a", tier.checkpoints[C[10]]) == ()


def test_other_deletions_of_a_pass_do_not_hide_that_a_tier_wanted_a_last_copy():
    """By what is left, the second of three hours would be the oldest, and the third come too early after it."""
    minutes = {C[1]: 0, C[2]: 90, C[3]: 120, C[4]: 130}
    tier = Place.of({part(owner): facts(minute) for owner, minute in minutes.items()})
    spool = Place.of({part(owner): facts(minutes[owner]) for owner in (C[2], C[4])})
    world = Inventory(spool, {"a": tier, "b": None}, silent=frozenset({"b"}))
    made = config(LAST1, RetentionPolicy(keep_last=1, keep_every="2h"), spool=LAST3)
    going = [one.checkpoint for one in prunes(world, made, "a")]
    assert going == [C[1], C[2], C[3]]
    after = without(world, "a", *going)
    lost = {one: tiers_losing(after, world, made, "a", tier.checkpoints[one]) for one in going}
    assert lost == {C[1]: ("b",), C[2]: (), C[3]: ("b",)}


def test_a_copy_that_another_place_has_is_not_lost():
    """A third tier has it, or the spool."""
    silent = {"a": solo(Place(), C[10], C[11]), "b": None, "c": solo(Place(), C[10], C[11])}
    world = Inventory(solo(Place(), C[11]), silent, silent=frozenset({"b"}))
    made = config(LAST1, TENS, TENS)
    assert {(one.tier, lost(world, made, one)) for one in prunes(world, made)} == {("a", ())}
    world = Inventory(solo(Place(), C[10], C[11]), {"a": silent["a"], "b": None}, silent=frozenset({"b"}))
    made = config(LAST1, TENS, spool=LAST3)
    assert {lost(world, made, one) for one in prunes(world, made)} == {()}


# -- tiers that another node names ------------------------------------------------------------------------------------


def kept(tiers: str, by: str = "0000000b", given: str = "configuration") -> StoredRetention:
    """What a node recorded on tier a: on which tiers it keeps the run."""
    return StoredRetention("r", by, given, retention=LAST1, tiers=tuple(tiers))


def moved(*records: StoredRetention, who: str = "0000000a") -> Inventory:
    """A job went on on this node, which has saved 20 and 21, and knows only tier a."""
    tier = solo(Place(), C[9], C[10], C[11], checkpoint(2, 20), checkpoint(2, 21))
    return Inventory(
        solo(Place(), checkpoint(2, 21)), {"a": replace(tier, policies={"r": tuple(records)})}, node_id=who
    )


OWN, BEFORE = checkpoint(2, 20), [C[9], C[10], C[11]]


@pytest.mark.parametrize(
    ("records", "gone"),
    [
        ([], [*BEFORE, OWN]),
        ([kept("a")], [*BEFORE, OWN]),
        ([kept("ab")], [OWN]),
        ([kept("ab", given="default")], [OWN]),
        ([kept("ab", by="0000000a")], [*BEFORE, OWN]),  # this node named b before, and does not any more
        ([kept("ab"), kept("a", by="0000000c"), kept("a", by="0000000a")], [OWN]),
        ([kept("")], [*BEFORE, OWN]),  # an older tierd did not say
    ],
)
def test_checkpoint_of_another_node_is_held_for_the_tiers_that_only_that_node_names(records, gone):
    assert [one.checkpoint for one in prunes(moved(*records), config(LAST1))] == gone


def test_a_command_that_makes_up_the_names_of_tiers_holds_nothing_for_those_of_a_node():
    verdicts = judge_place(Demand(moved(kept("nfs"), who=""), config(LAST1), "r"), "a")
    assert [verdict.id for verdict in verdicts if verdict.keep] == [checkpoint(2, 21)]


def test_hold_for_a_tier_that_this_node_does_not_name_says_so_and_ends_on_a_full_tier():
    demand = Demand(moved(kept("ab")), config(LAST1), "r")
    held = {verdict.id: verdict for verdict in judge_place(demand, "a")}[C[10]]
    assert held.waiting_tiers == ("b",) and "which another node names" in held.reasons[0]
    assert [one.checkpoint for one in prunes_when_full([demand], "a")] == BEFORE


def test_a_tier_that_this_node_does_not_name_is_held_for_no_longer_than_hold_for():
    """The node that names the tier may be gone for good. The saves of this node's launch confirm that time passed."""
    minutes = msgspec.structs.replace(config(LAST1), hold_for="11m")
    before = moved(kept("ab"))
    assert [one.checkpoint for one in prunes(before, minutes)] == [OWN], "the pause before the launch is not confirmed"
    newest = checkpoint(2, 30)
    later = Inventory(solo(Place(), newest), {"a": solo(before.tiers["a"], newest)}, node_id=before.node_id)
    assert [one.checkpoint for one in prunes(later, minutes)] == [C[9], C[10], OWN, checkpoint(2, 21)]


def test_a_launch_whose_clock_is_a_year_ahead_ends_no_hold_for_a_tier_that_this_node_does_not_name():
    """Neither while that launch is the newest, nor once the clock is right again."""
    year, newest = 365 * 24 * 60, checkpoint(3, 22)
    tier = moved(kept("ab")).tiers["a"]
    ahead = {part(checkpoint(2, step)): facts(year + step) for step in (20, 21)}
    wrong = remade(tier, {**held(tier), **ahead})
    right = remade(wrong, {**held(wrong), part(newest): facts(22)})
    for place, gone in ((wrong, [OWN]), (right, [])):
        local = remade(place, {one: place.facts(one) for one in [max(place.parts())]})
        made = Inventory(local, {"a": place}, node_id="0000000a")
        assert [one.checkpoint for one in prunes(made, config(LAST1))] == gone


def test_a_full_tier_gives_up_the_oldest_that_it_only_holds_and_before_it_is_sent_anything():
    fast = solo(Place(), *(C[step] for step in (10, 20, 30, 31)))
    world = Inventory(solo(Place(), C[31], C[32]), {"a": fast, "b": solo(Place(), C[31])})
    made = config(LAST1, TENS, spool=LAST3)
    assert prunes(world, made) == []
    full = replace(world, full=frozenset({"a"}))
    first, *rest = planned(full, made)
    assert (first.checkpoint, first.tier, lost(full, made, first)) == (C[10], "a", ("b",))
    assert "full" in first.reasons[0] and "held for b" in first.reasons[0]
    held = [one.checkpoint for one in rest if isinstance(one, Prune)]
    assert held == [C[20], C[30]], "in case that the oldest cannot be deleted; the daemon deletes one at a time"
    # What no rule keeps goes before anything is given up.
    more = replace(world, tiers={**world.tiers, "a": solo(fast, C[5])}, full=frozenset({"a"}))
    assert [one.checkpoint for one in prunes(more, made)] == [C[5], C[10], C[20], C[30]]


def test_tier_relies_on_wanted_complete_copies_and_on_parts_of_a_checkpoint_that_may_become_complete():
    half = Place.of({part(C[10], 0, 2): facts(10)})
    made = config(LAST1, TENS, spool=LAST3)

    def relied(here, there):
        world = Inventory(Place(), {"a": here, "b": there})
        return [name for name, _ in relied_copies(Demand(world, made, C[10].run), "a", C[10])]

    assert relied(solo(Place(), C[10]), solo(Place(), C[10])) == ["b"]
    assert relied(half, half) == ["b"]
    whole = Place.of({part(C[10], rank, 2): facts(10) for rank in (0, 1)})
    assert relied(whole, half) == [], "it is held for b, so it goes only where the tier is full"


# -- relays -----------------------------------------------------------------------------------------------------------


def test_node_of_a_rank_relays_it_and_the_janitor_relays_ranks_that_no_launch_has_any_more():
    old, new = checkpoint(1, 10), checkpoint(2, 11)
    fast = Place.of(
        {part(old, rank, 3): facts(10) for rank in range(3)} | {part(new, rank, 2): facts(11) for rank in (0, 1)}
    )
    made = config(LAST1, TENS, spool=LAST1)

    def relayed(rank):
        world = Inventory(Place.of({part(new, rank, 2): facts(11)}), {"a": fast, "b": Place()})
        return {
            one.part.rank
            for one in planned(world, made)
            if isinstance(one, Flush) and one.relayed and one.part.checkpoint == old
        }

    assert relayed(0) == {0, 2} and relayed(1) == {1}
    elsewhere = Inventory(Place.of({part(old, 0, 3): facts(10)}), {"a": fast, "b": Place()})
    assert not [one for one in planned(elsewhere, made) if isinstance(one, Flush) and one.relayed]


def test_checkpoint_that_is_complete_nowhere_is_not_relayed():
    fast = Place.of({part(C[10], 0, 2): facts(), part(C[11]): facts()})
    world = Inventory(solo(Place(), C[11]), {"a": fast, "b": solo(Place(), C[11])})
    assert not [one for one in planned(world, config(LAST3, TENS)) if isinstance(one, Flush)]


# -- order ------------------------------------------------------------------------------------------------------------


def test_order_sends_newest_then_checkpoints_wanted_for_good_by_danger_then_the_others():
    spool = solo(Place(), *(C[step] for step in (10, 20, 30, 41, 42, 43)))
    tiers = {
        "slow": Place(),
        "holds": solo(Place(), C[20]),
        "wants": solo(Place(), C[30]),
    }
    last3tens = RetentionPolicy(keep_last=3, keep_every_steps=10)
    made = config(last3tens, LAST1, last3tens)
    world = Inventory(spool, {name: tiers[old] for name, old in zip("abc", tiers, strict=True)})
    order = [one.part.checkpoint.step for one in planned(world, made) if isinstance(one, Flush) and one.tier == "a"]
    assert order == [43, 10, 20, 30, 42, 41]


@pytest.mark.parametrize(("rate", "every"), [(3, 10), (7, 15)])
def test_slow_tier_gets_the_newest_and_the_checkpoints_wanted_for_good_under_faster_saves(rate, every):
    """One checkpoint goes to the slow tier for every `rate` saves. The good ones come at less than its rate."""
    fast, slow = LAST3, RetentionPolicy(keep_last=2, keep_every_steps=every, keep_best=Best(metric="loss"))
    cluster = Cluster([Place()], {"a": Place(), "b": Place()}, config(fast, slow, spool=RetentionPolicy(keep_last=2)))
    most = 0
    for step in range(1, 200):
        owner = checkpoint(1, step)
        cluster.spools[0] = cluster.spools[0].adding(part(owner), facts(step, metrics={"loss": abs(step - 100) + 1.0}))
        for _ in range(50):
            todo = [(n, a) for n, a in cluster.lanes() if not (a.tier == "b" and isinstance(a, Flush))]
            if not todo:
                break
            cluster.act(*todo[0])
        if step % rate == 0:
            send = [(n, a) for n, a in cluster.lanes() if a.tier == "b" and isinstance(a, Flush)]
            if send:
                cluster.act(*send[0])
        on_fast, on_slow = ({c.step for c in cluster.tiers[name].checkpoints} for name in "ab")
        most = max(most, len(on_fast))
        if step > 50:
            assert step - max(on_slow) <= 8 * rate, f"the newest starves at {step}: {sorted(on_slow)}"
    assert most <= 14
    assert set(range(every, 200 - 5 * every, every)) <= on_slow
    assert 100 in on_slow
