"""A prune takes long on a slow tier. Pins and launches count until its deletions begin."""

from __future__ import annotations

import asyncio

import pytest
from support.doubles import Double, is_manifest
from support.world import commit, converge, part, reconciler, running, settle, steps_on, until


def once_marked(store: Double, act) -> list[str]:
    """Have `act` done when the first mark of a prune is put; the keys of all marks."""
    marks: list[str] = []

    def note(operation: str, key: str) -> None:
        if operation == "put" and "/pruning/" in key:
            marks.append(key)
            if len(marks) == 1:
                act()

    store.before = note
    return marks


@pytest.mark.parametrize("what", ["a pin", "a launch that resumed from it"])
def test_what_makes_a_checkpoint_wanted_counts_until_its_deletion_begins(spool, what):
    def act() -> None:
        if what == "a pin":
            spool.pin(part(1).checkpoint, pinned=True)
        else:
            commit(spool, part(2, launch=2), origin=part(1).checkpoint)

    async def work():
        store = Double()
        for step in range(6):
            commit(spool, part(step))
        await converge(spool, {"tier": store})
        marks = once_marked(store, act)
        async with running(reconciler(spool, {"tier": store}, keep=2, keep_local=100)) as daemon:
            await until(lambda: daemon.journal.counters["pruned"])
            await settle(daemon)
        assert any(part(1).checkpoint.name in key for key in marks), "it was not even to be deleted"
        gone = [step for operation, key in store.calls if operation == "delete" for step in steps_on([key])]
        assert 0 in gone, "the others of the pass go all the same"
        assert 1 not in gone
        assert not [key for key in store.inner.objects if "/pruning/" in key], "marks are left"

    asyncio.run(work())


def test_a_launch_that_another_node_began_ends_the_pass(spool, tmp_path):
    """It may have resumed from a checkpoint that is about to go, and its node prunes from now on."""
    other = type(spool)(tmp_path / "other")

    async def work():
        store, theirs = Double(), Double()
        for step in range(6):
            commit(spool, part(step))
        await converge(spool, {"tier": store})
        commit(other, part(2, launch=2), origin=part(1).checkpoint)
        await converge(other, {"tier": theirs})
        new = {key: data for key, data in theirs.inner.objects.items() if part(2, launch=2).checkpoint.name in key}

        def arrive() -> None:
            store.inner.objects |= new
            store.inner.keys = sorted(store.inner.objects)

        marks = once_marked(store, arrive)
        async with running(reconciler(spool, {"tier": store}, keep=2, keep_local=100)) as daemon:
            await until(lambda: marks)
            await settle(daemon)
        left = [key for key in store.inner.objects if is_manifest(key)]
        assert len(left) == 7, left

    asyncio.run(work())
