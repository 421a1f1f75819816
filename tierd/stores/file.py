"""Objects as files below a directory: NFS, Lustre, a second disk.

Invariant: no call writes to, or reads from, a directory other than the root that was opened first. The store never
creates a root, because a missing root is most often a missing mount. Configure a *subdirectory* of the mount, because
it is missing whenever the mount is.

The first put creates `.tmp` in the root. From then on that directory marks the root: every call checks it, and every
put passes through it. If a file system is unmounted under a running daemon, calls raise `StoreUnavailable`; the store
never seems to be an empty tier, and no put reaches the disk below. The store never follows a symlink inside the root.

Each call runs as a whole in one of the store's own threads. A hung NFS server therefore blocks no other tier, and a
cancelled call returns at once although its thread can't. A cancelled put may continue to read its buffer, but never
publishes the object.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import aiofiles
from aiofiles.threadpool.binary import AsyncFileIO

from tierd.core.errors import DeleteRefused, ObjectNotFound, StoreFull, StoreRefused, StoreUnavailable, TierdError
from tierd.priority import Pools
from tierd.spool.direct_io import LARGE, memory_for, set_direct
from tierd.stores.base import Buffer, ObjectInfo, check_key, check_size, is_key, octets, room
from tierd.stores.descriptors import DIRECTORY, closing, descend, lock, sweep, sync_directory, unlink

P = ParamSpec("P")
T = TypeVar("T")

_TMP = ".tmp"
_TMP_NAME = re.compile(r"[0-9a-f]{32}")
_PIECE = 16 << 20  # bytes written between two checks of whether the put was cancelled
_READ_PIECE = 1 << 20  # bytes; small enough to stay in the processor's cache until it is copied
_DIRECT_PIECE = 4 << 20  # bytes; direct I/O has no read-ahead, so it needs larger requests
_THREADS = 16
_SWEEP = 1000  # leftover temp files that one sweep examines, at most
_PUT_TRIES = 8  # attempts, because a delete may remove the directory and a sweep the temp file while a put runs
_SMALL = 1 << 20  # bytes
_STAT_PAGE = 256
_KEPT = (errno.EPERM, errno.EACCES)  # errors for an entry that may not be removed
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EFBIG}
    | {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EEXIST, errno.ENOTEMPTY}
)


class FileStore:
    """A `Store` below the directory `root`, which must exist. Opens nothing until the first call.

    Args:
        root: the directory.
        trial: leave a root without a mark without one. A mark that `tierd doctor` made where another file system was
            mounted would have a daemon take it for its tier.
    """

    def __init__(self, root: Path, *, trial: bool = False) -> None:
        self._path = root
        self._trial = f"{_TMP}-{secrets.token_hex(8)}" if trial else ""  # its own directory for temp files
        self._tmp = _TMP
        self._threads = Pools(_THREADS, "tierd-file")
        self._opening = threading.Lock()
        self._seen = False  # whether the root has existed
        self._marked = False  # whether the root has had its mark
        self._swept = False
        self._durable: set[str] = set()  # directories whose own entries are known to be durable

    def __repr__(self) -> str:
        return f"FileStore({str(self._path)!r})"

    async def put(self, key: str, data: Buffer) -> str:
        check_key(key)
        stop = threading.Event()
        try:
            await self._run(self._put, key, octets(data), stop)
        except asyncio.CancelledError:
            stop.set()
            raise
        return ""

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        check_key(key)
        if into is None:
            with self._translated(f"get {key}"):
                small = await asyncio.get_running_loop().run_in_executor(self._threads.here(), self._get_small, key)
            if small is not None:
                return small
        # aiofiles is used for reads only. It lets a cancelled write go on while the file is closed, and the write could
        # reach another file that was given the same descriptor number.
        with self._translated(f"get {key}"):
            async with aiofiles.open(key, "rb", buffering=0, opener=self._open, executor=self._threads.here()) as file:
                size, doing = os.fstat(file.fileno()).st_size, f"{self._path}: get {key}"
                if into is None:
                    check_size(size, doing)
                    data: Buffer = await file.read()
                else:
                    data = await _read_into(file, room(into, size, doing))
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                return data

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        pending = [_parent(prefix)]  # a stack of keys in order, the next one last; directories end in '/'
        while pending:
            if not (first := pending.pop()) or first.endswith("/"):
                pending += reversed(await self._run(self._list, first, prefix, after))
                continue
            directory, page = _parent(first), [first]
            while pending and len(page) < _STAT_PAGE and _parent(pending[-1]) == directory:
                page.append(pending.pop())
            for info in await self._run(self._stat, directory, page):
                yield info

    async def directories(self, prefix: str) -> list[str]:
        """List the names directly under `prefix` with one listing; see `stores.base.directories`."""
        return [key[len(prefix) :].rstrip("/") for key in await self._run(self._list, prefix, prefix, "")]

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        await self._run(self._delete, keys)

    async def aclose(self) -> None:
        if self._tmp == self._trial:
            with suppress(TierdError):
                await self._run(self._end_trial)
        self._threads.shutdown()

    async def _run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        def work() -> T:
            with self._translated(call.__name__.lstrip("_")):
                return call(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._threads.here(), work)

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Translate each OSError into one of tierd's errors; the only place that does so."""
        try:
            yield
        except OSError as error:
            what = f"{self._path}: {doing}: {os.strerror(error.errno or 0)}"
            kind: type[TierdError] = StoreUnavailable
            if error.errno == errno.ENOENT:
                kind = ObjectNotFound
            elif error.errno in _FULL:
                kind = StoreFull
                what += "; the file system is full, or the quota is used up"
            elif error.errno in _REFUSED:
                kind = StoreRefused
            raise kind(what) from error

    # All methods from here on are synchronous and run in a thread.

    @contextmanager
    def _root(self) -> Iterator[int]:
        """Open the root's descriptor, after checking that the path still leads to the same root."""
        try:
            root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if self._seen:
                raise StoreUnavailable(f"{self._path} has vanished: is its file system still mounted?") from None
            raise StoreRefused(f"{self._path} does not exist: mount it, or create it with mkdir") from None
        with closing(root):
            # Before the check, because another thread's put may make the mark after it.
            self._seen, marked = True, self._marked
            if _exists(_TMP, root):
                self._marked = True
            elif marked:
                raise StoreUnavailable(
                    f"{self._path} has lost its {_TMP}: is its file system still mounted? "
                    f"If this is the right place, mkdir {self._path / _TMP}"
                )
            yield root

    def _open(self, key: str, flags: int) -> int:
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

    def _list(self, directory: str, prefix: str, after: str) -> list[str]:
        """List the entries of `directory` (empty, or ending in '/') that a scan may show.

        Returns:
            Sorted keys; subdirectories end in '/'.
        """
        found = []
        # Each step checks the root, so that a root that vanished never yields a shorter listing.
        with self._root() as root:
            if directory and not is_key(directory[:-1]):
                return []
            try:
                with descend(root, directory.split("/")[:-1]) as fd, os.scandir(fd) as entries:
                    for entry in entries:
                        key = directory + entry.name
                        if not is_key(key):
                            continue
                        if entry.is_dir(follow_symlinks=False) and _reaches(key + "/", prefix, after):
                            found.append(key + "/")
                        elif key.startswith(prefix) and key > after and entry.is_file(follow_symlinks=False):
                            found.append(key)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(found)  # as strings: "a-b" < "a.b" < "a/", which is the order of the keys below

    def _stat(self, directory: str, keys: Sequence[str]) -> list[ObjectInfo]:
        infos = []
        with self._root() as root:
            try:
                with descend(root, directory.split("/")[:-1]) as fd:
                    for key in keys:
                        try:
                            found = os.stat(key.rpartition("/")[2], dir_fd=fd, follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        token = f"{found.st_mtime_ns:x}-{found.st_ino:x}-{found.st_size:x}"
                        infos.append(ObjectInfo(key, found.st_size, token))
            except (FileNotFoundError, NotADirectoryError):
                pass  # removed meanwhile
        return infos

    def _get_small(self, key: str) -> bytes | None:
        """Read a small object, as most manifests are, in one thread call instead of three; None if it is not small."""
        with closing(self._open(key, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            if (size := os.fstat(fd).st_size) > _SMALL:
                return None
            check_size(size, f"{self._path}: get {key}")
            data = b"".join(iter(lambda: os.read(fd, _SMALL), b""))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return data

    def _put(self, key: str, data: memoryview, stop: threading.Event) -> None:
        with self._root() as root:
            self._prepare(root)
            for _ in range(_PUT_TRIES):
                try:
                    self._put_once(root, key, data, stop)
                    return
                except FileNotFoundError:
                    continue
        raise StoreUnavailable(f"{self._path}: put {key}: its directory, or the temp file, keeps vanishing")

    def _put_once(self, root: int, key: str, data: memoryview, stop: threading.Event) -> None:
        *parents, name = key.split("/")
        temporary, flags = secrets.token_hex(16), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with (
            descend(root, [self._tmp]) as tmp,
            closing(os.open(temporary, flags, _mode(root) & 0o666, dir_fd=tmp)) as fd,
        ):
            try:
                lock(fd)  # held while the descriptor is open, so that a sweep knows that its writer lives
                for start in range(0, len(data), _PIECE):
                    piece = data[start : start + _PIECE]
                    while piece and not stop.is_set():
                        piece = piece[os.write(fd, piece) :]
                if stop.is_set():
                    return
                os.fsync(fd)  # never retried, because after an error the kernel marks the lost pages clean
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that a read-back comes from the device
                with self._make_directory(root, parents) as parent:
                    if not stop.is_set():  # if it is set after this check, all the data was read before it could change
                        os.rename(temporary, name, src_dir_fd=tmp, dst_dir_fd=parent)
                        sync_directory(parent)
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
                path, made = "/".join(parts[:depth]), False
                try:
                    os.mkdir(part, _mode(root), dir_fd=fd)
                    made = True
                except FileExistsError:
                    pass
                # An existing directory may come from a put that hasn't synced it yet, so sync all but the known ones.
                if made or path not in self._durable:
                    sync_directory(fd)
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
                self._swept = sweep(tmp, _TMP_NAME, _SWEEP)

    def _end_trial(self) -> None:
        with self._root() as root:
            os.rmdir(self._trial, dir_fd=root)

    def _delete(self, keys: Sequence[str]) -> None:
        with self._root() as root:
            for parent in {key.rpartition("/")[0] for key in keys}:
                parts = parent.split("/") if parent else []
                names = [name for above, _, name in (key.rpartition("/") for key in keys) if above == parent]
                try:
                    with descend(root, parts) as fd:
                        kept = [name for name in names if not _removed(name, fd)]
                        sync_directory(fd)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                if kept:
                    raise DeleteRefused(
                        f"{self._path}: delete {'/'.join([*parts, kept[0]])}: Operation not permitted: the directory "
                        "is append-only (chattr +a) or another user's (sticky), or the server lets nothing be removed; "
                        "so this tier is append-only, and nothing is pruned there"
                    )
                self._remove_empty(root, parts)

    def _remove_empty(self, root: int, parts: list[str]) -> None:
        """Remove an empty directory and its empty parents. A racing put creates them again."""
        try:
            while parts:
                with descend(root, parts[:-1]) as above:
                    os.rmdir(parts[-1], dir_fd=above)
                self._durable.discard("/".join(parts))
                parts = parts[:-1]
        except OSError:  # not empty, or already removed
            pass


def _removed(name: str, above: int) -> bool:
    """Remove a file and return whether that is permitted.

    On a read-only file system the error is raised, because a place that takes no put either is not append-only. EROFS
    alone says so: while a file system is being remounted read-only, its flags do not show it yet.
    """
    try:
        unlink(name, above)
    except OSError as error:
        if error.errno not in _KEPT:
            raise
        return False
    return True


async def _read_into(file: AsyncFileIO, view: memoryview) -> memoryview:
    """Fill `view` from `file` through a small buffer.

    The buffer is needed because the thread of a cancelled call may still write to it. A large read bypasses the page
    cache, because pages that are read once cost more than their bytes.
    """
    large = len(view) >= LARGE and set_direct(file.fileno(), True)
    buffer, at = memory_for(_DIRECT_PIECE if large else min(_READ_PIECE, len(view))), 0
    while at < len(view):
        try:
            count = await file.readinto(buffer)
        except OSError as error:
            if error.errno != errno.EINVAL or not set_direct(file.fileno(), False):
                raise
            continue
        if not count:
            raise OSError(errno.EIO, "the file became shorter")
        count = min(count, len(view) - at)
        view[at : at + count] = buffer[:count]
        at += count
    return view


def _parent(key: str) -> str:
    """Return the directory that holds `key`, with its '/'; a directory (ending in '/') is its own parent."""
    return key[: key.rfind("/") + 1]


def _reaches(directory: str, prefix: str, after: str) -> bool:
    """Return whether a key in `directory` (ending in '/') may begin with `prefix` and sort after `after`."""
    if not (directory.startswith(prefix) or prefix.startswith(directory)):
        return False
    # Every character of a key sorts before '\x7f'.
    inside = after.startswith(directory) and after[len(directory) :] < "\x7f"
    return directory > after or inside


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
