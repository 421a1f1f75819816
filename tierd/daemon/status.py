"""How the daemon does, as plain data: the answer to `status`. Its JSON form is a stable contract (README)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tierd.core.events import Event
from tierd.core.ids import retention_key
from tierd.core.launches import Lease, Rival, beside, leases
from tierd.core.policies import disagreeing
from tierd.core.retention import RetentionPolicy
from tierd.core.urls import parse_url
from tierd.core.world import World
from tierd.daemon.journal import AlertStatus
from tierd.daemon.peers import THIS
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.scrub import ScrubStatus
from tierd.daemon.tell import TellStatus


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One lane. `effort` says whether chunks are compressed for it and why. `pending_parts` and `pending_bytes` are
    what the spool has and the tier lacks, `pending_prunes` copies that retention gave up and that are still there;
    `append_only`: the tier lets nothing be deleted, so none is pruned. `retry_in_s` is set while it backs off,
    `asked_until` while it asked to be left alone: RFC 3339."""

    name: str
    url: str
    doing: str | None
    effort: str
    reached: bool
    pending_parts: int
    pending_bytes: int
    pending_prunes: int
    append_only: bool
    failures: int
    retry_in_s: float | None
    asked_until: str | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """A run's retention as one node recorded it on a tier, under `key`. `given`: by a `configuration`, a `trainer`, or
    as the `default`. `retention` is null where it cannot be read, and `why` says the reason. `disagrees`: several are
    given there and differ, so whatever any of them keeps is kept; or one cannot be read, and nothing is deleted."""

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
    """The whole daemon. `version` is its version of tierd, `protocol` its protocol number; `spool_free` is a share of
    its disk; `paused` is the end of a pause in RFC 3339, or "until resumed"; `lent_bytes` is memory of trainers, living
    and dead, that snapshots are handed over in; `counters` count since the start."""

    pid: int
    version: str
    protocol: str
    spool: str
    spool_free: float
    spool_parts: int
    trainers: int
    paused: str | None
    lent_bytes: int
    tiers: tuple[TierStatus, ...]
    policies: tuple[PolicyStatus, ...]
    launches: tuple[Rival, ...]
    leases: tuple[Lease, ...]
    scrub: ScrubStatus
    counters: dict[str, int]
    events: tuple[Event, ...]
    alerts: tuple[AlertStatus, ...]
    tell: tuple[TellStatus, ...]


def status(reconciler: Reconciler, trainers: int, lent_bytes: int, tell: tuple[TellStatus, ...] = ()) -> Status:
    """Describe a running reconciler."""
    world = reconciler.world()
    counted = {"told": sum(one.told for one in tell), "untold": sum(one.untold for one in tell)}
    return Status(
        pid=os.getpid(),
        version=THIS.version,
        protocol=str(THIS.protocol),
        spool=str(reconciler.spool.root),
        spool_free=world.free,
        spool_parts=sum(1 for _ in world.spool.parts()),
        trainers=trainers,
        paused=reconciler.pause.until,
        lent_bytes=lent_bytes,
        tiers=tuple(_tier(reconciler, tier.name, tier.url) for tier in reconciler.config.tier),
        policies=tuple(_policies(world)),
        launches=tuple(one for run in sorted(world.spool.alive) for one in beside(world, run, time.time())),
        leases=leases(world),
        scrub=reconciler.scrubber.status(),
        counters={name: reconciler.journal.counters[name] for name in COUNTERS} | counted,
        events=tuple(reconciler.journal.events),
        alerts=reconciler.journal.alerts(),
        tell=tell,
    )


def _policies(world: World) -> Iterator[PolicyStatus]:
    for tier, place in world.tiers.items():
        if place is None:
            continue
        for run, stored in sorted(place.policies.items()):
            disagrees = disagreeing(place, run)
            for one in stored:
                yield PolicyStatus(
                    run=run,
                    tier=tier,
                    by=one.by,
                    host=one.host,
                    written=one.written,
                    given=one.given,
                    key=retention_key(run, one.by, one.given),
                    retention=one.retention,
                    why=one.why,
                    disagrees=one in disagrees,
                )


def _tier(reconciler: Reconciler, name: str, url: str) -> TierStatus:
    lane = reconciler.lanes[name]
    parts, size = reconciler.backlog(name)
    left, asked = lane.retry_at - lane.now(), reconciler.tiers.asked_s(name)
    return TierStatus(
        name=name,
        url=str(parse_url(url)),
        doing=lane.doing,
        effort=reconciler.tiers.pace.effort(name).why,
        reached=reconciler.world().tiers[name] is not None,
        pending_parts=parts,
        pending_bytes=size,
        pending_prunes=reconciler.pending_prunes(name),
        append_only=bool(reconciler.tiers.refusal(name)),
        failures=lane.failures,
        retry_in_s=round(left, 1) if left > 0 else None,
        asked_until=(datetime.now(UTC) + timedelta(seconds=asked)).isoformat(timespec="seconds") if asked else None,
        last_error=str(lane.last_error) if lane.last_error else None,
    )


COUNTERS = {
    "persisted": "snapshots that trainers handed over, committed to the spool",
    "persist_failures": "snapshots that could not be; their trainers were told",
    "flushed": "parts put on a tier, each byte of them verified there",
    "flushed_raw_bytes": "bytes of those parts in the spool",
    "flushed_sent_bytes": "bytes put for them; less than stored where an interrupted flush went on",
    "flushed_shared_bytes": "bytes in the spool that were not sent, since an older checkpoint's chunks hold them",
    "pruned": "copies of checkpoints deleted by retention",
    "corruptions": "copies proven corrupt",
    "healed_chunks": "chunks written to the spool from a tier",
    "quarantined": "copies set aside as beyond repair",
    "scrubbed": "copies read again whole",
    "scrubbed_bytes": "bytes read for that",
    "scrub_findings": "chunks and manifests found corrupt by that, each told once",
    "repaired_chunks": "chunks put right on a tier",
    "alerts": "things that failed three times in a row",
    "told": "events that receivers took, each counted once for each of them",
    "untold": "events that were held back, found no room, or were given up",
    "errors": "looks and actions that failed and were tried again",
}
