"""The state of one tier worker: when it works or rests, its backoff after failures, the work put off, words for it.

Invariant: the delay after the n-th failure in a row is uniform in [½, 1] of min(2ⁿ s, L). L is a quarter of the time
for which the place has failed, but at least 15 s and at most 5 min. The random delay spreads the retries of many nodes.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Hashable, Iterable

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.place import Action, Discard, Flush, Prune, RepairCopy
from tierd.daemon.daemon_timings import USUAL, DaemonTimings

_MIN_BACKOFF_S = 15.0  # seconds: L above is at least this, and at most `DaemonTimings.backoff_s`
_FIRST = 10.0  # seconds at most of an object's first deferral, because the place may have failed and not the object


class TierWorker:
    """The action of one place's worker, and the outcome of its earlier actions."""

    def __init__(self, name: str, timings: DaemonTimings = USUAL) -> None:
        self.name, self._timings = name, timings
        self.wake = asyncio.Event()
        self._retry = asyncio.Event()
        self.retry_at = 0.0  # monotonic seconds
        self.failures = 0
        self._since = 0.0  # when the first failure in a row was, monotonic seconds
        self.last_error: Exception | None = None
        self._last_failure: Exception | None = None
        self.doing: str | None = None
        self.sent = False  # whether the last action begun was a flush
        self.has_flushed = False  # whether the last completed action was a flush, so that its result is known
        self._ahead: deque[Flush] = deque()
        self._ahead_until = 0.0  # monotonic seconds
        self.pause_s = 0.0  # rest after a plan without an action, in seconds
        self._off: dict[Hashable, float] = {}  # deferred object -> until when, monotonic seconds
        self._failing: set[Hashable] = set()  # objects whose last action failed here

    def now(self) -> float:
        return time.monotonic()

    def note_success(self, subject: Hashable = None) -> None:
        """Note an action on `subject` that did not fail, or an observation."""
        self.failures, self.retry_at, self.last_error = 0, 0.0, None
        self._failing.discard(subject)
        if not self.retries_later:
            self._last_failure = None

    @property
    def retries_later(self) -> bool:
        """Whether an object is deferred whose action failed here.

        An object that was deferred for another place's sake does not count, because it may be deferred again for good.
        """
        # One that is due fails again, or is done.
        self._failing = {subject for subject in self._failing if self.is_deferred(subject)}
        return bool(self._failing)

    @property
    def blocking_error(self) -> Exception | None:
        """Why the worker makes no progress: its last error, also while only the failed object is put off."""
        return self.last_error or self._last_failure

    def note_failure(self, error: Exception, jitter: random.Random, *, long: bool, subject: Hashable = None) -> float:
        """Note a failure, and return the seconds until the next try.

        Args:
            long: begin with a longer backoff, because an immediate retry cannot help.
        """
        self._failing.add(subject)
        self._since = self._since if self.failures else self.now()
        self._ahead.clear()
        self.failures += 1
        self._retry.clear()
        self.last_error = self._last_failure = error
        longest = min(max(_MIN_BACKOFF_S, (self.now() - self._since) / 4), self._timings.backoff_s)
        delay = min(2.0 ** min(self.failures + (3 if long else 0), 16), longest) * jitter.uniform(0.5, 1.0)
        self.retry_at = self.now() + delay
        return delay

    def plan_ahead(self, flushes: Iterable[Flush], took_s: float) -> None:
        """Note the flushes that follow the first action of a plan that took `took_s` seconds to compute.

        They stay valid for nine times as long, so that planning takes at most a tenth of the time, however many parts
        wait.
        """
        self._ahead, self._ahead_until, self.pause_s = deque(flushes), self.now() + 9 * took_s, 9 * took_s

    def planned(self) -> Flush | None:
        """Return the next part to send by the last plan, while that plan is valid."""
        while self._ahead and self.now() < self._ahead_until:
            if not self.is_deferred((flush := self._ahead.popleft()).part):
                return flush
        return None

    def defer(self, subject: Hashable, seconds: float | None = None) -> None:
        """Defer a part or checkpoint for `seconds` (default: `stuck_s`), although no action on it failed here."""
        self._failing.discard(subject)
        self._defer(subject, self._timings.stuck_s if seconds is None else seconds)

    def _defer(self, subject: Hashable, seconds: float) -> None:
        self._off = {
            subject: until for subject, until in self._off.items() if until > self.now() - self._timings.backoff_s
        }
        self._off[subject] = self.now() + seconds

    def defer_stuck(self, subject: Hashable) -> None:
        """Defer after a failure, so that others are tried first.

        It is for `stuck_s` if the object was deferred lately, and for at most `_FIRST` seconds otherwise.
        """
        stuck_s = self._timings.stuck_s
        self._defer(subject, stuck_s if subject in self._off else min(stuck_s, _FIRST))

    def is_deferred(self, subject: Hashable) -> bool:
        return self._off.get(subject, 0.0) > self.now()

    @property
    def deferred_s(self) -> float:
        """Seconds until the first deferred object is due; infinite if there is none."""
        now = self.now()
        return min((until - now for until in self._off.values() if until > now), default=math.inf)

    async def wait(self, rescan: float) -> None:
        """Wait for an event, at most `rescan` seconds; after a failure, wait out the backoff despite events."""
        if self.last_error is not None:
            await self._sleep(self._retry, self.retry_at - self.now())
        else:
            await self._sleep(self.wake, rescan)

    def retry_now(self) -> None:
        """End a backoff early."""
        self.retry_at = 0.0
        self._retry.set()

    async def _sleep(self, event: asyncio.Event, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass


def describe_action(action: Action) -> str:
    """Say what the worker does, with its subject."""
    match action:
        case Flush(part):
            return f"flushing {part}"
        case Prune(checkpoint):
            return f"pruning {checkpoint}"
        case RepairCopy(part):
            return f"repairing {part}"
        case Discard(name):
            return f"discarding {name}"


def action_verb(action: Action | None) -> str:
    """Name the kind of action; None stands for an observation."""
    return type(action).__name__.lower().removesuffix("copy") if action else "observe"


def action_subject(action: Action | None) -> PartId | CheckpointId | str:
    """Return what an action is about; None stands for an observation."""
    match action:
        case Flush(part) | RepairCopy(part):
            return part
        case Prune(checkpoint):
            return checkpoint
        case Discard(name):
            return name
        case None:
            return "observing"
