"""Which values are named as causes of a divergence: histories by hand."""

from __future__ import annotations

from tierd.check.evidence import evidence
from tierd.check.history import History, Observation, RankHistory, Taken
from tierd.check.leaves import ValueLeaf

GRADIENT = 'gradient of model["weight"]'


def seen(first: int, *taken: Taken) -> RankHistory:
    one = RankHistory(taken=list(taken))
    for step in range(first, 8):
        one.observed[step] = Observation(step, (step,))
    return one


def taken(at: str, gradient: float | None, **entries: float) -> Taken:
    beside = {} if gradient is None else {GRADIENT: gradient}
    values = {f'state["{key}"]': value for key, value in entries.items()}
    kinds = {f'state["{key}"]': "optimizer" for key in entries}
    return Taken(4, at, leaves(values), leaves(beside), kinds=kinds)


def leaves(values: dict[str, float]) -> dict[str, ValueLeaf]:
    return {path: ValueLeaf(f"{value}", f"{value}", sample=(value,)) for path, value in values.items()}


def kinds(momentum_after_the_load: float) -> list[str]:
    whole = seen(1, taken("save", 1.0, momentum=2.0), taken("forward", 1.0, momentum=2.0))
    begun = seen(
        5,
        taken("loaded", None, momentum=momentum_after_the_load),
        taken("forward", None, momentum=momentum_after_the_load),
    )
    killed = History([[seen(1)], [begun]])
    return [one.kind for one in evidence(History([[whole]]), killed, 0, 2, "later loss")]


def test_gradients_are_named_where_there_is_no_stronger_cause():
    assert kinds(2.0) == ["gradients"]


def test_gradients_are_no_second_cause_where_another_value_was_lost():
    """The gradients of one step are of the values that it had: they differ because those do."""
    assert kinds(0.0) == ["optimizer"]
