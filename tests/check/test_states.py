"""What is said of the state that two runs end with: histories by hand, and real values as leaves."""

from __future__ import annotations

import random

import msgspec
import pytest

from tierd.check.launch_records import CheckedRun, Observation, RankRecord, StateCapture
from tierd.check.state_comparison import count_compared_values, difference_lines, has_common_capture, state_differences
from tierd.check.value_leaves import ValueLeaf, leaves_by_path

STEPS = 9


def leaf(number: float, saved: bool | None = True) -> ValueLeaf:
    return ValueLeaf(f"{number}", f"{number}", sample=(number,), saved=saved)


def seen(first: int, last: int, *taken: StateCapture) -> RankRecord:
    one = RankRecord(captures=list(taken))
    for step in range(first, last + 1):
        one.observations[step] = Observation(step, (step,))
    return one


def taken(step: int, at: str = "step", beside: dict[str, float] | None = None, **entries: float) -> StateCapture:
    return StateCapture(
        step,
        at,
        {f'state["{key}"]': leaf(value) for key, value in entries.items()},
        {key: leaf(value, saved=False) for key, value in (beside or {}).items()},
    )


def history(*launches: RankRecord) -> CheckedRun:
    return CheckedRun([[one] for one in launches])


def found(reference: CheckedRun, killed: CheckedRun, tolerance: float = 0.0, ignore: tuple[str, ...] = ()) -> list[str]:
    return [one.path for one in state_differences(reference, killed, 0, tolerance, ignore)]


WHOLE = history(seen(1, STEPS, taken(4, best=2.0), taken(STEPS, "end", best=1.0)))


def killed_with(last: StateCapture, first: StateCapture | None = None) -> CheckedRun:
    return history(seen(1, 4, first or taken(4, best=2.0)), seen(3, STEPS, last))


def test_equal_states_are_no_difference():
    killed = killed_with(taken(STEPS, "end", best=1.0))
    assert found(WHOLE, killed) == [] and count_compared_values(WHOLE, killed, 0) == 1


@pytest.mark.parametrize(("kind", "differing"), [("scheduler", []), ("state", ['Plan of main["_step_count"]'])])
def test_number_of_calls_that_a_scheduler_counts_for_a_warning_is_no_difference(kind: str, differing: list[str]):
    """A scheduler that is made anew with `last_epoch` has counted fewer calls, and sets the same rates."""

    def ended(calls: float) -> StateCapture:
        last = taken(STEPS, "end", {'Plan of main["_step_count"]': calls}, best=1.0)
        return msgspec.structs.replace(last, kinds={"Plan of main": kind})

    whole = history(seen(1, STEPS, taken(4, best=2.0), ended(17)))
    assert found(whole, killed_with(ended(9))) == differing


def test_difference_names_the_first_step_the_magnitude_and_the_launch():
    killed = history(
        seen(1, 4, taken(4, best=2.0)),
        seen(3, 7, taken(4, best=2.5)),
        seen(7, STEPS, taken(STEPS, "end", best=1.5)),
    )
    [one] = state_differences(WHOLE, killed, 0, 0.0)
    assert (one.path, one.step, one.launch, one.saved) == ('state["best"]', 4, 3, True)
    assert one.magnitude == 0.5 and one.relative == pytest.approx(1 / 3)
    assert difference_lines([one]) == [
        'state["best"]: after step 4 apart by 0.5 (3.3e-01 of it): 1.0 uninterrupted, 1.5 in the killed run'
    ]
    assert found(WHOLE, killed, tolerance=0.4) == []


def test_difference_of_a_leaf_that_was_never_saved_is_listed_last_and_says_so():
    whole = history(seen(1, STEPS, taken(4), taken(STEPS, "end", {"Sequential[0]": 1.0}, best=1.0)))
    killed = killed_with(taken(STEPS, "end", {"Sequential[0]": 3.0}, best=2.0), taken(4))
    both = state_differences(whole, killed, 0, 0.0)
    assert [(one.path, one.saved) for one in both] == [('state["best"]', True), ("Sequential[0]", False)]
    assert difference_lines(both)[1].endswith("; not in the checkpoint")


def test_leaf_that_differs_between_two_fresh_launches_is_no_finding():
    """A clock, or a generator that nobody seeded."""
    assert found(WHOLE, killed_with(taken(STEPS, "end", best=7.0), taken(4, best=9.0))) == []


def test_second_uninterrupted_run_shows_leaves_that_vary_where_the_killed_run_has_no_common_moment():
    killed = history(seen(1, 3), seen(3, STEPS, taken(STEPS, "end", best=3.0)))
    assert not has_common_capture(WHOLE, killed, 0, 'state["best"]') and found(WHOLE, killed) == ['state["best"]']
    again = history(seen(1, STEPS, taken(STEPS, "end", best=2.0)))
    assert state_differences(WHOLE, killed, 0, 0.0, (), again) == []
    assert state_differences(WHOLE, killed, 0, 0.0, (), WHOLE) != []


def test_common_moment_that_lacks_a_leaf_says_nothing_of_it():
    """A rank that was killed before its first save shows nothing of what it saves."""
    whole = history(seen(1, STEPS, taken(4), taken(STEPS, "end", best=1.0)))
    killed = killed_with(taken(STEPS, "end", best=2.0), taken(4))
    assert not has_common_capture(whole, killed, 0, 'state["best"]')
    assert has_common_capture(WHOLE, killed_with(taken(STEPS, "end", best=7.0), taken(4, best=9.0)), 0, 'state["best"]')


def test_differences_leave_out_ignored_paths():
    whole = history(seen(1, STEPS, taken(STEPS, "end", timing=1.0, other=1.0)))
    killed = history(seen(1, 4), seen(3, STEPS, taken(STEPS, "end", timing=2.0, other=2.0)))
    assert found(whole, killed, ignore=('state["timing"]',)) == ['state["other"]']
    assert found(whole, killed, ignore=('state["*"]',)) == []
    assert found(whole, killed, ignore=("state",)) == []
    assert found(whole, killed, ignore=("other",)) == ['state["timing"]', 'state["other"]']


def test_an_entry_that_only_one_run_has():
    whole = history(seen(1, STEPS, taken(STEPS, "end", best=1.0, late=3.0)))
    [one] = state_differences(whole, killed_with(taken(STEPS, "end", best=1.0)), 0, 0.0)
    assert (one.path, one.got, one.magnitude) == ('state["late"]', "nothing", None)


def test_run_that_was_never_resumed_or_never_ended_says_nothing():
    assert found(WHOLE, history(seen(1, STEPS, taken(STEPS, "end", best=5.0)))) == []
    assert found(WHOLE, history(seen(1, 4, taken(4, best=2.0)), seen(3, STEPS))) == []


def test_no_earlier_moment_stands_in_for_the_last():
    """A killed run that was not looked at after the last step, or only past it, differs in nothing."""
    for late in (taken(6, best=9.0), taken(STEPS + 1, "end", best=9.0)):
        whole = history(seen(1, STEPS, taken(4, best=2.0), taken(6, best=1.5), taken(STEPS, "end", best=1.0)))
        killed = history(seen(1, 4, taken(4, best=2.0)), seen(3, STEPS, late))
        assert found(whole, killed) == [] and count_compared_values(whole, killed, 0) == 0


def test_an_entry_that_was_wrong_after_the_resume_and_is_right_at_the_end():
    """The last samples of a filter are those of an uninterrupted run again after some steps; they were lost all the
    same."""
    whole = history(seen(1, STEPS, taken(4, recent=2.0), taken(6, recent=3.0), taken(STEPS, "end", recent=5.0)))
    late = taken(6, beside={"Meter": 7.0}, recent=0.0)
    killed = history(seen(1, 4, taken(4, recent=2.0)), seen(3, STEPS, late, taken(STEPS, "end", recent=5.0)))
    [one] = state_differences(whole, killed, 0, 0.0)
    assert (one.path, one.step, one.launch, one.passing) == ('state["recent"]', 6, 2, True)
    assert difference_lines([one])[0].endswith("; equal again later")
    assert found(whole, killed, tolerance=1.0) == found(whole, killed, ignore=('state["recent"]',)) == []
    # In the launch that was killed nothing had been resumed yet, and what two launches do not agree on says nothing.
    assert found(whole, history(seen(1, 8, late), seen(7, STEPS, taken(STEPS, "end", recent=5.0)))) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "compares"),
    [
        (("save", 6, "object"), ("save", 8, "object"), True),
        (("save", 6, "other object"), ("save", 6, "object"), True),
        (("save", 6, "object"), ("restore", 4, "object"), True),
        (("save", 6, "other object"), ("restore", 6, "object"), False),  # it trains with what it made of that
        (("save", 6, "object"), ("restore", 6, "values"), False),
        (("restore", -1, "object"), ("restore", 6, "object"), False),
        (("save", 6, "other values"), ("save", 6, "other values"), True),
        (("save", 6, "values"), ("save", 8, "values"), False),  # saved by the clock
        (("save", 6, "other values"), ("restore", 6, "values"), False),
        (("save", 6, "object"), ("save", 6, "unread"), False),
        (("save", 6, "object"), ("save", 6, ""), True),  # it is not saved any more
        (("save", 6, "object"), ("restore", 6, ""), False),
    ],
)
def test_values_are_held_against_each_other_in_the_same_form_alone(ours, theirs, compares):
    def end(how: str, step: int, form: str, value: float) -> StateCapture:
        forms = {'state["best"]': form} if form else {}
        one = taken(STEPS, "end", best=value) if form else taken(STEPS, "end")
        return msgspec.structs.replace(one, forms=forms, note=(how, step))

    whole = history(seen(1, STEPS, end(*ours, 1.0)))
    killed = history(seen(1, 4), seen(3, STEPS, end(*theirs, 2.0)))
    assert found(whole, killed) == (['state["best"]'] if compares else [])
    if theirs[2]:
        assert count_compared_values(whole, killed, 0) == compares


# -- leaves -----------------------------------------------------------------------------------------------------------


def test_leaves_have_paths_and_distinguish_values():
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    value = {
        "w": torch.arange(3.0),
        "a": numpy.arange(4),
        "n": [1, {"x": None}],
        "long": list(range(100)),
        "gen": random.Random(3),
        "t": torch.Generator().manual_seed(1),
        "np": numpy.random.default_rng(0),
        5: float("nan"),
    }
    one = leaves_by_path(value, "state")
    assert {'state["w"]', 'state["n"][0]', 'state["n"][1]["x"]', 'state["long"]', "state[5]", 'state["gen"]'} <= set(
        one
    )
    assert one['state["long"]'].count == 100 and one['state["w"]'].sample == (0.0, 1.0, 2.0)
    value["w"][1] = 5
    value["long"][50] = -1
    value["gen"].random()
    value["np"].random()
    value["t"].manual_seed(2)
    other = leaves_by_path(value, "state")
    assert {path for path in one if one[path].digest != other[path].digest} == {
        'state["w"]', 'state["long"]', 'state["gen"]', 'state["np"]', 'state["t"]',
    }  # fmt: skip


def test_reading_leaves_draws_no_random_number_and_survives_unreadable_values():
    torch = pytest.importorskip("torch")
    state = random.getstate(), torch.get_rng_state()
    loop: list = []
    loop.append(loop)
    values = {"sparse": torch.eye(2).to_sparse(), "meta": torch.empty(2, device="meta"), "loop": loop, "f": print}
    assert set(leaves_by_path({**values, "empty": torch.empty(0)}, "s")) >= {'s["empty"]', "s"}
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
