"""A state survives flatten and unflatten exactly, or is refused by its path."""

from __future__ import annotations

import copy
import enum
import functools
import json
import math
import struct
import tracemalloc
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from support.seeds import examples
from support.state_files import flatten
from support.training import stored, through
from torch import nn

from tierd.core.errors import StateMismatch, StateRefused, TierdError
from tierd.state import single_values
from tierd.state.kinds.stored_arrays import STORED_AS
from tierd.state.single_values import path_text
from tierd.state.state_loading import unflatten
from tierd.state.state_tree import MAX_DEPTH
from tierd.state.tensor_file import DTYPES

ALL_DTYPES = sorted({*DTYPES.values(), *STORED_AS}, key=str)


def random(dtype, *shape):
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.is_complex:
        plain = torch.view_as_real(plain)
    elif tensor.dtype in STORED_AS:
        plain = plain.view(STORED_AS[tensor.dtype])
    return tensor.dtype, tuple(tensor.shape), plain.contiguous().reshape(-1).view(torch.uint8).tolist()


def exactly(a, b):
    """Equal in type, in order, and to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        same_keys = len(a) == len(b) and all(exactly(x, y) for x, y in zip(a, b, strict=True))
        attributes = exactly(getattr(a, "_metadata", None), getattr(b, "_metadata", None))
        factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return same_keys and attributes and factory and all(map(exactly, a.values(), b.values()))
    if isinstance(a, (list, tuple, deque)):
        return getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and len(a) == len(b) and all(map(exactly, a, b))
    if isinstance(a, complex):
        return exactly(a.real, b.real) and exactly(a.imag, b.imag)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, torch.Generator):
        return exactly(a.get_state(), b.get_state()) and a.device == b.device
    return a == b


# ---- tensors


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_and_shape(dtype):
    for shape in ((), (0,), (3, 0, 2), (1,), (4, 6), (2, 1, 1, 2, 1, 2, 1, 3, 1, 2)):
        tensor = random(dtype, *shape)
        state = {"a": {"tensor": tensor, "turned": tensor.permute(tuple(reversed(range(len(shape)))))}}
        assert exactly(through(state), state), shape


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_a_negated_tensor_is_stored_unless_torch_cannot_negate_its_dtype(dtype):
    state = {"a": {"w": random(dtype, 4, 6)._neg_view()}}
    try:
        state["a"]["w"].resolve_neg()
    except NotImplementedError:
        with pytest.raises(StateRefused, match=f"lazily negated tensor of {dtype}"):
            flatten(state)
    else:
        assert exactly(through(state), state)


@pytest.mark.parametrize("sizes", [(2**40, 0, 2**40), (2**31, 0, 2**30), (2**31, 0, 2**30 - 1), (0, 2**59), (0, 2**60)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_an_empty_tensor_is_read_again_or_refused(sizes, dtype):
    state = {"a": {"w": torch.empty(sizes, dtype=dtype)}}
    if math.prod(size or 1 for size in sizes) * dtype.itemsize < 2**63:
        assert exactly(through(state), state)
    else:
        with pytest.raises(StateRefused, match=r'^state\["a"\]\["w"\]: an empty tensor of shape'):
            flatten(state)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_views_strides_and_expansion(dtype):
    base = random(dtype, 6, 8)
    state = {
        "t": base.t(),
        "rows": base[::2],
        "columns": base[:, 1::3],
        "inner": base[2:4, 3:5],
        "expanded": base[0].expand(5, 8),
        "element": base[3, 3],
        "none": base[:0],
    }
    assert exactly(through(state), state)


def test_any_safetensors_reader_sees_every_tensor():
    tree, file = stored({"m": {str(dtype): random(dtype, 2, 3) for dtype in ALL_DTYPES}})
    seen = load_safetensors(bytes(file))
    assert seen.keys() == {f"m/{dtype}" for dtype in ALL_DTYPES}
    assert seen["m/torch.complex64"].shape == (2, 3, 2)
    assert json.loads(tree)["m"]["torch.complex64"] == {"$view": ["m/torch.complex64", "complex64"]}


def test_lazy_conjugate_and_negative():
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": z.conj(), "neg": z.conj().imag, "plain": z}
    back = through(state)
    assert exactly(back, state)
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert back["neg"].tolist() == [-2, 4]


def test_parameters_and_buffers_are_restored_as_tensors():
    state = {
        "p": nn.Parameter(torch.ones(2)),
        "b": nn.Buffer(torch.zeros(2)),
        "g": torch.ones(1, requires_grad=True) * 2,
    }
    back = through(state)
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in back.values())
    assert exactly(back, {key: value.detach() for key, value in state.items()})


def test_tied_tensors_are_stored_once_and_tied_again():
    w = nn.Parameter(torch.randn(4, 4))
    state = {"a": w, "b": [w.detach(), w[:]], "row": w[0], "t": w.t(), "copy": w.detach().clone(), "z": torch.zeros(0)}
    flat = flatten(state)
    assert list(flat.tensors) == ["a", "row", "t", "copy", "z"]
    back = through(state)
    assert back["a"] is back["b"][0] is back["b"][1]
    assert torch.equal(back["t"], w.detach().t())
    back["a"].zero_()
    assert back["row"].abs().sum() > 0
    assert back["copy"].abs().sum() > 0


def test_tied_complex_and_fp8_views():
    z, f = random(torch.complex64, 3), random(torch.float8_e8m0fnu, 3)
    back = through({"z": [z, z.detach()], "f": (f, f)})
    assert back["z"][0] is back["z"][1]
    assert back["f"][0] is back["f"][1]


def test_memory_that_is_freed_and_reused_is_not_taken_for_a_tie():
    class Gives:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"t": torch.full((1000,), self.value, dtype=torch.complex64).conj()}

        def load_state_dict(self, state):
            pass

    back = through({str(i): Gives(float(i)) for i in range(50)})
    assert [back[str(i)]["t"][0].real.item() for i in range(50)] == list(range(50))


def test_names_are_paths_and_unique():
    t = [torch.tensor(i) for i in range(6)]
    state = {"a": {"b/c": t[0], 0: t[1], "0": t[2]}, "a/b": {"c": t[3]}, "__metadata__": t[4], "l\ud800": [t[5]]}
    assert list(flatten(state).tensors) == ["a/b/c", "a/0", "a/0~2", "a/b/c~2", "__metadata__~2", "l\\ud800/0"]
    assert exactly(through(state), state)


def test_nothing_is_copied_and_nothing_keeps_a_graph():
    w = nn.Parameter(torch.randn(3))
    flat = flatten({"w": w, "y": w * 2})
    assert flat.tensors["w"].data_ptr() == w.data_ptr()
    assert not any(t.requires_grad or t.grad_fn for t in flat.tensors.values())


# ---- numpy

ARRAYS = {
    "bool": np.array([[True], [False]]),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(20, dtype=np.int16)[::-3],
    "0-d": np.array(7, dtype=np.uint64),
    "empty": np.zeros((0, 3), dtype=np.float32),
    "empty str": np.array([], dtype="<U3"),
    "big-endian": np.arange(3, dtype=">i4"),
    "big-endian half": np.arange(3, dtype=">f2"),
    "half": np.arange(3, dtype=np.float16),
    "complex": np.array([1 + 2j, complex("nan")]),
    "complex64": np.array([[1 + 2j]], dtype=np.complex64),
    "long double": np.array([1, 2], dtype=np.longdouble) / 3,
    "datetime": np.array(["2024-01-01", "NaT"], dtype="M8[25s]"),
    "timedelta": np.array([[5]], dtype="m8[ns]"),
    "generic timedelta": np.array(5, dtype="m8"),
    "str": np.array([["a", "bé\u4e2d"]]),
    "bytes": np.array([b"a\0b", b""]),
    "nan payload": np.array([0x7FF8000000000123], dtype=np.uint64).view(np.float64),
}
SCALARS_OF_NUMPY = [
    *(np.dtype(c).type(1) for c in "?bBhHiIlLefdg"),
    *(np.dtype(c).type(1 + 2j) for c in "FDG"),
    np.float64("nan"),
    np.datetime64("2024-02-29T12:00", "m"),
    np.datetime64("NaT"),
    np.timedelta64(3, "D"),
    np.str_("é\ud800"),
    np.str_(""),
    np.str_("a\0\0"),
    np.str_("\0"),
    np.bytes_(b"a\0"),
    np.bytes_(b""),
]


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name):
    state = {"a": [ARRAYS[name]]}
    back = through(state)
    assert exactly(back, state)
    assert back["a"][0].flags.writeable
    assert back["a"][0].flags.owndata


@pytest.mark.parametrize("value", SCALARS_OF_NUMPY, ids=lambda v: f"{type(v).__name__}-{v!a}")
def test_numpy_scalars_are_restored_as_numpy_scalars(value):
    assert exactly(through({"a": value}), {"a": value})


def test_second_name_of_a_dtype_is_restored_as_the_first():
    back = through({"a": np.longlong(3), "b": np.ones(2, dtype=np.longlong)})
    assert back["a"] == 3
    assert back["a"].dtype == back["b"].dtype == np.dtype(np.longlong)


# ---- plain values


class Box:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def with_metadata():
    ordered = OrderedDict(a=1)
    ordered._metadata = OrderedDict({"": {"version": 2}})
    return ordered


NAN = struct.unpack(">d", bytes.fromhex("fff0000000000123"))[0]  # signalling, negative, with a payload
PLAIN = {
    "singletons": [None, True, False],
    "ints": [0, -1, 2**53, -(2**53), 2**53 + 1, 2**127 - 1, -(2**200), 10**5000],
    "floats": [0.0, -0.0, 1e308, 5e-324, 0.1, 1e22, math.nan, math.inf, -math.inf, 3.0],
    "nans": [-math.nan, NAN, {"k": NAN}, (NAN, 1.5), {NAN: 1}],
    "complex": [1 + 2j, complex(-0.0, math.nan), complex(math.inf, -0.0), complex(-math.nan, NAN)],
    "strings": ["", "é\0\u2028\U0001f600", "\ud800", "\ud83d\ude00", "$int", '"\\'],
    "bytes": [b"", bytes(range(256)), bytearray(b"x")],
    "tuples": [(), (1,), ((1, [2]), {"a": (3,)})],
    "sets": [set(), {1, "a", None, (1, b"x")}, frozenset({1.5, False})],
    "keys": {1: "a", "1": "b", None: 0, False: 1, 2.5: 2, (1, ("x", None)): 3, b"k": 4, "\ud800": 5, 2**70: 6, "": 7},
    "tag-like": [{"$tensor": "x"}, {"$": 1}, {"a": 1, "$b": {"$int": 3}}, {"$unknown": None}],
    "ordered": [OrderedDict(b=1, a=2), OrderedDict({3: 4}), with_metadata(), OrderedDict()],
    "counter": [Counter({7: 2, 3: 1}), Counter(a=-1)],
    "defaultdict": [defaultdict(list, a=[1]), defaultdict(None, {1: 2}), defaultdict(int)],
    "deque": [deque([1, [2]], maxlen=3), deque()],
    "range": [range(5), range(10, -(2**70), -3)],
    "slice": [slice(1, None, -1), slice(None)],
    "torch": [torch.Size([1, 0]), torch.Size([]), torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")],
    "order": {"z": 1, "a": 2, "m": {"y": 0, "b": 1}},
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values(name):
    assert exactly(through({"x": PLAIN[name]}), {"x": PLAIN[name]})


def test_stateful_objects_anywhere():
    state = {"a": Box({"n": 1}), "b": [Box([1, Box(None)]), {"c": (Box(2.5),)}]}
    assert exactly(through(state), {"a": {"n": 1}, "b": [[1, None], {"c": (2.5,)}]})


def test_any_mapping_at_the_root():
    assert exactly(through(MappingProxyType({"a": 1})), {"a": 1})
    assert exactly(through(UserDict(a=1)), {"a": 1})
    assert through({}) == {}


def test_tree_is_readable_json():
    state = {"epoch": 3, "lr": 0.5, "w": torch.ones(2), "opt": {0: {"step": 1}}, "t": ("a", None)}
    assert json.loads(flatten(state).tree) == {
        "epoch": 3,
        "lr": 0.5,
        "w": {"$tensor": "w"},
        "opt": {"$dict": [[0, {"step": 1}]]},
        "t": {"$tuple": ["a", None]},
    }


def test_unusual_nan_is_stored_with_its_bits():
    assert json.loads(flatten({"a": math.nan, "b": -math.nan, "c": math.inf, "d": complex(0, NAN)}).tree) == {
        "a": {"$float": "nan"},
        "b": {"$float": "fff8000000000000"},
        "c": {"$float": "inf"},
        "d": {"$complex": [0.0, {"$float": "fff0000000000123"}]},
    }


def test_a_generator_is_a_tensor_of_its_own():
    generator = torch.Generator().manual_seed(3)
    flat = flatten({"data": {"g": generator}})
    assert json.loads(flat.tree) == {"data": {"g": {"$generator": ["data/g", "cpu"]}}}
    expected = generator.get_state()
    torch.rand(3, generator=generator)
    assert torch.equal(flat.tensors["data/g"], expected)
    back = through({"g": generator})["g"]
    assert exactly(copy.deepcopy(back), generator)


def test_ints_beyond_the_range_of_json_readers_are_tagged():
    state = {"high": [1, 2**53 + 1], "low": [-(2**53) - 1, 2], "mixed": [2**53 + 1, None], "edge": [2**53, -(2**53)]}
    high, low = {"$int": "0x20000000000001"}, {"$int": "-0x20000000000001"}
    expected = {"high": [1, high], "low": [low, 2], "mixed": [high, None], "edge": [2**53, -(2**53)]}
    assert json.loads(flatten(state).tree) == expected


def test_the_tree_is_the_same_for_the_same_state():
    one, two = {"s": {"a", "b", "c", "d"}}, {"s": {"d", "c", "b", "a"}}
    assert flatten(one).tree == flatten(two).tree


keys = st.text() | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False) | st.binary()
keys = keys | st.tuples(keys, keys)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.builds(lambda n: torch.arange(n), st.integers(0, 5))
    | st.builds(lambda x: np.float64(x), st.floats(allow_nan=False))
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.frozensets(keys, max_size=4)
        | inner.map(Box)
    ),
    max_leaves=20,
)


def opened(value):
    """What `value` comes back as: a Box is its state."""
    if isinstance(value, Box):
        return opened(value.state)
    if isinstance(value, dict):
        return type(value)({key: opened(inner) for key, inner in value.items()})
    return type(value)(map(opened, value)) if isinstance(value, (list, tuple, deque)) else value


@settings(max_examples=examples(300))
@given(st.dictionaries(st.text(st.characters(exclude_categories=())), trees, max_size=4))
def test_any_nested_state_survives(state):
    assert exactly(through(state), opened(state))


def test_nothing_changes_after_the_copy():
    def make():
        return {
            "list": [1, [2], {"k": 3}],
            "dict": {1: [torch.ones(3)], "a": deque([1])},
            "array": np.ones(3),
            "bytes": bytearray(b"abc"),
            "set": {1, 2},
            "tensor": torch.arange(4.0),
            "fp8": torch.ones(3).to(torch.float8_e5m2),
            "odict": with_metadata(),
        }

    state = make()
    tree, file = stored(state)
    state["list"][1].append(9)
    state["list"][2]["k"] = 9
    state["dict"][1][0].zero_()
    state["dict"]["a"].append(9)
    state["array"][:] = 9
    state["bytes"][:] = b"zzz"
    state["set"].add(9)
    state["tensor"].mul_(2)
    state["fp8"].zero_()
    state["odict"]._metadata[""]["version"] = 9
    state.clear()
    assert exactly(unflatten(tree, file), make())


def test_a_dict_that_grows_meanwhile():
    grows: dict[object, object] = {}

    class Grows(Box):
        def state_dict(self):
            grows["later"] = 1
            return 0

    grows["first"] = Grows(None)
    assert through({"d": grows}) == {"d": {"first": 0}}


# ---- refusals


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Config:
    lr: float = 0.1


Point = namedtuple("Point", "x y")


class MyTensor(torch.Tensor):
    pass


class Sharded(torch.Tensor):
    def full_tensor(self):
        return self


def cycle():
    inner: dict[str, object] = {}
    inner["self"] = [inner]
    return inner


def deep(n):
    value: object = 1
    for _ in range(n):
        value = [value]
    return value


def odd(mapping):
    mapping.note = 1
    return mapping


def freed(nbytes):
    """A tensor of 40 bytes, 4 bytes into a storage that has `nbytes` of them left."""
    found = torch.ones(11)[1:]
    found.untyped_storage().resize_(nbytes)
    return found


class Double(np.float64):
    pass


class Labels(np.ndarray):
    pass


class MyGenerator(torch.Generator):
    pass


class Raises:
    def state_dict(self):
        raise ZeroDivisionError("no state today")

    def load_state_dict(self, state):
        pass


class Endless:
    def state_dict(self):
        return Endless()

    def load_state_dict(self, state):
        pass


def meta_parameter():
    return nn.Parameter(torch.ones(2, device="meta"))


here = Config.__module__
CODE = ", which is code; leave it out, and make it again before the restore"
OTHERS = "; give it state_dict() and load_state_dict(), or pass what it holds as tensors, numbers, lists and dicts"

REFUSED = {
    "function": (
        {"optimizer": {"hook": deep}},
        f'state["optimizer"]["hook"]: function{CODE}',
    ),
    "lambda in stateful": ({"s": Box({"lr": [0, lambda: 0]})}, f'state["s"]["lr"][1]: function{CODE}'),
    "partial": ({"a": functools.partial(deep)}, f'state["a"]: functools.partial{OTHERS}'),
    "module": ({"a": math}, f'state["a"]: module{CODE}'),
    "class": ({"a": nn.Linear}, f'state["a"]: type{CODE}'),
    "generator": ({"a": (i for i in ())}, f'state["a"]: generator{OTHERS}'),
    "a generator's subclass": (
        {"a": MyGenerator()},
        f'state["a"]: {here}.MyGenerator, a subclass of Generator; pass a plain Generator',
    ),
    "slice": (
        {"a": [slice(1, np.int64(3))]},
        'state["a"][0]: a slice whose stop is numpy.int64; only int and None can be stored there',
    ),
    "freed": (
        {"m": {"w": freed(0)}},
        'state["m"]["w"]: a tensor of 40 bytes in a storage of 0: its memory was freed (untyped_storage().resize_(), '
        "as FSDP does it); gather it first, and save what was gathered",
    ),
    "shrunk": (
        {"a": freed(43)},
        'state["a"]: a tensor of 40 bytes in a storage of 43: its memory was freed (untyped_storage().resize_(), '
        "as FSDP does it); gather it first, and save what was gathered",
    ),
    "expanded": (
        {"a": torch.ones(1).expand(2**33)},
        f'state["a"]: a tensor of {2**35} bytes that repeats 4 bytes of memory; save what was expanded and expand it '
        "again after the restore, or save a contiguous copy to have all of it written",
    ),
    "broadcast": (
        {"a": np.broadcast_to(np.ones(2), (2**30, 2))},
        f'state["a"]: a numpy.ndarray of {2**34} bytes that repeats 16 bytes of memory; save what was expanded and '
        "expand it again after the restore, or save a contiguous copy to have all of it written",
    ),
    "dimensions": (
        {"a": torch.ones([1] * 65)},
        'state["a"]: a torch.float32 tensor of 65 dimensions, too many to be read again; pass .flatten()',
    ),
    "no elements, and giant dimensions": (
        {"a": {"w": torch.empty(2**40, 0, 2**40)}},
        f'state["a"]["w"]: an empty tensor of shape ({2**40}, 0, {2**40}), too large to be read again; pass .flatten()',
    ),
    "negated": (
        {"a": {"w": torch.ones(2).to(torch.float8_e4m3fn)._neg_view()}},
        'state["a"]["w"]: a lazily negated tensor of torch.float8_e4m3fn, which torch cannot negate; negate it in '
        "another dtype",
    ),
    "a NumPy subclass": (
        {"a": Double(1)},
        f'state["a"]: {here}.Double, a subclass of numpy.float64; pass a plain float64',
    ),
    "a counter's attribute": (
        {"a": odd(Counter())},
        "state[\"a\"]: collections.Counter with the attribute 'note'",
    ),
    "a key of tuples": (
        {"a": {functools.reduce(lambda inner, _: (inner,), range(MAX_DEPTH + 1), 1)}},
        f'state["a"]: a key of tuples, nested deeper than {MAX_DEPTH}',
    ),
    "iterator": ({"a": iter([])}, f'state["a"]: list_iterator{OTHERS}'),
    "dataclass": (
        {"a": Config()},
        f'state["a"]: {here}.Config; pass dataclasses.asdict(…), and '
        "make it again of that dict; or give it state_dict() and load_state_dict()",
    ),
    "enum": (
        {"a": Colour.RED},
        f'state["a"]: {here}.Colour, an Enum; pass its .name, and make it again as Colour[name]',
    ),
    "int enum": (
        {"a": Level.LOW},
        f'state["a"]: {here}.Level, an Enum; pass its .name, and make it again as Level[name]',
    ),
    "namedtuple": ({"a": Point(1, 2)}, f'state["a"]: {here}.Point, a subclass of tuple; pass ._asdict()'),
    "mapping proxy": ({"a": MappingProxyType({})}, 'state["a"]: mappingproxy; pass dict(…)'),
    "object array": (
        {"a": np.array([None])},
        'state["a"]: numpy.ndarray of dtype object, which has no encoding; pass .tolist()',
    ),
    "structured array": (
        {"a": np.zeros(1, dtype="i4,f4")},
        "state[\"a\"]: numpy.ndarray of dtype [('f0', '<i4'), ('f1', '<f4')], which has no encoding; "
        "pass an array for each field, {name: numpy.asarray(a[name]) for name in a.dtype.names}, and assign them to "
        "the fields of a new array",
    ),
    "structured scalar": (
        {"a": np.zeros(1, dtype="i4,f4")[0]},
        "state[\"a\"]: numpy.void of dtype [('f0', '<i4'), ('f1', '<f4')]; pass .item(), and make it again of that",
    ),
    "other subclass of arrays": (
        {"a": np.array([1]).view(Labels)},
        f'state["a"]: {here}.Labels; pass numpy.asarray(…)',
    ),
    "masked array": (
        {"a": np.ma.array([1])},
        'state["a"]: numpy.ma.MaskedArray; pass numpy.ma.getdata(…) and numpy.ma.getmaskarray(…), and make it again by '
        "numpy.ma.array(data, mask=…)",
    ),
    "records": (
        {"a": np.rec.array([(1, 2.0)])},
        'state["a"]: numpy.rec.recarray; pass an array for each field, {name: numpy.asarray(a[name]) for name in '
        "a.dtype.names}, and assign them to the fields of a new array",
    ),
    "key": (
        {"a": {np.int64(3): 1}},
        'state["a"]: the key np.int64(3) is numpy.int64; keys are str, int, float, bool, bytes, None or tuples',
    ),
    "key in a tuple": (
        {"a": {(1, torch.float32): 1}},
        'state["a"]: the key torch.float32 is torch.dtype; keys are str, int, float, bool, bytes, None or tuples',
    ),
    "set member": (
        {"a": {Colour.RED}},
        f'state["a"]: the key <Colour.RED: 1> is {here}.Colour; keys are str, int, float, bool, bytes, None or tuples',
    ),
    "root key": ({1: 2}, "state: the name 1 is int, not str"),
    "root": ([1], "state: list; pass a mapping of names to values"),
    "defaultdict": (
        {"a": defaultdict(lambda: 0)},
        'state["a"]: collections.defaultdict with the factory <lambda>; only built-in types',
    ),
    "ordered attribute": ({"a": odd(OrderedDict())}, "state[\"a\"]: collections.OrderedDict with the attribute 'note'"),
    "cycle": ({"a": [cycle()]}, 'state["a"][0]["self"][0]: dict, a cycle back to state["a"][0]'),
    "depth": (
        {"a": deep(MAX_DEPTH + 1)},
        f'state["a"]{"[0]" * MAX_DEPTH}: list, nested deeper than {MAX_DEPTH}',
    ),
    "endless": ({"a": Endless()}, f'state["a"]: {here}.Endless, nested deeper than {MAX_DEPTH}'),
    "raises": ({"a": [Raises()]}, 'state["a"][0]: state_dict() raised ZeroDivisionError: no state today'),
    "subclass": (
        {"m": {"w": torch.ones(1).as_subclass(MyTensor)}},
        f'state["m"]["w"]: {here}.MyTensor, a tensor subclass; pass .as_subclass(torch.Tensor)',
    ),
    "sharded": (
        {"m": {"w": torch.ones(1).as_subclass(Sharded)}},
        f'state["m"]["w"]: {here}.Sharded, a sharded tensor; pass .full_tensor(), or save it through '
        "tierd.dcp.StorageWriter",
    ),
    "sparse": ({"a": torch.eye(2).to_sparse()}, 'state["a"]: a sparse_coo tensor; pass .to_dense()'),
    "csr": (lambda: {"a": torch.eye(2).to_sparse_csr()}, 'state["a"]: a sparse_csr tensor; pass .to_dense()'),
    "quantized": (
        lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
        'state["a"]: a quantized tensor; pass .int_repr() with its scale and zero point',
    ),
    "meta": ({"a": meta_parameter()}, 'state["a"]: a meta tensor, which holds no data; materialize it first'),
    "nested": (
        lambda: {"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])},
        'state["a"]: a nested tensor; pass the list that .unbind() gives',
    ),
    "lazy": (
        {"a": nn.LazyLinear(3)},
        'state["a"]["weight"]: torch.nn.parameter.UninitializedParameter, which has no shape yet; run a batch through '
        "the module before the first save",
    ),
}


def test_arrays_that_are_refused_are_restored_by_the_advice():
    masked = np.ma.array([1, 2, 3], mask=[0, 1, 0])
    records = np.rec.array([(1, 2.0, "a"), (3, 4.0, "b")], dtype=[("x", "i4"), ("y", "f8"), ("z", "U1")])
    state = through(
        {
            "masked": {"data": np.ma.getdata(masked), "mask": np.ma.getmaskarray(masked)},
            "records": {name: np.asarray(records[name]) for name in records.dtype.names},
            "scalar": records[0].item(),
            "objects": np.array([None, "a"]).tolist(),
        }
    )
    again = np.ma.array(state["masked"]["data"], mask=state["masked"]["mask"])
    assert again.tolist() == masked.tolist() == [1, None, 3] and again.data.tolist() == [1, 2, 3]
    fields = np.empty(2, records.dtype)
    for name, column in state["records"].items():
        fields[name] = column
    assert fields.tolist() == records.tolist() and state["scalar"] == (1, 2.0, "a")
    assert state["objects"] == [None, "a"]


@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # torch: sparse CSR is beta, nested a prototype, quantization deprecated
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_path(name):
    state, message = REFUSED[name]
    with pytest.raises(StateRefused) as caught:
        flatten(state() if callable(state) else state)
    assert str(caught.value) == message


def test_an_error_of_the_objects_own_is_chained():
    with pytest.raises(StateRefused) as caught:
        flatten({"a": Raises()})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_deepest_state_that_is_allowed():
    state = {"a": deep(MAX_DEPTH - 1), "t": functools.reduce(lambda v, _: {0: (v,)}, range(MAX_DEPTH // 2 - 1), 1)}
    state["m"] = functools.reduce(lambda v, _: OrderedDict({None: v}), range(MAX_DEPTH - 1), 1)
    assert exactly(through(state), state)


def test_a_path_is_printable_and_short():
    assert path_text(("a", 0, ("x", None), "\ud800")) == 'state["a"][0][(\'x\', None)]["\\ud800"]'
    assert len(path_text(("n" * 10_000,))) < 120


# ---- hostile trees

TENSORS = {"f": torch.ones(2, 2), "u": torch.zeros(8, dtype=torch.uint8)}
FILE = stored(TENSORS)[1]

BAD_TREES = [
    b"",
    b"\xff",
    b"{]",
    b"[]",
    b"1",
    b"null",
    b'{"$dict": [[1, 2]]}',
    b'{"$tuple": []}',
    b"[" * 100_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b'{"a": ' + b"[" * (MAX_DEPTH + 5) + b"]" * (MAX_DEPTH + 5) + b"}",
    b'{"a": ' + b'{"$tuple":[' * (MAX_DEPTH + 5) + b"]}" * (MAX_DEPTH + 5) + b"}",
    b'{"a": NaN}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": 1, "a": 2}',
    *(
        json.dumps({"a": value}).encode()
        for value in (
            {"$unknown": 1},
            {"$tuple": [], "b": 1},
            {"$tuple": {}},
            {"$tuple": {"$tuple": []}},
            {"$int": 1},
            {"$int": "zz"},
            {"$float": "1"},
            {"$float": "7ff0000000000000"},
            {"$float": "3ff0000000000000"},
            {"$float": "7ff80000000000"},
            {"$float": "7ff8000000000000ff"},
            {"$generator": "u"},
            {"$generator": ["f", "cpu"]},
            {"$generator": ["u", "nowhere"]},
            {"$generator": ["absent", "cpu"]},
            {"$float": []},
            {"$complex": [1.0]},
            {"$complex": [1, 2]},
            {"$str": "!"},
            {"$str": "/w=="},
            {"$bytes": "a"},
            {"$bytes": 3},
            {"$set": [[1]]},
            {"$set": [{"$set": []}]},
            {"$set": [{"$range": [0, 1, 1]}]},
            {"$dict": [[{"$complex": [1.0, 2.0]}, 1]]},
            {"$dict": [[1]]},
            {"$dict": [[1, 2], [True, 3]]},
            {"$dict": [[[1], 2]]},
            {"$dict": {"a": 1}},
            {"$odict": []},
            {"$odict": [{}, 1, 2]},
            {"$odict": [[]]},
            {"$counter": []},
            {"$defaultdict": ["eval", {}]},
            {"$defaultdict": [["list"], {}]},
            {"$deque": [-1, []]},
            {"$deque": ["1", []]},
            {"$range": [0, 1, 0]},
            {"$slice": [1, 2, 3, 4]},
            {"$size": ["a"]},
            {"$dtype": "Tensor"},
            {"$dtype": "__builtins__"},
            {"$dtype": "onnx"},
            {"$device": "cuda:x"},
            {"$device": 7},
            {"$npscalar": ["<f8", "AAAA"]},
            {"$npscalar": ["O", "AAAAAAAAAAA="]},
            {"$npscalar": ["<f3", "AAAA"]},
            {"$npscalar": ["<U1", "AAAAAA=="]},
            {"$npscalar": ["<V8", "AAAAAAAAAAA="]},
            {"$npscalar": ["<M8[99999999999999999999s]", "AAAAAAAAAAA="]},
            {"$npstr": 1},
            {"$npbytes": "a"},
            {"$tensor": "absent"},
            {"$tensor": ["f"]},
            {"$view": ["f", "float32"]},
            {"$view": ["f", "complex128"]},
            {"$view": ["u", "complex64"]},
            {"$view": ["f", "qint8"]},
            {"$view": ["absent", "complex64"]},
            {"$array": ["f", "<f4", [5]]},
            {"$array": ["f", "<f4", [-2, -2]]},
            {"$array": ["f", "O", [2]]},
            {"$array": ["u", "<U0", [2**40]]},
            {"$array": ["u", "<U999999999", [0, 1]]},
            {"$array": ["u", "|V8", [1]]},
            {"$array": ["f", "<f4", [True, 4]]},
        )
    ),
]


@pytest.mark.parametrize(
    ("state", "path", "size"),
    [
        ({"a": 1, "b": {"c": [1, b"x" * 3000]}, "d": [0.5] * 100}, 'state["b"]["c"]', 4017),
        ({"a": [b"x" * 900, b"y" * 900, b"z" * 900], "d": 1}, 'state["a"]', 3643),
        ({"a": {(1, "k"): {"b": [2**70] * 100}}, "n": None}, 'state["a"][(1, \'k\')]["b"]', 3201),
        ({"a": {1: 2}, "o": OrderedDict(x=deque([b"", b"x" * 900])), "c": 1}, 'state["o"]["x"]', 1229),
        ({"$": defaultdict(list, {"\ud800": {"y" * 1500}}), "c": (1, torch.ones(1))}, 'state["$"]["\\ud800"]', 1513),
    ],
)
def test_value_that_is_too_large_is_named(monkeypatch, state, path, size):
    monkeypatch.setattr(single_values, "MAX_TREE", 1000)
    with pytest.raises(StateRefused) as caught:
        flatten(state)
    assert str(caught.value).startswith(f"{path}: {size} of the ")
    assert str(caught.value).endswith(
        " bytes besides tensors, 1000 at most; keep large data in a tensor (torch.frombuffer makes one of bytes), or "
        "in a file that stage() takes"
    )


@pytest.mark.parametrize("tree", BAD_TREES, ids=lambda tree: ascii(tree[:60]))
def test_a_malformed_tree_is_refused(tree):
    with pytest.raises(StateMismatch, match=r"^the state tree: "):
        unflatten(tree, bytearray(FILE))


def test_naming_a_dtype_imports_nothing(monkeypatch):
    def lazy(name):
        raise AssertionError(f"torch.{name} was imported")

    monkeypatch.setattr(torch, "__getattr__", lazy)
    with pytest.raises(StateMismatch, match=r"NoneType in the place of dtype"):
        unflatten(b'{"a": {"$dtype": "_absent_module"}}', bytearray(FILE))


def test_a_malformed_file_is_refused():
    with pytest.raises(StateMismatch, match=r"^tensors\.safetensors: "):
        unflatten(b"{}", bytearray(100))


TAGS = """$int $float $complex $str $bytes $bytearray $tuple $set $frozenset $dict $odict $counter $defaultdict $deque
$range $slice $size $dtype $device $npscalar $npstr $npbytes $tensor $view $array $generator"""
tags = st.sampled_from(TAGS.split())
parts = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
parts |= st.sampled_from(
    ["f", "u", "<f4", "<M8[s]", "<U1", "|S0", "complex64", "float8_e8m0fnu", "AAAAAAAAAAA=", "list"]
)
hostile = st.recursive(
    parts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(tags, inner, min_size=1, max_size=1)
        | st.dictionaries(tags | st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(1000))
@given(st.dictionaries(st.text(max_size=2), hostile, max_size=3))
def test_any_tree_is_refused_or_read(value):
    try:
        back = unflatten(json.dumps(value).encode(), bytearray(FILE))
    except TierdError:
        return
    assert isinstance(back, dict)


@settings(max_examples=examples(300))
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(tree):
    try:
        unflatten(tree, bytearray(FILE))
    except TierdError:
        pass


def test_memory_is_bounded_by_the_tree():
    trees = [
        b'{"a":[' + b"[]," * 100_000 + b"[]]}",
        b'{"a":' + b'{"$bytes":"' + b"A" * 400_000 + b'"}}',
        b'{"a":' + b"[" * 400_000,
        json.dumps({"a": {"$range": [0, 1, 1]}, "b": {"$array": ["u", "|u1", [2**40, 2**40]]}}).encode() * 1,
    ]
    for tree in trees:
        tracemalloc.start()
        try:
            unflatten(tree, bytearray(FILE))
        except TierdError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 64 * len(tree) + 100_000
