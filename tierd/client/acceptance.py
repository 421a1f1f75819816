"""Whether any tier takes this trainer's checkpoints, found out behind training and told in its log.

Law: the thread that trains never waits for it. One short question in a few seconds until a tier has accepted something
and after a save; once a minute otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tierd.core.errors import TierdError
from tierd.core.remaining import Backlog

log = logging.getLogger("tierd")

_SOON_S, _SELDOM_S = 2.0, 60.0  # between two questions: while no tier has accepted anything, and later
_AFTER_SAVE_S = 5.0  # from a save to the next question
_AGAIN_S = 600.0  # between two warnings of the same trouble
_PASSING = 3  # answers in a row with an error that may pass, before it is told


class Acceptance:
    """What was heard of the tiers so far, and what to say about it."""

    def __init__(self) -> None:
        self.trouble = False
        self._in_a_row = 0
        self._warned_at: float | None = None

    def hear(self, backlog: Backlog, now_s: float) -> None:
        """Log that no tier accepts checkpoints: at once where every tier refuses, else after three answers."""
        trouble = backlog.trouble
        self.trouble = trouble is not None
        if trouble is None:
            if self._warned_at is not None and any(tier.accepts for tier in backlog.tiers.values()):
                log.warning("a tier accepts checkpoints again")
                self._warned_at = None
            self._in_a_row = 0
            return
        self._in_a_row += 1
        lasts = self._in_a_row >= _PASSING or all(tier.refused for tier in backlog.tiers.values())
        if lasts and (self._warned_at is None or now_s - self._warned_at >= _AGAIN_S):
            log.warning("no tier accepts checkpoints, they are only in the spool: %s", trouble)
            self._warned_at = now_s


class Watch:
    """A thread that asks the daemon now and then.

    Args:
        ask: gets the daemon's backlog, within seconds, and with True after a fresh look at the tiers; raises as
            `Link.ask` does.
    """

    def __init__(self, ask: Callable[[bool], Backlog]) -> None:
        self._ask = ask
        self._acceptance = Acceptance()
        self._changed = threading.Condition()
        self._saved = self._ended = False
        self._thread = threading.Thread(target=self._run, name="tierd-tiers", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is to be had; saving goes on without it
            pass

    def saved(self) -> None:
        """Ask again soon."""
        with self._changed:
            self._saved = True
            self._changed.notify()

    def close(self, patience_s: float) -> None:
        """Ask no more; wait at most `patience_s` seconds for a question that is under way."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread.ident:
            self._thread.join(patience_s)

    def _run(self) -> None:
        accepted = looked = False
        while not self._rest(_SELDOM_S if accepted and not self._acceptance.trouble else _SOON_S):
            try:
                backlog = self._ask(not looked)
            except (TierdError, TimeoutError, OSError):  # whoever keeps the daemon running tells of it
                continue
            looked = True
            accepted |= any(tier.accepts for tier in backlog.tiers.values())
            self._acceptance.hear(backlog, time.monotonic())

    def _rest(self, seconds: float) -> bool:
        """Wait until it is time to ask; whether this ended meanwhile."""
        with self._changed:
            if not self._saved:
                self._changed.wait_for(lambda: self._ended or self._saved, seconds)
            if self._saved:
                self._saved = False
                self._changed.wait_for(lambda: self._ended, min(_AFTER_SAVE_S, seconds))
            return self._ended
