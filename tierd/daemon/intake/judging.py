"""Judge a unit in its program's directory: by its digests if it was taken, otherwise by its structure.

Nothing is changed here. Right bytes are read once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.daemon.intake.comparing import differences
from tierd.daemon.intake.each_series import recorded_unit
from tierd.daemon.intake.manifests import first_manifest
from tierd.daemon.intake.taken_record import is_saved_again
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.describe import describe
from tierd.watching.files import Tree
from tierd.watching.inspect import ChangedFile, InspectedUnit, inspect_unit
from tierd.watching.listing import Listing
from tierd.watching.naming import NEVER, KnownCheckpoints, made_at, order_of, step_of
from tierd.watching.unit import Unit
from tierd.watching.unit_file import UNIT_NAME

CHANGING = "a program still writes to it"
_MOST_TRIED = 8  # checkpoints with whose bytes a unit is compared that none has by its time
Verdict: TypeAlias = Literal["verified", "sound", "damaged", "unfinished", "unknown", "missing"]


@dataclass(slots=True)
class JudgedUnit:
    """A unit, and what is known of it so far.

    Attributes:
        run: the run as which it is taken.
        step: its step, or its order.
        made: when its newest file was last written.
        checkpoint: it was taken as this one.
        moved: where it lies now, as paths in the directory.
        replaced: whether a verified copy is in its place now.
        unreadable: whether a file of it cannot be read, which proves nothing.
        damaged: the files that are proven damaged; empty if the unit itself is.
        left: if only some files are damaged, when the newest of the others was last written.
        is_copied: whether a copy can have what is damaged.
        entries: what is moved if it is not replaced, as paths in the directory.
        outgrown: the newest checkpoint as which it was taken before its program wrote more of it, if files that were
            not written since differ from it.
        decayed: these files.
        is_left: whether it stays, as unknown, if it is not replaced.
        absent: the files that are gone since it was taken, if that is all that is wrong.
        is_named: whether a pointer names what it lacks.
        is_shortened: whether its program deleted files of it on purpose, so that it stays, as unknown.
    """

    unit: Unit
    run: str
    step: int
    made: datetime
    checkpoint: CheckpointId | None = None
    verdict: Verdict = "unknown"
    why: str = ""
    moved: tuple[str, ...] = ()
    replaced: bool = False
    unreadable: bool = False
    damaged: tuple[str, ...] = ()
    left: datetime | None = None
    is_copied: bool = True
    entries: list[str] = field(default_factory=list)
    outgrown: CheckpointId | None = None
    decayed: tuple[str, ...] = ()
    is_left: bool = False
    absent: tuple[str, ...] = ()
    is_named: bool = False
    is_shortened: bool = False

    @property
    def is_good(self) -> bool:
        return self.verdict in ("verified", "sound") or self.replaced

    @property
    def holds_its_place(self) -> bool:
        """Whether no older checkpoint may come in its place.

        That is a whole one, and one without a step of which right files are left: its next save has the same names.
        """
        if self.is_good or self.unit.step is not None:
            return self.is_good or self.is_shortened
        in_part = bool(self.damaged) and not {*self.unit.files} <= {*self.damaged}
        return self.verdict == "unknown" or (self.verdict == "damaged" and in_part)


def described(tree: Tree, unit: Unit, listing: Listing, run: str, stepless: str) -> JudgedUnit:
    """Describe a unit that is not judged yet.

    Args:
        run: the run of the directory.
        stepless: the run of its units without a step; `run` itself if no place has another.
    """
    about = describe(unit, lambda path: tree.opened(path, listing.entries[path]))
    created = made_at(max((listing.entries[path].mtime_ns for path in unit.files), default=0))
    if unit.step is None and stepless != run:
        return JudgedUnit(unit, stepless, order_of(created), created)
    return JudgedUnit(unit, run, step_of(about, created), created)


@dataclass(frozen=True, slots=True)
class UnitCheckpoint:
    """A checkpoint as which a unit may have been taken.

    Attributes:
        made: when it was saved.
        is_certain: whether the unit's time says so. Otherwise only its contents can.
    """

    checkpoint: CheckpointId
    made: datetime
    manifest: Manifest
    is_certain: bool


async def records(
    judged: JudgedUnit, history: KnownCheckpoints, listing: Listing, spool: Spool | None, stores: Mapping[str, Store]
) -> AsyncIterator[UnitCheckpoint]:
    """Yield the checkpoints that a unit should be byte for byte, because it was taken as one of these.

    A unit most of which is as old as the checkpoint of its step is no later save. Its other files were changed after
    the save. A unit that lost its newest file, or whose times are of a later copy, has the bytes of the checkpoint.
    Such ones follow, the newest first.
    """
    is_order = judged.unit.step is None and judged.step == order_of(judged.made)
    like = {
        checkpoint: created
        for checkpoint, created in history.made.items()
        if _is_like(checkpoint, created, judged, is_order)
    }
    same = [(created, checkpoint) for checkpoint, created in like.items() if checkpoint.step == judged.step]
    exact = sorted((checkpoint for created, checkpoint in same if created == judged.made), reverse=True)
    oldest = made_at(min((listing.entries[path].mtime_ns for path in judged.unit.files), default=0))
    mixed = sorted(
        ((created, checkpoint) for created, checkpoint in same if oldest <= created < judged.made), reverse=True
    )
    for checkpoint in (*exact, *(checkpoint for _, checkpoint in mixed)):
        manifest = await first_manifest(PartId(checkpoint, 0, 1), spool, stores)
        if manifest is None or not is_of(judged.unit, manifest):
            continue
        if history.made[checkpoint] == judged.made or not await _is_saved_again(
            judged.unit, listing, checkpoint, manifest, stores
        ):
            yield UnitCheckpoint(checkpoint, history.made[checkpoint], manifest, is_certain=True)
    for checkpoint in sorted(like.keys() - {*exact}, reverse=True)[:_MOST_TRIED]:
        manifest = await first_manifest(PartId(checkpoint, 0, 1), spool, stores)
        if manifest is not None and _has_sizes_of(judged.unit, listing, manifest):
            yield UnitCheckpoint(checkpoint, history.made[checkpoint], manifest, is_certain=False)


async def _is_saved_again(
    unit: Unit, listing: Listing, checkpoint: CheckpointId, manifest: Manifest, stores: Mapping[str, Store]
) -> bool:
    """Whether a unit is a new save in the place of a checkpoint."""
    about = await recorded_unit(stores, checkpoint)
    modified_ns = about.modified_ns if about else {}
    was = {file.path: (file.size, modified_ns.get(file.path, 0)) for file in manifest.files if file.path != UNIT_NAME}
    return is_saved_again(
        was, {path: (listing.entries[path].size, listing.entries[path].mtime_ns) for path in unit.files}
    )


def _is_like(checkpoint: CheckpointId, created: datetime, judged: JudgedUnit, is_order: bool) -> bool:
    """Whether a checkpoint has the step of a unit, or has no step either."""
    if checkpoint.run != judged.run:
        return False
    return checkpoint.step == judged.step or (is_order and checkpoint.step == order_of(created))


def is_of(unit: Unit, manifest: Manifest) -> bool:
    """Whether a checkpoint was taken from a unit's place: another unit may have the same step and time."""
    paths = {file.path for file in manifest.files}
    return not paths.isdisjoint(unit.files) or any(path.startswith(f"{unit.path}/") for path in paths)


def _has_sizes_of(unit: Unit, listing: Listing, manifest: Manifest) -> bool:
    """Whether a checkpoint has each file of a unit in its size."""
    sizes = {file.path: file.size for file in manifest.files}
    of_size = all(listing.entries[path].size == sizes.get(path) for path in unit.files)
    return of_size and bool(unit.files) and not unit.strange


def judge_by_digests(tree: Tree, judged: JudgedUnit, listing: Listing, record: UnitCheckpoint) -> bool:
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
                judged.verdict, judged.why = "damaged", difference.why
                break
            else:
                return False
        else:
            judged.verdict, judged.why, judged.absent = "verified", "", (*absent,)
            if absent:
                judged.verdict, judged.why, judged.is_left = (
                    "damaged",
                    next(iter(absent.values())),
                    not judged.unit.begun,
                )
    except (ChangedFile, OSError) as error:
        judged.unreadable = not isinstance(error, ChangedFile)
        judged.why = f"it cannot be read: {error}" if judged.unreadable else CHANGING
    judged.checkpoint = record.checkpoint
    if not record.is_certain:
        judged.step, judged.made = record.checkpoint.step, record.made  # its files' times are later
    copied = {file.path for file in manifest.files}
    if judged.verdict == "verified" and (added := [path for path in judged.unit.files if path not in copied]):
        _judge_added(tree, judged, listing, added)
    return True


def judge(tree: Tree, judged: JudgedUnit, listing: Listing) -> None:
    """Decide by its structure whether a unit is whole."""
    if judged.unit.missing is not None:
        judged.verdict, judged.why = "unfinished" if judged.unit.begun else "unknown", judged.unit.missing
        return
    inspected = _inspect(tree, judged, listing)
    if inspected.status == "changing":
        judged.why = CHANGING
        return
    verdicts: dict[str, Verdict] = {"sound": "sound", "damaged": "damaged", "incomplete": "unfinished"}
    judged.verdict = verdicts.get(inspected.status, "unknown")
    judged.why = "; ".join(f"{finding.file}: {finding.reason}" for finding in inspected.findings[:2])
    if judged.verdict == "unknown" and not judged.why:
        judged.why = (
            "its format is not known, and no place has it with this size and time: it may be a save written again"
        )
    judged.unreadable = any(finding.status == "unreadable" for finding in inspected.findings)
    judged.damaged = tuple(
        finding.file for finding in inspected.findings if finding.status in ("damaged", "incomplete")
    )
    right = {*judged.unit.files} - {*judged.damaged}
    judged.left = made_at(max(listing.entries[path].mtime_ns for path in right)) if judged.damaged and right else None


def _judge_added(tree: Tree, judged: JudgedUnit, listing: Listing, added: list[str]) -> None:
    """Judge the files of a taken unit that were added since: no copy has them."""
    inspected = _inspect(tree, judged, listing)
    added_findings = [finding for finding in inspected.findings if finding.file in added]
    judged.verdict, judged.why = "sound", f"{added[0]} is in no copy"
    judged.unreadable = any(finding.status == "unreadable" for finding in added_findings)
    damaged = [finding for finding in added_findings if finding.status in ("damaged", "incomplete")]
    if damaged:
        judged.verdict, judged.damaged, judged.is_copied = "damaged", tuple(finding.file for finding in damaged), False
        judged.why = "; ".join(f"{finding.file}: {finding.reason}" for finding in damaged[:2])
        judged.entries = [finding.file for finding in damaged]


def _inspect(tree: Tree, judged: JudgedUnit, listing: Listing) -> InspectedUnit:
    sizes = {path: listing.entries[path].size for path in judged.unit.files}
    return inspect_unit(judged.unit, sizes, lambda path: tree.opened(path, listing.entries[path]))


def is_newer(checkpoint: CheckpointId, history: KnownCheckpoints, judged: JudgedUnit) -> bool:
    """Whether a checkpoint is newer than a unit: by the run's order, or by time if no place has the unit.

    Of a unit without a step, of which damaged files were moved, it may have the files that are left: a program that was
    killed while it wrote `last.pt` anew left `best.pt` as it was.
    """
    if judged.checkpoint is not None and judged.checkpoint.run == checkpoint.run:
        return checkpoint > judged.checkpoint
    if judged.unit.step is None and judged.left is not None and not judged.replaced:
        return history.made.get(checkpoint, NEVER) >= judged.left
    return history.made.get(checkpoint, NEVER) > judged.made
