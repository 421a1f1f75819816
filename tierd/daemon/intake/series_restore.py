"""Put the newest checkpoint of each series of a watched run back, or an older one that a person chose.

Invariant: the record of a choice passes over only what was on the tiers when it was made. What the program saves
afterwards is newer, so a choice never has to be taken back. A run that a person's own rules found needs them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

import msgspec

from tierd.core.config import WatchConfig
from tierd.core.errors import CheckpointNotFound, ConfigError, CorruptChunk, ManifestError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import UNIT_NAME, Manifest
from tierd.core.save_rules import MetricGoal
from tierd.core.timeline.restore_order import restore_candidates
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.intake.directory_changes import locked_directory, write_atomically
from tierd.daemon.intake.in_place_restore import KeptPaths, PointerPolicy, RestoredUnit, restore_unit
from tierd.daemon.tiers.tier_objects import first_manifest
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.replicas import Replicas
from tierd.spool.file_io import open_own
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.checkpoint_names import BEFORE_ALL, KnownCheckpoints, known_checkpoints, series_of, stepless_run
from tierd.watching.loose_units import UserLayout
from tierd.watching.unit import USER_LAYOUT
from tierd.watching.unit_file import MAX_UNIT_FILE_SIZE, UnitFile, decode_unit

SeriesFilter: TypeAlias = Callable[[CheckpointId, str, Set[str]], bool]


async def restore_each_series(
    stores: Mapping[str, Store],
    run: str,
    directory: Path,
    progress: Progress,
    selects: SeriesFilter = lambda checkpoint, series, paths: True,
    placed: Sequence[RestoredUnit] = (),
    *,
    spares_newer: bool = False,
    newest: datetime = BEFORE_ALL,
) -> list[RestoredUnit]:
    """Put the newest verified checkpoint of each series back, as `restore_unit` does; a file is put back once.

    Args:
        directory: the program's directory. The caller holds it by `locked_directory`.
        selects: called with the newest checkpoint of a series, the series, and the checkpoint's files; if it returns
            False, nothing of the series is put back.
        spares_newer: whether files are left that were written after all of a checkpoint's.
        newest: when the newest checkpoint of other runs in the directory was made. The pointers of a newer one are
            written; those of any other only where they are lost.
    """
    inventory = await observe_places(None, stores, run, chunks=False)
    placed_series = {series_of(restored_unit.files) for restored_unit in placed}
    paths = {path for restored_unit in placed for path in restored_unit.files}
    restored, history = list[RestoredUnit](), known_checkpoints(inventory, run)
    for checkpoint in sorted(restore_candidates(inventory, run).complete, reverse=True):
        manifest = await first_manifest(PartId(checkpoint, 0, 1), None, stores)
        own_files = _files(manifest) if manifest else set()
        if not own_files or (series := series_of(own_files)) in placed_series or not paths.isdisjoint(own_files):
            continue
        if selects(checkpoint, series, own_files):
            try:
                is_first = all(restored_unit.run != run for restored_unit in (*placed, *restored))
                is_newest = is_first and history.created_at(checkpoint) > newest
                pointing: PointerPolicy = "always" if is_newest else "if lost"
                spared, step, attempt = KeptPaths(keeps_newer=spares_newer), checkpoint.step, checkpoint.attempt
                restored.append(
                    await restore_unit(
                        stores, run, directory, step, attempt, progress, pointing=pointing, kept_paths=spared
                    )
                )
            except CheckpointNotFound:
                continue  # proven corrupt, so an older one of the series is next
        placed_series.add(series)
        paths |= own_files
    return restored


def _files(manifest: Manifest) -> set[str]:
    """Return the paths of a unit's files; none if no watch took the checkpoint."""
    paths = {file.path for file in manifest.files}
    return paths - {UNIT_NAME} if UNIT_NAME in paths else set()


async def read_unit_file(stores: Mapping[str, Store], checkpoint: CheckpointId) -> UnitFile | None:
    """Return the description of a watched checkpoint; None if no tier has its `unit.json`."""
    copies = Replicas(PartId(checkpoint, 0, 1), stores)
    await copies.read_manifests()
    for manifest in copies.contents()[:1]:
        copies.trust(manifest)
        sizes = {file.path: (number, file.size) for number, file in enumerate(manifest.files)}
        number, size = sizes.get(UNIT_NAME, (0, MAX_UNIT_FILE_SIZE + 1))
        if size > MAX_UNIT_FILE_SIZE:
            return None
        chunks = manifest.files[number].chunks
        try:
            data = b"".join([bytes(await copies.chunk(number, index, UNIT_NAME)) for index, _ in enumerate(chunks)])
            return decode_unit(data, f"{checkpoint}: {UNIT_NAME}")
        except (CorruptChunk, ManifestError):
            return None
    return None


ROLLBACK_NAME = ".tierd-chosen"  # begins with `TIERD_PREFIX`, so a watch does not list it
_LONGEST = 1 << 12  # bytes


class ManualRollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint that was put back, although newer ones may exist."""

    run: str
    step: int
    attempt: str
    passed_over: datetime | None = None  # in a record of an older tierd: when the newest on the tiers was made
    newest_attempt: str = ""  # with `newest_step`, the newest on the tiers then; its time may be in the future
    newest_step: int = 0

    def permits(self, checkpoint: CheckpointId, created: datetime) -> bool:
        """Whether `prepare` may fetch a checkpoint: it is the chosen one, or was made after the choice."""
        if (checkpoint.step, checkpoint.attempt) == (self.step, self.attempt):
            return True
        if self.passed_over is not None:
            return created > self.passed_over
        return checkpoint > CheckpointId(self.run, self.newest_attempt, self.newest_step)


async def restore_in_place(
    stores: Mapping[str, Store],
    run: str,
    directory: Path,
    step: int | None,
    attempt: str | None,
    progress: Progress,
    best: MetricGoal | None,
) -> RestoredUnit:
    """Put a checkpoint back as `restore_unit` does, and write down if it was chosen.

    The newest one ends a choice, and the newest of each other series is put back beside it. The directory is made if it
    does not exist. Raises as `restore_unit` and `locked_directory`.
    """
    async with locked_directory(directory):
        placed, is_newest = [], step is None and attempt is None and best is None
        history = await _observe_history(stores, run) if is_newest else KnownCheckpoints()
        if is_newest and not history.created:  # all that the directory had may be without a step
            placed = await restore_each_series(stores, stepless_run(run), directory, progress)
        placed = placed or [await restore_unit(stores, run, directory, step, attempt, progress, best)]
        restored_unit = placed[0]
        if is_newest:
            (directory / ROLLBACK_NAME).unlink(missing_ok=True)
            newest_made = history.created_at(restored_unit.checkpoint)
            for name in (stepless_run(run), run):  # `run` may have versions without a step from before any had one
                placed += await restore_each_series(
                    stores, name, directory, progress, placed=placed, newest=newest_made
                )
            return replace(restored_unit, beside=tuple(placed[1:]))
        history = await _observe_history(stores, run)
        newest = max({*history.created, *history.unread, restored_unit.checkpoint})
        rollback = ManualRollback(
            run, restored_unit.step, restored_unit.attempt, newest_attempt=newest.attempt, newest_step=newest.step
        )
        text = msgspec.json.encode(rollback).decode()
        await thread_uncancelled(write_atomically, directory / ROLLBACK_NAME, text)
        return restored_unit


async def _observe_history(stores: Mapping[str, Store], run: str) -> KnownCheckpoints:
    return known_checkpoints(await observe_places(None, stores, run, chunks=False), run)


def read_rollback(directory: Path, run: str) -> ManualRollback | None:
    """Return the choice for a run in a directory, if any. Raises `ConfigError` for a file that is none."""
    path = directory / ROLLBACK_NAME
    try:
        with os.fdopen(open_own(path), "rb") as file:
            rollback = msgspec.json.decode(file.read(_LONGEST), type=ManualRollback)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not what `tierd restore --into` writes ({error}); remove it") from None
    is_usable = rollback.passed_over.tzinfo is not None if rollback.passed_over else bool(rollback.newest_attempt)
    return rollback if rollback.run == run and is_usable else None


_TRIED = 3  # checkpoints whose description is looked for


def own_layout(watch: WatchConfig) -> UserLayout | None:
    """Return the rules by which a watch finds its units; None: the usual ones."""
    return UserLayout(watch.unit, watch.step, watch.complete_when) if watch.unit else None


async def check_own_rules(
    run: str, history: KnownCheckpoints, spool: Spool | None, stores: Mapping[str, Store]
) -> None:
    """Refuse to find the units of a run by the usual rules if a watch found its newest one by a person's own.

    The usual rules may take a part of such a unit for a whole one. Raises `ConfigError`.
    """
    for checkpoint in sorted(history.created, key=history.created_at, reverse=True)[:_TRIED]:
        about = (spool and _in_spool(spool, checkpoint)) or await read_unit_file(stores, checkpoint)
        if about is None:
            continue  # no place has the description, or only a damaged one
        if about.program == USER_LAYOUT.program:
            raise ConfigError(
                f"run {run!r} was watched with --unit: give prepare the same --unit, --step and --complete-when. "
                "Nothing was moved"
            )
        return


def _in_spool(spool: Spool, checkpoint: CheckpointId) -> UnitFile | None:
    path = spool.path(PartId(checkpoint, 0, 1)) / UNIT_NAME
    with suppress(OSError, ConfigError, ManifestError), os.fdopen(open_own(path), "rb") as file:
        return decode_unit(file.read(MAX_UNIT_FILE_SIZE), str(path))
    return None
