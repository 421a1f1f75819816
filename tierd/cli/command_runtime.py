"""How a command runs: its durations, its exit codes, its progress on the standard error, and Python's collector.

Invariant: what ends within the delay of `CliTimings` shows nothing, and no progress is written to the standard output.
A command asks `current_timings` for its durations, so a test shortens a wait in one place.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tierd.cli.output import complain
from tierd.core.errors import printable
from tierd.core.units import format_duration, format_size
from tierd.ipc.messages import EXIT_BAD_INPUT, EXIT_HELD


@dataclass(frozen=True)
class CliTimings:
    """How long commands wait, in seconds.

    Attributes:
        poll_s: between two questions for the daemon's backlog.
        listing_s: between two listings of tiers to which other nodes send.
        listen_timeout_s: until a daemon that holds the spool has to listen.
        progress_delay_s: until an operation that lasts shows its progress.
        progress_log_s: between two lines of progress where there is no terminal.
        check_group_s: that a group of `doctor`'s checks may take.
        recheck_delay_s: before a unit counts as damaged, because its writer may be between two writes.
    """

    poll_s: float = 0.5
    listing_s: float = 1.0
    listen_timeout_s: float = 10.0
    progress_delay_s: float = 2.0
    progress_log_s: float = 60.0
    check_group_s: float = 30.0
    recheck_delay_s: float = 1.0


USUAL_TIMINGS = CliTimings()


def current_timings() -> CliTimings:
    """Return the timings of a command that runs now."""
    return USUAL_TIMINGS


EXIT_NOT_EXACT = 8
EXIT_UNFINISHED = 9
EXIT_WARNING, EXIT_ALERT = 10, 11
EXIT_UNDELIVERED = 12
EXIT_NOTHING_TAKEN = 13

EXIT_CODES: dict[int, str] = {
    0: "done; nothing wrong was found",
    1: "an unexpected failure: a bug, or an error of the operating system",
    EXIT_BAD_INPUT: "bad input: a command line that is not understood, configuration, URL, name, step, "
    "a spool that cannot be used, a loop that fails by itself",
    4: "not found: no such checkpoint, or none verified; `inspect`, `import`: a checkpoint is incomplete or unknown",
    5: "corruption was found",
    6: "a store or the daemon did not answer, or refused; this proves nothing wrong",
    EXIT_HELD: "another daemon holds the spool",
    EXIT_NOT_EXACT: "`check-resume`: the killed run differs from the uninterrupted one",
    EXIT_UNFINISHED: "`run` after SIGTERM, `drain`: some tier still lacks a part that it wants; "
    "`--until-idle`: a checkpoint in a watched directory was not taken",
    EXIT_WARNING: "`status --check`: a warning, and no alert; `doctor`: it works, at a cost or a risk; "
    "`advise --notice`: the state is not in time",
    EXIT_ALERT: "`status --check`: an alert: somebody has to act, or checkpoints may be lost; "
    "`doctor`: something that is needed will fail",
    EXIT_NOTHING_TAKEN: "`--until-idle`: no checkpoint of a watched directory was ever taken, because it has none that "
    "tierd knows, or is empty",
    EXIT_UNDELIVERED: "`follow --once`: a checkpoint could not be delivered, or its command failed",
}


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, which visits all modules' and all answers' objects again and again, in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
        if finished.wait(current_timings().progress_delay_s):
            return
        if sys.stderr.isatty():
            with self._bar:
                finished.wait()
        else:
            while not finished.wait(current_timings().progress_log_s):
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
