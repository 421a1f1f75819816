"""Access to a spool: who may use it, and what an error of its file system means. Shared by client and daemon.

Only a spool's owner and root are trusted.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import pwd
import resource
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierd.core.errors import SpoolFull, SpoolUnusable, TierdError
from tierd.core.storage_faults import DISK_FULL_ERRNOS, disk_full_remedy

log = logging.getLogger("tierd")

_OTHERS_MODE = 0o077
_SET_DUMPABLE = 4  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)


def keep_private(root: Path) -> None:
    """Make a spool's existing directory private to its owner; access of other users is removed.

    Raises `SpoolUnusable` if it is another user's, or if other users may write to it and it is not empty.
    """
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        check_owner(root)  # it says whose the spool is
        raise
    try:
        with os.scandir(fd) as entries:  # before chmod: another rank adds entries only after chmod
            filled = any(entries)
        status = os.fstat(fd)
        check_owner(root, status)
        mode = stat.S_IMODE(status.st_mode)
        if mode & stat.S_IWOTH and filled:
            raise SpoolUnusable(
                f"spool {root}: others may write to it (mode {mode:o}), so what lies there may be theirs; "
                f"look through it, then chmod 700 {root}"
            )
        if mode & _OTHERS_MODE:
            os.fchmod(fd, mode & 0o700)  # without set-gid, because systemd's RestrictSUIDSGID= forbids a mode with it
            log.warning("spool %s: its mode was %o; it is closed to others now", root, mode)
    finally:
        os.close(fd)
    above = root.parent.stat().st_mode
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        log.warning("spool %s: everybody may rename what is in %s, and so replace the spool", root, root.parent)


def account_name(uid: int) -> str:
    """Return the name of a uid's account; the uid itself if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def describe_owner(owner: int) -> str:
    """Say whose a spool is, and as whom this process runs, for messages that refuse it."""
    owner_name, own_name = (
        f"uid {uid} ({name})" if (name := account_name(uid)) != str(uid) else f"uid {uid}"
        for uid in (owner, os.geteuid())
    )
    return f"it belongs to {owner_name}, and this is {own_name}"


def command_as_account(uid: int) -> str:
    """Return the beginning of a command that runs another one as the account of `uid`."""
    name = account_name(uid)
    return f"sudo -u {name}" if name != str(uid) else f"sudo -u '#{uid}'"


def check_owner(root: Path, status: os.stat_result | None = None) -> None:
    """Raise `SpoolUnusable` if a spool's directory belongs to another user."""
    owner = (status or root.stat()).st_uid
    if owner != os.geteuid():
        raise SpoolUnusable(
            f"spool {root}: {describe_owner(owner)}; run as its owner ({command_as_account(owner)} ...), "
            "or name a directory of your own, inside it if need be"
        )


def check_own_directory(path: Path) -> None:
    """Raise `SpoolUnusable` if a directory of tierd's own in the spool is a link, or belongs to another user."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SpoolUnusable(f"{path}: a link, or another user's; nobody but tierd makes it: look at it, and remove it")


def check_run_link(link: Path) -> None:
    """Check that a symbolic link in place of a run's directory is safe to follow.

    A safe link leads to a directory of this user's on the same file system. No other user can change any step of its
    path. Raises `SpoolUnusable`, whose message names the link, the reason and the remedy.
    """
    try:
        why = _why_unsafe(link.parent.resolve() / link.name) or _why_unfit(link)
    except OSError as error:
        why = f"it leads nowhere ({error.strerror})"
    if why:
        raise SpoolUnusable(
            f"{link}: a symbolic link to {link.readlink()}, which is not followed: {why}. Put the directory itself "
            "there, or move the whole spool to the other disk and give its new path"
        )


def _why_unsafe(link: Path, links: int = 40) -> str:
    """Return why another user could redirect `link`; empty if none could. The path to the link itself is trusted."""
    trusted, directory, steps = (0, os.geteuid()), link.parent, [link.name]
    while steps:
        step, name = directory / steps[0], steps.pop(0)
        if name in (".", ".."):
            directory = directory if name == "." else directory.parent  # it is no link, because each step was resolved
            continue
        status = step.lstat()
        if status.st_uid not in trusted:
            return f"{step} is uid {status.st_uid}'s, who may replace what it leads to"
        if stat.S_ISLNK(status.st_mode):
            links -= 1
            target = step.readlink()
            steps = [*target.parts[target.is_absolute() :], *steps]
            directory = Path("/") if target.is_absolute() else directory
            if not links:
                return "it leads through too many links"
            continue
        if steps and status.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not status.st_mode & stat.S_ISVTX:
            return f"others may replace what is in {step} (mode {stat.S_IMODE(status.st_mode):o})"
        directory = step
    return ""


def _why_unfit(link: Path) -> str:
    """Return why the directory that a link leads to cannot be a run's; empty if it can."""
    status = link.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "that is no directory"
    if status.st_uid != os.geteuid():
        return f"that is uid {status.st_uid}'s"
    if status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        return f"others may write there; chmod 700 {link.resolve()}"
    if link.resolve().is_relative_to(link.parent.resolve()):
        return "that is in the spool itself"
    if status.st_dev != link.parent.stat().st_dev:
        return "that is on another file system, and a commit is one rename, within one"
    return ""


def bind_private_socket(path: Path, kind: socket.SocketKind) -> tuple[socket.socket, Callable[[], None]]:
    """Bind a unix socket to `path` for its owner only, replacing a socket that a killed daemon left.

    Returns:
        The socket, and a call that removes its file; errors are ignored, so that a failing disk does not prevent an
        orderly end. If the spool was deleted and another daemon serves a new one at its path, that daemon's file is
        kept.
    """
    path.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        os.fchmod(listener.fileno(), 0o600)  # bind(2) creates the file with this mode less the umask, never a wider one
        # A socket's path is limited to 107 bytes, a spool's path is not.
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    except OSError:
        listener.close()
        os.close(directory)
        raise

    def remove() -> None:
        with suppress(OSError):
            os.unlink(path.name, dir_fd=directory)  # not by path, because it may lead to another spool by now
        os.close(directory)

    return listener, remove


def foreign_peer_uid(connection: socket.socket, owner: int = 0) -> int | None:
    """Return the uid at the other end of a unix socket; None for this process's own, root's, and `owner`."""
    _, uid, _ = _credentials(connection)
    return None if uid in (os.geteuid(), 0, owner) else uid


def peer_pid(connection: socket.socket) -> int:
    """Return the process id at the other end of a unix socket; 0 if its PID namespace is not visible from here."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", answer)
    return pid, uid, gid


def forbid_core_dumps() -> None:
    """Keep this process's memory, which holds keys, out of core files and away from other processes of its user.

    The core limit alone is not enough, because a `core_pattern` that names a program is not bound by it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0):
        log.warning("the daemon may leave a core file, with keys in it: %s", errno.errorcode[ctypes.get_errno()])


@contextmanager
def spool_errors(doing: str, directory: Path | None = None) -> Iterator[None]:
    """Convert an `OSError` of the spool's file system into the `TierdError` that names its condition."""
    try:
        yield
    except OSError as error:
        raise spool_error(error, doing, directory) from error


def spool_error(error: OSError, doing: str, directory: Path | None = None) -> TierdError:
    """Return the `TierdError` that names the condition behind an `OSError` of the spool's file system.

    `directory` is one of that file system, which is asked whether it lacks blocks or inodes.
    """
    way_out = space_remedy(error, "in the spool", directory)
    text = f"{doing}: {error.strerror or error}{way_out}"
    return SpoolFull(text) if is_disk_full(error) else SpoolUnusable(text)


def space_remedy(error: OSError, place: str, directory: Path | None = None) -> str:
    """Return what to do about a lack of room, after a semicolon; empty for other errors.

    `place` is where to keep less, such as `in the spool`; `directory` is as for `spool_error`.
    """
    room = None
    if directory is not None and is_disk_full(error):
        try:
            room = os.statvfs(directory)
        except OSError:
            room = None
    text = disk_full_remedy(error.errno, place, room)
    return f"; {text}" if text else ""


def is_disk_full(error: OSError) -> bool:
    """Whether an `OSError` means that the disk, or this user's quota on it, is used up."""
    return error.errno in DISK_FULL_ERRNOS
