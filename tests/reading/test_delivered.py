"""What a follower remembers of its deliveries is on the disk before it replaces what was there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierd.reading.checkpoint_deliveries import write_durably


def test_content_is_synced_before_it_replaces_the_former_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, real = tmp_path / "delivered", list[tuple[str, int, bytes]](), os.fsync
    write_durably(path, b"former")

    def fsync(fd: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size, path.read_bytes()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_durably(path, b"the newest")
    (content, size, before), (directory, _, after) = synced
    assert Path(content).parent == tmp_path and (size, before) == (len(b"the newest"), b"former")
    assert (Path(directory), after) == (tmp_path, b"the newest")
