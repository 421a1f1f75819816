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
from tierd.daemon.intake.chosen import read_chosen
from tierd.daemon.intake.decay import judge_decay
from tierd.daemon.intake.deleted_files import names_absent, to_replace
from tierd.daemon.intake.directory_lock import alone_in
from tierd.daemon.intake.each_series import put_back_each, recorded_unit
from tierd.daemon.intake.in_place import Pointing, PutBack, Spared, put_back
from tierd.daemon.intake.judging import (
    CHANGING,
    Judged,
    Verdict,
    described,
    is_newer,
    judge,
    judge_by_digests,
    records,
)
from tierd.daemon.intake.judging_series import judge_series
from tierd.daemon.intake.own import check_rules
from tierd.daemon.intake.pointing import is_named, point_to, write_lost
from tierd.daemon.intake.replacing import entries_of, replace
from tierd.daemon.tiers.observe import observe_places
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.download import Progress
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.files import Tree
from tierd.watching.layouts import units
from tierd.watching.naming import NEVER, History, history, series_of, stepless_run
from tierd.watching.own_layout import OwnLayout
from tierd.watching.pointers import moved_on
from tierd.watching.unit_file import UnitFile

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
class Prepared:
    """The answer of `tierd prepare`.

    Attributes:
        units: the checkpoints, by path.
        pointers: the program's pointers that were corrected.
    """

    units: tuple[PreparedUnit, ...]
    pointers: tuple[str, ...]


def _shown(one: Judged) -> PreparedUnit:
    return PreparedUnit(one.unit.path, one.step, one.verdict, one.why, one.moved, one.replaced)


def _fetched(put: PutBack) -> PreparedUnit:
    return PreparedUnit(put.path, put.step, "missing", "", put.moved, replaced=True)


async def prepare(
    directory: Path,
    run: str,
    spool: Spool | None,
    stores: Mapping[str, Store],
    progress: Progress,
    own: OwnLayout | None = None,
) -> Prepared:
    """Verify every unit below a directory, move damaged and unfinished ones away, and fetch replacements.

    Args:
        directory: the program's directory; it is made if it does not exist.
        run: the run as which it is watched.
        spool: the run's spool, if this node has one; its manifests are used, too.
        stores: the tiers.
        progress: updated while a checkpoint is fetched.
        own: a person's own rules about which paths are checkpoints, as of the watch; None: the usual ones.

    Raises:
        ConfigError: a program still writes below the directory, this account may not write there, another command held
            the directory for an hour, or the run was taken by other rules.
        StoreUnavailable: a tier did not answer. Nothing was moved.
        StoreRefused: a file cannot be read, which proves nothing. Nothing was moved.
    """
    async with alone_in(directory):
        return await _prepare(directory, run, spool, stores, progress, own)


async def _prepare(
    directory: Path,
    run: str,
    spool: Spool | None,
    stores: Mapping[str, Store],
    progress: Progress,
    own: OwnLayout | None,
) -> Prepared:
    unmoved, stepless = "; nothing was moved", stepless_run(run)
    inventory = await _observed(spool, stores, run, unmoved)
    beside = history(await _observed(spool, stores, stepless, unmoved), stepless)
    known = history(inventory, run).merged(beside)
    if own is None:
        await check_rules(run, known, spool, stores)
    judged = await _judged(directory, own, run, stepless if beside.made else run, known, spool, stores)
    for one in to_replace(judged):
        good = {path for other in judged if other is not one and other.is_good for path in other.unit.files}
        await replace(one, directory, stores, progress, good)
    pointers = await to_the_end(_point, directory, judged)  # before, because what is fetched has pointers of its own
    fetched = list[PutBack]()
    tried = set[CheckpointId]()
    for _ in range(_LISTINGS):
        try:
            fetched = await _newest(judged, directory, inventory, run, known, stores, progress, tried)
            break
        except CheckpointNotFound:  # proven corrupt; or pruned, because a newer one is there now
            inventory = await _observed(spool, stores, run, "")
            known = history(inventory, run).merged(beside)
    fetched += await _others(judged, directory, run, known, stores, progress, fetched)
    pointers += [path for put in fetched for path in put.pointers]
    pointers += await _lost_pointers(directory, judged, fetched, known, stores)
    return Prepared((*map(_shown, judged), *map(_fetched, fetched)), tuple(dict.fromkeys(pointers)))


async def _judged(
    directory: Path,
    own: OwnLayout | None,
    run: str,
    stepless: str,
    known: History,
    spool: Spool | None,
    stores: Mapping[str, Store],
) -> list[Judged]:
    """Judge every unit of a directory; raises if a program still writes to one, or one cannot be read."""
    with Tree(directory, own=own) as tree:
        listing = await to_the_end(tree.listing)
        judged = await to_the_end(lambda: [described(tree, unit, listing, run, stepless) for unit in units(listing)])
        for one in judged:
            async for record in records(one, known, listing, spool, stores):
                if await to_the_end(judge_by_digests, tree, one, listing, record):
                    break
            else:
                await to_the_end(judge, tree, one, listing)
            await judge_decay(tree, one, known, listing, stores)
            one.entries = one.entries or entries_of(one, listing)
            one.is_named = bool(one.absent) and await to_the_end(names_absent, tree, one, listing)
        if own is None:
            await judge_series(judged, known, spool, stores)
    if busy := [one.unit.path for one in judged if one.why == CHANGING]:
        raise ConfigError(f"{directory / busy[0]}: {CHANGING}; stop the program first. Nothing was moved")
    if unread := [one for one in judged if one.unreadable]:
        raise StoreRefused(
            f"{directory / unread[0].unit.path}: {unread[0].why}. Nothing was moved; make it readable for this "
            "account, or move it away"
        )
    return judged


async def _observed(spool: Spool | None, stores: Mapping[str, Store], run: str, effect: str) -> Inventory:
    inventory = await observe_places(spool, stores, run, chunks=False)
    if silent := [name for name, place in inventory.tiers.items() if place is None]:
        raise StoreUnavailable(f"not every tier could be asked: {', '.join(silent)}{effect}")
    return inventory


async def _newest(
    judged: list[Judged],
    directory: Path,
    inventory: Inventory,
    run: str,
    known: History,
    stores: Mapping[str, Store],
    progress: Progress,
    tried: set[CheckpointId],
) -> list[PutBack]:
    """Fetch the newest verified checkpoint, or the chosen one, if it is newer than every whole unit there.

    Args:
        tried: those that were tried before, to which this one is added. If the newest is one of them, nothing is done.

    Raises:
        CheckpointNotFound: it could not be verified, or was pruned meanwhile.
    """
    chosen = await to_the_end(read_chosen, directory, run)
    order = restore_candidates(inventory, run)
    there = [one for one in judged if one.holds_its_place and one.run == run]
    newer = [one for one in order.candidates if all(is_newer(one.checkpoint, known, other) for other in there)]
    if chosen is not None:
        newer = [one for one in newer if chosen.permits(one.checkpoint, known.made.get(one.checkpoint, NEVER))]
    on_tiers = [
        one for one in newer if any(place and one.checkpoint in place.checkpoints for place in inventory.tiers.values())
    ]
    if not on_tiers:
        return []
    newest = on_tiers[0].checkpoint
    is_there = any((one.replaced or one.verdict == "unknown") and one.step == newest.step for one in judged)
    if is_there or newest in tried:
        return []
    tried.add(newest)
    keeps = any(_keeps_pointer(one, newest, known, directory) for one in judged)
    pointing: Pointing = "never" if keeps else "always"
    step, attempt, spared = newest.step, newest.attempt, Spared(newer=True)
    return [await put_back(stores, run, directory, step, attempt, progress, pointing=pointing, spared=spared)]


async def _others(
    judged: list[Judged],
    directory: Path,
    run: str,
    known: History,
    stores: Mapping[str, Store],
    progress: Progress,
    fetched: list[PutBack],
) -> list[PutBack]:
    """Fetch the newest checkpoint of each other series, if the directory was behind, and what it has of it is older.

    A program may have deleted a series on purpose. So one with a step that is gone comes back only with a checkpoint
    that is newer than all that the directory had, and nothing does after a person went back. What has no step comes
    back if its directory is there, because a program may delete it just before it writes it anew.
    """
    if await to_the_end(read_chosen, directory, run) is not None:
        return []
    good = [one for one in judged if one.holds_its_place]
    placed, stepless = [*fetched], stepless_run(run)
    whole = [known.made.get(CheckpointId(put.run, put.attempt, put.step), NEVER) for put in fetched]
    newest = max((*whole, *(one.made for one in good)), default=NEVER)

    def is_due(checkpoint: CheckpointId, series: str, paths: Set[str]) -> bool:
        rivals = [
            one
            for one in good
            if series_of(one.unit.files or [one.unit.path]) == series or not paths.isdisjoint(one.unit.files)
        ]
        is_newest = all(known.made.get(checkpoint, NEVER) > one.made for one in good)
        was_there = checkpoint.run == stepless and _home(directory, paths).is_dir()
        return all(is_newer(checkpoint, known, one) for one in rivals) and (bool(fetched) or is_newest or was_there)

    if any(one.run == stepless for one in known.made):  # first, because `run` may have older versions of these files
        placed += await put_back_each(
            stores, stepless, directory, progress, is_due, placed, spares_newer=True, newest=newest
        )
    if fetched:
        placed += await put_back_each(stores, run, directory, progress, is_due, placed, spares_newer=True)
    return placed[len(fetched) :]


def _home(directory: Path, paths: Set[str]) -> Path:
    """Return the directory in which all of these files lie, at any depth."""
    return directory / os.path.commonpath([str(Path(path).parent) for path in paths])


def _keeps_pointer(one: Judged, newest: CheckpointId, known: History, directory: Path) -> bool:
    """Whether the program's pointers name a unit that cannot be checked, and is as new as the newest checkpoint."""
    if one.verdict != "unknown" or is_newer(newest, known, one):
        return False
    return is_named(directory, one.unit.layout.program, one.unit.path, one.unit.files)


def _point(directory: Path, judged: list[Judged]) -> list[str]:
    """Have each program's pointers name its newest whole unit, unless they name another one that was left in place.

    The program, or a person who went back, has chosen that one.
    """
    newest: dict[tuple[str, str], Judged] = {}
    chosen = set[tuple[str, str]]()
    for one in sorted(judged, key=lambda one: one.made):
        key = one.unit.layout.program, one.unit.path.rpartition("/")[0]
        if one.is_good:
            newest[key] = one
        if (one.is_good or one.verdict == "unknown") and is_named(directory, key[0], one.unit.path, one.unit.files):
            chosen.add(key)
    wrong = [(key[0], one) for key, one in newest.items() if key not in chosen]
    found = (point_to(directory, program, one.unit.path, one.unit.files) for program, one in wrong)
    return [path for paths in found for path in paths]


async def _lost_pointers(
    directory: Path,
    judged: list[Judged],
    fetched: Sequence[PutBack],
    known: History,
    stores: Mapping[str, Store],
) -> list[str]:
    """Put back the pointers that are gone: in each directory as the program wrote them for its newest whole unit.

    A program that was killed before it wrote a pointer anew left its newest unit without one. Then they are those of
    the newest before it that had some, and name the newest.
    """
    there = [(one.made, one.checkpoint, one.unit.path) for one in judged if one.is_good and one.checkpoint is not None]
    put = [(CheckpointId(one.run, one.attempt, one.step), one.path) for one in fetched]
    there += [(known.made.get(checkpoint, NEVER), checkpoint, path) for checkpoint, path in put]
    homes: dict[tuple[str, str], list[tuple[datetime, CheckpointId, str]]] = {}
    for unit in sorted(there, key=lambda unit: unit[0], reverse=True):
        homes.setdefault((unit[1].run, unit[2].rpartition("/")[0]), []).append(unit)
    recorded: dict[CheckpointId, UnitFile | None] = {}  # read once, because directories share former checkpoints
    torn = [one.unit for one in judged if one.verdict == "unknown" and one.unit.missing]
    written = []
    for (made, newest, path), *older in homes.values():
        before = [one for one, at in known.made.items() if one.run == newest.run and at < made]
        before.sort(key=lambda one: known.made[one], reverse=True)
        formers = dict.fromkeys([newest, *(checkpoint for _, checkpoint, _ in older), *before])
        covered = set[str]()
        for former in [*formers][:_POINTED]:
            if former not in recorded:
                recorded[former] = await recorded_unit(stores, former)
            about = recorded[former]
            named = about.pointers if about and about.pointers else ()
            if about and former != newest:
                named = tuple(filter(None, (moved_on(pointer, about.path, path) for pointer in named)))
            named = tuple(pointer for pointer in named if pointer.path not in covered)
            written += await to_the_end(write_lost, directory, named, torn)
            covered |= {pointer.path for pointer in named}
            if named and former != newest:
                break
    return written
