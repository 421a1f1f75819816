"""The memory control groups of this process, of both versions.

A hybrid system lists both. Its version 2 usually has no memory controller, so the limit is in version 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # bytes; version 1 writes "no limit" as a number near 2^63


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that limits memory.

    Attributes:
        directory: where its files are.
        limit: bytes that its processes may use together.
    """

    directory: Path
    limit: int

    def left(self) -> int:
        """Return the bytes that the group leaves: its limit less its use, where clean page cache does not count as use.

        Raises:
            OSError, ValueError: the kernel does not say how much is used.
        """
        current = self.directory / "memory.current"
        if not current.is_file():
            current = self.directory / "memory.usage_in_bytes"
        used = int(current.read_text())
        stat = dict(line.split() for line in (self.directory / "memory.stat").read_text().splitlines())
        # In version 1, only the totals include the groups below, as the use does.
        cache = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
        return self.limit - used + int(cache)


def limited_groups(groups: str = "", root: Path = _ROOT) -> Iterator[MemoryGroup]:
    """Yield each control group at or above this process that limits memory.

    Args:
        groups: the content of ``/proc/self/cgroup``, cgroups(7); empty: read it.
        root: where the control groups are mounted.
    """
    for line in (groups or _read(_GROUPS)).splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if not controllers:
            base, names = root, ["memory.max", "memory.high"]
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ["memory.limit_in_bytes"]
        else:
            continue
        # In a container the path may be the host's, which is not there. The container's own group is then the root, and
        # the root is asked in any case.
        own_group = base / path.lstrip("/")
        for directory in (own_group, *own_group.parents):
            texts = (_read(directory / name).strip() for name in names)
            limits = [limit for text in texts if text.isdigit() and (limit := int(text)) < _UNLIMITED]
            if limits:
                yield MemoryGroup(directory, min(limits))
            if directory == base:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
