"""Make a directory right before a launch, so that the program's own resume finds what is whole.

Invariant: only what is proven damaged, or proven unfinished by its own program, is moved, and into
`.tierd-quarantine/`; nothing is deleted. That an expected file is absent proves nothing. A unit that a place has
verified is compared with its digests, and each of its bytes is read once. A store that does not answer proves nothing,
and ends the work before anything is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias

from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    StoreRefused,
    StoreUnavailable,
)
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.planning.inventory import Inventory
from tierd.core.timeline.candidates import restore_candidates
from tierd.daemon.intake.chosen import read_chosen
from tierd.daemon.intake.comparing import differences
from tierd.daemon.intake.directory_lock import alone_in
from tierd.daemon.intake.in_place import (
    QUARANTINE,
    NotWatched,
    PutBack,
    is_named,
    point_to,
    put_back,
    quarantine_files,
)
from tierd.daemon.intake.manifests import first_manifest
from tierd.daemon.tiers.observe import observe_places
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.download import Progress
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.describe import describe
from tierd.watching.files import Tree
from tierd.watching.inspect import Changed, inspect_unit
from tierd.watching.layouts import units
from tierd.watching.listing import Listing
from tierd.watching.naming import History, history, made_at, step_of
from tierd.watching.unit import Unit
from tierd.watching.unit_file import UNIT_NAME

_LISTINGS = 3  # because a checkpoint may be pruned between a listing and the reading
_CHANGING = "a program still writes to it"
_NEVER = datetime(1, 1, 1, tzinfo=UTC)
Verdict: TypeAlias = Literal["verified", "sound", "damaged", "unfinished", "unknown", "missing"]


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


@dataclass(slots=True)
class _Judged:
    """A unit, and what is known of it so far."""

    unit: Unit
    step: int
    made: datetime
    checkpoint: CheckpointId | None = None  # it was taken as this one
    verdict: Verdict = "unknown"
    why: str = ""
    moved: tuple[str, ...] = ()
    replaced: bool = False
    unreadable: bool = False
    damaged: tuple[str, ...] = ()  # the files that are proven damaged; empty if the unit itself is

    @property
    def is_good(self) -> bool:
        return self.verdict in ("verified", "sound") or self.replaced

    def shown(self) -> PreparedUnit:
        return PreparedUnit(self.unit.path, self.step, self.verdict, self.why, self.moved, self.replaced)


async def prepare(
    directory: Path, run: str, spool: Spool | None, stores: Mapping[str, Store], progress: Progress
) -> Prepared:
    """Verify every unit below a directory, move damaged and unfinished ones away, and fetch replacements.

    Args:
        directory: the program's directory; it is made if it does not exist.
        run: the run as which it is watched.
        spool: the run's spool, if this node has one; its manifests are used, too.
        stores: the tiers.
        progress: updated while a checkpoint is fetched.

    Raises:
        ConfigError: a program still writes below the directory, this account may not write there, or another command
            held the directory for an hour.
        StoreUnavailable: a tier did not answer. Nothing was moved.
        StoreRefused: a file cannot be read, which proves nothing. Nothing was moved.
    """
    async with alone_in(directory):
        return await _prepare(directory, run, spool, stores, progress)


async def _prepare(
    directory: Path, run: str, spool: Spool | None, stores: Mapping[str, Store], progress: Progress
) -> Prepared:
    inventory = await _observed(spool, stores, run, "; nothing was moved")
    known = history(inventory, run)
    with Tree(directory) as tree:
        listing = await to_the_end(tree.listing)
        judged = await to_the_end(lambda: [_described(tree, unit, listing) for unit in units(listing)])
        for one in judged:
            manifest = await _recorded(one, known, listing, spool, stores)
            await to_the_end(_judge, tree, one, listing, manifest)
    if busy := [one.unit.path for one in judged if one.why == _CHANGING]:
        raise ConfigError(f"{directory / busy[0]}: {_CHANGING}; stop the program first. Nothing was moved")
    if unread := [one for one in judged if one.unreadable]:
        raise StoreRefused(
            f"{directory / unread[0].unit.path}: {unread[0].why}. Nothing was moved; make it readable for this "
            "account, or move it away"
        )
    for one in judged:
        if one.verdict in ("damaged", "unfinished"):
            await _replace(one, directory, listing, run, stores, progress)
    missing, tried = None, set[CheckpointId]()
    for _ in range(_LISTINGS):
        try:
            missing = await _newest(judged, directory, inventory, run, known, stores, progress, tried)
            break
        except CheckpointNotFound:  # proven corrupt; or pruned, because a newer one is there now
            inventory = await _observed(spool, stores, run, "")
            known = history(inventory, run)
    pointers = await to_the_end(_point, directory, judged)
    shown = [*(one.shown() for one in judged)]
    if missing is not None:
        shown.append(PreparedUnit(missing.path, missing.step, "missing", "", missing.moved, replaced=True))
        pointers += missing.pointers
    return Prepared(tuple(shown), tuple(dict.fromkeys(pointers)))


async def _observed(spool: Spool | None, stores: Mapping[str, Store], run: str, effect: str) -> Inventory:
    inventory = await observe_places(spool, stores, run, chunks=False)
    if silent := [name for name, place in inventory.tiers.items() if place is None]:
        raise StoreUnavailable(f"not every tier could be asked: {', '.join(silent)}{effect}")
    return inventory


def _described(tree: Tree, unit: Unit, listing: Listing) -> _Judged:
    described = describe(unit, lambda path: tree.opened(path, listing.entries[path]))
    made = made_at(max((listing.entries[path].mtime_ns for path in unit.files), default=0))
    return _Judged(unit, step_of(described, made), made)


async def _recorded(
    one: _Judged, known: History, listing: Listing, spool: Spool | None, stores: Mapping[str, Store]
) -> Manifest | None:
    """Return the manifest of the checkpoint that a unit should be byte for byte: it was taken as this one.

    A unit whose files are partly newer than the checkpoint of its step is no later save, because a save writes all
    files anew. Such a file was changed after the save.
    """
    same = [(made, checkpoint) for checkpoint, made in known.made.items() if checkpoint.step == one.step]
    exact = [checkpoint for made, checkpoint in same if made == one.made]
    oldest = made_at(min((listing.entries[path].mtime_ns for path in one.unit.files), default=0))
    mixed = sorted(((made, checkpoint) for made, checkpoint in same if oldest <= made < one.made), reverse=True)
    for checkpoint in (*sorted(exact, reverse=True), *(checkpoint for _, checkpoint in mixed)):
        manifest = await first_manifest(PartId(checkpoint, 0, 1), spool, stores)
        if manifest is not None and _is_of(one.unit, manifest):
            one.checkpoint = checkpoint
            return manifest
    return None


def _is_of(unit: Unit, manifest: Manifest) -> bool:
    """Whether a checkpoint was taken from a unit's place: another unit may have the same step and time."""
    paths = {file.path for file in manifest.files}
    return not paths.isdisjoint(unit.files) or any(path.startswith(f"{unit.path}/") for path in paths)


def _judge(tree: Tree, one: _Judged, listing: Listing, manifest: Manifest | None) -> None:
    """Decide whether a unit is whole: by its digests if it was taken, otherwise by its structure."""
    recorded = manifest is not None and any(file.path == UNIT_NAME for file in manifest.files)
    if manifest is not None and recorded:
        try:
            why = next(differences(tree, listing, manifest), "")
        except (Changed, OSError) as error:
            _judge_error(one, error)
            return
        one.verdict, one.why = ("damaged", why) if why else ("verified", "")
        return
    if one.unit.missing is not None:
        one.verdict, one.why = "unfinished" if one.unit.begun else "unknown", one.unit.missing
        return
    sizes = {path: listing.entries[path].size for path in one.unit.files}
    found = inspect_unit(one.unit, sizes, lambda path: tree.opened(path, listing.entries[path]))
    if found.status == "changing":
        one.why = _CHANGING
        return
    verdicts: dict[str, Verdict] = {"sound": "sound", "damaged": "damaged", "incomplete": "unfinished"}
    one.verdict = verdicts.get(found.status, "unknown")
    one.why = "; ".join(f"{finding.file}: {finding.reason}" for finding in found.findings[:2])
    one.unreadable = any(finding.status == "unreadable" for finding in found.findings)
    one.damaged = tuple(finding.file for finding in found.findings if finding.status in ("damaged", "incomplete"))


def _judge_error(one: _Judged, error: Exception) -> None:
    one.unreadable = not isinstance(error, Changed)
    one.why = f"it cannot be read: {error}" if one.unreadable else _CHANGING


async def _replace(
    one: _Judged, directory: Path, listing: Listing, run: str, stores: Mapping[str, Store], progress: Progress
) -> None:
    """Put the verified checkpoint of a unit's step in its place; without one, move the unit away."""
    names, moved = _entries(one, listing), tuple[str, ...]()
    with suppress(CheckpointNotFound, NotWatched):
        attempt = one.checkpoint.attempt if one.checkpoint else None
        put = await put_back(stores, run, directory, one.step, attempt, progress, point=False)
        moved = put.moved
        # What was there before lies in quarantine by its own name, or with a number behind it.
        was_there = any(path.startswith(f"{QUARANTINE}/{name}") for path in moved for name in names)
        one.replaced = one.checkpoint is not None or put.path == one.unit.path or was_there
    if not one.replaced:
        moved = (*moved, *await to_the_end(quarantine_files, directory, names))
    one.moved = moved


def _entries(one: _Judged, listing: Listing) -> list[str]:
    """Return the entries of the directory that are moved if a unit is not replaced.

    They are its directory, if all in it is the unit's, and those of its other files that are damaged themselves.
    """
    unit = one.unit
    own = {*unit.files, *unit.strange}
    below = {path for path, entry in listing.entries.items() if entry.kind != "directory" and _is_below(path, unit)}
    bad = set(one.damaged) or {path for path in own if not unit.is_directory or _is_below(path, unit)}
    if unit.is_directory and below <= own:
        inside = [unit.path] if unit.begun or any(_is_below(path, unit) for path in bad) else []
        return [*inside, *sorted(path for path in bad if not _is_below(path, unit))]
    return sorted(bad & own)


def _is_below(path: str, unit: Unit) -> bool:
    return path.startswith(f"{unit.path}/")


async def _newest(
    judged: list[_Judged],
    directory: Path,
    inventory: Inventory,
    run: str,
    known: History,
    stores: Mapping[str, Store],
    progress: Progress,
    tried: set[CheckpointId],
) -> PutBack | None:
    """Fetch the newest verified checkpoint, or the chosen one, if it is newer than every whole unit there.

    Args:
        tried: those that were tried before, to which this one is added. If the newest is one of them, nothing is done.

    Raises:
        CheckpointNotFound: it could not be verified, or was pruned meanwhile.
    """
    chosen = await to_the_end(read_chosen, directory, run)
    order = restore_candidates(inventory, run)
    there = [one for one in judged if one.is_good]
    newer = [one for one in order.candidates if all(_is_newer(one.checkpoint, known, other) for other in there)]
    if chosen is not None:
        newer = [one for one in newer if chosen.permits(one.checkpoint, known.made.get(one.checkpoint, _NEVER))]
    on_tiers = [
        one for one in newer if any(place and one.checkpoint in place.checkpoints for place in inventory.tiers.values())
    ]
    if not on_tiers:
        return None
    newest = on_tiers[0].checkpoint
    is_there = any((one.replaced or one.verdict == "unknown") and one.step == newest.step for one in judged)
    if is_there or newest in tried:
        return None
    tried.add(newest)
    point = not any(_keeps_pointer(one, newest, known, directory) for one in judged)
    return await put_back(stores, run, directory, newest.step, newest.attempt, progress, point=point)


def _keeps_pointer(one: _Judged, newest: CheckpointId, known: History, directory: Path) -> bool:
    """Whether the program's pointers name a unit that cannot be checked, and is as new as the newest checkpoint."""
    if one.verdict != "unknown" or _is_newer(newest, known, one):
        return False
    return is_named(directory, one.unit.layout.program, one.unit.path, one.unit.files)


def _is_newer(checkpoint: CheckpointId, known: History, one: _Judged) -> bool:
    """Whether a checkpoint is newer than a unit: by the run's order, or by time if no place has the unit."""
    if one.checkpoint is not None:
        return checkpoint > one.checkpoint
    return known.made.get(checkpoint, _NEVER) > one.made


def _point(directory: Path, judged: list[_Judged]) -> list[str]:
    """Have each program's pointers name its newest whole unit, unless they name another one that was left in place.

    The program, or a person who went back, has chosen that one.
    """
    newest: dict[tuple[str, str], _Judged] = {}
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
