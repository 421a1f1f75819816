"""A pin and a prune at once: the prune sees the pin, or the pin waits for the prune and tells how it ended."""

from __future__ import annotations

import asyncio

import pytest
from support.doubles import Double
from support.timed import QUICK
from support.world import commit, converge, part

from tierd.core.errors import ObjectNotFound
from tierd.core.ids import pin_key
from tierd.daemon.tiers.intents import deleting
from tierd.daemon.tiers.pins import pin


@pytest.mark.parametrize("deletes", [True, False])
def test_a_pin_waits_for_a_prune_that_may_not_see_it(spool, deletes):
    one = part(1)

    async def work():
        store, asked = Double(), asyncio.Event()
        commit(spool, one)
        await converge(spool, {"tier": store})
        spool.remove([one])

        def note(operation: str, key: str) -> None:
            if operation == "put" and key == pin_key(one.checkpoint):
                asked.set()

        store.before = note
        async with deleting(store, "run", timings=QUICK) as marks:
            await marks.put([one.checkpoint])
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

    asyncio.run(work())


def test_a_copy_in_the_spool_is_enough(spool):
    async def work():
        store = Double()
        commit(spool, part(1))
        await pin(spool, [store], part(1).checkpoint, QUICK)
        assert pin_key(part(1).checkpoint) in store.inner.objects

    asyncio.run(work())
