"""A daemon in a process of its own, to be stopped; and what that costs who saves."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.training import tensors
from support.waiting import BOUND_S, wait_until

import tierd
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest
from tierd.spool.spool import Spool

ROOT = Path(tierd.__file__).parent.parent
MOST_BLOCKED_S = 3.0  # of one save: a second is promised, and the machine may be busy


@contextmanager
def running(spool: Spool, tier: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that keeps everything."""
    tier.mkdir()
    command = [sys.executable, "-m", "tierd", "run", "--spool", str(spool.root), "--to", f"file://{tier}"]
    process = subprocess.Popen([*command, "--keep-last", "1000"], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_until(spool.socket.exists)  # which it makes last
        yield process
    finally:
        process.kill()
        process.wait()


def hand_over(ckpt: tierd.Checkpointer, step: int, state: dict | None = None) -> int:
    """Save until the daemon takes a snapshot over; the next step."""
    end = time.monotonic() + BOUND_S
    before = ckpt.stats.handed_over
    while ckpt.stats.handed_over == before:
        assert time.monotonic() < end, "the daemon takes nothing over"
        ckpt.save(step, state or tensors(step)).wait(timeout=60)
        step += 1
        time.sleep(0.01)
    return step


def save_all(ckpt: tierd.Checkpointer, steps: range, state: dict | None = None) -> float:
    """Save each; the longest that one of them blocked, in seconds."""
    longest, saves = 0.0, []
    for step in steps:
        begun = time.monotonic()
        saves.append(ckpt.save(step, state or tensors(step)))
        longest = max(longest, time.monotonic() - begun)
        time.sleep(0.05)
    for save in saves:
        save.wait(timeout=60)
    return longest


def held_bytes(process: subprocess.Popen[bytes]) -> int:
    """Memory of trainers that a daemon has mapped."""
    lines = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    ends = [line[0].split("-") for line in lines if len(line) > 5 and line[5].startswith("/memfd:tierd")]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ends)


def check_nothing_failed(spool: Spool) -> None:
    """Neither counted, nor an event, nor an alert."""
    with DaemonConnection(spool) as link:
        status = link.ask(StatusRequest(), 60)["status"]
    assert "persist_failures" not in status["counters"] or status["counters"]["persist_failures"] == 0
    assert [one for one in status["events"] if one["what"] in ("persist failed", "failing")] == []
    assert status["alerts"] == []
