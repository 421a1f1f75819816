"""Name the checkpoint that a unit becomes: its step, its attempt, and what the attempt resumed from.

Pure. A program that is watched names no launches, so its history is read from steps and times. Within an attempt, later
steps were written later. A unit that breaks this was written after its program had gone back to an earlier step, or by
a launch from before that: it belongs to another attempt.

The names depend only on the files and on the checkpoints that are known, not on the node or the moment. So nodes that
watch one directory, and a watcher that starts again, give a unit the same name, and a tier keeps it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import xxhash

from tierd.core.ids import LATEST_MS, CheckpointId, is_attempt, next_attempt
from tierd.core.planning.inventory import Inventory
from tierd.watching.describe import Described

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class History:
    """The checkpoints of a run that any place has.

    Attributes:
        made: each checkpoint, and when it was made.
        origins: by attempt, the checkpoint from which it resumed.
        unread: checkpoints of which only the names are known.
    """

    made: Mapping[CheckpointId, datetime] = field(default_factory=dict)
    origins: Mapping[str, CheckpointId | None] = field(default_factory=dict)
    unread: frozenset[CheckpointId] = frozenset()

    def with_one(self, checkpoint: CheckpointId, made: datetime, origin: CheckpointId | None) -> History:
        """Return this history with one more checkpoint."""
        return History({**self.made, checkpoint: made}, {**self.origins, checkpoint.attempt: origin}, self.unread)

    def merged(self, newer: History) -> History:
        """Return both histories; `newer` was observed later."""
        return History({**self.made, **newer.made}, {**self.origins, **newer.origins}, newer.unread - self.made.keys())

    def has(self, step: int, made: datetime) -> bool:
        """Whether a unit of this step that was finished at this time is among the checkpoints."""
        return any(one.step == step and at == made for one, at in self.made.items())


@dataclass(frozen=True, slots=True)
class Named:
    """The name of a unit's checkpoint, and the origin of its attempt."""

    checkpoint: CheckpointId
    origin: CheckpointId | None


def history(inventory: Inventory, run: str) -> History:
    """Return the history of a run, as observed in all places."""
    made: dict[CheckpointId, datetime] = {}
    names: set[CheckpointId] = set()
    for place in inventory.places.values():
        for seen in place.copies(run):
            names.add(seen.id)
            if facts := seen.spoken:
                made[seen.id] = facts.created
    return History(made, inventory.origins(run), frozenset(names - made.keys()))


def made_at(modified_ns: int) -> datetime:
    """Convert a file's time to the time of a checkpoint, in microseconds; a time out of range to 1970."""
    return _EPOCH + timedelta(microseconds=modified_ns // 1000 if 0 <= modified_ns < LATEST_MS * 1_000_000 else 0)


def step_of(described: Described, made: datetime) -> int:
    """Return a unit's step. A unit that has none is numbered by the second in which it was finished."""
    return int(made.timestamp()) if described.step is None else described.step


def name_unit(run: str, path: str, step: int, made: datetime, known: History) -> Named:
    """Name the checkpoint of a unit that `known` does not have.

    Args:
        run: the run.
        path: the unit's path in the watched directory.
        step: its step.
        made: when its newest file was last written.
        known: the checkpoints that are known.
    """
    attempts = sorted({one.attempt for one in known.made} | set(known.origins), reverse=True)
    fitting = next((one for one in attempts if _fits(one, step, made, known)), None)
    if fitting is not None:
        return Named(CheckpointId(run, fitting, step), known.origins.get(fitting))
    token = xxhash.xxh3_64_hexdigest(f"{run}\0{path}\0{step}\0{made.isoformat()}".encode())[:8]
    at_ms = (made - _EPOCH) // timedelta(milliseconds=1)
    if any(at > made for at in known.made.values()):  # by a launch from before the newest one, so it sorts before it
        attempt = f"{max(0, min(at_ms, int(attempts[0][:12], 16) - 1)):012x}-{token}"
        assert is_attempt(attempt)
        return Named(CheckpointId(run, attempt, step), None)
    origin = _origin(step, attempts, known)
    return Named(CheckpointId(run, next_attempt(at_ms, attempts, token), step), origin)


def _fits(attempt: str, step: int, made: datetime, known: History) -> bool:
    """Whether an attempt stays in order with a unit: later steps were made later, and each step once."""
    own = [(one.step, at) for one, at in known.made.items() if one.attempt == attempt]
    origin = known.origins.get(attempt)
    if not own or (origin is not None and step <= origin.step):
        return False
    if any((one.attempt, one.step) == (attempt, step) for one in known.unread):
        return False
    return all((other < step and at <= made) or (other > step and at >= made) for other, at in own)


def _origin(step: int, attempts: list[str], known: History) -> CheckpointId | None:
    """Return the newest checkpoint of the timeline below a step: that is where a program that went back began."""
    attempt, below = next(iter(attempts), None), step
    while attempt is not None:
        own = [one for one in known.made if one.attempt == attempt and one.step < below]
        if own:
            return max(own)
        origin = known.origins.get(attempt)
        if origin is None or origin.attempt >= attempt:
            return None
        if origin.step < step and origin in known.made:
            return origin
        attempt, below = origin.attempt, min(below, origin.step + 1)
    return None
