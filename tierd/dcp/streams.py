"""The files that torch writes, digested during the write.

Invariant: bytes are digested as torch hands them over, before they are written. Each file is synced once, through the
descriptor that wrote it. Writes out of order are refused, because they could not be digested like this.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from tierd.spool.direct_io import write_all
from tierd.spool.file_io import flat

_BUFFER = 1 << 20  # bytes; buffered because torch writes a few bytes at a time around a tensor


class Streams(FileSystem):
    """torch's file system for a save; each file is digested as it is written, and synced once.

    Attributes:
        written: file name -> size in bytes and digest of the written data.
        failed: the exception of the first stream that failed.
    """

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}
        self.failed: BaseException | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            raise io.UnsupportedOperation(f"{path}: opened with {mode!r}; a file of a checkpoint is written once")
        raw = _Raw(Path(path))
        try:
            stream = io.BufferedWriter(raw, _BUFFER)
            yield stream
            stream.close()
            self.written[Path(path).name] = raw.synced()
        except BaseException as error:
            self.failed = self.failed or raw.failed or error
            raise
        finally:
            raw.end()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing, because the stage's directory is made at the first write."""


class _Raw(io.RawIOBase):
    """A new file whose bytes are digested in the order of the writes; seeking raises `UnsupportedOperation`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._size, self._hash = 0, xxhash.xxh3_128()
        self.failed: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        if self._fd < 0:
            raise ValueError("the stream has ended")
        view = flat(data)
        self._hash.update(view)
        try:
            write_all(self._fd, view, self._size)
        except OSError as error:
            self.failed = error
            raise
        self._size += len(view)
        return len(view)

    def synced(self) -> tuple[int, str]:
        """Make the written data durable. Returns its size in bytes and its digest."""
        os.fsync(self._fd)
        return self._size, self._hash.hexdigest()

    def end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
