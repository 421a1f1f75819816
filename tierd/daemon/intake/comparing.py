"""Compare a unit in its program's directory with the manifest of the checkpoint as which it was taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tierd.core.corruption import proven
from tierd.core.errors import CorruptChunk
from tierd.core.manifest import Chunk, Manifest
from tierd.spool.file_io import digest
from tierd.watching.files import OpenFile, Tree
from tierd.watching.listing import ListedEntry, Listing
from tierd.watching.naming import made_at
from tierd.watching.unit_file import UNIT_NAME


class Difference(NamedTuple):
    """Where a unit differs from its manifest, for people, and the path of the file, if it is not there."""

    why: str
    absent: str | None = None


def differences(tree: Tree, listing: Listing, manifest: Manifest) -> Iterator[Difference]:
    """Yield where a unit differs from its manifest; right bytes are read once.

    Raises:
        Changed, OSError: as `Tree.opened`.
    """
    for file in manifest.files:
        entry = listing.entries.get(file.path)
        if file.path == UNIT_NAME:
            continue
        if entry is None or entry.kind != "file":
            yield Difference(f"{file.path} is not there", absent=file.path)
            continue
        since = _why_edited(entry, manifest)
        if entry.size != file.size:
            yield Difference(f"{file.path} has {entry.size} bytes, and had {file.size} when it was taken{since}")
            continue
        with tree.opened(file.path, entry) as source:
            offset = 0
            for chunk in file.chunks:
                if not _is_right(source, offset, chunk, file.path):
                    at = f"bytes {offset}..{offset + chunk.size}"
                    yield Difference(f"{file.path}: {at} are not those that were taken{since}")
                offset += chunk.size


def _is_right(source: OpenFile, offset: int, chunk: Chunk, path: str) -> bool:
    """Whether a file has a chunk's bytes. Raises UnstableRead, an OSError, if its reads differ from each other."""

    def check() -> None:
        actual = digest(source.read(offset, chunk.size))
        if actual != chunk.xxh3_128:
            source.drop_cached()
            error = CorruptChunk(path)
            error.read_digest = actual
            raise error

    try:
        proven(check, path)
    except CorruptChunk:
        return False
    return True


def _why_edited(entry: ListedEntry, manifest: Manifest) -> str:
    """Say if a file was written to after the save; such an edit is no decay of the disk, and a person may want it."""
    at = made_at(entry.mtime_ns)
    return f"; it was written to at {at:%Y-%m-%d %H:%M:%S} UTC, after the save" if at > manifest.created_at else ""
