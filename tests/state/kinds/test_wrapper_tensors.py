"""Wrapper subclasses of tensors: exact by their inner tensors, only for known classes, never by unpickling."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
from support.state_files import flatten
from support.training import stored, through
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import tierd
from tierd.core.errors import StateMismatch, StateRefused
from tierd.state.capturer import Capturer
from tierd.state.kinds.wrapper_tensors import SavedWrapper
from tierd.state.load_check import check_fit
from tierd.state.state_loading import load_restored, unflatten
from tierd.state.tree_parser import parse_tree


def two(seed=0, shape=(3, 4), dtype=torch.float32):
    noise = torch.Generator().manual_seed(seed)
    return TwoTensor(*(torch.randn(shape, generator=noise).to(dtype) for _ in range(2)))


def nested(seed=0):
    return TwoTensor(two(seed), two(seed + 1))


def same(one, other):
    if isinstance(one, TwoTensor):
        return type(other) is TwoTensor and same(one.a, other.a) and same(one.b, other.b)
    return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)


TENSORS = {
    "plain": two(),
    "nested": nested(),
    "empty": two(shape=(0, 4)),
    "of no dimension": two(shape=()),
    "complex": TwoTensor(torch.ones(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64)),
    "float8": two(dtype=torch.float8_e4m3fn),
    "tied inside": (lambda tensor: TwoTensor(tensor, tensor))(torch.ones(3)),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_wrapper_is_restored_with_its_inner_tensors(tensor):
    tree, file = stored({"t": tensor, "again": [tensor]})
    state = {"t": None, "again": [None]}
    load_restored(state, unflatten(tree, file))
    file[:] = b"\xff" * len(file)  # a view of the file would change
    assert state["t"].shape == tensor.shape
    assert _bits(state["t"]) == _bits(state["again"][0]) == _bits(tensor)


def _bits(tensor):
    if isinstance(tensor, TwoTensor):
        return [_bits(tensor.a), _bits(tensor.b)]
    return tensor.dtype, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_a_wrapper_is_filled_in_place():
    state = {"t": two(1), "n": nested(1)}
    before = state["t"], state["t"].a, state["n"].b.a
    load_restored(state, through({"t": two(5), "n": nested(7)}))
    assert state["t"] is before[0]
    assert state["t"].a is before[1]
    assert state["n"].b.a is before[2]
    assert same(state["t"], two(5))
    assert same(state["n"], nested(7))


def test_a_module_s_parameter_is_filled():
    def model(seed):
        module = nn.Linear(4, 3, bias=False)
        module.weight = nn.Parameter(two(seed), requires_grad=False)
        return module

    state = {"m": model(1)}
    load_restored(state, through({"m": model(5)}))
    assert same(state["m"].weight.data, two(5))


class Halves(torch.optim.Optimizer):
    """Keeps a wrapper for each parameter, as optimizers of few bits do."""

    def __init__(self, parameters, seed):
        super().__init__(parameters, {})
        self.seed = seed

    def step(self):
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                self.state[parameter] = {"moment": two(self.seed + place, parameter.shape)}


SHAPES = (3, 4), (4, 4)


def optimizer(seed, order=(0, 1), *, names=False):
    parameters = [(f"p{place}", nn.Parameter(torch.zeros(SHAPES[place]))) for place in order]
    return Halves(parameters if names else [one for _, one in parameters], seed)


@pytest.mark.parametrize("handed_over", [True, False])
def test_an_optimizer_is_given_the_wrappers_that_were_saved(handed_over):
    saved = optimizer(1)
    saved.step()
    restored = optimizer(7)
    tree, file = stored({"o": saved})
    load_restored({"o": restored}, unflatten(tree, file), handed_over=handed_over)
    moments = [restored.state[parameter]["moment"] for parameter in restored.param_groups[0]["params"]]
    assert all(same(moment, two(1 + place, SHAPES[place])) for place, moment in enumerate(moments))


def test_wrappers_are_assigned_by_the_names_of_parameters():
    saved = optimizer(1, names=True)
    saved.step()
    restored = optimizer(7, (1, 0), names=True)
    load_restored({"o": restored}, through({"o": saved}))
    moments = [restored.state[parameter]["moment"] for parameter in restored.param_groups[0]["params"]]
    assert same(moments[0], two(2, SHAPES[1]))
    assert same(moments[1], two(1, SHAPES[0]))


def test_a_capture_without_a_walk_has_the_current_values():
    capturer = Capturer()
    state = {"t": two(), "n": nested(), "o": optimizer(1)}
    state["o"].step()
    for _ in range(3):
        capture, flat = capturer.capture(state), flatten(state)
        assert capture.tree() == flat.tree
        assert list(capture.tensors) == list(flat.tensors)
        assert all(torch.equal(capture.tensors[name], tensor) for name, tensor in flat.tensors.items())
        state["t"].a.add_(1)
        state["n"] = nested(9)


def test_a_checkpointer_saves_and_restores_wrappers_of_an_attached_optimizer(tmp_path):
    def trained(seed):
        saved = optimizer(seed)
        saved.step()
        return saved

    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as checkpointer:
        saved = trained(1)
        checkpointer.attach(saved)
        for step in range(3):
            checkpointer.save(step, {"o": saved, "t": two(step)}).wait()
            saved.seed += 1
            saved.step()
    restored = optimizer(50)
    state = {"o": restored, "t": None}
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as checkpointer:
        assert checkpointer.restore(state).step == 2
    assert same(state["t"], two(2))
    moments = [restored.state[parameter]["moment"] for parameter in restored.param_groups[0]["params"]]
    assert same(moments[0], two(3, SHAPES[0]))


MISFITS = {
    "a plain tensor": (torch.zeros(3, 4), "a torch.TwoTensor (3, 4) in the checkpoint, a torch.Tensor (3, 4) here"),
    "another shape": (two(shape=(4, 3)), "made in another way than the one (4, 3) here"),
    "another dtype": (two(dtype=torch.float64), "made in another way"),
    "another kind inside": (nested(), "whose 'a' is another tensor here"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_mismatch_of_a_wrapper_is_named_before_anything_is_loaded(name):
    target, message = MISFITS[name]
    state = {"first": 1, "t": target}
    with pytest.raises(StateMismatch) as refused:
        check_fit(state, through({"first": 2, "t": two()}))
    assert message in str(refused.value)
    assert state["first"] == 1


def test_a_plain_tensor_does_not_fit_a_wrapper():
    with pytest.raises(StateMismatch, match=r"float32 \(3, 4\) in the checkpoint, a torch.TwoTensor here"):
        check_fit({"t": two()}, through({"t": torch.ones(3, 4)}))


def test_a_parameter_of_another_kind_is_named_before_anything_is_loaded():
    saved = nn.Linear(4, 3, bias=False)
    saved.weight = nn.Parameter(two(), requires_grad=False)
    model = nn.Linear(4, 3, bias=False)
    with pytest.raises(StateMismatch, match=r'"weight" \(a torch.TwoTensor \(3, 4\) in the checkpoint'):
        check_fit({"m": model}, through({"m": saved}))


class Unknown(TwoTensor):
    def __tensor_flatten__(self):
        return ["a", "b"], None


class Plain(torch.Tensor):
    pass


def test_unknown_wrapper_is_refused_with_a_remedy():
    with pytest.raises(StateRefused, match=r"Unknown, a tensor subclass; .* pass this one's inner tensors"):
        flatten({"t": Unknown(torch.ones(2), torch.ones(2))})
    with pytest.raises(StateRefused, match=r"Plain, a tensor subclass; pass .as_subclass\(torch.Tensor\)"):
        flatten({"t": torch.ones(2).as_subclass(Plain)})


def test_a_checkpoint_is_read_without_the_library_and_refused_before_anything_is_loaded(monkeypatch):
    saved = through({"t": two(), "n": 2})
    monkeypatch.setitem(sys.modules, "torch.testing._internal.two_tensor", None)  # as if it was not installed
    state = {"t": None, "n": 1}
    with pytest.raises(StateMismatch, match=r'state\["t"\]: a torch.TwoTensor .* torch has no TwoTensor here; install'):
        load_restored(state, saved)
    assert state == {"t": None, "n": 1}


INNER = {"a": {"$tensor": "t/a"}, "b": {"$tensor": "t/b"}}
CONTEXT = [None, [2], [1], {"$dtype": "float32"}]
HOSTILE = {
    "any class": ["builtins.eval", INNER, CONTEXT],
    "a class of a known library": ["torch.Tensor", INNER, CONTEXT],
    "no tensors": ["torch.TwoTensor", {}, CONTEXT],
    "a number as a tensor": ["torch.TwoTensor", {"a": 1}, CONTEXT],
    "too few parts": ["torch.TwoTensor", INNER],
    "no shape": ["torch.TwoTensor", INNER, [None, 2, [1], {"$dtype": "float32"}]],
    "a negative size": ["torch.TwoTensor", INNER, [None, [-2], [1], {"$dtype": "float32"}]],
    "no dtype": ["torch.TwoTensor", INNER, [None, [2], [1], "float32"]],
    "an unknown form": ["torch.TwoTensor", INNER, [["call", "os.system"], *CONTEXT[1:]]],
    "an unknown enum": ["torch.TwoTensor", INNER, [["enum", "os.path", "x"], *CONTEXT[1:]]],
    "an unknown record": ["torch.TwoTensor", INNER, [["record", "subprocess.Popen", ["args", "x"]], *CONTEXT[1:]]],
    "a bad record": ["torch.TwoTensor", INNER, [["record", "torchao.PerRow", 1], *CONTEXT[1:]]],
    "a bad dict": ["torch.TwoTensor", INNER, [["dict", [1, 2]], *CONTEXT[1:]]],
    "bytes": ["torch.TwoTensor", INNER, [{"$bytes": ""}, *CONTEXT[1:]]],
    "nothing in a list": ["torch.TwoTensor", INNER, [[], *CONTEXT[1:]]],
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_tree_with_a_malformed_wrapper_is_refused(payload):
    tensors = {"t/a": torch.ones(2), "t/b": torch.ones(2)}
    with pytest.raises(StateMismatch, match=r"^the state tree: "):
        parse_tree(json.dumps({"t": {"$wrapper": payload}}).encode(), tensors.__getitem__)


def test_inner_tensors_that_the_class_does_not_take_are_a_mismatch():
    tensors = {"t/a": torch.ones(2), "t/b": torch.ones(3)}
    saved = parse_tree(
        json.dumps({"t": {"$wrapper": ["torch.TwoTensor", INNER, CONTEXT]}}).encode(), tensors.__getitem__
    )
    with pytest.raises(StateMismatch, match="that cannot be made here"):
        check_fit({"t": None}, saved)


def test_nothing_of_a_wrapper_is_pickled():
    tree, file = stored({"t": two()})
    assert b"\x80" not in tree
    assert type(unflatten(tree, file)["t"]) is SavedWrapper
    assert io.BytesIO(tree).read().startswith(b'{"t":{"$wrapper":["torch.TwoTensor",{"a":{"$tensor":"t/a"}')
