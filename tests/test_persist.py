"""Memory <-> file: digests come before the write, every flip is found where it is, an error is not corruption."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd import persist
from tierd.core.errors import CorruptChunk
from tierd.persist import bad_chunks, describe_file, digest, read_chunk, read_file, write_file

CHUNK = 64
DATA = bytes(range(200))  # three full chunks and a rest of 8


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def put(path, data=DATA):
    return write_file(path, "file", data, CHUNK)


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


# -- there and back ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.integers(1, 100))
def test_what_is_written_is_described_and_read_back(tmp_path_factory, data, chunk_size):
    path = tmp_path_factory.mktemp("t") / "file"
    file = write_file(path, "a/b", data, chunk_size)
    assert path.read_bytes() == read_file(path, file) == data
    assert (file.path, file.size) == ("a/b", len(data))
    assert sum(chunk.size for chunk in file.chunks) == len(data)
    assert b"".join(read_chunk(path, file, index) for index in range(len(file.chunks))) == data
    assert describe_file(path, "a/b", chunk_size) == file
    assert bad_chunks(path, file) == []


def test_the_digest_is_what_xxhsum_prints():
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"  # the published test vector of XXH3-128 for no bytes


@pytest.mark.parametrize("make", [bytearray, memoryview, lambda data: memoryview(data).cast("H")])
def test_any_buffer_can_be_written(path, make):
    assert put(path, make(DATA)).size == len(DATA)
    assert path.read_bytes() == DATA


def test_the_digest_is_of_memory_before_the_first_write(path, monkeypatch):
    """Law 7: a disk that stores something else is found out, since the digest never came from the disk."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(len(data)), at))
    file = put(path)
    monkeypatch.undo()
    assert path.read_bytes() == bytes(len(DATA))
    assert len(bad_chunks(path, file)) == 4


def test_short_writes_and_short_reads_are_gone_on_with(path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:5]], at))
    file = put(path)
    assert read_file(path, file) == DATA


def test_the_file_is_synced_before_write_file_returns(path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    put(path)
    assert synced == [len(DATA)]


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_an_error_of_the_system_is_raised_and_nothing_is_tried_again(path, monkeypatch, call):
    """P7: after a failed write or fsync the file is abandoned."""
    calls = []

    def fail(*_):
        calls.append(call)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output error"):
        put(path)
    assert calls == [call]


def test_an_existing_file_or_link_is_never_written_through(path, tmp_path):
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        put(path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        put(link)
    assert path.read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()


def test_nothing_is_left_open(path):
    file = put(path)
    before = len(os.listdir("/proc/self/fd"))
    read_file(path, file)
    read_chunk(path, file, 0)
    describe_file(path, "file")
    overwrite(path, 0, b"x")
    bad_chunks(path, file)
    with pytest.raises(CorruptChunk):
        read_file(path, file)
    path.unlink()
    path.mkdir()
    bad_chunks(path, file)
    assert len(os.listdir("/proc/self/fd")) == before


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("where", [0, -1])
def test_a_flip_in_any_chunk_is_found_there_and_only_there(path, index, where):
    file = put(path)
    offset = index * CHUNK
    at = offset + (0 if where == 0 else file.chunks[index].size - 1)
    overwrite(path, at, bytes([DATA[at] ^ 1]))
    ((found, start, reason),) = bad_chunks(path, file)
    assert (found, start) == (index, offset)
    assert isinstance(reason, CorruptChunk)
    span = f"bytes {offset}..{offset + file.chunks[index].size} differ"
    for read in (lambda: read_file(path, file), lambda: read_chunk(path, file, index)):
        with pytest.raises(CorruptChunk, match=span):
            read()
    for other in set(range(4)) - {index}:
        assert len(read_chunk(path, file, other)) == file.chunks[other].size


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 199])
def test_every_truncation_is_found_from_the_chunk_where_it_begins(path, size):
    file = put(path)
    os.truncate(path, size)
    assert [index for index, *_ in bad_chunks(path, file)] == list(range(size // CHUNK, 4))
    with pytest.raises(CorruptChunk, match=f"{size} bytes, not the 200"):
        read_file(path, file)
    with pytest.raises(CorruptChunk):
        read_chunk(path, file, 0)


def test_a_file_that_is_too_long_is_a_bad_last_chunk(path):
    file = put(path)
    with open(path, "ab") as more:
        more.write(b"x")
    ((index, offset, reason),) = bad_chunks(path, file)
    assert (index, offset) == (3, 192)
    assert "201 bytes, not the 200" in str(reason)
    with pytest.raises(CorruptChunk):
        read_file(path, file)


def test_an_empty_file_that_is_not_empty_or_not_there_is_corrupt(path):
    file = put(path, b"")
    assert file.chunks == ()
    assert read_file(path, file) == b""
    path.write_bytes(b"x")
    with pytest.raises(CorruptChunk):
        read_file(path, file)
    path.unlink()
    with pytest.raises(CorruptChunk):
        read_file(path, file)


def _missing(path):
    path.unlink()


def _symlink(path):
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def _directory(path):
    path.unlink()
    path.mkdir()


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


def _inside_a_file(path):
    path.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"a file in the place of its directory")


@pytest.mark.timeout(20)  # a FIFO must not be waited for
@pytest.mark.parametrize("damage", [_missing, _symlink, _directory, _fifo, _inside_a_file])
def test_what_is_no_plain_file_any_more_is_corrupt_in_every_chunk(tmp_path, damage):
    (tmp_path / "d").mkdir()
    path = tmp_path / "d" / "file"
    file = put(path)
    damage(path)
    found = bad_chunks(path, file)
    assert [(index, offset) for index, offset, _ in found] == [(0, 0), (1, 64), (2, 128), (3, 192)]
    assert all(isinstance(reason, CorruptChunk) for *_, reason in found)
    for read in (lambda: read_file(path, file), lambda: read_chunk(path, file, 0)):
        with pytest.raises(CorruptChunk, match=r"missing|not a plain file"):
            read()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT])
def test_a_system_that_cannot_read_says_nothing_about_the_bytes(path, monkeypatch, code):
    """Law 3: it stays an OSError, and `bad_chunks` tells it from corruption."""
    file = put(path)

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        read_file(path, file)
    assert [type(reason) is CorruptChunk for *_, reason in bad_chunks(path, file)] == [False] * 4


def test_one_unreadable_chunk_does_not_hide_the_others(path, monkeypatch):
    file = put(path)
    overwrite(path, 130, b"\0")
    real = os.preadv

    def bad_sector(fd, views, at):
        if at == CHUNK:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", bad_sector)
    assert [(index, type(reason)) for index, _, reason in bad_chunks(path, file)] == [(1, OSError), (2, CorruptChunk)]


# -- files that others wrote ------------------------------------------------------------------------------------------


def test_a_file_that_grows_while_it_is_described_is_refused(path, monkeypatch):
    path.write_bytes(DATA)
    real = os.preadv

    def while_reading(fd, views, at):
        with open(path, "ab") as file:
            file.write(b"x")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", while_reading)
    with pytest.raises(CorruptChunk, match="changed while"):
        describe_file(path, "file", CHUNK)


def test_a_file_that_shrinks_while_it_is_described_is_refused(path, monkeypatch):
    path.write_bytes(DATA)
    real = os.fsync
    monkeypatch.setattr(persist, "chunk_sizes", lambda size, chunk: (os.truncate(path, 100), [64, 64, 64, 8])[1])
    monkeypatch.setattr(os, "fsync", real)
    with pytest.raises(CorruptChunk, match="ends at byte 100"):
        describe_file(path, "file", CHUNK)


def test_described_files_agree_with_xxhsum(path):
    """The digest is the one that `xxhsum -H128` prints; skipped where the tool is not installed."""
    path.write_bytes(DATA)
    try:
        line = subprocess.run(["xxhsum", "-H128", str(path)], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("xxhsum is not installed")
    assert line.split()[0] == describe_file(path, "file").chunks[0].xxh3_128
