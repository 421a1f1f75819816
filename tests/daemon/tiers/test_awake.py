"""A timeout that does not count the time in which its loop was stopped."""

from __future__ import annotations

import asyncio
import time

import pytest

from tierd.daemon.concurrency import suspend_aware_timeout


def test_timeout_ends_a_task_that_does_not_answer():
    async def work() -> float:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            async with suspend_aware_timeout(0.2):
                await asyncio.sleep(60)
        return time.monotonic() - begun

    assert 0.2 <= asyncio.run(work()) < 30.0


def test_answer_that_arrived_while_the_loop_was_stopped_counts():
    async def work() -> str:
        async with suspend_aware_timeout(0.4):
            loop = asyncio.get_running_loop()
            answer = loop.create_future()
            loop.call_soon(time.sleep, 1.0)
            loop.call_later(0.1, answer.set_result, "there")
            said: str = await answer
            await asyncio.sleep(0.01)  # another request
            return said

    assert asyncio.run(work()) == "there"


async def test_each_answer_begins_the_time_anew():
    async with suspend_aware_timeout(2.0) as begin_anew:
        for _ in range(5):
            await asyncio.sleep(0.5)
            begin_anew()


async def test_nothing_ends_a_block_that_has_ended():
    failed = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    async with suspend_aware_timeout(0.05):
        pass
    await asyncio.sleep(0.5)
    assert failed == []
