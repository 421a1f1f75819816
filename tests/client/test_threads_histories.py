"""Launches whose first saves come from several threads at once, in random histories: the next launch loses nothing.

Judged by docs/explanation/save.md: threads that save at once, also the first steps of a launch, get the launch's one
attempt; of two saves of one step, one is accepted. A restore is the newest step that was acknowledged as durable.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tierd
from tierd.core.errors import SaveFailed, StepRefused
from tierd.spool.spool import Spool

SEEDS = int(os.environ.get("TIERD_SEEDS", "8"))  # `make gate` takes a hundred
LAUNCHES = 4


@pytest.fixture(autouse=True)
def short_slices() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(works: list[Callable[[], None]]) -> list[Exception]:
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


class Launch:
    """One launch: it may resume, then 2 to 4 threads save at once, some of them the same step.

    Attributes:
        durable: the values by step of every save that was acknowledged.
    """

    def __init__(self, spool: Path, rng: random.Random) -> None:
        self._spool, self._rng = spool, rng
        self.durable: dict[int, float] = {}

    def save(self, ckpt: tierd.Checkpointer, step: int, value: float, staged: bool) -> None:
        if staged:
            with ckpt.stage(step) as directory:
                (directory / "file").write_bytes(b"x")
        else:
            ckpt.save(step, {"w": torch.full((4,), value)}).wait()
        assert step not in self.durable, f"step {step} was acknowledged twice"
        self.durable[step] = value

    def play(self, newest: tuple[int, float] | None, restores: bool) -> str:
        """Return the launch's attempt."""
        rng, step = self._rng, newest[0] if newest and restores else 0
        with tierd.Checkpointer(self._spool, "run", to=[]) as ckpt:
            if restores:
                check_resumed(ckpt, newest)
            for _ in range(rng.randint(1, 2)):
                steps = [step + number + 1 for number in range(rng.randint(2, 4))]
                repeated = [rng.choice(steps[:-1])] if rng.random() < 0.4 else []
                # The highest step is never a directory, which `restore(state)` does not load.
                saves = [(number, rng.random(), number != steps[-1] and rng.random() < 0.2) for number in steps]
                saves += [(number, rng.random(), False) for number in repeated]
                rng.shuffle(saves)
                errors = at_once([functools.partial(self.save, ckpt, *save) for save in saves])
                assert len(errors) == len(repeated), errors
                assert all(isinstance(error, StepRefused | SaveFailed) for error in errors), errors
                assert set(steps) <= self.durable.keys()
                step = steps[-1]
            return ckpt.attempt


def check_resumed(ckpt: tierd.Checkpointer, newest: tuple[int, float] | None) -> None:
    """Restore, and compare with the newest step that was acknowledged and its value."""
    state = {"w": torch.zeros(4)}
    restored = ckpt.restore(state)
    resumed = (restored.step, state["w"][0].item()) if restored else None
    expected = (newest[0], torch.tensor(newest[1]).item()) if newest else None
    assert resumed == expected


def _resume(spool: Path, newest: tuple[int, float]) -> None:
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        check_resumed(ckpt, newest)


def history(spool: Path, seed: int) -> int:
    """Play launches, and return their number."""
    rng = random.Random(seed)
    newest: tuple[int, float] | None = None
    attempts: list[str] = []
    for number in range(LAUNCHES):
        restores = newest is not None and rng.random() < 0.8
        launch = Launch(spool, rng)
        attempts.append(launch.play(newest, restores=restores))
        last = max(launch.durable)
        newest = last, launch.durable[last]
        parts = [part for part in Spool(spool).parts("run") if part.checkpoint.attempt not in attempts[:-1]]
        assert {part.checkpoint.attempt for part in parts} == {attempts[-1]}, f"launch {number} has several attempts"
        assert sorted(part.checkpoint.step for part in parts) == sorted(launch.durable)
    assert newest
    _resume(spool, newest)
    return len(attempts)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_next_launch_resumes_the_newest_step_that_threads_saved(tmp_path: Path, seed: int) -> None:
    assert history(tmp_path, seed) == LAUNCHES


def test_launch_in_another_process_resumes_the_newest_step_that_threads_saved(tmp_path: Path) -> None:
    launch = Launch(tmp_path, random.Random(0))
    launch.play(None, restores=False)
    last = max(launch.durable)
    process = multiprocessing.get_context("spawn").Process(
        target=_resume, args=(tmp_path, (last, launch.durable[last]))
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
