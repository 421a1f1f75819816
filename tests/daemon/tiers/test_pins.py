"""A pin and a prune at once: the prune sees the pin, or the pin waits for the prune and tells how it ended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from support.doubles import Double
from support.timed import QUICK
from support.waiting import until
from support.world import commit, converge, part

from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.core.ids import pin_key
from tierd.daemon.tiers.intents import deletion_marks, pin
from tierd.daemon.tiers.tier_prune import prune


@pytest.mark.parametrize("deletes", [True, False])
async def test_a_pin_waits_for_a_prune_that_may_not_see_it(spool, deletes):
    one = part(1)
    store, asked = Double(), asyncio.Event()
    commit(spool, one)
    await converge(spool, {"tier": store})
    spool.remove([one])

    def note(operation: str, key: str) -> None:
        if operation == "put" and key == pin_key(one.checkpoint):
            asked.set()

    store.before = note
    async with deletion_marks(store, "run", timings=QUICK) as marks:
        await marks.put_marks([one.checkpoint])
        pinning = asyncio.ensure_future(pin(spool, [store], one.checkpoint, QUICK))
        await asked.wait()
        await asyncio.sleep(0.05)
        assert not pinning.done()
        if deletes:
            await store.delete([one.manifest_key])
    if deletes:
        with pytest.raises(ObjectNotFound, match="is gone"):
            await pinning
    else:
        await pinning
    assert (pin_key(one.checkpoint) in store.inner.objects) == (one.checkpoint in spool.pins()) == (not deletes)


@pytest.mark.parametrize("first_has_it", [True, False])
async def test_pin_is_kept_where_any_tier_has_the_checkpoint(spool, first_has_it):
    has, lacks = Double(), Double()
    commit(spool, part(1))
    await converge(spool, {"tier": has})
    spool.remove([part(1)])
    await pin(spool, [has, lacks] if first_has_it else [lacks, has], part(1).checkpoint, QUICK)
    assert all(pin_key(part(1).checkpoint) in store.inner.objects for store in (has, lacks))
    assert part(1).checkpoint in spool.pins()


async def test_a_copy_in_the_spool_is_enough(spool):
    store = Double()
    commit(spool, part(1))
    await pin(spool, [store], part(1).checkpoint, QUICK)
    assert pin_key(part(1).checkpoint) in store.inner.objects


@pytest.mark.parametrize("age_s", [0, 86_000])
async def test_prune_that_does_not_end_is_reported_also_if_it_may_have_been_interrupted(spool, age_s):
    one = part(1).checkpoint
    store = Double()
    commit(spool, part(1))
    async with deletion_marks(store, "run", timings=QUICK) as marks:
        await marks.put_marks([one])
        later = replace(QUICK, wall_ns=lambda: time.time_ns() + age_s * 10**9)
        with pytest.raises(StoreUnavailable, match=r"is pinned, but .* still there in 10 minutes"):
            await pin(spool, [store], one, later)
        assert one in spool.pins() and pin_key(one) in store.inner.objects, "it may be in time"
        await pin(spool, [store], one, replace(QUICK, wall_ns=lambda: time.time_ns() + 86_401 * 10**9))


async def test_a_pin_does_not_report_success_while_a_node_whose_clock_is_behind_deletes(spool):
    """The prune has listed the pins, and its mark looks 11 minutes old to the node that pins."""
    one = part(1)
    store, asked, go = Double(), asyncio.Event(), asyncio.Event()
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, {"tier": store}, keep=100)
    spool.remove([part(1), part(2)])

    async def confirm(shown):
        asked.set()
        await go.wait()
        return frozenset({one.checkpoint})

    behind = replace(QUICK, wall_ns=lambda: time.time_ns() - 660 * 10**9)
    pruning = asyncio.ensure_future(prune(store, [one.checkpoint], confirm=confirm, timings=behind))
    await asked.wait()
    pinning = asyncio.ensure_future(pin(spool, [store], one.checkpoint, QUICK))
    await until(lambda: pin_key(one.checkpoint) in store.inner.objects)
    await asyncio.sleep(0.05)
    assert not pinning.done()
    go.set()
    assert (await pruning).deleted == {one.checkpoint}
    with pytest.raises(ObjectNotFound, match="is gone"):
        await pinning


@pytest.mark.parametrize("what", ["fails", "is_awaited"])
def test_tier_gets_its_pin_though_the_pin_fails_on_another(spool, what):
    one = part(1).checkpoint

    async def work():
        first, second = Double(), Double()
        async with deletion_marks(first, "run", timings=QUICK) as marks:
            await marks.put_marks([one])
            if what == "fails":
                first.before = lambda operation, key: fail() if key == pin_key(one) else None
            with pytest.raises(StoreUnavailable):
                await pin(spool, [first, second], one, QUICK)
        assert pin_key(one) in second.inner.objects

    def fail() -> None:
        raise StoreUnavailable("not now")

    asyncio.run(work())


async def test_a_prune_that_is_cancelled_before_it_deletes_takes_its_marks_back():
    store = Double()

    async def prune() -> None:
        async with deletion_marks(store, "run", timings=QUICK) as marks:
            await marks.put_marks([part(1).checkpoint])
            await asyncio.sleep(60)

    task = asyncio.ensure_future(prune())
    await until(lambda: store.inner.objects)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not store.inner.objects
