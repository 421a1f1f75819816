"""A trainer as a process of its own, to be killed at any moment. What it was promised, it writes down outside.

Its log has one line for each event: `resumed STEP` (-1: from nothing), after what was loaded was compared bit for bit;
`acked STEP` once `wait("local")` has returned; `failed STEP why` for a save that failed; `died why`.
"""

from __future__ import annotations

import os
import subprocess
import traceback
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from support.timed import give_client
from support.training import same, tensors

import tierd
from tierd.ipc import daemon_start


def note(log: str, line: str) -> None:
    """Append a line, whole, in one write."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, (line + "\n").encode())
    os.close(fd)


def lines(log: str) -> list[list[str]]:
    """What a log holds, split into words."""
    try:
        with open(log) as file:
            return [line.split(maxsplit=2) for line in file.read().splitlines()]
    except FileNotFoundError:
        return []


_DAEMON = (
    "import sys; from tierd.daemon import daemon_timings; short = daemon_timings.DaemonTimings(orphan_s=2.0); "
    "daemon_timings.given = lambda: short; from tierd.cli import run; sys.exit(run())"
)


def starting(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a daemon that keeps a dead trainer's memory for 2 s and not for 30, because it does not end before."""
    assert command[1:3] == ["-m", "tierd"]
    return subprocess.Popen([command[0], "-c", _DAEMON, *command[3:]], **options)


def main(spool: str, log: str, steps: int, to: Sequence[str] | None = None, every: int = 2) -> None:
    """Resume and save `steps` more, each as fast as it goes; every `every`-th is waited for."""
    give_client(start_s=0.5)
    daemon_start.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": starting})  # type: ignore[attr-defined]
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        checkpointer = tierd.Checkpointer(spool, "run", to=to)
        state = tensors(10**6)
        found = checkpointer.restore(state)
        assert same(state, found.step if found else 10**6), "what was loaded is not what was saved"
        step = found.step if found else -1
        note(log, f"resumed {step}")
        for number in range(step + 1, step + 1 + steps):
            save = checkpointer.save(number, tensors(number))
            if number % every == 0:
                save.wait(timeout=60)
                note(log, f"acked {number}")
            if save.done() and save.error():
                note(log, f"failed {number} {save.error()}")
        checkpointer.close()
        if number % every:
            note(log, f"acked {number}")
    except BaseException:
        note(log, f"died {traceback.format_exc().splitlines()[-1]}")
        raise
