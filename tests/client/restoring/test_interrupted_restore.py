"""Saves during a restore, and after one that failed: a state that is loaded in part never becomes the run's newest."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import pytest
import torch
from support.preemption_fixtures import usual  # noqa: F401
from support.ranks import Group

import tierd
from tierd.client.checkpointer import internals
from tierd.client.restoring.restorer import Restorer
from tierd.core.errors import CheckpointNotFound, ConfigError, StateMismatch, StoreUnavailable
from tierd.spool.spool import Spool

REFUSED = "nothing is saved, because the last restore failed"


class Part:
    """One object of the state; `meanwhile` is called while it is loaded."""

    def __init__(self, value: float, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.value, self.meanwhile = value, meanwhile

    def state_dict(self) -> dict:
        return {"value": torch.full((4,), float(self.value))}

    def load_state_dict(self, state: dict) -> None:
        self.meanwhile()
        self.value = float(state["value"][0])


def made(spool: Spool, **options) -> tierd.Checkpointer:
    return tierd.Checkpointer(spool.root, "run", to=[], **options)


def state(value: float, meanwhile: Callable[[], object] = lambda: None) -> dict:
    return {"first": Part(value), "last": Part(value, meanwhile)}


@pytest.fixture
def history(spool):
    """Steps 100 and 110 of an earlier launch."""
    with made(spool) as checkpointer:
        assert checkpointer.restore(state(0)) is None
        for step in (100, 110):
            checkpointer.save(step, state(step)).wait()


def check_resumes(spool: Spool, step: int) -> None:
    with made(spool) as checkpointer:
        resumed = state(-1)
        assert checkpointer.restore(resumed).step == step
        assert [one.value for one in resumed.values()] == [step, step]


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("not with this shape")])
def test_a_state_that_was_loaded_in_part_is_not_saved(spool, history, error):
    with made(spool) as checkpointer:
        begun = state(0, lambda: fail(error))
        with pytest.raises((type(error), StateMismatch)):
            checkpointer.restore(begun)
        assert [one.value for one in begun.values()] == [110, 0]
        with pytest.raises(ConfigError, match=f"{REFUSED}.*restore again on every rank.*another Checkpointer"):
            checkpointer.save(0, begun)
        with pytest.raises(ConfigError, match=REFUSED), checkpointer.stage(0):
            pass
    check_resumes(spool, 110)


def test_saves_after_another_restore_continue_from_its_checkpoint(spool, history):
    with made(spool) as checkpointer:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.restore(state(0, lambda: fail(KeyboardInterrupt())))
        assert checkpointer.restore(state(0)).step == 110
        saved = checkpointer.save(120, state(120))
        saved.wait()
        assert spool.manifest(saved.part).origin.step == 110
    check_resumes(spool, 120)


def test_a_signal_handler_that_saves_is_refused_while_a_restore_loads(spool, history):
    said = []
    with made(spool) as checkpointer:

        def handler(*_: object) -> None:
            with pytest.raises(ConfigError, match="a checkpoint is being restored") as refused:
                checkpointer.save(0, begun)
            said.append(refused)

        signal.signal(signal.SIGUSR1, handler)
        begun = state(0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        assert checkpointer.restore(begun).step == 110 and len(said) == 1
        checkpointer.save(120, state(120)).wait()
    check_resumes(spool, 120)


def test_a_notice_during_a_restore_makes_a_checkpoint_due_after_it(spool, history):
    with made(spool, when=tierd.When(steps=1000, preemption=True)) as checkpointer:
        assert checkpointer.restore(state(0, lambda: os.kill(os.getpid(), signal.SIGTERM))).step == 110
        assert checkpointer.due(111) and checkpointer.notice
        checkpointer.save(111, state(111)).wait()
    check_resumes(spool, 111)


def test_restore_without_an_answer_is_no_fresh_start(spool, history, monkeypatch):
    with made(spool) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(Restorer, "restore", lambda *_, **options: fail(StoreUnavailable("the tier does not answer")))
            with pytest.raises(StoreUnavailable):
                checkpointer.restore(state(0))
        with pytest.raises(ConfigError, match=rf"{REFUSED} \(the tier does not answer\)"):
            checkpointer.save(0, state(0))
    check_resumes(spool, 110)
    with made(spool) as anew:  # what the message names for a fresh start on purpose
        anew.save(0, state(0)).wait()
    check_resumes(spool, 0)


def test_a_launch_that_had_begun_saves_on_after_a_restore_that_loaded_nothing(spool, history, monkeypatch):
    with made(spool) as checkpointer:
        checkpointer.restore(state(0))
        attempt = checkpointer.attempt
        monkeypatch.setattr(
            Restorer, "restore", lambda *_, **options: fail(StoreUnavailable("the tier does not answer"))
        )
        with pytest.raises(StoreUnavailable):
            checkpointer.restore(state(0), step=100)
        assert checkpointer.save(120, state(120)).part.checkpoint.attempt == attempt
    monkeypatch.undo()
    check_resumes(spool, 120)


@pytest.mark.parametrize("step", [100, 99], ids=["another succeeds", "another fails"])
def test_a_restore_inside_another_lifts_nothing(spool, history, step):
    """Such as one in a signal's handler: the outer state is loaded in part all the same."""
    with made(spool) as checkpointer:
        checkpointer.restore(state(0))

        def meanwhile() -> None:
            with pytest.raises(CheckpointNotFound) if step == 99 else nullcontext():
                checkpointer.restore(state(0), step=step)
            with pytest.raises(ConfigError, match="a checkpoint is being restored"):
                checkpointer.save(111, begun)
            raise KeyboardInterrupt

        begun = state(0, meanwhile)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.restore(begun)
        with pytest.raises(ConfigError, match=REFUSED):
            checkpointer.save(111, begun)
    check_resumes(spool, 110)


def test_restore_that_outlasts_another_restore_does_not_block_saves_for_good(spool, history):
    with made(spool) as checkpointer:
        checkpointer.restore(state(0))
        launch = internals(checkpointer).launch
        longer = ExitStack()  # in another thread
        with launch.restoring():
            longer.enter_context(launch.restoring())
            launch.loading()
        with pytest.raises(ConfigError, match="a checkpoint is being restored"):
            checkpointer.save(111, state(111))
        with pytest.raises(KeyboardInterrupt), longer:  # while the other one had come to load
            raise KeyboardInterrupt
        with pytest.raises(ConfigError, match=REFUSED):
            checkpointer.save(111, state(111))
        with launch.restoring():
            longer.enter_context(launch.restoring())
        with pytest.raises(StoreUnavailable), longer:
            raise StoreUnavailable("the tier does not answer")
        checkpointer.save(111, state(111)).wait()
    check_resumes(spool, 111)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_the_other_ranks_hear_of_an_interrupt_at_once(spool, monkeypatch, interrupted):
    group = Group(2)
    group.install(monkeypatch)

    def work(number: int) -> tuple[float, int]:
        with made(spool) as checkpointer:
            checkpointer.restore(state(0))
            checkpointer.save(5, state(5)).wait()
            group.together.wait()
            error = KeyboardInterrupt if number == interrupted else StoreUnavailable
            begun = state(0, (lambda: fail(KeyboardInterrupt())) if number == interrupted else lambda: None)
            with pytest.raises(error) as raised:
                checkpointer.restore(begun)
            if number != interrupted:
                assert f"rank {interrupted}" in str(raised.value) and "interrupt (KeyboardInterrupt)" in str(raised)
            with pytest.raises(ConfigError, match=REFUSED):
                checkpointer.save(6, begun)
            return checkpointer.restore(state(0)).step

    assert set(group.run(work)) == {5}
