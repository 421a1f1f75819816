"""Which launches of a run live on a node: each trainer that saves holds a lock, which ends with its process.

    <spool>/.tierd/alive/<run>/<attempt>.<rank:05>-of-<world:05>    locked by the trainer of that rank; holds its pid

Law: whether a trainer lives is asked of its lock, never of a clock or a daemon. One process is one launch of a rank:
what it saves next takes the place of what it saved before, also where another of its Checkpointers, which nobody
closed, saved that; only one that then saves again shows that both are in use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tierd.core.errors import ConfigError, CorruptChunk
from tierd.core.ids import PartId
from tierd.core.world import Trainer
from tierd.persist import open_plain
from tierd.trust import check_room

ALIVE = "alive"  # a room of `.tierd/`
_TRIES, _PAUSE_S = 20, 0.005  # whoever looks holds a lock for an instant
_PID_SIZE = 20  # bytes
_KEPT = 64  # locks of a run

_Owner = object  # who holds it in this process; compared by identity or value
_held: dict[tuple[Path, str], dict[_Owner, tuple[str, int]]] = {}  # (control, writer) -> by owner, attempt, descriptor
_turn = threading.Lock()


def _forget_in_child() -> None:
    # A DataLoader's worker must not keep its trainer's lock when that dies.
    global _turn
    _turn = threading.Lock()
    for owners in _held.values():
        for _, fd in owners.values():
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def hold(control: Path, part: PartId, owner: _Owner = None, *, among: bool = False) -> bool:
    """Show, until `release` or the end of this process, that it saves the launch that `part` belongs to.

    Args:
        control: the spool's `.tierd/`.
        owner: which of this process's writers of that rank it is.
        among: what the others of them show stays. Else this one takes their place.

    Returns:
        Whether another one among them saves the same launch.

    Raises:
        ConfigError: another process saves the same rank of the same launch; names it.
        SpoolUnusable: `alive/` is no directory of tierd's.
        OSError: the lock cannot be had.
    """
    attempt = part.checkpoint.attempt
    with _turn:
        owners = _held.setdefault((control, part.lane), {})
        if owner in owners and owners[owner][0] == attempt:
            return False
        twins = [fd for other, (name, fd) in owners.items() if name == attempt and other != owner]
        marks = control / ALIVE / part.checkpoint.run
        try:
            check_room(control / ALIVE)
            with suppress(FileExistsError):
                marks.mkdir(mode=0o700)
            # A lock is of the open file, which a duplicate shares: it lasts until both are closed.
            fd = os.dup(twins[0]) if twins else _lock(marks / f"{attempt}.{part.name}", part)
        finally:  # the launch before has ended in any case
            for former in [one for one in owners if one == owner or not among]:
                os.close(owners.pop(former)[1])
        owners[owner] = attempt, fd
    _sweep(marks)
    return among and bool(twins)


def holds(control: Path, part: PartId, owner: _Owner = None) -> bool:
    """Whether `owner` shows that it saves the launch of `part`."""
    held = _held.get((control, part.lane), {}).get(owner)
    return held is not None and held[0] == part.checkpoint.attempt


def release(control: Path, part: PartId, owner: _Owner = None) -> None:
    """Show it no more, unless it saves another launch of that rank by now."""
    with _turn:
        if holds(control, part, owner):
            os.close(_held[control, part.lane].pop(owner)[1])


def trainers(control: Path, runs: Iterable[str]) -> dict[str, tuple[Trainer, ...]]:
    """By run, of these, the trainers that live on this node, in the order of their launches. Raises OSError."""
    found = {run: tuple(sorted(_living(control / ALIVE / run, run))) for run in runs}
    return {run: some for run, some in found.items() if some}


def on_this_machine(run: str, attempt: str) -> dict[int, str]:
    """By process id, the spool in which a trainer of a launch holds its lock, whichever spool that is. As far as /proc
    shows descriptors: of this user's processes, or to root of all, in this pid namespace."""
    found = {}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            control, _, lock = str(descriptor.readlink()).rpartition(f"/{ALIVE}/{run}/")
            if control and lock.partition(".")[0] == attempt:
                found[int(descriptor.parts[2])] = str(Path(control).parent)
    return found


def ended(control: Path, alive: Mapping[str, Collection[Trainer]], runs: Iterable[str]) -> dict[str, frozenset[str]]:
    """By run, of these, the launches that saved on this node lately and have none of the trainers in `alive`."""
    found = {}
    for run in runs:
        names = {path.name.partition(".")[0] for path in _files(control / ALIVE / run)}
        found[run] = frozenset(names - {one.attempt for one in alive.get(run, ())})
    return found


def forget(control: Path, run: str) -> None:
    """Remove the locks of dead trainers of a run that left the spool."""
    marks = control / ALIVE / run
    _sweep(marks, 0)
    with suppress(OSError):  # there was none, or a trainer lives
        marks.rmdir()


def _living(marks: Path, run: str) -> Iterable[Trainer]:
    for path in _files(marks):
        attempt, _, name = path.name.partition(".")
        part = PartId.parse(run, f"{0:012}.{attempt}", name)
        if part is None:
            continue
        with suppress(CorruptChunk), os.fdopen(open_plain(path), "rb") as file:  # corrupt: no plain file, or gone
            if not _try_shared(file.fileno()):
                pid = file.read(_PID_SIZE).strip()
                since = os.fstat(file.fileno()).st_mtime
                yield Trainer(attempt, part.rank, int(pid) if pid.isdigit() else 0, since)


def _lock(path: Path, part: PartId) -> int:
    """The locked file at `path`, with this process's id in it. A sweep may remove it before it is locked.

    It is not held open for writing, because a file system with such a file cannot be remounted read-only. NFS alone
    locks nothing else (flock(2)).
    """
    mode, more = os.O_RDONLY, os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_TRIES):
        fd = os.open(path, mode | more, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == path.stat().st_ino:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC), "wb") as file:
                    file.write(f"{os.getpid()}\n".encode())
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        except OSError as error:
            if error.errno != errno.EBADF or mode == os.O_RDWR:
                os.close(fd)
                raise
            mode = os.O_RDWR
        os.close(fd)
    raise ConfigError(
        f"{_holder(path)} saves rank {part.rank} of attempt {part.checkpoint.attempt} of run {part.checkpoint.run}: "
        "give each launch an attempt of its own (tierd.new_attempt()), and each process a rank of its own"
    )


def _holder(path: Path) -> str:
    with suppress(OSError, CorruptChunk), os.fdopen(open_plain(path), "rb") as file:
        pid = file.read(_PID_SIZE).strip()
        if pid.isdigit():
            return f"process {int(pid)}"
    return "another process"


def _sweep(marks: Path, keep: int = _KEPT) -> None:
    """Remove the locks of dead trainers but the newest, which tell what has ended. One that is removed is held
    meanwhile, so that nobody takes it."""
    for path in _files(marks)[: -keep or None]:
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if _try_shared(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _try_shared(fd: int) -> bool:
    """Whether nobody holds the lock. Others who look do not count: their locks are shared ones, too."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _files(marks: Path) -> list[Path]:
    try:
        return sorted(marks.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
