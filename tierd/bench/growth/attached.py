"""What `save` and the optimizer's next `step()` cost training after `attach`: alone, beside busy threads, with a list.

Each sample is one save amid steps of real training. `call` is the time inside `save`, `step` the time that the
optimizer's next step waited for the copy. `least` is torch's own `state_dict()` of model and optimizer, which no call
can leave out. The busy threads end before that step, because torch gives up the lock for each operation, and a step of
training beside them would take minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import tierd
from tierd.bench.growth.measured import Figures, Rows, Samples, timed
from tierd.bench.training import Training

GIGABYTES, ROUNDS, THREADS, LIST = 0.25, 5, 4, 200_000


def overlapped(home: Path, *, threads: int = 0, listed: int = 0) -> Samples:
    """Saves of an attached optimizer, with so many threads that hold the interpreter's lock, and so long a list."""
    training = Training(GIGABYTES)
    values = [number / 7 for number in range(listed)]
    samples: Samples = {"call": [], "step": [], "least": []}
    with tierd.Checkpointer(home / "spool", "run", to=[]) as checkpointer:
        checkpointer.attach(training.optimizer)
        training.step()
        for number in range(ROUNDS + 2):
            state: dict[str, Any] = {**training.state, **({"losses": values} if listed else {})}
            with _busy(threads) if threads else nullcontext():
                save, call = timed(partial(checkpointer.save, training.number, state))
                floor = timed(lambda: (training.model.state_dict(), training.optimizer.state_dict()))[1]
            waited = _time_step(training, checkpointer)
            save.wait()
            if number > 1:  # the first two plan and touch
                samples["call"].append(call)
                samples["step"].append(waited)
                samples["least"].append(floor)
    return samples


def _time_step(training: Training, checkpointer: tierd.Checkpointer) -> Figures:
    before = checkpointer.stats.step_waited_s
    training.step()
    return {"wall_s": checkpointer.stats.step_waited_s - before}


@contextmanager
def _busy(threads: int) -> Iterator[None]:
    """Run threads that compute in Python, as a data loader's or a logger's may."""
    end = threading.Event()

    def compute() -> None:
        while not end.is_set():
            sum(range(10_000))

    started = [threading.Thread(target=compute) for _ in range(threads)]
    for thread in started:
        thread.start()
    time.sleep(0.05)
    try:
        yield
    finally:
        end.set()
        for thread in started:
            thread.join()


def parts() -> dict[str, Rows]:
    """This module's part of the page."""
    return {
        "attached": [
            ("alone", overlapped),
            (f"{THREADS} threads compute in Python", partial(overlapped, threads=THREADS)),
            (f"a list of {LIST:,} floats beside it", partial(overlapped, listed=LIST)),
        ]
    }
