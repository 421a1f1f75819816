"""Mounted file systems, as this process's kernel lists them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tierd.core.diagnosis.node import Mount

_TABLE = Path("/proc/self/mountinfo")


def mount_of(path: Path, table: str = "") -> Mount | None:
    """Return the file system on which an existing path lies; None if the kernel's table does not have it.

    Args:
        path: the path.
        table: the content of ``/proc/self/mountinfo``, proc_pid_mountinfo(5); empty: read it.
    """
    real = os.path.realpath(path)
    deepest: tuple[int, Mount] | None = None
    for line in (table or _read()).splitlines():
        before, dash, after = line.partition(" - ")
        fields, source_fields = before.split(" "), after.split(" ")
        if not dash or len(fields) < 6 or len(source_fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and (deepest is None or len(point) >= deepest[0]):  # of equals the later one lies on top
            frozen = "ro" in fields[5].split(",") or "ro" in source_fields[2].split(",")
            deepest = len(point), Mount(source_fields[0], source_fields[1], frozen)
    return deepest[1] if deepest else None


def _read() -> str:
    try:
        return _TABLE.read_text(errors="replace")
    except OSError:
        return ""
