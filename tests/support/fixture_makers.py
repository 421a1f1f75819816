"""What the programs that write the golden fixtures of a format share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tierd.core.manifest import Manifest
from tierd.core.manifest_codec import encode


def write_object(path: Path, data: bytes) -> None:
    """Write a file, and make the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_tier_of(root: Path, manifest: Manifest) -> None:
    """Write the manifest of a tier in which all its chunks lie, and delete the chunks that it does not name."""
    write_object(root / manifest.part.manifest_key, encode(manifest))
    named = {root / manifest.run / stored.key for stored in manifest.objects()}
    for path in (root / manifest.run / "chunks").rglob("*"):
        if path.is_file() and path not in named:
            path.unlink()


def build_into_argument(build: Callable[[Path], object]) -> None:
    """Build fixtures in the directory that the command line names, which must be empty."""
    target = Path(sys.argv[1])
    if any(target.glob("*")):
        sys.exit(f"{target} is not empty: fixtures are written once")
    build(target)
