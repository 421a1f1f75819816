"""What lies beside a spool's parts: list and remove leftovers and pins. A path disappears by one rename to the trash.

Nothing in a path changes before that rename.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tierd.core.errors import ConfigError
from tierd.core.ids import CheckpointId, check_run
from tierd.core.manifest import MANIFEST_NAME
from tierd.spool.file_io import exists, make_private, names_in, private_opener, remove, sync_directory
from tierd.spool.leases import forget_dead_trainers as forget_trainers
from tierd.spool.local_parts import LocalParts
from tierd.spool.run_records import SAVED, forget_launch, forget_run, newest_launches
from tierd.spool.spool_access import check_owner
from tierd.spool.spool_directory import directories_in, empty_checkpoints_below
from tierd.spool.stage import try_lock_stage


def move_to_trash(path: Path, trash: Path) -> Path | None:
    """Make a path invisible for good by moving it to the trash; None if the path does not exist."""
    grave = trash / secrets.token_hex(8)
    try:
        path.rename(grave)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _take_apart(path, grave)
    sync_removal(path.parent)
    return grave


def _take_apart(path: Path, grave: Path) -> None:
    """Remove a directory that cannot be renamed, because overlayfs cannot rename a lower layer's directory.

    The manifest is moved to `grave` first, so that no reader takes the half-removed part for a whole one.
    """
    grave.mkdir(mode=0o700)
    with suppress(FileNotFoundError, NotADirectoryError):
        (path / MANIFEST_NAME).rename(grave / MANIFEST_NAME)
        sync_directory(path)
    remove(path)


def delete_trashed(grave: Path) -> None:
    """Delete a directory or file in the trash, as far as the file system permits."""
    with suppress(OSError):
        remove(grave, best_effort=True)


def sync_removal(directory: Path) -> None:
    """Make a removal from `directory` durable. If `directory` was removed too, sync its nearest existing parent."""
    while True:
        try:
            sync_directory(directory)
            return
        except FileNotFoundError:
            directory = directory.parent


_LOCKED = ("stage", "fetch")  # subdirectories of `.tierd/` where a directory's lock shows that its writer lives
# The prefix that `leftovers` gives an empty directory of a checkpoint or run; no directory has this name.
_EMPTY = "empty"
_LONGEST_PIN = 8192  # bytes of a pin that are read
_PINS = "pins"  # the directory of pins inside a run's directory
_VACANT_LINKS = 3  # links to a directory that holds one directory at most; some file systems count none


class Leftovers(LocalParts):
    """The part of `Spool` that removes leftovers and pins checkpoints. Arguments are as for `LocalParts`."""

    def leftovers(self, childless: Iterable[CheckpointId] | None = None) -> list[str]:
        """List leftovers by name, for `discard`.

        Leftovers are stages and fetches whose writer has died, half-finished removals, and empty directories of runs
        and checkpoints for which no writer is committing a part. `childless` are the checkpoints whose directories are
        empty, if the caller knows them.
        """
        names = [f"trash/{path.name}" for path in self._room("trash").iterdir()]
        if childless is None:
            childless = [
                checkpoint for pair in empty_checkpoints_below(self.root) if (checkpoint := CheckpointId.parse(*pair))
            ]
        empty = [f"{bare.run}/{bare.name}" for bare in childless]
        empty += self._list_vacant_runs()
        alive: list[str] = []  # their commits may have made an empty directory and wait for a slow disk to sync it
        for room in _LOCKED:
            for path in self._room(room).iterdir():
                fd = try_lock_stage(path)
                if fd is not None:
                    os.close(fd)
                    names.append(f"{room}/{path.name}")
                else:
                    alive.append(path.name)
        names += [
            f"{_EMPTY}/{name}"
            for name in empty
            if not any(stage_name.startswith(f"{name.replace('/', '.')}.") for stage_name in alive)
        ]
        return sorted(names)

    def _list_vacant_runs(self) -> list[str]:
        """List the runs whose directories are empty, or hold only an empty directory for pins."""
        vacant = []
        for run in directories_in(self.root):
            try:
                check_run(run)
                if (self.root / run).stat().st_nlink > _VACANT_LINKS:
                    continue
                inside = list(itertools.islice((self.root / run).iterdir(), 2))
                if not inside or ([path.name for path in inside] == [_PINS] and not any(inside[0].iterdir())):
                    vacant.append(run)
            except (ConfigError, OSError):  # not a run's name, or removed meanwhile, or a plain file
                continue
        return vacant

    def discard(self, name: str, before_ns: int | None = None) -> None:
        """Remove one named object from the spool.

        Args:
            name: a name from `leftovers`, a quarantined part (``quarantine/<run>/<checkpoint>/<part>``), a pin
                (``pins/<run>/<checkpoint>``), or the record that a launch was saved here (``saved/<run>/<attempt>``).
            before_ns: when a removal of the whole run began, in nanoseconds since 1970. Its own deletions change the
                time of the run's empty directory, and later records belong to a launch that began meanwhile.
        """
        path = self.control / name
        room, _, subpath = name.partition("/")
        if room == _EMPTY:  # safe, because a writer whose directory is removed before its rename makes it again
            home = self.root / subpath
            left_ns = home.stat().st_mtime_ns if home.is_dir() else 0
            for directory in (home / _PINS, home):
                try:
                    directory.rmdir()
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                        raise
            if "/" in subpath:
                self._drop_if_empty(home)
            # The records of a saved launch are kept, because it may have work left.
            elif not exists(home) and subpath not in newest_launches(self.control, [subpath]):
                forget_run(self.control, subpath, left_ns if before_ns is None else before_ns)
                forget_trainers(self.control, subpath)
            return
        if room == SAVED:
            forget_launch(self.control, *subpath.split("/"))
            return
        if room == _PINS:
            run, _, checkpoint = subpath.partition("/")
            if (pin := CheckpointId.parse(run, checkpoint)) is not None:
                self.pin(pin, pinned=False)
            return
        if room not in _LOCKED:
            self._trash(path)
            return
        fd = try_lock_stage(path)  # held during the removal, so that no writer takes a stage that is being removed
        if fd is not None:
            try:
                self._trash(path)
            finally:
                os.close(fd)

    def _trash(self, path: Path) -> None:
        grave = self._bury(path)
        if grave is not None:
            delete_trashed(grave)

    def _bury(self, path: Path) -> Path | None:
        return move_to_trash(path, self._room("trash"))

    def _drop_if_empty(self, checkpoint: Path) -> None:
        for directory in (checkpoint, checkpoint.parent / _PINS, checkpoint.parent):
            try:
                # Succeeds only after the directory's last part, or the run's last checkpoint, was removed.
                directory.rmdir()
            except OSError:
                pass

    def _pin_path(self, checkpoint: CheckpointId) -> Path:
        return self.root / checkpoint.run / _PINS / checkpoint.name

    def pins(self) -> set[CheckpointId]:
        """List the pinned checkpoints. Raises OSError, because a checkpoint whose pin is not seen is pruned."""
        pairs = ((run, name) for run in self.runs() for name in names_in(self.root / run / _PINS))
        return {pin for names in pairs if (pin := CheckpointId.parse(*names))}

    def pin_text(self, checkpoint: CheckpointId) -> bytes:
        """Return the text of a pin; empty if it has none, or there is no pin."""
        try:
            with open(self._pin_path(checkpoint), "rb", opener=private_opener) as file:
                return file.read(_LONGEST_PIN)
        except OSError:
            return b""

    def pin(self, checkpoint: CheckpointId, *, pinned: bool, text: bytes = b"") -> None:
        """Pin a checkpoint, so that retention keeps it, or remove the pin. `text` replaces an earlier one, if given."""
        check_owner(self.root)
        self.check_run_directory(checkpoint.run)
        path = self._pin_path(checkpoint)
        while pinned:
            make_private(path.parent)
            with suppress(FileNotFoundError):  # `discard` removed the empty directory meanwhile
                with open(path, "wb" if text else "ab", opener=private_opener) as file:
                    file.write(text)
                break
        else:
            path.unlink(missing_ok=True)
        if path.parent.is_dir():
            sync_directory(path.parent)
