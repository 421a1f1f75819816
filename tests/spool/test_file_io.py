"""Memory <-> file: digests come before the write, every flip is found where it is, an error is not corruption."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import mmap
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples

from tierd.core.chunk_boundaries import content_chunk_sizes
from tierd.core.errors import CorruptChunk
from tierd.spool import direct_io, file_io, foreign_files, verified_reads
from tierd.spool.file_io import FileWriter, digest, write_file
from tierd.spool.foreign_files import describe_file
from tierd.spool.verified_reads import (
    bad_chunks,
    check_bytes,
    chunk_buffer_size,
    read_chunk,
    read_file,
    read_recent_chunk,
)

CHUNK = 64
MIB = 1 << 20
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


@settings(max_examples=examples(60))
@given(st.binary(max_size=400), st.integers(1, 100))
def test_written_file_is_described_and_read_back(tmp_path_factory, data, chunk_size):
    path = tmp_path_factory.mktemp("t") / "file"
    file = write_file(path, "a/b", data, chunk_size)
    assert path.read_bytes() == read_file(path, file) == data
    check_bytes(read_file(path, file), file)
    assert (file.path, file.size) == ("a/b", len(data))
    assert sum(chunk.size for chunk in file.chunks) == len(data)
    assert b"".join(read_chunk(path, file, index) for index in range(len(file.chunks))) == data
    assert describe_file(path, "a/b", chunk_size) == file
    assert bad_chunks(path, file) == []


def test_digest_equals_the_output_of_xxhsum():
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


# -- at the disk's speed ----------------------------------------------------------------------------------------------

NOISE = random.Random(1).randbytes(4 * MIB + 8192)
SIZES = [0, 1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, MIB + 4096, 3 * MIB - 1, 3 * MIB, 3 * MIB + 4097]


def aligned(size):
    """`size` bytes of noise that begin with a page of memory."""
    memory = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    memory[:] = NOISE[:size]
    return memory


@pytest.fixture
def disk(tmp_path):
    """A path on a file system that has O_DIRECT; most of what follows proves nothing on another one."""
    fd = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT)
    can = direct_io.set_direct(fd, True)
    os.close(fd)
    if not can:
        pytest.skip("SKIPPED WITHOUT PROOF: no O_DIRECT on the file system of the tests")
    return tmp_path / "file"


def check_written(path, file, data, chunk_size):
    """Against xxhash over the file alone, and by every way of reading."""
    stored = path.read_bytes()
    assert stored == data
    assert file.size == len(data)
    pieces = [stored[begin : begin + chunk_size] for begin in range(0, len(stored), chunk_size)]
    assert [chunk.size for chunk in file.chunks] == [len(piece) for piece in pieces]
    assert [chunk.xxh3_128 for chunk in file.chunks] == [xxhash.xxh3_128_hexdigest(piece) for piece in pieces]
    found = read_file(path, file)
    assert found == data
    assert not found.readonly
    assert b"".join(read_chunk(path, file, index) for index in range(len(file.chunks))) == data
    assert bad_chunks(path, file) == []


@pytest.mark.parametrize("chunk_size", [MIB, 64 * MIB, 5000])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_written_exactly(disk, size, chunk_size):
    with FileWriter(disk, "file", size, chunk_size) as writer:
        writer.write(aligned(size))
        file = writer.finish()
    check_written(disk, file, NOISE[:size], chunk_size)
    assert not writer.recycled
    if chunk_size % 4096 == 0:
        assert writer.direct == (size >= MIB)


@pytest.mark.parametrize("shift", [1, 17, 512, 2048])
def test_memory_that_is_not_aligned_is_written_all_the_same(disk, shift):
    data = aligned(2 * MIB + 5000)[shift:]
    check_written(disk, write_file(disk, "file", data, MIB), data, MIB)


@pytest.mark.parametrize("small", [False, True])
def test_many_threads_pieces_and_chunks_make_one_file(disk, monkeypatch, small):
    """With pieces of two pages, digesting and reading run beside hundreds of writes and checks."""
    for module in (file_io, verified_reads):
        monkeypatch.setattr(module, "PIECE", 8192)
    monkeypatch.setattr(direct_io, "PIECE", 8192)
    data = aligned(3 * MIB + 77)
    check_written(
        disk, write_file(disk, "file", data, 4096 if small else MIB + 4096), data, 4096 if small else MIB + 4096
    )
    assert not [thread for thread in threading.enumerate() if thread.name == "tierd-ahead"]


def sizes_of(size, seed):
    """Chunks of any size, from a byte to more than a write takes at once, as tensors would have them."""
    noise, sizes = random.Random(seed), []
    while sum(sizes) < size:
        sizes.append(min(noise.choice([1, 100, 4096, 5000, 70_001, MIB + 1, 2 * MIB]), size - sum(sizes)))
    return sizes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("step", [4096, MIB, 4 * MIB])
def test_wherever_chunks_end_the_disk_sees_whole_pages(disk, monkeypatch, seed, step):
    """Nothing of a large file, chunks of a byte included, is written or read through the page cache but for its end."""
    size = 3 * MIB + 4097 * seed
    sizes = sizes_of(size, seed)
    for module in (file_io, foreign_files):
        monkeypatch.setattr(module, "content_chunk_sizes", lambda read, total, limit: list(sizes))
    data = aligned(size)
    with FileWriter(disk, "file", size) as writer:
        for begin in range(0, size, step):
            writer.write(data[begin : begin + step])
        file = writer.finish()
    assert writer.direct
    bounds = [0, *itertools.accumulate(sizes)]
    spans = list(itertools.pairwise(bounds))
    assert [chunk.xxh3_128 for chunk in file.chunks] == [xxhash.xxh3_128_hexdigest(data[a:b]) for a, b in spans]
    assert describe_file(disk, "file") == file
    monkeypatch.setattr(direct_io, "set_direct", lambda fd, on: pytest.fail("O_DIRECT was refused"))
    assert read_file(disk, file) == data
    assert bad_chunks(disk, file) == []
    for index, (begin, end) in enumerate(spans):
        assert read_chunk(disk, file, index) == data[begin:end]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("flipped", [True, False])
def test_a_chunk_that_was_just_written_is_read_from_the_page_cache_and_verified(disk, monkeypatch, cached, flipped):
    """Chunks of three pages and a bit: what is not in the cache, wholly or in part, is read past it."""
    data = random.Random(1).randbytes(4 * MIB + 77)
    file = write_file(disk, "file", data, MIB + 12345)
    if cached:
        disk.read_bytes()
    if flipped:
        overwrite(disk, MIB, bytes([data[MIB] ^ 1]))
        with open(disk, "rb") as on_disk:
            os.fdatasync(on_disk.fileno())
    if not cached:
        with open(disk, "rb") as on_disk:
            for _ in range(100):  # a page that is being written back stays
                os.fdatasync(on_disk.fileno())
                os.posix_fadvise(on_disk.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if not direct_io.read_cached(on_disk.fileno(), memoryview(bytearray(4096)), 4096, 2 * MIB):
                    break
            else:
                pytest.fail("the page cache keeps the file")
    monkeypatch.setattr(verified_reads, "set_direct", noting := Noting(direct_io.set_direct))
    offset = 0
    for index, chunk in enumerate(file.chunks):
        memory = direct_io.memory_for(chunk_buffer_size(file, index))
        if flipped and index == 0:
            with pytest.raises(CorruptChunk, match=f"bytes 0..{chunk.size}"):
                read_recent_chunk(disk, file, index, memory)
        else:
            assert read_recent_chunk(disk, file, index, memory) == data[offset : offset + chunk.size]
        offset += chunk.size
    assert bool(noting.calls) == (flipped or not cached)
    os.truncate(disk, file.size - 1)
    with pytest.raises(CorruptChunk):
        read_recent_chunk(disk, file, 0, memory)


class Noting:
    """Passes calls on, and counts them."""

    def __init__(self, real):
        self.real, self.calls = real, 0

    def __call__(self, *args):
        self.calls += 1
        return self.real(*args)


@pytest.mark.parametrize("where", [0, -1])
def test_a_flip_at_a_chunks_edge_is_that_chunks_alone(disk, monkeypatch, where):
    size = 2 * MIB + 100
    sizes = sizes_of(size, 7)
    for module in (file_io, foreign_files):
        monkeypatch.setattr(module, "content_chunk_sizes", lambda read, total, limit: list(sizes))
    file = write_file(disk, "file", aligned(size))
    for index, begin in enumerate(itertools.accumulate([0, *sizes[:-1]])):
        at = begin if where == 0 else begin + sizes[index] - 1
        overwrite(disk, at, bytes([NOISE[at] ^ 1]))
        assert [(found, offset) for found, offset, _ in bad_chunks(disk, file)] == [(index, begin)]
        with pytest.raises(CorruptChunk, match=f"bytes {begin}..{begin + sizes[index]} differ"):
            read_file(disk, file)
        overwrite(disk, at, NOISE[at : at + 1])


def test_file_is_cut_where_its_bytes_say_by_any_writer(disk):
    """The header in the first piece decides; a header that is not in it decides nothing."""
    names = [f"{number:040}" for number in range(60)]
    spans = list(itertools.pairwise(range(0, 61 * 70_000, 70_000)))
    header = {
        name: {"dtype": "U8", "shape": [70_000], "data_offsets": span} for name, span in zip(names, spans, strict=True)
    }
    text = json.dumps(header).encode()
    data = memoryview(len(text).to_bytes(8, "little") + text + NOISE[: 60 * 70_000])
    whole = write_file(disk, "file", data)
    assert [chunk.size for chunk in whole.chunks] == content_chunk_sizes(
        lambda offset, size: data[offset : offset + size], len(data)
    )
    assert len(whole.chunks) > 1 and describe_file(disk, "file") == whole
    for step, cuts in ((8192, whole.chunks), (4096, None)):
        with FileWriter(disk.with_name(str(step)), "file", len(data)) as writer:
            for begin in range(0, len(data), step):
                writer.write(data[begin : begin + step])
            chunks = writer.finish().chunks
        assert chunks == (cuts or chunks) and (cuts or len(chunks) == 1)


def test_work_ahead_ends_with_the_block_and_its_error_is_raised_in_turn():
    going = threading.Event()

    def items():
        yield 1
        going.wait(60)
        yield 2
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(KeyError), direct_io.ahead(items(), worth=True) as made:
        assert next(made) == 1
        threading.Timer(0.1, going.set).start()
        raise KeyError
    assert going.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "tierd-ahead"]
    with direct_io.ahead(items(), worth=True) as made:
        assert [next(made), next(made)] == [1, 2]
        with pytest.raises(OSError, match="Input/output error"):
            next(made)


def test_a_large_file_that_cannot_be_read_says_nothing_about_the_bytes(disk, monkeypatch):
    for module in (file_io, verified_reads):
        monkeypatch.setattr(module, "PIECE", MIB)
    file, real = write_file(disk, "file", aligned(4 * MIB), MIB), os.preadv

    def fail(fd, views, at):
        if at >= 3 * MIB:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_file(disk, file)
    assert [(index, type(reason)) for index, _, reason in bad_chunks(disk, file)] == [(3, OSError)]


def test_a_system_that_gives_no_thread_is_done_without(disk, monkeypatch):
    def none(self):
        raise RuntimeError("can't start new thread")

    for module in (file_io, verified_reads):
        monkeypatch.setattr(module, "PIECE", MIB)
    monkeypatch.setattr(threading.Thread, "start", none)
    data = aligned(3 * MIB + 1)
    check_written(disk, write_file(disk, "file", data, MIB), data, MIB)


@pytest.mark.parametrize("step", [4096, 12288, MIB, MIB + 8192])
def test_file_given_in_pieces_has_the_digests_of_its_chunks(disk, step):
    """One buffer for all pieces: `write` wants its bytes no more when it returns."""
    size, buffer = 3 * MIB + 10, aligned(step)
    with FileWriter(disk, "file", size, MIB) as writer:
        for begin in range(0, size, step):
            piece = buffer[: min(step, size - begin)]
            piece[:] = NOISE[begin : begin + len(piece)]
            writer.write(piece)
        buffer[:] = bytes(step)
        file = writer.finish()
    check_written(disk, file, NOISE[:size], MIB)
    assert writer.direct


@pytest.mark.parametrize("size", [10, 2 * MIB])
def test_more_or_less_than_was_announced_is_no_file(disk, size):
    with FileWriter(disk, "file", size) as writer:
        writer.write(aligned(size)[: size // 2])
        with pytest.raises(ValueError, match="not the"):
            writer.finish()
        with pytest.raises(ValueError, match="more than"):
            writer.write(aligned(size))


def test_the_digest_of_a_piece_is_taken_before_its_first_write(disk, monkeypatch):
    """Law 7 holds for what is written beside: the memory changes under the disk's hands, and it shows."""
    for module in (file_io, verified_reads):
        monkeypatch.setattr(module, "PIECE", MIB)
    data, real = aligned(3 * MIB), os.pwrite

    def spoil(fd, view, at):
        if at == MIB:
            data[at] ^= 1
        return real(fd, view, at)

    monkeypatch.setattr(os, "pwrite", spoil)
    file = write_file(disk, "file", data, MIB)
    assert [index for index, *_ in bad_chunks(disk, file)] == [1]


def _refuse_switch(monkeypatch):
    real = fcntl.fcntl

    def refuse(fd, command, *args):
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, *args)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def _refuse_call(name, first):
    """`first`: the number of the direct call from which on they are refused."""

    def patch(monkeypatch):
        real, calls = getattr(os, name), []

        def refuse(fd, data, at):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                calls.append(at)
                if len(calls) >= first:
                    raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, data, at)

        monkeypatch.setattr(os, name, refuse)

    return patch


def _short_call(name):
    """The kernel did less than it was asked for, and stopped inside a page."""

    def patch(monkeypatch):
        real, calls = getattr(os, name), []

        def less(fd, data, at):
            calls.append(at)
            if len(calls) != 2:
                return real(fd, data, at)
            direct_io.set_direct(fd, False)
            count = real(fd, data[:100] if name == "pwrite" else [data[0][:100]], at)
            direct_io.set_direct(fd, True)
            return count

        monkeypatch.setattr(os, name, less)

    return patch


@pytest.mark.parametrize(
    "refuse", [_refuse_switch, _refuse_call("pwrite", 1), _refuse_call("pwrite", 3), _short_call("pwrite")]
)
@pytest.mark.parametrize("size", [2 * MIB, 3 * MIB + 123])
@pytest.mark.parametrize("chunk_size", [MIB, 64 * MIB])
def test_refused_o_direct_writes_the_remaining_bytes_through_the_cache(disk, monkeypatch, refuse, size, chunk_size):
    monkeypatch.setattr(direct_io, "PIECE", 256 << 10)
    with monkeypatch.context() as patch:
        refuse(patch)
        with FileWriter(disk, "file", size, chunk_size) as writer:
            writer.write(aligned(size))
            file = writer.finish()
    assert not writer.direct
    check_written(disk, file, NOISE[:size], chunk_size)


@pytest.mark.parametrize(
    "refuse", [_refuse_switch, _refuse_call("preadv", 1), _refuse_call("preadv", 3), _short_call("preadv")]
)
def test_refused_o_direct_reads_through_the_cache(disk, monkeypatch, refuse):
    monkeypatch.setattr(direct_io, "PIECE", 256 << 10)
    file = write_file(disk, "file", aligned(3 * MIB + 123), MIB)
    with monkeypatch.context() as patch:
        refuse(patch)
        assert read_file(disk, file) == NOISE[: file.size]
    with monkeypatch.context() as patch:
        refuse(patch)
        assert read_chunk(disk, file, 2) == NOISE[2 * MIB : 3 * MIB]


def test_a_file_system_in_memory_will_do(tmp_path):
    home = Path("/dev/shm") / f"tierd-test-{os.getpid()}"
    home.mkdir()
    try:
        for size in SIZES:
            data = aligned(size)
            check_written(home / str(size), write_file(home / str(size), "file", data, MIB), data, MIB)
    finally:
        for path in home.iterdir():
            path.unlink()
        home.rmdir()


def _full(monkeypatch):
    monkeypatch.setattr(direct_io.libc, "fallocate", lambda *_: -1)
    monkeypatch.setattr(direct_io.ctypes, "get_errno", lambda: errno.ENOSPC)


def _without_fallocate(monkeypatch):
    monkeypatch.setattr(direct_io.libc, "fallocate", lambda *_: -1)
    monkeypatch.setattr(direct_io.ctypes, "get_errno", lambda: errno.EOPNOTSUPP)


def test_a_full_disk_says_so_before_anything_is_written(disk, monkeypatch):
    _full(monkeypatch)
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("written"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left") as caught:
        write_file(disk, "file", aligned(MIB))
    assert caught.value.errno == errno.ENOSPC
    assert len(os.listdir("/proc/self/fd")) == before


def test_file_system_that_reserves_nothing_is_written_all_the_same(disk, monkeypatch):
    _without_fallocate(monkeypatch)
    data = aligned(2 * MIB + 1)
    check_written(disk, write_file(disk, "file", data, MIB), data, MIB)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_large_file_is_abandoned_at_its_first_error(disk, monkeypatch, call, code):
    calls = []

    def fail(*_):
        calls.append(call)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        write_file(disk, "file", aligned(3 * MIB), MIB)
    assert calls == [call]
    assert not [thread for thread in threading.enumerate() if thread.name == "tierd-ahead"]


def test_unreadable_chunk_does_not_hide_the_corrupt_chunk_before_it(disk, monkeypatch):
    for module in (file_io, verified_reads):
        monkeypatch.setattr(module, "PIECE", MIB)
    file, real = write_file(disk, "file", aligned(4 * MIB), MIB), os.preadv
    overwrite(disk, MIB, b"\0" * 9)

    def fail(fd, views, at):
        if at >= 2 * MIB:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CorruptChunk, match=f"bytes {MIB}..{2 * MIB} differ"):
        read_file(disk, file)
    assert not [thread for thread in threading.enumerate() if thread.name == "tierd-ahead"]


def test_child_of_the_process_can_read_the_memory_that_was_read(disk):
    """The memory is kept from children only while the disk fills it."""
    found = read_file(disk, write_file(disk, "file", aligned(MIB + 1)))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if found == NOISE[: MIB + 1] else 1)
    assert os.waitpid(pid, 0)[1] == 0


# -- over the blocks of another file ----------------------------------------------------------------------------------

OLD = b"\xaa" * (3 * MIB)


def over(path, data):
    with FileWriter(path, "file", len(data), MIB, recycled=True) as writer:
        writer.write(data)
        return writer, writer.finish()


@pytest.mark.parametrize("size", [2 * MIB, 2 * MIB + 1, 3 * MIB - 1, 3 * MIB, 3 * MIB + 1, 4 * MIB + 5])
def test_recycled_file_ends_as_a_fresh_file_would(disk, size):
    disk.write_bytes(OLD)
    inode = disk.stat().st_ino
    data = aligned(size)
    writer, file = over(disk, data)
    check_written(disk, file, data, MIB)
    assert writer.recycled and writer.direct and disk.stat().st_ino == inode


def _linked(path):
    (path.parent / "users").hardlink_to(path)
    return path.parent / "users"


def _a_symlink(path):
    path.rename(path.parent / "users")
    path.symlink_to("users")
    return path.parent / "users"


def _foreign(path):
    if os.geteuid():
        pytest.skip("SKIPPED WITHOUT PROOF: only root can give a file away")
    os.chown(path, 1, 1)


def _a_fifo(path):
    path.unlink()
    os.mkfifo(path)


def _without_leases(path):
    pass


@pytest.mark.timeout(20)
@pytest.mark.parametrize("hold", [_linked, _a_symlink, _foreign, _a_fifo, _without_leases])
def test_recycled_file_that_may_be_in_use_is_left_alone_and_a_fresh_file_written(disk, monkeypatch, hold):
    disk.write_bytes(OLD)
    users = hold(disk)
    if hold is _without_leases:
        real = fcntl.fcntl

        def refuse(fd, command, *args):
            if command == fcntl.F_SETLEASE:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, command, *args)

        monkeypatch.setattr(fcntl, "fcntl", refuse)
    data = aligned(2 * MIB + 1)
    writer, file = over(disk, data)
    check_written(disk, file, data, MIB)
    assert not writer.recycled and writer.direct
    assert users is None or users.read_bytes() == OLD


_HOLDER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
if sys.argv[2] == "mapped":
    memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    os.close(fd)
    read = lambda: memory[:]
else:
    read = lambda: os.pread(fd, 1 << 30, 0)
print("held", flush=True)
sys.stdin.readline()
sys.exit(read() != b"\\xaa" * (3 << 20))
"""


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_file_that_another_process_reads_is_not_overwritten_under_it(disk, how):
    disk.write_bytes(OLD)
    command = [sys.executable, "-c", _HOLDER, str(disk), how]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    data = aligned(3 * MIB)
    writer, file = over(disk, data)
    holder.communicate(b"\n")
    assert holder.returncode == 0
    assert not writer.recycled
    check_written(disk, file, data, MIB)


def test_an_opener_in_the_moment_of_the_lease_kills_nobody(disk, monkeypatch):
    """The kernel signals a lease's holder when somebody else opens the file; by default that signal would kill it."""
    disk.write_bytes(OLD)
    real, openers = fcntl.fcntl, []

    def lease(fd, command, *args):
        found = real(fd, command, *args)
        if command == fcntl.F_SETLEASE and args == (fcntl.F_WRLCK,):
            openers.append(subprocess.Popen(["head", "-c1", str(disk)], stdout=subprocess.DEVNULL))
            while openers[0].poll() is None and "lease" not in _waits_in(openers[0].pid):
                pass
        return found

    monkeypatch.setattr(fcntl, "fcntl", lease)
    fd = os.open(disk, os.O_WRONLY)
    assert direct_io.is_overwritable(fd)
    os.close(fd)
    assert openers[0].wait(60) == 0


def _waits_in(pid):
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return "lease"


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("where", [0, -1])
def test_flip_in_any_chunk_is_detected_there_and_only_there(path, index, where):
    file = put(path)
    offset = index * CHUNK
    at = offset + (0 if where == 0 else file.chunks[index].size - 1)
    overwrite(path, at, bytes([DATA[at] ^ 1]))
    ((found, start, reason),) = bad_chunks(path, file)
    assert (found, start) == (index, offset)
    assert isinstance(reason, CorruptChunk)
    span = f"bytes {offset}..{offset + file.chunks[index].size} differ"
    memory = memoryview(path.read_bytes())
    for read in (
        lambda: read_file(path, file),
        lambda: read_chunk(path, file, index),
        lambda: check_bytes(memory, file),
    ):
        with pytest.raises(CorruptChunk, match=span):
            read()
    for other in set(range(4)) - {index}:
        assert len(read_chunk(path, file, other)) == file.chunks[other].size


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 199])
def test_every_truncation_is_detected_from_the_chunk_where_it_begins(path, size):
    file = put(path)
    os.truncate(path, size)
    assert [index for index, *_ in bad_chunks(path, file)] == list(range(size // CHUNK, 4))
    with pytest.raises(CorruptChunk, match=f"{size} bytes, not the 200"):
        read_file(path, file)
    with pytest.raises(CorruptChunk):
        read_chunk(path, file, 0)
    with pytest.raises(CorruptChunk, match=f"{size} bytes, not the 200"):
        check_bytes(memoryview(DATA)[:size], file)


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
def test_path_that_is_no_plain_file_any_more_is_corrupt_in_every_chunk(tmp_path, damage):
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
    file = write_file(path, "file", NOISE[: 4 * 4096], 4096)
    overwrite(path, 8200, bytes([NOISE[8200] ^ 1]))
    real = os.preadv

    def bad_sector(fd, views, at):
        if at == 4096:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", bad_sector)
    assert [(index, type(reason)) for index, _, reason in bad_chunks(path, file)] == [(1, OSError), (2, CorruptChunk)]


# -- files that others wrote ------------------------------------------------------------------------------------------


def test_a_file_that_grows_while_it_is_described_is_refused(path, monkeypatch):
    path.write_bytes(DATA)
    real = os.preadv

    def while_reading(fd, views, at, flags=0):
        with open(path, "ab") as file:
            file.write(b"x")
        return real(fd, views, at, flags)

    monkeypatch.setattr(os, "preadv", while_reading)
    with pytest.raises(CorruptChunk, match="changed while"):
        describe_file(path, "file", CHUNK)


def test_a_file_that_shrinks_while_it_is_described_is_refused(path, monkeypatch):
    path.write_bytes(DATA)
    real = os.fsync
    monkeypatch.setattr(
        foreign_files, "content_chunk_sizes", lambda read, size, chunk: (os.truncate(path, 100), [64, 64, 64, 8])[1]
    )
    monkeypatch.setattr(os, "fsync", real)
    with pytest.raises(CorruptChunk, match="ends at byte 100"):
        describe_file(path, "file", CHUNK)


def test_file_whose_kind_cannot_be_read_is_closed(path, monkeypatch):
    put(path)

    def fail(fd):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(OSError, match="Stale"):
            file_io.open_plain(path)
        assert file_io._open_spare(path) is None
    assert os.listdir("/proc/self/fd") == before


def test_a_forked_child_uses_no_buffer_of_its_parent(tmp_path):
    direct_io.give_back_spare(direct_io.take_spare())
    child = os.fork()
    if not child:
        try:
            memory = direct_io.take_spare()
            memory[:] = bytes(len(memory))  # would end a child that had the parent's, which no child inherits
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
