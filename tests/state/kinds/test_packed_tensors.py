"""Runs of plain values are typed arrays in the tensor file: exact, a snapshot, and the same however they are found."""

from __future__ import annotations

import copy
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exact import described
from support.seeds import examples
from support.state_files import copy_into, flatten, plan_layout
from support.training import stored, through

from tierd.core.errors import StateMismatch, StateRefused
from tierd.state import state_tree
from tierd.state.capturer import Capturer
from tierd.state.kinds import stored_arrays
from tierd.state.kinds.stored_arrays import FEWEST, pack, padded_size, unpack
from tierd.state.state_loading import load_restored, unflatten

N = FEWEST
SIGNALLING = struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0]
RUNS = {
    "floats": [n / 7 for n in range(N)],
    "odd floats": [math.nan, -math.nan, SIGNALLING, -0.0, 0.0, math.inf, -math.inf, 5e-324] * N,
    "ints": list(range(-N, N)),
    "64 bits": [2**63 - 1, -(2**63), 2**53 + 1] * N,
    "bools": [True, False, False] * N,
    "strings": [f"ä{n}\n" for n in range(N)],
    "empty strings": [""] * N,
    "tuple": tuple(range(N)),
    "deque": deque([0.5] * N, maxlen=N + 5),
    "endless deque": deque([0.5] * N),
    "many floats": [n / 3 for n in range(20_001)],
    "many ints": tuple(range(-20_001, 1)),
    "dict": {f"${n}": n / 3 for n in range(N)},
    "dict of ints": {n: str(n) for n in range(N)},
    "dict of floats": {n / 2: True for n in range(N)},
    "ordered": OrderedDict((f"{n}", n) for n in range(N, 0, -1)),
    "counter": Counter({f"{n}": n for n in range(N)}),
    "default": defaultdict(int, {n: n for n in range(N)}),
    "bytes": bytes(range(256)) * 300,
    "bytearray": bytearray(b"x") * 70_000,
    "bytes in a list": [b"x" * 70_000, b"y"],
}
STAY = {
    "65 bits": [2**63] * N,
    "1 and True": [*range(N), True],
    "True and 1": [True] * N + [1],
    "True among ints": [*range(N), True, 5],
    "True among many ints": [*range(9000), True, 5],
    "None among many floats": [*[0.5] * 9000, None, 0.5],
    "an empty str among bools": [*[True] * N, "", False],
    "ints and floats": [*range(N), 0.5],
    "None": [None] * N,
    "NUL": ["a\0b", *map(str, range(N))],
    "surrogates": ["\ud800", *map(str, range(N))],
    "few": [0.5] * (N - 1),
    "tuples as keys": {(n, n): 1 for n in range(N)},
    "values of two types": {n: n if n else None for n in range(N)},
    "metadata": OrderedDict(),
    "few bytes": b"x" * (stored_arrays.FEWEST_BYTES - 1),
    "a set": set(range(N)),
}
STAY["metadata"].update((str(n), n) for n in range(N))
STAY["metadata"]._metadata = {"version": 1}


@pytest.mark.parametrize("name", RUNS)
def test_run_of_values_is_restored_exactly_from_a_tensor(name):
    state = {"value": RUNS[name], "w": torch.ones(3)}
    tree, _ = stored(state)
    assert len(tree) < 200 and b"$values" in tree
    assert described(through(state)) == described(state, live=True)


@pytest.mark.parametrize("name", STAY)
def test_value_that_is_no_run_is_stored_as_json(name):
    state = {"value": STAY[name], "w": torch.ones(3)}
    assert b"$values" not in stored(state)[0]
    assert described(through(state)) == described(state, live=True)


def test_tensor_of_a_run_has_the_path_of_the_run():
    flat = flatten({"losses": [0.5] * N, "data": {"seen": {n: n for n in range(N)}}})
    assert list(flat.tensors) == ["losses", "data/seen/keys", "data/seen/values"]
    assert json.loads(flat.tree)["losses"] == {"$values": ["losses", "float", N]}
    assert flat.tensors["losses"][:N].tolist() == [0.5] * N
    assert not flat.tensors["losses"][N:].any()


@pytest.mark.parametrize("size", [1, 64, 65, 4095, 4096, 1_000_000, 50_000_000])
def test_a_run_has_room_to_grow_and_wastes_little(size):
    assert size <= padded_size(size) <= max(size + 63, size * 33 // 32)
    assert padded_size(size) % 64 == 0
    assert padded_size(padded_size(size)) == padded_size(size)


# -- save after save ------------------------------------------------------------------------------------------------


def test_a_list_that_grows_is_neither_walked_nor_laid_out_anew(monkeypatch):
    state = {"losses": [0.5] * 10_000, "w": torch.ones(1000)}
    capturer = Capturer()
    first = capturer.capture(state)
    monkeypatch.setattr("tierd.state.capturer.Encoder", None)
    for _ in range(200):
        state["losses"].append(0.25)
    later = capturer.capture(state)
    assert later.layout is first.layout and later.places is first.places
    assert json.loads(later.tree())["losses"] == {"$values": ["losses", "float", 10_200]}
    later.check(later.tree())


CROSSINGS = {
    "a list": ([0.5] * (N - 1), [0.5] * N),
    "a list of two types": ([*range(N), None], [*range(N), 1]),
    "a dict": (dict.fromkeys(range(N), None), dict.fromkeys(range(N), 1.5)),
    "a dict of names": (dict.fromkeys(map(str, range(N)), None), dict.fromkeys(map(str, range(N)), 1.5)),
    "an OrderedDict": (OrderedDict.fromkeys(range(N), None), OrderedDict.fromkeys(range(N), 1.5)),
    "bytes": (b"x" * 9, b"x" * stored_arrays.FEWEST_BYTES),
    "None, bytes": (None, b"x" * stored_arrays.FEWEST_BYTES),
    "a bytearray": (bytearray(9), bytearray(stored_arrays.FEWEST_BYTES)),
    "bytes in a list": ([b"x", 1], [b"x" * stored_arrays.FEWEST_BYTES, 1]),
    "bytes beside a tensor": ([torch.ones(1), b"x"], [torch.ones(1), b"x" * stored_arrays.FEWEST_BYTES]),
}


@pytest.mark.parametrize("name", CROSSINGS)
def test_value_that_becomes_a_run_is_packed_as_by_a_fresh_walk(name):
    less, more = CROSSINGS[name]
    capturer = Capturer()
    for value in (less, more, more, less, more):
        state = {"x": {"y": value}}
        assert capturer.capture(state).tree() == flatten(state).tree
    assert b"$values" in flatten({"x": more}).tree and b"$values" not in flatten({"x": less}).tree


def test_a_new_maxlen_of_a_deque_gets_in():
    capturer = Capturer()
    for maxlen in (N, N + 1, None, N):
        state = {"x": deque([0.5] * N, maxlen=maxlen)}
        assert capturer.capture(state).tree() == flatten(state).tree


@pytest.mark.parametrize("name", RUNS)
def test_nothing_changes_after_the_capture(name):
    capturer = Capturer()
    for _ in range(2):
        value = copy.copy(RUNS[name])  # other tests have these, too
        state = {"value": value}
        before = described(state, live=True)
        capture = capturer.capture(state)
        if hasattr(value, "clear"):
            value.clear()
        elif hasattr(value, "popleft"):
            value.popleft()
        layout = plan_layout(capture.tensors)
        assert layout.entries == capture.layout.entries
        file = bytearray(layout.size)
        copy_into(layout, capture.tensors, file)
        assert described(unflatten(capture.tree(), file)) == before


plain = st.one_of(
    st.lists(st.floats(), max_size=6),
    st.lists(st.integers(-3, 3), max_size=6),
    st.lists(st.integers(), max_size=6),
    st.lists(st.booleans(), max_size=6),
    st.lists(st.text(st.characters(exclude_categories=()), max_size=2), max_size=6),
    st.lists(st.one_of(st.none(), st.booleans(), st.integers(0, 1), st.floats(0, 1)), max_size=6),
    st.binary(max_size=6),
    st.binary(max_size=6).map(bytearray),
    st.dictionaries(st.text(max_size=2), st.floats(), max_size=5),
    st.dictionaries(st.integers(), st.booleans(), max_size=5),
    st.dictionaries(st.one_of(st.integers(), st.floats(), st.booleans()), st.integers(), max_size=5),
    st.lists(st.binary(max_size=6), max_size=4),
    st.lists(st.builds(lambda: torch.ones(2)), max_size=3),
)
forms = st.sampled_from(
    [
        lambda v: v,
        lambda v: tuple(v) if type(v) is list else v,
        lambda v: deque(v, maxlen=9) if type(v) is list else v,
        lambda v: OrderedDict(v) if type(v) is dict else v,
        lambda v: defaultdict(list, v) if type(v) is dict else v,
        lambda v: Counter(v) if type(v) is dict else v,
        lambda v: {"in": v, "n": 1},
        lambda v: [v, None],
    ]
)
values = st.builds(lambda v, f, g: g(f(v)), plain, forms, forms)
states = st.dictionaries(st.sampled_from(["a", "b", "c"]), values, min_size=1, max_size=3)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(states, min_size=2, max_size=5))
def test_any_series_of_states_is_captured_as_by_a_fresh_walk(found):
    """With runs of three values, so that every kind of change crosses the threshold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_arrays, "FEWEST", 3)
        patch.setattr(stored_arrays, "FEWEST_BYTES", 3)
        capturer = Capturer()
        for state in (one for one in found for _ in range(2)):
            capture, flat = capturer.capture(state), flatten(state)
            assert capture.tree() == flat.tree
            assert list(capture.tensors) == list(flat.tensors)
            assert capture.layout == plan_layout(flat.tensors)
            for name, tensor in flat.tensors.items():
                assert torch.equal(capture.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
            capture.check(capture.tree())
            back = through(state)
            assert described(back) == described(state, live=True)
            target = {name: _emptied(value) for name, value in state.items()}
            load_restored(target, back)
            assert described(target) == described(state, live=True)


def _emptied(value):
    return type(value)() if type(value) in (list, dict, tuple, bytes) else None


# -- what a reader refuses ------------------------------------------------------------------------------------------

BAD = {
    "more than there is": ["losses", "float", padded_size(N) + 1],
    "less than nothing": ["losses", "float", -1],
    "another kind": ["losses", "int", N],
    "an unknown kind": ["losses", "decimal", N],
    "another tensor": ["w", "float", 1],
    "no tensor": ["x", "float", 1],
    "a size of another type": ["losses", "float", 1.0],
    "no size": ["losses", "float"],
}


@pytest.mark.parametrize("name", BAD)
def test_a_run_that_does_not_fit_its_tensor_is_refused(name):
    _, file = stored({"losses": [0.5] * N, "w": torch.ones(3)})
    with pytest.raises(StateMismatch, match="the state tree: "):
        unflatten(json.dumps({"losses": {"$values": BAD[name]}}).encode(), file)


def test_no_text_is_refused():
    _, file = stored({"w": torch.full((64,), 255, dtype=torch.uint8)})
    with pytest.raises(StateMismatch, match="the state tree: "):
        unflatten(b'{"w":{"$values":["w","str",64]}}', file)


MAPS = {
    "keys of lists": '[[["a"]],[1]]',
    "fewer values": '[["a","b"],[1]]',
    "a key twice": '[["a","a"],[1,2]]',
    "no list": '[{"a":1},[1]]',
    "three": '[["a"],[1],[2]]',
    "nothing": "null",
}


@pytest.mark.parametrize("name", MAPS)
def test_a_bad_map_is_refused(name):
    _, file = stored({"w": torch.ones(3)})
    with pytest.raises(StateMismatch, match="the state tree: "):
        unflatten(f'{{"a":{{"$map":{MAPS[name]}}}}}'.encode(), file)


def test_keys_of_one_hash_are_refused_at_save_and_at_restore():
    prime = 2**61 - 1
    state = {"x": dict.fromkeys([*(n * prime for n in (1, 2, 3, 4)), *range(1, N)], 1.0)}
    assert pack(state["x"]) is not None
    assert len({hash(n * prime) for n in (1, 2, 3, 4, -1, -2, -3, -4)}) == 1  # of 64 bits only so many are alike
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_tree, "MOST_ALIKE", 3)
        with pytest.raises(StateRefused, match=r'^state\["x"\]: \d+ of its keys have the same hash'):
            flatten(state)
        capturer = Capturer()
        patch.setattr(state_tree, "MOST_ALIKE", 64)
        capturer.capture(state)
        patch.setattr(state_tree, "MOST_ALIKE", 3)
        with pytest.raises(StateRefused, match=r'^state\["x"\]: \d+ of its keys have the same hash'):
            capturer.capture(state)
        patch.setattr(state_tree, "MOST_ALIKE", 64)
        tree, file = stored(state)
        patch.setattr(state_tree, "MOST_ALIKE", 3)
        with pytest.raises(StateMismatch, match="have the same hash"):
            unflatten(tree, file)


def test_one_tensor_as_many_runs_is_refused():
    _, file = stored({"losses": [0.5] * N})
    one = '{"$values":["losses","float",9]}'
    with pytest.raises(StateMismatch, match="named by two"):
        unflatten(f'{{"a":{one},"b":{one}}}'.encode(), file)


@pytest.mark.parametrize("kind", ["float", "str"])
def test_more_values_than_a_reader_makes_are_refused_by_both(kind, monkeypatch):
    state = {"few": [1, 2], "deep": {"many": [{"float": 0.5, "str": ""}[kind]] * 1400, "others": [True] * 1300}}
    tree, file = stored(state)
    monkeypatch.setattr(state_tree, "MAX_VALUES", 2699)
    with pytest.raises(StateMismatch, match="2700 values in packed runs, 2699 at most"):
        unflatten(tree, file)
    capturer = Capturer()
    for _ in range(2):
        capture = capturer.capture(state)
        with pytest.raises(StateRefused, match=r'^state\["deep"\]\["many"\]: 1400 of the state.s 2700 .*torch\.tensor'):
            capture.tree()
    state["deep"]["others"].pop()
    tree = capturer.capture(state).tree()
    assert len(unflatten(tree, stored(state)[1])["deep"]["others"]) == 1299


def test_a_part_is_read_for_dcp_with_its_runs_and_within_the_same_limits(local, spool, monkeypatch):
    from tierd.client.restoring.ranged_reader import PartFiles
    from tierd.client.restoring.tensor_locations import TensorLocator, read_tensor
    from tierd.dcp import rank_contents

    state = {
        "losses": [0.5, -0.0] * N,
        "table": {f"{n}": n for n in range(N)},
        "order": tuple(range(N)),
        "raw": b"x" * 70_000,
    }
    local.save(1, state | {"w": torch.ones(3)}).wait()
    (part,) = spool.parts()
    files = PartFiles(spool, part.checkpoint, 1, None, "")
    found = rank_contents.read_leaves(TensorLocator(files), part).values
    assert described([found["losses"], found["order"]]) == described([state["losses"], state["order"]])
    raw = found["raw"]  # not read yet
    assert raw.rebuild(read_tensor(files, raw.location)) == state["raw"]
    assert {name: found[f"table.{name}"] for name in state["table"]} == state["table"]
    monkeypatch.setattr(state_tree, "MAX_VALUES", 4 * N)
    with pytest.raises(StateMismatch, match="values in packed runs"):
        rank_contents.read_leaves(TensorLocator(files), part)
    monkeypatch.undo()
    for one, why in (
        ('{"$values":["raw","bytes",65536]}', "named by two"),
        ('{"$array":["losses","<f8",[2048]]}', "named by two"),
        ('{"$values":["losses","int",9]}', "holds no 9 elements of int"),
    ):
        monkeypatch.setattr(rank_contents, "read_tree", lambda *_, one=one: f'{{"a":{one},"b":{one}}}'.encode())
        with pytest.raises(StateMismatch, match=why):
            rank_contents.read_leaves(TensorLocator(files), part)


def test_until_a_file_is_read_runs_are_empty():
    tree, file = stored({"w": torch.ones(3), "losses": [0.5] * N, "table": {str(n): n for n in range(N)}})
    header = 8 + int.from_bytes(file[:8], "little")
    file[header:] = bytes(len(file) - header)
    found = unflatten(tree, file, is_read=False)
    assert found["losses"] == [] and found["table"] == {} and found["w"].shape == (3,)


def test_an_unknown_tag_says_who_may_have_written_it():
    _, file = stored({"w": torch.ones(3)})
    with pytest.raises(StateMismatch, match=r"unknown tag '\$newer': if a newer tierd wrote it"):
        unflatten(b'{"w":{"$newer":1}}', file)


def test_a_run_is_unpacked_from_the_first_elements_alone():
    tensor = torch.tensor([1, 2, 3])
    assert unpack(tensor, "int", 2) == [1, 2]
    assert unpack(tensor, "int", 0) == []


# -- what is restored stands by itself ------------------------------------------------------------------------------


def test_object_gets_its_own_copy_of_a_run_and_lists_keep_their_identity():
    class Loader:
        def state_dict(self):
            return {"order": list(range(5000)), "pair": (1, [2, 3])}

        def load_state_dict(self, state):
            self.state = state

    losses, table = [None], {"old": 1}
    state = {"loader": Loader(), "losses": losses, "table": table}
    saved = {"loader": Loader(), "losses": [0.5] * 5000, "table": {str(n): n for n in range(5000)}}
    restored = through(saved)
    given = restored["loader"]["order"]
    load_restored(state, restored)
    assert state["losses"] is losses and losses == [0.5] * 5000
    assert state["table"] is table and table == saved["table"]
    assert state["loader"].state["order"] == list(range(5000)) and state["loader"].state["order"] is not given
    assert state["loader"].state["pair"] == (1, [2, 3])


def test_the_state_itself_is_never_packed():
    state = {f"entry {n}": n for n in range(2 * N)}
    capturer = Capturer()
    for _ in range(2):
        tree = capturer.capture(state).tree()
        assert list(json.loads(tree)) == list(state) and tree == flatten(state).tree


def test_an_entry_is_restored_alone_with_its_runs(local):
    state = {"w": torch.ones(5000), "losses": [0.5] * N, "table": {str(n): n for n in range(N)}, "other": [True] * N}
    local.save(1, state).wait()
    target = {"w": torch.zeros(5000), "losses": [], "table": {}, "other": None}
    local.restore(target, only=("losses", "table"))
    assert described(target["losses"]) == described(state["losses"]) and described(target["table"]) == described(
        state["table"]
    )
    assert target["other"] is None and not target["w"].any()


def test_change_behind_a_save_does_not_enter_it(local):
    weight = torch.nn.Parameter(torch.ones(5000))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    weight.grad = torch.ones(5000)
    local.attach(optimizer)
    state = {"w": weight, "optimizer": optimizer, "losses": [0.5] * 5000, "raw": bytearray(b"a" * 70_000)}
    for step in range(3):
        optimizer.step()
        save = local.save(step, state)
        state["losses"][:] = [0.25] * 5000
        state["raw"][:] = b"b" * 70_000
        save.wait()
        into = {"w": torch.zeros(5000), "optimizer": None, "losses": [], "raw": None}
        local.restore(into, step=step)
        assert into["losses"] == [0.5] * 5000 and into["raw"] == b"a" * 70_000
        state["losses"][:] = [0.5] * 5000
        state["raw"][:] = b"a" * 70_000
