"""Samples of the growth benchmark, and how one is taken.

Invariant: every raw sample is kept. Medians and verdicts are computed from the samples.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Figures = dict[str, float]  # of one sample, by figure: `wall_s`, `cpu_s`, and a part's own
Samples = dict[str, list[Figures]]  # by arm
Measure = Callable[[Path], Samples]  # takes an empty directory
Rows = list[tuple[str, Measure]]  # a part's rows, by name


class Clock:
    """Seconds of the clock, and CPU seconds of this process, its threads and its ended children."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_s()

    def read(self) -> Figures:
        return {"wall_s": time.perf_counter() - self._wall, "cpu_s": _cpu_s() - self._cpu}


def timed(call: Callable[[], T]) -> tuple[T, Figures]:
    """Call once. Returns the answer, and the seconds that it took."""
    gc.collect()
    clock = Clock()
    answer = call()
    return answer, clock.read()


def _cpu_s() -> float:
    used = os.times()
    return time.process_time() + used.children_user + used.children_system
