"""What is known from one tier's manifests: a compact record of the shared chunks that each names, so that a prune need
not read manifests again, and the facts from those that observations read.

Invariant: the record may claim that a chunk is still named when it is not, never the reverse. A key is recorded as
eight bytes of its digest. If two keys agree in these, an unnamed object is kept, and the next prune of its owner finds
it again. A manifest that was read is known by its name and the token of its listing.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakValueDictionary

import xxhash

from tierd.core.ids import CheckpointId, PartId, chunk_owner
from tierd.core.manifest import Manifest
from tierd.core.planning.checkpoint_summary import CheckpointSummary
from tierd.core.planning.copies import ManifestFacts
from tierd.core.replicas.shares import differing_divisions
from tierd.daemon.tiers.manifest_listing import (
    ListedCheckpoint,
    ListedManifest,
    SummaryReader,
    Unusable,
    listing_digest,
)
from tierd.stores.base import ObjectInfo, Store

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


@dataclass(slots=True)
class ReadManifest:
    """The facts known from one checkpoint's manifests, or from their summary."""

    # File name -> the token of the object read, and its facts or its defect. It holds the manifests that observations
    # read, and all unusable ones. The token is empty for one that was read while a summary stood for its listing.
    cached_facts: dict[str, tuple[str, ManifestFacts | Unusable]] = field(default_factory=dict)
    # Digest of name and token -> the shared chunks of a usable manifest. Of a million manifests, only this is kept.
    shared: dict[bytes, SharedChunks] = field(default_factory=dict)
    # The owners of shared chunks in the manifests that prunes read.
    bases: set[CheckpointId] = field(default_factory=set)
    # By world size and node, of each division that a manifest has, the part of the lowest rank.
    divisions: dict[tuple[int, str], dict[str, PartId]] = field(default_factory=dict)
    mismatched: dict[PartId, PartId] = field(default_factory=dict)  # as `differing_divisions` returns
    listed: int = 0  # how many manifests the last listing showed
    summary: CheckpointSummary | None = None  # the one that the last observation used
    summary_facts: ManifestFacts | None = None  # rank 0's, by the summary
    summary_chunks: SharedChunks | None = None  # all shared chunks, by the summary

    def note_division(self, part: PartId, division: str) -> None:
        """Note how the rank of a usable manifest divided its state."""
        if division:
            lowest = self.divisions.setdefault((part.world, division[:16]), {})
            lowest[division] = min(part, lowest.get(division, part))
            self.mismatched |= differing_divisions({first: known for known, first in lowest.items()})

    @property
    def unread_count(self) -> int:
        """How many listed manifests name chunks that are not known."""
        is_summarised = self.summary_chunks is not None and self.summary_chunks.chunks is not None
        return 0 if is_summarised else max(0, self.listed - len(self.shared))


class ManifestRecords:
    """What is known of the manifests of one tier.

    Attributes:
        summaries: the summaries on the tier.
        cut: run -> the checkpoints whose deletion was cut off.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.summaries = SummaryReader(store)
        self.cut: dict[str, set[CheckpointId]] = {}
        self._read: dict[CheckpointId, ReadManifest] = {}
        self._memory = SharedChunkTable()
        self._listed: set[str] = set()  # runs whose names were all listed, or have summaries

    def bases(self, checkpoints: Collection[CheckpointId]) -> frozenset[CheckpointId]:
        """Return the checkpoints whose chunks are named by those manifests of `checkpoints` that prunes read."""
        return frozenset[CheckpointId]().union(
            *(self._read[checkpoint].bases for checkpoint in checkpoints if checkpoint in self._read)
        )

    def unread_count(self, run: str) -> float:
        """Estimate how many listed manifests of a run were not read yet; infinite if the run was never listed."""
        if run not in self._listed:
            return math.inf
        return sum(read.unread_count for checkpoint, read in self._read.items() if checkpoint.run == run)

    def is_read(self, checkpoint: CheckpointId) -> bool:
        """Whether all listed manifests of a checkpoint were read, and all their shared chunks are remembered."""
        read = self._read.get(checkpoint, ReadManifest())
        with_chunks = [shared for shared in read.shared.values() if shared.chunks is not None]
        is_summarised = read.summary_chunks is not None and read.summary_chunks.chunks is not None
        return checkpoint.run in self._listed and (is_summarised or len(with_chunks) >= read.listed)

    def shared_by_checkpoint(self, run: str) -> Iterator[tuple[CheckpointId, SharedChunks]]:
        """Yield the remembered shared chunks of a run's manifests, each with the checkpoint that names them."""
        for checkpoint, read in self._read.items():
            if checkpoint.run == run:
                yield from ((checkpoint, shared) for shared in read.shared.values())
                if read.summary_chunks is not None:
                    yield checkpoint, read.summary_chunks

    def shared_chunks(self, checkpoint: CheckpointId, info: ObjectInfo) -> SharedChunks | None:
        """Return the shared chunks that a listed manifest names; None if it was not read or is unusable."""
        read = self._read.get(checkpoint)
        return read.shared.get(_mark(info)) if read else None

    def shared_chunks_of_all(self, checkpoint: CheckpointId, manifests: list[ListedManifest]) -> SharedChunks | None:
        """Return the shared chunks that all these manifests of a checkpoint name; None if no summary describes exactly
        the objects that were listed.
        """
        summary = self._confirmed_summary(checkpoint, manifests)
        return self._use_summary(checkpoint, summary).summary_chunks if summary else None

    def _confirmed_summary(self, checkpoint: CheckpointId, manifests: list[ListedManifest]) -> CheckpointSummary | None:
        """Return a checkpoint's summary if it describes exactly these objects; one that does not is not used again."""
        found = self.summaries.get(checkpoint)
        if found is None:
            return None
        if found[1].world_size == len(manifests) and found[1].listing == listing_digest(manifests):
            return found[1]
        self.summaries.distrust(checkpoint)
        return None

    def _use_summary(self, checkpoint: CheckpointId, summary: CheckpointSummary | None) -> ReadManifest:
        read = self._read.setdefault(checkpoint, ReadManifest())
        if read.summary is not summary:
            read.summary, read.summary_facts, read.summary_chunks = summary, None, None
        if summary and read.summary_chunks is None:
            read.summary_facts = summary.facts
            read.summary_chunks = self._memory.deduplicate(chunks_of_summary(summary))
            read.bases |= read.summary_chunks.owners
            if read.summary_chunks.chunks is not None:
                read.shared.clear()  # it says the same in less memory
        return read

    def _note_manifest(self, entry: ListedCheckpoint, info: ObjectInfo, part: PartId, manifest: Manifest) -> None:
        entry.outcomes[part] = facts = ManifestFacts.of(manifest)
        if info.token:
            self._remember(entry.id, info, chunks_named_by(manifest))
        self._read[entry.id].cached_facts[manifest_name(info)] = info.token, facts
        self._read[entry.id].note_division(part, facts.division)

    def _remember(self, checkpoint: CheckpointId, info: ObjectInfo, shared: SharedChunks) -> None:
        self._read.setdefault(checkpoint, ReadManifest()).shared[_mark(info)] = self._memory.deduplicate(shared)

    def _note_unusable(self, checkpoint: CheckpointId, info: ObjectInfo, why: Unusable) -> None:
        read = self._read.setdefault(checkpoint, ReadManifest())
        read.cached_facts[manifest_name(info)] = info.token, why
        read.shared.pop(_mark(info), None)


def strip_traceback(error: Unusable) -> Unusable:
    """Copy an error without its traceback and causes, because their frames keep the manifest in memory."""
    return type(error)(str(error))


def manifest_name(info: ObjectInfo) -> str:
    return info.key.rpartition("/")[2]


def _mark(info: ObjectInfo) -> bytes:
    return xxhash.xxh3_128_digest(f"{manifest_name(info)} {info.token}".encode())
