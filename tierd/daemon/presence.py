"""Who trains on this node: which runs in the spool have a trainer, and which have had none for long.

Law: nothing is deleted on this word alone. The wall clock only says how old the newest part is, so what it finds
finished leaves the spool only once a tier was seen to hold it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping


class Presence:
    """The attached trainers, by run. `None` is the run of a trainer that does not say it: it may be any."""

    def __init__(self) -> None:
        self._attached: Counter[str | None] = Counter()
        self._seen: dict[str, float] = {}  # run -> when its last trainer left, or somebody asked; monotonic seconds
        self._begun = time.monotonic()

    def came(self, run: str | None) -> None:
        """A trainer has attached."""
        self._attached[run] += 1

    def left(self, run: str | None) -> None:
        """Its connection has ended."""
        self._attached -= Counter([run])
        if run is not None:
            self.asked(run)

    def asked(self, run: str) -> None:
        """Somebody wants to know of a run: a trainer that restores it, say."""
        self._seen[run] = time.monotonic()

    def trainerless(self, runs: Iterable[str], writers: Collection[str]) -> frozenset[str]:
        """Those of `runs` that nobody saves.

        Args:
            writers: `PartId.lane` of everybody who has handed a snapshot over and is still there.
        """
        if self._attached[None]:
            return frozenset()
        trained = {lane.rpartition(".")[0] for lane in writers}.union(run for run in self._attached if run)
        return frozenset(run for run in runs if run not in trained)

    def quiet(self, touched: Mapping[str, float | None], writers: Collection[str], for_s: float) -> frozenset[str]:
        """Those of the runs in `touched` that had neither a trainer nor a new part for `for_s` seconds.

        Args:
            touched: when the run's newest part was committed, seconds since 1970; None for a run that the spool has
                nothing of, which counts from when it was last asked for.
        """
        now, today = time.monotonic(), time.time()
        found = set()
        for run in self.trainerless(touched, writers):
            newest = touched[run]
            quiet = now - self._seen.get(run, self._begun if newest is None else -math.inf)
            if min(quiet, math.inf if newest is None else today - newest) >= for_s:
                found.add(run)
        return frozenset(found)
