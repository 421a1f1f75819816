"""Launches whose first saves come from several threads at once, in random histories: the next launch loses nothing.

Judged by docs/explanation/save.md: threads that save at once, also the first steps of a launch, get the launch's one
attempt; of two saves of one step, one is accepted. A restore is the newest step that was acknowledged as durable.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeds import seeds

import tierd
from tierd.core.errors import SaveFailed, StepRefused
from tierd.spool.spool import Spool

LAUNCHES = 4


@pytest.fixture(autouse=True)
def short_slices() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(works: Sequence[Callable[[], None]]) -> list[Exception]:
    """Call each of `works` in a thread of its own, at the same moment; return the errors."""
    errors: list[Exception] = []
    gate = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        gate.wait()
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


State = dict[str, Any]


def state_of(kind: int, value: float, size: int) -> State:
    """A state whose structure depends on `kind`, and grows with `size` as that of an optimizer does."""
    names = {f"k{number}": torch.full((kind + 2,), value) for number in range(size)}
    dtype = torch.float64 if kind == 1 else torch.float32
    return {"w": torch.full((kind + 1, 4), value, dtype=dtype), "step": value, "names": names}


def same(state: State, other: State) -> bool:
    """Whether two states have the same structure, types and values."""
    if not isinstance(state, dict):
        return bool(torch.equal(state, other)) if isinstance(state, torch.Tensor) else state == other
    return state.keys() == other.keys() and all(same(state[name], other[name]) for name in state)


@dataclass(frozen=True)
class Acknowledged:
    """A save that became durable, with the arguments of its state; without them if it was a directory."""

    step: int
    state: tuple[int, float, int] | None


class Launch:
    """One launch: it may resume, then 2 to 4 threads save at once, some of them the same step.

    Attributes:
        durable: every save that was acknowledged, by step.
    """

    def __init__(self, spool: Path, rng: random.Random) -> None:
        self._spool, self._rng = spool, rng
        self.durable: dict[int, Acknowledged] = {}

    @property
    def newest(self) -> Acknowledged:
        return self.durable[max(self.durable)]

    def save(self, ckpt: tierd.Checkpointer, step: int, state: tuple[int, float, int] | None) -> None:
        if state is None:
            with ckpt.stage(step) as directory:
                (directory / "file").write_bytes(b"x")
        else:
            ckpt.save(step, state_of(*state)).wait()
        assert step not in self.durable, f"step {step} was acknowledged twice"
        self.durable[step] = Acknowledged(step, state)

    def play(self, resumed: Acknowledged | None, restores: bool) -> str:
        """Return the launch's attempt."""
        rng, step = self._rng, resumed.step if resumed and restores else 0
        kinds = rng.choice(((0,), (1,), (0, 1)))
        with tierd.Checkpointer(self._spool, "run", to=[], slots=rng.choice((1, 3))) as ckpt:
            if restores:
                check_resumed(ckpt, resumed)
            for size in range(rng.randint(1, 4)):
                steps = [step + number + 1 for number in range(rng.randint(2, 4))]
                repeated = [rng.choice(steps[:-1])] if rng.random() < 0.4 else []
                saves = [(number, (rng.choice(kinds), rng.random(), size)) for number in (*steps, *repeated)]
                # The highest step is never a directory, which `restore(state)` does not load.
                staged = {number for number in steps[:-1] if rng.random() < 0.2}
                works = [functools.partial(self.save, ckpt, at, None if at in staged else state) for at, state in saves]
                rng.shuffle(works)
                errors = at_once(works)
                assert len(errors) == len(repeated), errors
                assert all(isinstance(error, StepRefused | SaveFailed) for error in errors), errors
                assert set(steps) <= self.durable.keys()
                step = steps[-1]
            return ckpt.attempt

    def check_states(self, attempt: str) -> None:
        """Restore every acknowledged step, and compare it with the state that was saved."""
        with tierd.Checkpointer(self._spool, "run", to=[]) as ckpt:
            for saved in self.durable.values():
                if saved.state is not None:
                    state = state_of(saved.state[0], 0.0, saved.state[2])
                    ckpt.restore(state, step=saved.step, attempt=attempt)
                    assert same(state, state_of(*saved.state)), f"step {saved.step} holds another state"


def check_resumed(ckpt: tierd.Checkpointer, newest: Acknowledged | None) -> None:
    """Restore, and compare with the newest step that was acknowledged and its state."""
    if newest is None:
        assert ckpt.restore({}) is None
        return
    assert newest.state is not None
    state = state_of(newest.state[0], 0.0, newest.state[2])
    restored = ckpt.restore(state)
    assert restored is not None and restored.step == newest.step
    assert same(state, state_of(*newest.state))


def _resume(spool: Path, newest: Acknowledged) -> None:
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        check_resumed(ckpt, newest)


def history(spool: Path, seed: int) -> int:
    """Play launches, and return their number."""
    rng = random.Random(seed)
    newest: Acknowledged | None = None
    attempts: list[str] = []
    for number in range(LAUNCHES):
        launch = Launch(spool, rng)
        attempts.append(launch.play(newest, restores=newest is not None and rng.random() < 0.8))
        newest = launch.newest
        parts = [part for part in Spool(spool).parts("run") if part.checkpoint.attempt not in attempts[:-1]]
        assert {part.checkpoint.attempt for part in parts} == {attempts[-1]}, f"launch {number} has several attempts"
        assert sorted(part.checkpoint.step for part in parts) == sorted(launch.durable)
        launch.check_states(attempts[-1])
    assert newest
    _resume(spool, newest)
    return len(attempts)


@pytest.mark.parametrize("seed", seeds())
def test_next_launch_resumes_the_newest_step_that_threads_saved(tmp_path: Path, seed: int) -> None:
    assert history(tmp_path, seed) == LAUNCHES


def test_launch_in_another_process_resumes_the_newest_step_that_threads_saved(tmp_path: Path) -> None:
    launch = Launch(tmp_path, random.Random(0))
    launch.play(None, restores=False)
    process = multiprocessing.get_context("spawn").Process(target=_resume, args=(tmp_path, launch.newest))
    process.start()
    process.join(60)
    assert process.exitcode == 0
