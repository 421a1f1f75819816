"""The state of one `[[watch]]` at work, and calls in its thread.

Invariant: the call has ended when `run_in` returns or raises, also if it was cancelled. The exception is a call that
hangs, as on a dead mount: it is left behind, and ends at its next name or chunk if the mount ever answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from tierd.core.config import WatchConfig
from tierd.core.errors import ConfigError, TierdError
from tierd.daemon.intake.directory_id import DirectoryAbsent
from tierd.own_thread import in_own_thread

log = logging.getLogger("tierd.daemon")

P = ParamSpec("P")
T = TypeVar("T")

TRIES = 3  # failed tries in a row after which nothing waits for a directory
SILENT_S = 60.0  # seconds without a sign of life after which a call counts as a failed try
_SLOWEST = 20e6  # bytes a second that a busy disk writes
_TICK_S = 2.0  # the most that counts between two questions: the daemon was stopped for the rest
_END_S = 20.0  # seconds for which the end of a watch waits for its call


class RunNotWatched(ConfigError):
    """The run that a watch names is a trainer's, or that of another directory."""


class NothingTaken(TierdError):
    """No checkpoint of a watched directory was ever taken."""


class WatchStopped(Exception):
    """The daemon ends, or the watch was removed from its configuration."""


@dataclass(slots=True)
class WatchAtWork:
    """A watch at work.

    Attributes:
        watch: the directory and the run.
        stepless: whether it takes only the units without a step.
        leaves_stepless: whether its last listing left such units to another watch of the directory.
        ending: whether its thread has to end soon.
        idle: whether its last listing left nothing to take.
        tries: how many times in a row the directory could not be watched.
        error: why it cannot be watched.
        is_untaken: whether the last listing was made and nothing of the directory was ever taken.
        untaken_s: since when it has files and nothing of it was taken, by the monotonic clock; None: that is not so.
        untaken_reported: whether an event reported that.
        was_there: whether the directory existed at an earlier try.
        awaited_s: since when the watch waits for the directory, or for a first unit in it after that, by the monotonic
            clock; None: it does not.
        refused: the units that are not taken as they are, by path, and why.
        silent_s: for how many seconds the call that runs has given no sign of life, or has not counted as a failed try,
            without time in which the daemon was stopped. Negative while it may be silent for longer. None if none runs.
    """

    watch: WatchConfig
    stepless: bool = False
    leaves_stepless: bool = False
    ending: bool = False
    idle: bool = False
    tries: int = 0
    error: Exception | None = None
    is_untaken: bool = False
    untaken_s: float | None = None
    untaken_reported: bool = False
    was_there: bool = False
    awaited_s: float | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    silent_s: float | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def is_at_rest(self, appear_s: float) -> bool:
        """Whether nothing is left to take, or the directory cannot be watched.

        Args:
            appear_s: how long a directory that does not exist, and then its first unit, are waited for.
        """
        return self.has_failed(appear_s) or (self.idle and not self._is_awaiting(appear_s))

    def has_failed(self, appear_s: float) -> bool:
        """Whether no further try is waited for; `appear_s` as for `is_at_rest`."""
        if isinstance(self.error, DirectoryAbsent):
            return not self._is_awaiting(appear_s)
        return isinstance(self.error, RunNotWatched) or (self.error is not None and self.tries >= TRIES)

    def _is_awaiting(self, appear_s: float) -> bool:
        return self.awaited_s is not None and time.monotonic() - self.awaited_s < appear_s

    def has_hung(self, passed_s: float) -> bool:
        """Count the time since the last question, and return whether a call runs that may hang."""
        if self.silent_s is None:
            return False
        self.silent_s += min(passed_s, _TICK_S)
        return self.silent_s >= SILENT_S

    def going(self) -> None:
        """Give a sign of life. Raises `WatchStopped` if the call has to end."""
        if self.ending:
            raise WatchStopped
        self.silent_s = min(self.silent_s or 0.0, 0.0)

    def writes(self, size: int) -> None:
        """Let the call be silent for as long as an fsync of so many bytes may take at idle priority."""
        self.silent_s = -size / _SLOWEST


async def run_in(active_watch: WatchAtWork, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call in a thread of its own. If cancelled, have it end, and wait `_END_S` for that."""
    active_watch.silent_s = 0.0
    work = in_own_thread(partial(call, *args, **kwargs), "tierd-watch")
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        active_watch.ending = True
        await asyncio.wait([work], timeout=_END_S)
        if not work.done():
            log.warning("%s does not answer: a thread that waits for it is left behind", active_watch.watch.directory)
        work.add_done_callback(_retrieve)
        raise
    finally:
        active_watch.silent_s = None


def _retrieve(work: asyncio.Future[T]) -> None:
    """Retrieve an error, so that asyncio does not warn."""
    if not work.cancelled():
        work.exception()
