"""Any state that the reference allows comes back in a new process, bit for bit; whatever is nearly one is refused.

Every example saves twice, because the second save goes by the structure that the first one found.
"""

from __future__ import annotations

import enum
import json
import math
import os
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.exact import described
from torch import nn

import tierd
from tierd.core.errors import StateRefused
from tierd.state.kinds import stored_arrays
from tierd.state.kinds.stored_arrays import STORED_AS
from tierd.state.state_tree import MAX_DEPTH
from tierd.state.tensor_file import DTYPES

HUNDREDS = int(os.environ.get("TIERD_STATES", "100")) // 100  # `make gate` draws 20,000
MANY = 35_000  # tensors: more than a file has grains for its cuts
ROOT = Path(tierd.__file__).parent.parent

# ---- what a state may hold


class Box:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def tensor(dtype, shape, raw):
    size = math.prod(shape) * dtype.itemsize
    data = (raw * (size // len(raw) + 1))[:size]
    if not size:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:
        data = bytes(b & 1 for b in data)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def generator(number):
    return torch.Generator().manual_seed(number)


def with_metadata(mapping, metadata):
    found = OrderedDict(mapping)
    found._metadata = metadata
    return found


SHOWN = {
    "plain": lambda t: t,
    "turned": lambda t: t.t() if t.ndim == 2 else t,
    "strided": lambda t: t[::2] if t.ndim else t,
    "inner": lambda t: t[1:] if t.ndim else t,
    "none": lambda t: t[:0] if t.ndim else t,
    "expanded": lambda t: t.expand(3, *t.shape),
    "parameter": lambda t: nn.Parameter(t, requires_grad=t.is_floating_point()) if t.dtype.itemsize > 1 else t,
    "conjugate": lambda t: t.conj() if t.dtype in (torch.complex64, torch.complex128) else t,
    "negative": lambda t: t.conj().imag if t.dtype in (torch.complex64, torch.complex128) else t,
}
BASE = torch.arange(24.0)
raw = st.binary(min_size=1, max_size=24)
tensors = st.builds(
    lambda dtype, shape, data, shown: SHOWN[shown](tensor(dtype, shape, data)),
    st.sampled_from(sorted({*DTYPES.values(), *STORED_AS}, key=str)),
    st.sampled_from([(), (0,), (3,), (4, 6), (2, 0), (1, 2, 3), (64,)]),
    raw,
    st.sampled_from(sorted(SHOWN)),
)
shared = st.sampled_from([BASE, BASE[:6], BASE[6:], BASE.view(4, 6), BASE.view(4, 6).t(), BASE[:6].view(2, 3)])
NUMPY = ["?", "i1", "<i8", ">i4", "<u2", "<f2", "<f4", ">f8", "<c8", "<M8[ns]", "<m8[3D]", "S3", "<U2", np.longdouble]
arrays = st.builds(
    lambda dtype, n, data, view: view(np.frombuffer((data * 200)[: n * np.dtype(dtype).itemsize], dtype).copy()),
    st.sampled_from([dtype for dtype in NUMPY if dtype not in ("?", "<U2")]),
    st.integers(0, 6),
    raw,
    st.sampled_from(
        [lambda a: a, lambda a: a[::-2], lambda a: np.broadcast_to(a, (2, len(a))), lambda a: a.reshape(-1, 1)]
    ),
)
scalars = st.builds(
    lambda dtype, data: np.frombuffer((data * 200)[: np.dtype(dtype).itemsize], dtype)[0],
    st.sampled_from([dtype for dtype in NUMPY if dtype not in ("?", "<U2", "S3")]),
    raw,
)
anything = st.text(st.characters(exclude_categories=()), max_size=6)
floats = st.floats() | st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8))[0])
floats |= st.integers(0, 2**52 - 1).map(lambda n: struct.unpack(">d", (0xFFF << 52 | n).to_bytes(8))[0])
parts = st.none() | st.integers()
keys = anything | st.integers() | st.booleans() | st.none() | floats | st.binary(max_size=3)
keys = keys | st.tuples(keys, keys)
leaves = st.one_of(
    st.none() | st.booleans() | st.integers() | floats | st.builds(complex, floats, floats) | anything,
    st.binary(max_size=9) | st.binary(max_size=9).map(bytearray) | st.builds(slice, parts, parts, parts),
    st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.sampled_from([torch.int8, torch.device("cuda:1")]),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size) | st.just(torch.Size([np.int64(3)])),
    scalars
    | anything.map(lambda text: np.str_(text + "\0"))
    | st.binary(max_size=3).map(lambda b: np.bytes_(b + b"\0")),
    tensors,
    shared,
    arrays,
    st.integers(0, 2**63).map(generator),
    st.lists(floats, max_size=40) | st.lists(st.integers(), max_size=40).map(tuple),
    st.integers(50, 300).map(lambda n: [torch.full((2,), i) for i in range(n)]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
        st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 5)),
        st.dictionaries(keys, inner, max_size=3) | st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.builds(with_metadata, st.dictionaries(keys, inner, max_size=2), inner),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter) | st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        inner.map(Box),
    ),
    max_leaves=12,
)
states = st.dictionaries(anything, trees, min_size=1, max_size=3)

# ---- and what it may not: beside each, what stood there a save before


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Float64(np.float64):
    pass


class MyTensor(torch.Tensor):
    pass


class MyGenerator(torch.Generator):
    pass


Point = namedtuple("Point", "x y")


def freed(size, begin=0):
    """A tensor whose storage is not what it was."""
    base = torch.ones(400_000)
    found = base[begin:]
    base.untyped_storage().resize_(size)
    return found


def tuples(depth):
    found = (1,)
    for _ in range(depth):
        found = (found,)
    return found


def attributed(mapping):
    mapping.note = 1
    return mapping


REFUSED = {
    "a NumPy start": (lambda: slice(1, 2), lambda: slice(np.int64(1), 2)),
    "a float stop": (lambda: slice(2), lambda: slice(2.0)),
    "a str step": (lambda: slice(1, 2, 3), lambda: slice(1, 2, "3")),
    "a bool start": (lambda: slice(1, 2), lambda: slice(True, 2)),
    "a slice of tuples": (lambda: slice(None), lambda: slice((1, 2), None)),
    "a slice of a tensor": (lambda: slice(1), lambda: slice(torch.tensor(1))),
    "an enum": (lambda: 1, lambda: Level.LOW),
    "an enum in a run": (lambda: [1, 1], lambda: [1, Level.LOW]),
    "a str's subclass": (lambda: "x", lambda: Text("x")),
    "a scalar's subclass": (lambda: np.float64(1), lambda: Float64(1)),
    "a named tuple": (lambda: (1, 2), lambda: Point(1, 2)),
    "a tensor's subclass": (lambda: torch.ones(2), lambda: torch.ones(2).as_subclass(MyTensor)),
    "a generator's subclass": (torch.Generator, MyGenerator),
    "freed": (lambda: torch.ones(400_000), lambda: freed(0)),
    "freed, behind an offset": (lambda: torch.ones(400_000)[7:], lambda: freed(0, 7)),
    "shrunk": (lambda: torch.ones(400_000)[7:], lambda: freed(1_599_999, 7)),
    "expanded": (lambda: torch.ones(4).expand(8, 4), lambda: torch.ones(1).expand(2**33)),
    "unfolded": (lambda: torch.ones(4), lambda: torch.ones(2**16).unfold(0, 2**15, 1)),
    "a broadcast": (lambda: np.ones(4), lambda: np.broadcast_to(np.ones(1), 2**33)),
    "too many dimensions": (lambda: torch.ones([1] * 64), lambda: torch.ones([1] * 65)),
    "too many complex ones": (lambda: torch.ones(1, dtype=torch.complex64), lambda: torch.ones([1] * 64) * 1j),
    "sparse": (lambda: torch.eye(2), lambda: torch.eye(2).to_sparse()),
    "objects": (lambda: np.ones(1), lambda: np.array([None])),
    "masked": (lambda: np.ones(1), lambda: np.ma.array([1.0])),
    "a NumPy key": (lambda: {1: 2}, lambda: {np.int64(1): 2}),
    "a NumPy member": (lambda: {1.0}, lambda: {np.float64(1)}),
    "a key of tuples": (lambda: {tuples(3): 1}, lambda: {tuples(MAX_DEPTH): 1}),
    "a member of tuples": (lambda: {tuples(3)}, lambda: {tuples(MAX_DEPTH)}),
    "a counter's attribute": (lambda: Counter("a"), lambda: attributed(Counter("a"))),
    "a dict's attribute": (lambda: OrderedDict(a=1), lambda: attributed(OrderedDict(a=1))),
    "a factory": (lambda: defaultdict(list), lambda: defaultdict(lambda: 0)),
    "a function": (lambda: None, lambda: generator),
}
AROUND = {
    "alone": lambda value: value,
    "in a list": lambda value: [1, value],
    "in a tuple": lambda value: (value, None),
    "in a deque": lambda value: deque([value]),
    "in a dict": lambda value: {"a": 1, 2: value},
    "in an object": lambda value: Box({"v": value}),
}


class Kept:
    """A spool, what was saved there, and what of it comes back."""

    def __init__(self, home):
        self.home, self.described, self.names = home, [], []
        self.checkpointer = tierd.Checkpointer(home / "spool", "run", to=[])

    def save(self, state):
        groups = {}
        self.described.append(
            [[*described(name), described(value, groups, live=True)] for name, value in state.items()]
        )
        self.names.append([len(self.names), list(state)])
        self.checkpointer.save(len(self.described) - 1, state).wait()

    def check(self, first=0):
        """Restore every step from `first` on in a new process, into nothing and into blank targets, and compare."""
        self.checkpointer.close()
        (self.home / "names").write_text(json.dumps(self.names[first:]))
        command = [sys.executable, "-W", "ignore", "-m", "support.exact", self.home / "spool", self.home / "names"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        back = [json.loads(line) for line in done.stdout.splitlines()]
        assert [step for step, *_ in back] == list(range(first, len(self.described)))
        for step, found, again in back:
            assert found == self.described[step]
            assert again == untied(self.described[step])


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing is cut off here, and a disk takes its time
    kept = Kept(tmp_path)
    yield kept
    kept.checkpointer.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fewest", [stored_arrays.FEWEST, 2])
@pytest.mark.parametrize("number", range(HUNDREDS))
def test_any_accepted_state_is_restored_exactly(number, fewest, kept, monkeypatch):
    monkeypatch.setattr(stored_arrays, "FEWEST", fewest)  # two values, or two bytes, are a run then
    monkeypatch.setattr(stored_arrays, "FEWEST_BYTES", min(fewest, stored_arrays.FEWEST_BYTES))

    @seed(number)
    @settings(max_examples=100, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(states, states | st.none())
    def draw(state, another):
        kept.save(state)
        kept.save(state if another is None else {**state, **another})

    draw()
    kept.check()


@pytest.mark.timeout(600)
def test_many_small_tensors_and_long_runs_are_restored(kept):
    state = {
        "many": {f"layer.{i}": torch.full((3,), float(i)) for i in range(MANY)},
        "tied": [],
        "losses": [i / 7 for i in range(20_000)],
        "order": tuple(range(20_000)),
        "names": [f"],{i}" for i in range(5_000)],
    }
    state["tied"] += [state["many"][f"layer.{i}"] for i in range(0, MANY, 999)]
    kept.save(state)
    state["losses"].append(-math.nan)
    state["many"]["layer.7"].zero_()
    kept.save(state)
    kept.check(first=1)


def untied(value):
    """What was told of a state, without which tensors are one."""
    if isinstance(value, list):
        inner = [untied(one) for one in value]
        return [*inner[:-1], None] if inner and inner[0] == "tensor" else inner
    return value


_NESTED = [around for around in AROUND if around != "alone"]


@pytest.mark.parametrize(
    ("name", "around"),
    [(name, each) for index, name in enumerate(REFUSED) for each in ("alone", _NESTED[index % len(_NESTED)])],
)
def test_near_misses_are_refused_at_every_save(name, around, local):
    good, bad = REFUSED[name]
    for step, make in enumerate((bad, good, bad, good)):
        state = {"x": AROUND[around](make()), "w": torch.ones(2)}
        if make is good:
            local.save(step, state).wait()
        else:
            with pytest.raises(StateRefused, match=r'^state\["x"\].*: ') as caught:
                local.save(step, state)
            assert "it would not come back" not in str(caught.value), "found out late, and without a way out"
