"""Find out behind training whether any tier accepts this trainer's checkpoints, and log it.

Invariant: the training thread never waits for this. The daemon gets one short question every few seconds until a tier
has accepted something, one after a save, and otherwise one per minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tierd.core.errors import TierdError
from tierd.core.planning.unflushed import UnflushedParts

log = logging.getLogger("tierd")

_SELDOM_S = 60.0  # between two questions once a tier has accepted something
_AFTER_SAVE_S = 5.0  # from a save to the next question
_AGAIN_S = 600.0  # between two warnings of the same problem
_PASSING = 3  # consecutive answers with an error that may pass, before it is logged


class Acceptance:
    """The tiers' acceptance so far, and the decision whether to log it."""

    def __init__(self) -> None:
        self.trouble = False
        self._in_a_row = 0
        self._warned_at: float | None = None

    def hear(self, backlog: UnflushedParts, now_s: float) -> None:
        """Log that no tier accepts checkpoints: at once if every tier refuses, else after three such answers."""
        problem = backlog.trouble
        self.trouble = problem is not None
        if problem is None:
            if self._warned_at is not None and any(tier.accepts for tier in backlog.tiers.values()):
                log.warning("a tier accepts checkpoints again")
                self._warned_at = None
            self._in_a_row = 0
            return
        self._in_a_row += 1
        lasts = self._in_a_row >= _PASSING or all(tier.refused for tier in backlog.tiers.values())
        if lasts and (self._warned_at is None or now_s - self._warned_at >= _AGAIN_S):
            log.warning("no tier accepts checkpoints, they are only in the spool: %s", problem)
            self._warned_at = now_s


class AcceptanceWatch:
    """A thread that asks the daemon for its backlog from time to time.

    Args:
        ask: returns the daemon's backlog within seconds, with True after a fresh listing of the tiers; raises as
            `Link.ask`.
        soon_s: seconds between two questions until a tier has accepted something.
    """

    def __init__(self, ask: Callable[[bool], UnflushedParts], soon_s: float) -> None:
        self._ask, self._soon_s = ask, soon_s
        self._acceptance = Acceptance()
        self._changed = threading.Condition()
        self._saved = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tierd-tiers", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread could be started; saving continues without it
            pass

    def saved(self) -> None:
        """Ask again soon."""
        with self._changed:
            self._saved = True
            self._changed.notify()

    def close(self, patience_s: float) -> None:
        """Ask no more; wait at most `patience_s` seconds for a running question."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.ident:
            self._thread.join(patience_s)

    def _run(self) -> None:
        accepted = asked_before = False
        while not self._pause(_SELDOM_S if accepted and not self._acceptance.trouble else self._soon_s):
            try:
                backlog = self._ask(not asked_before)
            except (TierdError, TimeoutError, OSError):  # `Attachment.keep` logs this failure
                continue
            asked_before = True
            accepted |= any(tier.accepts for tier in backlog.tiers.values())
            self._acceptance.hear(backlog, time.monotonic())

    def _pause(self, seconds: float) -> bool:
        """Wait until the next question is due; return whether `close` was called meanwhile."""
        with self._changed:
            if not self._saved:
                self._changed.wait_for(lambda: self._is_closed or self._saved, seconds)
            if self._saved:
                self._saved = False
                self._changed.wait_for(lambda: self._is_closed, min(_AFTER_SAVE_S, seconds))
            return self._is_closed
