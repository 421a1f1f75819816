"""File systems in image files, on loop devices: made once, copied, mounted, and cut off from their power.

Invariant: nothing outlives the process that made it, not even one that is killed: mounts and images lie in a mount
namespace of its own, in memory, and a loop device goes with its last mount.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

from faults.mounts import call, unmount

LOG_FLUSHED, LOG_LOST = 1, 2  # what becomes of the journal's part that is still in memory
FLAGS = {LOG_FLUSHED: "log flushed", LOG_LOST: "log lost"}

_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN
_MAKE = {  # the smallest that mkfs makes, with a journal that is soon read back
    "ext4": (256 << 20, ("mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4")),
    "xfs": (320 << 20, ("mkfs.xfs", "-q", "-f")),
}
KINDS = tuple(_MAKE)
_BLOCK = 4096


class LoopFs:
    """One file system of a `kind`, in the image file `room/name.img`, at `home` while it is mounted."""

    def __init__(self, kind: str, room: Path, name: str) -> None:
        self.kind, self.home, self.image = kind, room / name, room / f"{name}.img"
        size, command = _MAKE[kind]
        self.home.mkdir()
        with self.image.open("wb") as file:
            file.truncate(size)
        call(*command, str(self.image))
        call("fallocate", "--dig-holes", str(self.image))

    def mount(self) -> None:
        """Mount it; what its journal holds is played back."""
        call("mount", "-t", self.kind, "-o", "loop,noatime", str(self.image), str(self.home))

    def unmount(self) -> None:
        unmount(self.home)

    def keep(self, name: str) -> Path:
        """A copy of the image, while it is not mounted, for `restore`."""
        kept = self.image.with_suffix(f".{name}")
        _copy(self.image, kept)
        return kept

    def restore(self, kept: Path) -> None:
        """Make the image, while it is not mounted, what it was."""
        _copy(kept, self.image)


def cut(home: int, flag: int) -> None:
    """Cut a mounted file system off from its device, now: what has not reached that is lost. `home`: a descriptor."""
    fcntl.ioctl(home, _SHUTDOWN, struct.pack("I", flag))


def missing(kind: str) -> str | None:
    """Why a file system cannot be had here, as far as can be told without mounting one."""
    if os.geteuid():
        return "mounting needs root"
    for command in (_MAKE[kind][1][0], "mount", "fallocate"):
        if not shutil.which(command):
            return f"there is no {command}"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    return None


def _copy(source: Path, target: Path) -> None:
    """Copy what is not a hole."""
    with source.open("rb", buffering=0) as old, target.open("wb", buffering=0) as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        for begin, end in _data(old.fileno(), size):
            at = begin
            while at < end:
                at += os.pwrite(new.fileno(), os.pread(old.fileno(), min(end - at, 4 << 20), at), at)


def _data(fd: int, size: int) -> Sequence[tuple[int, int]]:
    found, at = [], 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            break
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        found.append((begin, at))
    return found
