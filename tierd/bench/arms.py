"""An arm: one way to save, behind one interface, so that all are measured by the same lines.

Law: each arm is used as its own documentation says is best, builds its state's dictionaries inside the measured call,
and awaits its previous save before the next where it requires that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tierd.bench.training import Training

Wait = Callable[[], None]


class NotHere(Exception):
    """An arm cannot run on this machine; the message says why."""


class About(msgspec.Struct, frozen=True):
    """What a reader has to know of an arm.

    Attributes:
        how: the setting that it runs in.
        kind: `none`, `sync` (returns when written), `blocking` (returns when copied) or `overlapped` (returns at once).
        durable: what holds when it says that it is done.
        copies: memory to plan for beside model and gradients, in units of the state.
    """

    how: str
    kind: str
    durable: str
    copies: float


_FSYNCED = "file fsynced"
_COMMITTED = "verified bytes, fsynced, committed by a rename"

ARMS: dict[str, About] = {
    "none": About("no save", "none", "", 0),
    "torch.save": About("torch.save", "sync", "not durable: no fsync", 0),
    "torch.save+fsync": About("torch.save, fsync of file and directory", "sync", "fsynced", 0),
    "dcp.save": About("dcp.save to a FileSystemWriter", "sync", _FSYNCED, 0),
    "dcp.async": About("dcp.async_save in a thread, default stager", "blocking", _FSYNCED, 1),
    "dcp.async-reused": About("dcp.async_save in a thread, one DefaultStager reused", "blocking", _FSYNCED, 1),
    "dcp.process": About(
        "dcp.async_save in a process, one DefaultStager reused: shared memory, staged behind the step",
        "overlapped",
        _FSYNCED,
        2,
    ),
    "torch_checkpointing": About(
        "CheckpointManager with async save, buffered, staging prewarmed, lock() around the optimizer's step",
        "overlapped",
        "not durable: no fsync",
        2,
    ),
    "tierd": About("Checkpointer(to=[]): no daemon", "blocking", _COMMITTED, 1),
    "tierd+daemon": About("Checkpointer(to=[file://...]): a daemon persists and flushes", "blocking", _COMMITTED, 1),
    "tierd-overlapped": About("Checkpointer(to=[]) after attach(optimizer)", "overlapped", _COMMITTED, 1),
    "tierd-overlapped+daemon": About(
        "Checkpointer(to=[file://...]) after attach(optimizer)", "overlapped", _COMMITTED, 1
    ),
}


class Arm:
    """What the worker drives. The base class saves nothing: the arm `none`."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training, self.directory = training, directory
        directory.mkdir(parents=True, exist_ok=True)

    def save(self) -> Wait:
        """Save training's state as it is now. The result waits until the arm calls it done."""
        return lambda: None

    def guard(self) -> AbstractContextManager[object]:
        """Entered around each update of the weights."""
        return nullcontext()

    def flushed(self) -> Wait | None:
        """Waits until the last save is on a tier as well; None for an arm that has none."""
        return None

    def settle(self) -> None:
        """Delete all but the newest checkpoint, and leave nothing running. Never timed."""

    def close(self) -> None:
        """End what the arm started."""


def make(name: str, training: Training, directory: Path) -> Arm:
    """The arm of that name, ready for its first save.

    Raises:
        NotHere: a package or method that it needs is missing.
    """
    from tierd.bench import ours, peers  # both load torch, which whoever only reads the table above need not

    return {"none": Arm, **peers.ARMS, **ours.ARMS}[name](training, directory)
