"""The names of launches: what ranks tell each other to share one, and under which ones this process has saved.

Invariant: an attempt that is chosen here sorts after every attempt that any rank has seen.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tierd.client.ranks.ranks import Ranks
from tierd.core.errors import StoreUnavailable
from tierd.core.ids import check_attempt, next_attempt

# (process id, control, run, attempt, rank): a forked child has the parent's entries, and is another process.
_saved: set[tuple[int, Path, str, str, int]] = set()


class RankClock(msgspec.Struct, frozen=True):
    """One rank's contribution to a launch's name: its wall clock in ms, 8 random hex digits, and its latest attempt."""

    now_ms: int
    token: str
    latest: str | None


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's message at the beginning: the values that have to be the same on all ranks. `error` says why this rank
    cannot begin. `used`: its spool or a tier has checkpoints of the given attempt. `saved`: its process made some.
    """

    run: str
    world: int
    given: str | None = None
    options: dict[str, str] = {}
    clock: RankClock | None = None
    used: bool = False
    saved: bool = False
    error: str = ""


def report_failure(ranks: Ranks, run: str, error: Exception) -> None:
    """Notify ranks that are about to begin that this rank cannot, because they would wait for it."""
    with suppress(StoreUnavailable):
        ranks.gather(Beginning(run=run, world=ranks.world, error=str(error)), first=True)


def clock(attempts: Iterable[str]) -> RankClock:
    """Make this process's `RankClock`, given the attempts that it has seen."""
    return RankClock(time.time_ns() // 1_000_000, secrets.token_hex(4), max(attempts, default=None))


def agreed(attempts: Iterable[str], clocks: Sequence[RankClock]) -> str:
    """Name the attempt that all ranks share: rank 0's clock and token, pushed past every attempt that a
    rank has seen.
    """
    latest = [clock.latest for clock in clocks if clock.latest]
    return check_attempt(next_attempt(clocks[0].now_ms, [*attempts, *latest], clocks[0].token))


def new_attempt(seen: Iterable[str] = ()) -> str:
    """Make a launch's name that sorts after every attempt in `seen`. Give the same name to all ranks of the launch."""
    return next_attempt(time.time_ns() // 1_000_000, seen, secrets.token_hex(4))


def record_saved(control: Path, run: str, attempt: str, rank: int) -> None:
    """Record that this process saves a rank of a launch."""
    _saved.add((os.getpid(), control, run, attempt, rank))


def has_saved(control: Path, run: str, attempt: str, rank: int) -> bool:
    """Whether this process has saved that rank of that launch, through any `Checkpointer`."""
    return (os.getpid(), control, run, attempt, rank) in _saved
