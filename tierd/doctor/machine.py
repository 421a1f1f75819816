"""What limits the processes of this machine: memory, control groups, ulimits."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

from tierd.core.diagnosis import node
from tierd.core.diagnosis.findings import NODE, Finding, finding
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


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
