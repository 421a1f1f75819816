"""Import checkpoints of other programs into tiers, for `tierd import`: each as a unit of files, as a watch takes it.

Unlike a watch, an import orders checkpoints by their steps alone, because a directory that was copied here has lost its
times. All are of one attempt, whose id depends only on the run and on the oldest checkpoint. So an import that was
killed continues, and a later import of newer checkpoints adds to it.

Invariant: nothing is written to the imported directory, and nothing is unpickled. What is committed is byte for byte a
unit that was sound, and that did not change while it was read. No daemon is involved, so retention deletes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import xxhash

from tierd import __version__
from tierd.core.errors import CheckpointNotFound, ConfigError, CorruptChunk, ManifestError, ObjectNotFound, TierdError
from tierd.core.ids import CheckpointId, PartId, next_attempt
from tierd.core.manifest import UNIT_NAME, Manifest
from tierd.core.planning.place import Place
from tierd.core.timeline.restore_order import describe_steps
from tierd.core.units import format_size
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.intake.unit_files import ImportSource, ListedEntries, UnitBusy, make_unit_file, stage_unit
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.daemon.tiers.tier_observer import TierObserver, find_base
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.spool.file_io import digest
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.checkpoint_names import checkpoint_time
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.named_directory import listing_without, units_without_twins
from tierd.watching.unit import ListedEntry, Listing, Unit
from tierd.watching.unit_description import UnitDescription, describe_unit
from tierd.watching.unit_detection import units, units_of
from tierd.watching.unit_inspection import ChangedFile, describe_problems, inspect_unit

log = logging.getLogger("tierd.daemon")


@dataclass(frozen=True, slots=True)
class ImportedUnit:
    """A checkpoint that is verified on every tier.

    Attributes:
        path: its path below the imported directory.
        program: the program whose layout it has.
        size: bytes of its files, before compression.
        sent: bytes that were sent to all tiers together.
        was_there: whether every tier had it before.
    """

    path: str
    program: str
    step: int
    attempt: str
    size: int
    sent: int
    was_there: bool


@dataclass(frozen=True, slots=True)
class RefusedUnit:
    """A checkpoint that was not imported.

    Attributes:
        path: its path below the imported directory.
        status: as in the answer of `inspect`; `stepless`: nothing says its step; `taken`: another checkpoint has it.
        reason: why, for people.
    """

    path: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """What an import put on the tiers.

    Attributes:
        units: the imported checkpoints, in the order of their steps.
        refused: the others.
    """

    run: str
    units: tuple[ImportedUnit, ...]
    refused: tuple[RefusedUnit, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A unit with its step, and its files as listed. `left_out` are its twins, which it was listed without."""

    unit: Unit
    step: int
    described: UnitDescription
    entries: Mapping[str, ListedEntry]
    left_out: tuple[str, ...] = ()

    @property
    def made(self) -> datetime:
        return checkpoint_time(max((entry.mtime_ns for entry in self.entries.values()), default=0))

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())


async def import_units(
    origin: ImportSource,
    stores: Mapping[str, Store],
    spool: Spool,
    run: str,
    step: int | None,
    progress: Progress,
    *,
    dry_run: bool = False,
) -> ImportedRun:
    """Import the checkpoint at a place, or every one below it, in the order of their steps.

    Args:
        spool: where one unit at a time is staged; best on the same file system, where it is linked.
        dry_run: stage and put nothing, and return what an import would put if every unit is sound.
        step: the only step to import, or the step of the one checkpoint there if its files do not say it.

    Raises:
        CheckpointNotFound: there is no checkpoint, or none of this step.
        ConfigError: a tier has checkpoints of the run that were not imported.
        StoreUnavailable, StoreRefused, SpoolFull, OSError: a tier, the spool or the origin failed; the same call
            continues.
    """
    places = {
        name: await TierObserver(store).observe({run}, {run: (0,)}, chunks=False) for name, store in stores.items()
    }
    listing = await origin.listing()
    by_step, refused = await thread_uncancelled(_candidates_by_step, origin, listing, step)
    if not by_step and not refused:
        raise CheckpointNotFound(f"{origin.display_name}: no checkpoint of a program that is known lies there")
    attempt = _attempt(run, places, [candidates[0] for candidates in by_step])
    work = _Import(origin, listing, stores, spool, run, attempt, places, dry_run)
    progress.begin(sum(candidate.size for candidates in by_step for candidate in candidates))
    imported_units: list[ImportedUnit] = []
    for candidates in by_step:
        imported: ImportedUnit | None = None
        for candidate in candidates:
            if imported is None:
                imported, why_not = await work.first_sound(candidate)
                refused += why_not
            elif step is None:
                refused.append(_step_taken(candidate.unit.path, candidate.step, imported.path))
            progress.done += candidate.size
            progress.on_progress(progress)
        imported_units += [imported] if imported else []
    return ImportedRun(run, tuple(imported_units), tuple(refused))


def _step_taken(path: str, step: int, by: str) -> RefusedUnit:
    return RefusedUnit(path, "taken", f"step {step} is that of {by}, too; import it alone")


def _candidates_by_step(
    origin: ImportSource, listing: Listing, step: int | None
) -> tuple[list[list[_Candidate]], list[RefusedUnit]]:
    """Return the units to import, those of each step together, in the order of steps; and those that have no step."""
    name = origin.name
    listed_units = units(listing) if name is None else units_of(listing, name) if name in listing.entries else []
    by_step: dict[int, list[_Candidate]] = {}
    strays = origin.stray(listed_units)
    refused = [RefusedUnit(path, status, f"{path}: {why}") for path, (status, why) in strays.items()]
    for unit in listed_units:
        try:
            described = describe_unit(unit, lambda path: origin.opened(path, listing.entries[path]))
        except (TierdError, OSError):
            raise
        except Exception as error:
            refused.append(_refuse_unforeseen(unit, error))
            continue
        unit_step = step if described.step is None and len(listed_units) == 1 else described.step
        if unit_step is None:
            refused.append(RefusedUnit(unit.path, "stepless", "nothing says its step; import it alone, with --step"))
        else:
            entries = {path: listing.entries[path] for path in unit.files}
            by_step.setdefault(unit_step, []).append(_Candidate(unit, unit_step, described, entries))
    if step is not None and by_step and step not in by_step:
        raise CheckpointNotFound(f"step {step}: there is no such checkpoint\n  {describe_steps(step, list(by_step))}")
    if step is not None and by_step:
        return [by_step[step]], [refusal for refusal in refused if refusal.path in strays]
    return [by_step[key] for key in sorted(by_step)], refused


def _attempt(run: str, places: Mapping[str, Place], candidates: Sequence[_Candidate]) -> str:
    """Return the attempt of a run's imported checkpoints: the one that a tier has, or the one of the oldest unit."""
    token = xxhash.xxh3_64_hexdigest(f"{run}\0import".encode())[:8]
    attempts = sorted({attempt for place in places.values() for attempt in place.run(run).attempts})
    if foreign := [attempt for attempt in attempts if not attempt.endswith(f"-{token}")]:
        raise ConfigError(
            f"--run {run}: a tier has checkpoints of that run that were not imported (attempt {foreign[0]}), and two "
            "histories do not mix; choose another name"
        )
    if attempts:
        return attempts[0]
    oldest = min((candidate.made for candidate in candidates), default=checkpoint_time(0))
    return next_attempt(int(oldest.timestamp() * 1000), (), token)


@dataclass(slots=True)
class _Import:
    """An import at work. `places` shows the tiers, with the parts that were sent."""

    origin: ImportSource
    listing: Listing
    stores: Mapping[str, Store]
    spool: Spool
    run: str
    attempt: str
    places: dict[str, Place]
    dry_run: bool

    async def first_sound(self, candidate: _Candidate) -> tuple[ImportedUnit | None, list[RefusedUnit]]:
        """Import a unit or, if it is not sound, the unit without one of its twins; and say what was not imported."""
        outcome = await self.unit(candidate)
        if isinstance(outcome, ImportedUnit):
            return outcome, []
        for left_out, unit in await thread_uncancelled(list, units_without_twins(candidate.unit, self.listing)):
            entries = {path: candidate.entries[path] for path in unit.files}
            retried = await self.unit(replace(candidate, unit=unit, entries=entries, left_out=left_out))
            if isinstance(retried, ImportedUnit):
                if outcome.status == "taken":  # by this same unit, so that the tier has nothing of the twin
                    return retried, [_step_taken(path, candidate.step, retried.path) for path in left_out]
                return retried, [RefusedUnit(path, outcome.status, outcome.reason) for path in left_out]
        return None, [outcome]

    async def unit(self, candidate: _Candidate) -> ImportedUnit | RefusedUnit:
        """Import a unit, or say why not."""
        part = PartId(CheckpointId(self.run, self.attempt, candidate.step), 0, 1)
        lacking = []
        for name in self.stores:
            match await self._compare(name, part, candidate):
                case None:
                    lacking.append(name)
                case False:
                    why = f"{name} has other files of step {candidate.step}; import these under another run's name"
                    return RefusedUnit(candidate.unit.path, "taken", why)
        sent = 0
        if self.dry_run and candidate.unit.missing_reason:
            return RefusedUnit(candidate.unit.path, "incomplete", candidate.unit.missing_reason)
        if lacking and not self.dry_run:
            try:
                await self._stage(part, candidate)
            except (UnitBusy, ChangedFile, CorruptChunk) as error:
                return RefusedUnit(candidate.unit.path, "changing", str(error))
            except ManifestError as error:
                return RefusedUnit(candidate.unit.path, "unknown", str(error))
            except _UnsoundUnit as error:
                return RefusedUnit(candidate.unit.path, error.status, str(error))
            except (TierdError, OSError):
                raise
            except Exception as error:
                return _refuse_unforeseen(candidate.unit, error)
            for name in lacking:
                sent += await self._send(name, part)
            await thread_uncancelled(self.spool.remove, [part])
        unit = candidate.unit
        return ImportedUnit(
            unit.path, unit.layout.program, candidate.step, self.attempt, candidate.size, sent, not lacking
        )

    async def _compare(self, name: str, part: PartId, candidate: _Candidate) -> bool | None:
        """Return whether a tier's part has the files of a unit, by their sizes and times; None if it has no part."""
        if not self.places[name].has(part):
            return None
        try:
            manifest = await read_manifest(self.stores[name], part)
        except (ObjectNotFound, ManifestError):
            return None
        expected = make_unit_file(candidate.unit, candidate.entries, candidate.described.ranks).encode()
        tier_files = {file.path: (file.size, file.chunks[0].xxh3_128 if file.chunks else "") for file in manifest.files}
        sizes = {path: entry.size for path, entry in candidate.entries.items()}
        recorded = tier_files.pop(UNIT_NAME, None)
        has_sizes = {path: size for path, (size, _) in tier_files.items()} == sizes
        return has_sizes and recorded == (len(expected), digest(expected))

    async def _stage(self, part: PartId, candidate: _Candidate) -> None:
        """Check a unit, and commit it to the spool; raises `_UnsoundUnit`, and as `stage_unit`."""
        if candidate.unit.missing_reason:
            raise _UnsoundUnit("incomplete", f"{candidate.unit.path}: {candidate.unit.missing_reason}")
        # Files that this command made are linked, also those that a program would write again under their names.
        unit = replace(candidate.unit, step=candidate.step) if self.origin.is_downloaded else candidate.unit
        async with self.origin.downloaded(candidate.unit, candidate.entries) as (tree, entries):
            await thread_uncancelled(_inspect, tree, candidate.unit, entries)
            with self.spool.stage(part) as stage:
                ranks = candidate.described.ranks
                staged = await thread_uncancelled(stage_unit, tree, unit, entries, ranks, (), stage, lambda: None)
                if (after := await self.origin.relist(candidate.unit)) is not None:
                    _check_unchanged(candidate, after)
                metrics = candidate.described.metrics
                manifest = Manifest.of(part, None, metrics, candidate.made, __version__, staged.files)
                await thread_uncancelled(stage.commit, manifest)

    async def _send(self, name: str, part: PartId) -> int:
        store = self.stores[name]
        base, worn_out = await find_base(store, self.places[name], part)
        flushed = await flush(self.spool, part, TierUploadContext(store), base=base, worn_out=worn_out)
        self.places[name] = self.places[name].adding(part, flushed.facts)
        log.info(
            "%s: imported, %s stored as %s", part.checkpoint, format_size(flushed.raw), format_size(flushed.stored)
        )
        return flushed.sent


def _refuse_unforeseen(unit: Unit, error: Exception) -> RefusedUnit:
    """Refuse a unit for an error that nobody foresaw, so that the others are imported."""
    log.debug("%s: not imported", unit.path, exc_info=error)
    return RefusedUnit(unit.path, "unreadable", f"{unit.path}: {type(error).__name__}: {error}")


def _check_unchanged(candidate: _Candidate, after: Listing) -> None:
    after = listing_without(candidate.left_out, after)
    relisted = next((unit for unit in units(after) if unit.path == candidate.unit.path), candidate.unit)
    is_same = all(after.entries.get(path) == entry for path, entry in candidate.entries.items())
    if relisted.files != candidate.unit.files or not is_same:
        raise ChangedFile("it was written to, renamed or deleted")


def _inspect(tree: DirectoryTree, unit: Unit, entries: ListedEntries) -> None:
    sizes = {path: entry.size for path, entry in entries.items()}
    inspected = inspect_unit(unit, sizes, lambda path: tree.opened(path, entries[path]), tree.unfollowed)
    if inspected.status != "sound":
        why = describe_problems(inspected.findings[:3])
        raise _UnsoundUnit(inspected.status, why or "no format that can be checked")


class _UnsoundUnit(Exception):
    """A unit is not sound; `status` is that of its inspection."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status
