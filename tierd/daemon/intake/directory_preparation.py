"""Make a directory right before a launch, so that the program's own resume finds what is whole.

Invariant: only what is proven damaged, or proven unfinished by its own program, is moved, and into
`.tierd-quarantine/`; nothing is deleted. That an expected file is absent proves nothing. A unit that a place has
verified is compared with its digests, and each of its bytes is read once. A store that does not answer proves nothing,
and ends the work before anything is moved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tierd.core.errors import CheckpointNotFound, ConfigError, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.core.planning.inventory import Inventory
from tierd.core.timeline.candidates import restore_candidates
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.intake.damaged_units import (
    entries_to_move,
    judge_decay,
    judge_series,
    points_to_absent,
    replace_unit,
    units_to_replace,
)
from tierd.daemon.intake.directory_changes import is_pointed_to, locked_directory, restore_pointers, write_pointers
from tierd.daemon.intake.in_place_restore import KeptPaths, PointerPolicy, RestoredUnit, restore_unit
from tierd.daemon.intake.series_restore import check_own_rules, read_rollback, read_unit_file, restore_each_series
from tierd.daemon.intake.unit_verdict import (
    CHANGING_REASON,
    JudgedUnit,
    Verdict,
    is_checkpoint_newer,
    judge_by_digests,
    judge_by_structure,
    matching_checkpoints,
    unjudged_unit,
)
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.daemon.transfer.download import Progress
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.checkpoint_names import BEFORE_ALL, KnownCheckpoints, known_checkpoints, series_of, stepless_run
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.loose_units import UserLayout
from tierd.watching.unit_detection import units
from tierd.watching.unit_file import UnitFile, pointer_to_newest

_POINTED = 8  # of so many newest units, one had pointers; each is a read of a tier
_LISTINGS = 3  # because a checkpoint may be pruned between a listing and the reading


@dataclass(frozen=True, slots=True)
class PreparedUnit:
    """What was found about a checkpoint in the directory, and done.

    Attributes:
        path: its path in the directory.
        step: its step; if it has none, the second of its last write.
        verdict: `verified`: each byte is the recorded one; `sound`: no place has it, and its structure is right;
            `damaged`, `unfinished`: it was moved; `unknown`: it cannot be checked, or may be unfinished, and was left;
            `missing`: the newest checkpoint was not there.
        why: the reason, for people.
        moved: where it lies now, as paths in the directory.
        replaced: whether a verified copy is in its place now.
    """

    path: str
    step: int
    verdict: Verdict
    why: str = ""
    moved: tuple[str, ...] = ()
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """The answer of `tierd prepare`.

    Attributes:
        units: the checkpoints, by path.
        pointers: the program's pointers that were corrected.
    """

    units: tuple[PreparedUnit, ...]
    pointers: tuple[str, ...]


def _judged_as_prepared(judged: JudgedUnit) -> PreparedUnit:
    return PreparedUnit(judged.unit.path, judged.step, judged.verdict, judged.reason, judged.moved, judged.replaced)


def _fetched_as_prepared(restored_unit: RestoredUnit) -> PreparedUnit:
    return PreparedUnit(restored_unit.path, restored_unit.step, "missing", "", restored_unit.moved, replaced=True)


async def prepare(
    directory: Path,
    run: str,
    spool: Spool | None,
    stores: Mapping[str, Store],
    progress: Progress,
    layout: UserLayout | None = None,
) -> PrepareResult:
    """Verify every unit below a directory, move damaged and unfinished ones away, and fetch replacements.

    Args:
        run: the run as which it is watched.
        spool: the run's spool, if this node has one; its manifests are used, too.
        layout: a person's own rules about which paths are checkpoints, as of the watch; None: the usual ones.

    Raises:
        ConfigError: a program still writes below the directory, this account may not write there, another command held
            the directory for an hour, or the run was taken by other rules.
        StoreUnavailable: a tier did not answer. Nothing was moved.
        StoreRefused: a file cannot be read, which proves nothing. Nothing was moved.
    """
    async with locked_directory(directory):
        return await _prepare(directory, run, spool, stores, progress, layout)


async def _prepare(
    directory: Path,
    run: str,
    spool: Spool | None,
    stores: Mapping[str, Store],
    progress: Progress,
    layout: UserLayout | None,
) -> PrepareResult:
    unmoved, stepless = "; nothing was moved", stepless_run(run)
    inventory = await _observed(spool, stores, run, unmoved)
    stepless_history = known_checkpoints(await _observed(spool, stores, stepless, unmoved), stepless)
    run_history = known_checkpoints(inventory, run).merge(stepless_history)
    if layout is None:
        await check_own_rules(run, run_history, spool, stores)
    judged = await _judge_units(
        directory, layout, run, stepless if stepless_history.created else run, run_history, spool, stores
    )
    for judged_unit in units_to_replace(judged):
        good_paths = {
            path
            for sibling in judged
            if sibling is not judged_unit and sibling.is_intact
            for path in sibling.unit.files
        }
        await replace_unit(judged_unit, directory, stores, progress, good_paths)
    pointers = await thread_uncancelled(
        _point, directory, judged
    )  # before, because what is fetched has pointers of its own
    fetched = list[RestoredUnit]()
    tried = set[CheckpointId]()
    for _ in range(_LISTINGS):
        try:
            fetched = await _fetch_newest(judged, directory, inventory, run, run_history, stores, progress, tried)
            break
        except CheckpointNotFound:  # proven corrupt; or pruned, because a newer one is there now
            inventory = await _observed(spool, stores, run, "")
            run_history = known_checkpoints(inventory, run).merge(stepless_history)
    fetched += await _others(judged, directory, run, run_history, stores, progress, fetched)
    pointers += [path for restored_unit in fetched for path in restored_unit.pointers]
    pointers += await _restore_lost_pointers(directory, judged, fetched, run_history, stores)
    return PrepareResult(
        (*map(_judged_as_prepared, judged), *map(_fetched_as_prepared, fetched)), tuple(dict.fromkeys(pointers))
    )


async def _judge_units(
    directory: Path,
    layout: UserLayout | None,
    run: str,
    stepless: str,
    run_history: KnownCheckpoints,
    spool: Spool | None,
    stores: Mapping[str, Store],
) -> list[JudgedUnit]:
    with DirectoryTree(directory, user_layout=layout) as tree:
        listing = await thread_uncancelled(tree.listing)
        judged = await thread_uncancelled(
            lambda: [unjudged_unit(tree, unit, listing, run, stepless) for unit in units(listing)]
        )
        for judged_unit in judged:
            async for record in matching_checkpoints(judged_unit, run_history, listing, spool, stores):
                if await thread_uncancelled(judge_by_digests, tree, judged_unit, listing, record):
                    break
            else:
                await thread_uncancelled(judge_by_structure, tree, judged_unit, listing)
            await judge_decay(tree, judged_unit, run_history, listing, stores)
            judged_unit.entries = judged_unit.entries or entries_to_move(judged_unit, listing)
            judged_unit.is_pointed_to = bool(judged_unit.absent) and await thread_uncancelled(
                points_to_absent, tree, judged_unit, listing
            )
        if layout is None:
            await judge_series(judged, run_history, spool, stores)
    if busy := [judged_unit.unit.path for judged_unit in judged if judged_unit.reason == CHANGING_REASON]:
        raise ConfigError(f"{directory / busy[0]}: {CHANGING_REASON}; stop the program first. Nothing was moved")
    if unread := [judged_unit for judged_unit in judged if judged_unit.unreadable]:
        raise StoreRefused(
            f"{directory / unread[0].unit.path}: {unread[0].reason}. Nothing was moved; make it readable for this "
            "account, or move it away"
        )
    return judged


async def _observed(spool: Spool | None, stores: Mapping[str, Store], run: str, effect: str) -> Inventory:
    inventory = await observe_places(spool, stores, run, chunks=False)
    if silent := [name for name, place in inventory.tiers.items() if place is None]:
        raise StoreUnavailable(f"not every tier could be asked: {', '.join(silent)}{effect}")
    return inventory


async def _fetch_newest(
    judged: list[JudgedUnit],
    directory: Path,
    inventory: Inventory,
    run: str,
    run_history: KnownCheckpoints,
    stores: Mapping[str, Store],
    progress: Progress,
    tried: set[CheckpointId],
) -> list[RestoredUnit]:
    """Fetch the newest verified checkpoint, or the chosen one, if it is newer than every whole unit there.

    Args:
        tried: those that were tried before, to which this one is added. If the newest is one of them, nothing is done.

    Raises:
        CheckpointNotFound: it could not be verified, or was pruned meanwhile.
    """
    rollback = await thread_uncancelled(read_rollback, directory, run)
    order = restore_candidates(inventory, run)
    in_place = [judged_unit for judged_unit in judged if judged_unit.holds_its_place and judged_unit.run == run]
    newer = [
        candidate
        for candidate in order.candidates
        if all(is_checkpoint_newer(candidate.checkpoint, run_history, judged_unit) for judged_unit in in_place)
    ]
    if rollback is not None:
        newer = [
            candidate
            for candidate in newer
            if rollback.permits(candidate.checkpoint, run_history.created.get(candidate.checkpoint, BEFORE_ALL))
        ]
    on_tiers = [
        candidate
        for candidate in newer
        if any(place and candidate.checkpoint in place.checkpoints for place in inventory.tiers.values())
    ]
    if not on_tiers:
        return []
    newest = on_tiers[0].checkpoint
    is_present = any(
        (judged_unit.replaced or judged_unit.verdict == "unknown") and judged_unit.step == newest.step
        for judged_unit in judged
    )
    if is_present or newest in tried:
        return []
    tried.add(newest)
    keeps = any(_keeps_pointer(judged_unit, newest, run_history, directory) for judged_unit in judged)
    pointing: PointerPolicy = "never" if keeps else "always"
    step, attempt, spared = newest.step, newest.attempt, KeptPaths(keeps_newer=True)
    return [await restore_unit(stores, run, directory, step, attempt, progress, pointing=pointing, kept_paths=spared)]


async def _others(
    judged: list[JudgedUnit],
    directory: Path,
    run: str,
    run_history: KnownCheckpoints,
    stores: Mapping[str, Store],
    progress: Progress,
    fetched: list[RestoredUnit],
) -> list[RestoredUnit]:
    """Fetch the newest checkpoint of each other series, if the directory was behind, and what it has of it is older.

    A program may have deleted a series on purpose. So one with a step that is gone comes back only with a checkpoint
    that is newer than all that the directory had, and nothing does after a person went back. What has no step comes
    back if its directory is there, because a program may delete it just before it writes it anew.
    """
    if await thread_uncancelled(read_rollback, directory, run) is not None:
        return []
    intact = [judged_unit for judged_unit in judged if judged_unit.holds_its_place]
    placed, stepless = [*fetched], stepless_run(run)
    fetched_times = [
        run_history.created.get(CheckpointId(restored_unit.run, restored_unit.attempt, restored_unit.step), BEFORE_ALL)
        for restored_unit in fetched
    ]
    newest = max((*fetched_times, *(judged_unit.modified_at for judged_unit in intact)), default=BEFORE_ALL)

    def should_fetch(checkpoint: CheckpointId, series: str, paths: Set[str]) -> bool:
        rivals = [
            judged_unit
            for judged_unit in intact
            if series_of(judged_unit.unit.files or [judged_unit.unit.path]) == series
            or not paths.isdisjoint(judged_unit.unit.files)
        ]
        is_newest = all(
            run_history.created.get(checkpoint, BEFORE_ALL) > judged_unit.modified_at for judged_unit in intact
        )
        had_home = checkpoint.run == stepless and _common_directory(directory, paths).is_dir()
        return all(is_checkpoint_newer(checkpoint, run_history, rival) for rival in rivals) and (
            bool(fetched) or is_newest or had_home
        )

    if any(
        checkpoint.run == stepless for checkpoint in run_history.created
    ):  # first, because `run` may have older versions of these files
        placed += await restore_each_series(
            stores, stepless, directory, progress, should_fetch, placed, spares_newer=True, newest=newest
        )
    if fetched:
        placed += await restore_each_series(stores, run, directory, progress, should_fetch, placed, spares_newer=True)
    return placed[len(fetched) :]


def _common_directory(directory: Path, paths: Set[str]) -> Path:
    return directory / os.path.commonpath([str(Path(path).parent) for path in paths])


def _keeps_pointer(judged: JudgedUnit, newest: CheckpointId, run_history: KnownCheckpoints, directory: Path) -> bool:
    """Whether the program's pointers name a unit that cannot be checked, and is as new as the newest checkpoint."""
    if judged.verdict != "unknown" or is_checkpoint_newer(newest, run_history, judged):
        return False
    return is_pointed_to(directory, judged.unit.layout.program, judged.unit.path, judged.unit.files)


def _point(directory: Path, judged: list[JudgedUnit]) -> list[str]:
    """Have each program's pointers name its newest whole unit, unless they name another one that was left in place.

    The program, or a person who went back, has chosen that one.
    """
    newest: dict[tuple[str, str], JudgedUnit] = {}
    pointed = set[tuple[str, str]]()
    for judged_unit in sorted(judged, key=lambda judged_unit: judged_unit.modified_at):
        key = judged_unit.unit.layout.program, judged_unit.unit.path.rpartition("/")[0]
        if judged_unit.is_intact:
            newest[key] = judged_unit
        if (judged_unit.is_intact or judged_unit.verdict == "unknown") and is_pointed_to(
            directory, key[0], judged_unit.unit.path, judged_unit.unit.files
        ):
            pointed.add(key)
    wrong = [(key[0], judged_unit) for key, judged_unit in newest.items() if key not in pointed]
    rewritten = (
        write_pointers(directory, program, judged_unit.unit.path, judged_unit.unit.files)
        for program, judged_unit in wrong
    )
    return [path for paths in rewritten for path in paths]


async def _restore_lost_pointers(
    directory: Path,
    judged: list[JudgedUnit],
    fetched: Sequence[RestoredUnit],
    run_history: KnownCheckpoints,
    stores: Mapping[str, Store],
) -> list[str]:
    """Put back the pointers that are gone: in each directory as the program wrote them for its newest whole unit.

    A program that was killed before it wrote a pointer anew left its newest unit without one. Then they are those of
    the newest before it that had some, and name the newest.
    """
    placed = [
        (judged_unit.modified_at, judged_unit.checkpoint, judged_unit.unit.path)
        for judged_unit in judged
        if judged_unit.is_intact and judged_unit.checkpoint is not None
    ]
    restored = [
        (CheckpointId(restored_unit.run, restored_unit.attempt, restored_unit.step), restored_unit.path)
        for restored_unit in fetched
    ]
    placed += [(run_history.created.get(checkpoint, BEFORE_ALL), checkpoint, path) for checkpoint, path in restored]
    homes: dict[tuple[str, str], list[tuple[datetime, CheckpointId, str]]] = {}
    for unit in sorted(placed, key=lambda unit: unit[0], reverse=True):
        homes.setdefault((unit[1].run, unit[2].rpartition("/")[0]), []).append(unit)
    recorded: dict[CheckpointId, UnitFile | None] = {}  # read once, because directories share former checkpoints
    torn = [
        judged_unit.unit
        for judged_unit in judged
        if judged_unit.verdict == "unknown" and judged_unit.unit.missing_reason
    ]
    pointer_paths = []
    for (created, newest, path), *older in homes.values():
        before = [
            checkpoint
            for checkpoint, at in run_history.created.items()
            if checkpoint.run == newest.run and at < created
        ]
        before.sort(key=lambda checkpoint: run_history.created[checkpoint], reverse=True)
        formers = dict.fromkeys([newest, *(checkpoint for _, checkpoint, _ in older), *before])
        covered = set[str]()
        for former in [*formers][:_POINTED]:
            if former not in recorded:
                recorded[former] = await read_unit_file(stores, former)
            about = recorded[former]
            pointers = about.pointers if about and about.pointers else ()
            if about and former != newest:
                pointers = tuple(filter(None, (pointer_to_newest(pointer, about.path, path) for pointer in pointers)))
            pointers = tuple(pointer for pointer in pointers if pointer.path not in covered)
            pointer_paths += await thread_uncancelled(restore_pointers, directory, pointers, torn)
            covered |= {pointer.path for pointer in pointers}
            if pointers and former != newest:
                break
    return pointer_paths
