"""Who is trusted on a node: a spool's owner and root, nobody else. Sync; shared by client and daemon.

Law: a place that others can change is not used, and a peer of another user is turned away before a byte or a descriptor
of its is read. Inside a spool no path needs a guard against other users' links: nobody else can put one there.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import socket
import stat
import struct
from pathlib import Path

from tierd.core.errors import SpoolUnusable

log = logging.getLogger("tierd")

_OTHERS = 0o077
_SET_DUMPABLE = 4  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)


def keep_private(root: Path) -> None:
    """Have a spool's directory, which exists, for its owner alone: what others may read is closed to them.

    Raises:
        SpoolUnusable: it is another user's, or others may write to it and something lies there already.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.scandir(fd) as entries:  # before the mode: what another rank puts there, it puts after it was closed
            filled = any(entries)
        found = os.fstat(fd)
        check_owner(root, found)
        mode = stat.S_IMODE(found.st_mode)
        if mode & stat.S_IWOTH and filled:
            raise SpoolUnusable(
                f"spool {root}: others may write to it (mode {mode:o}), so what lies there may be theirs; "
                f"look through it, then chmod 700 {root}"
            )
        if mode & _OTHERS:
            os.fchmod(fd, mode & 0o700)  # without set-gid: RestrictSUIDSGID= lets nobody say it
            log.warning("spool %s: its mode was %o; it is closed to others now", root, mode)
    finally:
        os.close(fd)
    above = root.parent.stat().st_mode
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        log.warning("spool %s: everybody may rename what is in %s, and so replace the spool", root, root.parent)


def check_owner(root: Path, found: os.stat_result | None = None) -> None:
    """Raise `SpoolUnusable` where a spool's directory is another user's."""
    owner = (found or root.stat()).st_uid
    if owner != os.geteuid():
        raise SpoolUnusable(
            f"spool {root}: it belongs to uid {owner}, and this is uid {os.geteuid()}; "
            "run as its owner, or name a directory of your own, inside it if need be"
        )


def check_room(path: Path) -> None:
    """Raise `SpoolUnusable` where a directory of tierd's own in the spool is a link, or another user's."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SpoolUnusable(f"{path}: a link, or another user's; nobody but tierd makes it: look at it, and remove it")


def check_link(link: Path) -> None:
    """Check that a link in the place of a run's directory leads to a directory of this user's, on the same file system,
    along a way that nobody else can change.

    Raises:
        SpoolUnusable: it does not; names the link, why, and what to do.
    """
    try:
        why = _unsafe(link.parent.resolve() / link.name) or _unfit(link)
    except OSError as error:
        why = f"it leads nowhere ({error.strerror})"
    if why:
        raise SpoolUnusable(
            f"{link}: a symbolic link to {link.readlink()}, which is not followed: {why}. Put the directory itself "
            "there, or move the whole spool to the other disk and give its new path"
        )


def _unsafe(link: Path, links: int = 40) -> str:
    """Why somebody else could lead `link` elsewhere; empty if nobody can. The way to the link itself is trusted."""
    trusted, here, left = (0, os.geteuid()), link.parent, [link.name]
    while left:
        step, name = here / left[0], left.pop(0)
        if name in (".", ".."):
            here = here if name == "." else here.parent  # no link: each was resolved
            continue
        found = step.lstat()
        if found.st_uid not in trusted:
            return f"{step} is uid {found.st_uid}'s, who may replace what it leads to"
        if stat.S_ISLNK(found.st_mode):
            links -= 1
            target = step.readlink()
            left = [*target.parts[target.is_absolute() :], *left]
            here = Path("/") if target.is_absolute() else here
            if not links:
                return "it leads through too many links"
            continue
        if left and found.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not found.st_mode & stat.S_ISVTX:
            return f"others may replace what is in {step} (mode {stat.S_IMODE(found.st_mode):o})"
        here = step
    return ""


def _unfit(link: Path) -> str:
    """Why the directory that a link leads to cannot be a run's; empty if it can."""
    found = link.stat()
    if not stat.S_ISDIR(found.st_mode):
        return "that is no directory"
    if found.st_uid != os.geteuid():
        return f"that is uid {found.st_uid}'s"
    if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        return f"others may write there; chmod 700 {link.resolve()}"
    if link.resolve().is_relative_to(link.parent.resolve()):
        return "that is in the spool itself"
    if found.st_dev != link.parent.stat().st_dev:
        return "that is on another file system, and a commit is one rename, within one"
    return ""


def listen(path: Path, kind: socket.SocketKind) -> socket.socket:
    """A unix socket bound to `path`, for its owner alone, in the place of what a daemon that was killed left."""
    path.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        os.fchmod(listener.fileno(), 0o600)  # what bind(2) makes has this mode less the umask: never a wider one
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")  # a socket's path may be 107 bytes, a spool's longer
    except OSError:
        listener.close()
        raise
    finally:
        os.close(directory)
    return listener


def stranger(connection: socket.socket, owner: int = 0) -> int | None:
    """The uid at the other end of a unix socket; None for this process's own, root's, and `owner`."""
    _, uid, _ = _credentials(connection)
    return None if uid in (os.geteuid(), 0, owner) else uid


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end of a unix socket; 0 where it is in a pid namespace that is not seen from here."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", answer)
    return pid, uid, gid


def leave_no_core() -> None:
    """Keep the memory of this process, which holds keys, out of core files, and from what else runs as its user.

    The limit alone would not do: a `core_pattern` that names a program is not bound by it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0):
        log.warning("the daemon may leave a core file, with keys in it: %s", errno.errorcode[ctypes.get_errno()])
