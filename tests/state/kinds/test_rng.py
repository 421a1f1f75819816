"""RngState: the generators go on where they were, and saving does not bring anything to life."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.training import through

from tierd.core.errors import StateMismatch
from tierd.state.kinds.random_generators import RngState
from tierd.state.load_check import check_fit
from tierd.state.state_loading import load_restored


def draw():
    return (
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_every_generator_continues():
    draw()  # leaves a second normal number waiting in Python and NumPy
    state = {"rng": RngState()}
    restored = through(state)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    load_restored(state, restored)
    assert draw() == expected


def test_another_bit_generator_of_numpy():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = {"rng": RngState()}
        restored = through(state)
        expected = np.random.rand(4).tolist()
        load_restored(state, restored)
        assert np.random.rand(4).tolist() == expected
        np.random.set_bit_generator(np.random.MT19937(3))
        with pytest.raises(StateMismatch, match=r'state\["rng"\]: load_state_dict\(\) raised ValueError'):
            load_restored(state, restored)
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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: len(states) - 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new: states.__setitem__(-1, new))
    return states


def bytes_of(states):
    return [states.tolist()[0] for states in states]


@pytest.mark.parametrize(
    ("sees", "current", "expected"),
    [([0, 0], 1, [0, 16]), ([0], 0, [16]), ([7, 8, 9], 2, [7, 8, 16]), ([0, 16], 0, [16, 16])],
    ids=["the same devices", "fewer devices", "more devices", "a device of another number"],
)
def test_current_device_gets_the_generator_of_the_saved_current_device(
    two_devices, monkeypatch, sees, current, expected
):
    """Where the number of devices differs, any other device has another state, or none."""
    state = {"rng": RngState()}
    restored = through(state)
    assert restored["rng"]["cuda_device"] == 1
    two_devices[:] = [torch.full((16,), number, dtype=torch.uint8) for number in sees]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new: two_devices.__setitem__(current, new))
    load_restored(state, restored)
    assert bytes_of(two_devices) == expected


def test_a_process_without_devices_leaves_them_out_and_says_so(two_devices, monkeypatch, caplog):
    state = {"rng": RngState()}
    restored = through(state)
    expected = torch.rand(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    two_devices.clear()
    load_restored(state, restored)
    assert torch.equal(torch.rand(3), expected) and not two_devices
    assert "generators of 2 CUDA devices are left out" in caplog.text


@pytest.mark.parametrize(
    ("visible", "refused"), [(0, False), (1, True), (2, False), (3, True)], ids=["none", "one", "both", "more"]
)
def test_an_older_checkpoint_does_not_say_which_device_was_in_use(two_devices, visible, refused):
    state = {"rng": RngState()}
    restored = through(state)
    del restored["rng"]["cuda_device"]
    two_devices[:] = [torch.full((16,), 7, dtype=torch.uint8)] * visible
    before = torch.get_rng_state()
    if not refused:
        load_restored(state, restored)
        assert bytes_of(two_devices) == ([0, 16] if visible == 2 else [])
        return
    for act in (check_fit, load_restored):
        with pytest.raises(StateMismatch) as caught:
            act(state, restored)
        assert f'state["rng"]: saved with 2 CUDA devices, this process sees {visible}, and the' in str(caught.value)
    with pytest.raises(StateMismatch, match=r"^random number generators: saved with 2 CUDA devices"):
        RngState().load_state_dict(restored["rng"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("current", [2, -1, True, "0"])
def test_a_device_number_that_is_none_is_refused(two_devices, current):
    state = {"rng": RngState()}
    restored = through(state)
    restored["rng"]["cuda_device"] = current
    with pytest.raises(StateMismatch, match="not what RngState gives"):
        load_restored(state, restored)


def test_a_checkpoint_of_a_cpu_job_fits_a_cuda_job(two_devices, monkeypatch):
    with monkeypatch.context() as cpu:
        cpu.setattr(torch.cuda, "is_initialized", lambda: False)
        restored = through({"rng": RngState()})
    assert "cuda" not in restored["rng"]
    load_restored({"rng": RngState()}, restored)


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
from tierd.state.capturer import Capturer
from tierd.state.kinds.random_generators import RngState
from tierd.state.state_loading import load_restored, unflatten
from tierd.state.tensor_file import file_pieces
capture = Capturer().capture({"rng": RngState(), "t": torch.ones(2), "n": [1, None, "x"]})
file = bytearray().join(file_pieces(capture.layout, capture.tensors, memoryview(bytearray(1 << 20))))
back = unflatten(capture.tree(), file)
assert back["n"] == [1, None, "x"] and "numpy" not in back["rng"]
load_restored({"rng": RngState(), "t": torch.zeros(2), "n": []}, back)
print(RngState().misfit(back["rng"] | {"numpy": {}}))
try:
    unflatten(b'{"a": {"$npscalar": ["<f8", "AAAAAAAAAAA="]}}', file)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_numpy():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "saved with NumPy, which is not installed here"
    assert second.startswith("StateMismatch the state tree: import of numpy halted")
