"""The metrics: names by Prometheus' rules, sums over events, and what bounds the number of series."""

from __future__ import annotations

import asyncio
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
from support.web import get, serving
from support.world import commit, part, reconciler

from tierd.core.event_kinds import Event
from tierd.core.ids import PartId
from tierd.daemon.daemon_status import make_status
from tierd.daemon.http import openmetrics as metrics
from tierd.daemon.http.openmetrics import FAMILIES, EventCounters, sample_names
from tierd.events.notifier import NotifyStatus
from tierd.spool.commit import CommittedPart


def read(body: bytes) -> dict[tuple[str, ...], float]:
    """The samples by name and the values of their labels, in the order of the names of the labels."""
    found = {}
    for family in parse(body.decode()):
        for one in family.samples:
            found[(one.name, *(value for _, value in sorted(one.labels.items())))] = one.value
    return found


# -- metrics ----------------------------------------------------------------------------------------------------------

_UNITS = ("seconds", "bytes", "ratio")
_NOT_BASE = r"_(milliseconds|ms|minutes|hours|days|kilobytes|megabytes|kib|mib|gib|bits|percent|percentage)(_|$)"


def faults(name: str, kind: str, labels: tuple[str, ...], means: str) -> list[str]:
    """What Prometheus' naming rules, as its linter checks them, find wrong with a metric."""
    found = []
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        found.append("not in snake case")
    if not name.startswith("tierd_"):
        found.append("without the application's prefix")
    if name.endswith("_total") != (kind == "counter"):
        found.append("counters, and nothing else, end in _total")
    if re.search(_NOT_BASE, name):
        found.append("not a base unit")
    base = name.removesuffix("_total")
    if any(f"_{unit}_" in base for unit in _UNITS):
        found.append("the unit is not at the end")
    if re.search(r"_(count|sum|bucket|created)$", base) or re.search(r"_(gauge|counter|summary|histogram)(_|$)", name):
        found.append("a reserved suffix or the type in the name")
    if not means or any(not re.fullmatch(r"[a-z][a-z_]*", one) or one in ("le", "quantile") for one in labels):
        found.append("no help, or a label that is none")
    if any(label in base.split("_") for label in labels if label not in ("tier", "run")):
        found.append("a label in the name")
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_names_follow_prometheus_rules(name: str) -> None:
    assert faults(name, *FAMILIES[name]) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tierd_saves", "counter"),
        ("tierd_parts_total", "gauge"),
        ("tierd_flush_milliseconds", "gauge"),
        ("tierd_flush_seconds_last", "gauge"),
        ("tierd_flushCount", "gauge"),
        ("saves_total", "counter"),
        ("tierd_flush_seconds_sum", "gauge"),
        ("tierd_free_percent", "gauge"),
        ("tierd_parts_gauge", "gauge"),
    ],
)
def test_planted_metric_name_is_detected(name: str, kind: str) -> None:
    assert faults(name, kind, (), "some help")


async def test_metrics_of_a_daemon(spool, tmp_path) -> None:
    commit(spool, part(3))
    async with serving(spool, tmp_path / "tier") as http:
        async with asyncio.timeout(60):
            while True:
                found = await get(http.address, "/metrics")
                values = read(found.body)
                if values.get(("tierd_flush_seconds_count", "run", "disk")):
                    break
                await asyncio.sleep(0.2)
        assert found.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert found.body.endswith(b"# EOF\n")
        assert (
            values["tierd_last_durable_step", "run", "disk"] == values["tierd_last_durable_step", "run", "local"] == 3
        )
        assert values["tierd_last_durable_age_seconds", "run", "disk"] > 0
        assert values["tierd_flush_raw_bytes_total", "run", "disk"] > 2000
        assert values["tierd_flush_seconds_sum", "run", "disk"] > 0
        assert values["tierd_pending_parts", "run", "disk"] == values["tierd_pending_bytes", "run", "disk"] == 0
        assert values["tierd_tier_reachable", "disk"] == 1 and values["tierd_active_alerts", "disk"] == 0
        assert values["tierd_store_requests_total", "put", "disk"] >= 4
        assert values["tierd_store_requests_total", "list", "disk"] >= 1
        assert 0 < values["tierd_spool_free_bytes",] <= values["tierd_spool_size_bytes",]
        families = {family.name: family for family in parse(found.body.decode())}
        assert set(families) >= {name.removesuffix("_total") for name in FAMILIES}
        assert {name for name in families if name.startswith("tierd_")} == {
            name.removesuffix("_total") for name in FAMILIES
        }
        for name, family in FAMILIES.items():
            one = families[name.removesuffix("_total")]
            assert (one.type, one.documentation) == (family.kind, family.means)
            assert {it.name for it in one.samples} <= set(sample_names(name))
            assert all(tuple(it.labels) == tuple(sorted(family.labels)) for it in one.samples) or one.samples == []


def event(what: str, run: str = "run", place: str = "local", **more: object) -> Event:
    return Event(at="", what=what, place=place, subject="", why="", run=run, **more)


def test_events_are_summed_by_run_and_place() -> None:
    tally = EventCounters()
    for one in (
        event("persisted", seconds=2.0, blocked_s=0.5),
        event("persisted", seconds=1.0, blocked_s=0.25),
        event("persisted", "other"),
        event("persist failed"),
        event("flushed", place="s3", seconds=4.0, raw_bytes=100, sent_bytes=60),
        event("durable", place="s3", seconds=7.0),
        event("restored", place="s3", seconds=3.0),
        event("fell back"),
        event("corrupt", place="s3"),
        event("repaired", place="s3", chunks=3),
        event("repaired", chunks=2),
        event("quarantined", place="s3"),
        event("pruned", place="s3"),
        Event(at="", what="failing", place="s3", subject="", why=""),
    ):
        tally.add(one)
    counts = {(name, *labels): count for name, some in tally.counts.items() for labels, count in some.items()}
    assert counts == {
        ("tierd_saves_total", "run"): 2,
        ("tierd_saves_total", "other"): 1,
        ("tierd_save_failures_total", "run"): 1,
        ("tierd_flush_raw_bytes_total", "run", "s3"): 100,
        ("tierd_flush_sent_bytes_total", "run", "s3"): 60,
        ("tierd_restores_total", "run"): 1,
        ("tierd_restore_fallbacks_total", "run"): 1,
        ("tierd_corrupt_copies_total", "run", "s3"): 1,
        ("tierd_repaired_chunks_total", "run", "s3"): 3,
        ("tierd_repaired_chunks_total", "run", "local"): 2,
        ("tierd_quarantined_copies_total", "run", "s3"): 1,
        ("tierd_pruned_copies_total", "run", "s3"): 1,
    }
    assert {(name, *labels): it for name, some in tally.times.items() for labels, it in some.items()} == {
        ("tierd_save_blocked_seconds", "run"): (2, 0.75),
        ("tierd_save_durable_seconds", "run", "local"): (2, 3.0),
        ("tierd_save_durable_seconds", "run", "s3"): (1, 7.0),
        ("tierd_flush_seconds", "run", "s3"): (1, 4.0),
    }
    tally.keep_only({"other"})
    assert {labels for some in tally.counts.values() for labels in some} == {("other",)}
    assert not any(tally.times.values())


async def test_only_runs_in_the_spool_have_series_and_not_too_many(spool, tmp_path) -> None:
    for number in range(102):
        commit(spool, part(1, launch=number + 1, run=f"run-{number}"), {"a": b""})
    async with serving(spool, tmp_path / "tier") as http:
        gone = PartId(part(1, run="gone").checkpoint, 0, 1)
        http.note_event(event("persisted", gone.checkpoint.run))
        async with asyncio.timeout(60):
            while True:
                values = read((await get(http.address, "/metrics")).body)
                if values["tierd_runs",] == 102:
                    break
                await asyncio.sleep(0.2)
        runs = {key[1] for key in values if len(key) > 1 and key[0] == "tierd_last_durable_step"}
        assert runs == {f"run-{number}" for number in range(2, 102)}  # the 100 with the newest launches
        assert not any("gone" in key for key in values)


def test_every_counter_of_a_run_begins_at_zero() -> None:
    """Also those that are no count of events: repaired chunks and sent bytes began with their first event."""
    tally = EventCounters()
    tally.begin(["run"], ["local", "s3"])
    begun = {(name, *labels) for name, some in tally.counts.items() for labels in some}
    sent = ("tierd_flush_raw_bytes_total", "tierd_flush_sent_bytes_total")
    assert begun == {
        (name, *labels)
        for name, family in FAMILIES.items()
        if family.kind == "counter"
        for labels in ([("run",)] if family.labels == ("run",) else [("run", "local"), ("run", "s3")])
        if family.labels[:1] == ("run",) and (name not in sent or labels[1] == "s3")
    }
    assert set(sent) <= {name for name, *_ in begun} and ("tierd_repaired_chunks_total", "run", "local") in begun


def test_a_name_in_a_label_is_escaped(spool) -> None:
    """A receiver's name and a tier's are the configuration's; a run's is checked. The format escapes all the same."""
    daemon, name = reconciler(spool, {}), 'a"b\\c\nd'
    receiver = NotifyStatus(name, "command", 1, 0, 0, 0, 0, 0, None)
    values = read(metrics.Exposition(daemon, EventCounters()).render(make_status(daemon, 0, 0, (receiver,))))
    assert values["tierd_notifications_total", "delivered", name] == 1


# -- saves and restores -----------------------------------------------------------------------------------------------


def test_times_of_a_save_reach_the_event(spool) -> None:
    daemon = reconciler(spool, {})
    which = part(5)
    daemon.note_commit(which, CommittedPart(10, direct=True, recycled=False, blocked_s=0.0125, durable_s=1.5))
    daemon.save_events.record_restore(which, "local", 0.25)
    saved, restored = daemon.journal.events
    assert (saved.what, saved.blocked_s, saved.seconds) == ("persisted", 0.0125, 1.5)
    assert (restored.what, restored.seconds, restored.rank, daemon.journal.counters["restores"]) == (
        "restored",
        0.25,
        0,
        1,
    )


async def test_counters_of_a_run_begin_at_zero_so_that_an_alert_sees_the_first_event(spool, tmp_path) -> None:
    commit(spool, part(1))
    async with serving(spool, tmp_path / "tier") as http:
        before: dict[tuple[str, ...], float] = {}
        async with asyncio.timeout(60):
            while ("tierd_save_failures_total", "run") not in before:  # the spool was not observed yet
                before = read((await get(http.address, "/metrics")).body)
        for one in (event("persist failed"), event("fell back"), event("quarantined", place="disk")):
            http.note_event(one)
        after = before
        async with asyncio.timeout(60):
            while after["tierd_save_failures_total", "run"] == 0:  # an answer is up to a second old
                after = read((await get(http.address, "/metrics")).body)
                await asyncio.sleep(0.05)
        for sample in (
            ("tierd_save_failures_total", "run"),
            ("tierd_restore_fallbacks_total", "run"),
            ("tierd_quarantined_copies_total", "run", "disk"),
        ):
            assert (before[sample], after[sample]) == (0, 1), sample
        assert after["tierd_quarantined_copies_total", "run", "local"] == 0
