"""Causes in loops whose load or save tierd does not see, and values that the first batch overwrites."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from support.own_loads import FORGOTTEN

from tierd.check.causes import find_causes
from tierd.check.check_report import Report
from tierd.check.launch_records import CheckedRun, Observation, RankRecord, StateCapture
from tierd.check.resume_findings import launch_findings
from tierd.check.sample_comparison import ComparisonTerms, compare_rank
from tierd.check.source_analysis import loop_carried_names_in, variable_of_path
from tierd.check.state_capture import PassHooks
from tierd.check.value_leaves import ValueLeaf

TESTS = Path(__file__).parents[1]
KINDS = {"Net": "weights", 'Net["mean"]': "buffers", "Adam": "optimizer", "StepLR": "scheduler", "_Progress": "state"}
LOADER = "DataLoader of Rows (40 items)"
RATE = 'Adam["param_groups"][0]["lr"]'


def leaf(value: object) -> ValueLeaf:
    if isinstance(value, str) and value.startswith("generator"):
        return ValueLeaf(value, value)
    if isinstance(value, str):  # stands for a tensor
        return ValueLeaf(value, "float32 (4, 6)", 24, (float(sum(map(ord, value))),))
    return ValueLeaf(str(value), str(value), len(value) if isinstance(value, list) else None)


def at(step: int, moment: str, saved: bool | None = None, **values: object) -> StateCapture:
    """A capture of objects beside the state, and of own values, of which `carried` has the names that go on."""
    carried = values.pop("carried", [])
    own = {
        path: msgspec.structs.replace(leaf(one), saved=saved)
        for path, one in values.items()
        if not path.startswith(tuple(KINDS))
    }
    beside = {path: leaf(one) for path, one in values.items() if path not in own}
    return StateCapture(step, moment, {}, beside, own, KINDS, user_paths=sorted(own), carried_names=carried)


def found(
    what: str,
    begun: StateCapture,
    then: list[StateCapture],
    before: StateCapture | None,
    killed: tuple[StateCapture, ...] = (),
) -> list[tuple[str, str]]:
    """The causes that are named; `before` is the resumed launch before its first forward pass, if nothing was seen."""

    def rank(first: int, taken: list[StateCapture], begun: StateCapture | None) -> RankRecord:
        return RankRecord(
            {step: Observation(step, (step,)) for step in range(first, 9)}, captures=taken, start_capture=begun
        )

    histories = CheckedRun([[rank(1, then, begun)]]), CheckedRun([[rank(1, [], begun)], [rank(5, [*killed], before)]])
    return [(one.kind, one.path) for one in launch_findings(*histories, 0, 2, what)]


def unseen(what: str, first: dict[str, object], whole: dict[str, object], killed: dict[str, object], **more: object):
    """The causes where a launch begins with step 5 and these values, by a load of the loop's own."""
    both = [at(4, "step", **whole, **more), at(4, "forward", **whole, **more)]
    return found(what, at(-1, "forward", **first, **more), both, at(-1, "forward", **killed, **more))


@pytest.mark.timeout(400)
def test_loops_that_load_by_hand_are_judged_before_their_first_forward_pass():
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    command = [sys.executable, "-m", "support.own_loads"]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports = {one.target: one for one in (msgspec.json.decode(line, type=Report) for line in done.stdout.splitlines())}
    right = reports["support.own_loads:right"]  # and logs tensors
    assert right.exact and not right.missing, str(right)
    for forgotten, (kind, path) in FORGOTTEN.items():
        report = reports[f"support.own_loads:without.{forgotten}"]
        assert not report.ok and {one.kind for one in report.causes} == {kind}, str(report)
        assert path in " ".join(one.says for one in report.causes), forgotten


# -- objects that a load fills -----------------------------------------------------------------------------------------


def test_weights_and_moments_that_no_load_filled_are_named():
    """Keys with another prefix and `strict=False`; a hook that throws the optimizer's states away."""
    whole = {'Net["0.weight"]': "trained", 'Adam["state"]': [1, 2]}
    fresh = {'Net["0.weight"]': "drawn", 'Adam["state"]': []}
    assert unseen("first loss", fresh, whole, {**whole, 'Net["0.weight"]': "drawn"}) == [("weights", 'Net["0.weight"]')]
    assert unseen("later loss", fresh, whole, {**whole, 'Adam["state"]': []}) == [("optimizer", 'Adam["state"]')]
    assert unseen("first loss", {}, {'Net["mean"]': "m"}, {'Net["mean"]': "zero"}) == [("buffers", 'Net["mean"]')]


def test_schedule_of_other_arguments_is_named_after_an_unrecorded_load():
    first, restored = at(-1, "forward", **{RATE: 0.0}), at(-1, "forward", **{RATE: 0.4})
    whole = [at(4, "step", **{RATE: 0.4}), at(4, "forward", **{RATE: 0.4}), at(5, "step", **{RATE: 0.5})]
    assert found("later loss", first, whole, restored, (at(5, "step", **{RATE: 0.3}),)) == [("scheduler", RATE)]
    assert found("later loss", first, whole, restored, (at(5, "step", **{RATE: 0.5}),)) == []


@pytest.mark.parametrize(
    ("path", "then", "now"),
    [
        ('StepLR["_step_count"]', 5, 1),  # a scheduler that is made anew with last_epoch
        ('StepLR["_is_initial"]', False, True),
        ('_Progress["total"]', 4, 2),  # a framework's own counters
        ("Net.last", "seen", "other"),  # a tensor for a log
    ],
)
def test_values_that_differ_in_correct_resumes_are_no_cause(path: str, then: object, now: object):
    for what in ("first loss", "later loss", "state"):
        assert unseen(what, {path: 0}, {path: then}, {path: now}) == []


def named(before: dict[str, object], samples: tuple[int, ...] = (5,), loss: float = 1.0) -> list[str]:
    """The kinds that are named of step 5, before which a launch with a load of its own has these values."""
    values = {"main() margin": 0.6, "main() chance": "generator a", "carried": ["margin"]}
    whole = [at(4, "step", **values), at(4, "forward", **values)]
    whole.append(at(5, "step", **{**values, "main() chance": "generator d"}))

    def rank(first: int, begun: StateCapture, captures: list[StateCapture]) -> RankRecord:
        observations = {step: Observation(step, (step,), (1.0).hex()) for step in range(first, 9)}
        return RankRecord(observations, captures=captures, start_capture=begun)

    killed = rank(5, at(-1, "forward", **{**values, **before}), [])
    killed.observations[5] = Observation(5, samples, loss.hex())
    begun = at(-1, "forward", **{"main() margin": 0.2, "main() chance": "generator c"})
    runs = CheckedRun([[rank(1, begun, whole)]]), CheckedRun([[rank(1, begun, [])], [killed]])
    terms = ComparisonTerms(8)
    return [one.kind for one in find_causes(*runs, runs[0], [compare_rank(*runs, 0, terms)], terms)]


def test_small_loss_difference_is_no_summation_where_a_value_of_the_step_differs():
    assert named({}, loss=1.0 + 1e-7) == ["summation"]
    assert named({"main() margin": 0.5}, loss=1.0 + 1e-7) == ["unknown"]


def test_order_of_samples_is_named_before_generators_after_an_unrecorded_load():
    assert named({"main() chance": "generator b"}, loss=2.0) == ["generator"]
    assert named({"main() chance": "generator b"}, samples=(77,)) == ["shuffle", "generator"]


# -- values that begin anew --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "first", "then"),
    [
        ("main() margin", 0.2, 0.6),
        ("main() labelled", [1], [1, 2, 3]),
        ("Curriculum.level", 1, 4),
        ("train.BETA", 0.1, 0.9),
        ('Teacher.weights["0.weight"]', "drawn", "averaged"),
    ],
)
@pytest.mark.parametrize("what", ["samples", "first loss", "later loss"])
def test_a_value_that_is_carried_from_step_to_step_and_begins_anew_is_named(what, path, first, then):
    assert unseen(what, {path: first}, {path: then}, {path: first}, carried=[variable_of_path(path)]) == [
        ("state", path)
    ]


def test_value_that_begins_anew_is_named_after_an_unrecorded_save():
    """An adapter restores through tierd, and saves in another way."""
    first, then = ({"main() pool": one, "carried": ["pool"]} for one in ([1], [1, 2]))
    whole = [at(4, "step", **then), at(4, "forward", **then)]
    killed = (at(4, "loaded", **first), at(4, "forward", **first))
    assert found("samples", at(-1, "forward", **first), whole, None, killed) == [("state", "main() pool")]


@pytest.mark.parametrize(
    ("first", "then", "now", "carried"),
    [
        (0, 0, 4, ["value"]),  # the step to begin with
        (0, 4, 3, ["value"]),  # restored otherwise than uninterrupted
        (0, 4, 0, []),  # set before each read: the ids of a step, which are by chance those of the first
    ],
)
def test_other_variables_that_differ_after_an_unseen_load_are_no_cause(first, then, now, carried):
    for path in ("main() value", "Callback.value", "train.value"):
        for what in ("samples", "first loss", "later loss", "state"):
            assert unseen(what, {path: first}, {path: then}, {path: now}, carried=carried) == []


def test_variable_is_no_second_cause_of_other_samples():
    """The count of steps was lost as well, but the loader's position explains the samples."""
    path = f"{LOADER}: batches read"
    first, whole, killed = (
        msgspec.structs.replace(
            at(step, "forward", **{"main() count": count}, carried=["count"]), loaders={path: leaf(read)}
        )
        for step, count, read in ((-1, 0, 1), (4, 4, 5), (-1, 0, 1))
    )
    assert found("samples", first, [at(4, "step"), whole], killed) == [("position", path)]


@pytest.mark.parametrize(
    ("path", "named"), [(f"Start of the {LOADER}.start", False), (f"Rows of the {LOADER}.scale", True)]
)
def test_sampler_that_the_loop_gives_the_position_explains_no_loss(path: str, named: bool):
    first, whole, killed = (
        msgspec.structs.replace(at(step, "forward"), loaders={path: leaf(value)})
        for step, value in ((-1, 0), (4, 0), (-1, 48))
    )
    assert found("first loss", first, [at(4, "step"), whole], killed) == ([("data", path)] if named else [])


# -- what the first batch overwrites -----------------------------------------------------------------------------------

MIXED, WEIGHT = "MixUp.previous[0]", 'Net["0.weight"]'


def overwritten(whole: list[object], carried: str = "previous", weight: str = "w"):
    """The causes if the value was lost at the load, and is right again before the forward pass of step 5.

    Args:
        whole: the value before the uninterrupted run's forward passes of steps 1, 5 and 6.
        weight: the killed run's weight before the forward pass of step 5.
    """

    def values(value: object) -> dict[str, object]:
        return {"MixUp.previous": [value], MIXED: value, WEIGHT: "w", "carried": [carried]}

    saved = at(4, "save", False, **values(whole[1]))
    steps = [at(step, "forward", False, **values(value)) for step, value in zip((4, 5), whole[1:], strict=True)]
    lost = at(4, "loaded", False, **{"MixUp.previous": None, WEIGHT: "w"}, carried=[carried])
    killed = (lost, at(4, "forward", False, **{**values(whole[1]), WEIGHT: weight}))
    return found("first loss", at(-1, "forward", **values(whole[0])), [saved, *steps], None, killed)


def test_batch_that_a_later_batch_reads_is_named_though_it_is_right_again():
    assert overwritten(["a", "b", "c"]) == [("not in the checkpoint", "MixUp.previous")]


@pytest.mark.parametrize(
    ("whole", "carried"),
    [
        (["a", "a", "a"], "previous"),  # a table that is worked out at its first use
        (["a", "b", "b"], "previous"),  # a mask that is made again for batches of another size
        (["a", "b", "c"], "count"),  # the last batch, which nothing reads before it is set
        ([1.0, 2.0, 3.0], "previous"),  # a number, as a time or a size
    ],
)
def test_tensor_that_no_later_batch_reads_is_no_cause(whole: list[object], carried: str):
    assert overwritten(whole, carried=carried) == []


def test_batch_that_was_lost_is_no_second_cause():
    assert overwritten(["a", "b", "c"], weight="v") == [("weights", WEIGHT)]


# -- names that carry values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("for step in x:\n    y = f(margin)\n    margin = margin * 2", {"margin"}),
        ("while go:\n    pool += more()", {"pool"}),
        ("for step in x:\n    seen.append(step)\n    f(seen)", {"seen"}),
        ("for step in x:\n    memory[step] = step\n    f(memory)", {"memory"}),
        ("for step in x:\n    ema.mul_(0.9)\n    f(ema)", {"ema"}),
        ("def update(self, x):\n    self.shadow[x].mul_(0.9).add_(x)", {"shadow"}),
        ("for step in x:\n    buffer.copy_(step)", set()),
        ("def call(self, x):\n    x = x + self.last\n    self.last = x", {"last"}),
        ("def step():\n    global level\n    level = level + 1", {"level"}),
        ("for step in x:\n    loss = f(step)\n    loss.backward()", set()),
        ("for step in range(start, 9):\n    start = 0", set()),
        ("for step in x:\n    ids = [i for i in step]\n    f(ids)", set()),
        ("def call(self, x):\n    self.last = x\n    return self.last", set()),
        ("def __init__(self, model):\n    self.model = model", set()),
        ("def call(self, x):\n    loss = x\n    return loss", set()),
    ],
)
def test_names_that_carry_a_value_from_step_to_step(source: str, names: set[str]):
    assert loop_carried_names_in(ast.parse(source)) == names


# -- when a launch begins ----------------------------------------------------------------------------------------------


def test_passes_in_evaluation_mode_are_not_the_first_that_trains(watched: list[str]):
    """A validation pass with gradients comes before the step, or a pass that trains in that mode by mistake."""
    model, x = torch.nn.Sequential(torch.nn.Linear(2, 1)).eval(), torch.ones(1, 2)
    for _ in range(2):
        loss = model(x).sum()
    assert watched == ["forward -1", "forward -1"]
    loss.backward()
    model.train()(x)
    assert len(watched) == 2


@pytest.fixture
def watched() -> Iterator[list[str]]:
    """What `PassHooks` calls back in this process: a load arms the next forward pass, as in a launch's first step."""
    module = torch.nn.modules.module
    before = torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict, torch.autograd.backward
    hooks = dict(module._global_forward_pre_hooks)
    calls: list[str] = []

    def load() -> None:
        passes.forward_after_step = -1

    passes = PassHooks(lambda step: calls.append(f"forward {step}"), lambda step: None, load)
    passes.install()
    passes.forward_after_step = -1
    yield calls
    torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict, torch.autograd.backward = before
    module._global_forward_pre_hooks.clear()
    module._global_forward_pre_hooks.update(hooks)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_launch_begins_at_the_first_forward_pass_after_the_last_load(watched: list[str]):
    model, x = torch.nn.Linear(2, 1), torch.ones(1, 2)
    with torch.no_grad():
        model(x)
    assert watched == []
    torch.jit.trace(model, x)
    assert watched == []
    model(x)
    model.load_state_dict(model.state_dict())
    loss = model(x).sum()
    assert watched == ["forward -1", "forward -1"]
    loss.backward()
    model.load_state_dict(model.state_dict())  # as of a target network, after the backward pass of a step
    model(x)
    assert len(watched) == 2
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())  # as after a search of the learning rate
    model(x)
    assert len(watched) == 3
