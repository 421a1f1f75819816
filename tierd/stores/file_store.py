"""Objects as files below a directory: NFS, Lustre, a second disk.

Invariant: no call writes to, or reads from, a directory other than the root that was opened first. The store never
creates a root, because a missing root is most often a missing mount. Configure a *subdirectory* of the mount, because
it is missing whenever the mount is.

The first put creates `.tmp` in the root. From then on that directory marks the root: every call checks it, and every
put passes through it. If a file system is unmounted under a running daemon, calls raise `StoreUnavailable`; the store
never seems to be an empty tier, and no put reaches the disk below. The store never follows a symlink inside the root.

Each call runs as a whole in one of the store's own threads. A hung NFS server therefore blocks no other tier, and a
cancelled call returns at once although its thread can't. A cancelled put may continue to read its buffer, but never
publishes the object. A cancelled deletion removes at most the object that it is at, because the caller may put the
others again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import aiofiles

from tierd.core.errors import ObjectNotFound, StoreFull, StoreRefused, StoreUnavailable, TierdError
from tierd.core.storage_faults import DISK_FULL_ERRNOS, disk_full_remedy
from tierd.stores.base import FIRST_PAGE, Buffer, ObjectInfo, Store, check_key, check_size, destination, flatten, octets
from tierd.stores.file_descriptors import ScanState, parent, read_file_into
from tierd.stores.file_tree import STAT_PAGE, FileTree
from tierd.threads import PriorityPools

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 16
_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EFBIG}
    | {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EEXIST, errno.ENOTEMPTY}
)


class FileStore(Store):
    """A `Store` below the directory `root`, which must exist. Opens nothing until the first call.

    A `trial` leaves a root without a mark without one. A mark that `tierd doctor` made where another file system was
    mounted would have a daemon take it for its tier.
    """

    can_digest = has_pages = True

    def __init__(self, root: Path, *, trial: bool = False) -> None:
        self._path = root
        self._tree = FileTree(root, trial=trial)
        self._threads = PriorityPools(_THREADS, "tierd-file")
        self._closed = False

    @property
    def signs_of_life(self) -> int:
        """See `Store`: pieces that were written or read."""
        return self._tree.pieces

    def __repr__(self) -> str:
        return f"FileStore({str(self._path)!r})"

    async def put(self, key: str, data: Buffer) -> str:
        check_key(key)
        with _set_if_cancelled() as stop:
            await self._run(self._tree.put, key, octets(data), stop)
        return ""

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        check_key(key)
        with _set_if_cancelled() as stop:
            is_put = await self._run(self._tree.put, key, octets(data), stop, replace=False)
        return "" if is_put else None

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        check_key(key)
        if into is None:
            with self._translated(f"get {key}"), self._unless_closed():
                small = await asyncio.get_running_loop().run_in_executor(
                    self._threads.current(), self._tree.get_small, key
                )
            if small is not None:
                return small
        # aiofiles is used for reads only. It lets a cancelled write go on while the file is closed, and the write could
        # reach another file that was given the same descriptor number.
        with self._translated(f"get {key}"), self._unless_closed():
            async with aiofiles.open(
                key, "rb", buffering=0, opener=self._tree.open_object, executor=self._threads.current()
            ) as file:
                size, doing = os.fstat(file.fileno()).st_size, f"{self._path}: get {key}"
                if into is None:
                    check_size(size, doing)
                    data: Buffer = await file.read()
                else:
                    data = await read_file_into(file, destination(into, size, doing), self._tree.count_piece)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                return data

    async def get_small(self, keys: Sequence[str]) -> list[bytes | None]:
        return await self._run(self._tree.get_each_small, [check_key(key) for key in keys])

    async def digest(self, key: str) -> tuple[int, str]:
        return await self._run(self._tree.digest, check_key(key))

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        return flatten(self.scan_pages(prefix, after))

    async def scan_pages(self, prefix: str, after: str = "") -> AsyncGenerator[Sequence[ObjectInfo], None]:
        walk, page_size = ScanState(parent(prefix)), FIRST_PAGE
        while walk.pending:
            yield await self._run(self._tree.list_page, walk, prefix, after, page_size)
            page_size = STAT_PAGE

    async def directories(self, prefix: str) -> list[str]:
        return [key[len(prefix) :].rstrip("/") for key in await self._run(self._tree.list_keys, prefix, prefix, "")]

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        with _set_if_cancelled() as stop:
            await self._run(self._tree.delete, keys, stop)

    async def aclose(self) -> None:
        if self._tree.is_trial_made:
            with suppress(TierdError):
                await self._run(self._tree.end_trial)
        self._closed = True
        self._threads.shutdown()

    async def _run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        def work() -> T:
            with self._translated(call.__name__.lstrip("_")):
                return call(*args, **kwargs)

        with self._unless_closed():
            return await asyncio.get_running_loop().run_in_executor(self._threads.current(), work)

    @contextmanager
    def _unless_closed(self) -> Iterator[None]:
        """Raise StoreUnavailable for a call that had not begun when the store was closed.

        Its thread pool cancels or refuses such a call, and a caller that nobody cancelled would end without a word.
        """
        try:
            yield
        except (asyncio.CancelledError, RuntimeError) as error:
            task = asyncio.current_task()
            if not self._closed or (task and task.cancelling()):
                raise
            raise StoreUnavailable(f"{self._path}: the store was closed") from error

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Translate each OSError into one of tierd's errors; the only place that does so."""
        try:
            yield
        except OSError as error:
            reason = f"{self._path}: {doing}: {os.strerror(error.errno or 0)}"
            kind: type[TierdError] = StoreUnavailable
            if error.errno == errno.ENOENT:
                kind = ObjectNotFound
            elif error.errno in DISK_FULL_ERRNOS:
                kind = StoreFull
            elif error.errno in _REFUSED:
                if error.errno == errno.EROFS:
                    reason += "; it is mounted read-only, or a service's ReadWritePaths= does not name it"
                kind = StoreRefused
            raise kind(reason + self._way_out(error.errno)) from error

    def _way_out(self, number: int | None) -> str:
        room = None
        if number in DISK_FULL_ERRNOS:
            with suppress(OSError):
                room = os.statvfs(self._path)
        text = disk_full_remedy(number, "on this tier", room)
        return f"; {text}" if text else ""


@contextmanager
def _set_if_cancelled() -> Iterator[threading.Event]:
    """Yield an event by which a call's thread learns that the call was cancelled."""
    stop = threading.Event()
    try:
        yield stop
    except asyncio.CancelledError:
        stop.set()
        raise
