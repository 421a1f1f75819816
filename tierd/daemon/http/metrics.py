"""The metrics of a running daemon in the OpenMetrics text format, through prometheus_client.

Invariant: every sample is of a family in `FAMILIES`. A sample with a run is of a run in the spool, of 100 runs at most,
so that the number of series is bounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from tierd.core.ids import CheckpointId
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL
from tierd.daemon.http.families import FAMILIES
from tierd.daemon.http.tally import Labels, Tally
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.status import Status

CONTENT_TYPE = CONTENT_TYPE_LATEST
_MOST_RUNS = 100

Samples = dict[Labels, float]


class Exposition:
    """Renders metrics.

    Args:
        reconciler: the daemon's reconciler.
        tally: the sums over its events.
    """

    def __init__(self, reconciler: Reconciler, tally: Tally) -> None:
        self._reconciler, self._tally = reconciler, tally
        self._processes = CollectorRegistry()
        ProcessCollector(registry=self._processes)

    def render(self, status: Status) -> bytes:
        """Return the metrics as OpenMetrics text."""
        inventory = self._reconciler.inventory()
        runs = _newest(inventory)
        self._tally.keep(runs)
        self._tally.begin(runs, (SPOOL, *self._reconciler.workers))
        samples = {**self._node(status), **self._places(status, inventory, runs)}
        registry = CollectorRegistry()
        registry.register(_FixedCollector([*self._families(samples), *self._processes.collect()]))
        return bytes(generate_latest(registry))  # type: ignore[no-untyped-call]

    def _families(self, samples: Mapping[str, Samples]) -> Iterator[Metric]:
        for name, family in FAMILIES.items():
            if family.kind == "summary":
                summary = SummaryMetricFamily(name, family.means, labels=family.labels)
                for labels, (number, total) in self._tally.times[name].items():
                    summary.add_metric(labels, count_value=number, sum_value=total)
                yield summary
                continue
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = make(name, family.means, labels=family.labels)
            for labels, value in (samples[name] if name in samples else self._tally.counts[name]).items():
                metric.add_metric(labels, value)
            yield metric

    def _node(self, status: Status) -> dict[str, Samples]:
        """The metrics that have no label `run`."""
        free, total = self._reconciler.spool.free()
        severities = Counter(problem.severity for problem in status.problems)
        alerts = Counter(dict.fromkeys(self._reconciler.workers, 0))
        alerts.update(alert.place for alert in status.alerts)
        tiers, counters = self._reconciler.tiers, status.counters
        return {
            "tierd_build_info": {(status.version, status.protocol): 1},
            "tierd_runs": {(): len(self._reconciler.inventory().spool.runs)},
            "tierd_tier_reachable": {
                (tier_status.name,): tier_status.reached and not tier_status.unanswered for tier_status in status.tiers
            },
            "tierd_tier_failed_tries": {(tier_status.name,): tier_status.failures for tier_status in status.tiers},
            "tierd_store_requests_total": {
                (tier_status.name, kind): count
                for tier_status in status.tiers
                for kind, count in tiers.requests_by_kind(tier_status.name).items()
            },
            "tierd_active_alerts": {(place,): count for place, count in alerts.items()},
            "tierd_alerts_total": {(): counters["alerts"]},
            "tierd_errors_total": {(): counters["errors"]},
            "tierd_problems": {(severity,): severities[severity] for severity in ("warning", "alert")},
            "tierd_spool_free_bytes": {(): free},
            "tierd_spool_size_bytes": {(): total},
            "tierd_spool_parts": {(): status.spool_parts},
            "tierd_trainers": {(): status.trainers},
            "tierd_paused": {(): status.paused is not None},
            "tierd_handed_over_bytes": {(): status.handed_over_bytes},
            "tierd_scrub_overdue_copies": {(): status.scrub.due},
            "tierd_scrubbed_bytes_total": {(): counters["scrubbed_bytes"]},
            "tierd_notifications_total": {
                (notifier.name, outcome): count
                for notifier in status.notify
                for outcome, count in (("delivered", notifier.delivered), ("dropped", notifier.dropped))
            },
        }

    def _places(self, status: Status, inventory: Inventory, runs: list[str]) -> dict[str, Samples]:
        """The metrics by run and place that are observed, not counted."""
        steps: Samples = {}
        ages: Samples = {}
        for name, place in inventory.places.items():
            for run in runs:
                copies = place.run(run)
                newest = copies.newest if name == SPOOL else max(copies.whole, key=_age_order, default=None)
                if newest is None:
                    continue
                steps[run, name] = newest.step
                if facts := copies.seen[newest].spoken:
                    ages[run, name] = max(0.0, time.time() - facts.created.timestamp())
        parts, sizes, prunes = Counter[Labels](), Counter[Labels](), Counter[Labels]()
        for tier in (tier_status.name for tier_status in status.tiers):
            waiting = self._reconciler.backlog.prunes(tier)
            for run in runs:
                parts[run, tier] = sizes[run, tier] = 0
                prunes[run, tier] = waiting[run]
            for part, size in self._reconciler.backlog.of(tier).items():
                if (part.checkpoint.run, tier) in parts:
                    parts[part.checkpoint.run, tier] += 1
                    sizes[part.checkpoint.run, tier] += size
        return {
            "tierd_last_durable_step": steps,
            "tierd_last_durable_age_seconds": ages,
            "tierd_pending_parts": {labels: float(count) for labels, count in parts.items()},
            "tierd_pending_bytes": {labels: float(count) for labels, count in sizes.items()},
            "tierd_pending_prunes": {labels: float(count) for labels, count in prunes.items()},
        }


class _FixedCollector(Collector):
    """Metrics that were collected already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _newest(inventory: Inventory) -> list[str]:
    """The runs in the spool, those with the newest launches first, at most `_MOST_RUNS`."""
    latest = {run: max(copies.attempts, default="") for run, copies in inventory.spool.runs.items()}
    return sorted(latest, key=lambda run: (latest[run], run), reverse=True)[:_MOST_RUNS]


def _age_order(checkpoint: CheckpointId) -> tuple[str, int]:
    return checkpoint.attempt, checkpoint.step
