"""A trainer in a process of its own: it resumes, saves when it is told to, and reports what became of each save."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from faults.disk.node import check_state, state
from faults.hands import end_with_parent
from faults.host import clock
from faults.rounds import Lost

import tierd
from tierd.core.errors import SaveFailed, TierdError

WAIT_S = 120.0  # in which a save is durable, or has failed
_ANSWER_S = 240.0


@dataclass(frozen=True)
class Saved:
    """What became of a save. `error` and `cause`: the names of what `Save.wait` raised and of why; None if it was made
    durable. `lines`: warnings and errors that were logged meanwhile. `failed`: what `stats.failed` grew by."""

    step: int
    blocked_s: float
    error: str | None
    cause: str | None
    text: str
    lines: tuple[str, ...]
    failed: int


@dataclass(frozen=True)
class Resumed:
    """What a restore gave; None if there was nothing, or it raised `error`."""

    step: int | None
    place: str | None
    skipped: tuple[str, ...]
    error: str | None


class Trainer:
    """Forked from a process that has imported everything; it ends with that.

    Args:
        alone: it saves without a daemon.
        follows: the clock that it sees.
    """

    def __init__(self, spool: Path, big: int, *, alone: bool, follows: Path | None) -> None:
        self._line, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                end_with_parent()
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                self._line.close()
                if follows:
                    clock.follow(follows)
                _serve(theirs, spool, big, alone)
            except BaseException:
                theirs.send(traceback.format_exc())
            finally:
                os._exit(0)
        theirs.close()
        self.resumed: Resumed = self._answer()

    def begin(self, step: int) -> None:
        """Have it save; `saved` tells what became of it."""
        self._line.send(step)

    def saved(self) -> Saved:
        return self._answer()

    def close(self) -> None:
        """Have it end as a trainer does that is done."""
        self._line.send(None)
        said = self._answer()
        self._reap()
        if said != "closed":
            raise Lost(f"close: {said}")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        os.waitpid(self.pid, 0)
        self._line.close()

    def _answer(self) -> Any:
        if not self._line.poll(_ANSWER_S):
            raise Lost(f"the trainer is silent for {_ANSWER_S:.0f} s")
        try:
            said = self._line.recv()
        except (EOFError, ConnectionError) as error:
            raise Lost("the trainer died") from error
        if isinstance(said, str) and said != "closed":
            raise Lost(f"the trainer failed: {said}")
        return said


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _serve(line: Connection, spool: Path, big: int, alone: bool) -> None:
    kept = _Kept()
    logger = logging.getLogger("tierd")
    logger.addHandler(kept)
    logger.propagate = False
    try:
        checkpointer = tierd.Checkpointer(spool, "run", to=[] if alone else None, slots=2)
        line.send(_resume(checkpointer, big))
    except TierdError as error:
        line.send(Resumed(None, None, (), f"{type(error).__name__}: {error}"))
        return
    while (step := line.recv()) is not None:
        line.send(_save(checkpointer, step, big, kept))
    with suppress(SaveFailed):  # raised if the last save failed, which `_save` has reported
        checkpointer.close()
    line.send("closed")


def _resume(checkpointer: tierd.Checkpointer, big: int) -> Resumed:
    found = state(10**6, big)
    restored = checkpointer.restore(found)
    if restored is None:
        return Resumed(None, None, (), None)
    check_state(found, restored.step, big, f"restored from {restored.tier}")
    return Resumed(restored.step, restored.tier, tuple(map(str, restored.skipped)), None)


def _save(checkpointer: tierd.Checkpointer, step: int, big: int, kept: _Kept) -> Saved:
    kept.lines.clear()
    failed, begun, error, cause, text = checkpointer.stats.failed, time.monotonic(), None, None, ""
    save = checkpointer.save(step, state(step, big))
    blocked_s = time.monotonic() - begun
    try:
        save.wait(timeout=WAIT_S)
    except SaveFailed as raised:
        error, cause, text = type(raised).__name__, type(raised.__cause__).__name__, str(raised.__cause__)
    return Saved(step, blocked_s, error, cause, text, tuple(kept.lines), checkpointer.stats.failed - failed)
