"""Words for a worker's action in the log, in `status` and in alerts."""

from __future__ import annotations

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.actions import Action, Discard, Flush, Prune, RepairCopy


def describe(action: Action) -> str:
    """Say what the worker does, with its subject."""
    match action:
        case Flush(part):
            return f"flushing {part}"
        case Prune(checkpoint):
            return f"pruning {checkpoint}"
        case RepairCopy(part):
            return f"repairing {part}"
        case Discard(name):
            return f"discarding {name}"


def verb(action: Action | None) -> str:
    """Name the kind of action; None stands for an observation."""
    return type(action).__name__.lower().removesuffix("copy") if action else "observe"


def subject(action: Action | None) -> PartId | CheckpointId | str:
    """Return what an action is about; None stands for an observation."""
    match action:
        case Flush(part) | RepairCopy(part):
            return part
        case Prune(checkpoint):
            return checkpoint
        case Discard(name):
            return name
        case None:
            return "observing"
