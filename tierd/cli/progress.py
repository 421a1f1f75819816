"""Progress of long transfers, on the standard error: a bar on a terminal, one line a minute elsewhere.

Invariant: what ends within `CliTimings.shown_s` shows nothing, and nothing is ever written to the standard output.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tierd.cli import timings
from tierd.cli.tables import complain, size
from tierd.cli.units import span
from tierd.core.printable import printable


class Meter:
    """How far a transfer is.

    Args:
        label: for people, in the `-ing` form.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(printable(label), total=None)

    def update(self, done_bytes: float, total: float | None, label: str | None = None) -> None:
        """Say how many bytes are done, of how many; `label` replaces the words."""
        self._label = label or self._label
        self._bar.update(self._task, completed=done_bytes, total=total, description=printable(self._label))

    def advance(self, size_bytes: int) -> None:
        """Say that so many more bytes are done."""
        self._bar.update(self._task, advance=size_bytes)

    def line(self) -> str:
        """Describe the present state on one line."""
        task = self._bar.tasks[0]
        of = "" if task.total is None else f" of {size(task.total)}"
        speed = f", {size(task.speed)}/s" if task.speed else ""
        remaining = f", {span(task.time_remaining)} left" if task.time_remaining else ""
        return f"{self._label}: {size(task.completed)}{of}{speed}{remaining}"

    def show(self, finished: threading.Event) -> None:
        """Show the progress until `finished`, in a thread, because the work may hang."""
        if finished.wait(timings.given().shown_s):
            return
        if sys.stderr.isatty():
            with self._bar:
                finished.wait()
        else:
            while not finished.wait(timings.given().logged_s):
                complain(self.line())


@contextmanager
def progress(label: str) -> Iterator[Meter]:
    """Show the progress of what the context does."""
    meter, finished = Meter(label), threading.Event()
    shows = threading.Thread(target=meter.show, args=(finished,), daemon=True)
    shows.start()
    try:
        yield meter
    finally:
        finished.set()
        shows.join()
