"""Child processes and bounded waits.

Invariant: every wait has an end and watches the processes that it rests on; every process that was started is stopped.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class DemoFailed(Exception):
    """What the demo set out to show is not so; the message is the one line that says it."""


class Child:
    """A Python module in a process of its own; what it prints goes to `<logs>/<name>.log` and stderr to `.err`."""

    def __init__(self, name: str, logs: Path, module: str, *arguments: str) -> None:
        self.name = name
        self._out, self._err = logs / f"{name}.log", logs / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def said(self) -> list[str]:
        """The lines on its standard output."""
        return self._out.read_text(errors="replace").splitlines()

    def must_run(self) -> None:
        """Raise unless it runs."""
        if self.code is not None:
            raise DemoFailed(f"the {self.name} ended with exit code {self.code}; {self._err} ends with: {self._last()}")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(30)

    def terminate(self, patience: float) -> None:
        """SIGTERM; anything but exit code 0 within `patience` seconds raises."""
        self.must_run()
        self._process.terminate()
        self.end(patience)

    def end(self, patience: float, *others: Child) -> None:
        """Wait until it ends by itself; anything but exit code 0 raises, and so does the end of one of `others`."""
        wait_until(f"the {self.name} has ended", lambda: self.code is not None, patience, *others)
        if self.code != 0:
            self.must_run()

    def stop(self) -> None:
        """Make sure that it is gone, however."""
        if self.code is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()

    def _last(self) -> str:
        lines = [line for line in self._err.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "nothing"


@contextmanager
def started(name: str, logs: Path, module: str, *arguments: str) -> Iterator[Child]:
    """A child that is gone when the block is left."""
    child = Child(name, logs, module, *arguments)
    try:
        yield child
    finally:
        child.stop()


def wait_until(what: str, look: Callable[[], T | None], patience: float, *needed: Child) -> T:
    """Look until it gives something true, which is returned.

    Raises:
        DemoFailed: `patience` seconds went by, or one of `needed` ended before.
    """
    end = time.monotonic() + patience
    while not (found := look()):
        for child in needed:
            child.must_run()
        if time.monotonic() > end:
            raise DemoFailed(f"waited {patience:.0f} s in vain until {what}")
        time.sleep(0.02)
    return found
