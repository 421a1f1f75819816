"""Verified chunks of a part, one after the other, to a destination: the one way by which a restore gets bytes.

Invariant: a chunk is passed on only if its digest was right in memory of this process that nothing else writes to. That
memory is reused for the next chunk, because the first touch of fresh memory costs more than a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from tierd.core.manifest import ChunkPlace, Manifest
from tierd.spool.direct_io import memory_for
from tierd.spool.verified_reads import chunk_buffer_size, read_chunks

HANDS = 2  # threads that verify: one on each of two cores; more of them would touch more memory

Work = deque[ChunkPlace]  # what is left to do; threads take from it


class ChunkMemory:
    """Memory of chunks, which one hand holds after the other, also for another part."""

    def __init__(self) -> None:
        self._idle: list[memoryview] = []

    @contextmanager
    def hold(self, size: int) -> Iterator[memoryview]:
        """Provide at least `size` bytes, which begin at a page, until the context ends. Several threads may do so."""
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = memory_for(size)
        if len(memory) < size:  # dropped, so that soon all are as large as the largest chunk
            memory = memory_for(size)
        try:
            yield memory
        finally:
            self._idle.append(memory)

    def clear(self) -> None:
        """Free what nobody holds."""
        self._idle.clear()


def chunk_starts(manifest: Manifest) -> list[list[int]]:
    """Return for each file where its chunks begin, in bytes, and its size."""
    return [[0, *accumulate(chunk.size for chunk in file.chunks)] for file in manifest.files]


class VerifiedChunks(ABC):
    """The chunks of one part, from one place.

    Attributes:
        manifest: what the part is, by which chunks are verified.
        place: where they come from, as `Restored.tier` names it.
    """

    def __init__(self, manifest: Manifest, place: str, memory: ChunkMemory) -> None:
        self.manifest, self.place, self._memory = manifest, place, memory

    @abstractmethod
    def each(self, work: Work) -> Iterator[tuple[ChunkPlace, memoryview]]:
        """Take chunks from `work` until none is left, and yield each with its verified bytes, which the next one
        overwrites. Several threads may do so.

        Raises:
            CorruptChunk, ManifestError, ObjectNotFound, OSError, DaemonUnavailable: a chunk could not be had here.
        """

    @abstractmethod
    def close(self) -> None:
        """End what waits in other threads; harmless twice."""


class SpoolChunks(VerifiedChunks):
    """The chunks of a part whose files lie in `home`."""

    def __init__(self, home: Path, manifest: Manifest, place: str, memory: ChunkMemory) -> None:
        super().__init__(manifest, place, memory)
        self._home, self._starts = home, chunk_starts(manifest)
        self._buffer_bytes = max(
            (chunk_buffer_size(file, index) for file in manifest.files for index in range(len(file.chunks))), default=0
        )

    def each(self, work: Work) -> Iterator[tuple[ChunkPlace, memoryview]]:
        with self._memory.hold(self._buffer_bytes) as memory:
            while True:
                try:
                    number, index = where = work.popleft()
                except IndexError:
                    return
                file = self.manifest.files[number]
                data = read_chunks(self._home / file.path, file, index, index + 1, memory, self._starts[number][index])
                yield where, data

    def close(self) -> None:
        """Nothing waits."""


def bring(
    chunks: VerifiedChunks,
    places: Iterable[ChunkPlace],
    put: Callable[[ChunkPlace, memoryview], None],
    done: Callable[[ChunkPlace], None] = lambda where: None,
) -> None:
    """Call `put` with each of these chunks, in order as nearly as several threads permit, then `done` in this thread.

    When this returns or raises, no thread calls `put` any more. Raises as `VerifiedChunks.each`, and what the calls
    raise.
    """
    work: Work = deque(places)
    ended: SimpleQueue[ChunkPlace | BaseException | None] = SimpleQueue()

    def hand() -> None:
        try:
            for where, data in chunks.each(work):
                put(where, data)
                ended.put(where)
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    threads = [Thread(target=hand, name="tierd-restore", daemon=True) for _ in range(min(HANDS, len(work)))]
    started: list[Thread] = []
    try:
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:  # the system grants no more threads
                break
            started.append(thread)
        if not started:
            hand()
        for _ in range(max(len(started), 1)):
            while (event := ended.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                done(event)
    except BaseException:
        work.clear()
        chunks.close()
        raise
    finally:
        for thread in started:
            thread.join()
