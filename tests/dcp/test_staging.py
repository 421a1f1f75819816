"""`dcp.async_save` through `tierd.dcp.StorageWriter`: tensors go into an arena, those of attached optimizers behind
training, and what is written is the state at the call."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import tierd
import tierd.dcp
from tierd.client.saving.slots import Slot
from tierd.core.errors import TornSnapshot
from tierd.state.aliasing import is_same_content

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Job:
    """A model, an optimizer after a step, and how it is saved."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def copy(self) -> dict:
        return pickle.loads(pickle.dumps(self.state()))

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()


class Slow(DefaultSavePlanner):
    """Plans when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def create_global_plan(self, all_plans):
        assert self.go.wait(60)
        return super().create_global_plan(all_plans)


def saved(ckpt: tierd.Checkpointer, step: int) -> dict:
    other = Job(99).state()
    reader = tierd.dcp.StorageReader(ckpt, step=step)
    dcp.load(other, storage_reader=reader)
    reader.close()
    return other


@pytest.mark.parametrize("attached", [True, False])
def test_staged_state_is_the_state_at_the_call(local, attached):
    job, pending, expected = Job(), [], []
    if attached:
        local.attach(job.optimizer)
    for step in range(3):
        expected.append(job.copy())
        planner = Slow()
        writer = tierd.dcp.StorageWriter(local, step)
        pending.append(dcp.async_save(job.state(), storage_writer=writer, planner=planner))
        with torch.no_grad():
            job.model[1].running_mean.add_(1.0)  # what no optimizer changes was copied before
            if not attached:
                job.model[0].weight.add_(1.0)
        job.step()
        planner.go.set()
        job.step()
        if step < 2:
            pending[-1].result(60)
    pending[-1].result(60)
    assert local.stats.blocked_s > 0
    for step in range(3):
        assert is_same_content(saved(local, step), expected[step])


def test_a_write_behind_an_async_save_fails_it(local, spool):
    job = Job()
    local.attach(job.optimizer)
    pending = dcp.async_save(job.state(), storage_writer=tierd.dcp.StorageWriter(local, 1))
    with torch.no_grad():
        job.model[0].weight.add_(1.0)
    job.step()
    with pytest.raises(CheckpointException) as reported:
        pending.result(60)
    assert isinstance(reported.value.failures[0][0], TornSnapshot)
    assert not spool.parts()
    expected = job.copy()
    pending = dcp.async_save(job.state(), storage_writer=tierd.dcp.StorageWriter(local, 2))
    with torch.no_grad():
        job.model[0].weight.add_(1.0)  # that one is copied early from now on
    job.step()
    pending.result(60)
    assert is_same_content(saved(local, 2), expected)


def addresses(staged: dict) -> list[int]:
    return [one.data_ptr() for one in staged["model"].values()]


def test_memory_is_used_again_only_when_it_was_written(local):
    job, planner = Job(), Slow()
    writers = [tierd.dcp.StorageWriter(local, step) for step in range(4)]
    seen = []
    for writer in writers:
        real = writer.stage

        def stage(state, real=real):
            staged = real(state)
            seen.append(addresses(staged))
            return staged

        writer.stage = stage
    first = dcp.async_save(job.state(), storage_writer=writers[0], planner=planner)
    dcp.async_save(job.state(), storage_writer=writers[1]).result(60)
    dcp.async_save(job.state(), storage_writer=writers[2]).result(60)
    assert seen[0] != seen[1] == seen[2]
    planner.go.set()
    first.result(60)
    dcp.async_save(job.state(), storage_writer=writers[3]).result(60)
    assert seen[3] in (seen[0], seen[1])


def test_a_save_that_nobody_ends_holds_up_no_other(local):
    """As where another rank failed: DCP tells nobody."""
    job = Job()
    writers = [tierd.dcp.StorageWriter(local, step) for step in range(3)]
    for writer in writers:
        writer.stage(job.state())
    save = local.save(5, job.state())
    save.wait(timeout=60)
    assert save.done()


def test_all_kinds_of_values_are_staged(local):
    tied = torch.randn(30, 20)
    state = {
        "tied": tied,
        "again": tied,
        "turned": tied.t(),
        "part": torch.randn(50, 50)[:7, 3:9],
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "bits": torch.randn(9).to(torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "number": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
        "ordered": OrderedDict(a=[torch.arange(3), (torch.arange(4), 5)], b=None),
        "bytes": b"x",
        "step": 7,
        "names": ["a", "b"],
    }
    staged = tierd.dcp.StorageWriter(local, 1).stage(state)
    staged.staged.wait()
    expected = {name: one.detach() if isinstance(one, torch.nn.Parameter) else one for name, one in state.items()}
    expected["conjugate"] = expected["conjugate"].resolve_conj()
    assert is_same_content(dict(staged), expected), staged
    arena = [one for one in staged.values() if isinstance(one, torch.Tensor)]
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in arena)  # or torch copies it before it writes it
    assert staged["tied"].data_ptr() == staged["again"].data_ptr() != tied.data_ptr()


def test_pickling_waits_for_the_copy(local, monkeypatch):
    """As a save in another process does it. The copy may be quick, so the wait itself is seen, too."""
    job = Job()
    local.attach(job.optimizer)
    expected = job.copy()
    writer = tierd.dcp.StorageWriter(local, 1)
    staged = writer.stage(job.state())
    found, waited, wait = [], [], staged.staged.wait
    monkeypatch.setattr(type(staged.staged), "wait", lambda self: waited.append(wait()))
    reading = threading.Thread(target=lambda: found.append(pickle.loads(pickle.dumps(staged))))
    reading.start()
    job.step()
    reading.join(60)
    assert len(waited) == 1
    assert type(found[0]) is dict and is_same_content(found[0], expected)
    assert writer._copies.room is None  # not used again: pickling may have moved it


def test_where_memory_is_short_torch_stages(local, monkeypatch):
    monkeypatch.setattr(Slot, "reserve", lambda self, size, device=None: False)
    job = Job()
    local.attach(job.optimizer)
    expected = job.copy()
    pending = dcp.async_save(job.state(), storage_writer=tierd.dcp.StorageWriter(local, 1))
    job.step()
    pending.result(60)
    monkeypatch.undo()
    assert is_same_content(saved(local, 1), expected)
