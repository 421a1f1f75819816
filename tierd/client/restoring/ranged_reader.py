"""Read ranges of one checkpoint's files, in whichever place they lie.

Invariant: returned bytes were verified on this read, in this process. Bytes come from the spool. The daemon fetches
chunks that the spool lacks or holds wrong, and only the chunks that are needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Lock
from types import MappingProxyType

import msgspec

from tierd.client.restoring.part_fetch import FetchProgress, fetched_tiers, read_draft
from tierd.core.errors import CorruptChunk, DaemonUnavailable, ManifestError, ObjectNotFound, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import File, Manifest
from tierd.core.timeline.launch_chain import check_origin
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import MAX_REQUEST, Fetch
from tierd.spool.direct_io import LARGE, PAGE, memory_for
from tierd.spool.file_io import drop_cached
from tierd.spool.spool import Spool
from tierd.spool.verified_reads import read_chunk, read_chunks

_BATCH = 64 << 20  # bytes that are read at once, unless one entry is larger
_RUNS = 1000  # runs of chunks for one file in one request
NO_ORIGINS: Mapping[str, CheckpointId | None] = MappingProxyType({})
_TRIES = 3  # how often a file is searched, because its part may be committed or pruned between two searches


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a file's bytes, and its chunks `first` to before `end`, which cover the bytes `start` to `stop`."""

    part: PartId
    path: str
    file: File = field(compare=False)  # not compared or hashed, because it holds the list of all chunks
    offset: int
    length: int
    first: int
    end: int
    start: int
    stop: int


class PartRanges(ABC):
    """Verified ranges of one checkpoint's files, in whichever place they lie.

    No part is read that does not belong together with the known origins, or with the parts that were read before.
    """

    def __init__(self, origins: Mapping[str, CheckpointId | None] = NO_ORIGINS) -> None:
        self._origins = dict(origins)
        self._files: dict[PartId, dict[str, tuple[File, list[int]]]] = {}

    @abstractmethod
    def manifest(self, part: PartId) -> Manifest:
        """Return the manifest of a part. Raises as `fill`."""

    @abstractmethod
    def fill(self, memory: memoryview, spans: Collection[Span], base: int = 0) -> None:
        """Read and verify `spans`, ranges of one file, into `memory`, an image of that file from byte `base` on.

        Raises:
            CorruptChunk, ManifestError: proven corrupt in every place.
            ObjectNotFound: no place has the part.
            StoreUnavailable, DaemonUnavailable: a place that may hold a right copy did not answer.
        """

    def span(self, part: PartId, path: str, offset: int = 0, length: int | None = None) -> Span:
        """Return a range of a file, by default all of it. Raises `ManifestError` if the part has no such bytes."""
        if part not in self._files:
            self._files[part] = {
                file.path: (file, [0, *accumulate(chunk.size for chunk in file.chunks)])
                for file in self.manifest(part).files
            }
        file, edges = self._files[part].get(path, (None, []))
        length = file.size if file and length is None else length
        if file is None or not isinstance(offset, int) or not isinstance(length, int):
            raise ManifestError(f"{part}: it has no file {path!r}")
        if offset < 0 or length < 1 or offset + length > file.size:
            raise ManifestError(f"{part}: {path!r} has {file.size} bytes, and none at {offset}..{offset + length}")
        first, end = bisect_right(edges, offset) - 1, bisect_right(edges, offset + length - 1)
        return Span(part, path, file, offset, length, first, end, edges[first], edges[end])


class PartFiles(PartRanges):
    """Read one checkpoint from the spool and through the daemon.

    Args:
        link: the connection to the daemon, which keeps fetched chunks while it is open; None without a daemon. A part
            that is already in the spool is not kept there: if retention removes it, the daemon fetches it.
        alone: why there is no connection although tiers may have copies; empty without tiers.

    Attributes:
        tiers: the tiers from which chunks were fetched.
    """

    def __init__(
        self,
        spool: Spool,
        checkpoint: CheckpointId,
        world: int,
        link: DaemonConnection | None,
        alone: str,
        origins: Mapping[str, CheckpointId | None] = NO_ORIGINS,
    ) -> None:
        super().__init__(origins)
        self._spool, self._link, self._alone = spool, link, alone
        self.checkpoint, self.world = checkpoint, world
        self.tiers: list[str] = []
        self._manifests: dict[PartId, Manifest] = {}
        self._memory = memoryview(b"")
        self._filling = Lock()  # `read` has one memory, and other threads may read headers meanwhile
        self._asking = Lock()  # a connection carries one request at a time, and threads may find manifests meanwhile

    def part(self, rank: int) -> PartId:
        return PartId(self.checkpoint, rank, self.world)

    def manifest(self, part: PartId) -> Manifest:
        if part not in self._manifests:
            manifest = self._find_manifest(part)
            check_origin(manifest, self._origins)
            self._manifests[part] = manifest
        return self._manifests[part]

    def prefetch(self, spans: Iterable[Span]) -> None:
        """Have the daemon fetch the chunks of `spans` that the spool lacks. Raises as `read`."""
        chunks: dict[PartId, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for span in spans:
            chunks[span.part][span.path].update(range(span.first, span.end))
        for part, files in sorted(chunks.items()):
            if not self._spool.has(part):
                self._ask(part, {path: _runs(numbers) for path, numbers in sorted(files.items())})

    def read(self, spans: Iterable[Span]) -> Iterator[tuple[Span, memoryview]]:
        """Yield each span with its verified bytes, in file order. The next span overwrites them. Raises as `fill`."""
        for batch in _batches(sorted(spans, key=lambda span: (span.part, span.path, span.offset))):
            head, last = batch[0], batch[-1]
            data = self._read(head.part, head.file, head.first, last.end, last.stop - head.start)
            for span in batch:
                begin = span.offset - head.start
                yield span, data[begin : begin + span.length]

    def fill(self, memory: memoryview, spans: Collection[Span], base: int = 0) -> None:
        with self._filling:
            self.prefetch(spans)
            for span, data in self.read(spans):
                begin = span.offset - base
                memory[begin : begin + span.length] = data

    def close(self) -> None:
        """Release the memory that was read into."""
        self._memory = memoryview(b"")

    def _read(self, part: PartId, file: File, first: int, end: int, size: int) -> memoryview:
        if len(self._memory) < size + 2 * PAGE:
            self._memory = memoryview(b"")  # released before the new memory is allocated
            self._memory = memory_for(max(size, _BATCH if size > LARGE else LARGE) + 2 * PAGE)
        local: Exception | None = None
        for _ in range(_TRIES):
            home = self._home(part)
            try:
                return read_chunks(home / file.path, file, first, end, self._memory)
            except (CorruptChunk, OSError) as error:
                local = error.with_traceback(None)
            if home == self._home(part):
                self._put_right(part, {file.path: [(first, end)]}, local)
        raise StoreUnavailable(f"{part} was just repaired, and reads back wrong from the spool: {local}") from local

    def _home(self, part: PartId) -> Path:
        return self._spool.path(part) if self._spool.has(part) else self._spool.fetch_directory(part)

    def _find_manifest(self, part: PartId) -> Manifest:
        local: Exception | None = None
        for _ in range(_TRIES):
            try:
                if self._spool.has(part):
                    return self._spool.manifest(part)
                return read_draft(self._spool.fetch_directory(part), part)
            except (CorruptChunk, ManifestError, ObjectNotFound, OSError) as error:
                local = error.with_traceback(None)
            self._put_right(part, None if self._spool.has(part) else {}, local)
        raise StoreUnavailable(f"{part}: its manifest was just brought, and cannot be read: {local}") from local

    def _put_right(
        self, part: PartId, chunk_runs: Mapping[str, Sequence[tuple[int, int]]] | None, why: Exception
    ) -> None:
        """Have the daemon repair or fetch `chunk_runs`. Without one, quarantine what is proven corrupt and raise."""
        if self._link is not None:
            self._ask(part, chunk_runs)
            return
        if self._alone:
            raise DaemonUnavailable(
                f"{part} cannot be read from the spool ({why}), and whether a tier has it right cannot be asked: "
                f"{self._alone}"
            ) from why
        if not self._spool.has(part):
            raise ObjectNotFound(f"{part} is not in the spool any more: {why}") from why
        if isinstance(why, OSError):
            raise StoreUnavailable(f"{part}: the spool cannot be read: {why}") from why
        if self._is_right_on_disk(part, chunk_runs or {}):
            return  # the caller reads again
        self._spool.quarantine(part)
        raise CorruptChunk(f"local: {why}") from why

    def _is_right_on_disk(self, part: PartId, chunk_runs: Mapping[str, Sequence[tuple[int, int]]]) -> bool:
        """Read the manifest and the wanted chunks once more: one wrong read proves nothing about the disk."""
        home = self._spool.path(part)
        drop_cached(home)
        try:
            files = {file.path: file for file in self._spool.manifest(part).files}
            for path, runs in chunk_runs.items():
                for index in (index for first, end in runs for index in range(first, end)):
                    read_chunk(home / path, files[path], index)
        except (CorruptChunk, ManifestError):
            return False
        except OSError as error:
            raise StoreUnavailable(f"{part}: the spool cannot be read: {error}") from error
        return True

    def _ask(self, part: PartId, chunk_runs: Mapping[str, Sequence[tuple[int, int]]] | None) -> None:
        if self._link is None:
            self._put_right(part, chunk_runs, ObjectNotFound(f"{part} is not in the spool"))
            return
        for portion in (None,) if chunk_runs is None else _portions(chunk_runs):
            with self._asking, FetchProgress(part) as fetching:
                answer = self._link.ask(Fetch(part=part, wanted=portion), on_progress=fetching)
            tier_names = fetched_tiers(part, answer)
            self.tiers += [name for name in tier_names if name not in self.tiers]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _portions(chunk_runs: Mapping[str, Sequence[tuple[int, int]]]) -> Iterator[dict[str, tuple[tuple[int, int], ...]]]:
    """Split `chunk_runs` into portions that fit one request each; yields at least one."""
    portion: dict[str, tuple[tuple[int, int], ...]] = {}
    size = 0
    for path, runs in chunk_runs.items():
        for begin in range(0, len(runs), _RUNS):
            batch = tuple(runs[begin : begin + _RUNS])
            weight = len(msgspec.json.encode({path: batch})) + len(path.encode())
            if path in portion or (portion and size + weight > MAX_REQUEST // 2):
                yield portion
                portion, size = {}, 0
            portion[path] = batch
            size += weight
    yield portion


def _batches(spans: Iterable[Span], limit: int = _BATCH) -> Iterator[list[Span]]:
    """Group spans that are read at once: neighbours without an unneeded chunk between them, `limit` bytes in all."""
    batch: list[Span] = []
    for span in spans:
        if batch:
            head, last = batch[0], batch[-1]
            near = (span.part, span.path) == (head.part, head.path) and span.first <= last.end
            if not near or span.stop - head.start > limit or span.end < last.end:
                yield batch
                batch = []
        batch.append(span)
    if batch:
        yield batch
