"""What is wrong with a directory's units beside each other, and the repair: verified copies, or a move to quarantine.

Found are files that decayed since a unit was taken, files that were lost and not deleted by their program, and the
newest unit of a series that lacks a file. Invariant: a file is left deleted only if a newer whole checkpoint has its
counterpart. What lacks a file may be unfinished, which is not proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from tierd.core.errors import CheckpointNotFound
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import UNIT_NAME, File, Manifest
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.intake.directory_changes import QUARANTINE_NAME, quarantine_files
from tierd.daemon.intake.in_place_restore import KeptPaths, NotWatched, PlaceTaken, restore_unit
from tierd.daemon.intake.series_restore import read_unit_file
from tierd.daemon.intake.taken_record import differences
from tierd.daemon.intake.unit_verdict import CHANGING_REASON, JudgedUnit, is_taken_from
from tierd.daemon.tiers.tier_objects import first_manifest
from tierd.daemon.transfer.download import Progress
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.checkpoint_names import KnownCheckpoints
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.series_comparison import (
    UNCERTAIN_LAYOUTS,
    covers_all_files,
    missing_counterpart,
    series_directory,
    shares_a_file_form,
)
from tierd.watching.step_in_name import is_best
from tierd.watching.unit import DIRECTORY_LAYOUT, Listing, Unit
from tierd.watching.unit_file import pointer_candidates, points_to
from tierd.watching.unit_inspection import ChangedFile

_MOST_READ = 8  # newest checkpoints, of which one is of the unit or its series; each is a read of a tier


async def judge_decay(
    tree: DirectoryTree, judged: JudgedUnit, history: KnownCheckpoints, listing: Listing, stores: Mapping[str, Store]
) -> None:
    """Judge a unit, of which no checkpoint has all that is there now, as damaged if files of an earlier one decayed."""
    has_identity = judged.unit.step is not None or judged.checkpoint is not None
    if has_identity or judged.verdict == "unfinished" or judged.unreadable:
        return
    of_run = (checkpoint for checkpoint in history.created if checkpoint.run == judged.run)
    earlier = [checkpoint for checkpoint in of_run if history.created[checkpoint] < judged.modified_at]
    for checkpoint in sorted(earlier, reverse=True)[:_MOST_READ]:
        manifest = await first_manifest(PartId(checkpoint, 0, 1), None, stores)
        if manifest is not None and is_taken_from(judged.unit, manifest):
            await _compare(tree, judged, listing, stores, checkpoint, manifest)
            return


async def _compare(
    tree: DirectoryTree,
    judged: JudgedUnit,
    listing: Listing,
    stores: Mapping[str, Store],
    checkpoint: CheckpointId,
    manifest: Manifest,
) -> None:
    about = await read_unit_file(stores, checkpoint)
    modified_ns = about.modified_ns if about else {}

    def is_unchanged(file: File) -> bool:
        entry = listing.entries.get(file.path)
        return entry is not None and (entry.size, entry.mtime_ns) == (file.size, modified_ns.get(file.path))

    def decayed() -> dict[str, str]:
        alone = (msgspec.structs.replace(manifest, files=(file,)) for file in manifest.files if is_unchanged(file))
        firsts = ((only.files[0].path, next(differences(tree, listing, only), None)) for only in alone)
        return {path: difference.why for path, difference in firsts if difference is not None}

    try:
        reasons = await thread_uncancelled(decayed)
    except (ChangedFile, OSError) as error:
        judged.unreadable, judged.verdict = not isinstance(error, ChangedFile), "unknown"
        judged.reason = f"it cannot be read: {error}" if judged.unreadable else CHANGING_REASON
        return
    cut = [file.path for file in manifest.files if file.path in judged.damaged and is_best(file.path)]
    reasons |= dict.fromkeys(cut, judged.reason)
    if reasons:
        judged.verdict, judged.reason = "damaged", "; ".join([*dict.fromkeys(reasons.values())][:2])
        judged.outgrown, judged.decayed = checkpoint, tuple(reasons)
        judged.damaged = tuple(sorted({*judged.damaged, *reasons}))


async def judge_series(
    judged: Sequence[JudgedUnit], history: KnownCheckpoints, spool: Spool | None, stores: Mapping[str, Store]
) -> None:
    """Judge as unknown what is newer than each checkpoint of its series, and lacks a file that the newest of them has.

    A second such unit in a row is whole, because its program writes fewer files now.
    """
    fresh = [judged_unit for judged_unit in judged if judged_unit.verdict == "sound" and judged_unit.checkpoint is None]
    reasons = {}
    for judged_unit in fresh:
        if judged_unit.unit.is_joint or judged_unit.unit.layout not in UNCERTAIN_LAYOUTS:
            continue
        paths = await _newest_of_series(judged_unit, history, spool, stores)
        absent = missing_counterpart(judged_unit.unit.files, paths, judged_unit.unit.layout)
        if absent is not None and not any(_is_before(sibling, judged_unit) for sibling in fresh):
            why = f"the checkpoint that was taken before it has {absent}; it may be unfinished"
            reasons[judged_unit.unit.path] = why
    for judged_unit in fresh:
        if judged_unit.unit.path in reasons:
            judged_unit.verdict, judged_unit.reason = "unknown", reasons[judged_unit.unit.path]


async def _newest_of_series(
    judged: JudgedUnit, history: KnownCheckpoints, spool: Spool | None, stores: Mapping[str, Store]
) -> Sequence[str]:
    times = {checkpoint: at for checkpoint, at in history.created.items() if checkpoint.run == judged.run}
    for checkpoint in sorted(times, reverse=True)[:_MOST_READ]:
        manifest = await first_manifest(PartId(checkpoint, 0, 1), spool, stores)
        paths = [file.path for file in manifest.files if file.path != UNIT_NAME] if manifest else []
        if shares_a_file_form(judged.unit.files, paths):
            return paths if times[checkpoint] < judged.modified_at else []
    return []


def _is_before(earlier: JudgedUnit, judged: JudgedUnit) -> bool:
    """Whether a unit is an earlier one of the same series that has no other files."""
    files, own_files = earlier.unit.files, judged.unit.files
    return (
        earlier.modified_at < judged.modified_at
        and shares_a_file_form(own_files, files)
        and missing_counterpart(own_files, files, judged.unit.layout) is None
    )


def units_to_replace(judged: Sequence[JudgedUnit]) -> Iterator[JudgedUnit]:
    """Yield the units to replace or move, the newest of those that lack files first, and leave those of which a program
    deleted files. What was replaced before is whole.
    """
    replaceable = [judged_unit for judged_unit in judged if judged_unit.verdict in ("damaged", "unfinished")]
    yield from (judged_unit for judged_unit in replaceable if not judged_unit.absent)
    shortened = [judged_unit for judged_unit in replaceable if judged_unit.absent]
    for judged_unit in sorted(shortened, key=lambda judged_unit: judged_unit.modified_at, reverse=True):
        if _is_older(judged_unit, judged):
            judged_unit.verdict, judged_unit.is_shortened = "unknown", True
            others = "newer checkpoints have such a file: its program deletes these"
            judged_unit.reason = f"{judged_unit.absent[0]} is not there, and {others}"
        else:
            yield judged_unit


def points_to_absent(tree: DirectoryTree, judged: JudgedUnit, listing: Listing) -> bool:
    pointers = [*tree.pointers(pointer_candidates(judged.unit, listing), listing)]
    return any(points_to(pointer, part) for part in _absent_entries(judged) for pointer in pointers)


def _absent_entries(judged: JudgedUnit) -> Iterator[Unit]:
    """Yield each entry of the unit's directory that lacks files, as a unit of these."""
    depth = judged.unit.path.count("/") + 1
    entries: dict[str, list[str]] = {}
    for path in judged.absent:
        entries.setdefault("/".join(path.split("/")[:depth]), []).append(path)
    return (replace(judged.unit, path=path, files=tuple(files)) for path, files in entries.items())


def _is_older(judged_unit: JudgedUnit, judged: Sequence[JudgedUnit]) -> bool:
    """Whether newer checkpoints are whole that have a counterpart of each file that a unit lacks."""
    if judged_unit.unit.step is None or judged_unit.is_pointed_to:
        return False
    newer = [sibling for sibling in judged if sibling.is_intact and _is_newer(sibling, judged_unit)]
    return covers_all_files(judged_unit.absent, [path for sibling in newer for path in sibling.unit.files])


def _is_newer(sibling: JudgedUnit, judged: JudgedUnit) -> bool:
    if sibling.run != judged.run or series_directory(sibling.unit) != series_directory(judged.unit):
        return False
    if sibling.checkpoint is not None and judged.checkpoint is not None:
        return sibling.checkpoint > judged.checkpoint
    return sibling.modified_at > judged.modified_at


async def replace_unit(
    judged: JudgedUnit, directory: Path, stores: Mapping[str, Store], progress: Progress, good_paths: Set[str]
) -> None:
    """Put the verified checkpoint of a unit's step in its place; without one, move the unit away.

    `good_paths` are the files of other units that are whole: `prev.ckpt` may have been taken when it was `last.ckpt`.
    """
    moved = tuple[str, ...]()
    if not judged.has_copy:
        judged.moved = tuple(await thread_uncancelled(quarantine_files, directory, judged.entries))
        return
    if judged.outgrown is not None:
        await _replace_decayed(judged, judged.outgrown, directory, stores, progress)
        return
    with suppress(CheckpointNotFound, NotWatched, PlaceTaken):
        attempt, spared = judged.checkpoint.attempt if judged.checkpoint else None, KeptPaths(intact_files=good_paths)
        restored_unit = await restore_unit(
            stores, judged.run, directory, judged.step, attempt, progress, pointing="never", kept_paths=spared
        )
        moved = restored_unit.moved
        # What was there before lies in quarantine by its own name, or with a number behind it.
        was_present = any(path.startswith(f"{QUARANTINE_NAME}/{name}") for path in moved for name in judged.entries)
        judged.replaced = judged.checkpoint is not None or restored_unit.path == judged.unit.path or was_present
    if judged.stays_unreplaced and not judged.replaced:
        judged.verdict = "unknown"
    elif not judged.replaced:
        moved = (*moved, *await thread_uncancelled(quarantine_files, directory, judged.entries))
    judged.moved = moved


async def _replace_decayed(
    judged: JudgedUnit, copy: CheckpointId, directory: Path, stores: Mapping[str, Store], progress: Progress
) -> None:
    """Put the verified copies of the decayed files in their places, and move its other damaged files away."""
    entries = {*judged.damaged}
    with suppress(CheckpointNotFound):
        spared = KeptPaths(all_but=judged.decayed)
        restored_unit = await restore_unit(
            stores, judged.run, directory, copy.step, copy.attempt, progress, pointing="never", kept_paths=spared
        )
        judged.moved, entries = restored_unit.moved, entries - {*judged.decayed}
        judged.replaced = not entries
    judged.moved += tuple(await thread_uncancelled(quarantine_files, directory, sorted(entries)))


def entries_to_move(judged: JudgedUnit, listing: Listing) -> list[str]:
    """Return the entries of the directory that are moved if a unit is not replaced.

    They are its directory, if all in it is the unit's, and those of its other files that are damaged themselves.
    """
    unit = judged.unit
    own_paths = {*unit.files, *unit.special_files}
    below = {path for path, entry in listing.entries.items() if entry.kind != "directory" and _is_below(path, unit)}
    inside_paths = (path for path in own_paths if not unit.is_directory or _is_below(path, unit))
    damaged_paths = set(judged.damaged or inside_paths)
    may_hold_others = unit.step is None and unit.layout is DIRECTORY_LAYOUT and judged.damaged  # other checkpoints
    if unit.is_directory and below <= own_paths and not may_hold_others:
        inside = [unit.path] if unit.is_unfinished or any(_is_below(path, unit) for path in damaged_paths) else []
        return [*inside, *sorted(path for path in damaged_paths if not _is_below(path, unit))]
    return sorted(damaged_paths & own_paths)


def _is_below(path: str, unit: Unit) -> bool:
    return path.startswith(f"{unit.path}/")
