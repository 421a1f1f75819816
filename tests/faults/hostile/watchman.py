"""What code may touch while it reads hostile input: seen by the interpreter's own audit, which sees every open.

Invariant: what was seen is a loss, whatever the reader made of the error that told of it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

CPU = 4.0  # seconds of computing that one input may take
_PATHS = {"open": 1, "os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.symlink": 2, "os.link": 2}
_PATHS |= {"os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.listdir": 1, "os.scandir": 1, "shutil.rmtree": 1}
_NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.getaddrinfo")
_READ_ONLY = ("/usr/", "/root/.pyenv/", "/tmp/v/", "/proc/", "/sys/", "/etc/localtime", "/dev/null", sys.prefix)


class Escape(AssertionError):
    """Something was touched, or done, that no input may bring about."""


class Watchman:
    """Looks on while armed. One in a process: an audit hook stays for good."""

    def __init__(self, *rooms: Path) -> None:
        self._rooms = tuple(f"{room}/" for room in rooms)
        self._tree = f"{Path(__file__).parents[3]}/"
        self._armed = False
        self._seen: list[str] = []
        sys.addaudithook(self._hook)
        signal.signal(signal.SIGPROF, self._over)

    @contextmanager
    def watching(self, cpu: float = CPU) -> Iterator[None]:
        """Within, only what lies in the rooms may be opened, and computing ends in time."""
        self._seen.clear()
        self._armed = True
        signal.setitimer(signal.ITIMER_PROF, cpu, cpu)  # again, where the first is swallowed
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._armed = False
        if self._seen:
            raise Escape("; ".join(self._seen[:5]))

    def _over(self, number: int, frame: FrameType | None) -> None:
        self._escaped("computed past its deadline")

    def _escaped(self, what: str) -> None:
        self._seen.append(what)  # a reader may take any error for damage, also this one
        raise Escape(what)

    def _hook(self, event: str, given: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event in _NEVER:
            self._escaped(f"{event} {given!r}")
        named = given[: _PATHS.get(event, 0)]
        for path in named[1:] if event == "os.symlink" else named:  # what a link says is not touched by making it
            if isinstance(path, (str, bytes, os.PathLike)):
                name = os.fsdecode(path)
                writes = (
                    bool((given[2] or 0) & (os.O_WRONLY | os.O_RDWR))
                    if event == "open"
                    else event not in ("os.listdir", "os.scandir")
                )
                if not self._allowed(name, writes):
                    self._seen.append(f"{event} {name!r}")

    def _allowed(self, name: str, writes: bool) -> bool:
        if not name.startswith("/"):
            return ".." not in name.split("/")  # relative to a directory's descriptor
        if ".." in name.split("/"):
            return False
        if f"{name}/".startswith(self._rooms):
            return True
        return not writes and name.startswith((*_READ_ONLY, self._tree))
