"""The runs as the daemon knows them, for the page and `tierd top`, and the answers that HTTP requests share.

Invariant: no answer makes the daemon observe a place. An answer is computed at most once in `_FRESH` seconds however
many clients ask, and a long computation runs in a thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

import msgspec

from tierd.core.event_kinds import Event
from tierd.core.ids import PartId
from tierd.core.planning.flush_lag import FlushLag
from tierd.core.run_report import Checkpoint, LaunchSteps, launch_steps, make_report
from tierd.daemon.daemon_status import Status
from tierd.daemon.reconciler import Reconciler
from tierd.events.journal import utc_timestamp
from tierd.events.save_history import SavePoint

SENT_MINUTES = 30  # of which the bytes that were sent are shown
_FRESH = 1.0  # seconds for which an answer is given again


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
class RunsReport:
    """Every checkpoint that the daemon knows, from its last observation of each place.

    Attributes:
        at: when this was computed, RFC 3339 in UTC.
        checkpoints: as in the answer of `ls`.
        launches: the launches of each run, in their order.
        held: checkpoints that a restore holds in the spool, as `RUN/STEP.ATTEMPT`.
        in_flight: parts that are being copied.
        sent_bytes: by tier, the bytes of flushes that ended in each of the last 30 minutes of the clock, the present
            one, which is not over, last.
        lags: of each run, whether the tiers have what its policy wants there.
        saves: the last 200 saves, since the daemon's start, of each of the 32 runs that saved last.
    """

    at: str
    checkpoints: tuple[Checkpoint, ...]
    launches: tuple[LaunchSteps, ...]
    unreached: tuple[str, ...]
    held: tuple[str, ...]
    in_flight: tuple[InFlight, ...]
    sent_bytes: dict[str, tuple[int, ...]]
    lags: tuple[FlushLag, ...]
    saves: tuple[SavePoint, ...]


async def report_runs(reconciler: Reconciler) -> RunsReport:
    """Describe all runs of a running reconciler."""
    inventory, config, at = reconciler.report_inventory(), reconciler.config, utc_timestamp()
    in_flight = tuple(_in_flight(reconciler))
    sent = sent_bytes(list(reconciler.journal.events), [tier.name for tier in config.tier], at)
    lags, saves = reconciler.lags.judge(), reconciler.journal.saves.points()

    def compute() -> RunsReport:
        run_report = make_report(inventory, config)
        held_names = tuple(f"{checkpoint.run}/{checkpoint.name}" for checkpoint in sorted(inventory.being_restored))
        launches = launch_steps(run_report.checkpoints, inventory.remembered)
        checkpoints, unreached = run_report.checkpoints, run_report.unreached
        return RunsReport(at, checkpoints, launches, unreached, held_names, in_flight, sent, lags, saves)

    return await asyncio.to_thread(compute)


def sent_bytes(events: Iterable[Event], tiers: Iterable[str], at: str) -> dict[str, tuple[int, ...]]:
    """Return by tier the bytes that flushes sent, for each of the `SENT_MINUTES` of the clock up to `at` (RFC 3339).

    A minute of the clock keeps its bytes, where one that is counted back from `at` would change with every answer.
    """
    by_tier = {name: [0] * SENT_MINUTES for name in tiers}
    present = _minute(at)
    for event in events:
        minute = present - _minute(event.at)
        if event.what == "flushed" and event.place in by_tier and 0 <= minute < SENT_MINUTES:
            by_tier[event.place][SENT_MINUTES - 1 - minute] += event.sent_bytes or 0
    return {name: tuple(counts) for name, counts in by_tier.items()}


def _minute(at: str) -> int:
    """The minutes of the clock from 1970 to a time, RFC 3339."""
    return int(datetime.fromisoformat(at).timestamp() // 60)


def _in_flight(reconciler: Reconciler) -> Iterator[InFlight]:
    moving = list(reconciler.flushes.running_flushes())
    sent = {part for _, part, _ in moving}
    for part in sorted(reconciler.inventory().busy - sent):
        yield _transfer_in_flight(part, "flush")
    for tier, part, at in sorted(moving, key=lambda flush: flush[1]):
        yield _transfer_in_flight(part, "flush", tier, at.done, at.total)
    for part, progress in sorted(reconciler.repairs.running_fetches.items()):
        yield _transfer_in_flight(part, "fetch", None, progress.done, progress.total)


def _transfer_in_flight(
    part: PartId, doing: str, tier: str | None = None, moved: int | None = None, total: int | None = None
) -> InFlight:
    checkpoint = part.checkpoint
    return InFlight(checkpoint.run, checkpoint.step, checkpoint.attempt, part.rank, doing, tier, moved, total)


class SharedAnswer:
    """An answer that concurrent requests share."""

    def __init__(self, compute: Callable[[], Awaitable[bytes]]) -> None:
        self._compute = compute
        self._lock = asyncio.Lock()
        self._computed_at, self._answer = -math.inf, b""

    async def get(self) -> bytes:
        """Return an answer that is at most `_FRESH` seconds old."""
        async with self._lock:
            if time.monotonic() - self._computed_at >= _FRESH:
                self._answer = await self._compute()
                self._computed_at = time.monotonic()
            return self._answer


class HttpAnswers:
    def __init__(self, reconciler: Reconciler, status: Callable[[], Status], render: Callable[[Status], bytes]) -> None:
        async def status_json() -> bytes:
            return msgspec.json.encode(status())

        async def runs_json() -> bytes:
            return msgspec.json.encode(await report_runs(reconciler))

        async def metrics() -> bytes:
            return render(status())

        self._reconciler = reconciler
        self.status, self.runs, self.metrics = map(SharedAnswer, (status_json, runs_json, metrics))

    @property
    def is_ready(self) -> bool:
        """Whether the daemon has observed the spool, and is not ending."""
        return self._reconciler.is_ready
