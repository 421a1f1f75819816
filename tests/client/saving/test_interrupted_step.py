"""A save after an exception ended an attached optimizer's step warns; one within a step, or beside it, does not."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from support.training import train

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning", "ignore:.*weights_only.*")


def backward(state) -> None:
    state["model"](torch.randn(16, 8)).square().mean().backward()


def interrupt(*_) -> None:
    raise KeyboardInterrupt


def in_a_thread(call) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def warned(caplog) -> int:
    return caplog.text.count("a step of AdamW was interrupted before this save")


@pytest.fixture
def saved(local, job):
    local.save(1, job).wait(timeout=60)


@pytest.fixture
def interrupted(job):
    """A job whose last step was interrupted after it had begun."""
    backward(job)
    with pytest.raises(KeyboardInterrupt):
        job["optimizer"].step(interrupt)
    return job


def test_a_save_after_an_interrupted_step_warns_once(local, interrupted, caplog):
    local.save(1, interrupted).wait(timeout=60)
    assert warned(caplog) == 1
    local.save(2, interrupted)
    train(interrupted)
    local.save(3, interrupted)
    assert warned(caplog) == 1


@pytest.mark.parametrize("whole", ["a step", "a restore"])
def test_a_save_does_not_warn_of_a_step_that_something_has_made_good(local, saved, interrupted, caplog, whole):
    if whole == "a step":
        train(interrupted)
    else:
        assert local.restore(interrupted)
    local.save(2, interrupted)
    assert not warned(caplog)


@pytest.mark.parametrize("where", ["a hook before", "a hook after", "a closure", "another thread", "a wait"])
def test_save_during_a_step_or_beside_a_save_does_not_warn(local, job, pace, caplog, where):
    optimizer = job["optimizer"]
    backward(job)

    def save(*_) -> None:
        local.save(2, job)

    if where == "a wait":  # for a copy, before the step changes anything
        local.save(1, job)
        pace.reached(1)
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    pace.free(10)
    if where == "a wait":
        save()
    elif where == "another thread":
        optimizer.register_step_pre_hook(lambda *_: in_a_thread(save))
        optimizer.step()
    elif where == "a closure":
        optimizer.step(save)
    elif where == "a hook before":
        optimizer.register_step_pre_hook(save)
        optimizer.step()
    else:
        handle = optimizer.register_step_post_hook(save)
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # before the gate's own
        optimizer.step()
    assert not warned(caplog) and local.stats.saves
