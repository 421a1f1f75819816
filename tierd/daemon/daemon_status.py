"""The daemon's status as plain data, the answer to `status`. Its JSON form is a contract."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from tierd.core.diagnosis.problems import Problem
from tierd.core.event_kinds import Event
from tierd.core.ids import retention_key
from tierd.core.planning.inventory import Inventory, disagreeing_policies
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.timeline.concurrent_launches import Lease, Rival, concurrent_launches, list_leases
from tierd.core.urls import parse_url
from tierd.daemon.client_connections import DAEMON_PEER
from tierd.daemon.component_status import ScrubStatus, WatchStatus
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.status_problems import all_problems
from tierd.events.journal import AlertStatus, utc_timestamp
from tierd.events.notifier import NotifyStatus


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier, as the daemon's worker for it sees it.

    Attributes:
        url: the tier's address, without credentials.
        doing: the action under way; None: the worker is idle.
        compression: whether the daemon compresses chunks for this tier, and why.
        reached: whether the tier answered the last listing.
        pending_parts: parts that the spool has and the tier lacks.
        pending_bytes: the size of these parts in the spool.
        pending_prunes: copies on the tier that retention does not keep and that are still there.
        append_only: whether the tier refuses deletions, so that the daemon prunes nothing there.
        failures: failed tries in a row.
        retry_in_s: seconds until the next try after a failure; None: no retry is waiting.
        asked_until: RFC 3339; until then the daemon sends nothing, because the server asked for it with `Retry-
            After`; None: the server did not ask.
        last_error: the message of the last failure; None: none.
        waiting_since: RFC 3339; since then requests to the tier wait for an answer, and no byte has moved; None: it
            answered within the last seconds, or was not asked.
        unanswered: why that wait is a problem; None: there is none, or it has not lasted for 20 seconds.
    """

    name: str
    url: str
    doing: str | None
    compression: str
    reached: bool
    pending_parts: int
    pending_bytes: int
    pending_prunes: int
    append_only: bool
    failures: int
    retry_in_s: float | None
    asked_until: str | None
    last_error: str | None
    waiting_since: str | None = None
    unanswered: str | None = None


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """A run's retention as one node recorded it on a tier.

    Attributes:
        by: the node that recorded it, as 8 hexadecimal digits.
        host: that node's host name.
        written: when it was recorded, RFC 3339.
        given: who set it: a `configuration`, a `trainer`, or nobody (`default`).
        key: the object on the tier that holds it.
        retention: the rules; None: the object cannot be read.
        why: why it cannot be read, or empty.
        disagrees: several policies are recorded there and differ, so the daemon keeps all that any of them keeps;
            or one cannot be read, so the daemon deletes nothing.
    """

    run: str
    tier: str
    by: str
    host: str
    written: str
    given: str
    key: str
    retention: RetentionPolicy | None
    why: str
    disagrees: bool


@dataclass(frozen=True, slots=True)
class Status:
    """The whole daemon.

    Attributes:
        at: when this was observed, RFC 3339 in UTC.
        running: false in the record of a daemon that has ended, or that was killed.
        problems: what is wrong, the worst first.
        pid: its process; None in the record of an ended daemon, because another process may have the number.
        version: its version of tierd.
        protocol: its protocol number.
        spool: the path of the spool.
        spool_free: the free share of the spool's disk, from 0 to 1.
        spool_parts: parts in the spool.
        trainers: attached training processes.
        paused: the end of a pause in RFC 3339, or `until resumed`; None: not paused.
        handed_over_bytes: memory of trainers, alive or dead, that holds handed-over snapshots.
        tiers: each tier, in order of preference.
        policies: the retention of each run on each tier.
        launches: launches that save the same run at the same time.
        leases: who saves which rank on this node.
        scrub: the progress of the scrub.
        counters: counts since the daemon's start: see the metrics reference.
        events: the last events.
        alerts: failures that go on.
        notify: the receivers of events.
        watches: the watched directories.
    """

    at: str
    running: bool
    problems: tuple[Problem, ...]
    pid: int | None
    version: str
    protocol: str
    spool: str
    spool_free: float
    spool_parts: int
    trainers: int
    paused: str | None
    handed_over_bytes: int
    tiers: tuple[TierStatus, ...]
    policies: tuple[PolicyStatus, ...]
    launches: tuple[Rival, ...]
    leases: tuple[Lease, ...]
    scrub: ScrubStatus
    counters: dict[str, int]
    events: tuple[Event, ...]
    alerts: tuple[AlertStatus, ...]
    notify: tuple[NotifyStatus, ...]
    watches: tuple[WatchStatus, ...] = ()


def make_status(
    reconciler: Reconciler, trainers: int, handed_over_bytes: int, notify: tuple[NotifyStatus, ...] = ()
) -> Status:
    """Describe a running reconciler."""
    inventory = reconciler.inventory()
    counted = {
        "delivered": sum(notifier.delivered for notifier in notify),
        "dropped": sum(notifier.dropped for notifier in notify),
    }
    bare_status = Status(
        at=utc_timestamp(),
        running=True,
        problems=(),
        pid=os.getpid(),
        version=DAEMON_PEER.version,
        protocol=str(DAEMON_PEER.protocol),
        spool=str(reconciler.spool.root),
        spool_free=inventory.free,
        spool_parts=sum(1 for _ in inventory.spool.parts()),
        trainers=trainers,
        paused=reconciler.pause.until,
        handed_over_bytes=handed_over_bytes,
        tiers=tuple(_tier(reconciler, tier.name, tier.url) for tier in reconciler.config.tier),
        policies=tuple(_policies(inventory)),
        launches=tuple(
            launch
            for run in sorted(inventory.spool.alive)
            for launch in concurrent_launches(inventory, run, time.time())
        ),
        leases=list_leases(inventory),
        scrub=reconciler.scrubber.status(),
        counters={name: reconciler.journal.counters[name] for name in COUNTERS} | counted,
        events=tuple(reconciler.journal.events),
        alerts=reconciler.journal.alerts(),
        notify=notify,
        watches=tuple(reconciler.watches[run] for run in sorted(reconciler.watches)),
    )
    problems = all_problems(bare_status, reconciler.journal, reconciler.lags.judge(), reconciler.unsent())
    return replace(bare_status, problems=problems)


def _policies(inventory: Inventory) -> Iterator[PolicyStatus]:
    for tier, place in inventory.tiers.items():
        if place is None:
            continue
        for run, stored in sorted(place.policies.items()):
            disagrees = disagreeing_policies(place, run)
            for policy in stored:
                yield PolicyStatus(
                    run=run,
                    tier=tier,
                    by=policy.by,
                    host=policy.host,
                    written=policy.written,
                    given=policy.given,
                    key=retention_key(run, policy.by, policy.given),
                    retention=policy.retention,
                    why=policy.why,
                    disagrees=policy in disagrees,
                )


def _tier(reconciler: Reconciler, name: str, url: str) -> TierStatus:
    worker = reconciler.workers[name]
    backlog = reconciler.backlog.pending_sizes(name)
    retry_in_s, asked_s = worker.retry_at - worker.now(), reconciler.tiers.retry_after_s(name)
    silence = reconciler.silence
    since = silence.since(name)
    return TierStatus(
        name=name,
        url=str(parse_url(url)),
        doing=worker.doing,
        compression=reconciler.flushes.throughput.compression(name).why,
        reached=reconciler.inventory().tiers[name] is not None,
        pending_parts=len(backlog),
        pending_bytes=sum(backlog.values()),
        pending_prunes=reconciler.backlog.prunes_by_run(name).total(),
        append_only=bool(reconciler.tiers.refusal(name)),
        failures=worker.failures,
        retry_in_s=round(retry_in_s, 1) if retry_in_s > 0 else None,
        asked_until=(datetime.now(UTC) + timedelta(seconds=asked_s)).isoformat(timespec="seconds") if asked_s else None,
        last_error=str(worker.last_error) if worker.last_error else None,
        waiting_since=since.isoformat(timespec="seconds") if since else None,
        unanswered=silence.describe(name) if silence.is_problem(name) else None,
    )


COUNTERS = {
    "persisted": "snapshots that trainers handed over and that the daemon committed to the spool",
    "persist_failures": "handed-over snapshots that could not be committed; their trainers got the error",
    "flushed": "parts sent to a tier, with each byte verified there",
    "flushed_raw_bytes": "the size of these parts in the spool",
    "flushed_sent_bytes": "bytes sent for them; less than stored if an interrupted flush was continued",
    "flushed_shared_bytes": "bytes in the spool that were not sent, because chunks of an older checkpoint hold them",
    "pruned": "copies of checkpoints that retention deleted",
    "corruptions": "copies proven corrupt",
    "healed_chunks": "chunks of the spool that were repaired from a tier",
    "quarantined": "copies that were quarantined, because no place had the right bytes",
    "replicas_differ": "events that tensors differ between ranks that should hold the same",
    "scrubbed": "copies that the scrub read completely",
    "scrubbed_bytes": "bytes that the scrub read",
    "scrub_findings": "chunks and manifests that the scrub found corrupt, each counted once",
    "repaired_chunks": "chunks of a tier that were repaired from another place",
    "alerts": "failures that became alerts",
    "delivered": "events that receivers took, counted once for each receiver",
    "dropped": "events that receivers did not get: held back, no room in the queue, or given up",
    "restores": "parts that ranks read and verified, to load them",
    "fallbacks": "restores that passed over newer checkpoints",
    "errors": "listings and actions that failed and were tried again",
}
