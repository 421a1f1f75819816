"""The runs as the daemon knows them, for the page and `tierd top`: the one answer that both show.

Invariant: making an answer observes no place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from tierd.core.event_kinds import Event
from tierd.core.ids import PartId
from tierd.core.report import Checkpoint, report
from tierd.core.timeline.launch_steps import LaunchSteps, launch_steps
from tierd.daemon.reconcile import Reconciler
from tierd.events.journal import now

MINUTES = 30  # of which the bytes that were sent are shown


@dataclass(frozen=True, slots=True)
class InFlight:
    """A part that is being copied.

    Attributes:
        doing: `flush` (to a tier) or `fetch` (from tiers, for a restore or a repair).
        tier: the tier to which it is flushed; null for a fetch, and while a flush only prepares.
        done, total: raw bytes; null while they are not known.
    """

    run: str
    step: int
    attempt: str
    rank: int
    doing: str
    tier: str | None
    done: int | None
    total: int | None


@dataclass(frozen=True, slots=True)
class Runs:
    """Every checkpoint that the daemon knows, from its last observation of each place.

    Attributes:
        at: when this was computed, RFC 3339 in UTC.
        checkpoints: as in the answer of `ls`.
        launches: the launches of each run, in their order.
        held: checkpoints that a restore holds in the spool, as `RUN/STEP.ATTEMPT`.
        in_flight: parts that are being copied.
        sent_bytes: by tier, the bytes of flushes that ended in each of the last 30 minutes, the present one last.
    """

    at: str
    checkpoints: tuple[Checkpoint, ...]
    launches: tuple[LaunchSteps, ...]
    unreached: tuple[str, ...]
    held: tuple[str, ...]
    in_flight: tuple[InFlight, ...]
    sent_bytes: dict[str, tuple[int, ...]]


async def runs(reconciler: Reconciler) -> Runs:
    """Describe all runs of a running reconciler."""
    inventory, config, at = reconciler.reported(), reconciler.config, now()
    in_flight = tuple(_in_flight(reconciler))
    sent = sent_bytes(list(reconciler.journal.events), [tier.name for tier in config.tier], at)

    def compute() -> Runs:
        run_report = report(inventory, config)
        held_names = tuple(f"{checkpoint.run}/{checkpoint.name}" for checkpoint in sorted(inventory.held))
        launches = launch_steps(run_report.checkpoints, inventory.remembered)
        return Runs(at, run_report.checkpoints, launches, run_report.unreached, held_names, in_flight, sent)

    return await asyncio.to_thread(compute)


def sent_bytes(events: Iterable[Event], tiers: Iterable[str], at: str) -> dict[str, tuple[int, ...]]:
    """Return by tier the bytes that flushes sent, for each of the `MINUTES` before `at` (RFC 3339)."""
    by_tier = {name: [0] * MINUTES for name in tiers}
    end = datetime.fromisoformat(at)
    for event in events:
        minute = int((end - datetime.fromisoformat(event.at)).total_seconds() // 60)
        if event.what == "flushed" and event.place in by_tier and 0 <= minute < MINUTES:
            by_tier[event.place][MINUTES - 1 - minute] += event.sent_bytes or 0
    return {name: tuple(counts) for name, counts in by_tier.items()}


def _in_flight(reconciler: Reconciler) -> Iterator[InFlight]:
    moving = list(reconciler.tiers.flushes.moving())
    sent = {part for _, part, _ in moving}
    for part in sorted(reconciler.inventory().busy - sent):
        yield _transfer_in_flight(part, "flush")
    for tier, part, at in sorted(moving, key=lambda flush: flush[1]):
        yield _transfer_in_flight(part, "flush", tier, at.done, at.total)
    for part, progress in sorted(reconciler.repairs.under_way.items()):
        yield _transfer_in_flight(part, "fetch", None, progress.done, progress.total)


def _transfer_in_flight(
    part: PartId, doing: str, tier: str | None = None, moved: int | None = None, total: int | None = None
) -> InFlight:
    checkpoint = part.checkpoint
    return InFlight(checkpoint.run, checkpoint.step, checkpoint.attempt, part.rank, doing, tier, moved, total)
