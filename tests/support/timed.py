"""Waits made short for tests: other timings than the usual ones for what is made, or runs, from now on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tierd.client import client_timings as of_client
from tierd.client.client_timings import ClientTimings
from tierd.daemon import daemon_timings as of_daemon
from tierd.daemon.daemon_timings import DaemonTimings

NEVER_MS = 1 << 36  # an age that no object of a test reaches
HASTE: dict[str, Any] = {
    "backoff_s": 0.02,
    "stuck_s": 0.05,
    "abandoned_s": 0.05,
    "prune_again_s": 0.02,
    "twin_s": 0.5,
    "parts_arrive_s": 0.05,
    "chunks_listed_s": 0.05,
    "chunks_awaited_s": 0.1,
    "own_stale_ms": 0,
    "mark_pause_s": 0.01,
}
QUICK = DaemonTimings(**HASTE)


def give(**fields: Any) -> None:
    """Give daemons that this process composes from now on these timings, to the end of the process."""
    made = replace(of_daemon.given(), **fields)
    of_daemon.given = lambda: made  # type: ignore[assignment]


def timed(monkeypatch: Any, **fields: Any) -> DaemonTimings:
    """As `give`, until the test ends; return the timings."""
    made = replace(of_daemon.given(), **fields)
    monkeypatch.setattr(of_daemon, "given", lambda: made)
    return made


def give_client(**fields: Any) -> None:
    """Give these timings to every `Checkpointer` of this process from now on."""
    made = replace(of_client.current_timings(), **fields)
    of_client.current_timings = lambda: made


def timed_client(monkeypatch: Any, **fields: Any) -> ClientTimings:
    """As `give_client`, until the test ends; return the timings."""
    made = replace(of_client.current_timings(), **fields)
    monkeypatch.setattr(of_client, "current_timings", lambda: made)
    return made


def timed_cli(monkeypatch: Any, **fields: Any) -> None:
    """Give these timings to commands that this process runs, until the test ends."""
    from tierd.cli import command_runtime as of_cli  # which loads the command line's libraries

    made = replace(of_cli.current_timings(), **fields)
    monkeypatch.setattr(of_cli, "current_timings", lambda: made)


class Ticking:
    """A wall clock in nanoseconds that goes on by a millisecond each time it is read, so that no two stamps are the
    same, and a seed has the same ones in every run."""

    def __init__(self, at_ms: int = 0x19_0000_0000) -> None:
        self.at_ms = at_ms

    def __call__(self) -> int:
        self.at_ms += 1
        return self.at_ms * 1_000_000


def standing(at_ms: int) -> Callable[[], int]:
    """A wall clock in nanoseconds that stands still."""
    return lambda: at_ms * 1_000_000
