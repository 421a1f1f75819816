"""Several threads of one process use a `Checkpointer` at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import tierd
from tierd.client.ranks.launch import Launch
from tierd.client.ranks.ranks import Ranks
from tierd.core.errors import StepRefused
from tierd.core.ids import CheckpointId
from tierd.spool.spool import Spool


def together(count: int, work: Callable[[int], object]) -> list[object]:
    """Call `work(0)` to `work(count - 1)`, each in a thread of its own, at the same moment; return the results."""
    results: list[object] = [None] * count
    gate = threading.Barrier(count)

    def run(number: int) -> None:
        gate.wait()
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_that_name_the_attempt_at_once_get_the_same_name(tmp_path):
    listing = threading.Barrier(3)

    def seen() -> set[str]:
        listing.wait(60)  # every thread has found that there is no attempt yet
        return set()

    launch = Launch(Spool(tmp_path), "run", Ranks(0, 1), None, seen)

    names = together(3, lambda number: launch.attempt)

    assert set(names) == {launch.attempt}


def test_signal_handler_that_saves_while_the_attempt_is_named_gets_the_same(tmp_path):
    nested = []

    def seen() -> set[str]:
        if not nested:
            nested.append("")
            nested[0] = launch.attempt
        return set()

    launch = Launch(Spool(tmp_path), "run", Ranks(0, 1), None, seen)

    assert launch.attempt == nested[0] == launch.attempt


class Nested:
    """An entry of a state that does something while a save captures it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def state_dict(self) -> dict:
        self._work()
        return {"w": torch.ones(4)}

    def load_state_dict(self, state: dict) -> None:
        raise NotImplementedError


def refusal(ckpt: tierd.Checkpointer, step: int) -> Exception | None:
    """Save a step in another thread to its end, and return the error, if any."""
    return together(1, lambda _: ckpt.save(step, {"w": torch.zeros(4)}).wait())[0]


def test_step_whose_save_captures_its_state_is_refused_to_another_thread(tmp_path):
    refused = []
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"m": Nested(lambda: refused.append(refusal(ckpt, 1)))}).wait()
    assert isinstance(refused[0], StepRefused)
    assert len(Spool(tmp_path).parts("run")) == 1


def test_step_that_is_being_staged_is_refused_to_another_thread(tmp_path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt, ckpt.stage(1) as directory:
        assert isinstance(refusal(ckpt, 1), StepRefused)
        (directory / "file").write_bytes(b"x")
    assert len(Spool(tmp_path).parts("run")) == 1


def fail() -> None:
    raise RuntimeError("no state")


def test_failure_before_a_save_has_begun_leaves_its_step_free(tmp_path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        with pytest.raises(tierd.StateRefused):
            ckpt.save(1, {"m": Nested(fail)})
        with pytest.raises(tierd.ConfigError):
            ckpt.save(1, {"w": torch.ones(4)}, metrics={"loss": "none"})
        with pytest.raises(RuntimeError), ckpt.stage(1):
            fail()
        ckpt.save(1, {"w": torch.ones(4)}).wait()


def test_refused_save_of_a_step_leaves_it_claimed(tmp_path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"w": torch.ones(4)}).wait()
        for _ in range(2):
            assert isinstance(refusal(ckpt, 1), StepRefused)


def test_stage_that_fails_after_a_restore_and_a_durable_save_does_not_make_close_raise(tmp_path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"w": torch.ones(4)}).wait()
        with pytest.raises(RuntimeError), ckpt.stage(5):
            ckpt.restore({"w": torch.zeros(4)})
            ckpt.save(5, {"w": torch.ones(4)}).wait()
            fail()
        assert isinstance(refusal(ckpt, 5), StepRefused)


def test_stage_around_a_restore_keeps_the_origin_of_its_own_attempt(tmp_path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"w": torch.ones(4)}).wait()
        first = ckpt.attempt
        with ckpt.stage(2) as directory:
            ckpt.restore({"w": torch.zeros(4)})
            (directory / "file").write_bytes(b"x")
    spool = Spool(tmp_path)
    staged = next(part for part in spool.parts("run") if part.checkpoint.step == 2)
    assert staged.checkpoint.attempt == first and spool.manifest(staged).origin is None


def test_save_whose_attempt_is_named_while_another_thread_restores_is_refused(tmp_path):
    """Its attempt would be later than the restored one, so the next launch would resume from it."""
    naming, restored = threading.Event(), threading.Event()

    def seen() -> set[str]:
        naming.set()
        restored.wait(60)
        return set()

    launch = Launch(Spool(tmp_path), "run", Ranks(0, 1), None, seen)
    errors = []

    def save() -> None:
        try:
            launch.claim(launch.part(2))
        except tierd.ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    assert naming.wait(60)
    origin = CheckpointId("run", tierd.new_attempt(), 1)
    with launch.restoring():
        launch.go_on_from(origin, [origin.attempt], [launch.clock()])
    attempt = launch.attempt
    restored.set()
    thread.join()

    assert len(errors) == 1 and launch.attempt == attempt and launch.origin == origin
    launch.claim(launch.part(2))
