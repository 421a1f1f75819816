"""The local tier: what lies in it, reading, quarantine, removal. Sync; shared by client and daemon.

Law: a part becomes visible by one rename of a directory whose every byte is durable, and vanishes by one rename before
anything in it is touched. So a reader, or a start after a power cut, finds a whole part or none. (What lies in a lower
layer of overlayfs loses its manifest first, because no directory can be renamed there.)

    <spool>/<run>/<step:012>.<attempt>/<rank:05>-of-<world:05>/…files…, manifest.json
    <spool>/<run>/pins/<step:012>.<attempt>
    <spool>/.tierd/{lock, control.sock, stage/, trash/, recycle/<lane>, quarantine/<run>/<checkpoint>/<part>/}
    <spool>/.tierd/fetch/<run>.<checkpoint>.<part>/, on its way from a tier, or left there half-way
    <spool>/.tierd/{saved, retention, timeline}/, what `records` keeps of runs; alive/, whose trainers live (`living`)
    <spool>/.tierd/meetings/<launch>/, what the ranks of a launch on this node tell each other (client/meeting.py)
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierd.core.errors import (
    ConfigError,
    CorruptChunk,
    ManifestError,
    ObjectNotFound,
    SpoolFull,
    SpoolHeld,
    SpoolUnusable,
    StepRefused,
    TierdError,
)
from tierd.core.ids import CheckpointId, PartId, check_run
from tierd.core.manifest import MANIFEST_NAME, Manifest, decode
from tierd.core.seal import MAX_MANIFEST_SIZE
from tierd.device import LARGE
from tierd.living import ALIVE
from tierd.living import forget as forget_trainers
from tierd.persist import make_private, open_plain, read_file, remove, sync_directory
from tierd.records import (
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
from tierd.stage import Stage, try_lock
from tierd.trust import check_link, check_owner, check_room, keep_private

log = logging.getLogger("tierd")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn an `OSError` of the spool's file system into the condition that it states."""
    try:
        yield
    except OSError as error:
        raise condition(error, doing) from error


def condition(error: OSError, doing: str) -> TierdError:
    """The condition that an `OSError` of the spool's file system states."""
    text = f"{doing}: {error.strerror or error}"
    if is_full(error):
        return SpoolFull(f"{text}; free space on that file system, or keep less in the spool")
    return SpoolUnusable(text)


def is_full(error: OSError) -> bool:
    """Whether an `OSError` says that the disk, or this user's quota of it, is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class Spool:
    """A node's local checkpoints, in one directory.

    Args:
        write: make what is missing; without, a spool is only looked at.

    Raises:
        SpoolUnusable: `root` is no directory, cannot be made, cannot be written to, or is not this user's alone.
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
            self.root.mkdir(mode=0o700, exist_ok=True)  # weights are nobody else's business
            keep_private(self.root)
            _sync_entry(self.root)  # even if it was there: whoever made it may have been killed before this
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
        """A directory of tierd's own. Raises `SpoolUnusable` where a link lies in its place by now."""
        path = self.control / name
        check_room(path)
        return path

    # -- reading ----------------------------------------------------------------------------------------------------

    def parts(self) -> list[PartId]:
        """Every committed part, in order. Raises OSError where that cannot be told.

        A link in the place of a run's directory is followed where `check_link` allows it, and no other.
        """
        runs = self._runs()
        found = [part for run in runs for names in _inside(self.root, run) if (part := PartId.parse(*names))]
        if self._made and not self.control.exists():  # what was listed is what lies under a file system that is gone
            raise FileNotFoundError(errno.ENOENT, "it has vanished: is its file system still mounted?", str(self.root))
        return sorted(found)

    def check_home(self, run: str) -> None:
        """Check that nothing of a run lies behind a link that is not followed.

        Raises:
            SpoolUnusable: it does; names the link, and what to do.
            OSError: that cannot be told.
        """
        self.check_way(run)
        home = self.root / run
        inside = [home / name for name in _links(home)]
        for checkpoint in _directories(home):
            inside += [home / checkpoint / name for name in _links(home / checkpoint)]
        for link in inside:
            raise SpoolUnusable(
                f"{link}: a symbolic link to {link.readlink()}; below a run's directory none is followed. Put the "
                "directory itself there, or remove the link: a tier's copy is then used, or an older checkpoint"
            )

    def _runs(self) -> list[str]:
        """The directories that may be runs', and the links to such that are followed. Others are logged once, because
        a daemon looks again and again."""
        found = _directories(self.root)
        for name in _links(self.root):
            try:
                check_link(self.root / name)
                found.append(name)
            except SpoolUnusable as error:
                if str(error) not in self._ignored:
                    self._ignored.add(str(error))
                    log.warning("%s", error)
        return found

    def check_way(self, run: str) -> None:
        """Raise `SpoolUnusable` where a link that is not followed lies in the place of a run's directory."""
        if (home := self.root / run).is_symlink():
            check_link(home)

    def has(self, part: PartId) -> bool:
        """Whether the part was committed; False also where the disk does not say, since staging asks again."""
        try:
            return self.path(part).exists()
        except OSError:
            return False

    def attempts(self, run: str) -> set[str]:
        """Every attempt of `run` that left a checkpoint or a quarantined part here."""
        found = {part.checkpoint for part in (*self.parts(), *self.quarantined())}
        return {checkpoint.attempt for checkpoint in found if checkpoint.run == run}

    def manifest(self, part: PartId) -> Manifest:
        """The manifest of a committed part.

        Raises:
            ObjectNotFound: the part is not here.
            ManifestError: it is, and its manifest is missing, damaged or unsafe.
            FormatTooNew: written by a newer tierd.
        """
        return self._read_manifest(self.path(part), part)

    def manifest_stamp(self, part: PartId) -> int:
        """A number that changes when a part's manifest is replaced, as healing does; 0 where it is missing."""
        try:
            return (self.path(part) / MANIFEST_NAME).lstat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def saved_stamp(self, run: str, attempt: str) -> int:
        """The same of a launch that was saved here: it changes with every save."""
        return saved_at(self.control, run, attempt)

    def read(self, part: PartId, manifest: Manifest) -> dict[str, memoryview]:
        """Every file of a part, verified. Raises as `read_file` does, and `ObjectNotFound` when the part is gone."""
        home = self.path(part)
        try:
            return {file.path: read_file(home / file.path, file) for file in manifest.files}
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
        with os.fdopen(fd, "rb") as file:  # no more than there is, since so much memory is taken at once
            return decode(file.read(min(os.fstat(fd).st_size, MAX_MANIFEST_SIZE) + 1), part)

    # -- writing ----------------------------------------------------------------------------------------------------

    def stage(self, part: PartId) -> Stage:
        """A new stage for a `part` that is saved here; refuses at once what was committed before.

        Raises:
            StepRefused: it was committed before.
            SpoolUnusable: the run's directory is a link that is not followed.
        """
        self.check_way(part.checkpoint.run)
        if self.path(part).exists():
            raise StepRefused(f"{part} is already committed; a checkpoint is never overwritten")
        mark_saved(self.control, part)
        note = functools.partial(note_committed, self.control, part)
        return Stage(self.control / "stage", part, self.path(part), note)

    def remove(self, parts: Iterable[PartId], reuse: Collection[str] = ()) -> None:
        """Delete the local copies of these parts, and nothing that another rank commits meanwhile. Decided by
        `core/plan.py` alone.

        Args:
            reuse: lanes whose next save may overwrite the blocks of their largest file here, which is faster than
                getting new ones.
        """
        for part in parts:
            grave = self._bury(self.path(part))
            if grave is None:
                continue
            forget_committed(self.control, part)
            self._drop_if_empty(self.path(part).parent)
            if part.lane in reuse:
                self._recycle(grave, part.lane)
            _delete(grave)

    def recycled(self, part: PartId) -> Path | None:
        """A file that the writer of `part` may overwrite. It is taken by a rename, so by one writer only."""
        path = self.control / "recycle" / part.lane
        try:
            return path if stat.S_ISREG(path.lstat().st_mode) else None
        except FileNotFoundError:
            return None

    def drop_recycled(self, keep: Collection[str]) -> None:
        """Delete what waits to be overwritten, but for these lanes."""
        for path in self._room("recycle").iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def _recycle(self, home: Path, lane: str) -> None:
        """Set the largest file under `home` aside, if it is worth it; whether somebody holds it, its taker looks."""
        try:
            target = self._room("recycle") / lane
            files = (Path(directory, name) for directory, _, names in os.walk(home) for name in names)
            plain = {path: found.st_size for path in files if stat.S_ISREG((found := path.lstat()).st_mode)}
            largest = max(plain, key=plain.__getitem__, default=None)
            if largest and plain[largest] >= LARGE and largest.lstat().st_nlink == 1 and not target.exists():
                largest.rename(target)
        except (SpoolUnusable, OSError):  # then it is deleted like the rest
            pass

    def quarantine(self, part: PartId) -> None:
        """Set a part aside whose bytes are proven corrupt and which no tier can repair."""
        home = self.path(part)
        aside = self._room("quarantine") / part.path
        if not home.is_dir():
            return  # set aside before: what lies there is all that is left of it
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
                directory.rmdir()  # its last part went, and perhaps the run's last checkpoint
            except OSError:
                pass

    def quarantined(self) -> dict[PartId, Manifest | None]:
        """Parts that were set aside, with their manifests where those can still be read."""
        found: dict[PartId, Manifest | None] = {}
        base = self._room("quarantine")
        for run, checkpoint, name in _descend(base):
            part = PartId.parse(run, checkpoint, name)
            if part:
                try:
                    found[part] = self._read_manifest(base / part.path, part)
                except (TierdError, OSError):
                    found[part] = None
        return found

    def fetching(self, part: PartId) -> Path:
        """Where a part is put together from the tiers: the same place every time, so that what is there is found."""
        return self.control / "fetch" / f"{part.checkpoint.run}.{part.checkpoint.name}.{part.name}"

    def leftovers(self) -> list[str]:
        """Stages and fetches whose writer is gone, what a removal left half-way, and directories of checkpoints that
        hold no part and that nobody writes one for; by name, for `discard`."""
        found = [f"trash/{path.name}" for path in self._room("trash").iterdir()]
        empty = [f"{run}/{name}" for run, name in _childless(self.root) if CheckpointId.parse(run, name)]
        empty += self._vacant()
        living: list[str] = []  # whose commit may have made such a directory, and wait for a slow disk to sync it
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
        """Runs whose directories hold nothing any more, but perhaps an empty one for pins."""
        found = []
        for run in _directories(self.root):
            try:
                check_run(run)
                inside = list((self.root / run).iterdir())
                if not inside or ([path.name for path in inside] == [_PINS] and not any(inside[0].iterdir())):
                    found.append(run)
            except (ConfigError, OSError):  # it is no run's, it goes just now, or a file lies there
                continue
        return found

    def discard(self, name: str) -> None:
        """Remove a leftover, a quarantined part (``quarantine/<run>/<checkpoint>/<part>``), a pin
        (``pins/<run>/<checkpoint>``), or what says that a launch was saved here (``saved/<run>/<attempt>``)."""
        path = self.control / name
        room, _, rest = name.partition("/")
        if room == _EMPTY:  # a writer whose directory goes before its rename makes it anew
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
            elif not home.exists() and rest not in launches(self.control, [rest]):  # what is left to do of one stays
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
        fd = try_lock(path)  # held while it goes, so that no writer takes a stage which is being removed
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
        """Make what lies there invisible, for good; None when it is gone."""
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
        found = ((run, path.name) for run in self._runs() for path in (self.root / run).glob("pins/*"))
        return {pin for names in found if (pin := CheckpointId.parse(*names))}

    def pin(self, checkpoint: CheckpointId, *, pinned: bool) -> None:
        """Make retention leave a checkpoint alone, or not any more."""
        check_owner(self.root)
        self.check_way(checkpoint.run)
        path = self.root / checkpoint.run / _PINS / checkpoint.name
        while pinned:
            make_private(path.parent)
            with suppress(FileNotFoundError):  # the empty directory was tidied away just now
                path.touch(mode=0o600)
                break
        else:
            path.unlink(missing_ok=True)
        if path.parent.is_dir():
            sync_directory(path.parent)

    def free(self) -> tuple[int, int]:
        """`(free, total)` bytes of the spool's file system, as an unprivileged writer has them."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the spool as its only daemon.

        Raises:
            SpoolHeld: another daemon holds it; names its process.
            SpoolUnusable: it is another user's.
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
        """Where the daemon listens."""
        return self.control / "control.sock"

    @property
    def handoff_socket(self) -> Path:
        """Where the daemon takes snapshots over."""
        return self.control / "handoff.sock"


def _check_name(root: Path) -> None:
    """Raise `SpoolUnusable` where a path cannot be said in JSON, which daemon, client and command line write it in."""
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
    """Make a directory and what lacks above it, such that a power cut leaves what is put there in reach."""
    if not directory.is_dir():
        _make_durably(directory.parent)
        directory.mkdir(mode=0o755, exist_ok=True)  # who may write there may replace the spool
        _sync_entry(directory)


def _sync_entry(path: Path) -> None:
    try:
        sync_directory(path.parent)
    except OSError as error:
        # Not ours to read, and so made by somebody else; or of a file system that has nothing to sync.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP):
            raise


_ROOMS = ("stage", "fetch", "trash", "recycle", "quarantine", SAVED, RETENTION, TIMELINE, ALIVE)
_LOCKED = ("stage", "fetch")  # rooms where a directory's lock says that its writer lives
_EMPTY = "empty"  # no room: what `leftovers` calls a checkpoint's or run's directory that was left behind empty
_PINS = "pins"  # a run's directory of its pins; no room


def _descend(base: Path) -> Iterator[tuple[str, str, str]]:
    """`(run, checkpoint, part)` names of the directories three levels under `base`; races with removal are no error."""
    for run in _directories(base):
        yield from _inside(base, run)


def _inside(base: Path, run: str) -> Iterator[tuple[str, str, str]]:
    for checkpoint in _directories(base / run):
        for part in _directories(base / run / checkpoint):
            yield run, checkpoint, part


def _links(path: Path) -> list[str]:
    """The symbolic links in a directory."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_symlink() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _childless(base: Path) -> Iterator[tuple[str, str]]:
    """`(run, checkpoint)` names of the empty directories two levels under `base`."""
    for run in _directories(base):
        for checkpoint in _directories(base / run):
            try:
                with os.scandir(base / run / checkpoint) as entries:
                    if next(entries, None) is not None:
                        continue
            except FileNotFoundError:
                continue
            yield run, checkpoint


def _take_apart(path: Path, grave: Path) -> None:
    """Remove a directory that cannot be renamed, because overlayfs renames none of a lower layer.

    The manifest is moved to `grave` first, so that a part whose files are going is not taken for a whole one.
    """
    grave.mkdir(mode=0o700)
    with suppress(FileNotFoundError, NotADirectoryError):
        (path / MANIFEST_NAME).rename(grave / MANIFEST_NAME)
        sync_directory(path)
    remove(path)


def _delete(grave: Path) -> None:
    """Delete what was buried, as far as it goes: it may be no directory."""
    with suppress(OSError):
        remove(grave, best_effort=True)


def _sync_left(directory: Path) -> None:
    """Make durable that something has left `directory`, which may itself be gone since, with its last other part."""
    while True:
        try:
            sync_directory(directory)
            return
        except FileNotFoundError:
            directory = directory.parent


def _directories(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
