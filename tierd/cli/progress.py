"""The progress of a command that lasts, on the standard error.

Invariant: what ends within the delay of `CliTimings` shows nothing, and no progress is written to the standard output.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tierd.cli import command_runtime
from tierd.cli.output import complain
from tierd.core.errors import printable
from tierd.core.units import format_duration, format_size


class Meter:
    """How far a transfer is. Its label is for people, in the `-ing` form."""

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

    def progress_line(self) -> str:
        """Describe the present state on one line."""
        task = self._bar.tasks[0]
        of = "" if task.total is None else f" of {format_size(task.total)}"
        speed = f", {format_size(task.speed)}/s" if task.speed else ""
        remaining = f", {format_duration(task.time_remaining)} left" if task.time_remaining else ""
        return f"{self._label}: {format_size(task.completed)}{of}{speed}{remaining}"

    def show(self, finished: threading.Event) -> None:
        """Show the progress until `finished`, in a thread, because the work may hang."""
        if finished.wait(command_runtime.current_timings().progress_delay_s):
            return
        if sys.stderr.isatty():
            with self._bar:
                finished.wait()
        else:
            while not finished.wait(command_runtime.current_timings().progress_log_s):
                complain(self.progress_line())


@contextmanager
def show_progress(label: str) -> Iterator[Meter]:
    """Show the progress of what the context does."""
    meter, finished = Meter(label), threading.Event()
    shows = threading.Thread(target=meter.show, args=(finished,), daemon=True)
    shows.start()
    try:
        yield meter
    finally:
        finished.set()
        shows.join()
