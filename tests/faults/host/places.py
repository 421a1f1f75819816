"""What a node may run on: file systems that are mounted for one trial, and a control group that limits memory."""

from __future__ import annotations

import errno
import time
from pathlib import Path

from faults import mounts
from faults.mounts import READ_ONLY, REMOUNT, call, detach, mount, mounted, own_mounts, unmount
from faults.power.loopfs import LoopFs
from faults.rounds import Lost

_PATIENCE_S = 60.0


def clear(room: Path) -> None:
    """Nothing is mounted at `room`, and nothing below it, any more."""
    for point in reversed(list(mounted())):
        if Path(point).is_relative_to(room):
            detach(Path(point))


class Overlay:
    """An overlay file system at `at`; what lies in `lower` is there from the beginning."""

    def __init__(self, room: Path, at: Path, lower: Path) -> None:
        self._at, self._lower, self._room = at, lower, room
        self._number = 0
        self.renew()

    def renew(self) -> None:
        """With nothing but what lies below, as in a container that is made anew."""
        self._number += 1
        for name in ("upper", "work"):
            (self._room / f"{name}{self._number}").mkdir(parents=True)
        self.mount()

    def mount(self) -> None:
        upper, work = (self._room / f"{name}{self._number}" for name in ("upper", "work"))
        layers = f"lowerdir={self._lower},upperdir={upper},workdir={work}"
        mount("tierd-faults", self._at, "overlay", 0, layers)


def remount(fs: LoopFs, *, read_only: bool) -> None:
    """As `mount -o remount,ro`, which the kernel refuses for as long as any file there is open for writing."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return mount("none", fs.home, None, REMOUNT | (READ_ONLY if read_only else 0))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        if time.monotonic() > end:
            raise Lost(f"{fs.home} cannot be remounted read-only: somebody holds a file open for writing")
        time.sleep(0.001)


def fail(fs: LoopFs) -> None:
    """An ext4 meets an error and turns read-only, whatever is open. It has to be mounted anew."""
    call("mount", "-o", "remount,errors=remount-ro", str(fs.home))
    mounts.fail(fs.home)


# -- memory ------------------------------------------------------------------------------------------------------------


class Memory:
    """A control group of one trial's own, of version 2 or 1, below the root of a hierarchy that is mounted at `at`."""

    def __init__(self, at: Path, name: str) -> None:
        self._new = mount_memory(at)
        self.home = at / name
        self._limit = "memory.max" if self._new else "memory.limit_in_bytes"
        self.home.mkdir()

    def enter(self) -> None:
        """This process, and its children, belong to it."""
        (self.home / "cgroup.procs").write_text("0")

    def limit(self, more: int | None) -> None:
        """Leave `more` bytes beyond what is in use; None: no limit."""
        if not self._new:
            (self.home / "memory.swappiness").write_text("0")
        elif (swap := self.home / "memory.swap.max").exists():
            swap.write_text("0")
        used = int((self.home / ("memory.current" if self._new else "memory.usage_in_bytes")).read_text())
        none = "max" if self._new else "-1"
        (self.home / self._limit).write_text(none if more is None else str(used + more))

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed for want of memory here."""
        text = (self.home / ("memory.events" if self._new else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def remove(self) -> None:
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self.home.rmdir()
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)


def mount_memory(at: Path) -> bool:
    """Mount the hierarchy that limits memory, in this process's mounts; whether it is version 2.

    Raises:
        OSError: there is none, or none that a group can be added to.
    """
    at.mkdir(parents=True, exist_ok=True)
    try:
        mount("tierd-faults", at, "cgroup2")
    except OSError:
        mount("tierd-faults", at, "cgroup", 0, "memory")
        return False
    if "memory" in (at / "cgroup.subtree_control").read_text().split():
        return True
    unmount(at)
    mount("tierd-faults", at, "cgroup", 0, "memory")
    return False


def sweep_groups(at: Path, prefix: str) -> None:
    """Remove what a process left that could not clean up: it was killed."""
    own_mounts()
    try:
        mount_memory(at)
    except OSError:
        return
    for path in at.glob(f"{prefix}*"):
        path.rmdir()
    unmount(at)
