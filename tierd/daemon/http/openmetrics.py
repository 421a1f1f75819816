"""The metrics of a running daemon: their table, sums over events, and the OpenMetrics text through prometheus_client.

Invariants: every sample is of a family in `FAMILIES`, of which the reference is made, too. A sample with a run is of a
run in the spool, of 100 runs at most, so that the number of series is bounded. Names follow Prometheus' conventions.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from tierd.core.event_kinds import Event
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL
from tierd.daemon.daemon_status import Status
from tierd.daemon.reconciler import Reconciler

_RUN, _TIER, _RUN_AND_TIER = ("run",), ("tier",), ("run", "tier")
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
    "replicas differ": "tierd_replicas_differ_total",
}
_TIMED = {
    "flushed": "tierd_flush_seconds",
    "persisted": "tierd_save_durable_seconds",
    "durable": "tierd_save_durable_seconds",
}
CONTENT_TYPE = CONTENT_TYPE_LATEST
_MOST_RUNS = 100
Samples = dict[Labels, float]


class MetricFamily(NamedTuple):
    kind: Literal["gauge", "counter", "summary"]
    labels: tuple[str, ...]  # the names of its labels, in order. `tier` is `local` for the spool.
    means: str


FAMILIES: dict[str, MetricFamily] = {
    "tierd_build_info": MetricFamily("gauge", ("version", "protocol"), "always 1"),
    "tierd_runs": MetricFamily(
        "gauge", (), "runs in the spool; those with the newest launches have series, 100 at most"
    ),
    "tierd_last_durable_step": MetricFamily(
        "gauge",
        _RUN_AND_TIER,
        "step of the newest checkpoint that a tier holds whole and verified; of `local`, of the newest one with a "
        "committed part",
    ),
    "tierd_last_durable_age_seconds": MetricFamily("gauge", _RUN_AND_TIER, "time since that checkpoint was made"),
    "tierd_pending_parts": MetricFamily("gauge", _RUN_AND_TIER, "parts in the spool that the tier lacks and wants"),
    "tierd_pending_bytes": MetricFamily("gauge", _RUN_AND_TIER, "the size of these parts in the spool"),
    "tierd_run_behind": MetricFamily(
        "gauge", _RUN, "1 while a checkpoint that a tier wants waits longer to be on any than two saves are apart"
    ),
    "tierd_pending_prunes": MetricFamily(
        "gauge", _RUN_AND_TIER, "copies on the tier that retention gave up and that are still there"
    ),
    "tierd_flush_seconds": MetricFamily("summary", _RUN_AND_TIER, "time to send and verify a part"),
    "tierd_flush_raw_bytes_total": MetricFamily(
        "counter", _RUN_AND_TIER, "the size in the spool of parts that were sent"
    ),
    "tierd_flush_sent_bytes_total": MetricFamily("counter", _RUN_AND_TIER, "bytes sent for them"),
    "tierd_save_blocked_seconds": MetricFamily(
        "summary", _RUN, "time in which `save` blocked training, of saves handed over"
    ),
    "tierd_save_durable_seconds": MetricFamily(
        "summary",
        _RUN_AND_TIER,
        "time until a checkpoint was durable; `local`: since the call of `save`, of handed-over saves; a tier: since "
        "the daemon saw the checkpoint in the spool",
    ),
    "tierd_saves_total": MetricFamily("counter", _RUN, "parts committed to the spool"),
    "tierd_save_failures_total": MetricFamily("counter", _RUN, "saves that were given up"),
    "tierd_restores_total": MetricFamily("counter", _RUN, "parts that ranks read and verified, to load them"),
    "tierd_restore_fallbacks_total": MetricFamily("counter", _RUN, "restores that passed over newer checkpoints"),
    "tierd_corrupt_copies_total": MetricFamily("counter", _RUN_AND_TIER, "copies proven corrupt"),
    "tierd_repaired_chunks_total": MetricFamily(
        "counter", _RUN_AND_TIER, "corrupt or missing chunks that were repaired"
    ),
    "tierd_quarantined_copies_total": MetricFamily(
        "counter", _RUN_AND_TIER, "copies quarantined, because no place had the right bytes"
    ),
    "tierd_replicas_differ_total": MetricFamily(
        "counter", _RUN, "events `replicas differ`: tensors differ between ranks that should hold the same"
    ),
    "tierd_pruned_copies_total": MetricFamily("counter", _RUN_AND_TIER, "copies that retention deleted"),
    "tierd_tier_reachable": MetricFamily(
        "gauge", _TIER, "1 if the tier answered the last listing and no request has waited for 20 s, else 0"
    ),
    "tierd_tier_failed_tries": MetricFamily("gauge", _TIER, "failed tries in a row"),
    "tierd_store_requests_total": MetricFamily(
        "counter",
        ("tier", "kind"),
        "requests of listings, flushes and prunes since the start or the last reload; `kind` is put, get, list, delete",
    ),
    "tierd_active_alerts": MetricFamily("gauge", _TIER, "failures that last now, by the place that fails"),
    "tierd_alerts_total": MetricFamily("counter", (), "failures that became alerts"),
    "tierd_errors_total": MetricFamily("counter", (), "listings and actions that failed and were tried again"),
    "tierd_problems": MetricFamily(
        "gauge", ("severity",), "problems that `tierd status --check` prints: warning, alert"
    ),
    "tierd_spool_free_bytes": MetricFamily("gauge", (), "free bytes of the spool's file system"),
    "tierd_spool_size_bytes": MetricFamily("gauge", (), "the size of the spool's file system"),
    "tierd_spool_parts": MetricFamily("gauge", (), "parts in the spool"),
    "tierd_trainers": MetricFamily("gauge", (), "attached training processes"),
    "tierd_paused": MetricFamily("gauge", (), "1 during a pause, else 0"),
    "tierd_handed_over_bytes": MetricFamily("gauge", (), "memory of trainers that holds handed-over snapshots"),
    "tierd_scrub_overdue_copies": MetricFamily("gauge", (), "copies that were not verified again within `scrub`"),
    "tierd_scrubbed_bytes_total": MetricFamily("counter", (), "bytes that the scrub read"),
    "tierd_notifications_total": MetricFamily(
        "counter", ("receiver", "outcome"), "events for receivers; `outcome` is delivered or dropped"
    ),
}


def sample_names(name: str) -> tuple[str, ...]:
    """The names of a metric's samples."""
    return (f"{name}_count", f"{name}_sum") if FAMILIES[name].kind == "summary" else (name,)


class EventCounters:
    """Sums of events since the daemon's start."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))  # metric -> labels -> sum
        # Metric -> labels -> (number, sum in seconds).
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

    def keep_only(self, runs: Collection[str]) -> None:
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


class Exposition:
    def __init__(self, reconciler: Reconciler, tally: EventCounters) -> None:
        self._reconciler, self._tally = reconciler, tally
        self._processes = CollectorRegistry()
        ProcessCollector(registry=self._processes)

    def render(self, status: Status) -> bytes:
        """Return the metrics as OpenMetrics text."""
        inventory = self._reconciler.inventory()
        runs = _newest(inventory)
        self._tally.keep_only(runs)
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
                newest = copies.newest if name == SPOOL else copies.latest_usable
                if newest is None:
                    continue
                steps[run, name] = newest.step
                if facts := copies.copies[newest].metadata_facts:
                    ages[run, name] = max(0.0, time.time() - facts.created.timestamp())
        behind = {lag.run: lag.state == "late" for lag in self._reconciler.lags.judge()}
        parts, sizes, prunes = Counter[Labels](), Counter[Labels](), Counter[Labels]()
        for tier in (tier_status.name for tier_status in status.tiers):
            waiting = self._reconciler.backlog.prunes_by_run(tier)
            for run in runs:
                parts[run, tier] = sizes[run, tier] = 0
                prunes[run, tier] = waiting[run]
            for part, size in self._reconciler.backlog.pending_sizes(tier).items():
                if (part.checkpoint.run, tier) in parts:
                    parts[part.checkpoint.run, tier] += 1
                    sizes[part.checkpoint.run, tier] += size
        return {
            "tierd_last_durable_step": steps,
            "tierd_last_durable_age_seconds": ages,
            "tierd_pending_parts": {labels: float(count) for labels, count in parts.items()},
            "tierd_pending_bytes": {labels: float(count) for labels, count in sizes.items()},
            "tierd_pending_prunes": {labels: float(count) for labels, count in prunes.items()},
            "tierd_run_behind": {(run,): float(behind.get(run, False)) for run in runs},
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
