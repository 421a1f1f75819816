"""A sparing observation of the spool finds parts to send, and decides no deletion."""

from __future__ import annotations

import asyncio
import os
import shutil
import time

from support.waiting import until
from support.world import RUN, commit, converge, part, reconciler, running, settle

from tierd.core.planning.place import SPOOL, Flush, Prune
from tierd.stores.memory_store import MemoryStore


async def flushed(spool, stores) -> None:
    """Two checkpoints in the spool and on the tier, of a minute ago."""
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, stores)
    then = time.time_ns() - 60_000_000_000
    for path in [spool.root / RUN, *(spool.root / RUN).glob("*")]:
        os.utime(path, ns=(then, then))


async def test_no_copy_is_deleted_because_of_a_checkpoint_that_was_removed_since(spool):
    stores = {"tier": MemoryStore()}
    await flushed(spool, stores)
    daemon = reconciler(spool, stores, keep=9, keep_local=1)
    for name in ("tier", SPOOL):
        await daemon.observe(name)
    action = await daemon._loop.agenda.next_action(daemon.workers[SPOOL])
    assert isinstance(action, Prune) and action.checkpoint == part(1).checkpoint
    shutil.rmtree(spool.path(part(2)))
    action = await daemon._loop.agenda.next_action(daemon.workers[SPOOL])
    assert not isinstance(action, Prune)


def test_a_new_part_is_sent_after_a_sparing_look_alone(spool, monkeypatch):
    async def work():
        stores = {"tier": MemoryStore()}
        await flushed(spool, stores)
        daemon = reconciler(spool, stores)
        await daemon.observe("tier")
        commit(spool, part(3))
        monkeypatch.setattr(spool, "stamp", lambda path: asked.append(path) or stamp(path))
        assert await daemon._loop.agenda.next_action(daemon.workers["tier"]) == Flush(part(3), "tier")

    asked, stamp = [], spool.stamp
    asyncio.run(work())
    assert asked and not [path for path in asked if path.endswith((part(1).checkpoint.name, part(2).checkpoint.name))]


async def test_a_part_removed_by_hand_while_it_was_sent_is_not_sent_again_and_again(spool, monkeypatch):
    stores, tries = {"tier": MemoryStore()}, []
    await flushed(spool, stores)
    daemon = reconciler(spool, stores)
    async with running(daemon):
        await settle(daemon)
        flush = daemon.flushes.flush

        async def removed(which, tier, spread=None):
            tries.append(which)
            if len(tries) == 1:
                then = time.time_ns() - 60_000_000_000
                for path in (spool.root / RUN, spool.path(which).parent):
                    os.utime(path, ns=(then, then))
                await daemon.observe("tier")  # from now on it counts as settled
                shutil.rmtree(spool.path(which))
            return await flush(which, tier, spread)

        monkeypatch.setattr(daemon.flushes, "flush", removed)
        commit(spool, part(3))
        daemon.wake()
        await until(lambda: tries)
        await settle(daemon)
        assert len(tries) <= 2
