"""What the systemd unit says."""

from __future__ import annotations

import subprocess
from pathlib import Path

UNIT = Path(__file__).parents[2] / "systemd" / "tierd.service"


def directives(unit: Path) -> dict[str, list[str]]:
    """What the unit's [Service] says; a directive may stand there more than once."""
    found: dict[str, list[str]] = {}
    section = unit.read_text().split("[Service]")[1].split("\n[")[0]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def expand(names: str) -> set[str]:
    """System calls by name, from names and sets as systemd writes them."""
    calls, asked = set[str](), names.split()
    while asked:
        name = asked.pop()
        if not name.startswith("@"):
            calls.add(name)
            continue
        done = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
        asked += [line.strip() for line in done.stdout.splitlines() if line.startswith("    ") and "#" not in line]
    return calls


def allowed(filters: list[str]) -> set[str]:
    """What a unit's lines `SystemCallFilter=` leave, the first of them an allow list."""
    calls = expand("@default")
    for line in filters:
        calls = calls - expand(line[1:]) if line.startswith("~") else calls | expand(line)
    return calls


def size(text: str) -> int:
    """Bytes of a directive such as `1G`."""
    return int(text[:-1]) << {"M": 20, "G": 30}[text[-1]]
