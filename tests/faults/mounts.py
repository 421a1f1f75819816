"""Mounts that only this process and its children see.

Invariant: everything is mounted in a mount namespace of the process that plays, so that it goes with it, however that
ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import time
from pathlib import Path

BIND, REMOUNT, READ_ONLY = 0x1000, 0x20, 0x1  # MS_*
_NEW_MOUNTS, _PRIVATE, _RECURSIVE, _DETACH = 0x20000, 0x40000, 0x4000, 0x2
_PATIENCE_S = 120.0
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def own_mounts() -> None:
    """Give this process, and its children to come, mounts of their own."""
    _checked(_libc.unshare(_NEW_MOUNTS), "a mount namespace")
    mount("none", "/", None, _RECURSIVE | _PRIVATE)


def mount(source: str | Path, target: str | Path, kind: str | None, flags: int = 0, data: str = "") -> None:
    args = (os.fsencode(source), os.fsencode(target), kind.encode() if kind else None)
    _checked(_libc.mount(*args, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def mount_memory(at: Path, options: str = "mode=700") -> None:
    """A file system in memory."""
    mount("tierd-faults", at, "tmpfs", 0, options)


def unmount(at: Path) -> None:
    """Raises `OSError` if somebody holds something there for longer than the end of a process takes."""
    end = time.monotonic() + _PATIENCE_S
    while _libc.umount2(os.fsencode(at), 0):
        if ctypes.get_errno() != errno.EBUSY or time.monotonic() > end:
            _checked(-1, f"umount {at}")
        time.sleep(0.02)


def detach(at: Path) -> None:
    """Nothing is mounted here any more; who has files open keeps them."""
    _checked(_libc.umount2(os.fsencode(at), _DETACH), f"umount {at}")


def sync(at: Path) -> None:
    """What was put on this file system is not lost by an error of it any more."""
    fd = os.open(at, os.O_RDONLY)
    try:
        _checked(_libc.syncfs(fd), "syncfs")
    finally:
        os.close(fd)


def mounted() -> dict[str, str]:
    """Mount point -> device, in the order of mounting."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return {words[1]: words[0] for words in lines}


def fail(at: Path) -> None:
    """An ext4 meets an error and turns read-only, whatever is open. It has to be mounted anew."""
    (Path("/sys/fs/ext4") / Path(mounted()[str(at)]).name / "trigger_fs_error").write_text("faults")


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
