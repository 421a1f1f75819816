"""A wall clock that can be set back a day under live processes.

The machine's own clock is not touched: a process that follows a file adds what stands there, in seconds, to the wall
clock. Monotonic clocks stay as they are, as on a machine whose clock is set. As a program, the daemon of tierd:

    python tests/faults/host/clock.py FILE run --config tierd.toml
"""

from __future__ import annotations

import datetime
import importlib
import mmap
import os
import struct
import sys
import time
from pathlib import Path

DAY_S = 86_400.0


def put(path: Path, ahead_s: float) -> None:
    """Have each process that follows `path` see a wall clock that is so many seconds ahead of this machine's."""
    if not path.exists():
        path.write_bytes(bytes(8))
    with path.open("r+b") as file:
        file.write(struct.pack("<d", ahead_s))


def follow(path: Path) -> None:
    """See the wall clock that `put` says, in this process and in all that has been imported of tierd."""
    with path.open("rb") as file:
        page = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    real, real_ns = time.time, time.time_ns

    def ahead_s() -> float:
        return float(struct.unpack("<d", page)[0])

    class Moved(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=ahead_s())

    time.time = lambda: real() + ahead_s()
    time.time_ns = lambda: real_ns() + int(ahead_s() * 1e9)
    for name, module in list(sys.modules.items()):
        if name.startswith("tierd.") and getattr(module, "datetime", None) is datetime.datetime:
            module.datetime = Moved


def age(homes: list[Path], by_s: float) -> None:
    """Files below `homes` show the times that they would have if the machine's clock had been `by_s` seconds ahead."""
    for home in homes:
        for directory, _, names in os.walk(home, topdown=False):
            for path in (*(Path(directory, name) for name in names), Path(directory)):
                try:
                    found = path.lstat()
                    os.utime(path, (found.st_atime + by_s, found.st_mtime + by_s), follow_symlinks=False)
                except FileNotFoundError:
                    continue  # it goes just now


def _daemon() -> int:
    for name in ("tierd.cli", "tierd.daemon.daemon_service", "tierd.stores.file_store"):
        importlib.import_module(name)
    follow(Path(sys.argv[1]))
    from tierd.__main__ import main

    sys.argv[1:2] = []
    return main()


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # this directory holds no modules of tierd's
    sys.exit(_daemon())
