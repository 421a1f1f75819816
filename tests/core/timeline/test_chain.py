"""The timeline: a resume walks down the attempts that the newest one descends from, and nowhere else."""

from __future__ import annotations

from hypothesis import given
from support.inventories import checkpoint, histories

from tierd.core.timeline.launch_chain import Timeline, order_by_timeline

A100, A200, A300 = (checkpoint(1, step) for step in (100, 200, 300))
A, B, C = (checkpoint(number, 0).attempt for number in (1, 2, 3))
B210, C205 = checkpoint(2, 210), checkpoint(3, 205)


def test_a_run_that_was_rolled_back_resumes_from_its_own_line_not_from_the_later_step():
    """The design's example: A saved 100, 200, 300; B resumed from A's 200 and saved 210."""
    every = {A100, A200, A300, B210}
    assert order_by_timeline(every, every, {A: None, B: A200}) == Timeline((B210, A200, A100), (A300,), None)


def test_rolled_back_run_whose_first_save_is_incomplete_continues_where_it_began():
    """B's only checkpoint lacks a rank: back to 200, not to 300."""
    every = {A100, A200, A300, B210}
    assert order_by_timeline(every, {A100, A200, A300}, {A: None, B: A200}) == Timeline((A200, A100), (A300,), None)


def test_attempts_chain():
    every = {A100, A200, A300, B210, C205}
    found = order_by_timeline(every, every, {A: None, B: A300, C: A200})
    assert found == Timeline((C205, A200, A100), (B210, A300), None)
    found = order_by_timeline(every, every, {A: None, B: A200, C: B210})
    assert found == Timeline((C205, B210, A200, A100), (A300,), None)


def test_an_origin_that_retention_has_removed_still_bounds_the_walk():
    left = {A100, A300, B210}
    assert order_by_timeline(left, left, {A: None, B: A200}) == Timeline((B210, A100), (A300,), None)


def test_an_exhausted_timeline_names_its_branches_and_takes_none_of_them():
    assert order_by_timeline({A300, B210}, {A300}, {A: None, B: A200}) == Timeline((), (A300,), None)


def test_timeline_ends_at_an_attempt_with_an_unknown_origin():
    every = {A300, A100, B210, C205}
    assert order_by_timeline(every, every, {A: None, C: B210}) == Timeline((C205, B210), (A300, A100), B)
    # B's checkpoints are all gone: what it resumed from went with them
    assert order_by_timeline({A100, A300, C205}, {A100, A300, C205}, {A: None, C: B210}) == Timeline(
        (C205,), (A300, A100), B
    )


def test_a_fresh_start_is_a_line_of_its_own():
    every = {A100, A300, B210}
    assert order_by_timeline(every, every, {A: None, B: None}) == Timeline((B210,), (A300, A100), None)


def test_nothing_known_is_an_empty_line():
    assert order_by_timeline([], [], {}) == Timeline((), (), None)


@given(histories(max_world=1))
def test_every_complete_checkpoint_is_on_the_path_or_a_branch_and_each_step_back_is_lawful(history):
    complete = {part.checkpoint for part in history}
    origins = {part.checkpoint.attempt: facts.origin for part, facts in history.items()}
    found = order_by_timeline(complete, complete, origins)
    assert found.unknown_origin is None
    assert sorted(found.path + found.branches) == sorted(complete)
    assert list(found.path) == sorted(found.path, reverse=True)
    assert found.path[0] == max(complete)
    for newer, older in zip(found.path, found.path[1:], strict=False):
        if newer.attempt == older.attempt:
            assert not [c for c in complete if c.attempt == newer.attempt and older.step < c.step < newer.step]
        else:
            origin = origins[newer.attempt]
            while origin.attempt != older.attempt:
                origin = origins[origin.attempt]
            assert older.step <= origin.step


def test_name_without_a_readable_manifest_does_not_decide_the_newest_attempt():
    every = {A100, A300, B210}
    assert order_by_timeline(every, every, {A: None}) == Timeline((A300, A100), (B210,), None, (B210,))
    assert order_by_timeline(every, {A100, A300}, {A: None}) == Timeline((A300, A100), (), None, (B210,))


def test_where_nothing_at_all_can_be_read_the_newest_name_is_tried():
    assert order_by_timeline({A300, B210}, {A300, B210}, {}) == Timeline((B210,), (A300,), B)


def test_head_without_manifests_bounds_the_timeline():
    """C's manifests are all gone, and a head tells that it went back to 100."""
    every = {A100, A300, B210}
    assert order_by_timeline(every, every, {A: None, B: A300, C: A100}) == Timeline((A100,), (B210, A300), None)
