"""How a person starts the daemon of a spool on this machine, for messages that say that none runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tierd.spool.permissions import account

UNITS = tuple(
    Path(path)
    for path in (
        "/etc/systemd/system",
        "/run/systemd/system",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
    )
)


def ways_to_start(root: Path, directories: Sequence[Path] = UNITS) -> str:
    """Return the ways to start a daemon on the spool in `root`.

    An installed unit comes first, because a daemon beside it would take its spool. Whether its tierd.toml names this
    spool is not known, because the caller may not be allowed to read that file.
    """
    ways = [f"systemctl start {unit}" for unit in _units(root, directories)]
    ways.append(f"tierd run --spool {root} --to URL")
    return " or ".join(ways)


def _units(root: Path, directories: Sequence[Path]) -> list[str]:
    """Name the units of tierd that are installed, with the spool's account as the template's instance."""
    installed = {
        name for name in ("tierd.service", "tierd@.service") if any((at / name).exists() for at in directories)
    }
    units = ["tierd"] if "tierd.service" in installed else []
    if "tierd@.service" in installed:
        units.append(f"tierd@{account(_owner(root))}")
    return units


def _owner(root: Path) -> int:
    try:
        return root.stat().st_uid
    except OSError:
        return os.geteuid()
