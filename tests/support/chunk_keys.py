"""Keys of chunks: in the old form, on a tier that is a directory, and taken apart."""

from __future__ import annotations

from pathlib import Path

from tierd.core.ids import PartId, chunk_group, chunk_owner, group_owner


def old_chunk_key(which: PartId, digest: str, codec: str) -> str:
    """The key of a chunk relative to its run, as formats before version 4 have it."""
    return f"chunks/{which.checkpoint.name}/{which.rank:05}/{digest}.{codec}"


def owner_name(key: str) -> str:
    """The name of the checkpoint under which a chunk is stored, by its whole key."""
    run, _, rest = key.partition("/")
    owner = chunk_owner(run, rest)
    assert owner, f"{key} is no chunk's"
    return owner.name


def chunk_files(tier: Path, run: str, step: int | None = None, rank: int | None = None) -> list[Path]:
    """A run's chunks on a tier that is a directory, by key; of one step, or under one home."""
    chosen = []
    for path in sorted((tier / run / "chunks").rglob("*.*")):
        key = path.relative_to(tier).as_posix()
        owner = group_owner(run, chunk_group(run, key)) if path.is_file() else None
        if owner and step in (None, owner.step) and rank in (None, int(path.parent.name)):
            chosen.append(path)
    return chosen
