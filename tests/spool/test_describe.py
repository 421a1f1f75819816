"""The digests of a file that another program wrote, read from a disk that returns wrong bytes at some reads."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support.bad_readers import BadDisk, WrongPath
from support.seeds import seeds

from tierd.core.errors import CorruptChunk
from tierd.core.manifest import File
from tierd.core.storage_faults import UnstableRead
from tierd.spool import foreign_files
from tierd.spool.direct_io import set_direct
from tierd.spool.file_io import digest
from tierd.spool.foreign_files import describe_file
from tierd.spool.verified_reads import bad_chunks

SIZE, CHUNK = (3 << 20) + 77, 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "weights.bin"
    path.parent.mkdir()
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte is in the page cache."""
    read = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        return read(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)


def described(path: Path, **options) -> File | None:
    try:
        return describe_file(path, path.name, CHUNK, **options)
    except UnstableRead as error:
        assert str(path) in str(error)
        return None


@pytest.mark.parametrize("one_in", [2, 5, 20])
@pytest.mark.parametrize("is_written", [False, True])
def test_digests_of_a_bad_disk_are_right_or_none(path, monkeypatch, one_in, is_written):
    written = (SIZE, digest(path.read_bytes())) if is_written else None
    files = []
    for seed in seeds(weight=2):
        with monkeypatch.context() as patched:
            on_disk(patched)
            BadDisk(patched, path.parent, seed, one_in)
            files.append(described(path, written=written))
    found = [file for file in files if file]
    assert found or one_in == 2
    assert not [defect for file in found for defect in bad_chunks(path, file)]


@pytest.mark.parametrize("direct", [True, False])
def test_same_wrong_bytes_by_one_path_are_neither_corrupt_nor_described(path, monkeypatch, direct):
    """The third read repeats the first one's wrong bytes. The other path never gives them, so they prove nothing."""
    with path.open("r+b") as file:
        if not set_direct(file.fileno(), True):
            pytest.skip("SKIPPED WITHOUT PROOF: no O_DIRECT on the file system of the tests")
    file = described(path)
    on_disk(monkeypatch)
    for read in (lambda: bad_chunks(path, file) == [], lambda: described(path) is None):
        with monkeypatch.context() as patched:
            WrongPath(patched, path, direct=direct)
            assert read()


def test_a_file_in_the_page_cache_is_read_once(path, monkeypatch):
    calls, read = [], os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        calls.append(offset)
        return read(fd, buffers, offset, flags)

    path.read_bytes()
    monkeypatch.setattr(os, "preadv", preadv)
    assert described(path) and len(calls) == len(set(calls))


def test_file_that_differs_from_the_written_bytes_is_refused(path):
    with pytest.raises(CorruptChunk, match="written"):
        describe_file(path, path.name, CHUNK, written=(SIZE, digest(b"other")))


@pytest.mark.parametrize("one_in", [3, 20])
def test_a_copy_of_a_file_on_a_bad_disk_is_right_or_none(path, tmp_path, monkeypatch, one_in):
    monkeypatch.setattr("fcntl.ioctl", refused)  # so that no file system clones it
    data, copies = path.read_bytes(), 0
    for seed in range(10):
        target = tmp_path / f"copy-{seed}"
        with monkeypatch.context() as patched:
            on_disk(patched)
            BadDisk(patched, path.parent, seed, one_in)
            fd = os.open(path, os.O_RDONLY)
            try:
                file, how = foreign_files.adopt(fd, SIZE, target, path.name, link=False, going=lambda: None)
            except UnstableRead:
                continue
            finally:
                os.close(fd)
        assert how == "copy" and target.read_bytes() == data and not bad_chunks(target, file)
        copies += 1
    assert copies or one_in == 3


def refused(*_: object) -> None:
    raise OSError(95, "Operation not supported")
