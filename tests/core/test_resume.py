"""What a restore tries, in which order, and what it says when there is nothing to try."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.worlds import cases, checkpoint, facts, part, solo
from hypothesis import HealthCheck, given, settings

from tierd.core.errors import CheckpointNotFound
from tierd.core.resume import Candidate, Resume, not_found, own_part, restore_candidates
from tierd.core.world import Place, World

A100, A200, A300 = (checkpoint(1, step) for step in (100, 200, 300))
B210 = checkpoint(2, 210)
A, B = A100.attempt, B210.attempt


def tried(resume: Resume):
    return [candidate.checkpoint for candidate in resume.candidates]


def rolled_back() -> Place:
    """A saved 100, 200, 300; B resumed from 200 and saved 210."""
    return solo(solo(Place(), A100, A200, A300), B210, origin=A200)


def test_the_timeline_is_tried_newest_first_and_the_branch_only_named():
    found = restore_candidates(World(rolled_back(), {}), "r")
    assert tried(found) == [B210, A200, A100]
    assert found.branches == (A300,)
    assert found.attempts == (A, B)
    assert (found.incomplete, found.lost, found.unreached) == ((), None, ())


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
    assert tried(restore_candidates(World(rolled_back(), {}), "r", step, attempt)) == expected


def test_a_step_that_two_attempts_have_is_the_timelines_or_else_the_newest_attempts():
    twice = solo(rolled_back(), checkpoint(2, 300), origin=A200)
    assert tried(restore_candidates(World(twice, {}), "r", 300)) == [checkpoint(2, 300)]
    c = solo(twice, checkpoint(3, 7))
    assert tried(restore_candidates(World(c, {}), "r", 300)) == [checkpoint(2, 300)]


def test_completeness_is_over_all_places_together():
    """Rank 0 in the spool, rank 1 on a tier: P3 asks for the manifests, not for one place that has them all."""
    spool, tier = Place.of({part(A100, 0, 2): facts()}), Place.of({part(A100, 1, 2): facts()})
    found = restore_candidates(World(spool, {"a": tier}), "r")
    assert found.candidates == (Candidate(A100, 2, ("local", "a")),)
    assert own_part(found.candidates[0], 1) == part(A100, 1, 2)
    assert restore_candidates(World(spool, {"a": None}), "r").candidates == ()


def test_an_unreadable_manifest_still_counts_towards_completeness():
    """Names decide; whether the bytes are right is found out by whoever reads them."""
    spool = Place.of({part(A100, 0, 2): facts(), part(A100, 1, 2): None})
    assert tried(restore_candidates(World(spool, {}), "r")) == [A100]


def test_incomplete_ones_newer_than_the_first_are_named():
    spool = solo(Place.of({part(A300, 0, 2): facts(), part(A100, 0, 2): facts()}), A200)
    found = restore_candidates(World(spool, {}), "r")
    assert tried(found) == [A200]
    assert found.incomplete == (A300,)
    assert restore_candidates(World(Place.of({part(A100, 0, 2): facts()}), {}), "r").incomplete == (A100,)


def test_mixed_world_sizes_are_never_mixed_into_one():
    spool = Place.of({part(A100, 0, 1): facts(), part(A100, 0, 2): facts()})
    assert restore_candidates(World(spool, {}), "r").candidates == (Candidate(A100, 1, ("local",)),)


def test_a_quarantined_part_still_tells_where_its_attempt_came_from():
    spool = replace(solo(Place(), A100, A200, A300), quarantined={part(B210): facts(origin=A200)})
    found = restore_candidates(World(spool, {}), "r")
    assert tried(found) == [A200, A100]
    assert found.branches == (A300,)
    assert found.attempts == (A, B)


def test_an_attempt_whose_origin_nobody_can_tell_ends_the_walk():
    spool = replace(solo(Place(), A100), quarantined={part(B210): None})
    found = restore_candidates(World(spool, {}), "r")
    assert (tried(found), found.branches, found.lost) == ([], (A100,), B)


def test_other_runs_are_none_of_its_business():
    spool = solo(solo(Place(), A100), checkpoint(9, 900, "other"))
    spool = replace(spool, quarantined={part(checkpoint(8, 1, "other")): facts()})
    found = restore_candidates(World(spool, {}), "r")
    assert (tried(found), found.attempts, found.branches) == ([A100], (A,), ())
    assert restore_candidates(World(spool, {}), "nothing") == Resume((), (), (), None, (), ())


def test_tiers_that_did_not_answer_are_named():
    assert restore_candidates(World(Place(), {"a": None, "b": Place()}), "r").unreached == ("a",)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_a_candidate_is_complete_and_each_complete_checkpoint_is_tried_or_named(case):
    world, _ = case
    found = restore_candidates(world, "r")
    places = {"local": world.spool, **{name: tier for name, tier in world.tiers.items() if tier}}
    seen = {p for place in places.values() for p in place.parts() if p.checkpoint.run == "r"}
    for candidate in found.candidates:
        ranks = {p.rank for p in seen if p.checkpoint == candidate.checkpoint and p.world == candidate.world}
        assert ranks == set(range(candidate.world))
        for name in candidate.places:
            assert any(p.checkpoint == candidate.checkpoint for p in places[name].parts())
    whole = {
        p.checkpoint for p in seen if {q.rank for q in seen if q.checkpoint == p.checkpoint} >= set(range(p.world))
    }
    assert sorted([*tried(found), *found.branches]) == sorted(whole)
    assert tried(found) == sorted(tried(found), reverse=True)


def test_the_error_says_what_was_asked_what_was_skipped_and_what_else_there_is():
    resume = restore_candidates(World(rolled_back(), {}), "r")
    error = not_found(resume, "r", None, ["step 210: bytes differ"])
    assert isinstance(error, CheckpointNotFound)
    assert str(error).splitlines() == [
        "run 'r': no checkpoint could be verified",
        "  skipped step 210: bytes differ",
        f"  not tried, off the timeline: step 300 of attempt {A}; restore(step=…, attempt=…) asks for one",
    ]
    assert str(not_found(Resume((), (), (), None, (), ()), "r", 7, [])) == "run 'r' step 7: there is no such checkpoint"
    lost = restore_candidates(World(replace(solo(Place(), A100), quarantined={part(B210): None}), {}), "r")
    assert f"what attempt {B} resumed from cannot be told any more" in str(not_found(lost, "r", None, []))
