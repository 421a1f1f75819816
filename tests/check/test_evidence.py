"""Which values are named as causes of a divergence: histories by hand."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tierd.check.causes import find_causes, state_difference_causes
from tierd.check.data_pipeline import data_pipeline_leaves, reachable_generators
from tierd.check.launch_records import PYTHON_GENERATOR, CheckedRun, Observation, RankRecord, StateCapture
from tierd.check.live_objects import LiveObjects
from tierd.check.resume_findings import launch_findings
from tierd.check.sample_comparison import ComparisonTerms, compare_rank
from tierd.check.state_comparison import StateDifference
from tierd.check.value_leaves import ValueLeaf

GRADIENT = 'gradient of model["weight"]'


def seen(first: int, *taken: StateCapture) -> RankRecord:
    one = RankRecord(captures=list(taken))
    for step in range(first, 8):
        one.observations[step] = Observation(step, (step,))
    return one


def taken(at: str, gradient: float | None, **entries: float) -> StateCapture:
    beside = {} if gradient is None else {GRADIENT: gradient}
    values = {f'state["{key}"]': value for key, value in entries.items()}
    kinds = {f'state["{key}"]': "optimizer" for key in entries}
    return StateCapture(4, at, leaves(values), leaves(beside), kinds=kinds)


def leaves(values: dict[str, float]) -> dict[str, ValueLeaf]:
    return {path: ValueLeaf(f"{value}", f"{value}", sample=(value,)) for path, value in values.items()}


def backward(gradient: float | None) -> StateCapture:
    return StateCapture(4, "backward", {}, {}, {} if gradient is None else leaves({GRADIENT: gradient}))


def kinds(momentum_after_the_load: float, *, clears: bool = False) -> list[str]:
    """The kinds that are named; `clears`: the loop clears the gradients before its backward pass."""
    whole = seen(
        1,
        taken("save", 1.0, momentum=2.0),
        taken("forward", 1.0, momentum=2.0),
        backward(None if clears else 1.0),
    )
    begun = seen(
        5,
        taken("loaded", None, momentum=momentum_after_the_load),
        taken("forward", None, momentum=momentum_after_the_load),
        backward(None),
    )
    killed = CheckedRun([[seen(1)], [begun]])
    return [one.kind for one in launch_findings(CheckedRun([[whole]]), killed, 0, 2, "later loss")]


def test_gradients_are_named_where_there_is_no_stronger_cause():
    assert kinds(2.0) == ["gradients"]


def test_gradients_that_the_loop_clears_before_its_backward_pass_are_no_cause():
    assert kinds(2.0, clears=True) == []


def test_gradients_are_no_second_cause_where_another_value_was_lost():
    """The gradients of one step are of the values that it had: they differ because those do."""
    assert kinds(0.0) == ["optimizer"]


# -- what only follows ------------------------------------------------------------------------------------------------

DICE = "loop() dice"
KINDS = {"weight": "state", "best": "state", "lr": "optimizer", "ema": "weights", "losses": "state"}


def at(step: int, moment: str, generator: str = "", **entries: float) -> StateCapture:
    """A capture of a loop without a module, so that there is none before a forward pass."""
    drawn = {DICE: ValueLeaf(generator, f"generator {generator}")} if generator else {}
    kinds = {f'state["{key}"]': KINDS[key] for key in entries}
    forms = dict.fromkeys(kinds, "object")
    values = leaves({f'state["{key}"]{"[0]" if KINDS[key] == "weights" else ""}': one for key, one in entries.items()})
    return StateCapture(step, moment, values, {}, drawn, kinds, forms, ("save", step))


def found(what: str, whole: list[StateCapture], killed: list[StateCapture]) -> list[tuple[str, str]]:
    histories = CheckedRun([[seen(1, *whole)]]), CheckedRun([[seen(1)], [seen(5, *killed)]])
    return [(one.kind, one.path) for one in launch_findings(*histories, 0, 2, what)]


def test_a_value_that_training_changes_is_no_cause_after_the_step():
    """The weight was right after the load, and each step moves it: by other sums it moves elsewhere."""
    whole = [at(4, "save", weight=1.0, best=3.0), at(5, "step", weight=2.0, best=3.0)]
    killed = [at(4, "loaded", weight=1.0, best=3.0), at(5, "step", weight=2.5, best=2.9)]
    assert found("first loss", whole, killed) == []


def test_a_value_that_an_uninterrupted_run_leaves_alone_was_set():
    whole = [at(4, "save", weight=1.0, lr=0.1), at(5, "step", weight=2.0, lr=0.1)]
    killed = [at(4, "loaded", weight=1.0, lr=0.1), at(5, "step", weight=2.5, lr=0.5)]
    assert found("later loss", whole, killed) == [("optimizer", 'state["lr"]')]


@pytest.mark.parametrize("what", ["first loss", "later loss", "state"])
def test_a_generator_that_was_drawn_from_explains_the_values_that_were_drawn(what: str):
    """The list of losses was lost as well, but the weight follows from the generator."""
    whole = [
        at(4, "save", "a", weight=1.0, losses=1.0),
        at(4, "step", "a", weight=1.0, losses=1.0),
        at(5, "step", "b", weight=2.0, losses=2.0),
        at(7, "end", "c", weight=3.0, losses=3.0),
    ]
    killed = [at(4, "loaded", "x", weight=1.0, losses=0.0), at(5, "step", "y", weight=2.5, losses=1.0)]
    assert found(what, whole, killed) == [("generator", DICE), ("state", 'state["losses"]')]


def test_an_idle_generator_explains_nothing():
    whole = [at(4, "save", "a", lr=0.1), at(4, "step", "a", lr=0.1), at(5, "step", "a", lr=0.2)]
    killed = [at(4, "loaded", "x", lr=0.1), at(5, "step", "x", lr=0.3)]
    assert found("first loss", whole, killed) == []


def test_object_that_keeps_its_loaded_state_was_replaced():
    whole = [at(4, "save", ema=1.0), at(5, "step", ema=2.0), at(7, "end", ema=3.0)]
    killed = [at(4, "loaded", ema=1.0), at(5, "step", ema=1.0), at(7, "end", ema=1.0)]
    assert found("state", whole, killed) == [("weights", 'state["ema"][0]')]
    assert found("state", whole, [*killed[:2], at(7, "end", ema=2.0)]) == []


# -- the state at the end, where samples and losses are right ----------------------------------------------------------


def final(whole: list[StateCapture], killed: list[StateCapture], reference: list[StateCapture] | None = None):
    histories = [CheckedRun([[seen(1, *one)]]) for one in (whole if reference is None else reference, whole)]
    weight = StateDifference(0, 'state["weight"]', 5, 2, "3.0", "3.5", 0.5, 0.1, True)
    run = CheckedRun([[seen(1)], [seen(5, *killed)]])
    return state_difference_causes(histories[0], run, histories[1], [weight])


WHOLE = [
    at(4, "save", "a", weight=1.0),
    at(4, "step", "a", weight=1.0),
    at(5, "step", "b", weight=2.0),
    at(7, "end", "c", weight=3.0),
]


def test_a_weight_that_moves_by_noise_is_put_down_to_its_generator():
    [cause] = final(WHOLE, [at(4, "loaded", "x", weight=1.0), at(5, "step", "y", weight=2.5)])
    assert cause.kind == "generator" and DICE in cause.says


def test_a_weight_that_was_lost_is_its_own_cause():
    [cause] = final(WHOLE, [at(4, "loaded", "a", weight=0.0), at(5, "step", "b", weight=2.5)])
    assert (
        cause.kind == "state" and cause.says == 'state["weight"]: 1.0 at the save of step 4, 0.0 right after the load'
    )


def test_weight_that_was_not_lost_is_unknown_and_reported_with_its_observed_values():
    [cause] = final(WHOLE, [at(4, "loaded", "a", weight=1.0), at(5, "step", "b", weight=2.5)])
    assert cause.kind == "unknown" and 'not state["weight"]: 3.0 uninterrupted and 3.5 in launch 2' in cause.says


def test_a_weight_on_which_uninterrupted_runs_do_not_agree_is_not_lost():
    [cause] = final(WHOLE, [at(4, "loaded", "a", weight=1.0)], [at(7, "end", "c", weight=3.1)])
    assert cause.kind == "not deterministic" and 'state["weight"]' in cause.says


def test_a_generator_that_nobody_seeded_explains_no_samples():
    """The killed run's first launch may have been captured at no moment of the others; a second run shows it."""
    begun = seen(5, at(4, "loaded", "x"), at(5, "step", "y"))
    begun.observations = {step: Observation(step, (step + 100,)) for step in range(5, 8)}
    killed = CheckedRun([[seen(1)], [begun]])
    whole, again = (
        CheckedRun([[seen(1, at(4, "save", f"{one}"), at(5, "step", f"{one}"), at(7, "end", f"{one}"))]])
        for one in "ab"
    )
    result = compare_rank(whole, killed, 0, ComparisonTerms(7))
    assert [one.kind for one in find_causes(whole, killed, again, [result], ComparisonTerms(7))] == ["shuffle"]
    assert [one.kind for one in find_causes(again, killed, again, [result], ComparisonTerms(7))] == ["generator"]


# -- generators that a loop does not hold itself -----------------------------------------------------------------------

GRAINS = random.Random(1)


class Noise:
    def __init__(self) -> None:
        self.rng = random.Random(2)

    def add(self, one: float) -> float:
        return one + self.rng.random()


def dropping():
    rng = random.Random(3)
    return lambda one: one * rng.random()


def test_generators_in_objects_closures_and_global_variables_are_observed():
    before, noise, drop = GRAINS.getstate(), Noise(), partial(dropping())
    found = reachable_generators(None)
    me = "test_generators_in_objects_closures_and_global_variables_are_observed()"
    assert {f"{me} noise.rng", f"{me} drop.rng", "GRAINS"} <= set(found)
    assert GRAINS.getstate() == before and PYTHON_GENERATOR not in found
    drop(noise.add(1.0))
    after = reachable_generators(None)
    assert {one for one in found if found[one] != after[one]} == {f"{me} noise.rng", f"{me} drop.rng"}


# -- what is beside the checkpoint, and what is set before a step ------------------------------------------------------


def captured(step: int, moment: str, **values: float | str) -> StateCapture:
    """A capture of data in the loop's variables, and of a generator."""
    found = {f"loop() {name.replace('_in_', '.')}": ValueLeaf(f"{one}", f"{one}") for name, one in values.items()}
    found = {path: ValueLeaf(one.digest, one.text, saved=False) for path, one in found.items()}
    return StateCapture(step, moment, {}, {}, found)


def test_epoch_beside_the_checkpoint_is_named_before_the_generator_that_follows_from_it():
    whole = [
        captured(4, "save", rng="generator a", sampler_in_epoch=1),
        captured(5, "step", rng="generator b", sampler_in_epoch=1),
    ]
    killed = [
        captured(4, "loaded", rng="generator x", sampler_in_epoch=0),
        captured(5, "step", rng="generator y", sampler_in_epoch=0),
    ]
    assert [kind for kind, _ in found("samples", whole, killed)] == ["epoch", "generator"]


def test_a_variable_of_a_stream_that_has_not_begun_is_no_cause():
    one = {"stream().one": ValueLeaf("1", "1")}
    whole = [
        StateCapture(4, "save", {}, {}, one),
        StateCapture(5, "step", {}, {}, {"stream().one": ValueLeaf("2", "2")}),
    ]
    killed = [StateCapture(4, "loaded", {}, {}), StateCapture(5, "step", {}, {}, {"stream().one": ValueLeaf("3", "3")})]
    assert "gone" not in str(
        launch_findings(CheckedRun([[seen(1, *whole)]]), CheckedRun([[seen(1)], [seen(5, *killed)]]), 0, 2, "samples")
    )


def window(step: int, moment: str, *items: float) -> StateCapture:
    path = 'state["data"]["window"]'
    run = ValueLeaf(f"{items}", f"{len(items)} items: …", len(items), items)
    return StateCapture(step, moment, {path: run}, {}, {}, {'state["data"]': "data"})


@pytest.mark.parametrize(("got", "kind"), [((9, 10, 11, 12, 13, 14), "buffer"), ((1, 2, 3, 4, 8, 9), "order")])
def test_a_buffer_of_which_nothing_is_left_was_filled_again(got: tuple[float, ...], kind: str):
    whole = [window(4, "save", 1, 2, 3, 4, 5, 6), window(5, "step", 1, 2, 3, 4, 7, 8)]
    killed = [window(4, "loaded", 1, 2, 3, 4, 5, 6), window(5, "step", *got)]
    assert found("samples", whole, killed)[0] == (kind, 'state["data"]["window"]')


def test_a_rate_that_is_set_before_the_first_step_is_a_cause():
    whole = [at(4, "save", lr=0.1), at(4, "step", lr=0.1), at(4, "forward", lr=0.2)]
    killed = [at(4, "loaded", lr=0.1), at(4, "forward", lr=0.05)]
    assert found("later loss", whole, killed) == [("optimizer", 'state["lr"]')]


class Ahead:
    def __init__(self) -> None:
        self.ahead = [1, 2]

    def __next__(self) -> int:
        return self.ahead.pop()


class Counting:
    def __init__(self) -> None:
        self.pending = 2


def test_readers_and_counters_of_the_loop_are_observed():
    reader = Ahead()
    found = data_pipeline_leaves(LiveObjects([], []), {"counts": Counting()})
    me = "test_readers_and_counters_of_the_loop_are_observed()"
    assert found[f"{me} reader.ahead[1]"].text == "2" and found[f"{me} reader.ahead[1]"].saved is False
    assert found['state["counts"].pending'].text == "2" and len(reader.ahead) == 2
    saved = {'state["counts"]["pending"]'}
    assert 'state["counts"].pending' not in data_pipeline_leaves(LiveObjects([], []), {"counts": Counting()}, saved)
