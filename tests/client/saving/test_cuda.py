"""Snapshots of state on a device: copied by a side stream, ordered by events, and no wait for the device as a whole.

All of this needs a GPU; `test_device_copies.py` has what a device that is none can show.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
from typing import Any

import pytest
import torch
from support.waiting import wait_until
from torch import nn
from torch.utils._pytree import tree_leaves

import tierd
from tierd.client.checkpointer import internals
from tierd.client.saving import save_pipeline, slots
from tierd.core.errors import SaveFailed, TornSnapshot
from tierd.state import cuda

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU on this machine: the CUDA path of the snapshot is untested here"
)

MOMENT = 50_000_000  # cycles of a device that has nothing to do: tens of milliseconds
WHILE = 2_000_000_000  # more than a second

OPTIMIZERS = {
    "foreach": lambda own: torch.optim.AdamW(own, 0.01),
    "fused": lambda own: torch.optim.AdamW(own, 0.01, fused=True),
    "capturable": lambda own: torch.optim.Adam(own, 0.01, capturable=True, amsgrad=True),
    "one by one": lambda own: torch.optim.SGD(own, 0.01, momentum=0.9, foreach=False),
}


def job(device: Any = "cuda", optimizer: str = "foreach", width: int = 512) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, width))
    model.to(device)
    return {"model": model, "optimizer": OPTIMIZERS[optimizer](model.parameters()), "rng": tierd.RngState(), "count": 0}


def learn(state: dict[str, Any]) -> None:
    """Forward and backward, enqueued and not waited for."""
    first = next(state["model"].parameters())
    state["model"](torch.randn(64, first.shape[1], device=first.device)).square().mean().backward()


def step(state: dict[str, Any]) -> None:
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["count"] += 1


def frozen(state: dict[str, Any]) -> list[Any]:
    """A synchronous copy of all that the state holds, on the host."""
    said = [value.state_dict() if hasattr(value, "state_dict") else value for value in state.values()]
    return [leaf.cpu() if torch.is_tensor(leaf) else leaf for leaf in tree_leaves(copy.deepcopy(said))]


def loaded(spool, number: int, keys) -> list[Any]:
    found = dict.fromkeys(keys)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        assert checkpointer.restore(found, step=number).step == number
    return tree_leaves(list(found.values()))


def check(expected: list[Any], found: list[Any]) -> None:
    """Whether they are the same to the last bit."""
    assert len(expected) == len(found)
    for at, (mine, other) in enumerate(zip(expected, found, strict=True)):
        if not torch.is_tensor(mine):
            assert repr(mine) == repr(other), f"value {at}"
            continue
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape), f"tensor {at}"
        bits = [one.cpu().contiguous().flatten().view(torch.uint8) for one in (mine, other) if one.numel()]
        assert not bits or torch.equal(*bits), f"tensor {at} is torn"


def hold(device: Any = "cuda", cycles: int = MOMENT) -> None:
    """Have the stream that copies do something else first: what training enqueues now overtakes the copy."""
    with torch.cuda.stream(cuda.api.side_stream(torch.zeros(0, device=device).device)):
        torch.cuda._sleep(cycles)


def busy(cycles: int) -> torch.cuda.Event:
    """Have the stream that trains do something long; the event that says that it is over."""
    torch.cuda._sleep(cycles)
    over = torch.cuda.Event()
    over.record()
    return over


@pytest.fixture
def warm(local):
    """A training whose first saves, which make the arena and pin it, are over."""
    state = job()
    local.attach(state["optimizer"])
    for number in range(2):
        learn(state), step(state)
        local.save(number, state).wait(timeout=60)
    slot = internals(local).pipeline.slots[0]
    wait_until(lambda: slot.pinned >= slot.arena.size)
    return state


# -- on a device ------------------------------------------------------------------------------------------------------


@gpu
def test_every_kind_of_tensor_is_copied_to_the_bit(local, spool):
    noise = torch.Generator("cuda").manual_seed(3)
    real = torch.randn(257, 129, device="cuda", generator=noise)
    state = {
        "float": real,
        "double": real.double(),
        "half": real.half(),
        "bfloat": real.bfloat16(),
        "eight": real.to(torch.float8_e4m3fn),
        "complex": torch.complex(real, real + 1),
        "long": (real * 1000).long(),
        "bool": real > 0,
        "turned": torch.randn(64, 33, device="cuda").t(),
        "strided": torch.randn(500, device="cuda")[1::3],
        "expanded": torch.randn(1, 9, device="cuda").expand(4, 9),
        "scalar": torch.tensor(1.5, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "nan": torch.full((7,), float("nan"), device="cuda"),
        "host": torch.randn(100),
    }
    expected = [tensor.cpu().clone() for tensor in state.values()]  # a copy of the one on the host, too
    hold()
    save = local.save(1, state)
    for tensor in state.values():
        with contextlib.suppress(RuntimeError):  # an expanded one cannot be written to
            tensor.zero_()
    save.wait(timeout=60)
    check(expected, loaded(spool, 1, state))


@gpu
@pytest.mark.parametrize("attached", [True, False], ids=["overlapped", "blocking"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_is_the_state_at_the_call_of_save(spool, optimizer, attached):
    """The copy is held up on the device; buffers, gradients, parameters and moments change as soon as they may."""
    state, references = job(optimizer=optimizer), {}
    with tierd.Checkpointer(spool.root, "run", to=[], slots=2) as checkpointer:
        if attached:
            checkpointer.attach(state["optimizer"])
        for number in range(1, 9):
            learn(state)
            references[number] = frozen(state)
            hold()
            checkpointer.save(number, state)
            learn(state)  # gradients add up, buffers move
            if number % 3:
                step(state)
        assert checkpointer.stats.failed == 0
    assert checkpointer.stats.failed == 0
    for number, reference in references.items():
        check(reference, loaded(spool, number, state))


@gpu
def test_an_overlapped_save_does_not_wait_for_the_device(local, spool, warm):
    """It returns while the device has not even begun to copy, and what is enqueued behind it runs."""
    learn(warm)
    reference = frozen(warm)
    over = busy(WHILE)
    save = local.save(2, warm)
    assert not over.query(), "save returned only when the device had nothing left to do"
    learn(warm)
    step(warm)
    assert not over.query(), "the step waited on the host: it is the device that should"
    save.wait(timeout=60)
    check(reference, loaded(spool, 2, warm))


@gpu
def test_nothing_waits_for_the_device_as_a_whole(local, spool, warm, monkeypatch):
    def refuse(*_):
        raise AssertionError("a device-wide synchronise")

    learn(warm)
    reference = frozen(warm)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", refuse)
        patch.setattr(torch.accelerator, "synchronize", refuse)
        local.save(2, warm).wait(timeout=60)
        blocking = {"model": nn.Linear(9, 9).cuda()}
        with tierd.Checkpointer(spool.root, "other", to=[]) as other:
            other.save(1, blocking).wait(timeout=60)
    check(reference, loaded(spool, 2, warm))


@gpu
def test_the_arena_is_pinned_as_long_as_it_is_there(local, spool, warm):
    slot = internals(local).pipeline.slots[0]
    arena = torch.frombuffer(slot.arena.view, dtype=torch.uint8)
    assert slot.pinned == local.stats.pinned_bytes == arena.nbytes and arena.is_pinned()
    local.close()
    assert slot.pinned == local.stats.pinned_bytes == 0 and not arena.is_pinned()


@gpu
@pytest.mark.parametrize("bounded", [False, True], ids=["arena", "streamed"])
@pytest.mark.parametrize("attached", [True, False], ids=["overlapped", "blocking"])
def test_a_training_on_a_stream_of_its_own(local, spool, monkeypatch, attached, bounded):
    """What that stream has still to do is part of the state."""
    if bounded:
        monkeypatch.setattr(slots, "available", lambda: 0)
    state = job()
    if attached:
        local.attach(state["optimizer"])
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        learn(state), step(state)
        learn(state)
        torch.cuda._sleep(MOMENT)
        step(state)
        after_all = copy.deepcopy([state["model"].state_dict(), state["optimizer"].state_dict()])
        rng, count = copy.deepcopy(state["rng"].state_dict()), state["count"]
        save = local.save(1, state)
        learn(state), step(state)
    save.wait(timeout=60)
    own.synchronize()
    reference = tree_leaves([*after_all, rng, count])
    check([leaf.cpu() if torch.is_tensor(leaf) else leaf for leaf in reference], loaded(spool, 1, state))


@gpu
def test_a_state_on_host_and_device(local, spool):
    state = {"here": job("cpu"), "there": job("cuda"), "grads": {}}
    for one in (state["here"], state["there"]):
        learn(one), step(one), learn(one)
    local.attach(state["here"]["optimizer"], state["there"]["optimizer"])
    state["grads"] = {name: one.grad for name, one in state["there"]["model"].named_parameters()}
    said = {key: dict(value) for key, value in state.items()}
    for key in ("here", "there"):
        said[key] = {name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in state[key].items()}
    leaves = tree_leaves(list(copy.deepcopy(said).values()))
    reference = [leaf.cpu() if torch.is_tensor(leaf) else leaf for leaf in leaves]
    hold()
    save = local.save(1, state)
    for one in (state["there"], state["here"]):
        learn(one), step(one)
    save.wait(timeout=60)
    check(reference, loaded(spool, 1, state))


@gpu
def test_a_write_while_the_device_copies_fails_the_save(local, spool, warm):
    """The host is long past the copy when it enqueues the write; the device does the write first."""
    hold(cycles=WHILE // 4)
    save = local.save(2, warm)
    with torch.no_grad():
        warm["model"][0].weight.clamp_(-0.001, 0.001)
    with pytest.raises(SaveFailed, match="was changed") as failed:
        save.wait(timeout=60)
    assert isinstance(failed.value.__cause__, TornSnapshot)
    learn(warm), step(warm)
    reference = frozen(warm)
    local.save(2, warm).wait(timeout=60)
    check(reference, loaded(spool, 2, warm))


@gpu
def test_a_moving_average_on_a_stream_of_its_own(local, spool, warm):
    """What that stream has still to do is part of the state, and what it does next waits for the copy."""
    own, average = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
    for number in (2, 3):
        with torch.cuda.stream(own):
            torch.cuda._sleep(MOMENT)
            average.fill_(number)
        save = local.save(number, warm | {"average": average})
        with torch.cuda.stream(own):
            average.fill_(99)
        learn(warm), step(warm)
        save.wait(timeout=60)
        found = dict.fromkeys([*warm, "average"])
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            checkpointer.restore(found, step=number)
        assert bool((found["average"] == number).all())


@gpu
def test_a_refused_registration_leaves_no_error_for_the_next_kernel():
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    device, api = torch.device("cuda", torch.cuda.current_device()), cuda.Cuda()
    at = -(-memory.data_ptr() // 4096) * 4096
    assert api.register(at, 1 << 16, device) == 0
    assert api.register(at, 1 << 16, device) != 0, "it is registered already"
    torch.ones(8, 8, device="cuda").t().contiguous()
    api.unregister(at, device)
    api.unregister(at, device)
    torch.ones(8, 8, device="cuda").t().contiguous()


@gpu
def test_device_has_an_address_on_the_bus():
    address = cuda.api.pci_address(torch.device("cuda", torch.cuda.current_device()))
    if address is None:
        pytest.skip(f"torch {torch.__version__} does not say where on the bus a device is: arenas lie on any NUMA node")
    assert (slots.SYSFS / "bus/pci/devices" / address).is_dir()


@gpu
def test_every_stream_of_torch_is_known():
    device = torch.device("cuda", torch.cuda.current_device())
    known = {stream.cuda_stream for stream in cuda.Cuda().streams(device)}
    for priority in (0, -1):
        assert all(torch.cuda.Stream(priority=priority).cuda_stream in known for _ in range(100))
    assert torch.cuda.default_stream().cuda_stream in known


@gpu
def test_slices_that_are_pinned_side_by_side_are_copied_to_the_bit(local, spool):
    """Tensors that lie in several slices, some of which are not pinned yet when the first save comes."""
    state = {"large": torch.randn(50_000_001, device="cuda"), "turned": torch.randn(5000, 3001, device="cuda").t()}
    state |= {f"small {number}": torch.randn(number, device="cuda") for number in range(3000)}
    expected = [tensor.cpu() for tensor in state.values()]
    local.restore(state)
    for number in range(3):
        local.save(number, state).wait(timeout=60)
        check(expected, loaded(spool, number, state))


@gpu
def test_two_optimizers_on_two_streams(local, spool, warm):
    """The first one's gate is passed on the host; the second one's stream has to wait as well."""
    other = job()
    state = {"one": warm["model"], "other": other["model"]}
    local.attach(other["optimizer"])
    learn(warm), learn(other)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    reference = frozen(state)
    hold()
    save = local.save(2, state)
    for one, stream in zip((warm, other), streams, strict=True):
        with torch.cuda.stream(stream):
            step(one)
    save.wait(timeout=60)
    torch.cuda.synchronize()
    check(reference, loaded(spool, 2, state))


@gpu
def test_tensor_made_for_a_save_is_freed_while_it_is_persisted(local, monkeypatch, warm):
    go, real = threading.Event(), save_pipeline.write_part
    monkeypatch.setattr(save_pipeline, "write_part", lambda *a: go.wait(200) and real(*a))
    before = torch.cuda.memory_allocated()
    save = local.save(2, {"whole": torch.ones(1 << 26, device="cuda")})
    wait_until(lambda: torch.cuda.memory_allocated() - before <= 1 << 20)
    assert not save.done()
    go.set()
    save.wait(timeout=60)


@gpu
def test_a_checkpointer_that_nobody_closed_leaves_nothing_registered(spool):
    for number in range(4):
        checkpointer = tierd.Checkpointer(spool.root, "run", to=[])
        tensor = torch.full((16 << 20,), float(number), device="cuda")
        checkpointer.save(number, {"a": tensor}).wait(timeout=60)
        wait_until(lambda made=checkpointer: made.stats.pinned_bytes)
        del checkpointer
        gc.collect()
        time.sleep(0.5)
        assert bool((loaded(spool, number, ["a"])[0] == number).all())
