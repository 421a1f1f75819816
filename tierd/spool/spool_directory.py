"""The spool's own directory: its name, how it is created, the id of its node, and what lies in it.

    <spool>/.tierd/node    `<id> <place>`: the id, made at random, and a digest of the place for which it was made
    <spool>/.tierd/boot    a digest of the boot and the device on which a daemon of this spool lived last

Invariant: two spools never share an id by their names alone, because hosts in two clusters may have the same host name,
path and inode. A spool that was copied or moved to another host or path gets a new id. A copy of a whole volume on a
host of that name has the same id, but another boot of a kernel or another device. In a listing, what is removed
meanwhile is no error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import stat
from collections.abc import Container, Iterator
from pathlib import Path

from tierd.core.errors import CorruptChunk, SpoolUnusable
from tierd.spool.file_io import digest, open_directory, open_plain, sync_directory


def parts_below(base: Path) -> Iterator[tuple[str, str, str]]:
    """Yield `(run, checkpoint, part)` names of the directories three levels under `base`."""
    for run in directories_in(base):
        yield from parts_of_run(base, run)


def parts_of_run(base: Path, run: str) -> Iterator[tuple[str, str, str]]:
    """Yield `(run, checkpoint, part)` names of a run's directories under `base`."""
    for checkpoint in directories_in(base / run):
        for part in directories_in(base / run / checkpoint):
            yield run, checkpoint, part


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """List what is in a directory, without hidden entries; nothing if it does not exist."""
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def links_in(path: Path) -> list[str]:
    """List the symbolic links in a directory."""
    return sorted(entry.name for entry in _entries(path) if entry.is_symlink())


def odd_entries_in(path: Path) -> list[str]:
    """List everything in a directory that is no directory itself, as a symbolic link to one; without hidden ones."""
    return sorted(entry.name for entry in _entries(path) if not entry.is_dir(follow_symlinks=False))


def is_plain_directory(path: Path) -> bool:
    """Whether a path is a directory, and no link to one. Raises OSError if the disk does not say."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def empty_checkpoints_below(base: Path) -> Iterator[tuple[str, str]]:
    """Yield `(run, checkpoint)` names of the empty directories two levels under `base`."""
    for run in directories_in(base):
        for checkpoint in directories_in(base / run):
            try:
                with os.scandir(base / run / checkpoint) as entries:
                    if next(entries, None) is not None:
                        continue
            except FileNotFoundError:
                continue
            yield run, checkpoint


def directories_in(path: Path, known_names: Container[str] = ()) -> list[str]:
    """List the directories in a directory, without links and hidden ones.

    Those in `known_names` were such directories before, which is not asked again, because there may be thousands.
    """
    try:
        if known_names:
            names = os.listdir(path)  # noqa: PTH208  # as in `names_in`
            return [name for name in names if name in known_names or _is_directory(path / name)]
        with os.scandir(path) as entries:
            return [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def _is_directory(path: Path) -> bool:
    try:
        return not path.name.startswith(".") and stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def check_spool_path(root: Path) -> None:
    """Raise `SpoolUnusable` if a path is not valid UTF-8, because daemon, client and command line write it as JSON."""
    try:
        str(root).encode()
    except UnicodeEncodeError:
        raw = os.fsencode(root)
        try:
            raw.decode()
            why = "the locale cannot say it: set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        except UnicodeDecodeError:
            why = "it is no UTF-8: name another, or link this one from a path that is"
        raise SpoolUnusable(f"spool {raw!r}: {why}") from None


def make_directory_durably(directory: Path) -> None:
    """Create a directory and its missing parents durably, so that a power cut leaves their content reachable."""
    if not directory.is_dir():
        make_directory_durably(directory.parent)
        directory.mkdir(mode=0o755, exist_ok=True)  # not writable for others, because they could then replace the spool
        sync_entry(directory)


def sync_entry(path: Path) -> None:
    """Make the entry of a path in its directory durable, where this user and the file system can."""
    try:
        sync_directory(path.parent)
    except OSError as error:
        # A directory that this user cannot read was created by another user, who syncs it. Some file systems cannot
        # sync.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP):
            raise


_NAME, _BOOT = "node", "boot"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RECORD = re.compile(r"([0-9a-f]{8}) ([0-9a-f]{32})")


def node_id(root: Path) -> str:
    """Return the id of the node whose spool is at `root`, stable over restarts; made at the first call by its owner.

    A spool that an earlier version used keeps that version's id, a digest, because its records on tiers have it. This
    id also serves where none can be kept: for a reader who does not own the spool, and on a full disk. Raises OSError.
    """
    place, control = _place(root), root / ".tierd"
    if recorded := _read_record(control, place):
        return recorded
    if root.stat().st_uid != os.geteuid() or not control.is_dir():
        return place[:8]
    try:
        return _make_record(control, place)
    except OSError:
        return place[:8]


def new_node_id(root: Path) -> str:
    """Give the spool at `root` another id, because another node has this one; return it. Raises OSError."""
    return _make_record(root / ".tierd", _place(root), replaces=True)


def may_be_copied_volume(root: Path) -> bool:
    """Whether no daemon of this spool has settled on this boot and device, so that the spool may be a copied volume."""
    try:
        with os.fdopen(open_plain(root / ".tierd" / _BOOT), "rb") as file:
            return file.read(64).decode("ascii", "replace") != _boot(root)
    except (OSError, CorruptChunk):
        return True


def record_place(root: Path) -> None:
    """Record that a daemon of this spool has settled on this boot and device. Raises OSError."""
    if may_be_copied_volume(root):
        lock = open_directory(root / ".tierd")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _write(root / ".tierd", _BOOT, _boot(root))
        finally:
            os.close(lock)


def _place(root: Path) -> str:
    return digest(f"{socket.gethostname()} {root} {root.stat().st_ino}".encode())


def _boot(root: Path) -> str:
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return digest(f"{boot} {root.stat().st_dev}".encode())


def _read_record(control: Path, place: str) -> str:
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


def _make_record(control: Path, place: str, *, replaces: bool = False) -> str:
    """Make the record durably, and return its id. Of several threads and processes, the first one makes it.

    With `replaces`, another id is made although one is recorded.
    """
    lock = open_directory(control)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not replaces and (recorded := _read_record(control, place)):
            return recorded
        is_old = not replaces and _is_in_use(control)
        identity = place[:8] if is_old else secrets.token_hex(4)
        if not is_old:  # no other node can have this id yet
            _write(control, _BOOT, _boot(control.parent))
        _write(control, _NAME, f"{identity} {place}", durable=True)
        os.fsync(lock)
        return identity
    finally:
        os.close(lock)


def _write(control: Path, name: str, text: str, *, durable: bool = False) -> None:
    """Replace a file of `.tierd/` whole. The caller holds the lock, and syncs the directory if it is to be durable."""
    fresh = control / f"{name}.new"
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode())
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    fresh.replace(control / name)
