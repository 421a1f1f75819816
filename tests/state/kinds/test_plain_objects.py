"""Plain objects of the standard library, and generators of NumPy and `random`: exact through a save and a restore."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import io
import json
import pathlib
import random
import types
import uuid

import numpy as np
import pytest
from support.state_files import flatten
from support.training import stored, through

from tierd.core.errors import StateMismatch, StateRefused
from tierd.state.capturer import Capturer
from tierd.state.load_check import check_fit
from tierd.state.single_values import type_name
from tierd.state.state_loading import load_restored, unflatten
from tierd.state.tree_parser import parse_tree

UTC = datetime.UTC
NEWFOUNDLAND = datetime.timezone(-datetime.timedelta(hours=3, minutes=30, seconds=52))
VALUES = {
    "path": pathlib.Path("/data/ä/\udc80/x.bin"),
    "relative path": pathlib.Path(),
    "pure path": pathlib.PurePosixPath("a/b"),
    "path of Windows": pathlib.PureWindowsPath(r"C:\data\x"),
    "datetime": datetime.datetime(2026, 11, 29, 16, 9, 3, 123456),  # noqa: DTZ001
    "datetime with a fold": datetime.datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001
    "datetime with a zone": datetime.datetime(1, 1, 1, tzinfo=NEWFOUNDLAND),
    "datetime in UTC": datetime.datetime.max.replace(tzinfo=UTC),
    "date": datetime.date(9999, 12, 31),
    "time": datetime.time(23, 59, 59, 999999, tzinfo=UTC, fold=1),
    "timedelta": datetime.timedelta(-5, 3, 7),
    "longest timedelta": datetime.timedelta.max,
    "uuid": uuid.UUID(int=7),
    "decimal": decimal.Decimal("-1.10E+7"),
    "nan": decimal.Decimal("-sNaN123"),
}


def facts(value):
    if isinstance(value, datetime.datetime | datetime.time):
        return type(value), value.isoformat(), value.fold, value.tzinfo
    return type(value), str(value) if isinstance(value, decimal.Decimal) else value


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_plain_object_is_restored_with_its_type_and_value(value):
    found = through({"a": value, "nested": [{"b": (value, 1)}]})
    assert [facts(one) for one in (found["a"], found["nested"][0]["b"][0])] == [facts(value)] * 2


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_plain_object_replaces_the_value_in_its_place(value):
    state = {"a": None, "b": value}
    load_restored(state, through({"a": value, "b": None}))
    assert facts(state["a"]) == facts(value)
    assert state["b"] is None


def test_a_buffer_of_bytes_keeps_its_content_and_position():
    buffer = io.BytesIO(bytes(range(256)) * 1000)
    buffer.seek(77)
    found = through({"a": buffer, "empty": io.BytesIO()})
    assert (found["a"].getvalue(), found["a"].tell()) == (buffer.getvalue(), 77)
    assert found["empty"].getvalue() == b""
    state = {"a": io.BytesIO(b"old"), "empty": None}
    load_restored(state, found)
    assert (state["a"].getvalue(), state["a"].tell()) == (buffer.getvalue(), 77)


def test_a_capture_without_a_walk_has_the_current_values():
    capturer = Capturer()
    buffer, generator = io.BytesIO(b"ab"), np.random.default_rng(1)
    state = {"buffer": buffer, "path": pathlib.Path("a"), "rng": generator, "python": random.Random(2)}
    for _ in range(3):
        generator.random()
        state["python"].random()
        buffer.seek(0, io.SEEK_END)
        buffer.write(b"c")
        state["path"] /= "b"
        assert capturer.capture(state).tree() == flatten(state).tree


GENERATORS = {
    "python": lambda seed: random.Random(seed),
    "legacy": lambda seed: np.random.RandomState(seed),
    "legacy with other bits": lambda seed: np.random.RandomState(np.random.PCG64(seed)),
    **{
        kind.__name__: lambda seed, kind=kind: np.random.Generator(kind(seed))
        for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
    },
}


def drawn(generator):
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), generator.randrange(1 << 70)]
    small = generator.integers if isinstance(generator, np.random.Generator) else generator.randint
    return [generator.standard_normal(), *generator.random(5), *small(0, 1 << 31, 3)]


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_generator_is_set_in_place_and_continues_exactly(make):
    saved = make(1)
    if isinstance(saved, np.random.Generator):
        saved.integers(0, 1 << 31, dtype="u4")  # half of a 64-bit number is left
    drawn(saved)
    tree, file = stored({"rng": saved, "data": {"sampler": [saved]}})
    expected = drawn(saved)
    live = make(2)
    state = {"rng": live, "data": {"sampler": [make(3)]}}
    held = state["data"]["sampler"][0]
    load_restored(state, unflatten(tree, file))
    assert state["rng"] is live
    assert state["data"]["sampler"][0] is held
    assert drawn(live) == drawn(held) == expected


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_generator_in_the_place_of_none_is_created(make):
    saved = make(1)
    drawn(saved)
    state = {"rng": None}
    load_restored(state, through({"rng": saved}))
    assert type(state["rng"]) is type(saved)
    assert drawn(state["rng"]) == drawn(saved)


MISFITS = {
    "nothing": (1, np.random.default_rng(), "a numpy.random.Generator with PCG64 in the checkpoint, none here"),
    "a number": (np.random.default_rng(), 1, "int in the checkpoint, a numpy.random.Generator here"),
    "other bits": (np.random.default_rng(), np.random.Generator(np.random.Philox()), "with Philox in the checkpoint"),
    "another kind": (random.Random(), np.random.RandomState(), "a numpy.random.RandomState with MT19937 in the"),
}


@pytest.mark.parametrize(("target", "saved", "message"), MISFITS.values(), ids=MISFITS)
def test_another_generator_is_refused_before_anything_is_loaded(target, saved, message):
    state = {"first": 1, "rng": target}
    with pytest.raises(StateMismatch) as refused:
        check_fit(state, through({"first": 2, "rng": saved}))
    assert message in str(refused.value)
    assert state["first"] == 1


class Moment(datetime.datetime):
    pass


class Shape(enum.Enum):
    ROUND = 1


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


class Curriculum:
    def get_state(self):
        return {}

    def load_state(self, state):
        pass


class Graph:
    def to_dict(self):
        return {}


class Record(Graph):
    @classmethod
    def from_dict(cls, members):
        return cls()


class Half:
    def state_dict(self):
        return {}


REFUSED = {
    "an Enum": (Shape.ROUND, "an Enum; pass its .name, and make it again as Shape[name]"),
    "a dataclass": (Settings(), "dataclasses.asdict"),
    "get_state and load_state": (
        Curriculum(),
        "give its class state_dict() and load_state_dict(), which call get_state() and load_state()",
    ),
    "to_dict": (Graph(), "pass .to_dict(), and make it again of that dict"),
    "to_dict and from_dict": (Record(), "pass .to_dict(), and make it again by .from_dict()"),
    "state_dict alone": (Half(), "it has state_dict() and no load_state_dict()"),
    "a subclass": (Moment(2026, 1, 1), "a subclass of datetime; pass a plain datetime"),
    "a generator of the system": (random.SystemRandom(), "which has no state; leave it out"),
    "a bit generator": (np.random.PCG64(), "pass the numpy.random.Generator of it"),
    "a namespace": (types.SimpleNamespace(a=1), "pass vars(…)"),
    "a zone with rules": (
        datetime.datetime(2026, 1, 1, tzinfo=__import__("zoneinfo").ZoneInfo("UTC")),
        "pass .astimezone(datetime.timezone.utc)",
    ),
    "a zone with a name": (datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(0), "X")), "no plain offset"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_of_a_value_names_a_remedy(value, message):
    with pytest.raises(StateRefused) as refused:
        flatten({"a": [value]})
    assert str(refused.value).startswith(f'state["a"][0]: {type_name(value)}')
    assert message in str(refused.value)


def test_a_closed_buffer_is_refused_by_its_path():
    buffer = io.BytesIO()
    buffer.close()
    with pytest.raises(StateRefused, match=r'state\["a"\]: _io.BytesIO I/O operation on closed file'):
        flatten({"a": buffer})


HOSTILE = [
    {"$bytesio": ["!", 0]},
    {"$bytesio": ["", -1]},
    {"$bytesio": ""},
    {"$datetime": ["now", 0]},
    {"$datetime": ["2026-01-01T00:00:00", 7]},
    {"$datetime": "2026-01-01"},
    {"$date": 1},
    {"$time": ["25:00", 0]},
    {"$timedelta": [1, 2]},
    {"$timedelta": [10**12, 0, 0]},
    {"$path": ["Popen", "x"]},
    {"$path": ["Path", 1]},
    {"$uuid": "x"},
    {"$decimal": "x"},
    {"$decimal": 1},
    {"$random": ["os.urandom", {}]},
    {"$random": ["numpy.random.Generator", {"bit_generator": "seed"}]},
    {"$random": ["numpy.random.Generator", {}]},
    {"$random": ["random.Random", [3, 4, None]]},
    {"$random": ["random.Random"]},
]


@pytest.mark.parametrize("tree", HOSTILE, ids=str)
def test_tree_with_an_unknown_plain_object_is_refused(tree):
    with pytest.raises(StateMismatch, match=r"^the state tree: "):
        parse_tree(json.dumps({"a": tree}).encode(), {}.__getitem__)


@pytest.mark.parametrize(
    "state",
    [
        ["numpy.random.Generator", {"bit_generator": "PCG64", "state": {"state": "x", "inc": 1}}],
        ["numpy.random.RandomState", {"bit_generator": "MT19937"}],
        ["random.Random", [3, [1, 2], None]],
        ["random.Random", [3, ["x"] * 625, None]],
    ],
    ids=str,
)
def test_a_state_that_its_generator_refuses_is_a_mismatch(state):
    saved = parse_tree(json.dumps({"a": {"$random": state}}).encode(), {}.__getitem__)
    with pytest.raises(StateMismatch, match="that cannot be set"):
        check_fit({"a": None}, saved)


def test_an_object_may_have_plain_objects_in_its_own_state():
    class Keeps:
        def __init__(self, state):
            self.state = state

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    saved = {"rng": np.random.default_rng(1), "path": pathlib.Path("a"), "buffer": io.BytesIO(b"x")}
    expected = copy.deepcopy(saved)
    restored = Keeps(None)
    load_restored({"o": restored}, through({"o": Keeps(saved)}))
    assert restored.state["rng"].random() == expected["rng"].random()
    assert restored.state["path"] == expected["path"]
    assert restored.state["buffer"].getvalue() == b"x"
