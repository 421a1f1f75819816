"""What ls and show tell: the truth about every copy, in plain data that JSON can hold."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from support.inventories import cases, checkpoint, config, facts, part, solo
from support.seeds import examples

from tierd.core.errors import ManifestError
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place, Prune
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.run_report import Report, make_report

A100, A200, B210 = checkpoint(1, 100), checkpoint(1, 200), checkpoint(2, 210)
LAST1 = config(*[RetentionPolicy(keep_last=1)] * 2, spool=RetentionPolicy(keep_last=1))


def states(found: Report) -> dict[tuple[int, str], str]:
    return {(one.step, copy.place): copy.state for one in found.checkpoints for copy in one.copies}


def test_a_checkpoint_with_its_copies():
    spool = Place.of({part(A100): facts(1, metrics={"loss": 0.5, "bad": float("nan")})}, pins=frozenset({A100}))
    found = make_report(Inventory(spool, {"a": spool, "b": None}), LAST1)
    assert found.unreached == ("b",)
    (one,) = found.checkpoints
    assert (one.run, one.step, one.attempt, one.world_size) == ("r", 100, A100.attempt, 1)
    assert one.created == "2025-01-01T00:01:00+00:00"
    assert one.metrics == {"loss": 0.5, "bad": None}
    assert (one.complete, one.pinned, one.resumes, one.resumed_from) == (True, True, True, None)
    local, tier = one.copies
    assert (local.place, local.state, local.ranks, local.keep, local.reasons) == (
        "local",
        "committed",
        (0,),
        True,
        ("pinned", "newest"),
    )
    assert (tier.place, tier.state, tier.size, tier.stored_size, tier.defects) == ("a", "verified", 10, 8, ())


def test_each_state_a_copy_can_be_in():
    half = {part(A200, 0, 2): facts()}
    tier = Place.of(
        {**half, part(B210): None},
        {part(B210): ManifestError("manifest of r step 210: its bytes differ")},
        quarantined={part(A100): facts()},
    )
    found = make_report(Inventory(Place.of(half), {"a": tier}), None)
    assert states(found) == {
        (210, "a"): "corrupt",
        (200, "local"): "committed",
        (200, "a"): "incomplete",
        (100, "a"): "quarantined",
    }
    assert found.checkpoints[0].copies[0].defects == ("manifest of r step 210: its bytes differ",)
    assert [one.complete for one in found.checkpoints] == [True, False, False]  # names alone decide


def test_copy_that_unusable_manifests_make_incomplete_says_so_and_not_that_parts_may_arrive():
    tier = Place.of({part(A200, 0, 2): None, part(A200, 1, 2): None, part(B210, 0, 2): None})
    found = make_report(Inventory(Place(), {"a": tier}), LAST1)
    assert {one.step: one.copies[0].reasons for one in found.checkpoints} == {
        200: ("incomplete: 2 of its 2 manifests cannot be used",),
        210: ("incomplete: its other parts may still come",),
    }


def test_report_shows_the_facts_of_a_quarantined_part():
    quarantined = Place(quarantined={part(B210, 1, 4): facts(7, metrics={"loss": 2.0}, origin=A100)})
    found = make_report(Inventory(solo(Place(), A100), {"a": quarantined}), None).checkpoints[0]
    assert (found.world_size, found.metrics, found.resumed_from) == (4, {"loss": 2.0}, A100.name)
    assert (found.copies[0].ranks, found.complete, found.resumes) == ((1,), False, False)


def test_exactly_the_checkpoint_that_a_restore_would_try_first_resumes():
    spool = solo(solo(Place(), A100, A200), B210, origin=A100)
    assert [one.step for one in make_report(Inventory(spool, {}), None).checkpoints if one.resumes] == [210]
    unread = replace(solo(Place(), A100), quarantined={part(B210): None})
    assert [one.step for one in make_report(Inventory(unread, {}), None).checkpoints if one.resumes] == [100]


def test_one_run_or_all_of_them():
    spool = solo(solo(Place(), A100), checkpoint(1, 5, "other"))
    assert [one.run for one in make_report(Inventory(spool, {}), None).checkpoints] == ["other", "r"]
    assert [one.run for one in make_report(Inventory(spool, {}), None, "r").checkpoints] == ["r"]
    assert make_report(Inventory(spool, {}), None, "nothing") == Report((), ())


@pytest.mark.parametrize("with_config", [True, False])
def test_verdicts_are_given_where_there_is_a_policy_to_give_them(with_config):
    place = solo(Place(), A100, A200)
    found = make_report(Inventory(place, {"a": place}), LAST1 if with_config else None)
    older = found.checkpoints[1]
    assert [copy.keep for copy in older.copies] == [not with_config] * 2
    assert all(bool(copy.reasons) == with_config for copy in older.copies)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_report_announces_deletions_and_is_json(case):
    world, asked = case
    found = make_report(replace(world, free=1.0), asked)
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(found)), Report) == found
    kept = {(one.run, one.attempt, one.step, copy.place): copy.keep for one in found.checkpoints for copy in one.copies}
    for action in plan(replace(world, free=1.0), asked, {}, 0.0):
        if isinstance(action, Prune):  # of a copy; chunks that no manifest names are none, and no row
            own = action.checkpoint
            assert not kept.get((own.run, own.attempt, own.step, action.tier), False)
    for one in found.checkpoints:
        assert one.copies
        assert sum(other.resumes for other in found.checkpoints if other.run == one.run) <= 1
