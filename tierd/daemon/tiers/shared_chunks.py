"""A compact record of the shared chunks that each manifest names, so that a prune need not read manifests again.

Invariant: the record may claim that a chunk is still named when it is not, never the reverse. A key is recorded as
eight bytes of its digest. If two keys agree in these, an unnamed object is kept, and the next prune of its owner finds
it again.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakValueDictionary

import xxhash

from tierd.core.ids import CheckpointId, chunk_owner
from tierd.core.manifest import Manifest
from tierd.core.planning.checkpoint_summary import CheckpointSummary

MAX_TABLE_BYTES = 32 << 20  # for each tier; beyond it, a prune that needs a manifest's chunks reads the manifest again
_Name: TypeAlias = tuple[frozenset[CheckpointId], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SharedChunks:
    """The chunks of other checkpoints that one manifest names."""

    owners: frozenset[CheckpointId]  # the checkpoints under whose names the chunks are stored
    # Owner -> the sorted digests of keys; None if only the owners are recorded.
    chunks: Mapping[CheckpointId, array[int]] | None


NO_SHARED_CHUNKS = SharedChunks(frozenset(), {})


def key_digest(key: str) -> int:
    """Return an 8-byte digest for a chunk's key, relative to its run."""
    return xxhash.xxh3_64_intdigest(key.encode())


def chunks_named_by(manifest: Manifest, *, include_own: bool = False) -> SharedChunks:
    """Return the chunks of other checkpoints that a manifest names; with `include_own`, all chunks that it names."""
    marks: dict[CheckpointId, set[int]] = {}
    owners = {directory: chunk_owner(manifest.run, directory) for directory in manifest.directories}
    for stored in manifest.objects():
        owner = owners[stored.directory]
        if owner and (include_own or owner != manifest.part.checkpoint):
            marks.setdefault(owner, set()).add(key_digest(stored.key))
    return SharedChunks(
        frozenset(marks), {owner: array("Q", sorted(owner_marks)) for owner, owner_marks in marks.items()}
    )


def chunks_of_summary(summary: CheckpointSummary) -> SharedChunks:
    """Return the shared chunks that all manifests of a checkpoint together name, by their summary."""
    by_owner = {CheckpointId.parse(summary.run, name): chunks for name, chunks in summary.shared.items()}
    chunks = {owner: _unpack(packed) for owner, packed in by_owner.items() if owner and packed is not None}
    owners = frozenset(owner for owner in by_owner if owner)
    return SharedChunks(owners, chunks if len(chunks) == len(owners) else None)


def pack_chunks(digests: Iterable[int]) -> bytes:
    """Return the digests as a summary has them: sorted, eight bytes each, big-endian."""
    packed = array("Q", sorted(digests))
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def _unpack(packed: bytes) -> array[int]:
    digests = array("Q", packed)
    if sys.byteorder == "little":
        digests.byteswap()
    return digests


class SharedChunkTable:
    """Keep the shared chunks of one tier's manifests small: equal sets are stored once, within a limit of memory."""

    def __init__(self, limit_bytes: int = MAX_TABLE_BYTES) -> None:
        self._limit = self._room = limit_bytes
        self._sets: WeakValueDictionary[bytes, array[int]] = WeakValueDictionary()
        self._all: WeakValueDictionary[_Name, SharedChunks] = WeakValueDictionary()

    def count(self) -> None:
        """Recompute the free memory, because records may have been discarded since."""
        self._room = self._limit - sum(len(marks) * marks.itemsize for marks in self._sets.values())

    def deduplicate(self, shared: SharedChunks) -> SharedChunks:
        """Return an equal record to keep; without the chunks if there is no memory for them."""
        if not shared.owners:
            return NO_SHARED_CHUNKS
        by_owner = shared.chunks or {}
        kept_chunks = {
            owner: marks
            for owner in sorted(by_owner)
            if (marks := self._share_marks(owner, by_owner[owner])) is not None
        }
        is_complete = len(kept_chunks) == len(shared.owners)
        name = shared.owners, tuple(map(id, kept_chunks.values())) if is_complete else None
        return self._all.setdefault(name, SharedChunks(shared.owners, kept_chunks if is_complete else None))

    def _share_marks(self, owner: CheckpointId, marks: array[int]) -> array[int] | None:
        name = xxhash.xxh3_128_digest(f"{owner.run} {owner.name} ".encode() + marks.tobytes())
        old = self._sets.get(name)
        if old is None and len(marks) * marks.itemsize <= self._room:
            self._room -= len(marks) * marks.itemsize
            old = self._sets[name] = marks
        return old


class NamedChunks:
    """The chunks of some checkpoints that manifests name."""

    def __init__(self, owners: Iterable[CheckpointId]) -> None:
        self._sets: dict[CheckpointId, dict[int, array[int]]] = {owner: {} for owner in owners}
        self._all: dict[CheckpointId, frozenset[int]] = {}

    def add(self, shared: SharedChunks) -> None:
        """Add the chunks that one manifest names. Most manifests name the same sets, which are stored once."""
        for owner, marks in (shared.chunks or {}).items():
            if owner in self._sets:
                self._sets[owner][id(marks)] = marks
                self._all.pop(owner, None)

    def of_owner(self, owner: CheckpointId) -> frozenset[int]:
        """Return the digests of the chunks of `owner` that are named."""
        if owner not in self._all:
            self._all[owner] = frozenset().union(*self._sets.get(owner, {}).values())
        return self._all[owner]
