"""The directory tree of `FileStore`: its root, which each call checks, and its objects and temp files. Synchronous.

Invariant: no call writes to, or reads from, a directory other than the root that was opened first, and none follows a
symlink inside the root.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tierd.core.errors import DeleteRefused, StoreRefused, StoreUnavailable, TierdError
from tierd.spool.direct_io import PIECE, write_pages
from tierd.stores.base import ObjectInfo, check_size
from tierd.stores.file_descriptors import (
    DIRECTORY,
    ScanState,
    closing,
    descend,
    digest_file,
    list_directory,
    parent,
    remove_unlocked,
    stat_objects,
    sync_directory,
    take_lock,
    unlink,
)
from tierd.stores.mounted_directories import enclosing_spool

STAT_PAGE = 256
_TMP = ".tmp"
_TMP_NAME = re.compile(r"[0-9a-f]{32}")
_SWEEP = 1000  # leftover temp files that one sweep examines, at most
_PUT_TRIES = 8  # attempts, because a delete may remove the directory and a sweep the temp file while a put runs
_SMALL = 1 << 20  # bytes
# Errors of a file system that has no hard links, or none from one directory to another, or permits none.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV)
_UNDELETABLE = (errno.EPERM, errno.EACCES)  # errors for an entry that may not be removed


class FileTree:
    """The objects below the directory `root`, which must exist. Opens nothing until the first call.

    `remembered` is how many directories are known to be durable, because a daemon that never prunes would remember all
    for years. `trial` is as for `FileStore`.
    """

    def __init__(self, root: Path, *, trial: bool, remembered: int = 10_000) -> None:
        self._path = root
        self._trial = f"{_TMP}-{secrets.token_hex(8)}" if trial else ""  # its own directory for temp files
        self._tmp = _TMP
        self._opening = threading.Lock()
        self.pieces = 0  # written and read so far
        self._has_existed = False  # whether the root has existed
        self._marked = False  # whether the root has had its mark
        self._swept = False
        self._remembered = remembered
        self._durable: set[str] = set()  # directories whose own entries are known to be durable

    def count_piece(self) -> None:
        """Count a piece of an object that was written or read, which shows that the file system answers."""
        self.pieces += 1

    @property
    def is_trial_made(self) -> bool:
        """Whether a put made the trial's own directory for temp files."""
        return self._tmp == self._trial

    @contextmanager
    def _root(self) -> Iterator[int]:
        """Open the root's descriptor, after checking that the path still leads to the same root."""
        try:
            root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if self._has_existed:
                raise StoreUnavailable(f"{self._path} has vanished: is its file system still mounted?") from None
            raise StoreRefused(f"{self._path} does not exist: mount it; mkdir only for a new tier") from None
        except NotADirectoryError:  # not an absent object, of which it would be the sign further down
            raise StoreRefused(f"{self._path} is not a directory, or lies below a file; remove that file") from None
        with closing(root):
            if not self._has_existed and (spool := enclosing_spool(self._path)):
                raise StoreRefused(
                    f"{self._path}: a tier must not be the spool {spool} or lie in it, because each would delete what "
                    "is the other's: name a tier's directory, or the spool by --spool"
                )
            # Before the check, because another thread's put may make the mark after it.
            self._has_existed, marked = True, self._marked
            if _exists(_TMP, root):
                self._marked = True
            elif marked:
                raise StoreUnavailable(
                    f"{self._path} has lost its {_TMP}: is its file system still mounted? "
                    f"If this is the right place, mkdir {self._path / _TMP}"
                )
            yield root

    def open_object(self, key: str, flags: int) -> int:
        """Open an object for aiofiles."""
        *parents, name = key.split("/")
        try:
            with self._root() as root, descend(root, parents) as parent:
                # O_NONBLOCK, because a planted FIFO must be refused below and not block the open
                fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        except (NotADirectoryError, FileNotFoundError) as error:
            raise FileNotFoundError(errno.ENOENT, "no such object") from error
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a regular file")

    def list_keys(self, directory: str, prefix: str, after: str) -> Sequence[str]:
        """List the entries of `directory` that a scan may show. A root that vanished raises, and never yields fewer
        entries.
        """
        with self._root() as root:
            listed = list_directory(root, directory, prefix, after)
            return listed.keys if listed else []

    def list_page(self, walk: ScanState, prefix: str, after: str, limit: int) -> Sequence[ObjectInfo]:
        """Describe a scan's next objects in one thread call, because most directories are small; this advances `walk`.

        Where a directory was removed since the one above it was listed, that one is listed again from there. Else a
        scan could miss both the checkpoint that was deleted and the newer one that is why. `limit` is how many names
        are looked at, so that a call ends soon; the objects beside the last one may follow.
        """
        infos, pending = [], walk.pending
        with self._root() as root:
            while pending and limit > 0:
                if not (first := pending.pop()) or first.endswith("/"):
                    listed = list_directory(root, first, prefix, after, STAT_PAGE)
                    if walk.is_stale(first, listed):
                        walk.forget_entries(above := parent(first[:-1]))
                        passed = max(after, f"{first}\x7f")  # '\x7f' sorts after every character of a key
                        listed = list_directory(root, above, prefix, passed, STAT_PAGE)
                    limit -= 1
                    if listed is not None:
                        pending += reversed(listed.keys)
                        infos += listed.infos
                        limit -= len(listed.infos)
                    continue
                directory, page = parent(first), [first]
                while pending and len(page) < STAT_PAGE and parent(pending[-1]) == directory:
                    page.append(pending.pop())
                infos += stat_objects(root, directory, page)
                limit -= len(page)
        return infos

    def get_small(self, key: str) -> bytes | None:
        """Read a small object, as most manifests are, in one thread call instead of three; None if it is not small."""
        with closing(self.open_object(key, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            if (size := os.fstat(fd).st_size) > _SMALL:
                return None
            check_size(size, f"{self._path}: get {key}")
            data = b"".join(iter(lambda: os.read(fd, _SMALL), b""))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return data

    def get_each_small(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read objects as `get_small`, in one thread call; None also for those that cannot be read."""
        objects: list[bytes | None] = []
        for key in keys:
            try:
                objects.append(self.get_small(key))
            except (OSError, TierdError):
                objects.append(None)
        return objects

    def digest(self, key: str) -> tuple[int, str]:
        with closing(self.open_object(key, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            size = os.fstat(fd).st_size
            check_size(size, f"{self._path}: digest {key}")
            digest = digest_file(fd, size, self.count_piece)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return size, digest

    def put(self, key: str, data: memoryview, stop: threading.Event, *, replace: bool = True) -> bool:
        """Put an object, and return True; False if there is one, and it is not to be replaced."""
        with self._root() as root:
            self._prepare(root)
            for _ in range(_PUT_TRIES):
                try:
                    return self._put_once(root, key, data, stop, replace=replace)
                except FileNotFoundError:
                    continue
        raise StoreUnavailable(f"{self._path}: put {key}: its directory, or the temp file, keeps vanishing")

    def _put_once(self, root: int, key: str, data: memoryview, stop: threading.Event, *, replace: bool) -> bool:
        *parents, name = key.split("/")
        temporary, flags = secrets.token_hex(16), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with (
            descend(root, [self._tmp]) as tmp,
            closing(os.open(temporary, flags, _mode(root) & 0o666, dir_fd=tmp)) as fd,
        ):
            try:
                take_lock(fd)  # held while the descriptor is open, so that a sweep knows that its writer lives
                for start in range(0, len(data), PIECE):
                    if not stop.is_set():
                        write_pages(fd, data[start : start + PIECE], start)
                        self.count_piece()
                if stop.is_set():
                    return False
                os.fsync(fd)  # never retried, because after an error the kernel marks the lost pages clean
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that a read-back comes from the device
                with self._make_directory(root, parents) as parent:
                    if stop.is_set():  # if it is set after this check, all the data was read before it could change
                        return False
                    is_put = _publish(temporary, name, tmp, parent, replace=replace)
                    sync_directory(parent)
                    return is_put
            finally:
                self._remove_temporary(temporary, tmp)

    def _remove_temporary(self, name: str, tmp: int) -> None:
        """Remove a put's temp file, unless a rename has moved it already.

        If that fails, the next put sweeps again, because a daemon that runs for months must not collect one temp file
        per I/O error.
        """
        try:
            unlink(name, tmp)
        except OSError:
            self._swept = False
            raise

    @contextmanager
    def _make_directory(self, root: int, parts: Sequence[str]) -> Iterator[int]:
        """Open a directory, creating missing components, with its entries in the parent directories durable."""
        fd = os.dup(root)
        try:
            for depth, part in enumerate(parts, 1):
                path, is_new = "/".join(parts[:depth]), False
                try:
                    os.mkdir(part, _mode(root), dir_fd=fd)
                    is_new = True
                except FileExistsError:
                    pass
                # An existing directory may come from a put that hasn't synced it yet, so sync all but the known ones.
                if is_new or path not in self._durable:
                    sync_directory(fd)
                    if len(self._durable) >= self._remembered:
                        self._durable.clear()
                    self._durable.add(path)
                below = os.open(part, DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _prepare(self, root: int) -> None:
        """Make the root's mark and sweep temp files, before the first put and after a put that left its temp file.

        A sweep removes unlocked temp files, because their writer has ended. If locks do not reach other nodes, the
        sweep can remove the file of a live writer; that put then starts again.
        """
        with self._opening:
            if self._swept:
                return
            if self._trial and not _exists(_TMP, root):
                self._tmp = self._trial
            try:
                os.mkdir(self._tmp, _mode(root), dir_fd=root)
                sync_directory(root)
            except FileExistsError:
                pass
            self._marked = self._tmp == _TMP
            with descend(root, [self._tmp]) as tmp:
                self._swept = remove_unlocked(tmp, _TMP_NAME, _SWEEP)

    def end_trial(self) -> None:
        with self._root() as root:
            os.rmdir(self._trial, dir_fd=root)

    def delete(self, keys: Sequence[str], stop: threading.Event) -> None:
        with self._root() as root:
            for parent in {key.rpartition("/")[0] for key in keys}:
                parts = parent.split("/") if parent else []
                names = [name for above, _, name in (key.rpartition("/") for key in keys) if above == parent]
                try:
                    with descend(root, parts) as fd:
                        undeletable = [name for name in names if not stop.is_set() and not _remove_entry(name, fd)]
                        sync_directory(fd)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                if undeletable:
                    raise DeleteRefused(
                        f"{self._path}: delete {'/'.join([*parts, undeletable[0]])}: Operation not permitted: the "
                        "directory is append-only (chattr +a) or another user's (sticky), or the server lets nothing "
                        "be removed; so this tier is append-only, and nothing is pruned there"
                    )
                self._remove_empty(root, parts)

    def _remove_empty(self, root: int, parts: Sequence[str]) -> None:
        """Remove an empty directory and its empty parents. A racing put creates them again."""
        try:
            while parts:
                with descend(root, parts[:-1]) as above:
                    os.rmdir(parts[-1], dir_fd=above)
                self._durable.discard("/".join(parts))
                parts = parts[:-1]
        except OSError:  # not empty, or already removed
            pass


def _remove_entry(name: str, above: int) -> bool:
    """Remove a file and return whether that is permitted.

    On a read-only file system the error is raised, because a place that takes no put either is not append-only. EROFS
    alone says so: while a file system is being remounted read-only, its flags do not show it yet.
    """
    try:
        unlink(name, above)
    except OSError as error:
        if error.errno not in _UNDELETABLE:
            raise
        return False
    return True


def _publish(temporary: str, name: str, tmp: int, parent: int, *, replace: bool) -> bool:
    """Give a temp file its name; return False if another file has that name, and is not to be replaced."""
    if not replace:
        try:  # the caller removes the first name
            os.link(temporary, name, src_dir_fd=tmp, dst_dir_fd=parent, follow_symlinks=False)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    os.rename(temporary, name, src_dir_fd=tmp, dst_dir_fd=parent)
    return True


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _mode(root: int) -> int:
    """Return the mode for new directories and objects below `root`, before the umask applies.

    Objects and directories are private to this user. If the root's set-gid bit says that a group shares it, the group
    gets the same rights as on the root.
    """
    mode = os.fstat(root).st_mode
    return 0o700 | (mode & 0o070 if mode & stat.S_ISGID else 0)
