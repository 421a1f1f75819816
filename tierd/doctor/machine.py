"""What limits the processes of this machine: memory, control groups, ulimits."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

from tierd.core.diagnosis import node
from tierd.core.diagnosis.findings import NODE, Finding, finding
from tierd.spool.arena import Arena
from tierd.spool.control_groups import limited_groups

_LIMITS = {
    "files": resource.RLIMIT_NOFILE,
    "threads": resource.RLIMIT_NPROC,
    "address space": resource.RLIMIT_AS,
    "file size": resource.RLIMIT_FSIZE,
}
_SHM_BYTES = 1 << 20  # bytes of shared memory


def examine(state: int | None) -> Iterator[Finding]:
    """Yield the findings about this machine; `state` is the size of a node's state in bytes, if it is known."""
    yield _shared_memory()
    memory = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE))
    total = int(memory.get("MemTotal", 0)) << 10
    limit = min((group.limit for group in limited_groups()), default=None)
    yield node.memory(total, int(memory.get("MemAvailable", 0)) << 10, limit, state)
    yield node.limits({name: _soft(number) for name, number in _LIMITS.items()})


def _shared_memory() -> Finding:
    try:
        Arena(_SHM_BYTES).close()
    except MemoryError as error:
        return finding(NODE, "no shared memory", str(error))
    return finding(NODE, "shared memory", "a sealed memfd was made and mapped")


def _soft(number: int) -> int | None:
    soft = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
