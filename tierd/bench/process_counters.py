"""CPU and memory of a process tree by the kernel's counters, a description of the machine, and processes as ranks.

Invariant: a tree is a process and all its descendants. So an arm's figures include a daemon or a writing process that
the arm started.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

_TICK = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def process_tree(root: int) -> list[int]:
    """Return `root` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    pids, todo = [], [root]
    while todo:
        pids.append(todo.pop())
        todo += children.get(pids[-1], [])
    return pids


def cpu_seconds(root: int) -> float:
    """Return the tree's user and system time so far, ended and awaited children included."""
    total = 0
    for pid in process_tree(root):
        if fields := _stat(pid):
            total += sum(int(field) for field in fields[11:15])
    return total / _TICK


def memory_bytes(root: int) -> int:
    """Return the tree's proportional set size: memory that two of its processes share counts once."""
    return sum(pss_bytes(pid) for pid in process_tree(root))


def run_ranks(work: Callable[..., None], world: int, *arguments: object) -> None:
    """Run `work(rank, *arguments)` in a new process for each rank; exit if one of them fails."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit("a rank failed")


def end_processes(processes: dict[int, str]) -> None:
    """Terminate the processes that still run. Each is given with its start time in clock ticks, because its number may
    belong to another process by now."""
    for pid, when in processes.items():
        if start_ticks(pid) == when:
            os.kill(pid, signal.SIGTERM)


def start_ticks(pid: int) -> str:
    """Return the time at which a process began, in ticks; empty if it has ended."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command's name, which may hold spaces; None if the process has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of one process; 0 if it has ended."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def available_bytes() -> int:
    """Return the memory that new work can use without swapping, in bytes."""
    lines = (_PROC / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def sync_filesystem(directory: Path) -> None:
    """Write back all dirty pages of that file system, so that one arm's writes do not slow the next arm."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), f"{directory}: syncfs failed")
    finally:
        os.close(fd)


def drop_cache(directory: Path) -> bool:
    """Drop every file below `directory` from the page cache; return whether the whole cache was dropped (root only)."""
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
    """The machine of the figures, without its name or a path."""

    processor: str
    cores: int
    training_threads: int
    memory_bytes: int
    filesystem: str
    kernel: str
    python: str
    packages: dict[str, str]


def describe_machine(directory: Path, training_threads: int, packages: dict[str, str]) -> Machine:
    """Describe this machine, and the file system of `directory`."""
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
        fields, _, filesystem = line.partition(" - ")
        if fields.split()[2] == number:
            return filesystem.split()[0]
    return "unknown"
