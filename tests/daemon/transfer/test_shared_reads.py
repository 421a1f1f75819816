"""Chunks that several ranks of a node read are got once, and cost the ranks nothing if one of them does not come."""

from __future__ import annotations

import asyncio

import pytest

from tierd.core.errors import StoreUnavailable
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.transfer.slot_fills import SharedReads

SIZE = 10


class Tier:
    """What is asked for, and gives each object its name's bytes."""

    def __init__(self, shared: SharedReads) -> None:
        self.shared, self.gets = shared, list[str]()
        self.failure: Exception | None = None
        self.hanging = False

    async def read(self, name: str, readers: int = 2) -> bytes:
        async def get(memory: memoryview) -> memoryview:
            self.gets.append(name)
            await asyncio.sleep(0)
            while self.hanging:
                await asyncio.sleep(0.001)
            if self.failure:
                raise self.failure
            memory[: len(name)] = name.encode()
            return memory[: len(name)]

        async with self.shared.read(("tier", name), readers, SIZE, get) as data:
            return bytes(data)


def tier_with(patience_s: float) -> Tier:
    tier = Tier(SharedReads(MemoryBudget(2 * SIZE), patience_s=patience_s))
    tier.shared.join()
    return tier


@pytest.fixture
def tier() -> Tier:
    return tier_with(60.0)


async def settle(tier: Tier) -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_ranks_read_a_chunk_once_in_any_order(tier):
    assert await asyncio.gather(tier.read("a"), tier.read("a")) == [b"a", b"a"]
    assert await tier.read("b") == b"b" and await tier.read("b") == b"b"
    assert tier.gets == ["a", "b"]
    await settle(tier)
    assert tier.shared.budget.has_free(2 * SIZE)
    assert await tier.read("b") == b"b" and tier.gets == ["a", "b", "b"], "all have read it, so it was forgotten"


async def test_rank_that_is_ahead_waits_for_the_slower_rank(tier):
    for name in "ab":
        await tier.read(name)
    ahead = asyncio.ensure_future(tier.read("c"))
    await settle(tier)
    assert not ahead.done() and tier.gets == ["a", "b"]
    assert await tier.read("a") == b"a"
    assert await ahead == b"c" and tier.gets == ["a", "b", "c"]


async def test_absent_rank_ends_the_wait_of_others():
    tier = tier_with(0.01)
    for name in "abcdef":
        assert await tier.read(name) == name.encode()
    assert tier.gets == list("abcdef")
    assert await asyncio.gather(tier.read("g"), tier.read("g")) == [b"g", b"g"] and tier.gets[6:] == ["g"]


@pytest.mark.parametrize("kind", [StoreUnavailable, MemoryError])
async def test_error_reaches_waiting_ranks_and_a_later_rank_asks_again(tier, kind):
    tier.failure = kind("the tier is gone")
    errors = await asyncio.gather(tier.read("a", 3), tier.read("a", 3), return_exceptions=True)
    assert all(isinstance(error, kind) for error in errors)
    tier.failure = None
    assert await tier.read("a") == b"a" and tier.gets == ["a", "a"]


async def test_rank_that_is_gone_does_not_end_the_reads_of_others(tier):
    tier.hanging = True
    gone, remaining = asyncio.ensure_future(tier.read("a", 3)), asyncio.ensure_future(tier.read("a", 3))
    await settle(tier)
    gone.cancel()
    await settle(tier)
    tier.hanging = False
    assert await remaining == b"a" and tier.gets == ["a"]


async def test_memory_is_given_back_when_no_rank_is_left(tier):
    await tier.read("a")
    await tier.read("b", 9)
    assert not tier.shared.budget.has_free(1)
    tier.shared.leave()
    await settle(tier)
    assert tier.shared.budget.has_free(2 * SIZE)
