"""Snapshots of state on a device, on one that is none: it runs what it was given in any order that streams and events
allow, and reuses memory at once. `test_cuda.py` has what needs a real one."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
import weakref

import pytest
import torch
from support.fakecuda import FakeCuda
from support.seeds import seeds
from support.waiting import wait_until
from torch.distributed import checkpoint as dcp
from torch.multiprocessing.reductions import StorageWeakRef

import tierd
import tierd.dcp
from tierd.client.checkpointer import internals
from tierd.client.saving import device_copies, save_pipeline, slots
from tierd.client.saving.device_copies import split_copy
from tierd.client.saving.slots import Slot
from tierd.client.saving.snapshot import Snapshot
from tierd.client.saving.write_sampling import TensorSample
from tierd.core.errors import SaveFailed
from tierd.spool.arena import Arena
from tierd.state import cuda
from tierd.state.capturer import Capturer


def values(number: float, size: int = 5000) -> torch.Tensor:
    """More than is compared byte by byte: a handle on the host does not hold what lies on the device."""
    return torch.full((size,), float(number))


class Optimizer(torch.optim.Optimizer):
    """Adds one to each of its parameters, on the stream that is current."""

    def __init__(self, device, parameters) -> None:
        super().__init__(parameters, {})
        self.device, self.count = device, 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.device.write(parameter, values(self.count, parameter.numel()))


class Job:
    """Parameters that an attached optimizer moves, a buffer, and a moving average that nobody is told of."""

    def __init__(self, fake: FakeCuda, index: int = 0) -> None:
        self.fake = fake
        self.parameters = [torch.nn.Parameter(fake.tensor(values(0), index)) for _ in range(3)]
        self.optimizer = Optimizer(fake, self.parameters)
        self.buffer, self.average = fake.tensor(values(0), index), fake.tensor(values(0), index)
        self.state = {"parameters": self.parameters, "buffer": self.buffer, "average": self.average}

    def step(self) -> None:
        self.optimizer.step()
        self.fake.write(self.buffer, values(self.optimizer.count))


def loaded(spool, number: int):
    """The checkpoint of a step, on the host: its parameters, buffer and average."""
    found = {"parameters": None, "buffer": None, "average": None}
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        assert checkpointer.restore(found, step=number).step == number
    return [*found["parameters"], found["buffer"], found["average"]]


def holds(tensors, number: float) -> bool:
    return all(bool((tensor == number).all()) for tensor in tensors)


@pytest.fixture
def seeded(monkeypatch):
    """Gives a device of a seed, in the place of CUDA."""

    def put(seed: int) -> FakeCuda:
        monkeypatch.setattr(cuda, "api", FakeCuda(seed))
        return cuda.api

    return put


def pinned(checkpointer, size: int = 1) -> None:
    """Wait until so many bytes are pinned."""
    wait_until(lambda: checkpointer.stats.pinned_bytes >= size)


def ready(checkpointer, state) -> None:
    """Have all its memory pinned: copies are then the device's, and the host goes on."""
    size = slots.estimate(state)
    internals(checkpointer).pipeline.reserve(size, slots.device_of(state))
    pinned(checkpointer, size * len(internals(checkpointer).pipeline.slots))


def save_and_step_apart(checkpointer, fake: FakeCuda, jobs: list[Job], state) -> None:
    """Save the steps 1 to 3, each followed by a step of every job on a stream of its own."""
    ready(checkpointer, state)
    checkpointer.attach(*(job.optimizer for job in jobs))
    for number in range(1, 4):
        checkpointer.save(number, state)
        for place, job in enumerate(jobs):
            with fake.on(fake.stream(place)):
                job.optimizer.step()


# -- in any order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attached", [True, False], ids=["overlapped", "blocking"])
@pytest.mark.parametrize("seed", seeds(weight=2))
def test_a_checkpoint_is_the_state_at_the_call_of_save(spool, seeded, seed, attached):
    fake = seeded(seed)
    job = Job(fake)
    with tierd.Checkpointer(spool.root, "run", to=[], slots=2) as checkpointer:
        ready(checkpointer, job.state)
        if attached:
            checkpointer.attach(job.optimizer)
        for number in range(1, 6):
            job.step()
            fake.write(job.average, values(number))
            checkpointer.save(number, job.state)
            if number % 2:
                job.step()
                job.optimizer.count -= 1
    assert not fake.faults and checkpointer.stats.failed == 0
    for number in range(1, 6):
        assert holds(loaded(spool, number), number), number


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("attached", [True, False], ids=["overlapped", "blocking"])
@pytest.mark.parametrize("seed", seeds(weight=2))
def test_an_async_save_of_dcp_is_the_state_at_its_call(spool, seeded, seed, attached):
    fake = seeded(seed)
    job = Job(fake)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        if attached:
            checkpointer.attach(job.optimizer)
        for number in range(1, 5):
            job.step()
            fake.write(job.average, values(number))
            pending = dcp.async_save(job.state, storage_writer=tierd.dcp.StorageWriter(checkpointer, number))
            job.step()
            job.optimizer.count -= 1
            pending.result(60)
        assert not fake.faults
        for number in range(1, 5):
            found = [values(0) for _ in range(5)]
            reader = tierd.dcp.StorageReader(checkpointer, step=number)
            state = {"parameters": found[:3], "buffer": found[3], "average": found[4]}
            dcp.load(state, storage_reader=reader)
            reader.close()
            assert holds(found, number), number


@pytest.mark.parametrize("attached", [True, False], ids=["overlapped", "blocking"])
@pytest.mark.parametrize("seed", seeds(weight=2))
def test_tensor_that_another_stream_still_writes_is_part_of_the_state(spool, seeded, seed, attached):
    """A moving average on a stream of its own, in both directions: before a save, and right behind it."""
    fake = seeded(seed)
    job, own = Job(fake), fake.stream(1)
    fake.finish()
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        ready(checkpointer, job.state)
        if attached:
            checkpointer.attach(job.optimizer)
        for number in range(1, 4):
            job.step()
            with fake.on(own):
                fake.write(job.average, values(number))
            checkpointer.save(number, job.state)
            with fake.on(own):
                fake.write(job.average, values(99))
    assert not fake.faults
    for number in range(1, 4):
        assert holds(loaded(spool, number), number), number


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_each_optimizers_stream_waits_for_the_copy(spool, seeded, seed):
    """The first one's gate confirms the snapshot; the second one steps on a stream that knows nothing of it."""
    fake = seeded(seed)
    jobs = [Job(fake), Job(fake)]
    both = {key: jobs[0].state[key] for key in ("buffer", "average")}
    both["parameters"] = [*jobs[0].parameters, *jobs[1].parameters]
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        save_and_step_apart(checkpointer, fake, jobs, both)
    assert not fake.faults and checkpointer.stats.failed == 0
    for number in range(1, 4):
        assert holds(loaded(spool, number)[:6], number - 1), number


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_each_optimizers_stream_waits_for_the_reads_that_confirm(spool, seeded, seed, monkeypatch):
    """They are on the stream of the optimizer that steps first, and the second one's step would look like a mixture."""
    fake = seeded(seed)
    jobs, seen = [Job(fake), Job(fake)], []

    def compare(sample, live, copies, stream):
        expected = len(seen) + 1
        with fake.on(stream(fake.device_of(jobs[1].parameters[0]))):
            fake.look(jobs[1].parameters[0], seen)
        return lambda: fake.run_until(lambda: len(seen) == expected) or []

    monkeypatch.setattr(TensorSample, "compare", compare)
    both = {"parameters": [*jobs[0].parameters, *jobs[1].parameters]}
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        save_and_step_apart(checkpointer, fake, jobs, both)
    assert checkpointer.stats.failed == 0
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_memory_is_freed_when_its_copy_has_ended_and_not_before(spool, seeded, seed, monkeypatch):
    """A tensor that is made for one save, such as a whole parameter out of shards. What frees it gives its memory to
    the next at once."""
    fake = seeded(seed)
    go, real = threading.Event(), save_pipeline.write_part
    monkeypatch.setattr(save_pipeline, "write_part", lambda *a: go.wait(200) and real(*a))
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        whole = fake.tensor(values(1))
        ready(checkpointer, {"buffer": whole})
        gone = weakref.ref(whole)
        save = checkpointer.save(1, {"parameters": [], "buffer": whole, "average": whole})
        del whole
        wait_until(lambda: gone() is None)  # and not kept while its bytes are written to a disk
        other = fake.tensor(values(2))
        assert not save.done()
        go.set()
    assert holds(loaded(spool, 1), 1) and holds([fake.read(other)], 2)


def test_late_tensors_are_freed_as_well(spool, fake, monkeypatch):
    go, real = threading.Event(), save_pipeline.write_part
    monkeypatch.setattr(save_pipeline, "write_part", lambda *a: go.wait(200) and real(*a))
    job = Job(fake)
    gone = [StorageWeakRef(tensor.untyped_storage()) for tensor in (job.buffer, job.parameters[0])]
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.attach(job.optimizer)
        save = checkpointer.save(1, job.state)
        job.step()
        internals(checkpointer).gate.detach()
        del job
        wait_until(lambda: gc.collect() >= 0 and all(one.expired() for one in gone))
        assert not save.done()
        go.set()
    assert holds(loaded(spool, 1), 0)


# -- the order of things ----------------------------------------------------------------------------------------------


def test_an_overlapped_save_does_not_wait_for_the_device(spool, fake):
    """Neither does what is enqueued behind it, nor the step: it is the device that waits."""
    job = Job(fake)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.attach(job.optimizer)
        ready(checkpointer, job.state)
        job.step()
        fake.finish()
        fake.held.set()
        save = checkpointer.save(2, job.state)
        job.step()
        assert not save.done()
        fake.held.clear()
        save.wait(timeout=60)
    assert holds(loaded(spool, 2)[:4], 1)


def test_training_does_not_wait_on_the_device_for_tensors_that_are_copied_late(spool, fake, monkeypatch):
    """Also where nothing is copied before `save` returns: only a step waits."""
    job = Job(fake)
    state = {"parameters": job.parameters, "buffer": 0, "average": 0}
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        ready(checkpointer, state)
        checkpointer.attach(job.optimizer)
        fake.finish()
        fake.held.set()
        real = fake.copy
        begun = threading.Event()
        fake.copy = lambda *pairs: (real(*pairs), begun.set())
        wait = Snapshot.wait
        monkeypatch.setattr(Snapshot, "wait", lambda taken: (begun.wait(60), time.sleep(0.1), wait(taken)))
        save = checkpointer.save(1, state)
        fake.write(job.buffer, values(5))
        fake.run_until(lambda: not fake.current_stream(torch.device("cuda", 0)).ops)
        assert not save.done()
        fake.held.clear()
        job.step()
        save.wait(timeout=60)
        job.step()
        assert not internals(checkpointer).gate._on_devices


def test_write_while_the_device_copies_is_detected(spool, fake, local):
    """The host has enqueued the copy and waits for the device: it is not over yet."""
    job, reached, written = Job(fake), threading.Event(), threading.Event()
    local.attach(job.optimizer)
    fake.on_synchronize = lambda: (reached.set(), written.wait(60))
    save = local.save(1, job.state)
    assert reached.wait(60)
    with torch.no_grad():
        job.parameters[0].clamp_(-0.001, 0.001)
    written.set()
    with pytest.raises(SaveFailed, match="was changed"):
        save.wait(timeout=60)
    assert not spool.parts()


def test_a_slot_is_free_only_when_the_device_is_done_with_it(fake, local):
    """Also where a copy could not be begun behind others that were: the device may still write into the arena."""
    job = Job(fake)
    ready(local, job.state)
    real, begun = fake.copy, []

    def fails(into, sources):
        real(into[:1], sources[:1])
        begun.append(fake.side_stream(torch.device("cuda", 0)))
        raise torch.OutOfMemoryError("no memory for what is not contiguous")

    fake.copy = fails
    fake.on_synchronize = lambda: begun.append("waited")
    with pytest.raises(SaveFailed, match="no memory"):
        local.save(2, job.state).wait(timeout=60)
    assert begun[1:] == ["waited"] and not begun[0].ops
    fake.copy = real
    job.step()
    local.save(3, job.state).wait(timeout=60)


def test_the_thread_that_copies_makes_no_context_on_another_device(spool, fake):
    """A thread begins with device 0, which is another rank's."""
    fake.enter(torch.device("cuda", 1))
    job = Job(fake, index=1)
    checkpointer = tierd.Checkpointer(spool.root, "run", to=[])
    checkpointer.attach(job.optimizer)
    for number in range(3):
        checkpointer.save(number, job.state).wait(timeout=60)
        assert fake.contexts == {1}
        job.step()
    pinned(checkpointer)
    checkpointer.close()
    assert fake.contexts == {1} and not fake.registered


# -- pinning ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(device_copies, "COPY_PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(slots, "SLICE", 1 << 18)


def test_memory_is_unpinned_before_it_is_unmapped(fake, spool):
    """Nobody closed the checkpointer. The next arena gets the same address."""
    for number in range(4):
        checkpointer = tierd.Checkpointer(spool.root, "run", to=[])
        job = Job(fake)
        fake.write(job.buffer, values(number))
        checkpointer.save(number, job.state).wait(timeout=60)
        pinned(checkpointer)
        assert fake.registered
        del checkpointer
        wait_until(lambda: gc.collect() >= 0 and not fake.registered)
        assert holds(loaded(spool, number)[3:4], number)


def test_view_of_an_arena_keeps_it_pinned(fake):
    arena, calls = Arena(1 << 20), []
    arena.before_unmapping = lambda: calls.append(bytes(seen.view[:1]) if seen else b"")
    seen, view = None, torch.frombuffer(arena.view, dtype=torch.uint8)
    del arena
    gc.collect()
    assert not calls and int(view.sum()) == 0
    del view
    assert calls == [b""]


def test_an_arena_is_registered_for_all_devices(monkeypatch):
    """What `cudaHostRegister` is given: of flags, 1 is `cudaHostRegisterPortable`."""
    asked = []

    class Runtime:
        def cudaHostRegister(self, *given):
            asked.append(given)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(asked.append(device.index)))
    assert cuda.Cuda().register(4096, 8192, torch.device("cuda", 3)) == 0
    assert asked == [3, (4096, 8192, 1)]


def test_a_refused_pin_is_remembered_and_said_once(fake, spool, caplog, small_slices):
    fake.registers = lambda address: 2
    job = Job(fake)
    with tierd.Checkpointer(spool.root, "run", to=[], slots=2) as checkpointer:
        checkpointer.restore(job.state)
        for number in range(6):
            job.step()
            checkpointer.save(number, job.state).wait(timeout=60)
            internals(checkpointer).pipeline.drain()
        assert fake.tries == 2 and checkpointer.stats.pinned_bytes == 0, "once for each arena"
    assert caplog.text.count("CUDA does not pin memory (error 2)") == 1


def test_real_api_clears_cudas_error(monkeypatch):
    """Where a registration is refused, a kernel is launched whose check clears what CUDA remembers."""
    launched = []

    class Runtime:
        def cudaHostRegister(self, *given):
            return 2

        cudaHostUnregister = cudaHostRegister

    def ones(*shape, device):
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    class Api(cuda.Cuda):
        def side_stream(self, device):
            return None

        def on(self, stream):
            return threading.Lock()

    where = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "ones", ones)
    assert Api().register(4096, 8192, where) == 2 and launched == [where]
    Api().unregister(4096, where)
    assert launched == [where, where]


def test_the_first_save_does_not_wait_for_pinning(fake, local, small_slices):
    """It is done slice by slice, behind the first steps, and whatever training asks for comes first."""
    job = Job(fake)
    state = job.state | {"large": fake.tensor(values(7, 1 << 20))}
    fake.slow_s = 0.05
    local.restore(state)
    local.save(1, state).wait(timeout=60)
    assert len(fake.registered) < 16, "4 MB are 16 slices"
    pinned(local, 4 << 20)
    job.step()
    local.save(2, state).wait(timeout=60)
    assert fake.tries == len(fake.registered)


def test_memory_that_was_made_ready_is_pinned_before_the_first_save(fake, local):
    job = Job(fake)
    local.restore(job.state)
    pinned(local, 100_000)
    asked = fake.tries
    local.save(1, job.state).wait(timeout=60)
    internals(local).pipeline.drain()
    assert fake.tries == asked


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_copies_respect_slices(spool, seeded, seed, small_slices):
    """Pinned in part, grown and pinned anew: no copy lies in two slices."""
    fake, dice = seeded(seed), random.Random(seed)
    number = 0
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        for size in (1000, 70_000, 300_000, 300_001, 100):
            for _ in range(2):
                number += 1
                turned = fake.tensor(torch.arange(size * 2).view(2, -1).float()).t()
                state = {"parameters": [turned], "buffer": fake.tensor(values(number, size)), "average": 0}
                checkpointer.save(number, state).wait(timeout=60)
                time.sleep(dice.choice((0, 0.01)))
    assert not fake.faults
    found = {"parameters": None, "buffer": None, "average": None}
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.restore(found, step=8)
    assert torch.equal(found["parameters"][0], torch.arange(600_002).view(2, -1).t().float())


def test_pieces_of_a_copy_are_all_of_it(monkeypatch):
    """Whatever the strides, and wherever in memory."""
    monkeypatch.setattr(device_copies, "COPY_PIECE_BYTES", 1 << 12)
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    made = [
        torch.randn(5000),
        torch.randn(1, dtype=torch.float64),
        torch.randn(31, 77).t(),
        torch.randn(3, 5000)[:, ::2],
        torch.randn(2, 16, 30, 30).contiguous(memory_format=torch.channels_last),
        torch.randn(1, 9).expand(3000, 9),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.randn(5, 1, 4000).transpose(0, 2),
    ]
    for source in made:
        for offset in (0, 8, 4088):
            into = memory[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
            into.zero_()
            for piece, part in split_copy(into, source):
                assert piece.shape == part.shape and piece.is_contiguous()
                if piece.nbytes:
                    assert piece.data_ptr() // 4096 == (piece.data_ptr() + piece.nbytes - 1) // 4096
                piece.copy_(part)
            assert torch.equal(into, source)


# -- small tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_small_tensors_are_copied_together_to_the_bit(spool, seeded, seed, small_slices):
    """Counters of an optimizer, say; of several dtypes and shapes, some of them views, beside large ones."""
    fake, dice = seeded(seed), random.Random(seed)
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
    made, state = {}, {}
    for number in range(300):
        shape = dice.choice([(), (1,), (3, 5), (0, 2), (17,), (64,), (9000,)])
        made[f"t{number}"] = torch.randint(0, 2, shape).to(dice.choice(kinds))
        state[f"t{number}"] = fake.tensor(made[f"t{number}"])
    made |= {f"step{number}": torch.tensor(float(number)) for number in range(500)}
    state |= {name: fake.tensor(made[name]) for name in made if name.startswith("step")}
    hosts = {
        f"step{number}h": torch.tensor(-float(number)) for number in range(0, 500, 7)
    }  # between those in the arena
    made, state = made | hosts, state | hosts
    made["turned"], state["turned"] = torch.arange(12.0).view(3, 4).t(), fake.tensor(torch.arange(12.0).view(3, 4)).t()
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        ready(checkpointer, state)
        fake.copied_bytes.clear()
        checkpointer.save(1, state).wait(timeout=60)
    assert not fake.faults and len(fake.copied_bytes) < 300
    found = dict.fromkeys(made)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.restore(found)
    for name, expected in made.items():
        assert found[name].dtype == expected.dtype and torch.equal(found[name].float(), expected.float()), name


def test_tensors_are_copied_many_at_a_call(fake, local, monkeypatch):
    """Also those that are not joined: a call for each would hold the interpreter's lock for longer than the copies
    take."""
    state = {f"t{number}": fake.tensor(values(number, 17_000)) for number in range(30)}  # too large to be joined
    ready(local, state)
    calls, real = [], fake.copy
    fake.copy = lambda into, sources: (calls.append(len(into)), real(into, sources))
    local.save(1, state).wait(timeout=60)
    assert len(calls) <= 2, "2 MB are one batch"
    assert sum(calls) in (30, 31), "a tensor that crosses a multiple of the grain is two copies"
    asked, foreach = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *given, **how: (asked.append(how), foreach(*given, **how)))
    into = [torch.zeros(3) for _ in range(9)]
    cuda.Cuda().copy(into, [torch.ones(3)] * 9)
    assert asked == [{"non_blocking": True}] and all(bool(one.all()) for one in into)


# -- the bus ----------------------------------------------------------------------------------------------------------


def test_a_late_copy_leaves_gaps_until_training_waits_for_it(spool, fake, local, small_slices):
    job = Job(fake)
    large = torch.nn.Parameter(fake.tensor(values(0, 1 << 20)))
    job.optimizer.add_param_group({"params": [large]})
    state = job.state | {"large": large}
    local.attach(job.optimizer)
    ready(local, state)
    fake.copied_bytes.clear()
    fake.finish()
    fake.held.set()
    save = local.save(2, state)
    time.sleep(0.3)
    ahead = sum(fake.copied_bytes)
    patience = threading.Timer(5, fake.held.clear)
    patience.start()
    job.step()  # and does not wait for the device
    patience.cancel()
    assert fake.held.is_set() and sum(fake.copied_bytes) > 4 << 20
    assert ahead <= 4 * (device_copies._UNDER_WAY + 1) * device_copies.COPY_PIECE_BYTES
    fake.held.clear()
    save.wait(timeout=60)


def test_device_of_a_state_is_detected(fake):
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(fake.tensor(torch.zeros(2, 2), 1))
    assert slots.device_of({"a": [model], "b": 3}) == torch.device("cuda", 1)
    assert slots.device_of({"a": torch.zeros(2), "b": torch.nn.Linear(2, 2)}) is None


def test_memory_that_is_not_backed_is_not_pinned(fake, monkeypatch):
    slot, layout = Slot(0), Capturer().capture({"a": torch.zeros(1 << 14)}).layout
    slot.reserve(4 << 20)
    for _ in range(2):  # at the second save of a structure, the rest of the arena is returned to the system
        slot.lay_out(layout)
    while slot.pin(torch.device("cuda", 0)):
        pass
    assert layout.size <= slot.pinned < 1 << 17
    assert slot.reserve(1 << 20) and slot.pinned == 0 and not fake.registered
    slot.drop()
