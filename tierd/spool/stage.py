"""Fill a part's directory, and make it visible by one rename.

Invariant: a renamed directory is durable to the last byte, manifest included. A directory that is not renamed is locked
by its living writer, or is a leftover. So no process needs a clock to recognize a leftover.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tierd.core.errors import CorruptChunk, ManifestError, StepRefused
from tierd.core.ids import PartId
from tierd.core.manifest import MANIFEST_NAME, File, Manifest, check_path
from tierd.core.manifest_codec import encode
from tierd.spool.file_io import open_directory, sync_directory, write_file
from tierd.spool.foreign_files import describe_file

_POLL_S = 0.02  # between two looks at a lock
_KEEP = "a library that saves into a stage must keep the directory, and write its files into it"


class Stage:
    """A directory in `room` that is being filled. Its commit renames it to `target`, and calls `committed`.

    It is locked while its writer lives, so that a dead writer's stage differs from a slow writer's stage. `room` is on
    the file system of `target`.
    """

    def __init__(self, room: Path, part: PartId, target: Path, committed: Callable[[], None] = lambda: None) -> None:
        self.part = part
        self._target, self._committed = target, committed
        checkpoint = part.checkpoint
        name = f"{checkpoint.run}.{checkpoint.name}.{part.name}.{secrets.token_hex(4)}"
        self.path = room / name
        self._fd = make_locked_directory(self.path)

    def commit(self, manifest: Manifest) -> None:
        """Make the staged files visible as `part`. The caller has made everything except the manifest durable.

        Raises:
            ManifestError: the stage's directory was replaced or removed.
            StepRefused: this attempt has committed the part before; the stage is left for `abandon`.
            OSError: the part is not durable; the part is invisible again if the file system permits that rename.
        """
        self.check()
        write_file(self.path / MANIFEST_NAME, MANIFEST_NAME, encode(manifest))
        for directory, _, _ in os.walk(self.path, topdown=False, onerror=_raise):
            sync_directory(Path(directory))
        # Both directories are opened before the rename, because the part is visible afterwards, and its trainer may
        # count on it: a lack of descriptors or memory must not hide it again.
        room = open_directory(self.path.parent)
        try:
            shelf = self._show()
            try:
                self._settle(shelf, room)
            finally:
                os.close(shelf)
        finally:
            os.close(room)
        os.close(self._fd)
        self._fd = -1
        self._committed()

    def check(self) -> None:
        """Raise `ManifestError` if the path of the stage leads to anything but the directory that was made for it."""
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            raise ManifestError(f"{self.path}: the stage's directory was removed; {_KEEP}") from None
        if not os.path.samestat(status, os.fstat(self._fd)):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "another directory or file"
            raise ManifestError(f"{self.path}: {kind} replaced the stage's directory; {_KEEP}")

    def _show(self) -> int:
        """Rename the stage to its target, and return a descriptor of the directory that holds it then."""
        target = self._target
        while True:
            try:
                for parent in (target.parent.parent, target.parent):
                    # No check that it is a directory, because a removal may delete it at any time.
                    with suppress(FileExistsError):
                        parent.mkdir(mode=0o700)
                    sync_directory(parent.parent)  # also if it existed: another rank may not have synced it
                # A link in its place is refused, because it would lead the part out of the spool.
                shelf = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    # By the descriptor, because a removal and another rank may replace the directory meanwhile.
                    os.rename(self.path, target.name, dst_dir_fd=shelf)
                    return shelf
                except BaseException:
                    os.close(shelf)
                    raise
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise StepRefused(f"{self.part} is already committed; a checkpoint is never overwritten") from error
                if not isinstance(error, FileNotFoundError) or not self.path.exists():
                    raise  # otherwise a removal deleted the last other part and its directory: try again

    def _settle(self, shelf: int, room: int) -> None:
        """Make the rename durable, or take it back."""
        try:
            os.fsync(shelf)
            os.fsync(room)
        except OSError:
            with suppress(OSError):  # a part that may not be durable must not be visible, and would refuse another try
                os.rename(self._target.name, self.path.name, src_dir_fd=shelf, dst_dir_fd=room)
            raise

    def abandon(self) -> None:
        """Remove the stage; harmless after `commit`. Files that a failing disk keeps are removed later as leftovers."""
        if self._fd >= 0:
            with suppress(OSError):  # rmtree raises nevertheless if it opened a directory and cannot read its status
                if stat.S_ISDIR(self.path.lstat().st_mode):
                    shutil.rmtree(self.path, ignore_errors=True)
                else:  # rmtree refuses a link, and waits for ever to open a FIFO
                    self.path.unlink()
            os.close(self._fd)  # left open, it would keep the directory locked
            self._fd = -1

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


def describe_directory(home: Path, written: Mapping[str, tuple[int, str]] | None = None) -> tuple[File, ...]:
    """Digest and sync every file that another library wrote under `home`.

    `written` has the size and digest of files that are synced already, as for `describe_file`; if given, it names all.

    Raises:
        CorruptChunk: a file does not hold what was written to it.
        ManifestError: an entry is neither a file nor a directory, its name is not safe, or `written` lacks it.
    """
    files, missing = [], dict(written or {})
    for directory, names, leaves in os.walk(home, onerror=_raise):
        for name in names:
            if Path(directory, name).is_symlink():
                raise ManifestError(f"{Path(directory, name)}: a symbolic link; a checkpoint holds plain files only")
            if Path(directory, name).is_mount():
                raise ManifestError(f"{Path(directory, name)}: another file system is mounted there; unmount it")
        for name in leaves:
            path = Path(directory, name)
            if path.is_symlink() or not path.is_file():
                raise ManifestError(f"{path}: not a plain file; a checkpoint holds plain files only")
            relative = path.relative_to(home).as_posix()
            check_path(relative, f"stage {home}")
            if written is not None and relative not in written:
                raise ManifestError(f"{path}: nobody knows what was written to it; a file goes through the stream")
            files.append(describe_file(path, relative, written=missing.pop(relative, None)))
    if missing:
        raise CorruptChunk(f"{home}: {', '.join(sorted(missing)[:3])} was written there, and is gone")
    return tuple(sorted(files, key=lambda file: file.path))


def make_locked_directory(path: Path) -> int:
    """Create a directory, lock it, and return the lock's descriptor.

    A sweep may remove the directory between the two steps, so its inode is compared after the lock is taken.
    """
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        except FileNotFoundError:
            pass
        except OSError:
            os.close(fd)  # left open, it would keep the directory locked
            raise
        os.close(fd)


def try_lock_stage(path: Path) -> int | None:
    """Lock a stage whose writer has died, and return a descriptor to close; None while a writer holds the lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a writer holds the lock, or the disk gave an error
        os.close(fd)
        return None
    return fd


def wait_for_writer(target: Path, wait_s: float) -> bool:
    """Wait until the writer of a renamed stage has ended, and make the part durable; False if the part is gone.

    Invariant: a writer keeps its lock through the rename and until it can no longer take the rename back.

    Raises:
        TimeoutError: the writer still holds the lock after `wait_s` seconds.
        OSError: the part may not be durable.
    """
    end = time.monotonic() + wait_s
    while target.exists():
        fd = try_lock_stage(target)
        if fd is not None:
            try:
                if not target.exists() or os.fstat(fd).st_ino != target.stat().st_ino:
                    continue  # taken back between two lines
                for directory in list(target.parents)[:3]:
                    sync_directory(directory)
                return True
            except FileNotFoundError:
                continue
            finally:
                os.close(fd)
        if time.monotonic() >= end:
            raise TimeoutError(f"{target}: its writer did not end within {wait_s:g} s")
        time.sleep(_POLL_S)
    return False


def _raise(error: OSError) -> None:
    raise error  # by default os.walk skips directories that it cannot list
