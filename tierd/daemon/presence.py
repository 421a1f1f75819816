"""Which runs in the spool have a trainer on this node, and which have had none for long.

Invariants:

- Nothing is deleted because of this alone. A run that counts as finished leaves the spool only after a tier was seen to
  hold it.
- The wall clock of one daemon's life makes no run finished. It gives the age of the newest part, and of the time
  before this daemon began only as much counts as an earlier daemon of the spool has seen.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping


class TrainerActivity:
    """The attached trainers, by run. `None` stands for a trainer that does not name its run, which may be any.

    Attributes:
        watched_until: when an earlier daemon of this spool last ran, by its clock, in seconds since 1970; `-inf` if
            none has. Infinite: the wall clock is trusted.
    """

    def __init__(self) -> None:
        self.watched_until = math.inf
        self._ahead: dict[str, tuple[float, float]] = {}  # run -> a time that lies ahead, and since when it is known
        self._attached: Counter[str | None] = Counter()
        self._last_activity: dict[
            str, float
        ] = {}  # run -> when its last trainer left, or it was asked for; monotonic seconds
        self._started_at = time.monotonic()

    def came(self, run: str | None) -> None:
        """Note that a trainer has attached."""
        self._attached[run] += 1

    def left(self, run: str | None) -> None:
        """Note that a trainer's connection has ended."""
        self._attached -= Counter([run])
        if run is not None:
            self.asked(run)

    def asked(self, run: str) -> None:
        """Note a request about a run, for example of a trainer that restores it."""
        self._last_activity[run] = time.monotonic()

    def trainerless(self, runs: Iterable[str], writers: Collection[str]) -> frozenset[str]:
        """Return those of `runs` that no trainer saves.

        Args:
            runs: the runs to check.
            writers: `PartId.writer` of every trainer that has handed over a snapshot and is still connected.
        """
        if self._attached[None]:
            return frozenset()
        trained = {writer.rpartition(".")[0] for writer in writers}.union(run for run in self._attached if run)
        return frozenset(run for run in runs if run not in trained)

    def quiet(self, touched: Mapping[str, float | None], writers: Collection[str], for_s: float) -> frozenset[str]:
        """Return the runs in `touched` that had neither a trainer nor a new part for `for_s` seconds.

        Args:
            touched: run -> when its newest part was committed, seconds since 1970. None for a run without parts in the
                spool, which counts from when it was last asked for.
            writers: as for `trainerless`.
            for_s: how long, in seconds.
        """
        ages = {run: self._quiet_s(run, touched[run]) for run in self.trainerless(touched, writers)}
        return frozenset(run for run, age_s in ages.items() if age_s >= for_s)

    def finished(self, touched: Mapping[str, float | None], writers: Collection[str], for_s: float) -> frozenset[str]:
        """Return those of the runs that are `quiet` also without the time in which no daemon ran.

        That time is known by two readings of the clock alone, of which one may be wrong by a year.
        """
        here_s = time.monotonic() - self._started_at
        return frozenset(
            run
            for run in self.quiet(touched, writers, for_s)
            if (newest := touched[run]) is None or here_s + max(0.0, self.watched_until - newest) >= for_s
        )

    def _quiet_s(self, run: str, newest: float | None) -> float:
        now = time.monotonic()
        part_s = math.inf if newest is None else time.time() - newest
        if newest is not None and part_s < 0:  # the clock was ahead at that save, or is behind now
            dated, since = self._ahead.get(run, (newest, now))
            self._ahead[run] = newest, since if dated == newest else now
            part_s = now - self._ahead[run][1]
        return min(now - self._last_activity.get(run, self._started_at if newest is None else -math.inf), part_s)
