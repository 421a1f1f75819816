"""The checkpoints that a follower has delivered, in one small file.

Invariant: the file changes by a rename alone, and each change is durable before `add` returns. Names are never dropped,
because a checkpoint may vanish from a listing and come back: by a repair, from another tier, from a node's spool.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tierd.core.errors import ConfigError
from tierd.core.ids import CheckpointId
from tierd.core.manifest import Attempt, Step
from tierd.spool.file_io import open_own, sync_directory

if TYPE_CHECKING:
    from typing import Self

_VERSION = 1


class _StateFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    run: str
    delivered: dict[Attempt, list[Step]]


class DeliveryLog:
    """The delivered checkpoints of one run; a context manager that holds the file's lock.

    Args:
        path: the file, which need not exist; None keeps the names in memory.
        run: the run's name.
        waiting: called before the wait for a lock that another process holds; None raises instead of waiting.

    Raises:
        ConfigError: another follower uses the file; or it is damaged, of another run or of a newer tierd.
    """

    def __init__(self, path: Path | None, run: str, waiting: Callable[[], None] | None = None) -> None:
        self.path, self._run = path, run
        self._steps: dict[str, set[int]] = {}
        self.lock = -1
        if path is not None:
            self.lock = _open_locked(path.with_name(f"{path.name}.lock"), waiting)
            try:
                self._steps = _read_state(path, run)
            except BaseException:
                self.close()
                raise

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        return checkpoint.step in self._steps.get(checkpoint.attempt, ())

    @property
    def newest(self) -> CheckpointId | None:
        """The newest delivered checkpoint; None before the first."""
        return max(
            (CheckpointId(self._run, attempt, max(steps)) for attempt, steps in self._steps.items()), default=None
        )

    def add(self, checkpoint: CheckpointId) -> None:
        """Record a delivery, durably. Adding a checkpoint twice is harmless."""
        self._steps.setdefault(checkpoint.attempt, set()).add(checkpoint.step)
        if self.path is not None:
            steps = {attempt: sorted(attempt_steps) for attempt, attempt_steps in sorted(self._steps.items())}
            write_durably(
                self.path, msgspec.json.encode(_StateFile(version=_VERSION, run=self._run, delivered=steps)) + b"\n"
            )

    def close(self) -> None:
        """Give up the lock, unless a process that inherited it still runs."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file by a rename, and make it durable."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)  # of a write that was cut off, or an odd file in its place
    with fresh.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_directory(path.parent)


def _open_locked(path: Path, waiting: Callable[[], None] | None) -> int:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made: {error.strerror}; name a file in a directory of yours") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting is None:
            os.close(lock)
            raise ConfigError(f"{path}: another follower holds it; give each follower a state of its own") from None
        waiting()
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _read_state(path: Path, run: str) -> dict[str, set[int]]:
    try:
        with os.fdopen(open_own(path, follow=True), "rb") as file:  # a FIFO in its place would block
            form = msgspec.json.decode(file.read(), type=_StateFile)
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not a follower's state: {error}; if you move it away, every checkpoint is delivered again"
        ) from error
    if form.version != _VERSION:
        raise ConfigError(f"{path}: state of version {form.version}, and this tierd knows {_VERSION}: use a newer one")
    if form.run != run:
        raise ConfigError(f"{path}: the state of run {form.run!r}, not of {run!r}; name another file")
    return {attempt: set(steps) for attempt, steps in form.delivered.items()}
