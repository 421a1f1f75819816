"""What became of one save.

Law: a `Save` ends exactly once, durable or failed, and says which to whoever asks, as often as they ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierd.client.worker import Latch
from tierd.core.errors import ConfigError, SaveFailed, SaveSkipped
from tierd.core.ids import PartId
from tierd.core.manifest import MAX_METRICS, is_metric_name
from tierd.core.wire import Wait
from tierd.core.world import SPOOL
from tierd.link import Link
from tierd.spool import Spool


@dataclass(slots=True)
class Stats:
    """Counts since the `Checkpointer` was made; times in seconds.

    Attributes:
        saves: calls of `save` and `stage` that took their snapshot.
        failed: of those, how many could not be made durable.
        skipped: calls that took none, since an earlier one was still being persisted (`when_busy`).
        blocked_s: time inside `save`, that is, taken from training.
        first_blocked_s: of that, the first save's, which plans the layout.
        waited_s: of that, the wait for the save before, or for memory that was still being made ready.
        step_waited_s: time that attached optimizers' steps waited for a copy behind them, also taken from training.
        persisted_bytes: bytes made durable in the spool.
        handed_over: saves that the daemon persisted from this process's memory.
        direct: saves written past the page cache (O_DIRECT).
        recycled: of those, over the extents of a pruned checkpoint.
        pinned_bytes: memory that is pinned for a GPU now: snapshots are copied there beside the host.
    """

    saves: int = 0
    failed: int = 0
    skipped: int = 0
    blocked_s: float = 0.0
    first_blocked_s: float = 0.0
    waited_s: float = 0.0
    step_waited_s: float = 0.0
    persisted_bytes: int = 0
    handed_over: int = 0
    direct: int = 0
    recycled: int = 0
    pinned_bytes: int = 0


class Save:
    """The handle that `Checkpointer.save` returns. `step` and `part` name what was saved."""

    def __init__(self, part: PartId, spool: Spool) -> None:
        self.part = part
        self._spool = spool
        self._ended = Latch()
        self._error: Exception | None = None
        self.asked: Callable[[float | None], None] = _nothing  # told that somebody asks, in their thread; may wait

    @property
    def step(self) -> int:
        return self.part.checkpoint.step

    def done(self) -> bool:
        """Whether the save has ended, durable or failed."""
        self.asked(0.0)
        return self._ended.is_open

    def error(self) -> Exception | None:
        """Why the save failed; None while it runs or when it is durable."""
        return self._error

    def wait(self, tier: str = SPOOL, timeout: float | None = None) -> None:
        """Return when a tier holds this checkpoint, verified.

        Args:
            tier: `"local"`: no power cut can take it any more. A tier's name: its copy was read back and compared.
            timeout: seconds; None waits as long as the daemon works.

        Raises:
            SaveFailed: it could not be made durable; the cause is chained.
            SaveSkipped: it was not taken (`when_busy="skip"`).
            StoreRefused: the tier says no (credentials, bucket); the daemon keeps trying.
            CheckpointNotFound: it will not come there: newer ones have retired it meanwhile, or it was set aside.
            ConfigError: the daemon has no tier of that name.
            DaemonUnavailable: a tier was asked for, and no daemon answers.
            TimeoutError: not within `timeout`; says the tier's last error.
        """
        end = None if timeout is None else time.monotonic() + timeout
        self.asked(timeout)
        if not self._ended.wait(None if end is None else max(0.0, end - time.monotonic())):
            raise TimeoutError(f"{self.part} is not durable after {timeout:g} s")
        if isinstance(self._error, SaveSkipped):
            raise self._error
        if self._error is not None:
            raise SaveFailed(f"{self.part}: {self._error}") from self._error
        if tier == SPOOL:
            return
        left = None if end is None else max(0.0, end - time.monotonic())
        try:
            with Link(self._spool) as link:
                link.ask(Wait(part=self.part, tier=tier, timeout_s=left), None if left is None else left + 10)
        except TimeoutError as error:
            raise TimeoutError(f"not within {timeout:g} s: {error}") from error

    def finish(self, error: Exception | None) -> None:
        """The persisting side's word on how it ended."""
        self._error = error
        self.asked = _nothing
        self._ended.open()


def _nothing(timeout: float | None) -> None:
    pass


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as floats, NumPy scalars and 0-d tensors too; raises `ConfigError` naming what is no number or dict."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics={metrics!r}: a dict of names and numbers, such as {{'loss': 0.5}}")
    if len(metrics) > MAX_METRICS:
        raise ConfigError(f"{len(metrics)} metrics; a checkpoint holds at most {MAX_METRICS}")
    numbers = {}
    for name, value in metrics.items():
        if not is_metric_name(name):
            raise ConfigError(f"metrics[{name!r}]: a name is 1 to 256 characters, none of them a control character")
        try:
            numbers[name] = float(value.item() if hasattr(value, "item") else value)  # NumPy scalars, 0-d tensors
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"metrics[{name!r}]: {type(value).__name__} is not a number") from error
    return numbers
