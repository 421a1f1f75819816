"""Processes that play trials, and are replaced when they die or hang."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

_DEADLINE = 600.0  # seconds of a trial, on a machine that others load; most take one or two


class Worker:
    """One process. `seed` is the trial that it was given."""

    def __init__(self) -> None:
        self.seed = -1
        self._start()

    def _start(self) -> None:
        tests = Path(__file__).parents[2]
        path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.simulation"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path},
        )

    def give(self, seed: int | None) -> bool:
        if seed is None:
            return False
        self.seed, self._given = seed, time.monotonic()
        assert self._process.stdin
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        return True

    def left(self) -> float:
        """Seconds that the trial may still take."""
        return self._given + _DEADLINE - time.monotonic()

    @property
    def out(self) -> IO[str]:
        assert self._process.stdout
        return self._process.stdout

    def take(self) -> dict[str, Any] | None:
        """The answer; None while there may still come one. One that gives none in time is replaced by a new process."""
        if select.select([self.out], [], [], 0.0)[0]:
            if line := self.out.readline():
                return dict(json.loads(line))
            why = f"the worker died: {self._process.wait()}"
        elif self.left() > 0.0:
            return None
        else:
            why = f"a hang: no answer for {_DEADLINE:.0f} s"
        self._process.kill()
        self._process.wait()
        self._start()
        return {"lost": why, "steps": 1, "count": {}}

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
