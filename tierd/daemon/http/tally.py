"""Sums over events, by run and place, for metrics.

Invariant: sums exist only for runs that the spool holds, so their number is bounded however many runs a node has seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import product

from tierd.core.event_kinds import Event
from tierd.core.planning.place import SPOOL
from tierd.daemon.http.families import FAMILIES

Labels = tuple[str, ...]
_SENT = ("tierd_flush_raw_bytes_total", "tierd_flush_sent_bytes_total")
_COUNTED = {
    "persisted": "tierd_saves_total",
    "persist failed": "tierd_save_failures_total",
    "restored": "tierd_restores_total",
    "fell back": "tierd_restore_fallbacks_total",
    "corrupt": "tierd_corrupt_copies_total",
    "quarantined": "tierd_quarantined_copies_total",
    "pruned": "tierd_pruned_copies_total",
}
_TIMED = {
    "flushed": "tierd_flush_seconds",
    "persisted": "tierd_save_durable_seconds",
    "durable": "tierd_save_durable_seconds",
}


class Tally:
    """Sums of events since the daemon's start.

    Attributes:
        counts: metric -> labels -> sum.
        times: metric -> labels -> (number, sum in seconds).
    """

    def __init__(self) -> None:
        self.counts: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self.times: dict[str, dict[Labels, tuple[int, float]]] = defaultdict(dict)

    def add(self, event: Event) -> None:
        """Add an event. One that concerns no run adds nothing."""
        if event.run is None:
            return
        if name := _COUNTED.get(event.what):
            self._count(name, event, 1)
        if event.what == "repaired":
            self._count("tierd_repaired_chunks_total", event, event.chunks or 0)
        if event.what == "flushed":
            self._count("tierd_flush_raw_bytes_total", event, event.raw_bytes or 0)
            self._count("tierd_flush_sent_bytes_total", event, event.sent_bytes or 0)
        if event.what in _TIMED and event.seconds is not None:
            self._time(_TIMED[event.what], event, event.seconds)
        if event.blocked_s is not None:
            self._time("tierd_save_blocked_seconds", event, event.blocked_s)

    def keep(self, runs: Collection[str]) -> None:
        """Forget all runs but these."""
        for counts in self.counts.values():
            for labels in [key for key in counts if key[0] not in runs]:
                del counts[labels]
        for times in self.times.values():
            for labels in [key for key in times if key[0] not in runs]:
                del times[labels]

    def begin(self, runs: Collection[str], places: Collection[str]) -> None:
        """Begin the counters of these runs at 0, because a rate knows nothing of a series whose first sample is 1."""
        for name, family in FAMILIES.items():
            if family.kind != "counter" or "run" not in family.labels:
                continue
            where = [place for place in places if place != SPOOL or name not in _SENT]  # nothing is sent to the spool
            for labels in product(runs, where) if "tier" in family.labels else product(runs):
                self.counts[name].setdefault(labels, 0.0)

    def _count(self, name: str, event: Event, number: float) -> None:
        self.counts[name][_labels(name, event)] += number

    def _time(self, name: str, event: Event, seconds: float) -> None:
        number, total = self.times[name].get(_labels(name, event), (0, 0.0))
        self.times[name][_labels(name, event)] = number + 1, total + seconds


def _labels(name: str, event: Event) -> Labels:
    label_values = {"run": event.run or "", "tier": event.place}
    return tuple(label_values[label] for label in FAMILIES[name].labels)
