"""The local tier: list, read, quarantine and remove a node's parts. Synchronous; shared by client and daemon.

Invariant: one rename makes a part visible, after every byte of its directory is durable. One rename makes a part
invisible, before anything in its directory changes. So a reader, or a process that starts after a power cut, finds a
whole part or none. Exception: a part in a lower layer of overlayfs loses its manifest first, because overlayfs cannot
rename its directory.

    <spool>/<run>/<step:012>.<attempt>/<rank:05>-of-<world:05>/…files…, manifest.json
    <spool>/<run>/pins/<step:012>.<attempt>
    <spool>/.tierd/{lock, control.sock, stage/, trash/, recycle/<writer>, quarantine/<run>/<checkpoint>/<part>/}
    <spool>/.tierd/fetch/<run>.<checkpoint>.<part>/    a fetch in progress, or an interrupted one
    <spool>/.tierd/{saved, retention, timeline}/       records of runs (`records`)
    <spool>/.tierd/alive/                              locks of living trainers (`leases`)
    <spool>/.tierd/watched/<run>.json                  units taken from a watched directory (daemon/intake/taken.py)
    <spool>/.tierd/meetings/<launch>/                  messages between ranks of a launch (client/ranks/meeting.py)
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import logging
import operator
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierd.core.errors import (
    ConfigError,
    CorruptChunk,
    ManifestError,
    ObjectNotFound,
    SpoolHeld,
    SpoolUnusable,
    StepRefused,
    TierdError,
)
from tierd.core.ids import CheckpointId, PartId, check_run
from tierd.core.manifest import MANIFEST_NAME, File, Manifest, decode
from tierd.core.seal import MAX_MANIFEST_SIZE
from tierd.spool.conditions import translated
from tierd.spool.direct_io import LARGE
from tierd.spool.directories import childless_below, directories_in, links_in, names_in, parts_below, parts_of_run
from tierd.spool.file_io import make_private, open_plain, read_file, remove, sync_directory
from tierd.spool.leases import ALIVE
from tierd.spool.leases import forget as forget_trainers
from tierd.spool.permissions import check_link, check_owner, check_room, keep_private
from tierd.spool.records import (
    RETENTION,
    SAVED,
    TIMELINE,
    forget,
    forget_committed,
    forget_launch,
    launches,
    mark_saved,
    note_committed,
    saved_at,
)
from tierd.spool.stage import Stage, try_lock

log = logging.getLogger("tierd")


class Spool:
    """A node's local checkpoints, in one directory.

    Args:
        root: the spool's directory.
        write: create the directories that are missing. If False, the spool is only read.

    Raises:
        SpoolUnusable: `root` is no directory, cannot be created or written to, or is accessible to other users.
    """

    def __init__(self, root: str | os.PathLike[str], *, write: bool = True) -> None:
        if not os.fspath(root):
            raise SpoolUnusable("spool '': name a directory")
        self.root = Path(root).absolute()
        _check_name(self.root)
        self.control = self.root / ".tierd"
        self._made = write
        self._ignored: set[str] = set()
        with translated(f"spool {self.root}"):
            if self.root.exists() and not self.root.is_dir():
                raise SpoolUnusable(f"spool {self.root}: it is not a directory; name another, or move that file away")
            if not write:
                return
            _make_durably(self.root.parent)
            self.root.mkdir(mode=0o700, exist_ok=True)  # private, because the files hold model weights
            keep_private(self.root)
            _sync_entry(self.root)  # also if it existed, because its creator may have been killed before syncing
            for directory in (self.control, *(self.control / name for name in _ROOMS)):
                directory.mkdir(mode=0o700, exist_ok=True)
                check_room(directory)
            if not os.access(self.root, os.W_OK | os.X_OK):
                why = (
                    "its file system is mounted read-only"
                    if os.statvfs(self.root).f_flag & os.ST_RDONLY
                    else (f"not writable by uid {os.geteuid()}; change its owner or mode")
                )
                raise SpoolUnusable(f"spool {self.root}: {why}")

    def path(self, part: PartId) -> Path:
        return self.root / part.path

    def _room(self, name: str) -> Path:
        """Return a subdirectory of `.tierd/`. Raises `SpoolUnusable` if a symbolic link has replaced it."""
        path = self.control / name
        check_room(path)
        return path

    # -- reading ----------------------------------------------------------------------------------------------------

    def parts(self, run: str | None = None) -> list[PartId]:
        """List every committed part, of one run or of all runs, in order.

        A symbolic link in place of a run's directory is followed if `check_link` allows it. No other link is followed.

        Raises:
            OSError: the spool cannot be listed.
        """
        runs = [one for one in self.runs() if run in (None, one)]
        found = [part for one in runs for names in parts_of_run(self.root, one) if (part := PartId.parse(*names))]
        self.check_mounted()
        return sorted(found)

    def newest(self, run: str, count: int) -> list[CheckpointId]:
        """List the newest checkpoints of a run that have a directory here, or a link in its place, newest first.

        Only names are compared, because thousands of checkpoints must cost a single directory listing.

        Args:
            run: the run's name.
            count: the largest number of checkpoints to return.

        Raises:
            OSError: the run's directory cannot be listed.
        """
        home = self.root / run
        names = sorted(sorted(names_in(home), reverse=True), key=_attempt, reverse=True)  # by attempt, then step
        found = (one for name in names if (one := CheckpointId.parse(run, name)))
        there = (one for one in found if (home / one.name).is_dir() or (home / one.name).is_symlink())
        newest = list(itertools.islice(there, count))
        self.check_mounted()
        return newest

    def checkpoints(self, run: str) -> list[CheckpointId]:
        """List the checkpoints of a run that have a directory here. Raises OSError if the run cannot be listed."""
        return [one for name in directories_in(self.root / run) if (one := CheckpointId.parse(run, name))]

    def parts_of(self, checkpoint: CheckpointId) -> list[PartId]:
        """List the committed parts of one checkpoint, in order. Raises OSError if the checkpoint cannot be listed."""
        return self.look_into(checkpoint)[0]

    def look_into(self, checkpoint: CheckpointId) -> tuple[list[PartId], bool]:
        """List the committed parts of one checkpoint, and report whether its directory exists and is empty.

        Returns:
            The parts in order, and True if the checkpoint's directory exists without any entry.

        Raises:
            OSError: the directory cannot be listed.
        """
        try:
            with os.scandir(f"{self.root}/{checkpoint.run}/{checkpoint.name}") as entries:
                inside = list(entries)
        except FileNotFoundError:
            return [], False
        pairs = (PartId.parse_name(f"{one.name}.json") for one in inside if one.is_dir(follow_symlinks=False))
        return sorted(PartId(checkpoint, *pair) for pair in pairs if pair), not inside

    def stamp(self, run: str, name: str = "") -> int:
        """Return when an entry was last added to, or removed from, the directory of a run or of a checkpoint.

        Args:
            run: the run's name.
            name: the checkpoint's name; empty for the run's own directory.

        Returns:
            Nanoseconds since 1970 by the file system's clock; 0 if the directory does not exist.

        Raises:
            OSError: the directory's status cannot be read.
        """
        try:
            return os.stat(f"{self.root}/{run}/{name}").st_mtime_ns  # noqa: PTH116  # thousands of times per listing
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def check_mounted(self) -> None:
        """Raise OSError if the spool's file system was unmounted, because a listing then shows an empty mount point."""
        if self._made and not self.control.exists():
            raise FileNotFoundError(errno.ENOENT, "it has vanished: is its file system still mounted?", str(self.root))

    def check_home(self, run: str, only: Collection[CheckpointId] | None = None) -> None:
        """Check that no part of a run is behind a symbolic link that tierd does not follow.

        Args:
            run: the run's name.
            only: check these checkpoints only.

        Raises:
            SpoolUnusable: such a link exists; the message names the link and the remedy.
            OSError: the directories cannot be listed.
        """
        self.check_way(run)
        home = self.root / run
        names = links_in(home) if only is None else [one.name for one in only if (home / one.name).is_symlink()]
        inside = [home / name for name in names]
        for checkpoint in directories_in(home) if only is None else [one.name for one in only]:
            inside += [home / checkpoint / name for name in links_in(home / checkpoint)]
        for link in inside:
            raise SpoolUnusable(
                f"{link}: a symbolic link to {link.readlink()}; below a run's directory none is followed. Put the "
                "directory itself there, or remove the link: a tier's copy is then used, or an older checkpoint"
            )

    def runs(self) -> list[str]:
        """List the directories that may belong to runs, and the links to such directories that are followed.

        Every other link is logged once per `Spool`, because a daemon lists the runs repeatedly.
        """
        found = directories_in(self.root)
        for name in links_in(self.root):
            try:
                check_link(self.root / name)
                found.append(name)
            except SpoolUnusable as error:
                if str(error) not in self._ignored:
                    self._ignored.add(str(error))
                    log.warning("%s", error)
        return found

    def check_way(self, run: str) -> None:
        """Raise `SpoolUnusable` if a run's directory is a symbolic link that tierd does not follow."""
        if (home := self.root / run).is_symlink():
            check_link(home)

    def has(self, part: PartId) -> bool:
        """Whether the part was committed. Also False if the disk gives an error, because `stage` checks again."""
        try:
            return self.path(part).exists()
        except OSError:
            return False

    def attempts(self, run: str) -> set[str]:
        """List every attempt of `run` that left a checkpoint or a quarantined checkpoint here. Only names are read."""
        homes = [self.root / run] if run in self.runs() else []
        names = {_attempt(name) for home in (*homes, self._room("quarantine") / run) for name in names_in(home)}
        self.check_mounted()
        return {name for name in names if CheckpointId.parse(run, f"{0:012}.{name}")}

    def manifest(self, part: PartId) -> Manifest:
        """Read the manifest of a committed part.

        Raises:
            ObjectNotFound: the part is not here.
            ManifestError: the part is here, and its manifest is missing, damaged or unsafe.
            FormatTooNew: a newer tierd wrote the manifest.
        """
        return self._read_manifest(self.path(part), part)

    def manifest_stamp(self, part: PartId) -> int:
        """Return a number that changes when a part's manifest is replaced, as by a repair; 0 if it is missing."""
        try:
            return (self.path(part) / MANIFEST_NAME).lstat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def saved_stamp(self, run: str, attempt: str) -> int:
        """Return a number that changes with every save of a launch on this node; 0 if the launch saved nothing here."""
        return saved_at(self.control, run, attempt)

    def read(
        self, part: PartId, manifest: Manifest, read: Callable[[Path, File], memoryview] = read_file
    ) -> dict[str, memoryview]:
        """Read and verify every file of a part.

        Small files are read first, because their content may decide how the caller reads the large files.

        Args:
            part: the part to read.
            manifest: the part's manifest.
            read: reads one file as `read_file` does.

        Returns:
            By path inside the part, each file's bytes.

        Raises:
            ObjectNotFound: the part was removed.
            CorruptChunk, OSError: as `read_file` raises them.
        """
        home = self.path(part)
        try:
            files = sorted(manifest.files, key=lambda file: file.size)
            return {file.path: read(home / file.path, file) for file in files}
        except CorruptChunk:
            if not home.is_dir():
                raise ObjectNotFound(f"{part} is not in the spool any more") from None
            raise

    def _read_manifest(self, home: Path, part: PartId) -> Manifest:
        try:
            fd = open_plain(home / MANIFEST_NAME)
        except CorruptChunk as error:
            if not home.is_dir():
                raise ObjectNotFound(f"{part} is not in the spool") from error
            raise ManifestError(f"manifest of {part}: {error}") from error
        with os.fdopen(fd, "rb") as file:  # bounded by the file's size, because `read` allocates its argument at once
            return decode(file.read(min(os.fstat(fd).st_size, MAX_MANIFEST_SIZE) + 1), part)

    # -- writing ----------------------------------------------------------------------------------------------------

    def stage(self, part: PartId) -> Stage:
        """Create a stage for a `part` that is saved on this node.

        Raises:
            StepRefused: the part was committed before.
            SpoolUnusable: the run's directory is a symbolic link that tierd does not follow.
        """
        self.check_way(part.checkpoint.run)
        if self.path(part).exists():
            raise StepRefused(f"{part} is already committed; a checkpoint is never overwritten")
        mark_saved(self.control, part)
        note = functools.partial(note_committed, self.control, part)
        return Stage(self.control / "stage", part, self.path(part), note)

    def remove(self, parts: Iterable[PartId], reuse: Collection[str] = ()) -> None:
        """Delete the local copies of these parts, and no part that another rank commits meanwhile.

        Only `core/planning/plan.py` decides to call this.

        Args:
            parts: the parts to delete.
            reuse: writers whose next save may overwrite the blocks of their part's largest file. Overwriting blocks is
                faster than allocating new ones.
        """
        for part in parts:
            grave = self._bury(self.path(part))
            if grave is None:
                continue
            forget_committed(self.control, part)
            self._drop_if_empty(self.path(part).parent)
            if part.writer in reuse:
                self._recycle(grave, part.writer)
            _delete(grave)

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

    def _recycle(self, home: Path, lane: str) -> None:
        """Keep the largest file under `home` for overwriting, if it is at least `LARGE` bytes.

        The writer that claims the file checks that no other process holds it.
        """
        try:
            target = self._room("recycle") / lane
            files = (Path(directory, name) for directory, _, names in os.walk(home) for name in names)
            plain = {path: found.st_size for path in files if stat.S_ISREG((found := path.lstat()).st_mode)}
            largest = max(plain, key=plain.__getitem__, default=None)
            if largest and plain[largest] >= LARGE and largest.lstat().st_nlink == 1 and not target.exists():
                largest.rename(target)
        except (SpoolUnusable, OSError):  # the caller then deletes the file with the rest of the part
            pass

    def quarantine(self, part: PartId) -> None:
        """Move a part to the quarantine, because its bytes are proven corrupt and no tier can repair it."""
        home = self.path(part)
        aside = self._room("quarantine") / part.path
        if not home.is_dir():
            return  # quarantined before: that directory is the only copy left
        if aside.exists():
            self._trash(aside)
        make_private(aside.parent)
        try:
            home.rename(aside)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copytree(home, aside, symlinks=True)  # overlayfs, as in `_take_apart`
            self._trash(home)
        sync_directory(aside.parent)
        _sync_left(home.parent)
        self._drop_if_empty(home.parent)

    def _drop_if_empty(self, checkpoint: Path) -> None:
        for directory in (checkpoint, checkpoint.parent / _PINS, checkpoint.parent):
            try:
                # Succeeds only after the directory's last part, or the run's last checkpoint, was removed.
                directory.rmdir()
            except OSError:
                pass

    def quarantined(self) -> dict[PartId, Manifest | None]:
        """Return the quarantined parts with their manifests; None for a manifest that cannot be read."""
        found: dict[PartId, Manifest | None] = {}
        base = self._room("quarantine")
        for run, checkpoint, name in parts_below(base):
            part = PartId.parse(run, checkpoint, name)
            if part:
                try:
                    found[part] = self._read_manifest(base / part.path, part)
                except (TierdError, OSError):
                    found[part] = None
        return found

    def fetching(self, part: PartId) -> Path:
        """Return the directory in which a fetch assembles a part.

        The path is the same every time, so that the next fetch finds the chunks of an interrupted one.
        """
        return self.control / "fetch" / f"{part.checkpoint.run}.{part.checkpoint.name}.{part.name}"

    def leftovers(self, childless: Iterable[CheckpointId] | None = None) -> list[str]:
        """List leftovers by name, for `discard`.

        Leftovers are stages and fetches whose writer has died, half-finished removals, and empty directories of runs
        and checkpoints for which no writer is committing a part.

        Args:
            childless: the checkpoints whose directories are empty, if the caller knows them.
        """
        found = [f"trash/{path.name}" for path in self._room("trash").iterdir()]
        if childless is None:
            childless = [one for pair in childless_below(self.root) if (one := CheckpointId.parse(*pair))]
        empty = [f"{bare.run}/{bare.name}" for bare in childless]
        empty += self._vacant()
        living: list[str] = []  # their commits may have made an empty directory and wait for a slow disk to sync it
        for room in _LOCKED:
            for path in self._room(room).iterdir():
                fd = try_lock(path)
                if fd is not None:
                    os.close(fd)
                    found.append(f"{room}/{path.name}")
                else:
                    living.append(path.name)
        found += [
            f"{_EMPTY}/{name}"
            for name in empty
            if not any(one.startswith(f"{name.replace('/', '.')}.") for one in living)
        ]
        return sorted(found)

    def _vacant(self) -> list[str]:
        """List the runs whose directories are empty, or hold only an empty directory for pins."""
        found = []
        for run in directories_in(self.root):
            try:
                check_run(run)
                inside = list(itertools.islice((self.root / run).iterdir(), 2))
                if not inside or ([path.name for path in inside] == [_PINS] and not any(inside[0].iterdir())):
                    found.append(run)
            except (ConfigError, OSError):  # not a run's name, or removed meanwhile, or a plain file
                continue
        return found

    def discard(self, name: str) -> None:
        """Remove one named object from the spool.

        Args:
            name: a name from `leftovers`, a quarantined part (``quarantine/<run>/<checkpoint>/<part>``), a pin
                (``pins/<run>/<checkpoint>``), or the record that a launch was saved here (``saved/<run>/<attempt>``).
        """
        path = self.control / name
        room, _, rest = name.partition("/")
        if room == _EMPTY:  # safe, because a writer whose directory is removed before its rename makes it again
            home = self.root / rest
            left_ns = home.stat().st_mtime_ns if home.is_dir() else 0
            for directory in (home / _PINS, home):
                try:
                    directory.rmdir()
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                        raise
            if "/" in rest:
                self._drop_if_empty(home)
            # The records of a saved launch are kept, because it may have work left.
            elif not home.exists() and rest not in launches(self.control, [rest]):
                forget(self.control, rest, left_ns)
                forget_trainers(self.control, rest)
            return
        if room == SAVED:
            forget_launch(self.control, *rest.split("/"))
            return
        if room == _PINS:
            run, _, checkpoint = rest.partition("/")
            if (pin := CheckpointId.parse(run, checkpoint)) is not None:
                self.pin(pin, pinned=False)
            return
        if room not in _LOCKED:
            self._trash(path)
            return
        fd = try_lock(path)  # held during the removal, so that no writer takes a stage that is being removed
        if fd is not None:
            try:
                self._trash(path)
            finally:
                os.close(fd)

    def _trash(self, path: Path) -> None:
        grave = self._bury(path)
        if grave is not None:
            _delete(grave)

    def _bury(self, path: Path) -> Path | None:
        """Make a path invisible for good by moving it to the trash; None if the path does not exist."""
        grave = self._room("trash") / secrets.token_hex(8)
        try:
            path.rename(grave)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _take_apart(path, grave)
        _sync_left(path.parent)
        return grave

    # -- pins, space, the daemon's lock -----------------------------------------------------------------------------

    def pins(self) -> set[CheckpointId]:
        found = ((run, path.name) for run in self.runs() for path in (self.root / run).glob("pins/*"))
        return {pin for names in found if (pin := CheckpointId.parse(*names))}

    def pin(self, checkpoint: CheckpointId, *, pinned: bool) -> None:
        """Pin a checkpoint, so that retention keeps it, or remove the pin."""
        check_owner(self.root)
        self.check_way(checkpoint.run)
        path = self.root / checkpoint.run / _PINS / checkpoint.name
        while pinned:
            make_private(path.parent)
            with suppress(FileNotFoundError):  # `discard` removed the empty directory meanwhile
                path.touch(mode=0o600)
                break
        else:
            path.unlink(missing_ok=True)
        if path.parent.is_dir():
            sync_directory(path.parent)

    def free(self) -> tuple[int, int]:
        """Return `(free, total)` bytes of the spool's file system, as an unprivileged writer sees them."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the spool as its only daemon.

        Raises:
            SpoolHeld: another daemon holds the spool; the message names its process.
            SpoolUnusable: the spool belongs to another user.
        """
        check_owner(self.root)
        fd = os.open(self.control / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise SpoolHeld(f"spool {self.root}: a daemon holds it already (pid {owner})") from error
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    @property
    def socket(self) -> Path:
        """The socket on which the daemon listens for requests."""
        return self.control / "control.sock"

    @property
    def handoff_socket(self) -> Path:
        """The socket on which the daemon receives handed-over snapshots."""
        return self.control / "handoff.sock"


def _check_name(root: Path) -> None:
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


def _make_durably(directory: Path) -> None:
    """Create a directory and its missing parents durably, so that a power cut leaves their content reachable."""
    if not directory.is_dir():
        _make_durably(directory.parent)
        directory.mkdir(mode=0o755, exist_ok=True)  # not writable for others, because they could then replace the spool
        _sync_entry(directory)


def _sync_entry(path: Path) -> None:
    try:
        sync_directory(path.parent)
    except OSError as error:
        # A directory that this user cannot read was created by another user, who syncs it. Some file systems cannot
        # sync.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP):
            raise


_attempt = operator.itemgetter(slice(13, None))  # the attempt in the name of a checkpoint's directory
_ROOMS = ("stage", "fetch", "trash", "recycle", "quarantine", SAVED, RETENTION, TIMELINE, ALIVE)
_LOCKED = ("stage", "fetch")  # subdirectories of `.tierd/` where a directory's lock shows that its writer lives
# The prefix that `leftovers` gives an empty directory of a checkpoint or run; no directory has this name.
_EMPTY = "empty"
_PINS = "pins"  # the directory of pins inside a run's directory


def _take_apart(path: Path, grave: Path) -> None:
    """Remove a directory that cannot be renamed, because overlayfs cannot rename a lower layer's directory.

    The manifest is moved to `grave` first, so that no reader takes the half-removed part for a whole one.
    """
    grave.mkdir(mode=0o700)
    with suppress(FileNotFoundError, NotADirectoryError):
        (path / MANIFEST_NAME).rename(grave / MANIFEST_NAME)
        sync_directory(path)
    remove(path)


def _delete(grave: Path) -> None:
    """Delete a directory or file in the trash, as far as the file system permits."""
    with suppress(OSError):
        remove(grave, best_effort=True)


def _sync_left(directory: Path) -> None:
    """Make a removal from `directory` durable. If `directory` was removed too, sync its nearest existing parent."""
    while True:
        try:
            sync_directory(directory)
            return
        except FileNotFoundError:
            directory = directory.parent
