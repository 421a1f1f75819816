"""What a restore tries, in which order, and what it says when there is nothing to try."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inventories import cases, checkpoint, facts, held, histories, part, places, remade, solo
from support.seeds import examples

from tierd.core.errors import (
    CheckpointNotFound,
    FormatTooNew,
    ManifestError,
    SpoolUnusable,
    TierdError,
    WrongKey,
)
from tierd.core.ids import PartId
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.save_rules import MetricGoal
from tierd.core.timeline.restore_order import (
    Candidate,
    RestoreOrder,
    not_found_error,
    own_part,
    restore_candidates,
    restore_order,
)
from tierd.core.timeline.run_view import RunView, run_view_of
from tierd.ipc.message_codec import read_member

A100, A200, A300 = (checkpoint(1, step) for step in (100, 200, 300))
B210 = checkpoint(2, 210)
A, B = A100.attempt, B210.attempt


def tried(resume: RestoreOrder):
    return [candidate.checkpoint for candidate in resume.candidates]


def rolled_back() -> Place:
    """A saved 100, 200, 300; B resumed from 200 and saved 210."""
    return solo(solo(Place(), A100, A200, A300), B210, origin=A200)


def test_the_timeline_is_tried_newest_first_and_the_branch_only_named():
    found = restore_candidates(Inventory(rolled_back(), {}), "r")
    assert tried(found) == [B210, A200, A100]
    assert found.branches == (A300,)
    assert found.attempts == (A, B)
    assert (found.incomplete, found.unknown_origin, found.unreached) == ((), None, ())


def test_checkpoints_whose_replicas_differ_are_tried_last():
    view = run_view_of(Inventory(rolled_back(), {}), "r")
    assert tried(restore_order([view], "r", differing={B210})) == [A200, A100, B210]
    assert tried(restore_order([view], "r", differing={B210, A200, A100})) == [B210, A200, A100]


def test_step_alone_selects_the_timeline_before_a_branch_and_the_newest_branch_otherwise():
    b300, c250 = checkpoint(2, 300), checkpoint(3, 250)
    place = solo(solo(solo(Place(), A100, A200, A300), b300, origin=A200), c250, origin=A200)
    assert tried(restore_candidates(Inventory(place, {}), "r", 200)) == [A200]
    assert tried(restore_candidates(Inventory(place, {}), "r", 300)) == [b300]
    assert tried(restore_candidates(Inventory(place, {}), "r", 300, A)) == [A300]
    again = solo(place, checkpoint(4, 300), origin=A100)
    assert tried(restore_candidates(Inventory(again, {}), "r", 300)) == [checkpoint(4, 300)]


def committed(*parts: PartId, left: dict[PartId, ManifestFacts | None], why: TierdError | None = None) -> RestoreOrder:
    """What a restore finds in a spool that remembers to have committed these parts, and holds what is `left`."""
    defects = {one: why for one, read in left.items() if read is None and why}
    return restore_candidates(Inventory(remade(Place(), left, defects, committed=frozenset(parts)), {}), "r")


def test_checkpoint_that_was_complete_here_and_lost_a_part_is_gone():
    """Histories, seed 9383."""
    both = part(A300, 0, 2), part(A300, 1, 2)
    found = committed(*both, left={both[0]: facts(300)})
    assert (found.missing, found.incomplete, tried(found)) == ((A300,), (), [])


def test_checkpoint_that_was_never_complete_here_may_be_begun_anew():
    first = part(A300, 0, 2)
    found = committed(first, left={first: facts(300)})
    assert (found.missing, found.incomplete) == ((), (A300,))


def test_name_without_a_readable_manifest_does_not_hide_a_lost_part():
    """Histories, seed 5093: an empty object, of a rank that there never was."""
    found = committed(part(A300, 0, 2), left={part(A300, 3, 99_999): None}, why=ManifestError("no JSON"))
    assert (found.missing, tried(found)) == ((A300,), [])


@pytest.mark.parametrize(
    ("step", "attempt", "expected"),
    [
        (200, None, [A200]),
        (300, None, [A300]),  # only off the timeline
        (None, A, [A300, A200, A100]),  # an abandoned line, asked for by name, from its end
        (300, A, [A300]),
        (210, A, []),
        (250, None, []),
    ],
)
def test_a_step_or_an_attempt_can_be_asked_for(step, attempt, expected):
    assert tried(restore_candidates(Inventory(rolled_back(), {}), "r", step, attempt)) == expected


def test_a_step_that_two_attempts_have_is_the_timelines_or_else_the_newest_attempts():
    twice = solo(rolled_back(), checkpoint(2, 300), origin=A200)
    assert tried(restore_candidates(Inventory(twice, {}), "r", 300)) == [checkpoint(2, 300)]
    c = solo(twice, checkpoint(3, 7))
    assert tried(restore_candidates(Inventory(c, {}), "r", 300)) == [checkpoint(2, 300)]


def test_completeness_is_over_all_places_together():
    """Rank 0 in the spool, rank 1 on a tier: P3 asks for the manifests, not for one place that has them all."""
    spool, tier = Place.of({part(A100, 0, 2): facts()}), Place.of({part(A100, 1, 2): facts()})
    found = restore_candidates(Inventory(spool, {"a": tier}), "r")
    assert found.candidates == (Candidate(A100, 2),)
    assert own_part(found.candidates[0], 1) == part(A100, 1, 2)
    assert restore_candidates(Inventory(spool, {"a": None}), "r").candidates == ()


def test_an_unreadable_manifest_still_counts_towards_completeness():
    """Names decide; whether the bytes are right is found out by their reader."""
    spool = Place.of({part(A100, 0, 2): facts(), part(A100, 1, 2): None})
    assert tried(restore_candidates(Inventory(spool, {}), "r")) == [A100]


def test_incomplete_checkpoints_newer_than_the_first_candidate_are_named():
    spool = solo(Place.of({part(A300, 0, 2): facts(), part(A100, 0, 2): facts()}), A200)
    found = restore_candidates(Inventory(spool, {}), "r")
    assert tried(found) == [A200]
    assert found.incomplete == (A300,)
    assert restore_candidates(Inventory(Place.of({part(A100, 0, 2): facts()}), {}), "r").incomplete == (A100,)


def test_parts_of_different_world_sizes_are_never_mixed():
    spool = Place.of({part(A100, 0, 1): facts(), part(A100, 0, 2): facts()})
    assert restore_candidates(Inventory(spool, {}), "r").candidates == (Candidate(A100, 1),)


def test_quarantined_part_still_names_the_origin_of_its_attempt():
    spool = replace(solo(Place(), A100, A200, A300), quarantined={part(B210): facts(origin=A200)})
    found = restore_candidates(Inventory(spool, {}), "r")
    assert tried(found) == [A200, A100]
    assert found.branches == (A300,)
    assert found.attempts == (A, B)


def test_attempt_without_a_readable_manifest_is_passed_over_and_reported():
    spool = replace(solo(Place(), A100), quarantined={part(B210): None})
    found = restore_candidates(Inventory(spool, {}), "r")
    assert (tried(found), found.branches, found.unknown_origin) == ([A100], (), None)
    assert (found.unproven, found.quarantined, found.attempts) == ((B210,), (), (A,))


def test_attempt_with_an_unknown_origin_ends_the_timeline():
    """B is where C came from, and nobody can tell where B did."""
    spool = solo(solo(Place(), A100), checkpoint(3, 220), origin=B210)
    found = restore_candidates(Inventory(spool, {}), "r")
    assert (tried(found), found.branches, found.unknown_origin) == ([checkpoint(3, 220)], (A100,), B)


def test_other_runs_are_none_of_its_business():
    spool = solo(solo(Place(), A100), checkpoint(9, 900, "other"))
    spool = replace(spool, quarantined={part(checkpoint(8, 1, "other")): facts()})
    found = restore_candidates(Inventory(spool, {}), "r")
    assert (tried(found), found.attempts, found.branches) == ([A100], (A,), ())
    assert restore_candidates(Inventory(spool, {}), "nothing") == RestoreOrder((), (), (), None, (), ())


def test_tiers_that_did_not_answer_are_named():
    assert restore_candidates(Inventory(Place(), {"a": None, "b": Place()}), "r").unreached == ("a",)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_a_candidate_is_complete_and_each_complete_checkpoint_is_tried_or_named(case):
    world, _ = case
    found = restore_candidates(world, "r")
    places = {"local": world.spool, **{name: tier for name, tier in world.tiers.items() if tier}}
    seen = {p for place in places.values() for p in place.parts() if p.checkpoint.run == "r"}
    for candidate in found.candidates:
        ranks = {p.rank for p in seen if p.checkpoint == candidate.checkpoint and p.world == candidate.world}
        assert ranks == set(range(candidate.world))
    whole = {
        p.checkpoint for p in seen if {q.rank for q in seen if q.checkpoint == p.checkpoint} >= set(range(p.world))
    }
    assert sorted([*tried(found), *found.branches]) == sorted(whole)
    assert tried(found) == sorted(tried(found), reverse=True)


def test_checkpoint_error_names_the_request_the_skipped_and_the_existing_checkpoints():
    resume = restore_candidates(Inventory(rolled_back(), {}), "r")
    error = not_found_error(resume, "r", None, ["step 210: bytes differ"])
    assert isinstance(error, CheckpointNotFound)
    assert str(error).splitlines() == [
        "run 'r': no checkpoint could be verified",
        "  skipped step 210: bytes differ",
        f"  not tried, off the timeline: step 300 of attempt {A}; restore(step=…, attempt=…) asks for one",
    ]
    assert (
        str(not_found_error(RestoreOrder((), (), (), None, (), ()), "r", 7, []))
        == "run 'r' step 7: there is no such checkpoint"
    )
    lost = restore_candidates(Inventory(solo(solo(Place(), A100), checkpoint(3, 220), origin=B210), {}), "r")
    assert f"what attempt {B} resumed from cannot be told any more" in str(not_found_error(lost, "r", None, []))


@pytest.mark.parametrize(("error", "expected"), [(SpoolUnusable("EIO"), ("local",)), (ManifestError("cut short"), ())])
def test_place_whose_disk_hides_the_origin_of_the_newest_attempt_has_not_answered(error, expected):
    newest = part(B210, 0, 2)
    place = remade(solo(Place(), A100), {part(A100): facts(), newest: None}, {newest: error})
    found = restore_candidates(Inventory(place, {"a": Place()}), "r")
    assert (found.unreached, found.unproven, tried(found)) == (expected, (B210,), [A100])
    reported_elsewhere = Place.of({part(B210, 1, 2): facts(origin=A100)})
    found = restore_candidates(Inventory(place, {"a": reported_elsewhere}), "r")
    assert found.unreached == ()


def planted(place: Place, *parts, why: TierdError = ManifestError("empty")) -> Place:  # noqa: B008
    """`place`, and objects under the names of these parts' manifests that cannot be read."""
    return remade(place, held(place) | dict.fromkeys(parts), dict.fromkeys(parts, why))


@pytest.mark.parametrize("why", [ManifestError("empty"), WrongKey("another key's"), FormatTooNew("version 9")])
@pytest.mark.parametrize("own", [1, 2])
def test_names_of_another_number_of_ranks_that_cannot_be_read_stop_nobody(own, why):
    """They are whole by name, beside a sound checkpoint or in place of a newer one."""
    sound = Place.of({part(A100, rank, own): facts() for rank in range(own)})
    newer = checkpoint(1, 200)
    for other in {1, 2, 3} - {own}:
        for place, passed in (
            (planted(sound, *(part(A100, rank, other) for rank in range(other)), why=why), ()),
            (planted(sound, *(part(newer, rank, other) for rank in range(other)), why=why), (newer,)),
        ):
            for seen in ([run_view_of(Inventory(place, {}), "r")] * own, views(*[Place()] * own, tier=place)):
                found = restore_order(seen, "r", world=own)
                assert (found.candidates, found.unproven) == ((Candidate(A100, own),), passed)
                by_name = restore_order(seen, "r", newer.step, world=own)
                assert (by_name.candidates, by_name.unproven) == ((), passed)
    both = planted(sound, part(newer, 0, 4 - own), *(part(newer, rank, 4) for rank in range(4)), why=why)
    both = planted(both, *(part(newer, rank, 3 * own) for rank in range(3 * own)), why=why)
    assert restore_order(views(*[Place()] * own, tier=both), "r", world=own).candidates == (Candidate(A100, own),)
    whoever = restore_candidates(Inventory(planted(sound, part(A100, 0, 1), part(A100, 1, 2)), {}), "r")
    assert whoever.candidates == (Candidate(A100, own),)


def test_rank_with_another_world_size_refuses_the_world_size_of_a_manifest():
    reported_elsewhere = Place.of({part(A100): facts()})
    place = planted(Place(), part(A100))
    assert restore_order(views(place, reported_elsewhere, tier=place), "r", world=2).candidates == (Candidate(A100, 1),)
    unknown = remade(Place(), {part(A100): None, part(A200): facts()}, {part(A100): SpoolUnusable("EIO")})
    found = restore_order(views(unknown, unknown, tier=Place()), "r", world=2)
    assert found.candidates == (Candidate(A200, 1), Candidate(A100, 1))


def test_names_of_another_number_of_ranks_hide_nothing_that_lies_in_the_nodes_own_spools():
    spools = [Place.of({part(A100, rank, 2): facts()}) for rank in (0, 1)]
    found = restore_order(views(*spools, tier=planted(Place(), part(A100))), "r", world=2)
    assert (found.candidates, found.incomplete, found.unproven) == ((Candidate(A100, 2),), (), ())
    moved = restore_order(views(*reversed(spools), tier=planted(Place(), part(A100))), "r", world=2)
    assert moved.candidates == (Candidate(A100, 2, (0, 1)),)


# -- by what several ranks see ----------------------------------------------------------------------------------------


def views(*places: Place, tier: Place | None = None) -> list[RunView]:
    """What ranks see, each on a node of its own, beside one tier."""
    return [run_view_of(Inventory(place, {"a": tier}), "r") for place in places]


def test_parts_in_each_nodes_own_spool_are_a_candidate():
    spools = [Place.of({part(A100, rank, 2): facts()}) for rank in (0, 1)]
    found = restore_order(views(*spools, tier=Place()), "r", world=2)
    assert found.candidates == (Candidate(A100, 2),)
    assert not found.incomplete


def test_a_rank_that_cannot_get_at_its_part_is_named():
    """The ranks changed nodes: what each needs lies in the other's spool."""
    spools = [Place.of({part(A100, rank, 2): facts()}) for rank in (1, 0)]
    assert restore_order(views(*spools, tier=Place()), "r", world=2).candidates == (Candidate(A100, 2, (0, 1)),)
    both = Place.of({part(A100, rank, 2): facts() for rank in (0, 1)})
    assert restore_order(views(both, Place(), tier=Place()), "r", world=2).candidates == (Candidate(A100, 2, (1,)),)
    assert restore_order(views(both, Place(), tier=both), "r", world=2).candidates == (Candidate(A100, 2),)


def test_rank_that_needs_every_part_lacks_the_parts_that_only_another_node_has():
    spools = [Place.of({part(A100, rank, 2): facts()}) for rank in (0, 1)]
    assert restore_order(views(*spools, tier=Place()), "r", world=2, everything=True).candidates == (
        Candidate(A100, 2, (0, 1)),
    )
    tier = Place.of({part(A100, 0, 2): facts()})
    found = restore_order(views(*spools, tier=tier), "r", world=2, everything=True)
    assert found.candidates == (Candidate(A100, 2, (0,)),), "and a mixture of its own spool and the tier is enough"
    three = restore_order(views(*spools, spools[0], tier=tier), "r", world=3)
    assert three.candidates == (Candidate(A100, 2, (0, 2)),), "another number of ranks may need every part"


def test_a_rank_that_cannot_talk_takes_no_mixture_of_its_spool_and_a_tier():
    own, tier = Place.of({part(A100, 1, 2): facts()}), Place.of({part(A100, 0, 2): facts()})
    alone = restore_order(views(own, tier=tier), "r", world=2)
    assert (alone.candidates, alone.incomplete) == ((), (A100,))
    both = Place.of({part(A100, rank, 2): facts() for rank in (0, 1)})
    assert tried(restore_order(views(own, tier=both), "r", world=2)) == [A100]


def test_newest_attempt_in_a_single_run_view_counts_for_all_ranks():
    """The others would resume from the branch that it left."""
    branch = solo(Place(), A100, A200, A300)
    seen = solo(Place(), B210, origin=A200)
    found = restore_order(views(branch, seen, branch, tier=Place()), "r")
    assert tried(found) == [B210, A200, A100] and found.branches == (A300,)


def test_who_could_not_be_asked_is_named_by_rank():
    two = views(Place(), Place())
    assert restore_order(two, "r", world=2).unreached == ("a",)
    two[1] = msgspec.structs.replace(two[1], alone="no daemon")
    assert restore_order(two, "r", world=2).alone == ("rank 1: no daemon",)


@st.composite
def clusters(draw):
    """Nodes that each have a spool and reach some of the tiers, and show some of one history."""
    history = draw(histories(max_world=3))
    tiers = [draw(places(history)) for _ in range(draw(st.integers(0, 2)))]
    spools = [draw(places(history)) for _ in range(draw(st.integers(1, 3)))]
    return history, [
        Inventory(spool, {str(number): draw(st.sampled_from([tier, tier, None])) for number, tier in enumerate(tiers)})
        for spool in spools
    ]


def _readable(nodes):
    places = [place for node in nodes for place in (node.spool, *node.tiers.values()) if place]
    return {part for place in places for seen in place.copies("r") for part in seen.facts}


def _read(nodes) -> set[str]:
    """The attempts of which any node sees a readable manifest, quarantined or not."""
    places = [place for node in nodes for place in (node.spool, *node.tiers.values()) if place]
    shown = _readable(nodes)
    quarantined = {part for place in places for part, facts in place.quarantined.items() if facts}
    return {part.checkpoint.attempt for part in shown | quarantined if part.checkpoint.run == "r"}


def _sees_whole(seen, checkpoint) -> bool:
    """Whether these parts hold every part of the checkpoint for some number of ranks."""
    return any(
        {p.rank for p in seen if p.checkpoint == checkpoint and p.world == w} == set(range(w)) for w in range(1, 4)
    )


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow])
@given(clusters())
def test_every_rank_can_have_the_agreed_checkpoint_and_passed_over_newer_checkpoints_are_named(case):
    history, nodes = case
    size = len(nodes)
    gathered = [
        read_member({"sight": msgspec.json.decode(msgspec.json.encode(run_view_of(node, "r")))}, "sight", RunView)
        for node in nodes
    ]
    assert gathered == [run_view_of(node, "r") for node in nodes], "a sight comes through as it was"
    found = restore_order(gathered, "r", world=size)
    seen = [
        {p for place in (node.spool, *node.tiers.values()) if place for p in place.parts() if p.checkpoint.run == "r"}
        for node in nodes
    ]
    every = set().union(*seen)
    quarantined = {
        p.checkpoint
        for node in nodes
        for place in (node.spool, *node.tiers.values())
        if place
        for p in place.quarantined
    }
    owners = {p.checkpoint for p in every}
    whole = {c for c in owners if _sees_whole(every, c)}
    assert len({*tried(found), *found.branches}) == len(found.candidates) + len(found.branches)
    assert {*tried(found), *found.branches} <= whole
    for one in whole - {*tried(found), *found.branches}:
        ranks = {w: {p.rank for p in every if p.checkpoint == one and p.world == w} for w in range(1, 4)}
        full = {w for w, some in ranks.items() if len(some) == w}
        assert size not in full, "names alone tell of another number of ranks"
        # A node whose view is incomplete says which parts it has, and not whether it can read them.
        views = [node for node, some in zip(nodes, seen, strict=True) if _sees_whole(some, one)]
        assert not {p for p in _readable(views) if p.checkpoint == one and p.world in full}
    for candidate in found.candidates:
        if candidate.world == size:
            blind = [rank for rank in range(size) if part(candidate.checkpoint, rank, size) not in seen[rank]]
            assert candidate.lacking == tuple(blind)
    first = found.candidates[0].checkpoint if found.candidates else None
    newer = {c for c in owners - whole if not first or c > first}
    assert newer <= {*found.incomplete, *found.unproven, *quarantined}, "each newer one is named"
    # The newest attempt of which anybody could read anything decides; below it, only what it descends from.
    origins = {p.checkpoint.attempt: facts.origin for p, facts in history.items()}
    if found.candidates:
        here, limit = max(_read(nodes) or {one.attempt for one in owners | quarantined}), 10**9
        allowed = {}
        while here is not None:
            allowed[here] = limit
            origin = origins[here]
            here, limit = (origin.attempt, origin.step) if origin else (None, None)
        assert all(c.step <= allowed.get(c.attempt, -1) for c in tried(found)), "never an abandoned branch"


def test_a_thousand_ranks_and_checkpoints_are_agreed_on_at_once():
    """1,024 ranks on 128 nodes, 1,000 checkpoints on the tier, and two that lie in the nodes' spools only."""
    steps = {A: list(range(0, 500_000, 500))}
    gathered = []
    for node in range(128):
        parts = {A: {step: {1024: [node * 8, node * 8 + 7]} for step in (500_000, 500_500)}}
        gathered += [RunView(whole={1024: steps}, parts=parts, origins={A: None})] * 8
    said = [msgspec.json.encode(view) for view in gathered]
    assert max(map(len, said)) < 10_000
    heard = [msgspec.json.decode(one, type=RunView) for one in said]
    begun = time.process_time()
    found = restore_order(heard, "r", world=1024)
    assert time.process_time() - begun < 10, "seconds; a comparison of every rank with every other takes minutes"
    assert [(c.checkpoint.step, c.lacking) for c in found.candidates[:2]] == [(500_500, ()), (500_000, ())]
    assert len(found.candidates) == 1002


# -- the best ---------------------------------------------------------------------------------------------------------

LOSS = MetricGoal("loss")


def measured(values: dict, place: Place | None = None, **more) -> Place:
    """`place` with checkpoints of one rank added that have these losses; None: no such metric."""
    found = place or Place()
    for owner, value in values.items():
        found = solo(found, owner, metrics={"acc": 1.0} if value is None else {"loss": value}, **more)
    return found


def test_best_of_the_timeline_is_first_and_of_equals_the_newest():
    place = measured({A100: 2.0, A200: 1.0, A300: 0.5})
    place = measured({B210: 1.0, checkpoint(2, 220): float("nan"), checkpoint(2, 230): None}, place, origin=A200)
    assert tried(restore_candidates(Inventory(place, {}), "r", best=LOSS)) == [B210, A200, A100], (
        "never 300, which it left"
    )
    assert tried(restore_candidates(Inventory(place, {}), "r", best=MetricGoal("loss", "max"))) == [A100, B210, A200]
    assert tried(restore_candidates(Inventory(place, {}), "r", attempt=A, best=LOSS)) == [A300, A200, A100]
    found = restore_candidates(Inventory(place, {}), "r", best=MetricGoal("f1"))
    assert tried(found) == [] and (found.unread, found.corrupt) == ((), ())
    assert "metric 'f1'; there are: acc, loss" in str(not_found_error(found, "r", None, []))
    infinite = measured({A100: float("inf"), A200: float("-inf")})
    assert tried(restore_candidates(Inventory(infinite, {}), "r", best=LOSS)) == [A200, A100]


def test_metrics_are_those_of_rank_0_and_reach_ranks_that_lack_its_manifest():
    own = [
        Place.of({part(c, n, 2): facts(1, metrics={"loss": c.step * (1.0 - n)}) for c in (A100, A200)}) for n in (0, 1)
    ]
    gathered = [run_view_of(Inventory(place, {}), "r", ("loss",)) for place in own]
    gathered = [
        read_member({"sight": msgspec.json.decode(msgspec.json.encode(one))}, "sight", RunView) for one in gathered
    ]
    for views in (gathered, gathered[::-1]):
        assert tried(restore_order(views, "r", best=LOSS)) == [A100, A200]
    assert restore_order(gathered[1:], "r", best=LOSS).candidates == ()
    both = Place.of({part(A100, n, 2): facts(1, metrics={"loss": 1.0}) if n else None for n in (0, 1)})
    assert restore_candidates(Inventory(both, {}), "r", best=LOSS).corrupt == (), "why it cannot be read is not known"
    assert restore_candidates(Inventory(both, {}), "r", best=LOSS).unread == (A100,)


def test_a_corrupt_manifest_says_nothing_where_another_copy_does():
    place = measured({A100: 2.0, A200: 1.0})
    known = {p: place.facts(p) for p in place.parts()}
    torn = remade(place, {**known, part(A200): None}, {part(A200): ManifestError("x")})
    found = restore_candidates(Inventory(torn, {}), "r", best=LOSS)
    assert (tried(found), found.corrupt, found.unread) == ([A100], (A200,), ())
    repaired = restore_candidates(Inventory(torn, {"a": place}), "r", best=LOSS)
    assert (tried(repaired), repaired.corrupt) == ([A200, A100], ())
    silent = remade(torn, defects={part(A200): SpoolUnusable("EIO")})
    assert restore_candidates(Inventory(silent, {}), "r", best=LOSS).unread == (A200,)


@given(histories(max_world=2), st.sampled_from(["min", "max"]))
@settings(max_examples=examples())
def test_the_best_are_those_of_the_newest_first_in_another_order(history, mode):
    world = Inventory(Place.of(history), {})
    newest, best = (tried(restore_candidates(world, "r", best=goal)) for goal in (None, MetricGoal("loss", mode)))
    values = {p.checkpoint: f.metrics.get("loss", float("nan")) for p, f in history.items() if p.rank == 0}
    assert set(best) == {one for one in newest if values[one] == values[one]}
    sign = 1 if mode == "max" else -1
    assert best == sorted(best, key=lambda one: (sign * values[one], one), reverse=True)
