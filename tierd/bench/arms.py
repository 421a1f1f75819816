"""An arm: one way to save, behind one interface, so that the same code measures all arms.

Invariant: each arm is used as its own documentation recommends. It builds its state's dictionaries inside the measured
call, and awaits its previous save before the next one if it requires that.
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
    """The description of an arm for readers of the page.

    Attributes:
        how: the settings with which it runs.
        kind: `none`, `sync` (returns when written), `blocking` (returns when copied) or `overlapped` (returns at once).
        durable: the guarantee that holds when the arm reports that a save is done.
        copies: memory that the arm needs in addition to model and gradients, in units of the state.
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
    """The interface that the worker calls. The base class is the arm `none`, which saves nothing."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training, self.directory = training, directory
        directory.mkdir(parents=True, exist_ok=True)

    def save(self) -> Wait:
        """Save training's current state. Calling the result waits until the arm reports that the save is done."""
        return lambda: None

    def guard(self) -> AbstractContextManager[object]:
        """Return the context that is entered around each update of the weights."""
        return nullcontext()

    def flushed(self) -> Wait | None:
        """Return a function that waits until the last save is on a tier; None for an arm without a tier."""
        return None

    def settle(self) -> None:
        """Delete all but the newest checkpoint, and leave nothing running. Never timed."""

    def close(self) -> None:
        """End what the arm started."""
