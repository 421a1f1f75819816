"""Attached optimizers: every step waits for the copy, and interrupts of saves and steps leave nothing torn."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
import time

import pytest
import torch
from support.attached import check, committed, frozen
from support.training import fresh, train
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tierd
from tierd.client.checkpointer import internals
from tierd.client.saving.slots import Slot
from tierd.client.saving.snapshot import Snapshot
from tierd.core.errors import ConfigError, TornSnapshot
from tierd.state.capture import Capture

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning", "ignore:.*weights_only.*")


def later(seconds: float, call, *arguments) -> None:
    thread = threading.Timer(seconds, call, arguments)
    thread.daemon = True
    thread.start()


def backward(state) -> torch.Tensor:
    loss = state["model"](torch.randn(16, 8)).square().mean()
    loss.backward()
    return loss


def plainly(state) -> None:
    state["optimizer"].step()


def with_a_closure(state) -> None:
    state["optimizer"].step(lambda: backward(state))


def with_a_grad_scaler(state) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(state["model"](torch.randn(16, 8)).square().mean()).backward()
    scaler.unscale_(state["optimizer"])
    nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
    scaler.step(state["optimizer"])
    scaler.update()


def under_a_scheduler(state) -> None:
    torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], 5)  # wraps step once more
    state["optimizer"].step()


def in_another_thread(state) -> None:
    thread = threading.Thread(target=state["optimizer"].step)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("step", [plainly, with_a_closure, with_a_grad_scaler, under_a_scheduler, in_another_thread])
def test_every_way_to_step_waits_for_the_copy(spool, local, job, pace, step):
    backward(job)
    reference = frozen(job)
    save = local.save(1, job)
    pace.reached(1)
    arrived = register_optimizer_step_pre_hook(lambda *_: later(0.05, pace.free, 1))
    step(job)
    arrived.remove()
    assert local.stats.step_waited_s > 0.01
    save.wait(timeout=60)
    check(spool, 1, reference)
    waited = local.stats.step_waited_s
    plainly(job)
    assert local.stats.step_waited_s == waited, "it waits for nothing that is over"


def test_an_optimizer_that_is_not_attached_does_not_wait(spool, local, job, pace):
    other = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    state = job | {"other": other}
    reference = frozen(state)
    save = local.save(1, state)
    pace.reached(1)
    other(torch.ones(3)).sum().backward()
    optimizer.step()
    assert not save.done() and local.stats.step_waited_s == 0
    pace.free(1)
    save.wait(timeout=60)
    check(spool, 1, reference)


@pytest.mark.parametrize("wrong", [None, "optimizer", nn.Linear(2, 2), torch.optim.AdamW, [], lambda: None])
def test_only_optimizers_are_attached(local, wrong):
    with pytest.raises(ConfigError, match="Optimizer is wanted"):
        local.attach(wrong)


def test_optimizer_is_attached_once_and_detached_by_close(spool, pace):
    state = fresh()
    optimizer = state["optimizer"]
    hooks = optimizer._optimizer_step_pre_hooks
    checkpointer = tierd.Checkpointer(spool.root, "run", to=[])
    checkpointer.attach(optimizer, optimizer)
    checkpointer.attach(optimizer)
    assert len(hooks) == 1
    train(copy.deepcopy(state))  # and can be copied, hooks or not
    reference = frozen(state)
    checkpointer.save(1, state)
    later(0.05, pace.free, 1)
    checkpointer.close()
    assert not hooks
    train(state)
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.attach(optimizer)
    check(spool, 1, reference)


@pytest.mark.parametrize("when", ["after a step", "before a step", "before a step, attached later"])
def test_a_hook_of_an_optimizer_may_save(spool, local, pace, when):
    """After attach, a hook before the step comes behind the gate: what it saves is refused, not torn."""
    state, references, saves = fresh(), {}, {}
    optimizer = state["optimizer"]

    def hook(*_) -> None:
        number = len(saves) + 1
        pace.free(number - 1)
        references[number] = frozen(state)
        saves[number] = local.save(number, state)
        pace.free(number)

    if when != "before a step, attached later":
        local.attach(optimizer)
    (optimizer.register_step_post_hook if when == "after a step" else optimizer.register_step_pre_hook)(hook)
    local.attach(optimizer)
    train(state, 4)
    local.close()
    refused = [number for number, save in saves.items() if isinstance(save.error(), TornSnapshot)]
    assert len(saves) == 4 and committed(spool) == [number for number in saves if number not in refused]
    assert not refused or when == "before a step"
    for number in committed(spool):
        check(spool, number, references[number])


def after(seconds: float, handler) -> None:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def interrupt(*_) -> None:
    raise KeyboardInterrupt


def test_a_signal_handler_may_save_while_a_step_waits(spool, local, job, pace):
    """And the step that it came in the way of waits for that save too."""
    backward(job)
    reference, saves = frozen(job), []

    def handler(*_) -> None:
        pace.free(1)
        saves.append(local.save(2, job))
        later(0.1, pace.free, 2)

    saves.append(local.save(1, job))
    pace.reached(1)
    after(0.1, handler)
    job["optimizer"].step()
    for save in saves:
        save.wait(timeout=60)
    for number in (1, 2):
        check(spool, number, reference)


def test_an_interrupt_while_a_step_waits_leaves_the_save_as_it_was(spool, local, job, pace):
    backward(job)
    reference = frozen(job)
    save = local.save(1, job)
    pace.reached(1)
    after(0.05, interrupt)
    with pytest.raises(KeyboardInterrupt):
        job["optimizer"].step()
    later(0.05, pace.free, 1)
    job["optimizer"].step()  # it still waits
    save.wait(timeout=60)
    check(spool, 1, reference)


@pytest.mark.parametrize("where", ["while save waits", "before save waits"])
def test_an_interrupted_save_is_no_checkpoint_and_holds_no_step(spool, local, job, monkeypatch, where):
    image, few = Slot.image, Snapshot.copy_if_few

    def slow(*arguments):
        time.sleep(0.2)
        return image(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "image", slow)
        patch.setattr(Snapshot, "copy_if_few", lambda snapshot: where != "while save waits" and few(snapshot))
        if where == "while save waits":
            after(0.1, interrupt)
        else:
            patch.setattr(internals(local).gate, "watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            local.save(1, job)
        for buffer in job["model"].buffers():
            buffer.zero_()
        internals(local).pipeline.drain()
    assert not committed(spool)
    train(job)
    reference = frozen(job)
    local.save(1, job).wait(timeout=60)
    check(spool, 1, reference)


def test_an_interrupt_while_a_blocking_save_encodes_leaves_no_torn_checkpoint(spool, local, monkeypatch):
    """The thread that trains may have work of its own while the copy runs: it can be interrupted there as well."""
    state, image, tree = fresh(), Slot.image, Capture.tree

    def slow(*arguments):
        time.sleep(0.2)
        return image(*arguments)

    def interrupted(capture):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return tree(capture)

    reference = frozen(state)
    monkeypatch.setattr(Slot, "image", slow)
    monkeypatch.setattr(Capture, "tree", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        local.save(1, state)
    for tensor in state["model"].state_dict().values():
        tensor.zero_()
    internals(local).pipeline.drain()
    if committed(spool):
        check(spool, 1, reference)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_step_in_a_forked_child_waits_for_nothing(spool, local, job, pace):
    """Its copy of the gate is as it was at the fork, and nobody copies there."""
    reference = frozen(job)
    save = local.save(1, job)
    pace.reached(1)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            torch.set_num_threads(1)  # OpenMP's others, if a test before has made them, are not there after a fork
            job["optimizer"].step()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pace.free(1)
    save.wait(timeout=60)
    check(spool, 1, reference)
