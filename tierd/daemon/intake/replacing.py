"""Put verified copies in the places of damaged units, or move these away into `.tierd-quarantine/`."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path

from tierd.core.errors import CheckpointNotFound
from tierd.core.ids import CheckpointId
from tierd.daemon.intake.in_place import NotWatched, PlaceTaken, Spared, put_back
from tierd.daemon.intake.judging import Judged
from tierd.daemon.intake.swapping import QUARANTINE, quarantine_files
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.download import Progress
from tierd.stores.base import Store
from tierd.watching.listing import Listing
from tierd.watching.programs import DIRECTORY
from tierd.watching.unit import Unit


async def replace(
    one: Judged, directory: Path, stores: Mapping[str, Store], progress: Progress, good: Set[str]
) -> None:
    """Put the verified checkpoint of a unit's step in its place; without one, move the unit away.

    `good` are the files of other units that are whole: `prev.ckpt` may have been taken when it was `last.ckpt`.
    """
    moved = tuple[str, ...]()
    if not one.is_copied:
        one.moved = tuple(await to_the_end(quarantine_files, directory, one.entries))
        return
    if one.outgrown is not None:
        await _replace_decayed(one, one.outgrown, directory, stores, progress)
        return
    with suppress(CheckpointNotFound, NotWatched, PlaceTaken):
        attempt, spared = one.checkpoint.attempt if one.checkpoint else None, Spared(whole=good)
        put = await put_back(stores, one.run, directory, one.step, attempt, progress, pointing="never", spared=spared)
        moved = put.moved
        # What was there before lies in quarantine by its own name, or with a number behind it.
        was_there = any(path.startswith(f"{QUARANTINE}/{name}") for path in moved for name in one.entries)
        one.replaced = one.checkpoint is not None or put.path == one.unit.path or was_there
    if one.is_left and not one.replaced:
        one.verdict = "unknown"
    elif not one.replaced:
        moved = (*moved, *await to_the_end(quarantine_files, directory, one.entries))
    one.moved = moved


async def _replace_decayed(
    one: Judged, copy: CheckpointId, directory: Path, stores: Mapping[str, Store], progress: Progress
) -> None:
    """Put the verified copies of the decayed files in their places, and move its other damaged files away."""
    entries = {*one.damaged}
    with suppress(CheckpointNotFound):
        spared = Spared(but=one.decayed)
        put = await put_back(
            stores, one.run, directory, copy.step, copy.attempt, progress, pointing="never", spared=spared
        )
        one.moved, entries = put.moved, entries - {*one.decayed}
        one.replaced = not entries
    one.moved += tuple(await to_the_end(quarantine_files, directory, sorted(entries)))


def entries_of(one: Judged, listing: Listing) -> list[str]:
    """Return the entries of the directory that are moved if a unit is not replaced.

    They are its directory, if all in it is the unit's, and those of its other files that are damaged themselves.
    """
    unit = one.unit
    own = {*unit.files, *unit.strange}
    below = {path for path, entry in listing.entries.items() if entry.kind != "directory" and _is_below(path, unit)}
    bad = set(one.damaged) or {path for path in own if not unit.is_directory or _is_below(path, unit)}
    is_of_many = unit.step is None and unit.layout is DIRECTORY and one.damaged  # it may hold other checkpoints
    if unit.is_directory and below <= own and not is_of_many:
        inside = [unit.path] if unit.begun or any(_is_below(path, unit) for path in bad) else []
        return [*inside, *sorted(path for path in bad if not _is_below(path, unit))]
    return sorted(bad & own)


def _is_below(path: str, unit: Unit) -> bool:
    return path.startswith(f"{unit.path}/")
