"""What the kernel counts: a process tree's CPU and memory, and what machine this is.

Law: a tree is a process and all its descendants: a daemon or a writing process that an arm started is on its bill.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from pathlib import Path

import msgspec

_TICK = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def tree(root: int) -> list[int]:
    """`root` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def cpu_seconds(root: int) -> float:
    """User and system time of the tree so far, its ended and awaited children included."""
    total = 0
    for pid in tree(root):
        if fields := _stat(pid):
            total += sum(int(field) for field in fields[11:15])
    return total / _TICK


def memory_bytes(root: int) -> int:
    """The tree's proportional set size: memory that two of its processes share counts once."""
    return sum(_pss(pid) for pid in tree(root))


def end(processes: dict[int, str]) -> None:
    """Terminate those that still run, given each with when it `began`: a number may be another process's by now."""
    for pid, when in processes.items():
        if began(pid) == when:
            os.kill(pid, signal.SIGTERM)


def began(pid: int) -> str:
    """When a process began, in ticks; empty when it is gone."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name, which may hold spaces; None when it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _pss(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def available_bytes() -> int:
    """Memory that new work can have without swapping."""
    lines = (_PROC / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def sync_filesystem(directory: Path) -> None:
    """Write back all that is dirty on that file system, so that one arm's leftovers are not on the next one's bill."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), f"{directory}: syncfs failed")
    finally:
        os.close(fd)


def drop_cache(directory: Path) -> bool:
    """Have every file below `directory` leave the page cache; whether the whole cache went too, which root may ask."""
    sync_filesystem(directory)
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    try:
        (_PROC / "sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


class Machine(msgspec.Struct, frozen=True):
    """What the figures were taken on; no name and no path of it."""

    processor: str
    cores: int
    training_threads: int
    memory_bytes: int
    filesystem: str
    kernel: str
    python: str
    packages: dict[str, str]


def machine(directory: Path, training_threads: int, packages: dict[str, str]) -> Machine:
    """This machine, and the file system that `directory` lies on."""
    models = [line for line in (_PROC / "cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return Machine(
        processor=models[0].split(":", 1)[1].strip() if models else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        training_threads=training_threads,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        filesystem=_filesystem(directory),
        kernel=platform.release().split("-")[0],
        python=platform.python_version(),
        packages=packages,
    )


def _filesystem(directory: Path) -> str:
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (_PROC / "self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return "unknown"
