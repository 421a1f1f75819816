"""Verified chunks of a part, one after the other, to a destination: the one way by which a restore gets bytes.

Invariant: a chunk is passed on only if its digest was right in memory of this process that nothing else writes to. That
memory is reused for the next chunk, because the first touch of fresh memory costs more than a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from tierd.core.manifest import ChunkPlace, Manifest
from tierd.spool.direct_io import memory_for
from tierd.spool.verified_reads import chunk_buffer_size, read_chunks

HANDS = 2  # threads that verify: one on each of two cores; more of them would touch more memory

Work = deque[ChunkPlace]  # what is left to do; threads take from it


class VerifiedChunks(ABC):
    """The chunks of one part, from one place.

    Attributes:
        manifest: what the part is, by which chunks are verified.
        place: where they come from, as `Restored.tier` names it.
    """

    def __init__(self, manifest: Manifest, place: str) -> None:
        self.manifest, self.place = manifest, place
        self._starts = [[0, *accumulate(chunk.size for chunk in file.chunks)] for file in manifest.files]

    def start(self, where: ChunkPlace) -> int:
        """Return where a chunk begins in its file, in bytes."""
        number, index = where
        return self._starts[number][index]

    def indexes(self, number: int, begin: int, end: int) -> range:
        """Return which chunks of a file have its bytes from `begin` to before `end`."""
        starts = self._starts[number]
        return range(bisect_right(starts, begin) - 1, bisect_left(starts, end))

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

    def __init__(self, home: Path, manifest: Manifest, place: str) -> None:
        super().__init__(manifest, place)
        self._home = home
        self._buffer_bytes = max(
            (chunk_buffer_size(file, index) for file in manifest.files for index in range(len(file.chunks))), default=0
        )

    def each(self, work: Work) -> Iterator[tuple[ChunkPlace, memoryview]]:
        memory = memory_for(self._buffer_bytes)
        while True:
            try:
                number, index = where = work.popleft()
            except IndexError:
                return
            file = self.manifest.files[number]
            data = read_chunks(self._home / file.path, file, index, index + 1, memory, self.start(where))
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
