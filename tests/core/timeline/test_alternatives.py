"""An answer to a name that does not exist shows those that do, and of many the likely ones."""

from __future__ import annotations

import pytest
from support.world import part

from tierd.core.timeline.restore_order import RestoreOrder, describe_runs, describe_steps, not_found_error


def test_runs_of_a_similar_name_are_first_and_many_are_counted() -> None:
    assert describe_runs("x", []) == "there is no run at all"
    assert describe_runs("lama-7b", ["a", "llama-7b"]) == "the runs there are: llama-7b, a"
    many = [f"run-{number:03}" for number in range(100)]
    text = describe_runs("zzz", many)
    assert "run-000" in text and "run-019" in text and "run-020" not in text and text.endswith(" and 80 more")


@pytest.mark.parametrize(
    ("step", "there", "says"),
    [
        (7, [], ""),
        (7, [20, 10, 10], "the steps there are: 10, 20"),
        (
            505,
            range(0, 1000, 10),
            "the nearest of 100 steps there, 0 to 990, are: 470, 480, 490, 500, 510, 520, 530, 540",
        ),
    ],
)
def test_of_many_steps_the_nearest_are_named(step: int, there: list[int], says: str) -> None:
    assert describe_steps(step, there) == says


def test_an_error_for_a_step_names_those_of_the_run() -> None:
    found = RestoreOrder(
        (), (), (), None, (), (), complete=frozenset(part(step, run="r").checkpoint for step in (10, 20))
    )
    assert str(not_found_error(found, "r", 15, [])).endswith("no such checkpoint\n  the steps there are: 10, 20")
    assert "steps there" not in str(not_found_error(found, "r", None, []))
    assert "steps there" not in str(not_found_error(found, "r", 10, ["step 10: bytes differ"]))
