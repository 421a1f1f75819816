"""A restore onto a device, on one that is none: copies run while more is read and verified, in any order that streams
and events allow, and nothing of the state changes before all of it was right."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from support.fakecuda import FakeCuda
from support.ranks import Group
from support.seeds import seeds

import tierd
from tierd.client.checkpointer import internals
from tierd.client.restoring import device_uploads, verified_chunks
from tierd.client.saving import device_copies, slots
from tierd.core.errors import CheckpointNotFound, StateMismatch
from tierd.spool.commit import write_part
from tierd.state import cuda
from tierd.state.kinds.stored_arrays import FEWEST

COUNT = 3 << 18  # elements of a tensor: three chunks
NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces of a size that tests can afford."""
    monkeypatch.setattr(write_part, "__defaults__", (1 << 20,))  # bytes of a chunk
    for module in (device_copies, slots, device_uploads):
        for name, size in {"COPY_PIECE_BYTES": 1 << 18, "SLICE": 1 << 20}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)


@pytest.fixture
def seeded(monkeypatch):
    """Gives a device of a seed, in the place of CUDA, and sees that it would have forgiven everything."""
    made = []

    def put(seed: int) -> FakeCuda:
        made.append(FakeCuda(seed))
        monkeypatch.setattr(cuda, "api", made[-1])
        return made[-1]

    yield put
    assert not any(device.faults for device in made)


def values(name: str, step: int = 1) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32) * (1 + NAMES.index(name)) + step


@pytest.fixture
def saved(spool):
    """Two checkpoints."""
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        for step in (1, 2):
            state = {name: values(name, step) for name in NAMES} | {"host": torch.full((10,), step), "step": step}
            checkpointer.save(step, state).wait()
    return spool


def blank(fake: FakeCuda) -> dict[str, object]:
    state = {name: fake.tensor(torch.zeros(COUNT)) for name in NAMES}
    return {**state, "host": torch.zeros(10, dtype=torch.int64), "step": 0}


def opened(spool, **options):
    return tierd.Checkpointer(spool.root, "run", to=[], **options)


def check(fake: FakeCuda, state: dict[str, object], step: int) -> None:
    assert state["step"] == step and bool((state["host"] == step).all())
    for name in NAMES:
        assert torch.equal(fake.read(state[name]), values(name, step)), name


def rot(spool, step: int, share: float) -> None:
    """Flip a byte of a checkpoint's tensor file."""
    (part,) = [one for one in spool.parts() if one.checkpoint.step == step]
    path = spool.path(part) / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_tensors_on_a_device_hold_the_saved_values_and_saves_continue_from_there(saved, seeded, seed):
    fake = seeded(seed)
    state = blank(fake)
    with opened(saved) as checkpointer:
        assert checkpointer.restore(state).step == 2
        assert fake.copied_late == 0
        check(fake, state, 2)
        for name in NAMES:
            fake.write(state[name], values(name, 3))
        state["host"].fill_(3)
        state["step"] = 3
        checkpointer.save(3, state).wait()
    found = {name: torch.zeros(COUNT) for name in NAMES}
    with opened(saved) as checkpointer:
        checkpointer.restore(found, only=NAMES)
    assert all(torch.equal(found[name], values(name, 3)) for name in NAMES)


def test_copies_run_while_more_is_read_and_verified(saved, fake, monkeypatch):
    """When the last chunk comes to be verified, most of the file has been copied, from pinned memory."""
    copied, pinned, real = [], [], device_uploads.DeviceUploads.copy_up_to

    def verified(self, end: int) -> None:
        copied.append((end, sum(fake.copied_bytes)))
        pinned.append(sum(fake.registered.values()))
        real(self, end)
        assert sum(fake.copied_bytes) <= end  # and nothing of what was not verified

    monkeypatch.setattr(device_uploads.DeviceUploads, "copy_up_to", verified)
    monkeypatch.setattr(verified_chunks, "HANDS", 0)  # chunks are verified in their order, so `end` grows by one chunk
    state = blank(fake)
    with opened(saved) as checkpointer:
        checkpointer.restore(state)
        end, before = copied[-1]
        assert len(copied) > 8 and before > 0.8 * end
        assert pinned[-1] >= before
    check(fake, state, 2)


def test_packed_values_hold_up_no_copies(spool, fake, monkeypatch):
    """Where tensors go is known before the values of packed runs have been read."""
    real = device_uploads.DeviceUploads.copy_up_to

    def verified(self, end: int) -> None:
        behind = bytes(self.arena.view[end:])
        self.arena.view[end:] = bytes(len(behind))  # as if it had not been read yet
        real(self, end)
        self.arena.view[end:] = behind

    monkeypatch.setattr(device_uploads.DeviceUploads, "copy_up_to", verified)
    monkeypatch.setattr(verified_chunks, "HANDS", 0)  # no thread writes into the arena meanwhile
    parameters = [torch.nn.Parameter(torch.full((600,), float(number))) for number in range(FEWEST)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    state = {"a": values("a"), "table": {f"key {n}": n for n in range(FEWEST)}, "optimizer": optimizer}
    with opened(spool) as checkpointer:
        checkpointer.save(1, state).wait()
        (part,) = spool.parts()
        tree = (spool.path(part) / "state.json").read_text()
        assert '"$map"' in tree and '"params":{"$values"' in tree
    live = [torch.nn.Parameter(fake.tensor(torch.zeros(600))) for _ in parameters]
    other = torch.optim.SGD(live, lr=0.1, momentum=0.9)
    blank = {"a": fake.tensor(torch.zeros(COUNT)), "table": {}, "optimizer": other}
    with opened(spool) as checkpointer:
        checkpointer.restore(blank)
    assert fake.copied_late == 0
    assert torch.equal(fake.read(blank["a"]), values("a")) and blank["table"] == state["table"]
    for parameter, saved in zip(live, parameters, strict=True):
        moment = other.state[parameter]["momentum_buffer"]
        assert torch.equal(fake.read(moment), optimizer.state[saved]["momentum_buffer"])


def test_the_host_does_not_wait_for_the_device_while_it_reads(saved, fake, monkeypatch):
    """A device that does nothing yet holds up neither the reading nor the verifying."""
    waits, real = [], device_uploads.DeviceUploads.copy_up_to
    monkeypatch.setattr(fake, "on_synchronize", lambda: (waits.append(True), fake.held.clear()))

    def verified(self, end: int) -> None:
        fake.held.set()
        real(self, end)
        assert not waits

    monkeypatch.setattr(device_uploads.DeviceUploads, "copy_up_to", verified)
    state = blank(fake)
    with opened(saved) as checkpointer:
        checkpointer.restore(state)
    assert waits
    check(fake, state, 2)


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_memory_that_training_freed_is_not_copied_to_before_training_is_done_with_it(saved, seeded, seed):
    fake = seeded(seed)
    state = blank(fake)
    for number in range(len(NAMES)):
        used = fake.tensor(torch.zeros(COUNT))
        for _ in range(9):
            fake.write(used, float(number))
        del used
    with opened(saved) as checkpointer:
        checkpointer.restore(state)
    check(fake, state, 2)


@pytest.mark.parametrize("seed", seeds(weight=2))
@pytest.mark.parametrize("share", [0.3, 0.97])
def test_corruption_detected_midway_changes_no_tensor_and_the_older_checkpoint_is_restored(saved, seeded, seed, share):
    fake = seeded(seed)
    rot(saved, 2, share)
    state = blank(fake)
    with opened(saved) as checkpointer:
        assert checkpointer.restore(state).step == 1
        check(fake, state, 1)
        assert fake.copied_late == 0


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_where_nothing_is_right_nothing_changes_and_no_copy_is_left(saved, seeded, seed):
    fake = seeded(seed)
    for step in (1, 2):
        rot(saved, step, 0.9)
    state = blank(fake)
    with opened(saved) as checkpointer:
        with pytest.raises(CheckpointNotFound):
            checkpointer.restore(state)
        assert not any(stream.ops for streams in fake._streams.values() for stream in streams if stream.name == "side")
    assert all(bool((fake.read(state[name]) == 0).all()) for name in NAMES)
    assert not fake.registered and len(fake.copied_bytes) > 4


def test_state_of_another_shape_changes_no_tensor(saved, fake):
    state = blank(fake) | {"c": fake.tensor(torch.zeros(COUNT - 1))}
    with opened(saved) as checkpointer, pytest.raises(StateMismatch, match="c"):
        checkpointer.restore(state)
    assert all(bool((fake.read(state[name]) == 0).all()) for name in NAMES)


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_where_pinning_is_refused_memory_is_pageable_and_the_state_is_right(saved, seeded, seed, caplog):
    fake = seeded(seed)
    fake.registers = lambda address: 801 if fake.tries > random.Random(seed).randrange(1, 8) else 0
    state = blank(fake)
    with caplog.at_level(logging.WARNING), opened(saved) as checkpointer:
        checkpointer.restore(state)
    check(fake, state, 2)
    assert "does not pin memory" in caplog.text


@pytest.mark.parametrize("room", [0, 5, 10])
def test_a_device_without_memory_beside_the_state_is_filled_from_the_host(saved, fake, room):
    state = blank(fake)
    fake.room = room << 20
    with opened(saved) as checkpointer:
        checkpointer.restore(state)
    assert fake.copied_late == (0 if room == 10 else len(NAMES))
    check(fake, state, 2)


@pytest.mark.parametrize("nth", range(2, 18))
def test_an_error_midway_is_raised_when_copies_have_ended(saved, fake, monkeypatch, nth):
    """Which copies were begun together with the one that fails depends on the pieces in which the file is read."""
    real, calls = fake.copy, []

    def copy(into, sources):
        calls.append(1)
        if len(calls) == nth:
            raise RuntimeError("the bus is on fire")
        real(into, sources)

    monkeypatch.setattr(fake, "copy", copy)
    state = blank(fake)
    with opened(saved) as checkpointer:
        with pytest.raises(RuntimeError, match="on fire"):
            checkpointer.restore(state)
        assert not any(stream.ops for streams in fake._streams.values() for stream in streams if stream.name == "side")


def test_a_predecessors_memory_is_copied_from_where_it_lies(spool, fake):
    """As the line to the daemon gives it; what is pinned for that is unpinned before saves use it."""
    state = {name: values(name) for name in NAMES} | {"host": torch.ones(10, dtype=torch.int64), "step": 1}
    into = blank(fake)
    with opened(spool) as checkpointer:
        save = checkpointer.save(1, state)
        save.wait()
        arena = internals(checkpointer).pipeline.slots[0].arena
        manifest = spool.manifest(save.part)
        files = {file.path: memoryview((spool.path(save.part) / file.path).read_bytes()) for file in manifest.files}
        (size,) = (file.size for file in manifest.files if file.path == "tensors.safetensors")
        files["tensors.safetensors"] = arena.view[:size]
        work = device_uploads.DeviceUploads(into, slots.device_of(into))
        work.check(arena, files, manifest)
        assert sum(fake.copied_bytes) == 4 * COUNT * len(NAMES)
        work.close()
        assert not fake.registered


def test_optimizers_state_is_put_on_its_parameters_device_as_torch_does_it(fake):
    parameter = torch.nn.Parameter(fake.tensor(torch.zeros(8)))
    other = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.Adam([parameter, other])
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8, dtype=torch.float64)}
    saved = {"state": {0: moments, 1: dict(moments)}, "param_groups": [{"params": [0, 1]}]}
    found = list(device_uploads.destinations({"optimizer": optimizer}, {"optimizer": saved}))
    assert [(id(tensor), str(where)) for tensor, where in found] == [(id(moments["exp_avg"]), "cuda:0")]
    assert list(device_uploads.destinations(optimizer, {"param_groups": []})) == []
    unread = torch.optim.Adam([{"params": [other]}, {"params": [parameter]}])
    second = torch.ones(8)
    packed = {"state": {0: moments, 1: {"exp_avg": second}}, "param_groups": [{"params": []}, {"params": []}]}
    assert [id(tensor) for tensor, _ in device_uploads.destinations(unread, packed)] == [id(second)]
    optimizer.param_groups[0]["capturable"] = True
    found = [id(tensor) for tensor, _ in device_uploads.destinations(optimizer, saved)]
    assert found == [id(moments["step"]), id(moments["exp_avg"])]


def test_own_share_of_a_divided_part_is_copied_while_more_is_read(spool, fake, monkeypatch):
    """The other shares follow, because they are read afterwards."""
    group = Group(2).install(monkeypatch)
    state = {"model": {name: values(name) for name in NAMES}, "host": torch.full((10,), 1), "step": 1}

    def saving(rank: int) -> None:
        with opened(spool, replicated=("model",)) as checkpointer:
            checkpointer.save(1, state).wait()

    assert group.run(saving) == [None, None]
    late, real = [], device_uploads.DeviceUploads.device_tensors
    monkeypatch.setattr(
        device_uploads.DeviceUploads,
        "device_tensors",
        lambda self, restored: late.append(real(self, restored)) or late[-1],
    )

    def restoring(rank: int) -> dict[str, object]:
        device = blank(fake) if rank == 0 else {name: torch.zeros(COUNT) for name in NAMES} | {"host": None, "step": 0}
        mine = {"model": {name: device[name] for name in NAMES}, "host": torch.zeros(10, dtype=torch.int64), "step": 0}
        with opened(spool) as checkpointer:
            assert checkpointer.restore(mine).step == 1
        return {**mine["model"], "host": mine["host"], "step": mine["step"]}

    first, second = group.run(restoring)
    check(fake, first, 1)
    assert all(torch.equal(second[name], values(name)) for name in NAMES)
    assert [len(tensors) for tensors in late] in ([1], [2]), "rank 0's own share, and nothing of rank 1"
