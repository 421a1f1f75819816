"""Reading along with a download: whatever happens to it, what is handed on is what the committed manifest describes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import threading

import pytest
from support.doubles import Double, flipped, is_chunk
from support.waiting import wait_until
from support.world import commit, part

from tierd.client.restoring import part_fetch as arriving_module
from tierd.client.restoring.part_fetch import StreamedPart
from tierd.core.errors import CorruptChunk
from tierd.core.manifest import DRAFT_NAME
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool.direct_io import LARGE
from tierd.spool.file_io import digest
from tierd.spool.spool import Spool

PART = part(7)
FILES = {
    "tensors": random.Random(1).randbytes(6 * LARGE + 777),
    "small": b"small",
    "empty": b"",
    "deep/packed": bytes(range(256)) * (LARGE // 64),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("support.world.CHUNK", LARGE + 123)


@pytest.fixture
def spool(tmp_path) -> Spool:
    return Spool(tmp_path / "spool")


@pytest.fixture
def store(tmp_path) -> Double:
    home, store = Spool(tmp_path / "home"), Double()
    commit(home, PART, FILES)
    asyncio.run(flush(home, PART, TierUploadContext(store)))
    return store


def bring(spool: Spool, store: Double, before=lambda gets: None) -> None:
    """Fetch the part; `before` is called before each chunk with their number so far."""
    gets = 0

    def get(operation: str, key: str) -> None:
        nonlocal gets
        if operation == "get" and is_chunk(key):
            before(gets)
            gets += 1

    store.before = get
    asyncio.run(fetch(spool, PART, {"tier": store}, MemoryBudget(1)))  # one chunk after the other


def chunks(store: Double) -> list[str]:
    return [key for key in store.inner.keys if is_chunk(key)]


def whole(spool: Spool, arriving: StreamedPart) -> bool:
    found = arriving.read(spool.path(PART), spool.manifest(PART))
    return {name: bytes(data) for name, data in found.items()} == FILES


def test_chunks_are_in_memory_before_all_others_have_arrived(spool, store):
    with StreamedPart(spool, PART, worth=True, pause_s=0.002) as arriving:

        def seen(gets: int) -> None:
            if gets == len(chunks(store)) - 1:  # the last one; one that was read while it was written counts as missing
                wait_until(lambda: any(len(i.missing) < len(i.file.chunks) for i in arriving._images.values()))

        bring(spool, store, seen)
        assert whole(spool, arriving)


@pytest.mark.parametrize("worth", [True, False])
def test_streamed_part_without_early_reads_reads_the_whole_part_at_the_end(spool, store, worth):
    with StreamedPart(spool, PART, worth=worth, pause_s=0.002) as arriving:
        if worth:
            arriving.stop()
        bring(spool, store)
        assert whole(spool, arriving)


def test_streamed_part_is_right_when_it_begins_or_ends_at_any_moment(spool, store):
    for begin in range(len(chunks(store))):
        arriving = StreamedPart(spool, PART, worth=True, pause_s=0.002)

        def at(gets: int, begin: int = begin, arriving: StreamedPart = arriving) -> None:
            if gets == begin:
                arriving.__enter__()
            if gets == begin + 4:
                arriving.stop()

        bring(spool, store, at)
        assert whole(spool, arriving), begin
        spool.remove([PART])


def test_file_that_changed_after_an_early_read_is_refused(spool, store):
    """What was not read in time comes from the committed file, verified like anything else."""
    arriving = StreamedPart(spool, PART, worth=True, pause_s=0.002)
    bring(spool, store)
    path = spool.path(PART) / "tensors"
    path.write_bytes(flipped(path.read_bytes(), 3 * LARGE))
    with pytest.raises(CorruptChunk, match="differ"):
        arriving.read(spool.path(PART), spool.manifest(PART))


@pytest.mark.parametrize("kind", ["garbage", "directory", "other part"])
def test_a_draft_that_is_none_is_passed_over(spool, store, tmp_path, kind):
    home = spool.fetch_directory(PART)
    home.mkdir()
    if kind == "directory":
        (home / DRAFT_NAME).mkdir()
    elif kind == "garbage":
        (home / DRAFT_NAME).write_bytes(b"{")
    else:
        other = Spool(tmp_path / "other")
        commit(other, part(8), FILES)
        (home / DRAFT_NAME).write_bytes((other.path(part(8)) / "manifest.json").read_bytes())
    with StreamedPart(spool, PART, worth=True, pause_s=0.002) as arriving:
        bring(spool, store)
        assert whole(spool, arriving)


def test_file_system_without_extent_information_costs_few_extra_reads(spool, store, monkeypatch):
    seek, reads = os.lseek, []

    def all_data(fd, offset, how):
        return os.fstat(fd).st_size if how == os.SEEK_HOLE else offset if how == os.SEEK_DATA else seek(fd, offset, how)

    monkeypatch.setattr(os, "lseek", all_data)
    monkeypatch.setattr(arriving_module, "digest", lambda data: reads.append(1) or digest(data))
    paused = threading.Event()
    with StreamedPart(spool, PART, worth=True, pause_s=0.002) as arriving:
        bring(spool, store, lambda gets: paused.wait(0.05))
        assert whole(spool, arriving)
    assert len(reads) <= len(chunks(store)) * (arriving_module._TRIES + 1)


def test_draft_is_deleted_after_the_fetch(spool, store):
    bring(spool, store)
    assert not (spool.path(PART) / DRAFT_NAME).exists()


def test_refused_direct_reads_use_the_page_cache(spool, store, monkeypatch):
    real = os.preadv

    def preadv(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    with StreamedPart(spool, PART, worth=True, pause_s=0.002) as arriving:
        bring(spool, store, lambda gets: wait_until(lambda: gets == 0 or arriving._images))
        arriving.stop()
        for image in arriving._images.values():
            image.__init__(image.file)  # nothing was read
        monkeypatch.setattr(os, "preadv", preadv)
        assert whole(spool, arriving)


def test_early_reads_of_a_fetch_that_failed_are_dropped(spool, store):
    with pytest.raises(ValueError), StreamedPart(spool, PART, worth=True, pause_s=0.002) as arriving:
        bring(spool, store, lambda gets: wait_until(lambda: gets == 0 or arriving._images))
        raise ValueError
    assert not arriving._images
