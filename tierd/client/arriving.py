"""Reading a part while the daemon still brings it, so that it is in memory soon after its last byte came.

Law: this gains time and decides nothing. A chunk counts once its digest was right in this process's memory, and by the
manifest that was committed in the end; whatever was not read by then, or was not right, is read as if all this had not
been.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from tierd.core.errors import CorruptChunk, ManifestError, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import DRAFT_NAME, Chunk, File, Manifest, decode
from tierd.core.seal import MAX_MANIFEST_SIZE
from tierd.device import LARGE, PAGE, memory_for, populate, read_into, set_direct, settle
from tierd.persist import digest, open_plain, read_chunk, read_file
from tierd.spool import Spool

_PAUSE = 0.05  # seconds between two looks at what has come
_TOUCH = 32 << 20  # bytes of memory that are touched between two looks
_TRIES = 2  # times that a chunk is read before its file is whole: not every file system tells what was written


class Arriving:
    """Reads the files of `part` from where the daemon puts them together, in a thread, until the context ends.

    Args:
        worth: whether they are wanted in memory at all.
    """

    def __init__(self, spool: Spool, part: PartId, *, worth: bool) -> None:
        self._from, self._part, self._worth = spool.fetching(part), part, worth
        self._images: dict[str, _Image] = {}
        self._end = Event()
        self._thread = Thread(target=self._follow, name="tierd-arriving", daemon=True)

    def __enter__(self) -> Arriving:
        try:
            if self._worth:
                self._thread.start()
        except RuntimeError:  # no thread to be had
            pass
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind:  # nobody will ask for it; an error's frames may hold this object for long, not the memory of a part
            self._images.clear()

    def stop(self) -> None:
        """Read no more; what was read stays."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def read(self, home: Path, manifest: Manifest) -> dict[str, memoryview]:
        """Every file of the part, which now lies in `home`, verified; raises as `read_file` does."""
        self.stop()
        found = {}
        for file in manifest.files:
            image = self._images.pop(file.path, None)
            same = image is not None and _content(image.file) == _content(file)
            found[file.path] = image.whole(home / file.path) if image and same else read_file(home / file.path, file)
        return found

    def _follow(self) -> None:
        try:
            manifest = self._draft()
            for file in manifest.files if manifest else ():
                if file.size >= LARGE:
                    self._images[file.path] = _Image(file)
            waiting = list(self._images.values())
            while waiting and not self._end.is_set():
                moved = [image.go_on(self._from / image.file.path, self._end) for image in waiting]
                waiting = [image for image in waiting if image.missing]
                if not any(moved) and not any(image.touch() for image in waiting):
                    self._end.wait(_PAUSE)
        except (OSError, MemoryError, TierdError):  # it has just been renamed, say: `read` goes on from here
            pass

    def _draft(self) -> Manifest | None:
        """The manifest of what is coming; None when the end came first."""
        while not self._end.wait(_PAUSE):
            try:
                with os.fdopen(open_plain(self._from / DRAFT_NAME), "rb") as file:
                    return decode(file.read(MAX_MANIFEST_SIZE + 1), self._part)
            except (CorruptChunk, ManifestError):  # not there yet, or not all of it
                continue
        return None


class _Image:
    """One file in memory, as far as it has come."""

    def __init__(self, file: File) -> None:
        self.file, self._memory = file, memory_for(file.size)
        self.missing: dict[int, int] = {}  # offset of a chunk -> its index
        offset = 0
        for index, chunk in enumerate(file.chunks):
            self.missing[offset] = index
            offset += chunk.size
        self._tries = dict.fromkeys(self.missing, _TRIES)
        self._touched = 0

    def touch(self) -> bool:
        """Touch some more of the memory, which costs more than reading into it later; False where that is done."""
        memory, begin = self._memory.obj, self._touched
        if not isinstance(memory, mmap.mmap) or begin >= len(memory):
            return False
        self._touched = min(begin + _TOUCH, len(memory))
        if populate(memory, begin, self._touched - begin):
            self._touched = len(memory)  # this kernel does not; reading will
        return True

    def go_on(self, path: Path, end: Event) -> bool:
        """Read what has come since the last time; whether anything has."""
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
        """All of the file, which is complete now and lies at `path`; raises as `read_file` does."""
        with _opened(path) as (plain, direct):
            for offset, index in self.missing.items():
                chunk = self.file.chunks[index]
                if not self._read(plain, direct, offset, chunk):
                    self._memory[offset : offset + chunk.size] = read_chunk(path, self.file, index)
        return settle(self._memory, self.file.size)

    def _read(self, plain: int, direct: int, offset: int, chunk: Chunk) -> bool:
        """Read one chunk and not a byte beside it: its neighbours may be verified already."""
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
    """A file, to be read through the page cache and past it."""
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
    """Whether a range holds data all through, as far as the file system says: what is only reserved does not."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) == offset and os.lseek(fd, offset, os.SEEK_HOLE) >= offset + size
    except OSError:  # a hole up to the end
        return False
