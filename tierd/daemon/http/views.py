"""The answers of the HTTP server, from the daemon's present knowledge.

Invariant: no answer makes the daemon observe a place. An answer is computed at most once in `_FRESH` seconds however
many clients ask, and a long computation runs in a thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from tierd.core.ids import PartId
from tierd.core.report import Checkpoint, report
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.status import Status
from tierd.events.journal import now

_FRESH = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class InFlight:
    """A part that is being copied.

    Attributes:
        doing: `flush` (to tiers) or `fetch` (from tiers, for a restore or a repair).
        done, total: raw bytes; null for a flush.
    """

    run: str
    step: int
    attempt: str
    rank: int
    doing: str
    done: int | None
    total: int | None


@dataclass(frozen=True, slots=True)
class Runs:
    """The answer to `/runs`: every checkpoint that the daemon knows, from its last observation of each place.

    Attributes:
        at: when this was computed, RFC 3339 in UTC.
        checkpoints: as in the answer of `ls`.
        held: checkpoints that a restore holds in the spool, as `RUN/STEP.ATTEMPT`.
        in_flight: parts that are being copied.
    """

    at: str
    checkpoints: tuple[Checkpoint, ...]
    unreached: tuple[str, ...]
    held: tuple[str, ...]
    in_flight: tuple[InFlight, ...]


class Shared:
    """An answer that concurrent requests share.

    Args:
        compute: makes the answer.
    """

    def __init__(self, compute: Callable[[], Awaitable[bytes]]) -> None:
        self._compute = compute
        self._lock = asyncio.Lock()
        self._made, self._answer = -math.inf, b""

    async def get(self) -> bytes:
        """Return an answer that is at most `_FRESH` seconds old."""
        async with self._lock:
            if time.monotonic() - self._made >= _FRESH:
                self._answer = await self._compute()
                self._made = time.monotonic()
            return self._answer


class Views:
    """The answers.

    Args:
        reconciler: the daemon's reconciler.
        status: describes the daemon.
        render: makes metrics of a status.
    """

    def __init__(self, reconciler: Reconciler, status: Callable[[], Status], render: Callable[[Status], bytes]) -> None:
        self._reconciler, self._status, self._render = reconciler, status, render
        self.status, self.runs, self.metrics = Shared(self._as_json), Shared(self._runs), Shared(self._metrics)

    @property
    def is_ready(self) -> bool:
        """Whether the daemon has observed the spool, and is not ending."""
        return self._reconciler.is_ready

    async def _as_json(self) -> bytes:
        return msgspec.json.encode(self._status())

    async def _metrics(self) -> bytes:
        return self._render(self._status())

    async def _runs(self) -> bytes:
        reconciler = self._reconciler
        inventory, config = reconciler.inventory(), reconciler.config
        fetching = {part: (progress.done, progress.total) for part, progress in reconciler.repairs.under_way.items()}
        in_flight = [
            *(_in_flight(part, "flush") for part in sorted(inventory.busy)),
            *(_in_flight(part, "fetch", *sizes) for part, sizes in sorted(fetching.items())),
        ]

        def compute() -> bytes:
            found = report(inventory, config)
            held = tuple(f"{one.run}/{one.name}" for one in sorted(inventory.held))
            return msgspec.json.encode(Runs(now(), found.checkpoints, found.unreached, held, tuple(in_flight)))

        return await asyncio.to_thread(compute)


def _in_flight(part: PartId, doing: str, done: int | None = None, total: int | None = None) -> InFlight:
    one = part.checkpoint
    return InFlight(one.run, one.step, one.attempt, part.rank, doing, done, total)
