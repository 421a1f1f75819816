"""What the gate's table is made of: rounds in full, of one tierd, and pieces of a round that belong together."""

from __future__ import annotations

import pytest
from faults import launchers, page
from faults.rounds import joined


def result(first: int, last: int, **more: object) -> dict:
    trials = last - first + 1
    known = {
        "kind": "sabotage",
        "unit": "fences",
        "seeds": [first, last],
        "asked": trials,
        "trials": trials,
        "losses": [],
        "skipped": [],
        "tierd": "a" * 40,
        "seconds": 1.5,
        "notes": {"by pytest": trials},
    }
    return known | more


def test_pieces_of_a_round_are_joined():
    whole = joined(result(0, 9), result(10, 19, notes={"by power": 10}))
    assert (whole["seeds"], whole["asked"], whole["trials"], whole["seconds"]) == ([0, 19], 20, 20, 3.0)
    assert whole["notes"] == {"by power": 10, "by pytest": 10}
    assert page.refused({"sabotage": whole}) == [] and page.is_full(whole, 20)


@pytest.mark.parametrize(
    "before",
    [
        None,
        result(0, 8),
        result(0, 10),
        result(0, 9, tierd="b" * 40),
        result(0, 9, tierd=None),
        result(0, 9, losses=[{"seed": 3, "why": "lost"}]),
        result(0, 9, skipped=["no root"]),
        result(0, 9, of=21),
    ],
    ids=["none", "a gap", "twice", "another tierd", "not committed", "a loss", "skipped", "of other fences"],
)
def test_results_that_do_not_belong_together_are_not_joined(before):
    piece = result(10, 19)
    assert joined(before, piece) == piece
    assert not page.is_full(piece, 20)


def test_round_with_skipped_or_uncommitted_code_is_not_published():
    assert page.refused({"sabotage": result(0, 19, skipped=["no root"])}) == ["sabotage: skipped no root"]
    assert page.refused({"sabotage": result(0, 19, tierd=None)}) == ["sabotage: tierd/ was not what was committed"]


def test_only_a_full_round_has_a_row_and_of_others_the_page_says_how_far_they_are():
    results = {"sabotage": result(0, 19), "launchers": result(0, 1499, kind="launchers", unit="launch cycles")}
    made = page.table(results, {"power": 5, "launchers": 2000, "sabotage": 20})
    assert [line.split(" | ")[0] for line in made.splitlines() if line.startswith("| ")][2:] == ["| sabotage"]
    assert made.endswith("Not played in full yet: power, launchers (1,500 of 2,000 so far).\n")


def test_round_is_full_until_a_fence_without_a_result_is_added():
    assert page.is_full(result(0, 19, of=20), 21)
    assert not page.is_full(result(0, 18, of=20), 19)


def test_two_pieces_without_a_commit_are_not_joined():
    assert joined(result(0, 9, tierd=None), result(10, 19, tierd=None))["seeds"] == [10, 19]


def test_table_of_launchers_counts_the_kills_under_each():
    notes = {
        "kill, saving": 3,
        "spawn: cycles": 2,
        "spawn: kill": 1,
        "spawn: stop-kill": 1,
        "srun: cycles": 1,
        "srun: raise": 1,
        "the longest wait is at most 5 s": 2,
        "the longest wait is at most 30 s": 1,
    }
    table = page.tables({"launchers": result(0, 2, kind="launchers", notes=notes)}, {"launchers": 3})
    assert "| launchers | 3 fences | 0..2 |" in table
    assert "| spawn | 2 | 2 |  |  |  |  |  |" in table and "| srun | 1 |  |  | 1 |  |  |  |" in table
    assert "longer than 30 s" in table


def test_the_kind_launchers_plays_all_that_there_are():
    from support.launchers import LIBRARIES, MPI, PLAIN

    names = {*launchers.NAMES, launchers.ELASTIC, launchers.DIVIDED}
    assert {launchers.name_of(seed) for seed in range(launchers.GATE)} == names
    assert set(launchers.NAMES) == {one.name for one in (*PLAIN, *MPI, *LIBRARIES)}
