"""What limits the processes of this machine: memory, control groups, ulimits; mounted file systems."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from tierd.core.diagnosis import node
from tierd.core.diagnosis.findings import NODE, Finding, finding
from tierd.core.diagnosis.node import Mount
from tierd.spool.arena import Arena

_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = {
    "files": resource.RLIMIT_NOFILE,
    "threads": resource.RLIMIT_NPROC,
    "address space": resource.RLIMIT_AS,
    "file size": resource.RLIMIT_FSIZE,
}
_TRIED = 1 << 20  # bytes of shared memory


def examine(state: int | None) -> Iterator[Finding]:
    """Yield the findings about this machine; `state` is the size of a node's state in bytes, if it is known."""
    yield _shared_memory()
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE))
    total = int(found.get("MemTotal", 0)) << 10
    yield node.memory(total, int(found.get("MemAvailable", 0)) << 10, memory_limit(), state)
    yield node.limits({name: _soft(number) for name, number in _LIMITS.items()})


def _shared_memory() -> Finding:
    try:
        Arena(_TRIED).close()
    except MemoryError as error:
        return finding(NODE, "no shared memory", str(error))
    return finding(NODE, "shared memory", "a sealed memfd was made and mapped")


def _soft(number: int) -> int | None:
    soft = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def memory_limit(groups: str = "", root: Path = _CGROUPS) -> int | None:
    """Return the lowest memory limit of this process's control groups, in bytes; None if there is none.

    Args:
        groups: the content of ``/proc/self/cgroup``; empty: read it.
        root: where the control groups are mounted.
    """
    limits = []
    for line in (groups or _read(Path("/proc/self/cgroup"))).splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if controllers not in ("", "memory"):
            continue
        base, names = root, ["memory.max", "memory.high"]
        if controllers:  # version 1
            base, names = root / "memory", ["memory.limit_in_bytes"]
        # In a container the path may be the host's, which is not there; the container's own group is then the root.
        here = base / path.lstrip("/") if (base / path.lstrip("/")).is_dir() else base
        for directory in (here, *here.parents):
            limits += [int(text) for name in names if (text := _read(directory / name).strip()).isdigit()]
            if directory == base:
                break
    return min((one for one in limits if one < 1 << 60), default=None)  # version 1 writes "none" as a large number


def mount_of(path: Path, table: str = "") -> Mount | None:
    """Return the file system on which an existing path lies; None if the kernel's table does not have it.

    Args:
        path: the path.
        table: the content of ``/proc/self/mountinfo``, proc_pid_mountinfo(5); empty: read it.
    """
    real = os.path.realpath(path)
    found: tuple[int, Mount] | None = None
    for line in (table or _read(Path("/proc/self/mountinfo"))).splitlines():
        before, dash, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not dash or len(fields) < 6 or len(rest) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and (found is None or len(point) >= found[0]):  # of equals the later one lies on top
            frozen = "ro" in fields[5].split(",") or "ro" in rest[2].split(",")
            found = len(point), Mount(rest[0], rest[1], frozen)
    return found[1] if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
