"""The manifest: the immutable description of one rank's part. `FORMAT.md` describes the format.

Untrusted bytes become a `Manifest` only through `core/manifest_codec.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Annotated, TypeAlias

import msgspec
import xxhash
from msgspec import Meta

from tierd.core.errors import ManifestError
from tierd.core.ids import MAX_STEP, MAX_WORLD, CheckpointId, PartId, chunk_owner

VERSION = 4  # of a manifest that is written and names no delta
WITH_DELTAS = 5  # of one that does, because readers of version 4 take that for corruption; the newest one
FIRST, PATCHED = 1, 3  # older versions, which are read; one of the first names no patches
# How the codec of a chunk begins that is stored as its difference from another one, its base: in blocks or in elements.
PATCH, DELTA = "patch", "delta"
MAX_PATCHES = 16  # the most of both in a row that are read, from a chunk to the whole chunk at which its bases end
MANIFEST_NAME = "manifest.json"  # inside a part's directory in the spool
TENSORS = "tensors.safetensors"  # the file in which `save` stores every tensor
UNIT_NAME = "unit.json"  # in a checkpoint of another program, the file in which tierd describes it
TREE = "state.json"  # the file in which `save` stores all other values, with references to the tensors
DRAFT_NAME = f"{MANIFEST_NAME}.new"  # a manifest's name while the manifest is repaired or the part is fetched
_RESERVED = (MANIFEST_NAME, DRAFT_NAME)
CHUNK_SIZE = 32 << 20  # the largest chunk that tierd writes, in bytes
MAX_CHUNK_SIZE = 256 << 20  # the largest chunk that tierd reads, in bytes, because a chunk is held in memory whole
MAX_FILES = 100_000
MAX_METRICS = 1_000
MAX_REPLICAS = 100_000  # tensors of which a manifest has a fingerprint
MAX_SENDERS = 4096  # homes of which a manifest tells how many nodes send their chunks
MAX_COPIES = 16  # the most runs that a manifest remembers as those from which its checkpoint was copied

ChunkPlace: TypeAlias = tuple[int, int]  # a chunk's place in a manifest: the file's number, the index in the file
ContentId: TypeAlias = tuple[str, int]  # digest and size in bytes of a chunk's raw bytes
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Attempt = Annotated[str, Meta(pattern=r"^[0-9a-f]{12}-[0-9a-f]{8}\Z")]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_WORLD)]
RunName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
TensorName = Annotated[str, Meta(max_length=4096)]
Fingerprint = Annotated[str, Meta(pattern=r"^[a-z0-9]{1,16}:[0-9a-f]{32}\Z")]  # the function, and its result
MetricName = Annotated[str, Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f]+\Z")]  # they are printed
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class StoredChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chunk's encoded form on a tier, which is byte-identical on every tier.

    `checked` names the checksum by which the tier itself verified the put; if it is empty, the object was read back and
    compared. `base` is the chunk from which a patch differs, of equal size; only a patch has one.
    """

    codec: Annotated[str, Meta(pattern=r"^[a-z0-9]{1,16}\Z")]
    size: Annotated[int, Meta(ge=0, le=MAX_CHUNK_SIZE + (MAX_CHUNK_SIZE >> 4))]
    xxh3_128: Digest
    key: Annotated[str, Meta(max_length=128)]  # relative to the run; may lie under another checkpoint
    checked: Annotated[str, Meta(pattern=r"^[a-z0-9-]{0,16}\Z")] = ""
    base: Chunk | None = None

    @property
    def directory(self) -> str:
        """The prefix of the key up to its last slash, that included."""
        return self.key[: self.key.rindex("/") + 1]

    @property
    def form(self) -> tuple[str, int, str]:
        """The codec, size and digest, which are equal for two objects exactly if they have the same bytes."""
        return self.codec, self.size, self.xxh3_128


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A range of a file: `size` raw bytes and their digest. `stored` is absent in the spool.

    `home` is the lowest rank that holds the same bytes by declaration; None if only this manifest's rank does.
    """

    size: Annotated[int, Meta(ge=1, le=MAX_CHUNK_SIZE)]
    xxh3_128: Digest
    stored: StoredChunk | None = None
    home: RankNumber | None = None

    @property
    def content(self) -> ContentId:
        """The identity of the raw bytes, independently of the part and of how they are stored."""
        return self.xxh3_128, self.size

    def chain(self) -> Iterator[Chunk]:
        """Yield the chunk, and the bases below it if it is stored as a patch."""
        chunk: Chunk | None = self
        while chunk is not None:
            yield chunk
            chunk = chunk.stored.base if chunk.stored else None

    def objects(self) -> Iterator[StoredChunk]:
        """Yield all objects that are needed to read the chunk from a tier: its own, and those of its bases."""
        return (chunk.stored for chunk in self.chain() if chunk.stored)


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file by its relative path. Its `chunks` cover its `size` bytes in order and without gaps."""

    path: Annotated[str, Meta(min_length=1, max_length=1024)]
    size: Annotated[int, Meta(ge=0)]
    chunks: tuple[Chunk, ...]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that an attempt resumed from: a link of the timeline."""

    step: Step
    attempt: Attempt


class Ancestor(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint of another run from which a run started, as a fine-tune does. It has no part in the timeline."""

    run: RunName
    step: Step
    attempt: Attempt

    def __str__(self) -> str:
        return f"{self.run} step {self.step} (attempt {self.attempt})"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The description of one rank's part. `created` is RFC 3339 in UTC; `metrics` may contain NaN or infinities.

    `copied_from` names the runs from which `tierd copy --as` copied the checkpoint, the original one first.
    `started_from` is as the trainer told it. `division` is the digest of how the ranks of a node divide replicated
    tensors; parts that lack some tensors belong together if it is the same. It is empty where a node has one rank.
    `replicas` are fingerprints of some tensors that should be the same on all ranks, as this rank held them. `senders`
    has, by home, this node's number among the nodes that hold the home's chunks, how many they are, and whether their
    parts have the same of them.
    """

    version: int
    run: str
    step: Step
    attempt: Attempt
    resumed_from: Origin | None
    rank: RankNumber
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD)]
    created: str
    writer: Annotated[str, Meta(max_length=64, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
    metrics: Annotated[dict[MetricName, float | str], Meta(max_length=MAX_METRICS)]
    files: Annotated[tuple[File, ...], Meta(max_length=MAX_FILES)]
    copied_from: Annotated[tuple[RunName, ...], Meta(max_length=MAX_COPIES)] = ()
    started_from: Ancestor | None = None
    division: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""
    replicas: Annotated[dict[TensorName, Fingerprint], Meta(max_length=MAX_REPLICAS)] = {}
    senders: Annotated[dict[RankNumber, tuple[RankNumber, RankNumber, bool]], Meta(max_length=MAX_SENDERS)] = {}

    @classmethod
    def of(
        cls,
        part: PartId,
        origin: CheckpointId | None,
        metrics: Mapping[str, float],
        created: datetime,
        writer: str,
        files: tuple[File, ...] = (),
        started_from: Ancestor | None = None,
    ) -> Manifest:
        """Make the manifest of a part that tierd `writer` (a version) writes. The attempt resumed from `origin`."""
        return cls(
            version=VERSION,
            run=part.checkpoint.run,
            step=part.checkpoint.step,
            attempt=part.checkpoint.attempt,
            resumed_from=Origin(step=origin.step, attempt=origin.attempt) if origin else None,
            rank=part.rank,
            world_size=part.world,
            created=created.isoformat(),
            writer=f"tierd {writer}",
            metrics=metrics_to_json(metrics),
            files=files,
            started_from=started_from,
        )

    @property
    def part(self) -> PartId:
        return PartId(CheckpointId(self.run, self.attempt, self.step), self.rank, self.world_size)

    @property
    def origin(self) -> CheckpointId | None:
        """The checkpoint from which this attempt resumed; None if it began from nothing."""
        origin = self.resumed_from
        return CheckpointId(self.run, origin.attempt, origin.step) if origin else None

    @property
    def created_at(self) -> datetime:
        return datetime.fromisoformat(self.created)

    @property
    def is_watched(self) -> bool:
        """Whether another program wrote the files, so that their times are in `created`."""
        return any(file.path == UNIT_NAME for file in self.files)

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics as floats, non-finite ones included."""
        return {name: float(value) for name, value in self.metrics.items()}

    @property
    def size(self) -> int:
        """Raw bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def stored_size(self) -> int:
        """Bytes of objects on a tier, each counted once, without bases of patches; 0 for a manifest of the spool."""
        return sum({chunk.stored.key: chunk.stored.size for chunk in self.chunks() if chunk.stored}.values())

    @property
    def homed_sizes(self) -> dict[int, int]:
        """The part of `stored_size` in chunks that other ranks may name, too, as `_group_sizes`."""
        return self._group_sizes(chunk.stored for chunk in self.chunks() if chunk.stored and chunk.home is not None)

    @property
    def borrowed_sizes(self) -> dict[int, int]:
        """The part of `stored_size` under other checkpoints' names, as `_group_sizes`. Chunks with a home have the
        digests that they have in `homed_sizes`."""
        own = {directory for directory in self.directories if chunk_owner(self.run, directory) == self.part.checkpoint}
        borrowed = [chunk for chunk in self.chunks() if chunk.stored and chunk.stored.directory not in own]
        homed = {chunk.stored.key for chunk in borrowed if chunk.stored and chunk.home is not None}
        return {
            **self._group_sizes(chunk.stored for chunk in borrowed if chunk.stored and chunk.stored.key in homed),
            **self._group_sizes(chunk.stored for chunk in borrowed if chunk.stored and chunk.stored.key not in homed),
        }

    @staticmethod
    def _group_sizes(objects: Iterable[StoredChunk]) -> dict[int, int]:
        """Return the bytes of these objects in each directory, by an 8-byte digest of their keys there."""
        sizes = {stored.key: stored.size for stored in objects}
        keys: dict[str, list[str]] = {}
        for key in sorted(sizes):
            keys.setdefault(key[: key.rindex("/")], []).append(key)
        return {
            xxhash.xxh3_64_intdigest("\n".join(group).encode()): sum(sizes[key] for key in group)
            for group in keys.values()
        }

    @property
    def owners(self) -> frozenset[CheckpointId]:
        """The checkpoints under whose names the objects are stored on a tier: its own, and those of shared chunks and
        of bases."""
        owners = {chunk_owner(self.run, directory) for directory in self.directories}
        return frozenset(owner for owner in owners if owner)

    @property
    def directories(self) -> frozenset[str]:
        """The prefixes of the keys of all objects on a tier, relative to the run, each with its slash."""
        return frozenset(stored.directory for stored in self.objects())

    def chunks(self) -> Iterator[Chunk]:
        for file in self.files:
            yield from file.chunks

    def chunk(self, where: ChunkPlace) -> Chunk:
        number, index = where
        return self.files[number].chunks[index]

    def places(self) -> Iterator[tuple[ChunkPlace, Chunk]]:
        """Yield every chunk with its place."""
        for number, file in enumerate(self.files):
            for index, chunk in enumerate(file.chunks):
                yield (number, index), chunk

    def objects(self) -> Iterator[StoredChunk]:
        """Yield every object on a tier that the manifest names, also those of bases; one that it names twice, twice."""
        for chunk in self.chunks():
            yield from chunk.objects()

    def with_chunks(self, chunks: Mapping[ChunkPlace, Chunk]) -> Manifest:
        """The same part with other entries for these chunks, in the version that is written."""
        files = (
            msgspec.structs.replace(
                file, chunks=tuple(chunks.get((number, index), chunk) for index, chunk in enumerate(file.chunks))
            )
            for number, file in enumerate(self.files)
        )
        changed = msgspec.structs.replace(self, files=tuple(files))
        has_delta = any(patch_kind(stored.codec) == DELTA for stored in changed.objects())
        return msgspec.structs.replace(changed, version=WITH_DELTAS if has_delta else VERSION)

    def under(self, run: str) -> Manifest:
        """The same part under another run's name, which remembers this one's."""
        if run == self.run:
            return self
        copied_from = (*self.copied_from, self.run)[-MAX_COPIES:]
        return msgspec.structs.replace(self, run=run, copied_from=copied_from)

    def same_content(self, manifest: Manifest) -> bool:
        """Whether both describe the same raw bytes at the same paths, however they are stored."""

        def raw(manifest: Manifest) -> list[tuple[str, list[ContentId]]]:
            return [(file.path, [chunk.content for chunk in file.chunks]) for file in manifest.files]

        return self.part == manifest.part and self.resumed_from == manifest.resumed_from and raw(self) == raw(manifest)


def patch_kind(codec: str) -> str:
    """Return `PATCH` or `DELTA` for a codec that nobody can read without the base; empty for others."""
    return next((kind for kind in (PATCH, DELTA) if codec.startswith(kind)), "")


def is_patch(codec: str) -> bool:
    """Whether a codec is that of a patch or a delta."""
    return bool(patch_kind(codec))


def is_metric_name(name: object) -> bool:
    """Whether `name` can name a metric. Control characters are refused, because names are printed unescaped."""
    return isinstance(name, str) and 0 < len(name) <= 256 and not _CONTROL.search(name)


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """The metrics for JSON. NaN and infinities become strings that `float` parses, because JSON has no such numbers."""
    finite = float("inf")
    return {name: value if -finite < value < finite else str(value) for name, value in metrics.items()}


def chunk_sizes(size: int, chunk_size: int = CHUNK_SIZE) -> list[int]:
    """The sizes of a file's chunks, regardless of its contents: full chunks, then the rest. An empty file has none."""
    full, remainder = divmod(size, chunk_size)
    return [chunk_size] * full + ([remainder] if remainder else [])


def check_path(path: str, where: str) -> None:
    """Refuse a path that could leave its directory, shadow the manifest or not exist on a common file system.

    Raises:
        ManifestError: the path is absolute or reserved, contains a control character, or has a component that is empty,
            ``.``, ``..`` or longer than 255 bytes.
    """
    try:
        pieces = [piece.encode() for piece in path.split("/")]
    except UnicodeEncodeError as error:
        raise ManifestError(f"{where}: {path!r} is not valid Unicode") from error
    if any(piece in (b"", b".", b"..") or len(piece) > 255 for piece in pieces) or _CONTROL.search(path):
        raise ManifestError(f"{where}: {path!r} is not a safe relative path")
    if path.split("/")[0] in _RESERVED:
        raise ManifestError(f"{where}: {path!r} is the manifest's own name")
