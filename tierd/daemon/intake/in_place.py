"""Put a checkpoint of a watched run back into its program's directory, where the program looks for it.

Invariant: what is put in place was verified, and one rename for each file or directory makes it visible. If the kernel
can exchange two names, nothing is ever missing in between. What was there before is moved to `.tierd-quarantine/`, and
is never deleted. A pointer names a checkpoint only after that is in place.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierd.core.errors import ConfigError, ManifestError
from tierd.core.manifest import Manifest
from tierd.core.save_policy import Goal
from tierd.daemon.intake.directory_lock import writing
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.export import Exported, export
from tierd.formats.byte_source import PIECE
from tierd.spool.file_io import open_own, remove, sync_directory
from tierd.stores.base import Store
from tierd.watching.listing import MAX_MARKER, joined
from tierd.watching.pointers import Pointer, pointers
from tierd.watching.programs import SHARDED
from tierd.watching.step_in_name import without_ending
from tierd.watching.unit import WITHOUT_STEP
from tierd.watching.unit_file import MAX_SIZE, UNIT_NAME, UnitFile, decode_unit

RESTORED = ".tierd-restored"  # where a restore assembles a checkpoint, in the program's directory
QUARANTINE = ".tierd-quarantine"
_LAST = (".index", ".index.json")  # a file that names others is put in place after them
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


class NotWatched(ConfigError):
    """No `tierd watch` took the checkpoint, so it has no place in a directory."""


@dataclass(frozen=True, slots=True)
class PutBack:
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
    beside: tuple[PutBack, ...] = ()


async def put_back(
    stores: Mapping[str, Store],
    run: str,
    directory: Path,
    step: int | None,
    attempt: str | None,
    progress: Progress,
    best: Goal | None = None,
    *,
    point: bool = True,
    but: Collection[str] = (),
) -> PutBack:
    """Restore the newest verified checkpoint of a watched run, or the best one, into its program's directory.

    Args:
        stores: the tiers.
        run: the run.
        directory: the program's directory. The caller holds it by `alone_in`.
        step: this step only; None for any.
        attempt: this attempt only; None for any.
        progress: updated during the restore.
        best: restore the best checkpoint by this goal, not the newest one.
        point: also write the pointers that the program follows.
        but: pointers, as paths in the directory, that are left as they are.

    Raises:
        NotWatched: nothing is fetched.
        ConfigError: the directory cannot be used.
        CheckpointNotFound, StoreUnavailable, SpoolFull: as `export` raises them.
        ManifestError: the description in the checkpoint is unsafe.
    """
    target = directory / RESTORED
    with writing(directory):
        await to_the_end(_clear, target)
        exported = await export(stores, run, target, step, attempt, progress, best=best, accept=_check_watched)
        return await to_the_end(place, directory, target, exported, point=point, but=but)


def _check_watched(manifest: Manifest) -> None:
    if not any(file.path == UNIT_NAME for file in manifest.files):
        one = manifest.part.checkpoint
        raise NotWatched(
            f"run {one.run!r} step {one.step}: no `tierd watch` took it, so it has no place in a directory; "
            f"`tierd restore URL --run {one.run} --to EMPTY` gives its files"
        )


def place(directory: Path, target: Path, exported: Exported, *, point: bool, but: Collection[str] = ()) -> PutBack:
    """Put a verified checkpoint that lies in `target` in place, and remove `target`; raises as `put_back`."""
    home = Path(exported.directories[0])
    about = _described(home, exported)
    files = _files(home, about)
    moved = [was for name in _names(about, files) if (was := _swap_in(home / name, directory, name)) is not None]
    named = [one for one in _pointers(about, files) if one.path not in but] if point else []
    for one in named:
        _write_pointer(directory, one)
    remove(target)
    return PutBack(
        run=exported.run,
        step=exported.step,
        attempt=exported.attempt,
        path=about.path,
        program=about.program,
        size=exported.size,
        tiers=exported.tiers,
        skipped=exported.skipped,
        moved=tuple(moved),
        pointers=tuple(one.path for one in named),
        files=tuple(files),
    )


def is_named(directory: Path, program: str, path: str, files: Sequence[str]) -> bool:
    """Whether the program has pointers, and all of them name this unit."""
    found = [*pointers(program, path, files)]
    return bool(found) and all(_named(directory / one.path, one) == _first_line(one.text) for one in found)


def _pointers(about: UnitFile, files: Sequence[str]) -> list[Pointer]:
    """Return the pointers to a unit; as they were when it was taken, if they named it then."""
    found = {pointer.path: pointer for pointer in pointers(about.program, about.path, files)}
    return [*(found | {pointer.path: pointer for pointer in about.pointers or ()}).values()]


def point_to(directory: Path, program: str, path: str, files: Sequence[str]) -> list[str]:
    """Write the pointers to a unit, each by one rename, if they do not name it yet; return their paths."""
    return [one.path for one in pointers(program, path, files) if _write_pointer(directory, one)]


def write_lost(directory: Path, recorded: Iterable[Pointer]) -> list[str]:
    """Write the recorded pointers where nothing lies, or what names nothing that is there; return their paths."""
    lost = [pointer for pointer in recorded if _is_lost(directory, pointer)]
    return [pointer.path for pointer in lost if _write_pointer(directory, pointer)]


def _is_lost(directory: Path, pointer: Pointer) -> bool:
    path = directory / pointer.path
    if pointer.link or not path.exists():
        return not path.exists()
    text = _named(path, pointer)
    # A text of the same form whose names are gone. Whether a number names something, nobody can tell.
    same_form = text is not None and re.sub(r"\d+", "#", text) == re.sub(r"\d+", "#", _first_line(pointer.text).strip())
    return same_form and _names_any(path.parent, pointer.text) and not _names_any(path.parent, text or "")


def _names_any(home: Path, text: str) -> bool:
    """Whether a text has the name of a file or directory beside it, also without its ending."""
    names = {name for path in home.iterdir() for name in (path.name, without_ending(path.name))}
    return any(token.rstrip("/").rpartition("/")[2] in names for token in re.split(r"[\s\"',:=\[\]{}]+", text) if token)


def quarantine_files(directory: Path, paths: Iterable[str]) -> list[str]:
    """Move files or directories to `.tierd-quarantine/`; return their new paths in the directory."""
    moved = []
    for path in paths:
        with writing(directory), suppress(FileNotFoundError):
            target = _free_name(directory, path)
            (directory / path).rename(target)
            sync_directory((directory / path).parent)
            sync_directory(target.parent)
            moved.append(str(target.relative_to(directory)))
    return moved


def _clear(target: Path) -> None:
    if target.is_symlink() or target.exists():
        remove(target)  # what an interrupted command had not put in place yet


def _described(home: Path, exported: Exported) -> UnitFile:
    where = f"run {exported.run!r} step {exported.step}"
    data = (home / UNIT_NAME).read_bytes()
    if len(exported.directories) > 1 or len(data) > MAX_SIZE:
        raise ManifestError(f"{where}: {UNIT_NAME} is not what `tierd watch` writes")
    return decode_unit(data, f"{where}: {UNIT_NAME}")


def _files(home: Path, about: UnitFile) -> list[str]:
    """Return the paths of a unit's files, with their times set; all lie in the directory in which the unit lies."""
    own = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and path.parent != home}
    own |= {path.name for path in home.iterdir() if path.is_file()} - {UNIT_NAME, "manifest.json"}
    entries = _entries(about, own)
    # Files beside each other, or the directory that is named, or all that has no step.
    is_unit = entries == own or about.path in entries or about.path.rpartition("/")[2] == WITHOUT_STEP
    if own != set(about.modified_ns) or not is_unit or not all(path.startswith(_top(about)) for path in own):
        raise ManifestError(f"{home / UNIT_NAME}: it describes other files than its checkpoint has")
    for path in own:
        modified_ns = about.modified_ns[path]
        os.utime(home / path, ns=(modified_ns, modified_ns))  # so that a watch knows it again
    return sorted(own)


def _names(about: UnitFile, files: Sequence[str]) -> list[str]:
    """Return what is renamed: the unit's directories and files, in the order in which a program writes them."""
    # A model's directory may hold others' checkpoints, too.
    names = files if about.program == SHARDED.program else _entries(about, files)
    return sorted(names, key=lambda path: (path.endswith(_LAST), path))


def _entries(about: UnitFile, files: Iterable[str]) -> set[str]:
    """Return the entries of the unit's directory that hold its files."""
    top = _top(about)
    return {top + path[len(top) :].partition("/")[0] for path in files}


def _top(about: UnitFile) -> str:
    return joined(about.path.rpartition("/")[0], "")


def _swap_in(fresh: Path, directory: Path, name: str) -> str | None:
    """Put `fresh` in place; return where what was there before lies now, if anything else was."""
    final = _way(directory, name)
    if _is_same(fresh, final):
        return None
    if not final.is_symlink() and not final.exists():
        fresh.rename(final)
        sync_directory(final.parent)
        return None
    target = _free_name(directory, name)
    # In quarantine before the exchange, because the next command deletes what an interrupted one left in `RESTORED`.
    fresh.rename(target)
    try:
        exchanged = _exchange(target, final)
    except OSError:
        target.rename(fresh)  # or each try would leave a whole checkpoint in quarantine
        raise
    if not exchanged:
        target.rename(fresh)
        final.rename(target)
        fresh.rename(final)
    sync_directory(final.parent)
    sync_directory(target.parent)
    return str(target.relative_to(directory))


def _is_same(fresh: Path, final: Path) -> bool:
    """Whether a plain file with the same bytes lies there."""
    if not all(path.is_file() and not path.is_symlink() for path in (fresh, final)):
        return False
    with fresh.open("rb") as one, final.open("rb") as other:
        if os.fstat(one.fileno()).st_size != os.fstat(other.fileno()).st_size:
            return False
        return all(piece == other.read(PIECE) for piece in iter(lambda: one.read(PIECE), b""))


def _way(directory: Path, name: str) -> Path:
    """Make the directories above a path, and return the path. A link among them would lead elsewhere."""
    here = directory
    *above, last = name.split("/")
    for piece in above:
        here /= piece
        if here.is_symlink():
            raise ConfigError(f"{here}: a symbolic link; name the directory to which it leads")
        try:
            here.mkdir(exist_ok=True)
        except FileExistsError:
            raise ConfigError(
                f"{here}: not a directory; tierd needs one of that name there: move that file away"
            ) from None
    return here / last


def _free_name(directory: Path, name: str) -> Path:
    target = _way(directory, f"{QUARANTINE}/{name}")
    number = 0
    while target.is_symlink() or target.exists():
        number += 1
        target = target.with_name(f"{Path(name).name}.{number}")
    return target


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False if the file system or the C library cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    at = ctypes.c_int(_AT_FDCWD)
    if not rename(at, os.fsencode(one), at, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _write_pointer(directory: Path, pointer: Pointer) -> bool:
    path = _way(directory, pointer.path)
    if _named(path, pointer) == _first_line(pointer.text):
        return False
    if path.is_dir() and not path.is_symlink():
        return False  # no pointer any more
    write_whole(path, pointer.text, link=pointer.link)
    return True


def _named(path: Path, pointer: Pointer) -> str | None:
    """Return what a pointer names now; None if it cannot be read. Raises `ConfigError` for a FIFO or a directory."""
    try:
        if pointer.link:
            return str(path.readlink())
        with os.fdopen(open_own(path, follow=True), encoding="utf-8") as file:
            return _first_line(file.read(MAX_MARKER)).strip()
    except (OSError, ValueError):
        return None


def _first_line(text: str) -> str:
    return text.split("\n")[0]


def write_whole(path: Path, text: str, *, link: bool = False) -> None:
    """Write a small file, or a link to `text`, durably and by one rename."""
    fresh = path.with_name(f".tierd-{secrets.token_hex(8)}")
    try:
        if link:
            fresh.symlink_to(text)
        else:
            with fresh.open("x") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
