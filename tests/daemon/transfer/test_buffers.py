"""A download's memory: used again, by one at a time, and no more of it is kept than is said."""

from __future__ import annotations

import asyncio
import random
import time
from array import array

import numpy as np
import pytest
from support.doubles import Double, is_chunk
from support.world import commit, part

from tierd.core.errors import StoreUnavailable
from tierd.daemon import concurrency as buffers_module
from tierd.daemon.concurrency import MAX_IDLE_BYTES, Buffers, MemoryBudget
from tierd.daemon.transfer import download
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool.direct_io import LARGE
from tierd.spool.spool import Spool

PART = part(7)
NUMBERS = array("I", range(6 * LARGE // 4)).tobytes()
FILES = {"noise": random.Random(1).randbytes(6 * LARGE + 777), "numbers": NUMBERS, "small": b"small"}


def test_released_buffer_is_used_again_for_a_similar_size():
    made = Buffers()
    with made.hold(5 * LARGE) as memory:
        assert len(memory) == 5 * LARGE
        first = memory.obj
    with made.hold(4 * LARGE) as memory:
        assert memory.obj is first and len(memory) == 4 * LARGE
    with made.hold(LARGE) as memory:  # its budget would not cover what was touched of the large one
        assert memory.obj is not first
    with made.hold(5 * LARGE) as memory:
        assert memory.obj is first


def test_no_more_is_kept_than_is_said():
    made = Buffers()
    with (
        made.hold(MAX_IDLE_BYTES - LARGE),
        made.hold(3 * LARGE),
        made.hold(2 * LARGE),
        made.hold(MAX_IDLE_BYTES + LARGE),
    ):
        pass
    assert 0 < sum(map(len, made._idle)) <= MAX_IDLE_BYTES


def test_buffers_may_keep_the_unused_rest_of_a_budget_idle():
    made = Buffers(3 * MAX_IDLE_BYTES)
    with made.hold(MAX_IDLE_BYTES), made.hold(MAX_IDLE_BYTES):
        with made.hold(MAX_IDLE_BYTES), made.hold(MAX_IDLE_BYTES // 2):
            pass
        assert sum(map(len, made._idle)) <= MAX_IDLE_BYTES
    assert 2 * MAX_IDLE_BYTES < sum(map(len, made._idle)) <= 3 * MAX_IDLE_BYTES
    made.clear()
    assert not made._idle


def test_buffer_of_one_size_serves_the_next_size_below_it():
    """Sizes are rounded up, so that a buffer fits whatever would be rounded to it."""
    buffers, mebibyte = Buffers(), 1 << 20
    memory = buffers.take(2 * mebibyte + 300_000)
    buffers.give_back(memory)
    assert buffers.take(2 * mebibyte + 1) is memory


def test_flush_encodes_into_memory_that_earlier_chunks_have_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("support.world.CHUNK", LARGE)
    numbers = (np.random.default_rng(1).standard_normal(8 * LARGE // 4) * 0.02).astype("<f4").tobytes()
    spool, store = Spool(tmp_path / "spool"), Double()
    commit(spool, PART, {"numbers": numbers})
    new_sizes, allocate = [], buffers_module.memory_for
    monkeypatch.setattr(buffers_module, "memory_for", lambda size: new_sizes.append(size) or allocate(size))

    asyncio.run(flush(spool, PART, TierUploadContext(store, budget=MemoryBudget(LARGE))))
    assert len(store.puts(is_chunk)) == 8
    assert sum(new_sizes) <= 8 * LARGE, "memory for reading and for encoding of one chunk, and for reading it back"


@pytest.mark.parametrize("failing", [False, True])
def test_bytes_are_where_they_belong_however_long_writing_takes(tmp_path, monkeypatch, failing):
    """Eight hands, few buffers, a tier that fails now and then, and the bytes of its first try still in memory."""
    monkeypatch.setattr("support.world.CHUNK", LARGE)
    home, store, other = Spool(tmp_path / "home"), Double(), Double()
    commit(home, PART, FILES)
    for tier in (store, other):
        asyncio.run(flush(home, PART, TierUploadContext(tier)))
    real, gets = download.write_at, 0

    def slow(*args):
        time.sleep(0.01)
        real(*args)

    def fails(operation: str, key: str) -> None:
        nonlocal gets
        gets += is_chunk(key)
        if failing and operation == "get" and is_chunk(key) and gets % 3 == 0:
            raise StoreUnavailable("try the other")

    monkeypatch.setattr(download, "write_at", slow)
    made, take = [], buffers_module.memory_for
    monkeypatch.setattr(buffers_module, "memory_for", lambda size: made.append(size) or take(size))
    store.before = fails
    spool = Spool(tmp_path / "spool")
    asyncio.run(fetch(spool, PART, {"one": store, "other": other}))
    assert {name: (spool.path(PART) / name).read_bytes() for name in FILES} == FILES
    assert sum(made) < 2 * sum(map(len, FILES.values()))
