"""Attached optimizers: a write to their tensors by anybody but their own step fails the save that it would tear."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.attached import check, committed, frozen
from support.timed import timed_client
from support.training import fresh, train
from support.waiting import wait_until
from torch import nn

from tierd.client.checkpointer import internals
from tierd.core.errors import SaveFailed, TornSnapshot
from tierd.spool.spool import Spool

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning", "ignore:.*weights_only.*")


def weight(state) -> nn.Parameter:
    return state["model"][3].weight


@torch.no_grad()
def clip(state) -> None:
    weight(state).clamp_(-0.01, 0.01)


@torch.no_grad()
def copied_over(state) -> None:
    weight(state).copy_(torch.ones(4, 16))


@torch.no_grad()
def all_at_once(state) -> None:
    torch._foreach_mul_(list(state["model"].parameters()), 0.5)


@torch.inference_mode()
def in_inference_mode(state) -> None:
    weight(state).neg_()


def through_a_view(state) -> None:
    weight(state).detach()[1:3].zero_()


def load_state_dict(state) -> None:
    state["model"].load_state_dict(fresh(1)["model"].state_dict())


def moments(state) -> None:
    state["optimizer"].state[weight(state)]["exp_avg"].zero_()


def another_optimizer(state) -> None:
    weight(state).grad = torch.ones(4, 16)
    torch.optim.SGD([weight(state)], 1.0).step()


WRITES = [
    clip,
    copied_over,
    all_at_once,
    in_inference_mode,
    through_a_view,
    load_state_dict,
    moments,
    another_optimizer,
]


@pytest.mark.parametrize("moment", ["before", "while it is copied"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_by_anybody_else_fails_the_save(spool, local, job, pace, caplog, write, moment):
    pace.crawl = 0.004
    save = local.save(1, job)
    pace.reached(1)
    if moment == "before":
        write(job)
        pace.free(1)
    else:
        pace.free(1)
        time.sleep(0.008)
        write(job)
    with pytest.raises(SaveFailed, match=r"was changed between save\(\) and the next step\(\)") as failed:
        save.wait(timeout=60)
    assert isinstance(failed.value.__cause__, TornSnapshot) and save.error() is failed.value.__cause__
    assert local.stats.failed == 1 and caplog.text.count("save failed, training goes on") == 1
    assert not committed(spool) and not list((spool.control / "stage").iterdir())
    pace.free(10**6)
    train(job)  # nothing holds the step
    reference = frozen(job)
    local.save(1, job).wait(timeout=60)
    assert local.stats.failed == 1
    check(spool, 1, reference)


def through_data(state) -> None:
    weight(state).data.add_(1)


def through_numpy(state) -> None:
    weight(state).detach().numpy()[:] += 1


def through_the_address(state) -> None:
    """As a kernel of somebody's own does."""
    ctypes.memset(weight(state).data_ptr(), 1, weight(state).nbytes)


def another_fused_optimizer(state) -> None:
    weight(state).grad = torch.ones(4, 16)
    torch.optim.AdamW([weight(state)], 1.0, fused=True).step()


def averaged_with_another_rank(state) -> None:
    """By a collective of two ranks, which are two threads here."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), range(2)))
        mine, others = weight(state).detach(), torch.full((4, 16), 7.0)
        done = [group.allreduce([tensor]) for group, tensor in zip(groups, (mine, others), strict=True)]
        assert all(work.wait() for work in done)


UNCOUNTED = [through_data, through_numpy, through_the_address, another_fused_optimizer, averaged_with_another_rank]


def test_a_write_of_one_element_is_noticed_where_a_counter_shows_it(spool, local):
    """No sample would: it is one of two million."""
    weight = nn.Parameter(torch.zeros(2_000_000))
    local.attach(optimizer := torch.optim.SGD([weight], 0.1))
    save = local.save(1, {"weight": weight})
    copied(local)
    with torch.no_grad():
        weight[777_777] = 1
    optimizer.step()
    with pytest.raises(SaveFailed, match="weight was changed between"):
        save.wait(timeout=60)


def copied(local) -> None:
    """Return when the late copy of the save that was begun last is made."""
    (snapshot,) = internals(local).gate._pending
    wait_until(lambda: snapshot.is_copied, pause_s=0.001)


@pytest.mark.parametrize("write", UNCOUNTED)
def test_a_write_that_no_counter_shows_fails_the_save_and_is_expected_from_then_on(spool, local, job, write):
    save = local.save(1, job)
    copied(local)
    write(job)
    train(job)
    with pytest.raises(SaveFailed, match=r"model/3.weight was changed between save\(\)"):
        save.wait(timeout=60)
    assert not committed(spool)
    reference = frozen(job)
    save = local.save(2, job)
    write(job)  # once more, as averaging does after each save: the tensor is copied before save() returns by now
    train(job)
    save.wait(timeout=60)
    check(spool, 2, reference)


def test_large_tensors_are_compared_in_place_also_beside_a_tensor_that_moves(spool, local):
    weights = [nn.Parameter(torch.randn(30_000)) for _ in range(3)]
    weights.append(nn.Parameter(torch.randn(60_001)[1:30_001].detach()))  # between two words of the sample
    weights.append(nn.Parameter(torch.randn(20_000, dtype=torch.complex128)))
    local.attach(optimizer := torch.optim.SGD(weights, 0.1))
    state = {str(number): weight for number, weight in enumerate(weights)}
    for step in range(1, 6):
        save = local.save(step, state)
        copied(local)
        optimizer.step()
        save.wait(timeout=60)
        weights[0].data = weights[0].detach() + 1
    for number in range(1, 5):
        save = local.save(10 + number, state)
        copied(local)
        ctypes.memset(weights[number].data_ptr(), 1, weights[number].nbytes)
        optimizer.step()
        with pytest.raises(SaveFailed, match=f"{number} was changed between"):
            save.wait(timeout=60)


def waited(save) -> None:
    with contextlib.suppress(SaveFailed):
        save.wait(timeout=60)


REACHED = {
    "step": lambda local, job, save: job["optimizer"].step(),
    "save": lambda local, job, save: local.save(2, {"epoch": 3}),
    "wait": lambda local, job, save: waited(save),
    "done": lambda local, job, save: save.done(),
    "restore": lambda local, job, save: local.restore(),
    "close": lambda local, job, save: local.close(),
}


@pytest.mark.parametrize("point", REACHED)
def test_overlapped_copy_is_judged_when_the_training_thread_passes(spool, local, job, monkeypatch, point):
    timed_client(monkeypatch, overlapped_s=1000.0)
    save = local.save(1, job)
    copied(local)
    assert not save._ended.wait(0.2) and not committed(spool), "before it was confirmed"
    through_numpy(job)
    with pytest.raises(SaveFailed) if point == "close" else contextlib.nullcontext():
        REACHED[point](local, job, save)
    assert save._ended.wait(60) and isinstance(save.error(), TornSnapshot)
    assert 1 not in committed(spool)


@pytest.mark.parametrize("point", REACHED)
def test_and_kept_where_nobody_wrote(spool, local, job, monkeypatch, point):
    timed_client(monkeypatch, overlapped_s=1000.0)
    reference = frozen(job)
    save = local.save(1, job)
    copied(local)
    REACHED[point](local, job, save)
    assert save._ended.wait(60) and save.error() is None
    check(spool, 1, reference)


def test_overlapped_copy_is_judged_after_a_while_when_the_training_thread_does_not_pass(spool, local, job, monkeypatch):
    timed_client(monkeypatch, overlapped_s=0.2)
    reference = frozen(job)
    save = local.save(1, job)
    assert save._ended.wait(60) and save.error() is None
    check(spool, 1, reference)
    save = local.save(2, job)
    copied(local)
    through_numpy(job)
    assert not save._ended.wait(1.0), "what changed may be the next step: only the training thread can tell"
    train(job)
    assert save._ended.wait(60) and isinstance(save.error(), TornSnapshot)


def test_another_thread_that_waits_confirms_nothing(spool, local, job, monkeypatch):
    timed_client(monkeypatch, overlapped_s=1000.0)
    save = local.save(1, job)
    copied(local)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(save.wait, timeout=60)
        assert not save._ended.wait(0.3)
        train(job)
        waiting.result(60)
    assert committed(spool) == [1]


def test_the_end_of_the_interpreter_confirms(tmp_path):
    program = f"""
import torch, tierd
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = tierd.Checkpointer({str(tmp_path / "spool")!r}, "run", to=[])
checkpointer.attach(optimizer)
checkpointer.save(1, {{"model": model}})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)
    assert committed(Spool(tmp_path / "spool")) == [1]


def test_error_of_the_comparison_fails_the_save_and_not_the_step(spool, local, job, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("tierd.client.saving.snapshot.TensorSample.compare", broken)
    save = local.save(1, job)
    train(job)
    with pytest.raises(SaveFailed, match="no such kernel"):
        save.wait(timeout=60)


def test_replaced_tensor_is_not_written_to(spool, local, job, pace):
    """New tensors in the place of the old ones: the snapshot has the old ones."""
    reference = frozen(job)
    save = local.save(1, job)
    job["optimizer"].load_state_dict(copy.deepcopy(job["optimizer"].state_dict()))
    for parameter in job["model"].parameters():
        parameter.data = torch.zeros_like(parameter)
    pace.free(1)
    save.wait(timeout=60)
    check(spool, 1, reference)


def test_parameters_beside_a_buffer_in_one_memory_are_saved(spool, local, pace):
    """A flat memory that a model's parameters and a buffer that forward changes are cut from."""
    model, flat = nn.Module(), torch.zeros(100)
    model.weight = nn.Parameter(flat[:60])
    model.register_buffer("seen", flat[60:])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local.attach(optimizer)
    reference = frozen(model)
    save = local.save(1, {"model": model})
    model.seen.add_(1)
    pace.free(1)
    save.wait(timeout=60)
    check(spool, 1, {"model": reference})


def test_an_empty_parameter_is_no_memory(spool, local, pace):
    """All tensors without elements lie at one address, which is none."""
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(3)), "empty": nn.Parameter(torch.empty(0, 4))})
    average = [parameter.detach().clone() for parameter in model.parameters()]
    local.attach(torch.optim.SGD(model.parameters(), 0.1))
    state = {"model": model, "average": average}
    reference = frozen(state)
    save = local.save(1, state)
    for one in average:
        one.add_(1)
    pace.free(1)
    save.wait(timeout=60)
    check(spool, 1, reference)


def test_a_name_that_was_a_parameter_s_may_become_a_copy_s(spool, local, job, pace):
    state = {"best": weight(job).detach(), **job}
    pace.free(1)
    local.save(1, state).wait(timeout=60)
    state["best"] = weight(job).detach().clone()
    reference = frozen(state)
    save = local.save(2, state)
    state["best"].zero_()
    pace.free(2)
    save.wait(timeout=60)
    check(spool, 2, reference)
