"""A part that the daemon fetches: read along while bytes arrive, progress shown, and a fetch without bytes ended.

Invariant: a fetch may take as long as bytes arrive. A fetch that brings no byte for `stalled_s` is given up. That says
nothing about the checkpoint, so no rank tries an older one because of it. Reading along saves time and decides nothing:
a chunk counts once its digest was right in this process's memory, by the manifest that was committed in the end. Chunks
that were not read by then, or were wrong, are read again.

The daemon does not decode into memory that it shares with this process, because the kernel by default gives shared
memory no huge pages: to touch so many small pages took longer than to read the file from a disk of 3 GB/s.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from tierd.client.client_timings import USUAL_TIMINGS
from tierd.client.user_messages import TerminalLine, transfer_rate_text
from tierd.core.errors import CorruptChunk, ManifestError, StoreUnavailable, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import DRAFT_NAME, Chunk, File, Manifest
from tierd.core.manifest_codec import MAX_MANIFEST_SIZE, decode
from tierd.spool.direct_io import LARGE, PAGE, finish_read, memory_for, populate, read_into, set_direct
from tierd.spool.file_io import digest, open_plain
from tierd.spool.spool import Spool
from tierd.spool.verified_reads import read_chunk, read_file

log = logging.getLogger("tierd")

_LOG_INTERVAL_S = 60.0  # seconds between two lines of the log


class FetchProgress:
    """Called with each progress message of a daemon that fetches `part`.

    Rank 0's is a line on the terminal, if there is one, until the context ends. Otherwise it is a line of the log, once
    a minute. Raises `StoreUnavailable` if no byte arrived for `stalled_s`.
    """

    def __init__(self, part: PartId, stalled_s: float = USUAL_TIMINGS.stalled_s) -> None:
        self._stalled_s = stalled_s
        self._part, self._at, self._since = part, -1, time.monotonic()
        self._began: tuple[float, int] | None = None  # when the first size came, and what was there
        self._logged = -_LOG_INTERVAL_S
        self._line = TerminalLine()

    def __call__(self, progress: dict[str, Any]) -> None:
        done_bytes, total, now = int(progress.get("done", -1)), int(progress.get("total", 0)), time.monotonic()
        if done_bytes != self._at:
            self._at, self._since = done_bytes, now
        elif now - self._since >= self._stalled_s:
            raise StoreUnavailable(
                f"{self._part}: no byte came from a tier for {self._stalled_s:.0f} s; restoring again goes on from "
                f"{max(done_bytes, 0)} of {total} bytes"
            )
        if not total:
            return
        began, before = self._began = self._began or (now, done_bytes)
        tiers = ", ".join(progress.get("tiers", ())) or "the tiers"
        sizes = (
            f"{done_bytes / 1e9:.1f} of {total / 1e9:.1f} "
            f"GB{transfer_rate_text(done_bytes - before, now - began, total - done_bytes)}"
        )
        activity = f"fetching {self._part} from {tiers}"
        if self._part.rank == 0 and self._line.draw(f"tierd: {sizes}: {activity}"):  # ranks may share a terminal
            return
        if now - self._logged >= _LOG_INTERVAL_S or done_bytes >= total:
            self._logged = now
            log.info("%s: %s", activity, sizes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._line.__exit__(*error)


_TOUCH = 32 << 20  # bytes of memory that are touched between two checks
# Reads of one chunk before its file is whole, because some file systems do not report which ranges were written.
_TRIES = 2
_READERS = 2  # threads that read what is left once the daemon is done, because the cores are idle then


def read_draft(directory: Path, part: PartId) -> Manifest:
    """Read the manifest of a part that the daemon fetches into `directory`."""
    with os.fdopen(open_plain(directory / DRAFT_NAME), "rb") as file:
        return decode(file.read(MAX_MANIFEST_SIZE + 1), part)


class StreamedPart:
    """Read the files of `part` from the directory that the daemon fills, in a thread, until the context ends.

    `worth` says whether the files are needed in memory at all. `memory` returns the memory to read a file into, in
    whole pages; None to allocate it here.
    """

    def __init__(
        self,
        spool: Spool,
        part: PartId,
        *,
        worth: bool,
        memory: Callable[[File], memoryview | None] = lambda file: None,
        pause_s: float = USUAL_TIMINGS.arrived_s,
    ) -> None:
        self._memory, self._pause_s = memory, pause_s
        self._from, self._part, self._worth = spool.fetch_directory(part), part, worth
        self._images: dict[str, _Image] = {}
        self._end = Event()
        self._thread = Thread(target=self._follow, name="tierd-arriving", daemon=True)

    def __enter__(self) -> StreamedPart:
        try:
            if self._worth:
                self._thread.start()
        except RuntimeError:  # no thread could be started; `read` reads everything later
            pass
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind:  # release the part's memory, because an error's frames may hold this object for long
            self._images.clear()

    def stop(self) -> None:
        """Stop reading. Chunks that were read are kept."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def read(self, home: Path, manifest: Manifest) -> dict[str, memoryview]:
        """Return every file of the part, which now lies in `home`, verified. Raises as `read_file` does."""
        self.stop()
        files = {}
        for file in manifest.files:
            image = self._images.pop(file.path, None)
            same = image is not None and _content(image.file) == _content(file)
            files[file.path] = image.whole(home / file.path) if image and same else read_file(home / file.path, file)
        return files

    def _follow(self) -> None:
        try:
            manifest = self._draft()
            for file in manifest.files if manifest else ():
                if file.size >= LARGE:
                    self._images[file.path] = _Image(file, self._memory(file))
            waiting = list(self._images.values())
            while waiting and not self._end.is_set():
                moved = [image.go_on(self._from / image.file.path, self._end) for image in waiting]
                waiting = [image for image in waiting if image.missing]
                if not any(moved) and not any(image.touch() for image in waiting):
                    self._end.wait(self._pause_s)
        except (OSError, MemoryError, TierdError):  # for example, the directory was just renamed; `read` reads the rest
            pass

    def _draft(self) -> Manifest | None:
        while not self._end.wait(self._pause_s):
            try:
                return read_draft(self._from, self._part)
            except (CorruptChunk, ManifestError):  # the manifest is not there yet, or not all of it
                continue
        return None


class _Image:
    """One file in memory, with the chunks that have arrived."""

    def __init__(self, file: File, memory: memoryview | None = None) -> None:
        self.file, self._owns_memory = file, memory is None
        self._memory = memory_for(file.size) if memory is None else memory
        self.missing: dict[int, int] = {}  # offset of a chunk -> its index
        offset = 0
        for index, chunk in enumerate(file.chunks):
            self.missing[offset] = index
            offset += chunk.size
        self._tries = dict.fromkeys(self.missing, _TRIES)
        self._touched = 0

    def touch(self) -> bool:
        """Touch some more of the memory while waiting, because touching costs more than reading into it.

        False once all is touched.
        """
        memory, begin = self._memory.obj, self._touched
        if not isinstance(memory, mmap.mmap) or begin >= len(memory):
            return False
        self._touched = min(begin + _TOUCH, len(memory))
        if populate(memory, begin, self._touched - begin):
            self._touched = len(memory)  # this kernel cannot populate; reading will touch the pages
        return True

    def go_on(self, path: Path, end: Event) -> bool:
        """Read the chunks that have arrived since the last call; return whether there were any."""
        before = len(self.missing)
        with _opened(path) as (plain, direct):
            for offset, index in list(self.missing.items()):
                size = self.file.chunks[index].size
                if end.is_set():
                    break
                if self._tries[offset] and _is_written(plain, offset, size):
                    self._tries[offset] -= 1
                    if self._read(plain, direct, offset, self.file.chunks[index]):
                        del self.missing[offset]
        return len(self.missing) < before

    def whole(self, path: Path) -> memoryview:
        """Return the whole file, which is now complete at `path`. Raises as `read_file` does."""

        def bring(offset: int, index: int) -> None:
            chunk = self.file.chunks[index]
            with _opened(path) as (plain, direct):  # opened by each thread, because a refused O_DIRECT is cleared
                is_right = self._read(plain, direct, offset, chunk)
            if not is_right:
                self._memory[offset : offset + chunk.size] = read_chunk(path, self.file, index)

        with ThreadPoolExecutor(_READERS, "tierd-arrived") as pool:
            list(pool.map(bring, self.missing, self.missing.values()))
        return finish_read(self._memory, self.file.size) if self._owns_memory else self._memory[: self.file.size]

    def _read(self, plain: int, direct: int, offset: int, chunk: Chunk) -> bool:
        """Read exactly one chunk, because its neighbours may already be verified."""
        end = offset + chunk.size
        first, last = min(-(-offset // PAGE) * PAGE, end), max(end // PAGE * PAGE, offset)
        if first < last:
            pieces = [(direct, first, last), (plain, offset, first), (plain, last, end)]
        else:
            pieces = [(plain, offset, end)]
        for fd, begin, finish in pieces:
            if read_into(fd, self._memory[begin:finish], finish - begin, begin) < finish - begin:
                return False
        return digest(self._memory[offset:end]) == chunk.xxh3_128


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Open a file twice: for reads through the page cache, and for direct I/O."""
    plain = open_plain(path)
    try:
        direct = open_plain(path)
        try:
            set_direct(direct, True)
            yield plain, direct
        finally:
            os.close(direct)
    finally:
        os.close(plain)


def _content(file: File) -> tuple[int, list[tuple[int, str]]]:
    return file.size, [(chunk.size, chunk.xxh3_128) for chunk in file.chunks]


def _is_written(fd: int, offset: int, size: int) -> bool:
    """Whether the file system reports data in the whole range. A range that is only reserved holds no data."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) == offset and os.lseek(fd, offset, os.SEEK_HOLE) >= offset + size
    except OSError:  # a hole reaches to the end of the file
        return False
