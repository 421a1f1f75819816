"""Objects as files below a directory: NFS, Lustre, a second disk.

Law: nothing is ever written to, or read from, a place that is not the root that was opened. A root is never created,
for a missing one is more often a missing mount; give a *subdirectory* of the mount, which is missing when the mount is.
The first put makes `.tmp` in the root, and from then on that directory is the root's mark: every call checks it, every
put goes through it, so that a file system unmounted under a running daemon is `StoreUnavailable`, not an empty tier or
a put to the disk below. A symlink inside the root is never followed.

Every call runs whole in one of the store's own threads: a hung NFS server then holds up no other tier, and a cancelled
call returns at once although its thread can't. A cancelled put may go on reading its buffer, but never publishes after.
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
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import aiofiles
from aiofiles.threadpool.binary import AsyncFileIO

from tierd.core.errors import DeleteRefused, ObjectNotFound, StoreFull, StoreRefused, StoreUnavailable, TierdError
from tierd.device import LARGE, memory_for, set_direct
from tierd.priority import Pools
from tierd.stores.base import Buffer, ObjectInfo, check_key, check_size, is_key, octets, room
from tierd.stores.fds import DIRECTORY, closing, descend, lock, sweep, sync_directory, unlink

P = ParamSpec("P")
T = TypeVar("T")

_TMP = ".tmp"
_TMP_NAME = re.compile(r"[0-9a-f]{32}")
_PIECE = 16 << 20  # bytes written between two looks at whether the put was cancelled
_READ_PIECE = 1 << 20  # bytes; small enough to stay in the processor's cache until it is copied
_DIRECT_PIECE = 4 << 20  # bytes; past the page cache nothing is read ahead
_THREADS = 16
_SWEEP = 1000  # leftovers looked at, at most
_PUT_TRIES = 8  # against deletes that remove the directory, and sweeps that remove the temp file, under a put
_STAT_PAGE = 256
_KEPT = (errno.EPERM, errno.EACCES, errno.EROFS)  # by an entry that may not be removed
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EFBIG}
    | {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EEXIST, errno.ENOTEMPTY}
)


class FileStore:
    """A `Store` below the directory `root`, which must exist. Opens nothing until the first call."""

    def __init__(self, root: Path) -> None:
        self._path = root
        self._threads = Pools(_THREADS, "tierd-file")
        self._opening = threading.Lock()
        self._seen = False  # the root was there once
        self._marked = False  # and had its mark
        self._swept = False
        self._durable: set[str] = set()  # directories whose own entries are known to be on the device

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
        # Reading is all that aiofiles can be trusted with here: a cancelled write of its goes on while the file is
        # closed under it, and could end in whatever file is given the number next.
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
        pending = [_parent(prefix)]  # a stack of keys in order, next one last; directories end in '/'
        while pending:
            if not (first := pending.pop()) or first.endswith("/"):
                pending += reversed(await self._run(self._list, first, prefix, after))
                continue
            directory, page = _parent(first), [first]
            while pending and len(page) < _STAT_PAGE and _parent(pending[-1]) == directory:
                page.append(pending.pop())
            for info in await self._run(self._stat, directory, page):
                yield info

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        await self._run(self._delete, keys)

    async def aclose(self) -> None:
        self._threads.shutdown()

    async def _run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        def work() -> T:
            with self._translated(call.__name__.lstrip("_")):
                return call(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._threads.here(), work)

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """The one place where an OSError becomes an error of tierd's."""
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

    # From here on everything is synchronous and runs in a thread.

    @contextmanager
    def _root(self) -> Iterator[int]:
        """The root's descriptor, after a look at whether this is still the place that it was."""
        try:
            root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if self._seen:
                raise StoreUnavailable(f"{self._path} has vanished: is its file system still mounted?") from None
            raise StoreRefused(f"{self._path} does not exist: mount it, or create it with mkdir") from None
        with closing(root):
            self._seen, marked = True, self._marked  # before the look: another thread's put may make the mark after it
            try:
                os.stat(_TMP, dir_fd=root, follow_symlinks=False)
                self._marked = True
            except FileNotFoundError:
                if marked:
                    raise StoreUnavailable(
                        f"{self._path} has lost its {_TMP}: is its file system still mounted? "
                        f"If this is the right place, mkdir {self._path / _TMP}"
                    ) from None
            yield root

    def _open(self, key: str, flags: int) -> int:
        """Open an object for aiofiles."""
        *parents, name = key.split("/")
        try:
            with self._root() as root, descend(root, parents) as parent:
                # O_NONBLOCK: a FIFO that someone planted is refused below, not waited for
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
        """What of `directory` (empty, or ending in '/') a scan may show: keys, and directories, which end in '/'."""
        found = []
        with self._root() as root:  # each step looks at the root, so that one that went away is no shorter listing
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
        with descend(root, [_TMP]) as tmp, closing(os.open(temporary, flags, _mode(root) & 0o666, dir_fd=tmp)) as fd:
            try:
                lock(fd)  # for as long as the descriptor is open: tells a sweep that its writer lives
                for start in range(0, len(data), _PIECE):
                    piece = data[start : start + _PIECE]
                    while piece and not stop.is_set():
                        piece = piece[os.write(fd, piece) :]
                if stop.is_set():
                    return
                os.fsync(fd)  # never tried again: after an error the kernel calls the lost pages clean
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # a read-back should come from the device
                with self._make_directory(root, parents) as parent:
                    if not stop.is_set():  # set later than this, all of the data was read before it could change
                        os.rename(temporary, name, src_dir_fd=tmp, dst_dir_fd=parent)
                        sync_directory(parent)
            finally:
                unlink(temporary, tmp)  # there is nothing left to unlink after a rename

    @contextmanager
    def _make_directory(self, root: int, parts: Sequence[str]) -> Iterator[int]:
        """Open a directory, making what is missing; its entries in the directories above are durable."""
        fd = os.dup(root)
        try:
            for depth, part in enumerate(parts, 1):
                path, made = "/".join(parts[:depth]), False
                try:
                    os.mkdir(part, _mode(root), dir_fd=fd)
                    made = True
                except FileExistsError:
                    pass
                # One that was there may have been made by a put that hasn't synced it yet: sync all but the known.
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
        """Before the first put: make the mark, and remove temp files whose writer is gone, which is when nobody holds
        their lock. Where locks don't reach other nodes this can hit a living one's: its put then begins anew."""
        with self._opening:
            if self._swept:
                return
            try:
                os.mkdir(_TMP, _mode(root), dir_fd=root)
                sync_directory(root)
            except FileExistsError:
                pass
            self._marked = self._swept = True
            with descend(root, [_TMP]) as tmp:
                sweep(tmp, _TMP_NAME, _SWEEP)

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
        """Remove a directory and those above it that are empty. A put that races makes them anew."""
        try:
            while parts:
                with descend(root, parts[:-1]) as above:
                    os.rmdir(parts[-1], dir_fd=above)
                self._durable.discard("/".join(parts))
                parts = parts[:-1]
        except OSError:  # not empty, or gone
            pass


def _removed(name: str, above: int) -> bool:
    """Remove a file; whether that is allowed. Not where nothing can be put either: that is no append-only place."""
    try:
        unlink(name, above)
    except OSError as error:
        frozen = error.errno == errno.EROFS and os.fstatvfs(above).f_flag & os.ST_RDONLY
        if error.errno not in _KEPT or frozen:
            raise
        return False
    return True


async def _read_into(file: AsyncFileIO, view: memoryview) -> memoryview:
    """Fill `view` from `file`, through a small buffer: a cancelled call's thread may still be reading into that. Past
    the page cache where it is large, since pages that are read once cost more than their bytes."""
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
    """The directory that holds `key`, with its '/'; a directory, which ends in '/', is its own."""
    return key[: key.rfind("/") + 1]


def _reaches(directory: str, prefix: str, after: str) -> bool:
    """Whether a key in `directory` (ending in '/') may begin with `prefix` and sort after `after`."""
    if not (directory.startswith(prefix) or prefix.startswith(directory)):
        return False
    inside = after.startswith(directory) and after[len(directory) :] < "\x7f"  # no key's character sorts after that
    return directory > after or inside


def _mode(root: int) -> int:
    """The mode of a directory below `root`; the umask takes away from it. What is put there is for this user alone, but
    where the root's set-gid bit says that a group shares it, the group may do what it may do with the root."""
    mode = os.fstat(root).st_mode
    return 0o700 | (mode & 0o070 if mode & stat.S_ISGID else 0)
