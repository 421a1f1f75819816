"""The calls to the system, hooked in this process: those that touch a place are numbered, and may be made to fail.

Beside `os`, which tierd calls for nearly everything: reads of file objects, `fallocate`, locks. That no call goes by
unseen is what the kind `power` proves by strace.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiofiles.threadpool

from tierd.spool import direct_io

WRITES = ("open", "pwrite", "write", "fsync", "fallocate", "mkdir", "rename", "unlink", "rmdir")
READS = ("open", "preadv", "pread", "read", "stat", "lstat", "fstat", "scandir", "statvfs")
ALL = tuple(dict.fromkeys((*WRITES, *READS, "flock", "utime", "ftruncate", "replace", "listdir")))

_link, _inode = os.readlink, os.fstat
Act = Callable[[str, str, int], int | None]


class Calls:
    """Hooks, in place from `hook` on. Each call of a name in `ALL` on a path below `place` is given to `act` as
    (name, path, size), which raises what is to fail; a number that it returns is how much of a write is done.

    Attributes:
        retried: files of which an fsync was called again after one had failed (P7).
    """

    def __init__(self, place: Path) -> None:
        self._place = str(place)
        self.act: Act | None = None
        self.failed: set[tuple[int, int, str]] = set()  # regular files whose fsync failed
        self.retried: list[str] = []
        self.turn = threading.RLock()

    def hook(self) -> None:
        for name in ALL:
            if name not in ("read", "fallocate", "flock"):
                setattr(os, name, self._hooked(name, getattr(os, name)))
        fcntl.flock = self._hooked("flock", fcntl.flock)
        direct_io.libc.fallocate = self._fallocate(direct_io.libc.fallocate)
        calls = self

        class File(io.FileIO):
            def read(self, size: int = -1) -> Any:
                calls.met("read", self.fileno(), {})
                return super().read(size)

            def readall(self) -> Any:
                calls.met("read", self.fileno(), {})
                return super().readall()

            def readinto(self, buffer: Any) -> Any:
                calls.met("read", self.fileno(), {})
                return super().readinto(buffer)

        def opened(path: Any, mode: str = "r", *_: object, opener: Any = None, **__: object) -> File:
            return File(path, mode, opener=opener)

        def fdopened(fd: int, mode: str = "r", *_: object, **__: object) -> Any:
            return io.BufferedReader(File(fd, "rb")) if mode == "rb" else open(fd, mode)

        aiofiles.threadpool.sync_open = opened
        os.fdopen = fdopened

    def met(self, name: str, first: object, more: dict[str, Any], size: int = 0) -> int | None:
        path = self._path(first, more.get("dir_fd", more.get("src_dir_fd")))
        if path is None or not (path + "/").startswith(self._place + "/"):
            return None
        with self.turn:
            file = self._file(first, path) if name == "fsync" else None
            if file in self.failed:
                self.retried.append(path)
            try:
                return self.act(name, path, size) if self.act else None
            except OSError:
                if file:
                    self.failed.add(file)
                raise

    def _hooked(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any = ".", *rest: Any, **more: Any) -> Any:
            data = rest[0] if name in ("write", "pwrite") else b""
            done = self.met(name, first, more, len(data))
            if done is not None and name in ("write", "pwrite"):
                rest = (memoryview(data)[:done], *rest[1:])
            return real(first, *rest, **more)

        return call

    def _fallocate(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, mode: int, offset: int, size: int) -> int:
            try:
                done = self.met("fallocate", fd, {}, size)
                if done is not None and done < size:
                    raise OSError(errno.ENOSPC, "no room")
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1
            return real(fd, mode, offset, size)

        return call

    def _file(self, fd: object, path: str) -> tuple[int, int, str] | None:
        assert isinstance(fd, int)
        found = _inode(fd)
        return (found.st_dev, found.st_ino, path) if stat.S_ISREG(found.st_mode) else None

    def _path(self, first: object, above: int | None) -> str | None:
        try:
            if isinstance(first, int):
                return _link(f"/proc/self/fd/{first}").removesuffix(" (deleted)")
            path = os.fsdecode(first)  # type: ignore[arg-type]
            base = _link(f"/proc/self/fd/{above}") if above is not None else str(Path.cwd())
            return path if path.startswith("/") else f"{base}/{path}"
        except (OSError, TypeError):
            return None
