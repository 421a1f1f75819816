"""A small disk under a spool, without mounting one: what does not fit is refused as the system refuses it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tierd.spool import commit
from tierd.spool.file_io import FileWriter
from tierd.spool.spool import Spool


class SmallDisk:
    """The file system of every spool in this process has `size_bytes`; a save that does not fit is ENOSPC."""

    def __init__(self, monkeypatch, root: Path, size_bytes: int) -> None:
        self.root, self.size_bytes, self.refused = root, size_bytes, 0
        real = commit.FileWriter

        def writer(path: Path, name: str, size: int, *more: int, recycled: bool = False) -> FileWriter:
            if self.used() + size > self.size_bytes:
                self.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(path, name, size, *more, recycled=recycled)

        monkeypatch.setattr(commit, "FileWriter", writer)
        monkeypatch.setattr(Spool, "free", lambda spool: (self.size_bytes - self.used(), self.size_bytes))

    def used(self) -> int:
        """Bytes of every file below the root; what is being removed meanwhile does not count."""
        total = 0
        for directory, _, names in os.walk(self.root):
            for name in names:
                try:
                    total += os.lstat(os.path.join(directory, name)).st_size
                except FileNotFoundError:
                    continue
        return total
