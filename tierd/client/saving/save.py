"""The result of one save, and the counts of all saves.

Invariant: a `Save` ends exactly once, durable or failed, and reports the same result to every caller, however often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierd.client.saving.worker import Latch
from tierd.core.errors import ConfigError, SaveFailed, SaveSkipped
from tierd.core.ids import PartId
from tierd.core.manifest import MAX_METRICS, is_metric_name
from tierd.core.planning.place import SPOOL
from tierd.ipc.client import Link
from tierd.ipc.messages import Wait
from tierd.spool.spool import Spool


@dataclass(slots=True)
class Stats:
    """Counts since the `Checkpointer` was made. Times are in seconds.

    Attributes:
        saves: calls of `save` and `stage` that took their snapshot, also those that failed later.
        failed: saves that could not be made durable.
        skipped: calls that took no snapshot, because an earlier one was still being persisted (`when_busy`).
        blocked_s: time inside `save`, which training loses. It includes the time in which `dcp.async_save` copied.
        first_blocked_s: the share of `blocked_s` of the first save, which plans the layout.
        waited_s: the share of `blocked_s` that waited for the previous save, or for memory that was being prepared.
        step_waited_s: time that steps of attached optimizers waited for a copy, which training loses as well.
        persisted_bytes: bytes made durable in the spool.
        handed_over: saves that the daemon persisted from this process's memory.
        direct: saves written past the page cache (O_DIRECT).
        recycled: saves written with O_DIRECT over the blocks of a pruned checkpoint.
        pinned_bytes: memory that is pinned for a GPU now, so that copies into it run concurrently with the host.
        durable: saves that became durable in the spool.
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
    durable: int = 0


class Save:
    """The handle that `Checkpointer.save` returns. `step` and `part` name this rank's part of the checkpoint."""

    def __init__(self, part: PartId, spool: Spool) -> None:
        self.part = part
        self._spool = spool
        self.begun_s = time.perf_counter()
        self.blocked_s: float | None = None  # inside `save`; None until it returns
        self._ended = Latch()
        self._error: Exception | None = None
        # Called in the thread of a caller of `done` or `wait`; may wait.
        self.asked: Callable[[float | None], None] = _nothing

    def __repr__(self) -> str:
        if not self._ended.is_open:
            state = "running"
        else:
            state = "durable" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<Save of {self.part}: {state}>"

    @property
    def step(self) -> int:
        """The step of the saved checkpoint."""
        return self.part.checkpoint.step

    def done(self) -> bool:
        """Return whether the save has ended, durable or failed."""
        self.asked(0.0)
        return self._ended.is_open

    def error(self) -> Exception | None:
        """Why the save failed; None while it runs or when it is durable."""
        return self._error

    def wait(self, tier: str = SPOOL, timeout: float | None = None) -> None:
        """Return when a place holds this checkpoint, verified.

        Args:
            tier: `"local"` waits for the spool: a power cut cannot lose the checkpoint any more. A tier's name waits
                until the tier's copy was read back and compared.
            timeout: seconds to wait; None waits as long as the daemon works.

        Raises:
            SaveFailed: the checkpoint could not be made durable; the cause is chained.
            SaveSkipped: no snapshot was taken (`when_busy="skip"`).
            StoreRefused: the tier refuses (credentials, bucket); the daemon keeps trying.
            CheckpointNotFound: the checkpoint will not reach the tier, because retention keeps newer ones instead, or
                because it was quarantined.
            ConfigError: the daemon has no tier of that name.
            DaemonUnavailable: a tier was asked for, and no daemon answers.
            TimeoutError: the tier does not hold the checkpoint after `timeout`; the message has the tier's last error.
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
        left_s = None if end is None else max(0.0, end - time.monotonic())
        try:
            with Link(self._spool) as link:
                link.ask(Wait(part=self.part, tier=tier, timeout_s=left_s), None if left_s is None else left_s + 10)
        except TimeoutError as error:
            raise TimeoutError(f"not within {timeout:g} s: {error}") from error

    def finish(self, error: Exception | None) -> None:
        """End the save: durable if `error` is None. Called once, by the thread that persists."""
        self._error = error
        self.asked = _nothing
        self._ended.open()


def _nothing(timeout: float | None) -> None:
    pass


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as floats; NumPy scalars and 0-d tensors are accepted.

    Raises:
        ConfigError: `metrics` is no mapping, a name cannot be used, or a value is no number; the message names it.
    """
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
