"""What the programs that write the golden fixtures of a format share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def write_object(path: Path, data: bytes) -> None:
    """Write a file, and make the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def build_into_argument(build: Callable[[Path], object]) -> None:
    """Build fixtures in the directory that the command line names, which must be empty."""
    target = Path(sys.argv[1])
    if any(target.glob("*")):
        sys.exit(f"{target} is not empty: fixtures are written once")
    build(target)
