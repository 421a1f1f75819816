"""How the daemon does, as plain data: the answer to `status`. Its JSON form is a stable contract (README)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tierd.core.events import Event
from tierd.core.urls import parse_url
from tierd.daemon.journal import AlertStatus
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.scrub import ScrubStatus
from tierd.daemon.tell import TellStatus


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One lane. `effort` says whether chunks are compressed for it and why. `pending_*` is what the spool has and the
    tier lacks; `retry_in_s` is set while it backs off."""

    name: str
    url: str
    doing: str | None
    effort: str
    reached: bool
    pending_parts: int
    pending_bytes: int
    failures: int
    retry_in_s: float | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class Status:
    """The whole daemon. `spool_free` is a share of its disk; `paused` is the end of a pause in RFC 3339, or "until
    resumed"; `lent_bytes` is memory of trainers, living and dead, that snapshots are handed over in; `counters` count
    since the start."""

    pid: int
    spool: str
    spool_free: float
    spool_parts: int
    trainers: int
    paused: str | None
    lent_bytes: int
    tiers: tuple[TierStatus, ...]
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
        spool=str(reconciler.spool.root),
        spool_free=world.free,
        spool_parts=sum(1 for _ in world.spool.parts()),
        trainers=trainers,
        paused=reconciler.pause.until,
        lent_bytes=lent_bytes,
        tiers=tuple(_tier(reconciler, tier.name, tier.url) for tier in reconciler.config.tier),
        scrub=reconciler.scrubber.status(),
        counters={name: reconciler.journal.counters[name] for name in COUNTERS} | counted,
        events=tuple(reconciler.journal.events),
        alerts=reconciler.journal.alerts(),
        tell=tell,
    )


def _tier(reconciler: Reconciler, name: str, url: str) -> TierStatus:
    lane = reconciler.lanes[name]
    parts, size = reconciler.backlog(name)
    left = lane.retry_at - lane.now()
    return TierStatus(
        name=name,
        url=str(parse_url(url)),
        doing=lane.doing,
        effort=reconciler.tiers.pace.effort(name).why,
        reached=reconciler.world().tiers[name] is not None,
        pending_parts=parts,
        pending_bytes=size,
        failures=lane.failures,
        retry_in_s=round(left, 1) if left > 0 else None,
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
