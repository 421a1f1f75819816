"""The choice of a person who puts an older checkpoint back: `restore --into` writes it down, and `prepare` obeys it.

Invariant: a choice passes over only what was on the tiers when it was made. What the program saves afterwards is newer,
so the choice never has to be taken back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import msgspec

from tierd.core.errors import ConfigError
from tierd.core.ids import CheckpointId
from tierd.core.save_policy import Goal
from tierd.daemon.intake.directory_lock import alone_in
from tierd.daemon.intake.each_series import put_back_each
from tierd.daemon.intake.in_place import PutBack, put_back
from tierd.daemon.intake.pointing import write_whole
from tierd.daemon.tiers.observe import observe_places
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.download import Progress
from tierd.spool.file_io import open_own
from tierd.stores.base import Store
from tierd.watching.naming import NEVER, KnownCheckpoints, history, stepless_run

NAME = ".tierd-chosen"  # begins with `watching.files.OWN`, so a watch does not list it
_LONGEST = 1 << 12  # bytes


class ManualRollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint that was put back, although newer ones may exist.

    Attributes:
        run, step, attempt: the checkpoint.
        passed_over: when the newest checkpoint was made that the tiers had then, in a record of an older tierd.
        newest_attempt, newest_step: the newest checkpoint that the tiers had then. Its time may be in the future.
    """

    run: str
    step: int
    attempt: str
    passed_over: datetime | None = None
    newest_attempt: str = ""
    newest_step: int = 0

    def permits(self, checkpoint: CheckpointId, created: datetime) -> bool:
        """Whether `prepare` may fetch a checkpoint: it is the chosen one, or was made after the choice."""
        if (checkpoint.step, checkpoint.attempt) == (self.step, self.attempt):
            return True
        if self.passed_over is not None:
            return created > self.passed_over
        return checkpoint > CheckpointId(self.run, self.newest_attempt, self.newest_step)


async def put_back_chosen(
    stores: Mapping[str, Store],
    run: str,
    directory: Path,
    step: int | None,
    attempt: str | None,
    progress: Progress,
    best: Goal | None,
) -> PutBack:
    """Put a checkpoint back as `put_back` does, and write down if it was chosen.

    The newest one ends a choice, and the newest of each other series is put back beside it.

    The directory is made if it does not exist. Raises as `put_back` and `alone_in`.
    """
    async with alone_in(directory):
        placed, is_newest = [], step is None and attempt is None and best is None
        history = await _observe_history(stores, run) if is_newest else KnownCheckpoints()
        if is_newest and not history.made:  # all that the directory had may be without a step
            placed = await put_back_each(stores, stepless_run(run), directory, progress)
        restored_unit = placed[0] if placed else await put_back(stores, run, directory, step, attempt, progress, best)
        if is_newest:
            (directory / NAME).unlink(missing_ok=True)
            placed = placed or [restored_unit]
            newest_made = history.made.get(CheckpointId(run, restored_unit.attempt, restored_unit.step), NEVER)
            for name in (stepless_run(run), run):  # `run` may have versions without a step from before any had one
                placed += await put_back_each(stores, name, directory, progress, placed=placed, newest=newest_made)
            return replace(restored_unit, beside=tuple(placed[1:]))
        history = await _observe_history(stores, run)
        newest = max({*history.made, *history.unread, CheckpointId(run, restored_unit.attempt, restored_unit.step)})
        rollback = ManualRollback(
            run, restored_unit.step, restored_unit.attempt, newest_attempt=newest.attempt, newest_step=newest.step
        )
        text = msgspec.json.encode(rollback).decode()
        await to_the_end(write_whole, directory / NAME, text)
        return restored_unit


async def _observe_history(stores: Mapping[str, Store], run: str) -> KnownCheckpoints:
    return history(await observe_places(None, stores, run, chunks=False), run)


def read_chosen(directory: Path, run: str) -> ManualRollback | None:
    """Return the choice that was made for a run in a directory; None if there is none.

    Raises:
        ConfigError: its file cannot be understood.
    """
    path = directory / NAME
    try:
        with os.fdopen(open_own(path), "rb") as file:
            rollback = msgspec.json.decode(file.read(_LONGEST), type=ManualRollback)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not what `tierd restore --into` writes ({error}); remove it") from None
    is_usable = rollback.passed_over.tzinfo is not None if rollback.passed_over else bool(rollback.newest_attempt)
    return rollback if rollback.run == run and is_usable else None
