"""Values in variables that a user wrote, and which of them are left out because nothing but a log has them."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tierd.check.live_objects import LiveObjects, find_live_objects, module_attribute_leaves, unsaved_leaves
from tierd.check.source_analysis import log_only_names
from tierd.check.user_code import CreationSites, user_modules
from tierd.check.user_values import user_object_leaves, variable_leaves

LOOP = """
import argparse
import itertools
import numpy
import torch

class Recurrent(torch.nn.Module):
    carried = None
    def __init__(self):
        super().__init__()
        self.carried = None

recurrent, options = Recurrent(), argparse.Namespace(unset=1.0)
options.limit = 1.0

BETA, WINDOW, WEIGHTS, numbers = 0.5, {"size": 8}, numpy.ones(3), itertools.count(4)

class Config:
    temperature = 2.0

class Critic:
    __slots__ = ("baseline",)
    def __init__(self):
        self.baseline = 1.5

class Loop:
    def __init__(self):
        self.logged_total = self.factor = 0.0
        self.logged_losses = []
        self.logged_calls = 0
    def step(self, loss, logger):
        self.logged_total += loss.item()
        self.logged_losses.append(loss.item())
        logged_mean = self.logged_total / len(self.logged_losses)
        print(f"{logged_mean}")
        logger.add_scalar("loss", logged_mean, len(self.logged_losses))
        self.logged_calls += 1
        if self.logged_calls % 5 == 0:
            print("five more")
        self.factor = 0.9 * self.factor + loss
        return loss * self.factor * BETA * WINDOW["size"] * Config.temperature * WEIGHTS.sum() * next(numbers)

def curriculum():
    level = 3
    def harder(more):
        nonlocal level
        level += more
        return level
    return harder

def smoothed(value, history=[]):
    history.append(value)
    return sum(history)

def warm():
    warm.calls += 1
    return warm.calls
warm.calls = 7

critic, loop, harder = Critic(), Loop(), curriculum()
"""


@pytest.fixture(autouse=True)
def no_modules_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as the user's, and there may be many."""
    for module in list(user_modules()):
        if module.__name__ != __name__:
            monkeypatch.delitem(sys.modules, module.__name__)


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "users_loop.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("users_loop")
    del sys.modules["users_loop"]


def variables(state: dict[str, object] | None = None) -> dict[str, str]:
    return {path: leaf.text for path, leaf in variable_leaves(find_live_objects().functions, state, ()).items()}


def test_values_of_modules_classes_closures_and_defaults_are_read(users):
    found = variables()
    expected = {
        "users_loop.BETA": "0.5",
        'users_loop.WINDOW["size"]': "8",
        "users_loop.numbers": "count(4)",
        "Config.temperature": "2.0",
        "harder() level": "3",
        "warm.calls": "7",
        "smoothed() history": "0 items",
    }
    assert {path: found.get(path) for path in expected} == expected
    assert "users_loop.WEIGHTS" in found and users.numbers.__next__() == 4  # reading it drew nothing


def test_slots_of_the_users_own_objects_are_read(users):
    assert user_object_leaves([users.critic], is_captured=True)["Critic.baseline"].text == "1.5"


def test_attributes_that_users_code_sets_of_a_librarys_object_are_read(users):
    vars(users.options).update(limit=2.0, unset=3.0)
    owned = find_live_objects().user_objects
    assert users.options in owned
    found = user_object_leaves([users.options], is_captured=True)
    assert {path: leaf.text for path, leaf in found.items()} == {"Namespace.limit": "2.0"}


def test_tensor_that_a_users_module_has_yet_to_set_is_read_as_none(users):
    places = CreationSites()

    def carried() -> str:
        found, _ = unsaved_leaves(places, LiveObjects([users.recurrent], []), {})
        return next(leaf.text for path, leaf in found.items() if path.endswith(".carried"))

    assert carried() == "None"
    users.recurrent.carried = torch.ones(2)
    assert carried() == "float32 (2,)"


def test_parameters_of_an_optimizer_that_no_module_has_are_counted():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def count() -> str:
        found = module_attribute_leaves(CreationSites(), LiveObjects([model, optimizer], []), True)
        return next(leaf.text for path, leaf in found.items() if path.endswith("its parameters that no module has"))

    assert count() == "0"
    model.load_state_dict({name: torch.zeros_like(one) for name, one in model.state_dict().items()}, assign=True)
    assert count() == "2"


def test_local_variables_of_a_running_function_are_read():
    baseline, phase, data = 0.25, "warm", itertools.count()
    found = variables()
    where = "test_local_variables_of_a_running_function_are_read()"
    assert (found[f"{where} baseline"], found[f"{where} phase"], found[f"{where} data"]) == (
        "0.25",
        "'warm'",
        "count(0)",
    )
    assert (baseline, phase, next(data)) == (0.25, "warm", 0)


def test_the_saved_state_and_large_tensors_are_left_out():
    state = {"step": 3, "inner": {"best": 1.0}}
    large = torch.empty(10_000_001, dtype=torch.uint8)
    assert not [path for path in variables(state) if " state" in path or " large" in path]
    assert large.numel()


def test_sums_that_only_a_log_has_are_left_out_and_those_that_training_uses_are_not(users):
    found = set(user_object_leaves([users.loop], is_captured=True))
    assert "Loop.factor" in found and not {"Loop.logged_total", "Loop.logged_losses"} & found
    assert {"logged_total", "logged_losses", "logged_mean", "logged_calls"} <= log_only_names() and not {
        "factor",
        "BETA",
        "level",
        "history",
    } & log_only_names()


@pytest.mark.parametrize(
    "use",
    [
        "optimizer.scale = total",  # an attribute of another object, which a library may read
        "loss = model(x, total)",
        "if total > 3: stop()",
        "rate = total / 2\nstep(rate)",
        "for one in total: step(one)",
        "groups[total] = 1",
        "report(total)",
        "groups[total].append(1)",
        "find(total).append(1)",
        "class A(Base):\n    def mean(self): return total\nprint(A().mean())",  # a library may call it
        "class A:\n    def mean(self): return total\nmean = A().mean()\nstep(mean)",
        "class A:\n    def state_dict(self): return total",
    ],
)
def test_a_name_counts_as_used_in_any_doubt(use, tmp_path, monkeypatch):
    (tmp_path / "users_use.py").write_text(
        f"def train(x):\n    total = 0\n    total += 1\n    {use.replace(chr(10), chr(10) + '    ')}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("users_use")
    try:
        assert "total" not in log_only_names()
    finally:
        del sys.modules["users_use"]


@pytest.mark.parametrize("read", ["meter.average", "meter.best()"])
def test_tensor_that_only_a_log_has_through_a_property_or_a_method_is_left_out(read, tmp_path, monkeypatch):
    (tmp_path / "users_meter.py").write_text(METER.replace("READ", read))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("users_meter")
    try:
        assert log_only_names() & {"total", "highest"} == {"total" if read == "meter.average" else "highest"}
    finally:
        del sys.modules["users_meter"]


METER = """
class Meter:
    def see(self, loss):
        self.total += loss
        self.highest = max(self.highest, loss)
    @property
    def average(self):
        return self.total / 3
    def best(self):
        return self.highest.item()
    def reset(self):
        self.total.zero_()

def train(meter, losses):
    for loss in losses:
        meter.see(loss)
        print(READ)
"""

HASHED = """
import torch
from tierd.check.user_code import CreationSites

places = CreationSites()
places.record_creations()

class Metric(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.names = ("total",)
    def __hash__(self):
        return hash(self.names)

number, place = places.creation_of(Metric())
assert number == 1, (number, place)
assert places.creation_of(object()) == (0, "")
"""


def test_module_whose_hash_needs_its_attributes_can_be_made_in_a_checked_loop(tmp_path):
    """As a metric of torchmetrics, whose hash fails until its constructor has ended."""
    (tmp_path / "hashed.py").write_text(HASHED)
    done = subprocess.run([sys.executable, str(tmp_path / "hashed.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
