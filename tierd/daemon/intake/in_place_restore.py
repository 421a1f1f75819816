"""Put a checkpoint of a watched run back into its program's directory, where the program looks for it.

Invariant: what is put in place was verified, and one rename for each file or directory makes it visible. If the kernel
can exchange two names, nothing is ever missing in between. What was there before is moved to `.tierd-quarantine/`, and
is never deleted. A pointer names a checkpoint only after that is in place.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tierd.core.errors import ConfigError, ManifestError
from tierd.core.ids import CheckpointId
from tierd.core.manifest import UNIT_NAME, Manifest
from tierd.core.save_rules import MetricGoal
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.intake.directory_changes import (
    explained_refusals,
    is_same,
    pointers_of_unit,
    restore_pointers,
    swap_in,
    write_pointer,
)
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.restore_to_directory import RestoredDirectory, restore_to_directory
from tierd.spool.file_io import remove
from tierd.stores.base import Store
from tierd.watching.step_in_name import directory_step
from tierd.watching.unit import SHARDED_LAYOUT, WITHOUT_STEP, join_path
from tierd.watching.unit_file import MAX_UNIT_FILE_SIZE, UnitFile, decode_unit

RESTORE_STAGING = ".tierd-restored"  # where a restore assembles a checkpoint, in the program's directory
PointerPolicy: TypeAlias = Literal["always", "if lost", "never"]
_LAST = (".index", ".index.json")  # a file that names others is put in place after them


class NotWatched(ConfigError):
    """No `tierd watch` took the checkpoint, so it has no place in a directory."""


class PlaceTaken(ConfigError):
    """Another checkpoint that is whole lies in the place of this one."""


@dataclass(frozen=True, slots=True)
class KeptPaths:
    """What a checkpoint that is put in place leaves as it is, as paths in the directory."""

    intact_files: Set[str] = frozenset()  # a checkpoint that has one of these is not put in place
    keeps_newer: bool = False  # whether files that were written after all of the checkpoint's are left
    all_but: Collection[str] | None = None  # all but these files are left; None: none is left for this reason


KEEPS_NOTHING = KeptPaths()


@dataclass(frozen=True, slots=True)
class RestoredUnit:
    """A checkpoint that was put back in place.

    Attributes:
        path: its path in the directory.
        program: the program whose layout it has.
        size: its size, in bytes.
        tiers: the tiers from which its bytes came.
        skipped: newer checkpoints that could not be used, and why.
        moved: what was in its place before, as paths in the directory, in `.tierd-quarantine/`.
        pointers: the files that name it now.
        files: its files, as paths in the directory.
        beside: the checkpoints of other series that were put back with it.
        was_right: whether each of its files lay in place with the right bytes already, so that none was changed.
    """

    run: str
    step: int
    attempt: str
    path: str
    program: str
    size: int
    tiers: tuple[str, ...]
    skipped: tuple[str, ...]
    moved: tuple[str, ...]
    pointers: tuple[str, ...]
    files: tuple[str, ...]
    beside: tuple[RestoredUnit, ...] = ()
    was_right: bool = False

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.run, self.attempt, self.step)


async def restore_unit(
    stores: Mapping[str, Store],
    run: str,
    directory: Path,
    step: int | None,
    attempt: str | None,
    progress: Progress,
    best: MetricGoal | None = None,
    *,
    pointing: PointerPolicy = "always",
    kept_paths: KeptPaths = KEEPS_NOTHING,
) -> RestoredUnit:
    """Restore the newest verified checkpoint of a watched run, or the best one, into its program's directory.

    Args:
        directory: the program's directory. The caller holds it by `locked_directory`.
        best: restore the best checkpoint by this goal, not the newest one.
        pointing: when the pointers that the program follows are written, too.
        kept_paths: what is left as it is.

    Raises:
        PlaceTaken: the checkpoint has one of the files that are spared. Nothing was changed.
        NotWatched: nothing is fetched.
        ConfigError: the directory cannot be used.
        CheckpointNotFound, StoreUnavailable, SpoolFull: as `restore_to_directory` raises them.
        ManifestError: the description in the checkpoint is unsafe.
    """
    target = directory / RESTORE_STAGING
    with explained_refusals(directory):
        await thread_uncancelled(_clear, target)
        exported = await restore_to_directory(
            stores, run, target, step, attempt, progress, best=best, accept=_check_watched
        )
        return await thread_uncancelled(
            move_into_place, directory, target, exported, pointing=pointing, kept_paths=kept_paths
        )


def _check_watched(manifest: Manifest) -> None:
    if not any(file.path == UNIT_NAME for file in manifest.files):
        checkpoint = manifest.part.checkpoint
        raise NotWatched(
            f"run {checkpoint.run!r} step {checkpoint.step}: no `tierd watch` took it, so it has no place in a "
            f"directory; `tierd restore URL --run {checkpoint.run} --to EMPTY` gives its files"
        )


def move_into_place(
    directory: Path,
    target: Path,
    exported: RestoredDirectory,
    *,
    pointing: PointerPolicy = "always",
    kept_paths: KeptPaths = KEEPS_NOTHING,
) -> RestoredUnit:
    """Put a verified checkpoint that lies in `target` in place, and remove `target`; raises as `restore_unit`."""
    home = Path(exported.directories[0])
    about = _read_description(home, exported)
    files = _files(home, about)
    if occupied := sorted(kept_paths.intact_files & {*files}):
        remove(target)
        raise PlaceTaken(f"{directory / occupied[0]}: another checkpoint that is whole lies there")
    names = _names(directory, about, files) if kept_paths.all_but is None else sorted({*kept_paths.all_but} & {*files})
    if kept_paths.keeps_newer:
        names = [name for name in names if not _is_newer(directory / name, about)]
    was_right = bool(names) and all(is_same(home / name, directory / name) for name in names)
    replaced_paths = [] if was_right else [swap_in(home / name, directory, name) for name in names]
    pointer_paths = _point(directory, about, files, pointing)
    remove(target)
    return RestoredUnit(
        run=exported.run,
        step=exported.step,
        attempt=exported.attempt,
        path=about.path,
        program=about.program,
        size=exported.size,
        tiers=exported.tiers,
        skipped=exported.skipped,
        moved=tuple(path for path in replaced_paths if path is not None),
        pointers=tuple(pointer_paths),
        files=tuple(files),
        was_right=was_right,
    )


def _point(directory: Path, about: UnitFile, files: Sequence[str], pointing: PointerPolicy) -> list[str]:
    recorded = pointers_of_unit(about, files)
    if pointing == "if lost":
        return restore_pointers(directory, recorded)
    pointers = recorded if pointing == "always" else []
    for pointer in pointers:
        write_pointer(directory, pointer)
    return [pointer.path for pointer in pointers]


def _clear(target: Path) -> None:
    if target.is_symlink() or target.exists():
        remove(target)  # what an interrupted command had not put in place yet


def _read_description(home: Path, exported: RestoredDirectory) -> UnitFile:
    where = f"run {exported.run!r} step {exported.step}"
    data = (home / UNIT_NAME).read_bytes()
    if len(exported.directories) > 1 or len(data) > MAX_UNIT_FILE_SIZE:
        raise ManifestError(f"{where}: {UNIT_NAME} is not what `tierd watch` writes")
    return decode_unit(data, f"{where}: {UNIT_NAME}")


def _files(home: Path, about: UnitFile) -> list[str]:
    """Return the paths of a unit's files, with their times set; all lie in the directory in which the unit lies."""
    own_paths = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and path.parent != home}
    own_paths |= {path.name for path in home.iterdir() if path.is_file()} - {UNIT_NAME, "manifest.json"}
    entries = _entries(about, own_paths)
    # Files beside each other, or the directory that is named, or all that has no step.
    is_unit = entries == own_paths or about.path in entries or about.path.rpartition("/")[2] == WITHOUT_STEP
    is_beside = all(path.startswith(_top(about)) for path in own_paths)
    if own_paths != set(about.modified_ns) or not is_unit or not is_beside:
        raise ManifestError(f"{home / UNIT_NAME}: it describes other files than its checkpoint has")
    for path in own_paths:
        modified_ns = about.modified_ns[path]
        os.utime(home / path, ns=(modified_ns, modified_ns))  # so that a watch knows it again
    return sorted(own_paths)


def _names(directory: Path, about: UnitFile, files: Sequence[str]) -> list[str]:
    """Return what is renamed: the unit's directories and files, in the order in which a program writes them."""
    # A model's directory may hold others' checkpoints, too.
    entries = files if about.program == SHARDED_LAYOUT.program else _entries(about, files)
    names = [name for entry in entries for name in _without_others(directory, entry, files)]
    return sorted(names, key=lambda path: (path.endswith(_LAST), path))


def _without_others(directory: Path, name: str, files: Sequence[str]) -> Iterator[str]:
    """Yield an entry, or, if it is a directory without a step that has others' files now, the entries in it."""
    entry_path = directory / name
    own_paths = {path for path in files if path.startswith(f"{name}/")}
    inside = (path for path in entry_path.rglob("*") if own_paths and not entry_path.is_symlink() and not path.is_dir())
    has_foreign_files = any(str(path.relative_to(directory)) not in own_paths for path in inside)
    if has_foreign_files and directory_step(entry_path.name) is None:
        for entry in {f"{name}/{path[len(name) + 1 :].partition('/')[0]}" for path in own_paths}:
            yield from _without_others(directory, entry, files)
    else:
        yield name


def _is_newer(path: Path, about: UnitFile) -> bool:
    """Whether a file was written after all of a unit's, as `ckpt.pt.bak`, which was `ckpt.pt` until now."""
    is_file = path.is_file() and not path.is_symlink()
    return is_file and path.stat().st_mtime_ns > max(about.modified_ns.values())


def _entries(about: UnitFile, files: Iterable[str]) -> set[str]:
    """Return the entries of the unit's directory that hold its files."""
    top = _top(about)
    return {top + path[len(top) :].partition("/")[0] for path in files}


def _top(about: UnitFile) -> str:
    return join_path(about.path.rpartition("/")[0], "")
