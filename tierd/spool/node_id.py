"""The id of a node: 8 hex digits by which a tier tells the records of one node from those of another.

    <spool>/.tierd/node    `<id> <place>`: the id, made at random, and a digest of the place for which it was made

Invariant: two spools never share an id by their names alone, because hosts in two clusters may have the same host name,
path and inode. A spool that was copied or moved to another host or path gets a new id.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
from pathlib import Path

from tierd.core.errors import CorruptChunk
from tierd.spool.file_io import digest, open_directory, open_plain

_NAME = "node"
_RECORD = re.compile(r"([0-9a-f]{8}) ([0-9a-f]{32})")


def node_id(root: Path) -> str:
    """Return the id of the node whose spool is at `root`, stable over restarts; made at the first call by its owner.

    A spool that an earlier version used keeps that version's id, a digest, because its records on tiers have it. This
    id also serves where none can be kept: for a reader who does not own the spool, and on a full disk.

    Raises:
        OSError: the spool cannot be read.
    """
    found = root.stat()
    place = digest(f"{socket.gethostname()} {root} {found.st_ino}".encode())
    control = root / ".tierd"
    if recorded := _recorded(control, place):
        return recorded
    if found.st_uid != os.geteuid() or not control.is_dir():
        return place[:8]
    try:
        return _made(control, place)
    except OSError:
        return place[:8]


def _recorded(control: Path, place: str) -> str:
    """Return the id that is recorded for this place; empty if there is none."""
    try:
        fd = open_plain(control / _NAME)
    except CorruptChunk:
        return ""
    with os.fdopen(fd, "rb") as file:
        match = _RECORD.fullmatch(file.read(64).decode("ascii", "replace"))
    return match[1] if match and match[2] == place else ""


def _is_in_use(control: Path) -> bool:
    """Whether an earlier version, which recorded no id, saved or knew a run in this spool."""
    return not os.path.lexists(control / _NAME) and any(
        any(os.scandir(control / room)) for room in ("saved", "timeline") if (control / room).is_dir()
    )


def _made(control: Path, place: str) -> str:
    """Make the record durably, and return its id. Of several threads and processes, the first one makes it."""
    lock = open_directory(control)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if recorded := _recorded(control, place):
            return recorded
        identity = place[:8] if _is_in_use(control) else secrets.token_hex(4)
        fresh = control / f"{_NAME}.new"
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"{identity} {place}".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        fresh.replace(control / _NAME)
        os.fsync(lock)
        return identity
    finally:
        os.close(lock)
