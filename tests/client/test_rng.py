"""RngState: the generators go on where they were, and saving does not bring anything to life."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.training import through

from tierd.client.load import check_fit, load
from tierd.client.rng import RngState
from tierd.core.errors import StateMismatch


def draw():
    return (
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_every_generator_goes_on():
    draw()  # leaves a second normal number waiting in Python and NumPy
    state = {"rng": RngState()}
    restored = through(state)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    load(state, restored)
    assert draw() == expected


def test_another_bit_generator_of_numpy():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = {"rng": RngState()}
        restored = through(state)
        expected = np.random.rand(4).tolist()
        load(state, restored)
        assert np.random.rand(4).tolist() == expected
        np.random.set_bit_generator(np.random.MT19937(3))
        with pytest.raises(StateMismatch, match=r'state\["rng"\]: load_state_dict\(\) raised ValueError'):
            load(state, restored)
    finally:
        np.random.set_bit_generator(before)


@pytest.fixture
def two_devices(monkeypatch):
    """A process with two CUDA devices in use, as torch would show it."""
    states = [torch.arange(16, dtype=torch.uint8), torch.arange(16, 32, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in states])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda new: states.__setitem__(slice(None), new))
    return states


def test_every_cuda_device(two_devices):
    state = {"rng": RngState()}
    restored = through(state)
    saved = [device.clone() for device in two_devices]
    for device in two_devices:
        device.zero_()
    load(state, restored)
    assert all(torch.equal(a, b) for a, b in zip(two_devices, saved, strict=True))


def test_another_number_of_devices_names_both_and_sets_nothing(two_devices):
    state = {"rng": RngState()}
    restored = through(state)
    two_devices.pop()
    before = draw(), torch.get_rng_state()
    for act in (check_fit, load):
        with pytest.raises(StateMismatch) as caught:
            act(state, restored)
        assert str(caught.value) == 'state["rng"]: saved with 2 CUDA devices, this process sees 1'
    with pytest.raises(
        StateMismatch, match=r"^random number generators: saved with 2 CUDA devices, this process sees 1$"
    ):
        RngState().load_state_dict(restored["rng"])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_checkpoint_of_a_cpu_job_fits_a_cuda_job(two_devices, monkeypatch):
    with monkeypatch.context() as cpu:
        cpu.setattr(torch.cuda, "is_initialized", lambda: False)
        restored = through({"rng": RngState()})
    assert "cuda" not in restored["rng"]
    load({"rng": RngState()}, restored)


def test_saving_does_not_initialise_cuda(monkeypatch):
    def never(*args):
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", never)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", never)
    assert RngState().state_dict().keys() == {"python", "numpy", "torch"}


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None                      # import numpy now fails, as where it is not installed
import torch
from tierd.client import load, rng, state, tensorfile
flat = state.flatten({"rng": rng.RngState(), "t": torch.ones(2), "n": [1, None, "x"]})
layout = tensorfile.plan_layout(flat.tensors)
file = bytearray(layout.size)
tensorfile.copy_into(layout, flat.tensors, file)
back = state.unflatten(flat.tree, file)
assert back["n"] == [1, None, "x"] and "numpy" not in back["rng"]
load.load({"rng": rng.RngState(), "t": torch.zeros(2), "n": []}, back)
print(rng.RngState().misfit(back["rng"] | {"numpy": {}}))
try:
    state.unflatten(b'{"a": {"$npscalar": ["<f8", "AAAAAAAAAAA="]}}', file)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_numpy():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "saved with NumPy, which is not installed here"
    assert second.startswith("StateMismatch the state tree: import of numpy halted")
