"""Threads that work for a trainer whose signal handlers save: no line of waiting or giving may be a bad moment."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.interrupted import at_line
from support.seeds import examples
from support.timed import timed_client
from support.training import restored, same, tensors

import tierd
from tierd.client.saving.save_jobs import JobThread, Latch, _working
from tierd.client.saving.snapshot import Snapshot
from tierd.core.errors import ConfigError

ROOT = Path(tierd.__file__).parent.parent
FILES = {"save_jobs.py", "snapshot.py", "save_pipeline.py", "checkpointer.py", "savers.py", "step_gate.py"}


def test_a_latch_lets_everybody_through_once_it_is_open():
    latch, through = Latch(), []
    threads = [threading.Thread(target=lambda: through.append(latch.wait(60))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not latch.wait(0.05) and not latch.is_open and not through
    latch.open()
    latch.open()
    for thread in threads:
        thread.join(60)
    assert through == [True] * 5 and latch.wait() and latch.wait(0)


def test_worker_runs_its_tasks_in_order_and_survives_their_errors(caplog):
    worker, done = JobThread("test"), []
    for number in range(100):
        worker.give(lambda number=number: done.append(number))
    worker.give(lambda: 1 // 0)
    worker.give(lambda: done.append("last"))
    worker.drain()
    assert done == [*range(100), "last"] and "ZeroDivisionError" in caplog.text
    worker.close()
    worker.close()
    worker.drain()
    with pytest.raises(ConfigError):
        worker.give(lambda: None)


@pytest.mark.timeout(30)
def test_a_worker_that_is_closed_at_any_line_of_giving_runs_a_job_or_refuses_it():
    """A job that got neither would have its thread wait for ever."""
    outcomes = set()
    for moment in range(50):
        worker, done, refused = JobThread("test"), [], []
        with at_line(moment, {"save_jobs.py"}, worker.close) as fired:
            try:
                worker.give(lambda done=done: done.append(1))
            except ConfigError:
                refused.append(1)
        worker.close()
        assert len(done) + len(refused) == 1
        outcomes.add(bool(done))
        if not fired:
            break
    assert outcomes == {True, False} and moment < 49
    for moment in range(5):
        worker = JobThread("test")
        with at_line(moment, {"save_jobs.py"}, worker.close):
            assert worker.drain(20)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_second_close_waits_for_the_jobs_as_well(interrupted):
    """It comes from a handler at any line of the first, or after the first was interrupted at any line.

    The interpreter closes the workers in an order, because the later ones give jobs to the earlier ones.
    """
    for moment in range(30):
        worker, done, seen = JobThread("test"), [], []

        def close(worker=worker, done=done, seen=seen):
            if interrupted:
                raise KeyboardInterrupt
            worker.close()
            seen.append(bool(done))

        worker.give(lambda done=done: (time.sleep(0.02), done.append(1)))
        with at_line(moment, {"save_jobs.py"}, close) as fired, suppress(KeyboardInterrupt):
            worker.close()
        worker.close()
        assert done and all(seen), fired
        if not fired:
            break
    assert 4 < moment < 29


def test_worker_keeps_no_finished_task_and_ends_with_its_owner():
    worker = JobThread("test")
    thing = threading.Event()
    seen = weakref.ref(thing)
    worker.give(thing.is_set)
    del thing
    worker.drain()
    gc.collect()
    assert seen() is None
    thread = worker._thread
    del worker
    thread.join(60)
    assert not thread.is_alive() and thread not in _working


def test_worker_finishes_its_tasks_when_the_interpreter_ends(tmp_path):
    """A script that ends without close(), with two saves on their way and one more from an exit handler."""
    code = f"""
import atexit, torch, tierd
from tierd.client.saving import save_pipeline
import time
real = save_pipeline.write_part
save_pipeline.write_part = lambda *a: (time.sleep(0.3), real(*a))[1]
ckpt = tierd.Checkpointer({str(tmp_path)!r}, "run", to=[], slots=2)
atexit.register(lambda: ckpt.save(3, {{"x": torch.ones(3)}}))
for step in (1, 2):
    ckpt.save(step, {{"x": torch.ones(3)}})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0
    assert [line.split(" (")[0] for line in done.stderr.splitlines()] == ["tierd: run run: saved step 1"]
    assert len(list(tmp_path.glob("run/*/*/manifest.json"))) == 3


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_handler_may_save_at_any_line_of_a_save(spool, monkeypatch, overlapped):
    """Every line that the training thread runs inside `save` and `wait` in these files is a moment for SIGTERM.

    A run tries every second one, of even or of odd number; one of `make gate` tries all.
    """
    real = Snapshot.copy
    monkeypatch.setattr(Snapshot, "copy", lambda self, slot: (time.sleep(0.002), real(self, slot))[1])
    # A save whose handler comes before the gate knows of the copy is confirmed by nobody until this has passed.
    # The other is what waits for a tree that it has interrupted itself.
    timed_client(monkeypatch, overlapped_s=0.5, encoded_s=0.2)
    weight = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.ones(10)
    every = 100 // examples(100)
    moments = range(random.randrange(every), 400, every)
    steps = iter(range(10_000))
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        if overlapped:
            ckpt.attach(optimizer)
        ckpt.save(next(steps), {"w": weight}).wait(timeout=60)
        tried = 0
        for moment in moments:
            with at_line(moment, FILES, lambda: ckpt.save(next(steps), {"w": weight}).wait(timeout=60)) as fired:
                save = ckpt.save(next(steps), {"w": weight})
                optimizer.step()
                save.wait(timeout=60)
            if not fired:
                break
            tried += 1
        assert 40 // every < tried < 399 // every and ckpt.stats.failed == 0
    assert len(spool.parts()) == next(steps)


def test_saves_of_several_threads_are_all_kept(spool):
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:

        def work(first):
            for step in range(first, 40, 4):
                ckpt.save(step, tensors(step))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(spool.parts()) == 40
    for step in (0, 17, 39):
        assert same(restored(spool, step)[1], step)
