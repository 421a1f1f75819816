"""The answers of the HTTP server, from the daemon's present knowledge.

Invariant: no answer makes the daemon observe a place. An answer is computed at most once in `_FRESH` seconds however
many clients ask, and a long computation runs in a thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

import msgspec

from tierd.daemon.reconcile import Reconciler
from tierd.daemon.reports.runs import runs
from tierd.daemon.status import Status

_FRESH = 1.0  # seconds


class SharedAnswer:
    """An answer that concurrent requests share.

    Args:
        compute: makes the answer.
    """

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


class Views:
    """The answers.

    Args:
        reconciler: the daemon's reconciler.
        status: describes the daemon.
        render: makes metrics of a status.
    """

    def __init__(self, reconciler: Reconciler, status: Callable[[], Status], render: Callable[[Status], bytes]) -> None:
        self._reconciler, self._status, self._render = reconciler, status, render
        self.status, self.runs, self.metrics = (
            SharedAnswer(self._as_json),
            SharedAnswer(self._runs),
            SharedAnswer(self._metrics),
        )

    @property
    def is_ready(self) -> bool:
        """Whether the daemon has observed the spool, and is not ending."""
        return self._reconciler.is_ready

    async def _as_json(self) -> bytes:
        return msgspec.json.encode(self._status())

    async def _metrics(self) -> bytes:
        return self._render(self._status())

    async def _runs(self) -> bytes:
        return msgspec.json.encode(await runs(self._reconciler))
