"""Put verified copies in the places of damaged units, or move these away into `.tierd-quarantine/`."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path

from tierd.core.errors import CheckpointNotFound
from tierd.core.ids import CheckpointId
from tierd.daemon.intake.in_place import KeptPaths, NotWatched, PlaceTaken, put_back
from tierd.daemon.intake.judging import JudgedUnit
from tierd.daemon.intake.swapping import QUARANTINE, quarantine_files
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.download import Progress
from tierd.stores.base import Store
from tierd.watching.listing import Listing
from tierd.watching.programs import DIRECTORY
from tierd.watching.unit import Unit


async def replace(
    judged: JudgedUnit, directory: Path, stores: Mapping[str, Store], progress: Progress, good_paths: Set[str]
) -> None:
    """Put the verified checkpoint of a unit's step in its place; without one, move the unit away.

    `good_paths` are the files of other units that are whole: `prev.ckpt` may have been taken when it was `last.ckpt`.
    """
    moved = tuple[str, ...]()
    if not judged.is_copied:
        judged.moved = tuple(await to_the_end(quarantine_files, directory, judged.entries))
        return
    if judged.outgrown is not None:
        await _replace_decayed(judged, judged.outgrown, directory, stores, progress)
        return
    with suppress(CheckpointNotFound, NotWatched, PlaceTaken):
        attempt, spared = judged.checkpoint.attempt if judged.checkpoint else None, KeptPaths(whole=good_paths)
        restored_unit = await put_back(
            stores, judged.run, directory, judged.step, attempt, progress, pointing="never", spared=spared
        )
        moved = restored_unit.moved
        # What was there before lies in quarantine by its own name, or with a number behind it.
        was_present = any(path.startswith(f"{QUARANTINE}/{name}") for path in moved for name in judged.entries)
        judged.replaced = judged.checkpoint is not None or restored_unit.path == judged.unit.path or was_present
    if judged.is_left and not judged.replaced:
        judged.verdict = "unknown"
    elif not judged.replaced:
        moved = (*moved, *await to_the_end(quarantine_files, directory, judged.entries))
    judged.moved = moved


async def _replace_decayed(
    judged: JudgedUnit, copy: CheckpointId, directory: Path, stores: Mapping[str, Store], progress: Progress
) -> None:
    """Put the verified copies of the decayed files in their places, and move its other damaged files away."""
    entries = {*judged.damaged}
    with suppress(CheckpointNotFound):
        spared = KeptPaths(but=judged.decayed)
        restored_unit = await put_back(
            stores, judged.run, directory, copy.step, copy.attempt, progress, pointing="never", spared=spared
        )
        judged.moved, entries = restored_unit.moved, entries - {*judged.decayed}
        judged.replaced = not entries
    judged.moved += tuple(await to_the_end(quarantine_files, directory, sorted(entries)))


def entries_of(judged: JudgedUnit, listing: Listing) -> list[str]:
    """Return the entries of the directory that are moved if a unit is not replaced.

    They are its directory, if all in it is the unit's, and those of its other files that are damaged themselves.
    """
    unit = judged.unit
    own_paths = {*unit.files, *unit.strange}
    below = {path for path, entry in listing.entries.items() if entry.kind != "directory" and _is_below(path, unit)}
    damaged_paths = set(judged.damaged) or {
        path for path in own_paths if not unit.is_directory or _is_below(path, unit)
    }
    may_hold_others = unit.step is None and unit.layout is DIRECTORY and judged.damaged  # it may hold other checkpoints
    if unit.is_directory and below <= own_paths and not may_hold_others:
        inside = [unit.path] if unit.begun or any(_is_below(path, unit) for path in damaged_paths) else []
        return [*inside, *sorted(path for path in damaged_paths if not _is_below(path, unit))]
    return sorted(damaged_paths & own_paths)


def _is_below(path: str, unit: Unit) -> bool:
    return path.startswith(f"{unit.path}/")
