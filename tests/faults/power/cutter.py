"""Stands between this process and every call that changes a file system, and cuts the power at one of them.

Invariant: no call that changes a file goes by uncounted. `uncounted` proves it for what a traced run did: the kernel's
list of such calls, by strace, and the one kept here are the same.
"""

from __future__ import annotations

import builtins
import io
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.power import loopfs

import tierd.spool.direct_io

speech = threading.Lock()  # held by the speaker to the outside
MOMENTS = ("before", "during", "after")
_PAGE = 4096
_CHANGES = os.O_CREAT | os.O_TRUNC
# Every call of `os` that changes a file, or makes a change durable; `open` is one where it may make or empty a file.
_CALLS = (
    *("open", "write", "writev", "pwrite", "pwritev", "sendfile", "copy_file_range", "splice", "truncate", "ftruncate"),
    *("fsync", "fdatasync", "sync", "posix_fallocate", "rename", "replace", "link", "symlink", "unlink", "remove"),
    *("mkdir", "rmdir", "mknod", "mkfifo", "chmod", "fchmod", "chown", "fchown", "lchown", "utime", "setxattr"),
    "removexattr",
)
_SAME = {"replace": "rename", "remove": "unlink", "posix_fallocate": "fallocate", "mkfifo": "mknod"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the system call's plain name, and how many whole pages it wrote, if it wrote; `worked` or raised."""

    name: str
    pages: int
    worked: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the power goes: before, during or after the `number`-th call; during a write, some pages are done."""

    number: int
    moment: str
    flag: int

    def __str__(self) -> str:
        return f"{self.moment} call {self.number}, {loopfs.FLAGS[self.flag]}"

    def note(self, kind: str) -> str:
        """What it is counted as, on a kind of file system."""
        return f"{self.moment} a call, {loopfs.FLAGS[self.flag]}, {kind}"


class Cutter:
    """Counts calls once it is `installed`, for good: this process is to end by the cut, or by itself.

    Args:
        homes: mount points of the file systems that lose power together.
        cut: when; None: never.
        rng: which pages a write is done with that the cut falls into.
    """

    def __init__(self, homes: Sequence[Path], cut: Cut | None, rng: random.Random) -> None:
        self.calls: list[Call] = []
        self._homes = [os.open(home, os.O_RDONLY | os.O_DIRECTORY) for home in homes]
        self._cut, self._rng = cut, rng
        self._turn = threading.Lock()
        self._count = 0

    def power_off(self, flag: int) -> None:
        """Cut the power, and end. Other threads are silent from before the cut on: xfs tells them that a directory is
        synced which it has just given up."""
        speech.acquire()
        for home in self._homes:
            loopfs.cut(home, flag)
        os._exit(0)

    def install(self) -> None:
        for name in _CALLS:
            setattr(os, name, self._counted(_SAME.get(name, name), getattr(os, name)))
        libc = tierd.spool.direct_io.libc
        libc.fallocate = self._counted("fallocate", libc.fallocate, lambda answer: not answer)
        for module in (io, builtins):
            module.open = self._opening(io.open)  # type: ignore[attr-defined]

    def _counted(
        self, name: str, real: Callable[..., Any], good: Callable[[Any], bool] = lambda answer: True
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not (args[1] if len(args) > 1 else kwargs["flags"]) & _CHANGES:
                return real(*args, **kwargs)
            if name in ("ftruncate", "fchmod") and not _is_on_disk(args[0]):
                return real(*args, **kwargs)
            with self._turn:
                number, self._count = self._count, self._count + 1
            cut = self._cut if self._cut and self._cut.number == number else None
            pages = _size(args[1]) // _PAGE if name in ("write", "pwrite") else 0
            if cut and cut.moment != "after":
                # Of two ranks the other may have come first, with a call that is none of several pages.
                if cut.moment == "during" and pages:
                    self._begin(name, real, *args)
                self.power_off(cut.flag)
            worked = False
            try:
                answer = real(*args, **kwargs)
                worked = good(answer)
                return answer
            finally:
                self.calls.append(Call(name, pages, worked))
                if cut:
                    self.power_off(cut.flag)

        return call

    def _begin(self, name: str, real: Callable[..., Any], fd: int, data: Any, offset: int = 0) -> None:
        """Some pages of a write: its first ones, or any."""
        view = memoryview(data).cast("B")
        pages = len(view) // _PAGE
        first = self._rng.randrange(1, pages) if pages > 1 else 1
        if name == "write":
            real(fd, view[: first * _PAGE])
            return
        some = range(first) if self._rng.random() < 0.5 else self._rng.sample(range(pages), first)
        for page in some:
            real(fd, view[page * _PAGE : (page + 1) * _PAGE], offset + page * _PAGE)

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`open` whose files, where they are to be written, call what is counted."""

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                return os.write(self.fileno(), data)

            def truncate(self, size: int | None = None) -> int:
                size = self.tell() if size is None else size
                os.ftruncate(self.fileno(), size)
                return size

        def opener(path: Any, flags: int) -> int:
            return os.open(path, flags, 0o666)

        def call(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return real(file, mode, buffering, *args, **kwargs)
            given = kwargs.pop("opener", None) or opener
            raw = File(file, mode.replace("b", "").replace("t", ""), opener=None if isinstance(file, int) else given)
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

        return call


def _is_on_disk(fd: int) -> bool:
    """Neither a socket nor memory."""
    link = os.readlink(f"/proc/self/fd/{fd}")
    return link.startswith("/") and not link.startswith("/memfd:")


def _size(data: Any) -> int:
    return memoryview(data).nbytes


# -- proving it -----------------------------------------------------------------------------------------------------

_TRACED = (
    "open,openat,openat2,creat,write,writev,pwrite64,pwritev,pwritev2,sendfile,copy_file_range,splice,truncate,ftruncate"
    ",fsync,fdatasync,sync,syncfs,sync_file_range,msync,fallocate,rename,renameat,renameat2,link,linkat,symlink,symlinkat"
    ",unlink,unlinkat,mkdir,mkdirat,rmdir,mknod,mknodat,chmod,fchmod,fchmodat,chown,fchown,lchown,fchownat,utime,utimes"
    ",utimensat,setxattr,fsetxattr,lsetxattr,removexattr,fremovexattr,ioctl,mmap,io_uring_enter,io_submit"
)
_LINE = re.compile(r"(?:\d+\s+)?(\w+)\((.*)\)\s+= (-?\d+|0x[0-9a-f]+)")


class Trace:
    """strace of a process, from `begin` until the process has ended."""

    def __init__(self, pid: int, reported: Path) -> None:
        self._reported = reported
        command = ["strace", "-f", "-y", "-qq", "-s", "0", "-o", str(reported)]
        command += ["-e", f"trace={_TRACED}", "-p", str(pid)]
        self._strace = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 30
        while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            if self._strace.poll() is not None or time.monotonic() > end:
                raise OSError(f"strace: {self._strace.communicate()[1]}")
            time.sleep(0.01)

    def changes(self, homes: Sequence[Path]) -> Counter[str]:
        """Once the process has ended: the calls that changed something below `homes`, by name."""
        self._strace.communicate(timeout=60)
        return Counter(
            name
            for line in _whole_lines(self._reported.read_text(errors="replace"))
            if (name := _change(line, [str(home) for home in homes]))
        )


def can_trace() -> bool:
    return shutil.which("strace") is not None


def uncounted(calls: Sequence[Call], traced: Counter[str]) -> str | None:
    """What a cutter and the kernel saw differently; None if they agree."""
    counted = Counter(call.name for call in calls if call.worked)
    if counted == traced:
        return None
    return f"not counted: {dict(traced - counted)}; counted, and not there: {dict(counted - traced)}"


def _whole_lines(text: str) -> list[str]:
    """Lines of strace, those of calls that were interrupted by another thread's put together."""
    begun: dict[str, str] = {}
    lines = []
    for line in text.splitlines():
        thread, _, rest = line.partition(" ")
        if rest.endswith("<unfinished ...>"):
            begun[thread] = rest.removesuffix("<unfinished ...>").strip()
        elif match := re.match(r"\s*<\.\.\. \w+ resumed>(.*)", rest):
            lines.append(f"{thread} {begun.pop(thread, '')}{match[1]}")
        else:
            lines.append(line)
    return lines


def _change(line: str, homes: Sequence[str]) -> str | None:
    match = _LINE.match(line)
    if not match or match[3].startswith("-") or not any(home in match[2] for home in homes):
        return None
    name, arguments = match[1], match[2]
    if name in ("open", "openat", "openat2"):
        return "open" if "O_CREAT" in arguments or "O_TRUNC" in arguments else None
    if name == "mmap":
        return "mmap" if "MAP_SHARED" in arguments and "PROT_WRITE" in arguments else None
    if name == "ioctl":
        return "ioctl" if "FICLONE" in arguments else None
    if name == "unlinkat" and "AT_REMOVEDIR" in arguments:
        return "rmdir"
    if name in ("utimensat", "utime", "utimes"):
        return "utime"
    return name.removesuffix("2").removesuffix("at").removesuffix("64")
