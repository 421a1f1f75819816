"""A new file for writers that want a stream, written past the page cache."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from tierd.spool.direct_io import write_pages


class NewFile(io.RawIOBase):
    """A file that must not exist, written through `io.BufferedWriter`.

    Large writes go past the page cache, because the cache costs several times the CPU of the write itself, and the
    file is larger than the cache should hold.

    Raises (each method): OSError as the system reports it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        write_pages(self._fd, view, self._at)
        self._at += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            self._at = os.fstat(self._fd).st_size + offset
        else:
            self._at = offset + self._at * (whence == io.SEEK_CUR)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            try:
                super().close()
            finally:
                os.close(self._fd)
