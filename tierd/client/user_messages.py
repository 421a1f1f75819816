"""What a launch tells the person who trains: warnings about tiers and the spool's disk, and one line of progress.

Invariants:

- The training thread never waits for a warning. The daemon gets one short question every few seconds until a tier has
  accepted something, one after a save, and otherwise one per minute. The disk's size is compared once.
- The line of progress is erased when the work ends, so nothing that training prints shares it. Nothing is written
  unless the standard error is a terminal.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from tierd.client.ranks.launchers import local_ranks
from tierd.core.errors import TierdError, printable
from tierd.core.planning.unflushed_parts import UnflushedParts
from tierd.core.retention.policy import RetentionPolicy
from tierd.spool.spool import Spool

log = logging.getLogger("tierd")

_SELDOM_S = 60.0  # between two questions once a tier has accepted something
_AFTER_SAVE_S = 5.0  # from a save to the next question
_AGAIN_S = 600.0  # between two warnings of the same problem
_PASSING = 3  # consecutive answers with an error that may pass, before it is logged


class TierAcceptance:
    """The tiers' acceptance so far, and the decision whether to log it."""

    def __init__(self) -> None:
        self.has_problem = False
        self._in_a_row = 0
        self._warned_at: float | None = None

    def log_change(self, backlog: UnflushedParts, now_s: float) -> None:
        """Log that no tier accepts checkpoints: at once if every tier refuses, else after `_PASSING` such answers."""
        problem = backlog.problem
        self.has_problem = problem is not None
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
    """A thread that asks the daemon for its backlog from time to time, first with a fresh listing of the tiers."""

    def __init__(self, ask: Callable[[bool], UnflushedParts], soon_s: float) -> None:
        self._ask, self._soon_s = ask, soon_s
        self._acceptance = TierAcceptance()
        self._changed = threading.Condition()
        self._saved = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tierd-tiers", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread could be started; saving continues without it
            pass

    def ask_soon(self) -> None:
        with self._changed:
            self._saved = True
            self._changed.notify()

    def close(self, patience_s: float) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.ident:
            self._thread.join(patience_s)

    def _run(self) -> None:
        accepted = asked_before = False
        while not self._pause(_SELDOM_S if accepted and not self._acceptance.has_problem else self._soon_s):
            try:
                backlog = self._ask(not asked_before)
            except (TierdError, TimeoutError, OSError):  # `Attachment.renew_soon` logs this failure
                continue
            asked_before = True
            accepted |= any(tier.accepts for tier in backlog.tiers.values())
            self._acceptance.log_change(backlog, time.monotonic())

    def _pause(self, seconds: float) -> bool:
        """Wait until the next question is due; return whether `close` was called meanwhile."""
        with self._changed:
            if not self._saved:
                self._changed.wait_for(lambda: self._is_closed or self._saved, seconds)
            if self._saved:
                self._saved = False
                self._changed.wait_for(lambda: self._is_closed, min(_AFTER_SAVE_S, seconds))
            return self._is_closed


class SpaceCheck:
    """Warn if the disk holds fewer states than are kept at a time: `keep_last`, and the one being written.

    The comparison runs `behind` training, because a disk may be slow to answer.
    """

    def __init__(
        self, spool: Spool, keep_last: Callable[[], int | None], behind: Callable[[Callable[[], None]], None]
    ) -> None:
        self._spool, self._keep_last, self._behind = spool, keep_last, behind
        self.is_checked = False

    def check(self, size_bytes: int) -> None:
        """Compare once, behind training. The ranks of a node are assumed to share the disk (`local_ranks`)."""
        if not self.is_checked:
            self._behind(lambda: self._compare(size_bytes))

    def _compare(self, size_bytes: int) -> None:
        if self.is_checked:
            return
        self.is_checked = True
        try:
            _, total = self._spool.free()
        except OSError:  # a save reports it
            return
        ranks = local_ranks()
        checkpoints = (self._keep_last() or RetentionPolicy().keep_last) + 1
        if total >= checkpoints * ranks * size_bytes:
            return
        log.warning(
            "spool %s: its disk has %d bytes, too few for %d checkpoints of %d bytes%s: keep_last = %d and the one "
            "being written; saves may find it full. Use a larger disk, or a lower keep_last for the spool",
            self._spool.root,
            total,
            checkpoints,
            size_bytes,
            f" from each of {ranks} ranks" if ranks > 1 else "",
            checkpoints - 1,
        )


_ERASE = "\r\x1b[K"  # ECMA-48: to the line's begin, and erase to its end


class TerminalLine:
    """One line on the terminal. A context: its end erases the line."""

    def __init__(self) -> None:
        self._drawn = False

    def draw(self, text: str) -> bool:
        """Show `text` in place of the last one; return whether there is a terminal that shows it."""
        with suppress(OSError, ValueError, AttributeError):  # closed, or replaced by something without a descriptor
            if sys.stderr.isatty():
                width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
                self._write(_ERASE + printable(text)[:width])
                self._drawn = True
                return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            with suppress(OSError, ValueError, AttributeError):
                self._write(_ERASE)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def transfer_rate_text(moved: float, took_s: float, left_bytes: float) -> str:
    """Describe the rate, and the time that `left_bytes` take; empty if unknown."""
    if moved <= 0 or took_s <= 0:
        return ""
    rate = moved / took_s
    return f", {rate / 1e9:.2f} GB/s, {left_bytes / rate:.0f} s left"
