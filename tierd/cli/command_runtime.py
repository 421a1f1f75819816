"""How a command runs: its durations, its exit codes, and Python's collector.

A command asks `current_timings` for its durations, so a test shortens a wait in one place.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
    EXIT_NOT_EXACT: "`check-resume`: the killed run differs from the uninterrupted one; `diff`: two checkpoints differ",
    EXIT_UNFINISHED: "`run` after SIGTERM, `drain`: some tier still lacks a part that it wants; "
    "`--until-idle`: a checkpoint in a watched directory was not taken",
    EXIT_WARNING: "`status --check`: a warning, and no alert; `doctor`: it works, at a cost or a risk; "
    "`advise --notice`: the state is not in time",
    EXIT_ALERT: "`status --check`: an alert: somebody has to act, or checkpoints may be lost; "
    "`doctor`: something that is needed will fail",
    EXIT_UNDELIVERED: "`follow --once`: a checkpoint could not be delivered, or its command failed",
    EXIT_NOTHING_TAKEN: "`--until-idle`: no checkpoint of a watched directory was ever taken, because it has none that "
    "tierd knows, or is empty",
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
