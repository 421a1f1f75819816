"""Make a directory right before a launch, so that the program's own resume finds what is whole.

Invariant: only what is proven damaged, or proven unfinished by its own program, is moved, and into
`.tierd-quarantine/`; nothing is deleted. That an expected file is absent proves nothing. A unit that a place has
verified is compared with its digests, and each of its bytes is read once. A store that does not answer proves nothing,
and ends the work before anything is moved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from posixpath import dirname

from tierd.core.errors import CheckpointNotFound, ConfigError, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.core.planning.inventory import Inventory
from tierd.core.timeline.restore_order import restore_candidates
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
    *,
    dry_run: bool = False,
) -> PrepareResult:
    """Verify every unit below a directory, move damaged and unfinished ones away, and fetch replacements.

    With `dry_run` nothing is moved, fetched or locked: `moved` then names what would be, `replaced` says whether a tier
    has a checkpoint of its step, and of what is missing only the newest checkpoint of all series is named.

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
    preparation = _Preparation(directory, run, spool, stores, progress, layout)
    if dry_run:
        return await preparation.forecast()
    async with locked_directory(directory):
        return await preparation.prepare()


@dataclass(slots=True)
class _Preparation:
    """The arguments of `prepare`, and what is known and done so far."""

    directory: Path
    run: str
    spool: Spool | None
    stores: Mapping[str, Store]
    progress: Progress
    layout: UserLayout | None
    history: KnownCheckpoints = field(default_factory=KnownCheckpoints)
    judged: list[JudgedUnit] = field(default_factory=list)
    fetched: list[RestoredUnit] = field(default_factory=list)

    async def forecast(self) -> PrepareResult:
        inventory, _ = await self._judge()
        steps = {
            checkpoint.step
            for place in inventory.tiers.values()
            for checkpoint in (place.run(self.run).usable if place else ())
        }
        prepared = [_judged_as_prepared(judged_unit) for judged_unit in self.judged]
        for judged_unit in units_to_replace(self.judged):
            moved, replaced = tuple(sorted(judged_unit.entries)), judged_unit.step in steps
            at = self.judged.index(judged_unit)
            prepared[at] = replace(prepared[at], moved=moved, replaced=replaced)
            judged_unit.replaced = replaced
        newest = await self._newest_to_fetch(inventory)
        missing = [] if newest is None else [PreparedUnit("", newest.step, "missing", replaced=True)]
        return PrepareResult((*prepared, *missing), ())

    async def _judge(self) -> tuple[Inventory, KnownCheckpoints]:
        """Judge all units, and return the run's inventory and the history of units without a step."""
        unmoved, stepless = "; nothing was moved", stepless_run(self.run)
        inventory = await _observed(self.spool, self.stores, self.run, unmoved)
        stepless_history = known_checkpoints(await _observed(self.spool, self.stores, stepless, unmoved), stepless)
        self.history = known_checkpoints(inventory, self.run).merge(stepless_history)
        if self.layout is None:
            await check_own_rules(self.run, self.history, self.spool, self.stores)
        await self._judge_units(stepless if stepless_history.created else self.run)
        return inventory, stepless_history

    async def prepare(self) -> PrepareResult:
        inventory, stepless_history = await self._judge()
        for judged_unit in units_to_replace(self.judged):
            whole = (sibling.unit for sibling in self.judged if sibling is not judged_unit and sibling.is_intact)
            good_paths = {path for unit in whole for path in unit.files}
            await replace_unit(judged_unit, self.directory, self.stores, self.progress, good_paths)
        # Before the fetch, because what is fetched has pointers of its own.
        pointers = await thread_uncancelled(self._point)
        tried = set[CheckpointId]()
        for _ in range(_LISTINGS):
            try:
                self.fetched = await self._fetch_newest(inventory, tried)
                break
            except CheckpointNotFound:  # proven corrupt; or pruned, because a newer one is there now
                inventory = await _observed(self.spool, self.stores, self.run, "")
                self.history = known_checkpoints(inventory, self.run).merge(stepless_history)
        self.fetched += await self._fetch_other_series()
        pointers += [path for restored_unit in self.fetched for path in restored_unit.pointers]
        pointers += await self._restore_lost_pointers()
        prepared = (*map(_judged_as_prepared, self.judged), *map(_fetched_as_prepared, self.fetched))
        return PrepareResult(prepared, tuple(dict.fromkeys(pointers)))

    async def _judge_units(self, stepless: str) -> None:
        with DirectoryTree(self.directory, user_layout=self.layout) as tree:
            listing = await thread_uncancelled(tree.listing)
            self.judged = await thread_uncancelled(
                lambda: [unjudged_unit(tree, unit, listing, self.run, stepless) for unit in units(listing)]
            )
            for judged_unit in self.judged:
                async for record in matching_checkpoints(judged_unit, self.history, listing, self.spool, self.stores):
                    if await thread_uncancelled(judge_by_digests, tree, judged_unit, listing, record):
                        break
                else:
                    await thread_uncancelled(judge_by_structure, tree, judged_unit, listing)
                await judge_decay(tree, judged_unit, self.history, listing, self.stores)
                judged_unit.entries = judged_unit.entries or entries_to_move(judged_unit, listing)
                judged_unit.is_pointed_to = bool(judged_unit.absent) and await thread_uncancelled(
                    points_to_absent, tree, judged_unit, listing
                )
            if self.layout is None:
                await judge_series(self.judged, self.history, self.spool, self.stores)
        if busy := [judged_unit.unit.path for judged_unit in self.judged if judged_unit.reason == CHANGING_REASON]:
            raise ConfigError(
                f"{self.directory / busy[0]}: {CHANGING_REASON}; stop the program first. Nothing was moved"
            )
        if unread := [judged_unit for judged_unit in self.judged if judged_unit.unreadable]:
            raise StoreRefused(
                f"{self.directory / unread[0].unit.path}: {unread[0].reason}. Nothing was moved; make it readable for "
                "this account, or move it away"
            )

    async def _fetch_newest(self, inventory: Inventory, tried: set[CheckpointId]) -> list[RestoredUnit]:
        """Fetch the newest verified checkpoint, or the chosen one, if it is newer than every whole unit there.

        It is added to `tried`. If the newest was tried before, nothing is done. Raises `CheckpointNotFound` if it could
        not be verified, or was pruned meanwhile.
        """
        newest = await self._newest_to_fetch(inventory)
        if newest is None or newest in tried:
            return []
        tried.add(newest)
        keeps = any(self._keeps_pointer(judged_unit, newest) for judged_unit in self.judged)
        pointing: PointerPolicy = "never" if keeps else "always"
        step, attempt, kept = newest.step, newest.attempt, KeptPaths(keeps_newer=True)
        return [
            await restore_unit(
                self.stores, self.run, self.directory, step, attempt, self.progress, pointing=pointing, kept_paths=kept
            )
        ]

    async def _newest_to_fetch(self, inventory: Inventory) -> CheckpointId | None:
        rollback = await thread_uncancelled(read_rollback, self.directory, self.run)
        in_place = [unit for unit in self.judged if unit.holds_its_place and unit.run == self.run]
        candidates = (candidate.checkpoint for candidate in restore_candidates(inventory, self.run).candidates)
        newer = (
            checkpoint
            for checkpoint in candidates
            if all(is_checkpoint_newer(checkpoint, self.history, judged_unit) for judged_unit in in_place)
            and (rollback is None or rollback.permits(checkpoint, self.history.created_at(checkpoint)))
            and any(place and checkpoint in place.checkpoints for place in inventory.tiers.values())
        )
        newest = next(newer, None)
        replaced = (unit.step for unit in self.judged if unit.replaced or unit.verdict == "unknown")
        return None if newest is None or newest.step in replaced else newest

    async def _fetch_other_series(self) -> list[RestoredUnit]:
        """Fetch the newest checkpoint of each other series, if the directory was behind, and what it has is older.

        A program may have deleted a series on purpose. So one with a step that is gone comes back only with a
        checkpoint that is newer than all that the directory had, and nothing does after a person went back. What has no
        step comes back if its directory is there, because a program may delete it just before it writes it anew.
        """
        if await thread_uncancelled(read_rollback, self.directory, self.run) is not None:
            return []
        intact = [judged_unit for judged_unit in self.judged if judged_unit.holds_its_place]
        placed, stepless, created_at = [*self.fetched], stepless_run(self.run), self.history.created_at
        times = [*(created_at(unit.checkpoint) for unit in self.fetched), *(unit.modified_at for unit in intact)]

        def should_fetch(checkpoint: CheckpointId, series: str, paths: Set[str]) -> bool:
            rivals = [
                judged_unit
                for judged_unit in intact
                if series_of(judged_unit.unit.files or [judged_unit.unit.path]) == series
                or not paths.isdisjoint(judged_unit.unit.files)
            ]
            is_newest = all(created_at(checkpoint) > judged_unit.modified_at for judged_unit in intact)
            had_home = (
                checkpoint.run == stepless
                and (self.directory / os.path.commonpath([str(Path(path).parent) for path in paths])).is_dir()
            )
            is_behind = bool(self.fetched) or is_newest or had_home
            return is_behind and all(is_checkpoint_newer(checkpoint, self.history, rival) for rival in rivals)

        # Without a step first, because `run` may have older versions of these files.
        if any(checkpoint.run == stepless for checkpoint in self.history.created):
            placed += await restore_each_series(
                *(self.stores, stepless, self.directory, self.progress, should_fetch, placed),
                spares_newer=True,
                newest=max(times, default=BEFORE_ALL),
            )
        if self.fetched:
            placed += await restore_each_series(
                self.stores, self.run, self.directory, self.progress, should_fetch, placed, spares_newer=True
            )
        return placed[len(self.fetched) :]

    def _keeps_pointer(self, judged: JudgedUnit, newest: CheckpointId) -> bool:
        """Whether the program's pointers name a unit that cannot be checked, and is as new as the newest checkpoint."""
        if judged.verdict != "unknown" or is_checkpoint_newer(newest, self.history, judged):
            return False
        return self._is_pointed_to(judged)

    def _is_pointed_to(self, judged: JudgedUnit) -> bool:
        return is_pointed_to(self.directory, judged.unit.layout.program, judged.unit.path, judged.unit.files)

    def _point(self) -> list[str]:
        """Have each program's pointers name its newest whole unit, unless they name another one that was left in place.

        The program, or a person who went back, has chosen that one.
        """
        newest: dict[tuple[str, str], JudgedUnit] = {}
        pointed = set[tuple[str, str]]()
        for judged_unit in sorted(self.judged, key=lambda judged_unit: judged_unit.modified_at):
            key = judged_unit.unit.layout.program, dirname(judged_unit.unit.path)
            if judged_unit.is_intact:
                newest[key] = judged_unit
            if (judged_unit.is_intact or judged_unit.verdict == "unknown") and self._is_pointed_to(judged_unit):
                pointed.add(key)
        wrong = [(program, judged.unit) for (program, home), judged in newest.items() if (program, home) not in pointed]
        rewritten = (write_pointers(self.directory, program, unit.path, unit.files) for program, unit in wrong)
        return [path for paths in rewritten for path in paths]

    async def _restore_lost_pointers(self) -> list[str]:
        """Put back the pointers that are gone: in each directory as the program wrote them for its newest whole unit.

        A program that was killed before it wrote a pointer anew left its newest unit without one. Then they are those
        of the newest before it that had some, and name the newest.
        """
        created = self.history.created
        placed = [
            (judged_unit.modified_at, judged_unit.checkpoint, judged_unit.unit.path)
            for judged_unit in self.judged
            if judged_unit.is_intact and judged_unit.checkpoint is not None
        ]
        placed += [(self.history.created_at(unit.checkpoint), unit.checkpoint, unit.path) for unit in self.fetched]
        homes: dict[tuple[str, str], list[tuple[datetime, CheckpointId, str]]] = {}
        for unit in sorted(placed, key=lambda unit: unit[0], reverse=True):
            homes.setdefault((unit[1].run, dirname(unit[2])), []).append(unit)
        recorded: dict[CheckpointId, UnitFile | None] = {}  # read once, because directories share former checkpoints
        torn = [judged.unit for judged in self.judged if judged.verdict == "unknown" and judged.unit.missing_reason]
        pointer_paths = []
        for (modified_at, newest, path), *older in homes.values():
            before = [
                checkpoint for checkpoint, at in created.items() if checkpoint.run == newest.run and at < modified_at
            ]
            before.sort(key=lambda checkpoint: created[checkpoint], reverse=True)
            formers = dict.fromkeys([newest, *(checkpoint for _, checkpoint, _ in older), *before])
            covered = set[str]()
            for former in [*formers][:_POINTED]:
                if former not in recorded:
                    recorded[former] = await read_unit_file(self.stores, former)
                about = recorded[former]
                pointers = about.pointers if about and about.pointers else ()
                if about and former != newest:
                    pointers = tuple(
                        filter(None, (pointer_to_newest(pointer, about.path, path) for pointer in pointers))
                    )
                pointers = tuple(pointer for pointer in pointers if pointer.path not in covered)
                pointer_paths += await thread_uncancelled(restore_pointers, self.directory, pointers, torn)
                covered |= {pointer.path for pointer in pointers}
                if pointers and former != newest:
                    break
        return pointer_paths


async def _observed(spool: Spool | None, stores: Mapping[str, Store], run: str, effect: str) -> Inventory:
    inventory = await observe_places(spool, stores, run, chunks=False)
    if silent := [name for name, place in inventory.tiers.items() if place is None]:
        raise StoreUnavailable(f"not every tier could be asked: {', '.join(silent)}{effect}")
    return inventory
