"""What a run's last saves cost and how long each was on its way to every tier, from events, for charts.

Invariant: it is bounded, whatever trainers save. A daemon's start begins it anew, because manifests do not tell it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from tierd.core.event_kinds import Event
from tierd.core.ids import CheckpointId

_SAVES, _RUNS, _METRICS = 200, 32, 8  # of each run the last; those that saved last; of each save the first by name


@dataclass(slots=True)
class SavePoint:
    """One checkpoint, as far as events of the daemon since its start name it.

    Attributes:
        at: when the daemon heard of it first, RFC 3339 in UTC.
        blocked_s: how long `save` blocked training, of the slowest rank here; None: no trainer reported it.
        durable_s: from the call of `save` until it was durable in the spool, of the slowest rank here; None: as above.
        tier_s: by tier, how long after the spool the tier had it whole and verified.
        metrics: its first 8 metrics by name; None for a value that is not finite.
    """

    run: str
    attempt: str
    step: int
    at: str
    blocked_s: float | None = None
    durable_s: float | None = None
    tier_s: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)


class SaveHistory:
    """The last saves of each run."""

    def __init__(self) -> None:
        self._by_run: dict[str, dict[tuple[str, int], SavePoint]] = {}

    def add(self, event: Event) -> None:
        """Note an event; only those of saves count."""
        if event.what not in ("persisted", "durable") or event.run is None or event.step is None:
            return
        saves = self._by_run[event.run] = self._by_run.pop(event.run, {})  # the last run saved last
        attempt = event.attempt or ""
        point = saves.setdefault((attempt, event.step), SavePoint(event.run, attempt, event.step, event.at))
        if event.what == "durable":
            point.tier_s[event.place] = event.seconds or 0.0
        else:
            point.blocked_s = _longer(point.blocked_s, event.blocked_s)
            point.durable_s = _longer(point.durable_s, event.seconds)
        point.metrics.update(list((event.metrics or {}).items())[:_METRICS])
        if len(saves) > _SAVES:
            del saves[next(iter(saves))]
        if len(self._by_run) > _RUNS:
            del self._by_run[next(iter(self._by_run))]

    def times_of(self, run: str) -> Iterator[tuple[CheckpointId, float]]:
        """Yield each save of a run, and when the daemon heard of it, in seconds since 1970."""
        for point in self._by_run.get(run, {}).values():
            yield CheckpointId(run, point.attempt, point.step), datetime.fromisoformat(point.at).timestamp()

    def points(self) -> tuple[SavePoint, ...]:
        """Return all saves by run, the latest launch and step last."""
        return tuple(saves[key] for _, saves in sorted(self._by_run.items()) for key in sorted(saves))


def _longer(first: float | None, second: float | None) -> float | None:
    return max((seconds for seconds in (first, second) if seconds is not None), default=None)
