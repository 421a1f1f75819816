"""Try the spool's directory: direct I/O, rename and fsync in a directory of its own, which is removed again."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tierd.core.diagnosis import node
from tierd.core.diagnosis.findings import NODE, Finding, finding
from tierd.core.diagnosis.node import Ownership, Space
from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId
from tierd.spool.direct_io import set_direct, write_all
from tierd.spool.mounts import mount_of
from tierd.spool.spool import Spool

_WRITE_BYTES = 16 << 20  # bytes
_LEFT_S = 3600.0  # a doctor that was killed has left its directory
_MAX_CHECKPOINTS = 100  # checkpoints of a run whose sizes are added up


@dataclass(frozen=True, slots=True)
class StateSize:
    """The largest state that the spool knows: of all of this node's ranks together, in bytes.

    Attributes:
        size: of its newest checkpoint.
        used: by all checkpoints of its run.
    """

    run: str
    size: int
    used: int


def examine(root: Path, keep_last: int, state: StateSize | None) -> Iterator[Finding]:
    """Yield the findings about the spool in `root`, which may be absent."""
    try:
        home = nearest(root)
    except OSError as error:  # a directory above it is closed to this account
        yield finding(NODE, "spool unusable", f"{root}: {error.strerror}")
        return
    if home == root and not root.is_dir():
        yield finding(NODE, "spool unusable", f"{root} is not a directory")
        return
    yield node.file_system(mount_of(home))
    if home == root:
        yield _ownership(root)
    try:
        with _directory(home, root) as room:
            yield _presence_finding(root, home)
            yield from _try_operations(room)
    except OSError as error:
        yield finding(NODE, "spool unusable", f"{home}: nothing can be written there: {error.strerror}")
    disk = os.statvfs(home)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    yield node.space(
        Space(
            free=free,
            total=total,
            used=state.used if state else 0,
            state=state.size if state else None,
            run=state.run if state else "",
            keep_last=keep_last,
        )
    )


def nearest(root: Path) -> Path:
    """Return `root`, or the nearest directory above it that exists."""
    return next(path for path in (root, *root.parents) if path.exists())


def _presence_finding(root: Path, home: Path) -> Finding:
    if home != root:
        return finding(NODE, "spool absent", f"{root}; {home} is there, and this account may write to it")
    return finding(NODE, "spool found", str(root))


def _ownership(root: Path) -> Finding:
    status, above = root.stat(), root.parent.stat()
    try:
        with os.scandir(root) as entries:
            filled = any(entries)
    except PermissionError:  # another account's
        filled = True
    return node.ownership(
        Ownership(status.st_uid, os.geteuid(), stat.S_IMODE(status.st_mode), filled, stat.S_IMODE(above.st_mode))
    )


@contextmanager
def _directory(home: Path, root: Path) -> Iterator[Path]:
    """Make a private directory that no listing of the spool shows, and remove it; also those of killed doctors."""
    control = home / ".tierd"
    above, prefix = (control, "doctor-") if home == root and control.is_dir() else (home, ".tierd-doctor-")
    for leftover in above.glob(f"{prefix}*"):
        with suppress(OSError):
            if leftover.lstat().st_uid == os.geteuid() and time.time() - leftover.lstat().st_mtime > _LEFT_S:
                shutil.rmtree(leftover)
    room = tempfile.mkdtemp(prefix=prefix, dir=above)
    try:
        yield Path(room)
    finally:
        shutil.rmtree(room)


def _try_operations(room: Path) -> Iterator[Finding]:
    yield _time_write(room / "direct")
    try:
        (room / "staged").mkdir()
        (room / "staged").rename(room / "committed")
        yield finding(NODE, "renames", "a directory was renamed")
    except OSError as error:
        yield finding(NODE, "rename fails", str(error.strerror))
    try:
        yield node.synced(_time_sync(room))
    except OSError as error:
        yield finding(NODE, "sync fails", str(error.strerror))


def _time_write(path: Path) -> Finding:
    with mmap.mmap(-1, _WRITE_BYTES) as memory:  # whole pages, as O_DIRECT needs them
        memory.write(os.urandom(1 << 20) * (_WRITE_BYTES >> 20))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        view = memoryview(memory)
        try:
            is_direct = set_direct(fd, True)
            began = time.monotonic()
            is_direct = write_all(fd, view, 0) and is_direct
            os.fsync(fd)
            return node.written(is_direct, _WRITE_BYTES / max(time.monotonic() - began, 1e-6))
        except OSError as error:  # here, because its traceback holds a slice of the memory, which could not be closed
            path.unlink()  # room for the other checks
            return node.unwritten(error.errno, str(error.strerror))
        finally:
            view.release()
            os.close(fd)


def _time_sync(room: Path) -> float:
    path = room / "synced"
    began = time.monotonic()
    with path.open("xb") as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
    fd = os.open(room, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.monotonic() - began


def largest_state(root: Path) -> StateSize | None:
    """Return the largest state of which the spool has a checkpoint; None if it has none that can be read."""
    if not (root / ".tierd").is_dir():
        return None
    states = list[StateSize]()
    with suppress(OSError, TierdError):
        spool = Spool(root, write=False)
        for run in spool.runs():
            sizes = [_size(spool, checkpoint) for checkpoint in spool.newest(run, _MAX_CHECKPOINTS)]
            if sizes and sizes[0]:
                states.append(StateSize(run, sizes[0], sum(sizes)))
    return max(states, key=lambda state: state.size, default=None)


def _size(spool: Spool, checkpoint: CheckpointId) -> int:
    total = 0
    for part in spool.parts_of(checkpoint):
        with suppress(TierdError):  # a manifest that is damaged, or of a newer version
            total += spool.manifest(part).size
    return total
