"""The local tier: stage, quarantine and remove a node's parts; `local_parts` lists and reads them, `leftovers` pins
checkpoints and removes the rest. Synchronous; shared by client and daemon.

Invariant: one rename makes a part visible, after every byte of its directory is durable. One rename makes a part
invisible, before anything in its directory changes. So a reader, or a process that starts after a power cut, finds a
whole part or none. Exception: a part in a lower layer of overlayfs loses its manifest first, because overlayfs cannot
rename its directory.

    <spool>/<run>/<step:012>.<attempt>/<rank:05>-of-<world:05>/…files…, manifest.json
    <spool>/<run>/pins/<step:012>.<attempt>
    <spool>/.tierd/{lock, control.sock, stage/, trash/, recycle/<writer>, quarantine/<run>/<checkpoint>/<part>/}
    <spool>/.tierd/fetch/<run>.<checkpoint>.<part>/    a fetch in progress, or an interrupted one
    <spool>/.tierd/{saved, retention, timeline}/       records of runs (`run_records`)
    <spool>/.tierd/alive/                              locks of living trainers (`leases`)
    <spool>/.tierd/watched/<run>.json                  taken from a watched directory (daemon/intake/taken_units.py)
    <spool>/.tierd/meetings/<launch>/                  rank notes of a launch (client/ranks/note_exchange.py)
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tierd.core.errors import (
    ConfigError,
    CorruptChunk,
    ManifestError,
    SpoolHeld,
    SpoolUnusable,
    StepRefused,
    TierdError,
)
from tierd.core.ids import PartId
from tierd.spool.direct_io import LARGE
from tierd.spool.file_io import exists, make_private, open_own, sync_directory
from tierd.spool.leases import ALIVE
from tierd.spool.leftovers import Leftovers, delete_trashed, sync_removal
from tierd.spool.run_records import (
    LOCAL_ONLY,
    RETENTION,
    SAVED,
    TIMELINE,
    forget_committed,
    mark_saved,
    record_committed,
)
from tierd.spool.spool_access import check_own_directory, check_owner, keep_private, spool_errors
from tierd.spool.spool_directory import (
    check_spool_path,
    is_plain_directory,
    make_directory_durably,
    node_id,
    sync_entry,
)
from tierd.spool.stage import Stage
from tierd.spool.verified_reads import bad_chunks

log = logging.getLogger("tierd")


class Spool(Leftovers):
    """A node's local checkpoints, in one directory. Without `write`, the spool is only read, and no directory is made.

    Raises:
        SpoolUnusable: `root` is no directory, cannot be created or written to, or is accessible to other users.
    """

    def __init__(self, root: str | os.PathLike[str], *, write: bool = True) -> None:
        self.removals = 0  # calls that took parts away
        if not os.fspath(root):
            raise SpoolUnusable("spool '': name a directory")
        super().__init__(Path(root).absolute(), made=write)
        check_spool_path(self.root)
        with spool_errors(f"spool {self.root}", self.root):
            if self.root.exists() and not self.root.is_dir():
                raise SpoolUnusable(f"spool {self.root}: it is not a directory; name another, or move that file away")
            if not write:
                return
            make_directory_durably(self.root.parent)
            self.root.mkdir(mode=0o700, exist_ok=True)  # private, because the files hold model weights
            keep_private(self.root)
            sync_entry(self.root)  # also if it existed, because its creator may have been killed before syncing
            for directory in (self.control, *(self.control / name for name in _ROOMS)):
                directory.mkdir(mode=0o700, exist_ok=True)
                check_own_directory(directory)
            node_id(self.root)  # before the first save, because a spool with saves and no id is an earlier version's
            if not os.access(self.root, os.W_OK | os.X_OK):
                why = (
                    "its file system is mounted read-only; mount it writable, or name another directory"
                    if os.statvfs(self.root).f_flag & os.ST_RDONLY
                    else (f"not writable by uid {os.geteuid()}; change its owner or mode")
                )
                raise SpoolUnusable(f"spool {self.root}: {why}")

    @property
    def node_id(self) -> str:
        """The id of the node whose spool this is, 8 hex digits. Raises OSError."""
        return node_id(self.root)

    # -- writing ----------------------------------------------------------------------------------------------------

    def stage(self, part: PartId) -> Stage:
        """Create a stage for a `part` that is saved on this node.

        Raises:
            StepRefused: the part was committed before.
            SpoolUnusable: the run's directory is a symbolic link that tierd does not follow.
        """
        self.check_run_directory(part.checkpoint.run)
        if self.path(part).exists():
            raise StepRefused(f"{part} is already committed; a checkpoint is never overwritten")
        mark_saved(self.control, part)
        note = functools.partial(record_committed, self.control, part)
        return Stage(self.control / "stage", part, self.path(part), note)

    def remove(self, parts: Iterable[PartId], reuse: Collection[str] = ()) -> None:
        """Delete the local copies of these parts, and no part that another rank commits meanwhile.

        Only `core/planning/plan.py` decides to call this. The next save of the writers in `reuse` may overwrite the
        blocks of their part's largest file, which is faster than allocating new ones.
        """
        self.removals += 1
        for part in parts:
            grave = self._bury(self.path(part))
            if grave is None:
                continue
            forget_committed(self.control, part)
            self._drop_if_empty(self.path(part).parent)
            if part.writer in reuse:
                self._recycle(grave, part.writer)
            delete_trashed(grave)

    def recycled(self, part: PartId) -> Path | None:
        """Return a file that the writer of `part` may overwrite; None if there is none.

        A writer claims the file by a rename, so only one writer gets it.
        """
        path = self.control / "recycle" / part.writer
        try:
            return path if stat.S_ISREG(path.lstat().st_mode) else None
        except FileNotFoundError:
            return None

    def drop_recycled(self, keep: Collection[str]) -> None:
        """Delete the files that are kept for overwriting, except those of the writers in `keep`."""
        for path in self._room("recycle").iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def _recycle(self, home: Path, writer: str) -> None:
        """Keep the largest file under `home` for overwriting, if it is at least `LARGE` bytes.

        The writer that claims the file checks that no other process holds it.
        """
        try:
            target = self._room("recycle") / writer
            files = (Path(directory, name) for directory, _, names in os.walk(home) for name in names)
            plain = {path: status.st_size for path in files if stat.S_ISREG((status := path.lstat()).st_mode)}
            largest = max(plain, key=plain.__getitem__, default=None)
            if largest and plain[largest] >= LARGE and largest.lstat().st_nlink == 1 and not target.exists():
                largest.rename(target)
        except (SpoolUnusable, OSError):  # the caller then deletes the file with the rest of the part
            pass

    def quarantine(self, part: PartId) -> None:
        """Move a part to the quarantine, because its bytes are proven corrupt and no tier can repair it."""
        self.removals += 1
        home = self.path(part)
        target = self._room("quarantine") / part.path
        if not self.holds(part):
            return  # quarantined before: that directory is the only copy left; or a link, behind which it is nobody's
        if target.exists():
            self._trash(target)
        make_private(target.parent)
        try:
            home.rename(target)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copytree(home, target, symlinks=True)  # overlayfs, as in `trash`
            self._trash(home)
        sync_directory(target.parent)
        sync_removal(home.parent)
        self._drop_if_empty(home.parent)

    def remove_obstacles(self, part: PartId) -> None:
        """Remove whatever lies in the place of a part's directory, or of its checkpoint's, and is no directory.

        The caller has the whole part, to put it there. Of a link, only the link is removed.
        """
        for path in (self.path(part).parent, self.path(part)):
            if exists(path) and not is_plain_directory(path):
                behind = f"a symbolic link to {path.readlink()}" if path.is_symlink() else "no directory"
                log.warning("%s: %s; it is removed, because a tier's whole copy takes its place", path, behind)
                path.unlink(missing_ok=True)

    def is_whole(self, part: PartId) -> bool:
        """Whether a part is there, not quarantined, and each of its bytes can be read and is right.

        A part of which files are hard links decays when its program writes to them.
        """
        try:
            files = self.manifest(part).files
        except (TierdError, OSError):
            return False
        return not any(bad_chunks(self.path(part) / file.path, file) for file in files)

    def unquarantine(self, part: PartId) -> bool:
        """Verify a quarantined part once more, and move it back among the parts if every byte is right.

        Returns:
            Whether the part is back. If not, its bytes are proven corrupt, it is not in quarantine, or it was saved
            again since.

        Raises:
            OSError, TierdError: not all bytes could be judged (`core.corruption`); nothing was moved.
        """
        source, home = self._room("quarantine") / part.path, self.path(part)
        if home.exists() or not source.is_dir():
            return False
        try:
            manifest = self._read_manifest(source, part)
        except ManifestError:
            return False
        defects = [reason for file in manifest.files for _, _, reason in bad_chunks(source / file.path, file)]
        for reason in defects:
            if isinstance(reason, CorruptChunk):
                return False
        if defects:
            raise defects[0]
        self.check_run_directory(part.checkpoint.run)
        make_private(home.parent)
        source.rename(home)  # fails if the part was saved again meanwhile
        sync_directory(home.parent)
        sync_removal(source.parent)
        return True

    def fetch_directory(self, part: PartId) -> Path:
        """Return the directory in which a fetch assembles a part.

        The path is the same every time, so that the next fetch finds the chunks of an interrupted one.
        """
        return self.control / "fetch" / f"{part.checkpoint.run}.{part.checkpoint.name}.{part.name}"

    # -- space, the daemon's lock -----------------------------------------------------------------------------------

    def free(self) -> tuple[int, int]:
        """Return `(free, total)` bytes of the spool's file system, as an unprivileged writer sees them."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the spool as its only daemon.

        Raises:
            SpoolHeld: another daemon holds the spool; the message names its process.
            SpoolUnusable: the spool belongs to another user, or the lock's file is not a plain file.
        """
        check_owner(self.root)
        try:
            fd = open_own(self.lock_path, os.O_RDWR | os.O_CREAT)
        except ConfigError as error:
            raise SpoolUnusable(str(error)) from error
        try:
            try:
                _lock_exclusively(fd)
            except BlockingIOError as error:
                owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise SpoolHeld(f"spool {self.root}: a daemon holds it already (pid {owner})") from error
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    @property
    def lock_path(self) -> Path:
        """The file that the spool's daemon locks."""
        return self.control / _LOCK

    @property
    def socket(self) -> Path:
        """The socket on which the daemon listens for requests."""
        return self.control / "control.sock"

    @property
    def handoff_socket(self) -> Path:
        """The socket on which the daemon receives handed-over snapshots."""
        return self.control / "handoff.sock"


def is_spool_held(root: Path, lock: tuple[int, int]) -> bool | None:
    """Whether a daemon holds a spool on this machine; None if that cannot be told, as of a spool on another one.

    The spool may be absent or another user's. `lock` has the device and the inode number of its lock.
    """
    try:
        fd = os.open(root / ".tierd" / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != lock:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)
    return False


def _lock_exclusively(fd: int) -> None:
    """Lock a spool, although a process may check the lock, for which it holds it for an instant."""
    for tries_left in reversed(range(_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not tries_left:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


_LOCK = "lock"  # in the spool's own directory
_TRIES, _PAUSE_S = 20, 0.005  # as in `leases`
_ROOMS = ("stage", "fetch", "trash", "recycle", "quarantine", SAVED, RETENTION, TIMELINE, LOCAL_ONLY, ALIVE)
