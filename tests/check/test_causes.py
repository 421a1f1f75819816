"""Which causes come first: loaders and samplers before generators, a user's names before a library's."""

from __future__ import annotations

import msgspec
import pytest
import torch
from check.test_evidence import at, found, seen
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tierd.check.causes import find_causes
from tierd.check.data_pipeline import loader_leaves, order_digests
from tierd.check.launch_records import TORCH_GENERATOR, CheckedRun, Observation, RankRecord, StateCapture
from tierd.check.live_objects import find_live_objects, module_attribute_leaves
from tierd.check.resume_findings import launch_findings
from tierd.check.sample_comparison import ComparisonTerms, compare_rank
from tierd.check.state_comparison import StateDifference, difference_lines, state_differences
from tierd.check.user_code import CreationSites, is_user_code
from tierd.check.user_values import user_object_leaves
from tierd.check.value_leaves import ValueLeaf, distinct_texts, leaf_of

LOADER = "DataLoader of Rows (40 items)"


@pytest.mark.parametrize(
    "directory", ["usr/lib/python3/dist-packages", "root/.local/lib/python3.11/site-packages", "venv/site-packages"]
)
def test_packages_outside_of_the_interpreters_directories_are_no_code_of_the_user(directory: str):
    assert not is_user_code(f"/{directory}/torch/utils/data/sampler.py")
    assert is_user_code("/home/user/train.py")


# -- which step is next ------------------------------------------------------------------------------------------------


def counted(after: int, begun: int) -> list[str]:
    """The kinds that are named if the save of step 6 came after step `after`, and the launch goes on with `begun`."""
    save = StateCapture(6, "save", {}, {}, after=after)
    whole = seen(0, save, StateCapture(begun - 1, "forward", {}, {}))
    killed = seen(begun, StateCapture(6, "loaded", {}, {}), StateCapture(6, "forward", {}, {}))
    killed.observations |= {step: Observation(step, (step,)) for step in range(begun, 10)}
    return [
        one.kind
        for one in launch_findings(CheckedRun([[whole]]), CheckedRun([[RankRecord()], [killed]]), 0, 2, "first loss")
    ]


@pytest.mark.parametrize(("after", "begun"), [(6, 7), (5, 6), (5, 7), (4, 6)])
def test_a_checkpoint_may_count_the_finished_steps(after: int, begun: int):
    """Trainer's `global_step` is 6 after six steps, the last of which a loop may have observed as step 5."""
    assert counted(after, begun) == []


@pytest.mark.parametrize(("after", "begun"), [(6, 6), (6, 8), (5, 8)])
def test_a_step_that_is_not_the_next_is_named(after: int, begun: int):
    assert counted(after, begun) == ["steps"]


# -- how far a loader is -----------------------------------------------------------------------------------------------


def loading(step: int, moment: str, batches: int, generator: str, **position: int) -> StateCapture:
    leaves = {
        f"{LOADER}: batches read": batches,
        **{f"Order of the {LOADER}.{key}": one for key, one in position.items()},
    }
    read = {path: ValueLeaf(str(one), str(one), sample=(float(one),)) for path, one in leaves.items()}
    return StateCapture(
        step, moment, {}, {}, {TORCH_GENERATOR: ValueLeaf(generator, f"generator {generator}")}, loaders=read
    )


def of_loaders(killed: StateCapture, whole: StateCapture) -> list[str]:
    histories = CheckedRun([[seen(1, loading(4, "step", 4, "a"), whole)]]), CheckedRun([[seen(1)], [seen(5, killed)]])
    return [one.kind for one in launch_findings(*histories, 0, 2, "samples")]


def test_position_of_a_loader_is_named_before_generators_that_follow_from_it():
    """A loader that begins anew draws its order once more, so that every other draw is another one."""
    assert of_loaders(loading(4, "forward", 1, "x"), loading(4, "forward", 5, "b")) == ["position"]


def test_a_loader_made_anew_for_a_sampler_that_knows_its_position_is_no_cause():
    killed, whole = loading(4, "forward", 1, "x", position=20), loading(4, "forward", 5, "b", position=20)
    assert of_loaders(killed, whole) == ["generator"]


def test_loader_made_anew_beside_a_loader_that_continues_is_the_cause():
    def both(batches: int, generator: str) -> StateCapture:
        one, other = loading(4, "forward", 5, generator, position=20), loading(4, "forward", batches, generator)
        renamed = {path.replace("DataLoader of ", "DataLoader of other "): leaf for path, leaf in other.loaders.items()}
        return msgspec.structs.replace(one, loaders=one.loaders | renamed)

    assert of_loaders(both(1, "x"), both(5, "b")) == ["position"]


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


class SkipBatchSampler(BatchSampler):
    """As accelerate's: it leaves out the first batches, so that the loader's iterator does not count them."""

    skip_batches = 0

    def __iter__(self):
        yield from list(super().__iter__())[self.skip_batches :]


def test_batches_that_accelerate_skips_count_as_read():
    sampler = SkipBatchSampler(SequentialSampler(range(40)), 4, False)
    sampler.skip_batches = 3
    reading = iter(DataLoader(Rows(), batch_sampler=sampler))
    next(reading)
    assert loader_leaves(CreationSites(), [reading])[f"{LOADER}: batches read"].text == "4"


# -- what a framework loads later --------------------------------------------------------------------------------------


def test_values_that_a_framework_loads_later_are_not_lost_right_after_the_load():
    """An adapter restores plain values, and Trainer gives them to its objects after that."""
    key, kinds = 'state["rng"]', {'state["rng"]': "generator"}
    one = {f'{key}["numpy"]["state"]': ValueLeaf("2", "2 items", 2)}
    other = {f'{key}["numpy"]["state"]': ValueLeaf("1", "1 items", 1)}
    whole = [
        StateCapture(
            4,
            "save",
            one,
            {},
            {TORCH_GENERATOR: ValueLeaf("a", "generator a")},
            kinds,
            {key: "other object"},
            ("save", 4),
        ),
        StateCapture(
            4,
            "forward",
            one,
            {},
            {TORCH_GENERATOR: ValueLeaf("a", "generator a")},
            kinds,
            {key: "other object"},
            ("save", 4),
        ),
    ]
    killed = [
        StateCapture(
            4,
            "loaded",
            other,
            {},
            {TORCH_GENERATOR: ValueLeaf("x", "generator x")},
            kinds,
            {key: "values"},
            ("restore", 4),
        ),
        StateCapture(
            4,
            "forward",
            other,
            {},
            {TORCH_GENERATOR: ValueLeaf("a", "generator a")},
            kinds,
            {key: "values"},
            ("restore", 4),
        ),
    ]
    for question in ("samples", "first loss", "later loss", "state"):
        assert found(question, whole, killed) == []


def test_the_generator_of_an_order_explains_no_loss_of_right_samples():
    def drawn(step: int, moment: str, order: str, rate: float) -> StateCapture:
        generator = {"loop() order": ValueLeaf(order, f"generator {order}")}
        whole = at(step, moment, lr=rate)
        return StateCapture(
            step, moment, whole.entries, {}, generator, whole.kinds, whole.forms, whole.note, order_digests=[order]
        )

    whole = [
        drawn(4, "save", "a", 0.1),
        drawn(4, "step", "a", 0.1),
        drawn(5, "step", "b", 0.1),
        drawn(7, "end", "c", 0.1),
    ]
    killed = [drawn(4, "loaded", "x", 0.2), drawn(5, "step", "y", 0.2), drawn(7, "end", "z", 0.2)]
    assert found("later loss", whole, killed) == [("optimizer", 'state["lr"]')]
    same_rate = [drawn(4, "loaded", "x", 0.1), drawn(5, "step", "y", 0.1), drawn(7, "end", "z", 0.1)]
    assert found("later loss", whole, same_rate) == []
    generator = torch.Generator()
    [digest] = order_digests([DataLoader(Rows(), generator=generator)])
    assert (
        leaf_of(generator).digest == digest
        and order_digests([DataLoader(Rows(), generator=generator, num_workers=1)]) == []
    )


# -- frozen parameters, and attributes of the user's own objects -------------------------------------------------------


def test_a_layer_that_is_frozen_again_is_named():
    net = torch.nn.Linear(2, 1)
    live = find_live_objects()
    places = CreationSites()
    name = next(
        path for path in module_attribute_leaves(places, live, True) if path.endswith('["weight"].requires_grad')
    )
    before = module_attribute_leaves(places, live, True)[name]
    net.weight.requires_grad_(False)
    after = module_attribute_leaves(places, live, True)[name]
    assert (before.text, after.text) == ("True", "False") or before == after  # another test's layer may be the first
    whole = [
        StateCapture(4, "step", {}, {}, {name: ValueLeaf("True", "True")}),
        StateCapture(4, "forward", {}, {}, {name: ValueLeaf("True", "True")}),
    ]
    killed = [StateCapture(4, "forward", {}, {}, {name: ValueLeaf("False", "False")})]
    assert found("later loss", whole, killed) == [("mode", name)]


class Library:
    def __init__(self) -> None:
        self.calls = 0


Library.__module__ = "torch.nn"


class Callback(Library):
    beta = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(2)
        self.history = {"best": 3.0}


def test_attributes_of_the_users_own_class_are_observed_and_a_librarys_are_not():
    one = Callback()
    found = user_object_leaves([one], is_captured=True)
    assert {"Callback.average", 'Callback.history["best"]', "Callback.beta"} <= set(found)
    assert "Callback.calls" not in found and all(leaf.saved is False for leaf in found.values())
    assert any(one is live for live in find_live_objects().user_objects)


def test_attribute_of_a_callback_is_named_after_causes_that_explain_more():
    path = "Callback.total"

    def owning(step: int, moment: str, total: float, rate: float) -> StateCapture:
        values = {path: ValueLeaf(f"{total}", f"{total}", saved=False)}
        whole = at(step, moment, lr=rate)
        return StateCapture(
            step, moment, whole.entries, {}, values, whole.kinds, whole.forms, whole.note, user_paths=[path]
        )

    whole = [owning(4, "save", 7.0, 0.1), owning(4, "step", 7.0, 0.1), owning(4, "forward", 8.0, 0.1)]
    set_again = [owning(4, "loaded", 0.0, 0.2), owning(4, "forward", 1.0, 0.2)]
    lost = [owning(4, "loaded", 0.0, 0.1), owning(4, "forward", 1.0, 0.1)]
    assert [kind for kind, _ in found("later loss", whole, set_again)] == ["optimizer", "not in the checkpoint"]
    assert found("later loss", whole, lost) == [("not in the checkpoint", path)]


# -- how a difference is shown -----------------------------------------------------------------------------------------


def long_text(end: str) -> ValueLeaf:
    return leaf_of('{"log_history": [' + '{"loss": 0.5}, ' * 20 + end + "]}")


def test_two_long_texts_are_shown_where_they_differ():
    a, b = distinct_texts(long_text('{"loss": 0.25}'), long_text('{"loss": 0.75}'))
    assert a != b and "0.25" in a and "0.75" in b


def test_values_whose_bytes_differ_are_never_apart_by_nothing():
    a, b = torch.zeros(1000), torch.zeros(1000)
    b[7] = 1.0  # not among the numbers that a leaf keeps
    path = 'state["w"]'

    def ended(value: torch.Tensor) -> list[StateCapture]:
        return [StateCapture(9, "end", {path: leaf_of(value)}, {}, {}, {}, {path: "object"}, ("save", 9))]

    whole, again, killed = (seen(first, *ended(one)) for first, one in ((1, a), (1, a), (5, b)))
    [one] = state_differences(
        CheckedRun([[whole]]), CheckedRun([[seen(1)], [killed]]), 0, 0.0, rerun=CheckedRun([[again]])
    )
    assert isinstance(one, StateDifference) and one.magnitude is None and one.expected != one.got
    assert "apart by 0" not in difference_lines([one])[0]


def test_a_position_says_from_where_the_launch_read():
    whole = seen(1, loading(4, "step", 4, "a"), loading(4, "forward", 5, "b"))
    begun = seen(5, StateCapture(4, "loaded", {}, {}), loading(4, "forward", 1, "x"))
    begun.observations = {step: Observation(step, (step - 4,)) for step in range(5, 8)}
    killed, again = CheckedRun([[seen(1)], [begun]]), CheckedRun([[whole]])
    [cause] = find_causes(
        again, killed, again, [compare_rank(again, killed, 0, ComparisonTerms(7))], ComparisonTerms(7)
    )
    assert cause.kind == "position" and "from the very first sample" in cause.says and LOADER in cause.says
