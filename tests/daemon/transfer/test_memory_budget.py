"""The budget: never more out than there is, first come first served, and all of it back whatever happens."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.seeds import seeds

from tierd.daemon.concurrency import MemoryBudget


@pytest.mark.parametrize("seed", seeds(weight=2))
async def test_budget_never_grants_more_than_its_total_under_any_cancellation(seed):
    rng = random.Random(seed)
    budget, out = MemoryBudget(100), 0

    async def use(size: int) -> None:
        nonlocal out
        async with budget.take(size) as hold:
            out += hold.size
            assert out <= 100
            await asyncio.sleep(rng.random() / 1000)
            kept = rng.randrange(hold.size + 1)
            out -= hold.size - kept
            hold.shrink_to(kept)
            await asyncio.sleep(0)
            out -= kept

    tasks = [asyncio.ensure_future(use(rng.randrange(1, 150))) for _ in range(200)]
    # Cancelled before they were served only: the count above is the test's, not the budget's.
    for task in rng.sample(tasks, 60):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert budget._free == 100 and not budget._waiting


async def test_large_request_is_not_starved_by_small_requests():
    budget, order = MemoryBudget(10), []

    async def use(name: str, size: int) -> None:
        async with budget.take(size):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(use("a", 6), use("large", 100), *(use(f"small {n}", 1) for n in range(5)))
    assert order[:2] == ["a", "large"]


async def test_grant_of_a_waiter_that_was_cancelled_meanwhile_passes_to_the_next():
    budget = MemoryBudget(1)
    async with budget.take(1):
        waiting = [asyncio.ensure_future(budget._wait_for(1)) for _ in range(2)]
        await asyncio.sleep(0)
    waiting[0].cancel()  # it has its turn, and has not seen it yet
    await asyncio.wait(waiting, timeout=60)
    assert waiting[0].cancelled() and waiting[1].done() and not waiting[1].cancelled()


async def test_take_at_once_never_waits_and_overtakes_no_waiter():
    budget = MemoryBudget(10)
    assert budget.try_take(11) is None
    held = budget.try_take(6)
    assert held and budget.try_take(5) is None and budget.has_free(4) and not budget.has_free(5)
    waiting = asyncio.ensure_future(budget._wait_for(8))
    await asyncio.sleep(0)
    assert budget.has_waiters and budget.try_take(1) is None
    held.shrink_to(0)
    await waiting
    assert not budget.has_waiters and budget.try_take(2)
