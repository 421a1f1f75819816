"""Judge a unit in its program's directory: by its digests if it was taken, otherwise by its structure.

Nothing is changed here. Right bytes are read once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import UNIT_NAME, Manifest
from tierd.daemon.intake.series_restore import read_unit_file
from tierd.daemon.intake.taken_record import differences, is_saved_again
from tierd.daemon.tiers.tier_objects import first_manifest
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.checkpoint_names import KnownCheckpoints, checkpoint_time, second_of, step_of
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit import Listing, Unit
from tierd.watching.unit_description import describe_unit
from tierd.watching.unit_inspection import ChangedFile, InspectedUnit, describe_problems, inspect_unit

CHANGING_REASON = "a program still writes to it"
_DAMAGED = ("damaged", "incomplete")  # the status of a finding of damage
_MOST_TRIED = 8  # checkpoints with whose bytes a unit is compared that none has by its time
Verdict: TypeAlias = Literal["verified", "sound", "damaged", "unfinished", "unknown", "missing"]


@dataclass(slots=True)
class JudgedUnit:
    """A unit, and what is known of it so far."""

    unit: Unit
    run: str  # the run as which it is taken
    step: int  # its step, or its order
    modified_at: datetime  # when its newest file was last written
    checkpoint: CheckpointId | None = None  # it was taken as this one
    verdict: Verdict = "unknown"
    reason: str = ""
    moved: tuple[str, ...] = ()  # where it lies now, as paths in the directory
    replaced: bool = False  # whether a verified copy is in its place now
    unreadable: bool = False  # whether a file of it cannot be read, which proves nothing
    damaged: tuple[str, ...] = ()  # the files that are proven damaged; empty if the unit itself is
    intact_until: datetime | None = None  # if only some files are damaged, when the newest other was last written
    has_copy: bool = True  # whether a copy can have what is damaged
    entries: list[str] = field(default_factory=list)  # what is moved if it is not replaced, as paths in the directory
    outgrown: CheckpointId | None = None  # as which it was taken before its program wrote more of it
    decayed: tuple[str, ...] = ()  # the files that differ from `outgrown`
    stays_unreplaced: bool = False  # whether it stays, as unknown, if it is not replaced
    absent: tuple[str, ...] = ()  # the files that are gone since it was taken, if that is all that is wrong
    is_pointed_to: bool = False  # whether a pointer names what it lacks
    is_shortened: bool = False  # whether its program deleted files of it on purpose, so that it stays, as unknown

    @property
    def is_intact(self) -> bool:
        return self.verdict in ("verified", "sound") or self.replaced

    @property
    def holds_its_place(self) -> bool:
        """Whether no older checkpoint may come in its place.

        That is a whole one, and one without a step of which right files are left: its next save has the same names.
        """
        if self.is_intact or self.unit.step is not None:
            return self.is_intact or self.is_shortened
        in_part = bool(self.damaged) and not {*self.unit.files} <= {*self.damaged}
        return self.verdict == "unknown" or (self.verdict == "damaged" and in_part)


def unjudged_unit(tree: DirectoryTree, unit: Unit, listing: Listing, run: str, stepless: str) -> JudgedUnit:
    """Describe a unit that is not judged yet. `stepless` is the run of units without a step, maybe `run` itself."""
    about = describe_unit(unit, lambda path: tree.opened(path, listing.entries[path]))
    created = _newest_write(listing, unit.files)
    if unit.step is None and stepless != run:
        return JudgedUnit(unit, stepless, second_of(created), created)
    return JudgedUnit(unit, run, step_of(about, created), created)


@dataclass(frozen=True, slots=True)
class UnitCheckpoint:
    """A checkpoint as which a unit may have been taken; unless `is_certain`, by its time, its contents have to tell."""

    checkpoint: CheckpointId
    saved_at: datetime
    manifest: Manifest
    is_certain: bool


async def matching_checkpoints(
    judged: JudgedUnit, history: KnownCheckpoints, listing: Listing, spool: Spool | None, stores: Mapping[str, Store]
) -> AsyncIterator[UnitCheckpoint]:
    """Yield the checkpoints that a unit should be byte for byte, because it was taken as one of these.

    A unit most of which is as old as the checkpoint of its step is no later save. Its other files were changed after
    the save. A unit that lost its newest file, or whose times are of a later copy, has the bytes of the checkpoint.
    Such ones follow, the newest first.
    """
    is_order = judged.unit.step is None and judged.step == second_of(judged.modified_at)
    like = {
        checkpoint: created
        for checkpoint, created in history.created.items()
        if _is_like(checkpoint, created, judged, is_order)
    }
    same = [(created, checkpoint) for checkpoint, created in like.items() if checkpoint.step == judged.step]
    exact = sorted((checkpoint for created, checkpoint in same if created == judged.modified_at), reverse=True)
    oldest = checkpoint_time(min((listing.entries[path].mtime_ns for path in judged.unit.files), default=0))
    mixed = sorted((saved for saved in same if oldest <= saved[0] < judged.modified_at), reverse=True)
    for checkpoint in (*exact, *(checkpoint for _, checkpoint in mixed)):
        manifest, created = await first_manifest(PartId(checkpoint, 0, 1), spool, stores), like[checkpoint]
        if manifest is None or not is_taken_from(judged.unit, manifest):
            continue
        is_exact = created == judged.modified_at
        if is_exact or not await _is_saved_again(judged.unit, listing, checkpoint, manifest, stores):
            yield UnitCheckpoint(checkpoint, created, manifest, is_certain=True)
    for checkpoint in sorted(like.keys() - {*exact}, reverse=True)[:_MOST_TRIED]:
        manifest = await first_manifest(PartId(checkpoint, 0, 1), spool, stores)
        if manifest is not None and _has_sizes_of(judged.unit, listing, manifest):
            yield UnitCheckpoint(checkpoint, like[checkpoint], manifest, is_certain=False)


async def _is_saved_again(
    unit: Unit, listing: Listing, checkpoint: CheckpointId, manifest: Manifest, stores: Mapping[str, Store]
) -> bool:
    """Whether a unit is a new save in the place of a checkpoint."""
    about = await read_unit_file(stores, checkpoint)
    modified_ns = about.modified_ns if about else {}
    was = {file.path: (file.size, modified_ns.get(file.path, 0)) for file in manifest.files if file.path != UNIT_NAME}
    entries = ((path, listing.entries[path]) for path in unit.files)
    return is_saved_again(was, {path: (entry.size, entry.mtime_ns) for path, entry in entries})


def _is_like(checkpoint: CheckpointId, created: datetime, judged: JudgedUnit, is_order: bool) -> bool:
    """Whether a checkpoint has the step of a unit, or has no step either."""
    if checkpoint.run != judged.run:
        return False
    return checkpoint.step == judged.step or (is_order and checkpoint.step == second_of(created))


def is_taken_from(unit: Unit, manifest: Manifest) -> bool:
    """Whether a checkpoint was taken from a unit's place: another unit may have the same step and time."""
    paths = {file.path for file in manifest.files}
    return not paths.isdisjoint(unit.files) or any(path.startswith(f"{unit.path}/") for path in paths)


def _has_sizes_of(unit: Unit, listing: Listing, manifest: Manifest) -> bool:
    sizes = {file.path: file.size for file in manifest.files}
    of_size = all(listing.entries[path].size == sizes.get(path) for path in unit.files)
    return of_size and bool(unit.files) and not unit.special_files


def judge_by_digests(tree: DirectoryTree, judged: JudgedUnit, listing: Listing, record: UnitCheckpoint) -> bool:
    """Decide by digests whether a unit is whole; return False if nothing says that it was taken as this checkpoint."""
    manifest = record.manifest
    if all(file.path != UNIT_NAME for file in manifest.files):
        return False
    absent = dict[str, str]()
    try:
        for difference in differences(tree, listing, manifest):
            if difference.absent is not None:
                absent[difference.absent] = difference.why
            elif record.is_certain:
                judged.verdict, judged.reason = "damaged", difference.why
                break
            else:
                return False
        else:
            judged.verdict, judged.reason, judged.absent = "verified", "", (*absent,)
            if absent:
                judged.verdict, judged.reason = "damaged", next(iter(absent.values()))
                judged.stays_unreplaced = not judged.unit.is_unfinished
    except (ChangedFile, OSError) as error:
        judged.unreadable = not isinstance(error, ChangedFile)
        judged.reason = f"it cannot be read: {error}" if judged.unreadable else CHANGING_REASON
    judged.checkpoint = record.checkpoint
    if not record.is_certain:
        judged.step, judged.modified_at = record.checkpoint.step, record.saved_at  # its files' times are later
    copied = {file.path for file in manifest.files}
    if judged.verdict == "verified" and (added := [path for path in judged.unit.files if path not in copied]):
        _judge_added(tree, judged, listing, added)
    return True


def judge_by_structure(tree: DirectoryTree, judged: JudgedUnit, listing: Listing) -> None:
    """Decide by its structure whether a unit is whole."""
    if judged.unit.missing_reason is not None:
        judged.verdict = "unfinished" if judged.unit.is_unfinished else "unknown"
        judged.reason = judged.unit.missing_reason
        return
    inspected = _inspect(tree, judged, listing)
    if inspected.status == "changing":
        judged.reason = CHANGING_REASON
        return
    verdicts: dict[str, Verdict] = {"sound": "sound", "damaged": "damaged", "incomplete": "unfinished"}
    judged.verdict = verdicts.get(inspected.status, "unknown")
    judged.reason = describe_problems(inspected.findings[:2])
    if judged.verdict == "unknown" and not judged.reason:
        judged.reason = (
            "its format is not known, and no place has it with this size and time: it may be a save written again"
        )
    judged.unreadable = any(finding.status == "unreadable" for finding in inspected.findings)
    judged.damaged = tuple(finding.file for finding in inspected.findings if finding.status in _DAMAGED)
    right = {*judged.unit.files} - {*judged.damaged}
    judged.intact_until = _newest_write(listing, right) if judged.damaged and right else None


def _judge_added(tree: DirectoryTree, judged: JudgedUnit, listing: Listing, added: list[str]) -> None:
    """Judge the files of a taken unit that were added since: no copy has them."""
    inspected = _inspect(tree, judged, listing)
    added_findings = [finding for finding in inspected.findings if finding.file in added]
    judged.verdict, judged.reason = "sound", f"{added[0]} is in no copy"
    judged.unreadable = any(finding.status == "unreadable" for finding in added_findings)
    if damaged := [finding for finding in added_findings if finding.status in _DAMAGED]:
        judged.verdict, judged.reason, judged.has_copy = "damaged", describe_problems(damaged[:2]), False
        judged.entries = [finding.file for finding in damaged]
        judged.damaged = tuple(judged.entries)


def _newest_write(listing: Listing, paths: Iterable[str]) -> datetime:
    return checkpoint_time(max((listing.entries[path].mtime_ns for path in paths), default=0))


def _inspect(tree: DirectoryTree, judged: JudgedUnit, listing: Listing) -> InspectedUnit:
    sizes = {path: listing.entries[path].size for path in judged.unit.files}
    return inspect_unit(judged.unit, sizes, lambda path: tree.opened(path, listing.entries[path]))


def is_checkpoint_newer(checkpoint: CheckpointId, history: KnownCheckpoints, judged: JudgedUnit) -> bool:
    """Whether a checkpoint is newer than a unit: by the run's order, or by time if no place has the unit.

    Of a unit without a step, of which damaged files were moved, it may have the files that are left: a program that was
    killed while it wrote `last.pt` anew left `best.pt` as it was.
    """
    if judged.checkpoint is not None and judged.checkpoint.run == checkpoint.run:
        return checkpoint > judged.checkpoint
    if judged.unit.step is None and judged.intact_until is not None and not judged.replaced:
        return history.created_at(checkpoint) >= judged.intact_until
    return history.created_at(checkpoint) > judged.modified_at
