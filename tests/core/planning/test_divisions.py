"""A checkpoint whose ranks divided different states counts nowhere: not for retention, a restore or a flush."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.inventories import checkpoint, config, facts, part

from tierd.core.errors import DivisionMismatch
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Flush, Place, Prune
from tierd.core.planning.plan import plan
from tierd.core.replicas.shares import differing_divisions
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.run_report import make_report
from tierd.core.timeline.restore_order import restore_candidates

RIGHT, WRONG = checkpoint(1, 1), checkpoint(1, 2)
LAST = RetentionPolicy(keep_last=1)
NODE, OTHER_NODE = "a" * 16, "b" * 16


def divided(owner, *divisions):
    """The parts of a checkpoint, one for each of these divisions."""
    return {
        part(owner, rank, len(divisions)): replace(facts(owner.step), division=division)
        for rank, division in enumerate(divisions)
    }


def place(*wrong):
    alike = [division[:16] + "0" * 16 for division in wrong]
    return Place.of(divided(RIGHT, *alike) | divided(WRONG, *wrong))


MISMATCHED = NODE + "0" * 16, NODE + "1" * 16


@pytest.mark.parametrize(
    ("divisions", "differing"),
    [
        (["", ""], {}),
        ([NODE + "0" * 16] * 2, {}),
        ([NODE + "0" * 16, ""], {}),
        ([NODE + "0" * 16, OTHER_NODE + "1" * 16], {}),  # each node divides among its own ranks
        (["0" * 32, "1" * 32], {}),  # of a tierd before the halves, as on two nodes
        (list(MISMATCHED), {1: 0}),
        ([OTHER_NODE + "2" * 16, "", *MISMATCHED, NODE + "0" * 16], {3: 2}),
    ],
)
def test_parts_of_one_node_that_differ_do_not_belong_together(divisions, differing):
    parts = [part(WRONG, rank, len(divisions)) for rank in range(len(divisions))]
    result = differing_divisions(dict(zip(parts, divisions, strict=True)))
    assert {wrong.rank: other.rank for wrong, other in result.items()} == differing


def test_copy_is_unusable_and_says_why():
    copy = place(*MISMATCHED).checkpoints[WRONG]
    assert not copy.usable and copy.is_mismatched and place(*MISMATCHED).checkpoints[RIGHT].usable
    assert "rank 1 of 2 and rank 0 divided different states" in str(copy.defects[part(WRONG, 1, 2)])
    assert isinstance(copy.defects[part(WRONG, 1, 2)], DivisionMismatch)


def test_restore_takes_the_checkpoint_before():
    order = restore_candidates(Inventory(place(*MISMATCHED), {}), "r")
    assert [candidate.checkpoint for candidate in order.candidates] == [RIGHT]


def test_older_checkpoint_is_not_pruned_for_it():
    tier, spool = place(*MISMATCHED), place(*MISMATCHED)
    inventory = Inventory(spool, {"a": tier})
    actions = plan(inventory, config(LAST, spool=LAST), {}, 0.0)
    assert not [action for action in actions if isinstance(action, Prune) and action.checkpoint == RIGHT]


def test_parts_in_two_places_do_not_make_it_complete():
    parts = divided(WRONG, *MISMATCHED)
    spool, tier = (Place.of({which: parts[which]}) for which in parts)
    inventory = Inventory(spool, {"a": tier})
    actions = plan(inventory, config(LAST), {}, 0.0)
    assert not [action for action in actions if isinstance(action, Flush) and action.relayed]
    assert not inventory.has_complete(WRONG) or restore_candidates(inventory, "r").candidates


def test_it_is_not_sent():
    actions = plan(Inventory(place(*MISMATCHED), {"a": Place()}), config(LAST), {}, 0.0)
    assert {action.part.checkpoint for action in actions if isinstance(action, Flush)} == {RIGHT}


def test_newer_checkpoint_ends_it():
    """It is deleted like any checkpoint that cannot become complete."""
    newer = Place.of(divided(checkpoint(2, 3), NODE + "0" * 16, NODE + "0" * 16))
    both = Place.of(divided(checkpoint(2, 3), NODE + "0" * 16, NODE + "0" * 16) | divided(WRONG, *MISMATCHED))
    for tier, places in ((both, ["a", SPOOL]), (newer, [SPOOL])):
        actions = plan(Inventory(both, {"a": tier}), config(LAST, spool=LAST), {}, 0.0)
        pruned = {(action.checkpoint, action.tier) for action in actions if isinstance(action, Prune)}
        assert pruned == {(WRONG, where) for where in places}


def test_report_says_that_it_is_incomplete_and_why():
    inventory = Inventory(place(*MISMATCHED), {"a": place(*MISMATCHED)})
    report = {c.step: c for c in make_report(inventory, config(LAST), "r").checkpoints}
    assert report[1].complete and report[1].resumes and not report[2].complete
    for copy in report[2].copies:
        assert copy.state == "incomplete" and "divided different states" in copy.defects[0]
        assert copy.keep and "divided different states" in copy.reasons[0]
