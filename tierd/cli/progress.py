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
        what: for people, in the `-ing` form.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(printable(what), total=None)

    def update(self, done: float, total: float | None, what: str | None = None) -> None:
        """Say how many bytes are done, of how many; `what` replaces the words."""
        self._what = what or self._what
        self._bar.update(self._task, completed=done, total=total, description=printable(self._what))

    def advance(self, done: int) -> None:
        """Say that so many more bytes are done."""
        self._bar.update(self._task, advance=done)

    def line(self) -> str:
        """Describe the present state on one line."""
        task = self._bar.tasks[0]
        of = "" if task.total is None else f" of {size(task.total)}"
        speed = f", {size(task.speed)}/s" if task.speed else ""
        left = f", {span(task.time_remaining)} left" if task.time_remaining else ""
        return f"{self._what}: {size(task.completed)}{of}{speed}{left}"

    def show(self, ended: threading.Event) -> None:
        """Show the progress until `ended`, in a thread, because the work may hang."""
        if ended.wait(timings.given().shown_s):
            return
        if sys.stderr.isatty():
            with self._bar:
                ended.wait()
        else:
            while not ended.wait(timings.given().logged_s):
                complain(self.line())


@contextmanager
def progress(what: str) -> Iterator[Meter]:
    """Show the progress of what the context does."""
    meter, ended = Meter(what), threading.Event()
    shows = threading.Thread(target=meter.show, args=(ended,), daemon=True)
    shows.start()
    try:
        yield meter
    finally:
        ended.set()
        shows.join()
