"""A capture is what `flatten` and `plan_layout` give for the same state, whatever changed since the one before."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples
from support.state_files import flatten, plan_layout
from torch import nn

from tierd.core.errors import StateRefused
from tierd.state import encoder, single_values
from tierd.state.capturer import Capturer
from tierd.state.kinds.live_parameters import names_changed_by_step, optimizers_in
from tierd.state.kinds.random_generators import RngState
from tierd.state.state_tree import MAX_DEPTH

pytestmark = pytest.mark.usefixtures("forms")


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def same(capture, state):
    """Equal to a fresh walk in text, names, layout, and in the memory of every tensor."""
    flat = flatten(state)
    assert capture.tree() == flat.tree
    assert list(capture.tensors) == list(flat.tensors)
    assert capture.layout == plan_layout(flat.tensors, names_changed_by_step(optimizers_in(state), flat.tensors))
    assert not any(t.requires_grad or t.grad_fn for t in capture.tensors.values())
    for name, tensor in flat.tensors.items():
        here = capture.tensors[name]
        assert (here.dtype, here.device, here.stride()) == (tensor.dtype, tensor.device, tensor.stride())
        assert torch.equal(bits(here), bits(tensor))
    return True


class Box:
    def __init__(self, state):
        self.state = state
        self.asked = 0

    def state_dict(self):
        self.asked += 1
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Net(nn.Module):
    def __init__(self, n=3):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def job():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RngState(), "epoch": 0, "best": None}


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


# ---- the same structure


def test_a_training_job_is_walked_once(walks):
    state = job()
    capturer = Capturer()
    first = capturer.capture(state)
    for epoch in range(4):
        step(state["model"], state["optimizer"])
        state["scheduler"].step()
        torch.rand(3), np.random.rand(3)
        state |= {"epoch": epoch, "best": epoch * 0.5}
        capture = capturer.capture(state)
        before = len(walks)
        assert same(capture, state)
        assert capture.layout is first.layout
    assert before == 1
    assert capturer.capture(state).steady is capture.steady
    assert capture.restless == {"rng/torch", "rng/numpy/state/key", "rng/python/1"}
    assert capture.devices == ()


def test_places_are_the_same_object_while_nothing_moves():
    state = {"a": torch.ones(3), "b": [torch.ones(2), np.ones(2)], "n": 1}
    capturer = Capturer()
    first, second = capturer.capture(state), capturer.capture(state)
    assert first.places is second.places
    state["b"][0] = torch.zeros(2)
    third = capturer.capture(state)
    assert third.places is not second.places
    assert third.steady is not second.steady
    assert third.restless == {"b/0", "b/1"}
    state["b"][0] = torch.full((2,), 7.0)
    fourth = capturer.capture(state)
    assert fourth.places is not third.places
    assert fourth.steady is third.steady
    assert same(fourth, state)


SAME = {
    "scalar of another type": lambda s: s.update(n=None),
    "a long list": lambda s: s.update(run=list(range(200))),
    "an empty list": lambda s: s.update(run=[]),
    "a mixed list": lambda s: s.update(run=[2**60, "x", None, 1.5, -0.0, float("nan")]),
    "a set": lambda s: s["set"].add("b"),
    "bytes": lambda s: s["raw"].extend(b"xx"),
    "a deque": lambda s: s["deque"].append(4),
    "a tuple of ints": lambda s: s.update(t=(1, 2, 3, 4, True)),
    "a member more": lambda s: s["members"].update(new=1),
    "a member less": lambda s: s["members"].pop("step"),
    "members in another order": lambda s: s["members"].update(step=s["members"].pop("step")),
    "odd members": lambda s: s["members"].update(step=2**60, loss=float("nan"), name="\ud800", raw=b"x"),
    "a slice": lambda s: s.update(slice=slice(4)),
    "an array's values": lambda s: s["array"].fill(3),
    "another array": lambda s: s.update(array=np.full(3, 2.0)),
    "a numpy scalar": lambda s: s.update(scalar=np.float64(2.5)),
    "odd floats": lambda s: s.update(x=float("-inf")),
    "a tensor's values": lambda s: s["w"].data.fill_(3),
    "another tensor": lambda s: s.update(plain=torch.zeros(3)),
    "a complex one": lambda s: s.update(z=torch.zeros(3, dtype=torch.complex64)),
    "metadata": lambda s: s["od"]._metadata.update(v=3),
    "a generator's state": lambda s: torch.rand(3, generator=s["generator"]),
    "another generator": lambda s: s.update(generator=torch.Generator().manual_seed(7)),
    "nothing": lambda s: None,
}
OTHER = {
    "a key more": lambda s: s.update(new=1),
    "a key less": lambda s: s.pop("n"),
    "keys in another order": lambda s: s.update(n=s.pop("n")),
    "a nested key more": lambda s: s["d"].update(c=1),
    "a nested order": lambda s: s["d"].update(a=s["d"].pop("a")),
    "a key of another type": lambda s: (s["keys"].pop(1), s["keys"].update({True: 0})),
    "a float key's sign": lambda s: (s["floats"].pop(0.0), s["floats"].update({-0.0: 0})),
    "a tuple key": lambda s: (s["floats"].clear(), s["floats"].update({0.0: 0, (True, 2): 1})),
    "an ordered dict's order": lambda s: s["od"].move_to_end("a"),
    "an ordered dict's metadata": lambda s: s["od"].__dict__.clear(),
    "a container of another type": lambda s: s.update(run=tuple(s["run"])),
    "no members": lambda s: s["members"].clear(),
    "a member whose key is no name": lambda s: s["members"].update({"$x": 1}),
    "a member that is a tensor": lambda s: s["members"].update(step=torch.ones(1)),
    "many members": lambda s: s["members"].update({str(n): n for n in range(3000)}),
    "members that are packed": lambda s: s.update(members={str(n): n for n in range(300)}),
    "a list that gets a tensor": lambda s: s["run"].append(torch.ones(1)),
    "a list of tensors that grows": lambda s: s["ts"].append(torch.ones(1)),
    "a list of tensors that shrinks": lambda s: s["ts"].pop(),
    "maxlen": lambda s: s.update(deque=deque([1], maxlen=9)),
    "a factory": lambda s: s.update(dd=defaultdict(int, a=[torch.ones(1)])),
    "an array's shape": lambda s: s.update(array=np.ones((1, 3))),
    "an array's dtype": lambda s: s.update(array=np.ones(3, dtype=">f8")),
    "a tensor's dtype": lambda s: s.update(plain=torch.ones(3, dtype=torch.int32)),
    "a tensor's shape": lambda s: s["square"].resize_(2, 2),
    "a tensor's strides": lambda s: s["square"].t_(),
    "a tensor's data": lambda s: setattr(s["plain"], "data", torch.ones(2, 3).double()),
    "a negative one": lambda s: s.update(plain=torch.ones(3, dtype=torch.complex64).conj().imag),
    "a conjugate": lambda s: s.update(z=s["z"].conj()),
    "a gradient": lambda s: s["plain"].requires_grad_(),
    "a result": lambda s: s.update(plain=(s["w"] * 2)),
    "a parameter": lambda s: s.update(plain=nn.Parameter(torch.ones(3))),
    "a tie more": lambda s: s.update(plain=s["w"].detach()),
    "a tie less": lambda s: s.update(tied=s["w"].detach().clone()),
    "a tie to another": lambda s: s.update(tied=s["plain"]),
    "an overlap becomes a tie": lambda s: s["ts"].__setitem__(1, s["ts"][0]),
    "a stateful less": lambda s: s.update(box=s["box"].state),
    "a stateful's state": lambda s: setattr(s["box"], "state", [1]),
    "scalar to container": lambda s: s.update(n=[1]),
    "a counter": lambda s: s["counter"].update("z"),
    "a tensor's place in its memory": lambda s: s.update(plain=torch.ones(9)[4:7].clone()[:2]),
}


def everything():
    base = torch.randn(4)
    w = nn.Parameter(torch.randn(3))
    ordered = OrderedDict(a=1, b=torch.ones(2))
    ordered._metadata = OrderedDict(v=1)
    return {
        "n": 1,
        "x": 0.5,
        "run": [1, 2],
        "set": {"a"},
        "raw": bytearray(b"a"),
        "deque": deque([1, 2, 3], maxlen=3),
        "t": (1, 2),
        "slice": slice(1, 2),
        "array": np.ones(3),
        "scalar": np.float64(1.5),
        "w": w,
        "tied": w.detach(),
        "plain": torch.ones(3),
        "z": torch.ones(3, dtype=torch.complex64),
        "fp8": torch.ones(3).to(torch.float8_e8m0fnu),
        "square": torch.randn(3, 3),
        "empty": torch.zeros(0, 3),
        "d": {"a": 1, "b": {"c": torch.ones(1)}},
        "members": {"loss": 0.5, "step": 3, "name": "é", "none": None},
        "keys": {1: torch.ones(1), "a": 1, None: 2},
        "floats": {0.0: 1, (1, 2): 2},
        "od": ordered,
        "dd": defaultdict(list, a=[torch.ones(1)]),
        "counter": Counter("ab"),
        "ts": [base[:3], base[1:], {"in": base}],
        "generator": torch.Generator(),
        "box": Box({"n": 1, "t": torch.ones(2)}),
    }


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_any_change_of_a_state_is_captured(name, walks):
    state = everything()
    capturer = Capturer()
    first = capturer.capture(state)
    assert same(first, state)
    assert same(capturer.capture(state), state)
    assert len(walks) == 1
    (SAME | OTHER)[name](state)
    second = capturer.capture(state)
    assert same(second, state)
    assert len(walks) == (1 if name in SAME else 2)
    assert (second.layout is first.layout) == (second.layout == first.layout)
    assert same(capturer.capture(state), state)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_under_any_grad_mode(grad):
    state = everything()
    capturer = Capturer()
    with grad():
        capturer.capture(state)
        state["plain"] = torch.ones(3)
        if grad is not torch.inference_mode:
            state["plain"].requires_grad_()
        assert same(capturer.capture(state), state)
    assert same(capturer.capture(state), state)


# ---- a snapshot


def test_nothing_that_is_not_a_tensor_changes_after_the_capture():
    for captures in (1, 2):
        state = everything()
        capturer = Capturer()
        for _ in range(captures):
            capture = capturer.capture(state)
        expected = flatten(state).tree
        before = {name: tensor.clone() for name, tensor in capture.tensors.items()}
        state["run"].append(9)
        state["set"].add("z")
        state["raw"][:] = b"zzz"
        state["deque"].append(9)
        state["array"][:] = 9
        state["d"]["a"] = state["d"]["b"]["x"] = 9
        state["od"]["a"] = 9
        state["od"]._metadata["v"] = 9
        state["dd"]["x"] = 9
        state["counter"]["a"] = 9
        state["box"].state["n"] = 9
        state.clear()
        assert capture.tree() == expected
        assert all(
            torch.equal(capture.tensors[name].view(torch.uint8), t.view(torch.uint8)) for name, t in before.items()
        )


def test_earlier_captures_are_not_changed_by_later_captures():
    state = {"n": 0, "l": [0], "w": torch.ones(1)}
    capturer = Capturer()
    captures = []
    for n in range(5):
        state |= {"n": n, "l": [n] * n}
        captures.append((capturer.capture(state), flatten(state).tree))
    assert all(capture.tree() == tree for capture, tree in captures)


def test_no_tensor_and_no_value_is_kept():
    capturer = Capturer()
    state = {"w": torch.ones(10), "o": {"m": torch.ones(10)}, "l": [Box({"k": torch.ones(3)})], "a": np.ones(3)}
    seen = [weakref.ref(state["w"]), weakref.ref(state["o"]["m"]), weakref.ref(state["l"][0].state["k"])]
    seen.append(weakref.ref(state["l"][0]))
    capture = capturer.capture(state)
    capture = capturer.capture(state)
    seen.append(weakref.ref(capture.tensors["a"]))
    del state, capture
    gc.collect()
    assert [ref() for ref in seen] == [None] * 5


def test_memory_that_is_freed_and_used_again_is_not_taken_for_the_earlier_tensor():
    class Gives(Box):
        def state_dict(self):
            return {"t": torch.full((1000,), float(self.state)), "u": torch.full((1000,), -float(self.state))}

    capturer = Capturer()
    state = {"a": Gives(0), "b": Gives(1), "c": Gives(2)}
    for n in range(20):
        for box in state.values():
            box.state += n
        assert same(capturer.capture(state), state)


def test_garbage_collection_is_as_it_was():
    capturer = Capturer()
    for _ in range(2):
        capturer.capture({"a": Box(1)})
        assert gc.isenabled()
    with pytest.raises(StateRefused):
        capturer.capture({"a": object()})
    assert gc.isenabled()
    gc.disable()
    try:
        capturer.capture({"a": 1})
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [10, 1 << 19])
@pytest.mark.parametrize("left", [0, 0.5, 0.99])
def test_memory_that_is_freed_or_shrunk_between_two_captures_is_not_read(size, left):
    base = torch.ones(size)
    state = {"a": base[3:], "b": {"c": torch.ones(3)}, "z": torch.ones(0)}
    capturer = Capturer()
    for _ in range(3):
        capturer.capture(state)
        whole = base.untyped_storage().nbytes()
        base.untyped_storage().resize_(int(whole * left))
        with pytest.raises(StateRefused, match=r'^state\["a"\]: a tensor of .* its memory was freed'):
            capturer.capture(state)
        base.untyped_storage().resize_(whole)
        base.fill_(2)
        assert same(capturer.capture(state), state)


def test_less_memory_at_the_same_place_is_noticed_where_it_is_large(monkeypatch):
    tensor = torch.ones(1 << 19)
    capturer = Capturer()
    for _ in range(2):
        capturer.capture({"a": tensor})
    address = tensor.data_ptr()
    tensor.untyped_storage().resize_(100)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: address)
    with pytest.raises(StateRefused, match="in a storage of 100"):
        capturer.capture({"a": tensor})


# ---- objects are asked once


def test_every_object_is_asked_for_its_state_once_in_each_capture():
    a, b = Box({"n": 1}), Box([1])
    capturer = Capturer()
    states = ({"a": a, "b": [b]}, {"a": a, "b": [b]}, {"a": a, "b": [b], "c": 1}, {"a": a, "b": b})
    for count, state in enumerate(states, 1):
        capturer.capture(state)
        assert (a.asked, b.asked) == (count, count)
    a.state["n"] = [torch.ones(1)]
    capturer.capture(state)
    assert (a.asked, b.asked) == (5, 5)


def test_an_object_that_stands_twice():
    box = Box({"n": 1})
    capturer = Capturer()
    for extra in ({}, {}, {"x": 1}):
        before = box.asked
        state = {"a": box, "b": box, **extra}
        assert capturer.capture(state).tree() == flatten({"a": {"n": 1}, "b": {"n": 1}, **extra}).tree
        assert box.asked == before + 2


# ---- refusals


class Raises(Box):
    def state_dict(self):
        super().state_dict()
        raise ZeroDivisionError("no state today")


def cycle():
    inner = [torch.ones(1)]
    inner.append(inner)
    return inner


def freed():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def attributed():
    counter = Counter("a")
    counter.note = 1
    return counter


REFUSED = {
    "function": cycle,
    "in a list": [1, lambda: 0],
    "in a dict": {"a": torch.ones(1), "b": cycle},
    "in a set": {torch.float32},
    "an array": np.array([None, None, None]),
    "a subclass": torch.ones(3).as_subclass(type("Mine", (torch.Tensor,), {})),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(3, device="meta"),
    "cycle": cycle(),
    "raises": Raises(1),
    "deep": functools.reduce(lambda inner, _: [inner], range(MAX_DEPTH + 1), 1),
    "key": {(1, torch.float32): 1},
    "slice": slice(np.int64(1)),
    "freed": freed(),
    "expanded": torch.ones(1).expand(2**33),
    "broadcast": np.broadcast_to(np.ones(1), 2**33),
    "a counter's attribute": attributed(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_flatten(name):
    for before in (torch.ones(3), 1, [1], {"a": torch.ones(1), "b": 1}, {1}, np.ones(3), Box(1), {(1, 2): 1}):
        capturer = Capturer()
        for _ in range(2):
            capturer.capture({"x": before, "y": [before, 1]})
        for state in ({"x": REFUSED[name], "y": [before, 1]}, {"x": before, "y": [REFUSED[name], 1]}):
            with pytest.raises(StateRefused) as expected:
                flatten(state)
            with pytest.raises(StateRefused) as caught:
                capturer.capture(state)
            assert str(caught.value) == str(expected.value)
            assert type(caught.value.__cause__) is type(expected.value.__cause__)
        state = {"x": before, "y": [before, 1]}
        assert same(capturer.capture(state), state)


def test_object_that_raises_is_asked_once():
    box = Raises(1)
    capturer = Capturer()
    for count in (1, 2):
        with pytest.raises(StateRefused, match=r'state\["a"\]: state_dict\(\) raised ZeroDivisionError'):
            capturer.capture({"a": box})
        assert box.asked == count


@pytest.mark.parametrize("state", [[1], None, {1: 2}])
def test_no_mapping_of_names(state):
    capturer = Capturer()
    for _ in range(2):
        with pytest.raises(StateRefused):
            capturer.capture(state)
        capturer.capture({"a": 1})


def test_any_mapping_at_the_root():
    capturer = Capturer()
    for n in range(3):
        assert capturer.capture(MappingProxyType({"a": n})).tree() == b'{"a":%d}' % n


def test_the_size_of_the_tree_is_looked_at_by_tree(monkeypatch):
    monkeypatch.setattr(single_values, "MAX_TREE", 100)
    capturer = Capturer()
    for _ in range(2):
        capture = capturer.capture({"a": "x" * 100})
        with pytest.raises(StateRefused, match=r'state\["a"\]: 102 of the 108 bytes besides tensors'):
            capture.tree()


def test_a_huge_structure_is_not_kept(walks):
    capturer = Capturer(kept_nodes=10)
    state = {"d": {str(i): [i] for i in range(20)}, "w": torch.ones(1)}
    layouts = {id(capturer.capture(state).layout) for _ in range(3)}
    assert (len(walks), len(layouts)) == (3, 1)


def test_members_are_as_they_were_at_the_capture():
    state = {"d": {"loss": 0.5, "step": 3}}
    capturer = Capturer()
    for _ in range(2):  # by a walk, and by what it found
        capture, tree = capturer.capture(state), flatten(state).tree
        state["d"]["loss"] += 1.0
        assert capture.tree() == tree


def test_a_long_text_among_members_counts():
    assert Capturer().capture({"d": {"text": "x", "n": 1}}).is_encoded_soon()
    assert not Capturer().capture({"d": {"text": "x" * 100_000, "n": 1}}).is_encoded_soon()


@pytest.mark.parametrize(
    "members", [{"a": 1.5, "é": -0.0}, {"a": 1, "$b": 2}, {"a": float("inf"), "b": 2**60, "c": b"\0"}]
)
def test_members_in_a_single_call_have_the_text_of_separate_calls(members, monkeypatch):
    at_once = flatten({"d": members}).tree
    monkeypatch.setattr(encoder, "is_run_of_members", lambda _: False)
    assert flatten({"d": members}).tree == at_once


# ---- any state, any change

keys = st.sampled_from(["a", "b", "$c", 1, True, 0, False, 1.0, -0.0, None, b"k", (1, 2), (True, 2), "é", "\ud800"])
base = torch.arange(12.0)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**60, 0.0, -0.0, 1.5, float("nan"), "x", "\ud800", b"y", 1j, torch.Size([1]), torch.int8]),
    st.builds(lambda n: torch.arange(n), st.integers(0, 3)),
    st.sampled_from([base, base[:3], base[1:4], base[:3].view(1, 3), base[:1], base.requires_grad_(False)]),
    st.sampled_from([base.view(3, 4), base.view(3, 4).t(), base[:9].view(3, 3), base[:9].view(3, 3).t()]),
    st.builds(lambda x: np.float64(x), st.sampled_from([0.5, 1.5])),
    st.builds(lambda n: np.arange(n), st.integers(0, 2)),
    st.builds(lambda: bytearray(b"abc")),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda v: deque(v, maxlen=len(v) or None)),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.sets(keys, max_size=3),
        inner.map(Box),
    ),
    max_leaves=12,
)
states = st.dictionaries(st.sampled_from("abc"), trees, min_size=1, max_size=3)


@settings(max_examples=examples())
@given(st.data(), states)
def test_any_state_and_any_change(data, state):
    capturer = Capturer()
    for _ in range(3):
        assert same(capturer.capture(state), state)
        state = data.draw(st.just(state) | states | st.builds(lambda s, v: mutated(data, s, v), st.just(state), trees))


def mutated(data, value, new):
    """`value` with one place in it changed; some of it in place, some of it rebuilt."""
    inside = value.state if isinstance(value, Box) else value
    if isinstance(inside, dict) and inside:
        key = data.draw(st.sampled_from(list(inside)))
        deeper = mutated(data, inside[key], new)
        if data.draw(st.booleans()):
            inside[key] = deeper
        else:
            inside = type(inside)({**inside, key: deeper}) if not isinstance(inside, defaultdict) else inside
    elif isinstance(inside, list) and inside:
        index = data.draw(st.integers(0, len(inside) - 1))
        inside[index] = mutated(data, inside[index], new)
    else:
        return new
    return Box(inside) if isinstance(value, Box) else inside
