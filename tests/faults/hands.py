"""Trials spread over processes that are forked once: a trial is a call, and what it needs was made before.

Invariant: a process that dies, or a trial that hangs, is a loss of that trial's seed and no end of the round.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from faults.rounds import Round

HANDS = 2
_BATCH = 8  # seeds that are handed out at once
_DEADLINE = 120.0  # seconds, at least, that a process may take for an answer, on a machine that others load

Trial = Callable[[int], tuple[int, list[str]]]  # a seed -> how many units it was worth, and notes


class Hang(Exception):
    """A trial passed its deadline."""


def end_with_parent() -> None:
    """Have this process killed when its parent ends, so that nothing of a round outlives it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` gives, done in a process of its own, which may change that for good. Raises what that raises."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if not pid:
        try:
            theirs.send((work(), None))
        except Exception as error:
            theirs.send((None, error))
        finally:
            os._exit(0)
    theirs.close()
    try:
        found, error = ours.recv()
    finally:
        os.waitpid(pid, 0)
    if error is not None:
        raise error
    return found


@contextmanager
def room(work: Round) -> Iterator[Path]:
    """Where files cost least: a directory in memory, if this machine has one, else in the round's own."""
    memory = Path("/dev/shm")
    home = Path(tempfile.mkdtemp(prefix="tierd-faults-", dir=memory if os.access(memory, os.W_OK) else work.room))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def spread(
    work: Round,
    prepare: Callable[[], Trial],
    *,
    deadline_s: int = 60,
    memory: int = 0,
    batch: int = _BATCH,
    hands: int = HANDS,
    worth: int = 1,
    anew: bool = False,
    seeds: Iterator[int] | None = None,
) -> None:
    """Trials until the round has enough.

    Args:
        prepare: called once in each process; gives the trial.
        deadline_s: of one trial, by an alarm.
        memory: bytes of address space that a process may take beyond what it has after `prepare`; 0: any.
        batch: seeds that are handed out at once; few where a trial takes long.
        hands: processes; more than there are cores where trials mostly wait.
        worth: units that a trial counts for, at least.
        anew: each trial has a process of its own, because it changes that for good. `batch` is 1 then.
        seeds: those of the round if none are given.
    """
    seeds = seeds or work.seeds()
    team = [_Hand(prepare, deadline_s, memory) for _ in range(1 if work.only is not None else hands)]
    try:
        for hand in team:
            if work.done + worth * sum(len(other.todo) for other in team) < work.trials:
                hand.give(list(itertools.islice(seeds, batch)))
        while busy := [hand for hand in team if hand.todo]:
            ready = wait([hand.line for hand in busy], timeout=max(min(hand.left() for hand in busy), 0.0))
            for hand in busy:
                if hand.line in ready:
                    _hear(work, hand)
                elif hand.left() <= 0.0 and not hand.line.poll():
                    silent = time.monotonic() - hand.heard
                    work.lost(hand.todo.pop(0), f"no word for {silent:.0f} s: it hangs where no alarm ends it")
                    hand.restart()
            for hand in team:
                # What the others still do counts, too, and a trial that nobody needs may take minutes.
                if not hand.todo and work.done + worth * sum(len(other.todo) for other in team) < work.trials:
                    if anew:
                        hand.restart()
                    hand.give(list(itertools.islice(seeds, batch)))
    finally:
        for hand in team:
            hand.end()


def _hear(work: Round, hand: _Hand) -> None:
    try:
        seed, units, notes, why = hand.line.recv()
        hand.heard = time.monotonic()
    except (EOFError, ConnectionError):
        work.lost(hand.todo.pop(0), f"its process died: exit {hand.restart()}")
        return
    hand.todo.remove(seed)
    if why is None:
        work.passed(units, *notes)
    else:
        work.lost(seed, why)


class _Hand:
    """One process; `todo` are the seeds that it was given and has not answered, in order. `heard`: when it last gave
    an answer, or was given work."""

    def __init__(self, prepare: Callable[[], Trial], deadline_s: int, memory: int) -> None:
        self._prepare, self._deadline, self._memory = prepare, deadline_s, memory
        self.todo: list[int] = []
        self._start()

    def _start(self) -> None:
        self.line, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(
            target=_serve, args=(theirs, self.line, self._prepare, self._deadline, self._memory)
        )
        self._process.start()
        theirs.close()

    def left(self) -> float:
        """Seconds that it may still take for its next answer."""
        return self.heard + max(_DEADLINE, 2 * self._deadline) - time.monotonic()

    def give(self, seeds: list[int]) -> None:
        self.todo, self.heard = seeds, time.monotonic()
        if seeds:
            self.line.send(seeds)

    def restart(self) -> int | None:
        """A new process, for what is left; how the old one ended."""
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        self.line.close()
        self._start()
        self.give(self.todo)
        return code

    def end(self) -> None:
        self.line.close()
        self._process.kill()
        self._process.join()


def _serve(line: Connection, parents: Connection, prepare: Callable[[], Trial], deadline_s: int, memory: int) -> None:
    parents.close()
    end_with_parent()
    signal.signal(signal.SIGALRM, _over)
    trial = prepare()
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + memory,) * 2)
    while True:
        try:
            seeds = line.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        for seed in seeds:
            line.send((seed, *_one(trial, seed, deadline_s)))


def _one(trial: Trial, seed: int, deadline_s: int) -> tuple[int, list[str], str | None]:
    signal.alarm(deadline_s)
    try:
        units, notes = trial(seed)
        return units, notes, None
    except Exception as error:
        return 1, [], "".join(traceback.format_exception(error))[-6000:]
    finally:
        signal.alarm(0)


def _over(number: int, frame: FrameType | None) -> None:
    raise Hang("past its deadline")


def address_space() -> int:
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident() -> int:
    """The most real memory that this process had at once, bytes, since `forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
