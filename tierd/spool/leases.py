"""Leases: each trainer that saves a rank of a run holds a lock on its node, and the kernel frees it with the process.

    <spool>/.tierd/alive/<run>/<attempt>.<rank:05>-of-<world:05>    locked by the trainer of that rank; holds its pid

Invariant: only the lock decides whether a trainer lives, never a clock or a daemon. One process is one launch of a
rank: its next launch replaces its previous one. That is so even if another Checkpointer of the process saved the
previous launch and was never closed. Both are known to be in use only if that other Checkpointer saves again.
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
from tierd.core.planning.place import Trainer
from tierd.spool.file_io import open_plain
from tierd.spool.spool_access import check_own_directory

ALIVE = "alive"  # a subdirectory of `.tierd/`
_TRIES, _PAUSE_S = 20, 0.005  # a process that checks a lock holds it for an instant only
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO in a lock's place does not block
_PID_SIZE = 20  # bytes
_MAX_KEPT_LOCKS = 64  # locks per run that a sweep keeps

_Owner = object  # a writer of this process that holds a lock; compared by identity or value
# (control, writer) -> by owner, attempt and descriptor.
_held_leases: dict[tuple[Path, str], dict[_Owner, tuple[str, int]]] = {}
_guard = threading.RLock()  # reentrant, because a signal handler that saves may interrupt its holder
_changing = False  # whether the holder of `_guard` is changing `_held_leases`


def _forget_in_child() -> None:
    # A DataLoader's worker must not keep its trainer's lock after the trainer dies.
    global _guard, _changing
    _guard, _changing = threading.RLock(), False
    for owners in _held_leases.values():
        for _, fd in owners.values():
            os.close(fd)
    _held_leases.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def acquire_lease(control: Path, part: PartId, owner: _Owner = None, *, among: bool = False) -> bool:
    """Hold, until `release_lease` or the end of this process, the lease of the launch of `part`.

    Args:
        owner: one of this process's writers of that rank.
        among: keep the leases of this process's other writers of the rank. If False, this lease replaces them.

    Returns:
        True if `among`, and another writer of this process holds a lease of the same launch. In a signal handler that
        interrupted `acquire_lease`, False without a lease: that call takes its own, and the next save this one.

    Raises:
        ConfigError: another process saves the same rank of the same launch; the message names that process.
        SpoolUnusable: `alive/` is not a directory of tierd's.
        OSError: the lock cannot be taken.
    """
    global _changing
    marks = control / ALIVE / part.checkpoint.run
    with _guard:
        if _changing:  # by the thread that this signal handler has interrupted, so no wait would end
            return False
        try:
            _changing = True
            is_twin = _take(control, part, owner, marks, among)
        finally:
            _changing = False
    _sweep(marks)
    return is_twin


def _take(control: Path, part: PartId, owner: _Owner, marks: Path, among: bool) -> bool:
    attempt = part.checkpoint.attempt
    owners = _held_leases.setdefault((control, part.writer), {})
    if owner in owners and owners[owner][0] == attempt:
        return False
    twins = [fd for other_owner, (name, fd) in owners.items() if name == attempt and other_owner != owner]
    # Even if no lock can be taken, the previous launch has ended.
    former = [owners.pop(former_owner) for former_owner in list(owners) if former_owner == owner or not among]
    try:
        check_own_directory(control / ALIVE)
        with suppress(FileExistsError):
            marks.mkdir(mode=0o700)
        # A lock belongs to the open file, which a duplicate shares, so it lasts until both descriptors are closed.
        owners[owner] = attempt, os.dup(twins[0]) if twins else _lock(marks / f"{attempt}.{part.name}", part)
    finally:
        for _, fd in former:
            os.close(fd)
    return among and bool(twins)


def holds_lease(control: Path, part: PartId, owner: _Owner = None) -> bool:
    """Whether `owner` holds the lease of the launch of `part`."""
    lease = _held_leases.get((control, part.writer), {}).get(owner)
    return lease is not None and lease[0] == part.checkpoint.attempt


def release_lease(control: Path, part: PartId, owner: _Owner = None) -> None:
    """Release the lease of `owner`, unless the lease is of another launch of that rank by now."""
    with _guard:
        if holds_lease(control, part, owner):
            os.close(_held_leases[control, part.writer].pop(owner)[1])


def living_trainers(control: Path, runs: Iterable[str]) -> dict[str, tuple[Trainer, ...]]:
    """Return, by run, the trainers that live on this node, in the order of their launches. Raises OSError."""
    by_run = {run: tuple(sorted(_list_trainers(control / ALIVE / run, run))) for run in runs}
    return {run: run_trainers for run, run_trainers in by_run.items() if run_trainers}


def trainers_on_this_machine(run: str, attempt: str) -> dict[int, str]:
    """Find every trainer of a launch on this machine, in any spool: by process id, the spool in which it holds its
    lock.

    /proc shows only descriptors of this user's processes, or all of them to root, and only in this PID namespace.
    """
    spool_by_pid = {}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            control, _, lock = str(descriptor.readlink()).rpartition(f"/{ALIVE}/{run}/")
            if control and lock.partition(".")[0] == attempt:
                spool_by_pid[int(descriptor.parts[2])] = str(Path(control).parent)
    return spool_by_pid


def ended_launches(
    control: Path, alive: Mapping[str, Collection[Trainer]], runs: Iterable[str]
) -> dict[str, frozenset[str]]:
    """Return, by run, the launches that saved on this node recently and have no trainer in `alive`."""
    by_run = {}
    for run in runs:
        names = {path.name.partition(".")[0] for path in _files(control / ALIVE / run)}
        by_run[run] = frozenset(names - {trainer.attempt for trainer in alive.get(run, ())})
    return by_run


def forget_dead_trainers(control: Path, run: str) -> None:
    """Remove the locks of dead trainers of a run that has no checkpoint left in the spool."""
    marks = control / ALIVE / run
    _sweep(marks, 0)
    with suppress(OSError):  # the directory does not exist, or a trainer lives
        marks.rmdir()


def _list_trainers(marks: Path, run: str) -> Iterable[Trainer]:
    for path in _files(marks):
        attempt, _, name = path.name.partition(".")
        part = PartId.parse(run, f"{0:012}.{attempt}", name)
        if part is None:
            continue
        # CorruptChunk: no plain file, or removed.
        with suppress(CorruptChunk), os.fdopen(open_plain(path), "rb") as file:
            if not _try_shared(file.fileno()):
                pid = file.read(_PID_SIZE).strip()
                since = os.fstat(file.fileno()).st_mtime
                yield Trainer(attempt, part.rank, int(pid) if pid.isdigit() else 0, since, part.world)


def _lock(path: Path, part: PartId) -> int:
    """Lock the file at `path`, write this process's id into it, and return the descriptor.

    A sweep may remove the file before it is locked, so its inode is compared afterwards. The file is not kept open for
    writing, because a file system with such a file cannot be remounted read-only. NFS requires a descriptor open for
    writing (flock(2)), so EBADF leads to a second try with one.
    """
    mode, create_flags = os.O_RDONLY, os.O_CREAT | _PLAIN
    for _ in range(_TRIES):
        fd = os.open(path, mode | create_flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == path.stat().st_ino:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_TRUNC | _PLAIN), "wb") as file:
                    file.write(f"{os.getpid()}\n".encode())
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        except BaseException as error:  # an interrupt too, because this process would refuse its own next save
            if not isinstance(error, OSError) or error.errno != errno.EBADF or mode == os.O_RDWR:
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


def _sweep(marks: Path, keep: int = _MAX_KEPT_LOCKS) -> None:
    """Remove the locks of dead trainers, except the newest ones, which show which launches have ended.

    A lock is held during its removal, so that no trainer takes it.
    """
    for path in _files(marks)[: -keep or None]:
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | _PLAIN)
            try:
                if _try_shared(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _try_shared(fd: int) -> bool:
    """Whether no trainer holds the lock. Other checks of it do not count, because their locks are shared too."""
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
