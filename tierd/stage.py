"""Filling a part's directory, and the one rename that makes it visible.

Law: whatever is renamed into place is durable to the last byte, manifest included; whatever is not renamed is locked by
its living writer or left over. Nobody has to ask a clock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tierd.core.errors import CorruptChunk, ManifestError, StepRefused
from tierd.core.ids import PartId
from tierd.core.manifest import MANIFEST_NAME, File, Manifest, check_path, encode
from tierd.persist import describe_file, sync_directory, write_file


class Stage:
    """A directory being filled, locked while its writer lives: so a dead writer's is told from a slow one's.

    Args:
        room: where stages lie, on the file system of `target`.
        target: the directory that the commit's rename makes visible.
        committed: called once that is durable.
    """

    def __init__(self, room: Path, part: PartId, target: Path, committed: Callable[[], None] = lambda: None) -> None:
        self.part = part
        self._target, self._committed = target, committed
        checkpoint = part.checkpoint
        name = f"{checkpoint.run}.{checkpoint.name}.{part.name}.{secrets.token_hex(4)}"
        self.path = room / name
        self._fd = make_locked(self.path)

    def commit(self, manifest: Manifest) -> None:
        """Make the staged files visible as `part`. Everything in the stage except the manifest is already durable.

        Raises:
            StepRefused: this attempt has committed the part before; the stage is left for `abandon`.
            OSError: it is not durable, and out of sight again where the file system lets it.
        """
        target = self._target
        write_file(self.path / MANIFEST_NAME, MANIFEST_NAME, encode(manifest))
        for directory, _, _ in os.walk(self.path, topdown=False, onerror=_raise):
            sync_directory(Path(directory))
        while True:
            try:
                for parent in (target.parent.parent, target.parent):
                    with suppress(FileExistsError):  # and no look whether it is one: it may go just then
                        parent.mkdir(mode=0o700)
                    sync_directory(parent.parent)  # even if it was there: another rank may have made and not synced it
                self.path.rename(target)
                break
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise StepRefused(f"{self.part} is already committed; a checkpoint is never overwritten") from error
                if not isinstance(error, FileNotFoundError) or not self.path.exists():
                    raise  # else the last other part there went just now, and an empty directory with it
        try:
            sync_directory(target.parent)
            sync_directory(self.path.parent)
        except OSError:
            with suppress(OSError):  # what may not last must not be seen, and would refuse another try
                target.rename(self.path)
            raise
        os.close(self._fd)
        self._fd = -1
        self._committed()

    def abandon(self) -> None:
        """Remove what was staged; harmless after `commit`. What a failing disk keeps goes as a leftover."""
        if self._fd >= 0:
            with suppress(OSError):  # raised all the same where a directory that was opened cannot be looked at
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)  # left open, it would keep what is there locked
            self._fd = -1

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


def describe_directory(home: Path, written: Mapping[str, tuple[int, str]] | None = None) -> tuple[File, ...]:
    """Digest and sync every file that another library wrote under `home`.

    Args:
        written: what went into files that are synced already, as for `describe_file`; these must be all.

    Raises:
        CorruptChunk: a file does not hold what was written to it.
        ManifestError: something there is neither a file nor a directory, its name is not safe, or `written` lacks it.
    """
    files, missing = [], dict(written or {})
    for directory, names, leaves in os.walk(home, onerror=_raise):
        for name in names:
            if Path(directory, name).is_symlink():
                raise ManifestError(f"{Path(directory, name)}: a symbolic link; a checkpoint holds plain files only")
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


def make_locked(path: Path) -> int:
    """Make a directory and hold its lock. A sweep may take it between the two, so look whether it is still there."""
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
            os.close(fd)  # left open, it would keep what is there locked
            raise
        os.close(fd)


def try_lock(path: Path) -> int | None:
    """The lock of a stage whose writer is gone, as a descriptor to close; None while it is held."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held; or the disk does not say
        os.close(fd)
        return None
    return fd


def _raise(error: OSError) -> None:
    raise error  # os.walk leaves out what it cannot list, unless it is told
