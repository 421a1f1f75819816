"""Tensors that are added between two saves: captured without a walk over all others, and as a fresh walk would."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples
from support.state_files import flatten, plan_layout
from torch import nn

from tierd.client.saving.slots import Slot
from tierd.state.capturer import Capturer, CapturerPool
from tierd.state.kinds.live_parameters import names_changed_by_step, optimizers_in
from tierd.state.structure import MOST_ADDED
from tierd.state.tensor_file import METADATA, TensorFilePlanner
from tierd.state.tensor_header import parse_header

pytestmark = pytest.mark.usefixtures("forms")


def check(capture, state):
    """As a fresh walk: text, names, memory, layout; and it is decoded again."""
    flat = flatten(state)
    assert capture.tree() == flat.tree
    assert list(capture.tensors) == list(flat.tensors)
    assert capture.layout == plan_layout(flat.tensors, names_changed_by_step(optimizers_in(state), flat.tensors))
    assert list(capture.layout.entries) == list(parse_header(capture.layout.header, capture.layout.size).entries)
    for name, tensor in flat.tensors.items():
        mine = capture.tensors[name]
        assert (mine.dtype, mine.shape, mine.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert torch.equal(mine, tensor)
        assert name in capture.copies or mine.data_ptr() == tensor.data_ptr()
    capture.check(capture.tree())


def state(tied=False):
    shared = torch.ones(64)
    return {
        "a": {"x": torch.ones(3), "inner": {"y": torch.ones(2, 64), "n": 3}, "z": shared if tied else torch.ones(64)},
        "list": [1.5, None, {"w": torch.zeros(16), "s": "text"}],
        "m": OrderedDict(q=torch.ones(7)),
        "losses": [0.5] * 2000,
        "b": {"tied": shared, "last": torch.ones(5, dtype=torch.float64)},
        "epoch": 1,
    }


PLACES = {
    "the root": lambda s: s,
    "the first": lambda s: s["a"],
    "inside": lambda s: s["a"]["inner"],
    "in a list": lambda s: s["list"][2],
    "the last": lambda s: s["b"],
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_one_more_at_each_save_is_not_walked(place, tied, walks):
    here = state(tied)
    capturer = Capturer()
    check(capturer.capture(here), here)
    made = len(walks)
    for number in range(3 * MOST_ADDED):
        tensor = torch.full((number % 5 + 1, 64), float(number))
        PLACES[place](here)[f"added {number} ä"] = nn.Parameter(tensor) if number % 3 == 0 else tensor
        here["epoch"] += 1
        capture = capturer.capture(here)
        assert len(walks) == made
        check(capture, here)
        assert capturer.capture(here).layout is capture.layout
        assert len(walks) == made


def test_several_at_once_in_several_places(walks):
    here = state()
    capturer = Capturer()
    capturer.capture(here)
    for number in range(3):
        for place in PLACES.values():
            place(here)[f"n{number}"] = torch.full((64,), float(number))
        capture = capturer.capture(here)
        assert len(walks) == 1
        check(capture, here)


SPECIAL = {
    "a name that another has": ("a/x", torch.ones(3)),
    "the name of the metadata": (METADATA, torch.ones(3)),
    "an empty one": ("n", torch.ones(0)),
    "complex": ("n", torch.ones(3, dtype=torch.complex64)),
    "a number": ("n", 3),
    "a dict": ("n", {"w": torch.ones(3)}),
    "a run": ("n", [0.5] * 5000),
    "a tag": ("$n", torch.ones(3)),
    "a key of another type": (3, torch.ones(3)),
}


@pytest.mark.parametrize("place", ["the root", "the first", "the last"])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_addition_makes_a_fresh_walk(name, place, walks):
    here = state()
    capturer = Capturer()
    capturer.capture(here)
    key, value = SPECIAL[name]
    if place == "the root" and type(key) is not str:
        pytest.skip("refused")
    PLACES[place](here)[key] = value
    check(capturer.capture(here), here)
    PLACES[place](here)["after"] = torch.ones(3)
    check(capturer.capture(here), here)


def test_added_tensor_that_is_tied_to_another_is_stored_once():
    here = state()
    capturer = Capturer()
    capturer.capture(here)
    here["a"]["again"] = here["b"]["last"]
    here["b"]["again"] = here["a"]["again"].view(5)
    check(capturer.capture(here), here)
    new = torch.ones(9)
    here["a"]["one"] = here["b"]["other"] = new
    check(capturer.capture(here), here)
    here["a"]["more"] = torch.ones(4)  # where names are shared
    check(capturer.capture(here), here)


def test_more_than_a_few_and_fewer_than_before(walks):
    here = state()
    capturer = Capturer()
    capturer.capture(here)
    for number in range(MOST_ADDED + 1):
        here["a"][f"n{number}"] = torch.ones(3)
    check(capturer.capture(here), here)
    del here["a"]["n3"]
    check(capturer.capture(here), here)
    here["b"] = {"new": torch.ones(2), **here["b"]}  # not behind the others
    check(capturer.capture(here), here)


def test_added_tensor_beside_an_optimizer_is_laid_out_by_whether_it_moves(walks):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    here = {"model": model, "optimizer": optimizer, "extra": {"a": torch.ones(64)}}
    capturer = Capturer()
    capturer.capture(here)
    made = len(walks)
    here["extra"]["weight"] = torch.ones(128)
    check(capturer.capture(here), here)
    assert len(walks) == made


def test_no_tensor_is_kept():
    import gc
    import weakref

    here = state()
    capturer = Capturer()
    capturer.capture(here)
    here["a"]["new"] = torch.ones(3)
    gone = weakref.ref(here["a"]["new"])
    capturer.capture(here)
    here.clear()
    gc.collect()
    assert gone() is None


def test_change_of_an_added_value_is_captured():
    here = state()
    capturer = Capturer()
    capturer.capture(here)
    here["a"]["new"] = torch.ones(64)
    capturer.capture(here)
    for value in (torch.zeros(64), torch.zeros(65), torch.zeros(65).requires_grad_(), here["a"]["z"], None):
        here["a"]["new"] = value
        check(capturer.capture(here), here)


sizes = st.sampled_from([1, 16, 64, 1000])
steps = st.lists(st.tuples(st.sampled_from([*PLACES]), st.text(max_size=3), sizes, st.booleans()), max_size=4)


@settings(max_examples=examples(), deadline=None)
@given(st.lists(steps, min_size=1, max_size=6), st.booleans())
def test_any_series_of_additions_is_captured_as_by_a_fresh_walk(saves, tied):
    here = state(tied)
    capturer = Capturer()
    capturer.capture(here)
    for added in saves:
        for place, key, size, wide in added:
            if place != "the root" or key not in here:
                PLACES[place](here)[key] = torch.ones(size, dtype=torch.float64 if wide else torch.uint8)
        check(capturer.capture(here), here)


@given(st.lists(st.tuples(st.text(max_size=3), sizes, st.booleans()), max_size=12), st.integers(0, 12))
def test_a_layout_that_grew_is_that_of_all(found, first):
    tensors = {name: torch.empty(size, dtype=torch.int64 if wide else torch.bool) for name, size, wide in found}
    moves = {name for name in tensors if len(name) % 2}
    planner = TensorFilePlanner({name: tensors[name] for name in list(tensors)[:first]}, moves)
    for name in list(tensors)[first:]:
        planner.add(name, tensors[name], moves)
    assert planner.layout() == plan_layout(tensors, moves)
    assert list(planner.layout().entries) == list(plan_layout(tensors, moves).entries)


def test_added_tensor_of_an_optimizer_is_laid_out_as_moving(walks):
    parameter = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(64)
    optimizer.step()

    class Trainer:
        def __init__(self):
            self.optimizer = optimizer

        def state_dict(self):
            return {"n": 1}

        def load_state_dict(self, state):
            pass

    here = {"trainer": Trainer(), "moments": {"first": torch.ones(64)}}
    capturer = Capturer()
    capturer.capture(here)
    here["moments"]["a"] = optimizer.state[parameter]["momentum_buffer"]
    capture = capturer.capture(here)
    assert len(walks) == 1
    check(capture, here)
    assert list(capture.layout.entries) == ["moments/first", "moments/a"]


def test_memory_for_a_state_that_grows_is_not_made_anew_each_time():
    slot = Slot(0)
    layouts = [plan_layout({"a": torch.empty(size << 20, dtype=torch.uint8)}) for size in (40, 41, 42, 43)]
    assert slot.reserve(layouts[0].size) and slot.arena.size == layouts[0].size
    assert slot.reserve(layouts[1].size)
    arena = slot.arena
    for layout in layouts[1:3]:
        assert slot.reserve(layout.size) and slot.arena is arena
        slot.lay_out(layout)
    slot.lay_out(layouts[2])  # it has stopped growing
    assert slot.has_room(layouts[2].size) and not slot.has_room(layouts[3].size)
    slot.drop()


class Interrupted:
    """An object of a state during whose capture a signal handler, or another thread, saves."""

    def __init__(self) -> None:
        self.work = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise NotImplementedError

    @property
    def __dict__(self):
        work, self.work = self.work, None
        if work is not None:
            work()
        return {}

    __slots__ = ("work",)


def test_save_that_interrupts_the_capture_of_a_grown_state_takes_no_tensor_of_it():
    pool, entry, captures = CapturerPool(), Interrupted(), []
    before = {"m": entry, "names": {"a": torch.ones(64)}}
    grown = {"m": entry, "names": {"a": torch.ones(64), "b": torch.ones(64)}}
    pool.capture(before)
    entry.work = lambda: captures.append(pool.capture(before))
    captures.append(pool.capture(grown))
    check(captures[0], before)
    check(captures[1], grown)
