"""Several tiers of different speed and policy: what one wants, another holds until it is there, from any sender."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace

import msgspec
import pytest
from support.doubles import Double, contents, flip, is_chunk, is_manifest
from support.waiting import until
from support.world import commit, config, part, running, settle, steps_in, steps_on

from tierd.core.config import TierConfig
from tierd.core.errors import DeleteRefused, StoreFull, StoreUnavailable
from tierd.core.retention.policy import Best, RetentionPolicy
from tierd.daemon.reconciler import Reconciler

FAST = RetentionPolicy(keep_last=3)
RICH = RetentionPolicy(keep_last=5, keep_every_steps=10, keep_best=Best(metric="loss", count=2))
TENS = RetentionPolicy(keep_last=1, keep_every_steps=10)
FIVES = RetentionPolicy(keep_last=1, keep_every_steps=5)
ONE = RetentionPolicy(keep_last=1)


def daemon(spool, stores, policies, keep_local=2, **options) -> Reconciler:
    made = config(spool, *stores, keep_local=keep_local, **options)
    tiers = tuple(
        TierConfig(name=name, url=f"file:///{name}", retention=policy)
        for name, policy in zip(stores, policies, strict=True)
    )
    return Reconciler(msgspec.structs.replace(made, tier=tiers), spool, stores)


def loss(step):
    return {"loss": abs(step - 23) + 1.0}


def events(reconciler, what):
    return [(one.place, one.step, one.why) for one in reconciler.journal.events if one.what == what]


class Slow(Double):
    """Takes as many manifests as it is let, and until then holds up the first chunk of the next part."""

    def __init__(self) -> None:
        super().__init__()
        self.room = asyncio.Semaphore(0)
        self._part = ""

    async def put(self, key, data):
        if is_manifest(key):
            await self.room.acquire()
        return await super().put(key, data)


@pytest.mark.parametrize("every", [3, 5])
def test_tier_slower_than_the_saves_gets_every_wanted_checkpoint(spool, every):
    """Row 1: `s3` takes one checkpoint while so many are saved."""

    async def work():
        fast, slow = Double(), Slow()
        async with running(daemon(spool, {"nfs": fast, "s3": slow}, (FAST, RICH))) as node:
            for step in range(1, 46):
                commit(spool, part(step), metrics=loss(step))
                node.wake()
                await until(lambda step=step: node.tiers.observed.has(part(step), "nfs"))
                await until(lambda: len(steps_in(spool)) <= 4)
                if step % every == 0:
                    before = len(slow.puts(is_manifest))
                    slow.room.release()
                    await until(lambda before=before: len(slow.puts(is_manifest)) > before)
            for _ in range(100):
                slow.room.release()
            await settle(node)
            assert not node.backlog.parts() and node.backlog.pending_sizes("s3") == {}
            on = {name: await contents(store.inner) for name, store in (("nfs", fast), ("s3", slow))}
        return on, node

    on, node = asyncio.run(work())
    assert steps_on(on["s3"]) == [10, 20, 23, 24, 30, 40, 41, 42, 43, 44, 45]
    assert steps_on(on["nfs"]) == [43, 44, 45] and steps_in(spool) == [44, 45]
    assert not events(node, "given up")
    same = {key: data for key, data in on["nfs"].items() if is_chunk(key)}
    assert same.items() <= on["s3"].items()


async def test_row_2_the_chain_starts_at_the_oldest_that_is_known(spool):
    """A backlog in the spool: only the newest are verified when the older ones are judged."""
    sixth = RetentionPolicy(keep_last=1, keep_every="6h")
    hours = {1: "01:34", 2: "05:00", 3: "07:34", 4: "08:20", 5: "08:40"}
    store = Slow()
    made = config(spool, "tier", keep_local=1)
    node = Reconciler(msgspec.structs.replace(made, retention=sixth), spool, {"tier": store})
    for step, hour in hours.items():
        commit(spool, part(step), created=f"2026-01-01T{hour}:00+00:00")
    async with running(node):
        for sent in range(1, 6):
            store.room.release()
            await until(lambda sent=sent: len(store.puts(is_manifest)) == sent)
        await settle(node)
    assert steps_in(spool) == [1, 3, 5]


def test_checkpoint_that_the_spool_freed_is_relayed_byte_for_byte_and_reported_as_a_flush(spool):
    async def work():
        fast, slow = Double(), Double()
        slow.error = StoreUnavailable("no route")
        async with running(daemon(spool, {"a": fast, "b": slow}, (ONE, TENS), keep_local=1)) as node:
            for step in range(9, 13):
                commit(spool, part(step), metrics=loss(step))
                node.wake()
                await until(lambda step=step: node.tiers.observed.has(part(step), "a"))
            await until(lambda: 10 not in steps_in(spool) and steps_on(fast.inner.objects) == [10, 12])
            slow.error = None
            await settle(node)
        return await contents(fast.inner), await contents(slow.inner), node

    fast, slow, node = asyncio.run(work())
    assert steps_on(slow) == [10, 12] and steps_on(fast) == [12]
    assert [(step, place) for place, step, _ in events(node, "durable") if place == "b"] == [(12, "b"), (10, "b")]
    assert [(step, "another tier" in why) for place, step, why in events(node, "flushed") if place == "b"] == [
        (12, False),
        (10, True),
    ]
    assert all(fast[key] == slow[key] for key in fast if is_chunk(key))


async def test_relay_reads_a_chunk_that_is_wrong_on_a_tier_from_the_next_and_never_puts_it(spool):
    stores = {name: Double() for name in "abc"}
    stores["c"].error = StoreUnavailable("no route")
    async with running(daemon(spool, stores, (TENS, TENS, TENS), keep_local=1)) as node:
        for step in (10, 11):
            commit(spool, part(step))
            node.wake()
            await until(lambda step=step: all(node.tiers.observed.has(part(step), name) for name in "ab"))
        await until(lambda: 10 not in steps_in(spool))
        first, *_ = sorted(
            key for key in stores["a"].inner.objects if is_chunk(key) and ".zst" not in key and "000000000010" in key
        )
        right = bytes(await stores["a"].inner.get(first))
        await flip(stores["a"].inner, first)
        stores["c"].error = None
        await settle(node)
        assert bytes(await stores["c"].inner.get(first)) == right
        assert all(bytes(data) for data in (await contents(stores["c"].inner)).values())


async def test_checkpoint_that_no_tier_has_right_is_not_relayed_and_scrubbed_at_once(spool):
    stores = {name: Double() for name in "ab"}
    stores["b"].error = StoreUnavailable("no route")
    async with running(daemon(spool, stores, (ONE, TENS), keep_local=1)) as node:
        for step in (10, 11):
            commit(spool, part(step))
            node.wake()
            await until(lambda step=step: node.tiers.observed.has(part(step), "a"))
        await until(lambda: 10 not in steps_in(spool))
        for key in [key for key in stores["a"].inner.objects if is_chunk(key) and "000000000010" in key]:
            await flip(stores["a"].inner, key)
        stores["b"].error = None
        await until(lambda: node.workers["b"].is_deferred(part(10)))
        await until(lambda: steps_on(stores["b"].inner.objects) == [11])
        await until(lambda: steps_on(stores["a"].inner.objects) == [11])  # and is quarantined, scrub or no scrub


def lacking(node, tier: str) -> set[int]:
    return {one.part.checkpoint.step for one in node.backlog.remaining() if tier in one.lacks}


@pytest.mark.parametrize("hold_for", ["7d", "0s"])
def test_a_silent_tier_is_held_for_no_longer_than_hold_for(spool, hold_for):
    async def work():
        fast, slow = Double(), Double()
        slow.error = StoreUnavailable("no route")
        made = daemon(spool, {"a": fast, "b": slow}, (ONE, TENS), keep_local=1, hold_for=hold_for)
        async with running(made) as node:
            for step in (9, 10, 11):
                commit(spool, part(step))
                node.wake()
                await until(lambda step=step: node.tiers.observed.has(part(step), "a"))
            left = [10, 11] if hold_for == "7d" else [11]
            gone = [step for step in (9, 10, 11) if step not in left]
            await until(lambda: [step for place, step, _ in events(node, "pruned") if place == "a"] == gone)
            assert steps_on(fast.inner.objects) == left
            if hold_for == "0s":
                await until(lambda: events(node, "given up"))
            else:  # what it wants is left to be sent, from wherever that lies
                # And 9 where `a` let go of it before the spool did: no tier has it, and what `b` holds is not known.
                await until(lambda: lacking(node, "b") - {9} == {10, 11})
        return node

    node = asyncio.run(work())
    given_up = events(node, "given up")
    # Spool and tier may delete theirs at once: each may have been the last, and then both say so.
    assert {step for _, step, _ in given_up} == (set() if hold_for == "7d" else {10}) and len(given_up) <= 2
    if given_up:
        assert "b wanted it" in given_up[0][2]
        assert {one.level for one in node.journal.events if one.what == "given up"} == {"alert"}


class Late(Double):
    """Has something else happen before its first deletion of manifests ends."""

    then = None

    async def delete(self, keys):
        await super().delete(keys)
        if self.then and any(map(is_manifest, keys)):
            then, self.then = self.then, None
            await then()


def test_save_during_the_deletion_of_a_last_copy_does_not_hide_that_a_tier_wanted_it(spool):
    async def work():
        fast, slow = Late(), Double()
        slow.error = StoreUnavailable("no route")
        made = daemon(spool, {"a": fast, "b": slow}, (ONE, RetentionPolicy(keep_last=2)), keep_local=1, hold_for="0s")
        async with running(made) as node:

            async def save():
                commit(spool, part(3))
                node.wake()
                await until(lambda: part(3).checkpoint in node.inventory().spool.checkpoints)

            fast.then = save
            for step in (1, 2):
                commit(spool, part(step))
                node.wake()
                await until(lambda step=step: node.tiers.observed.has(part(step), "a"))
            await until(lambda: node.tiers.observed.has(part(3), "a") and 1 not in steps_on(fast.inner.objects))
            await until(lambda: {("a", 1), ("local", 1)} <= {reported[:2] for reported in events(node, "pruned")})
        return node

    node = asyncio.run(work())
    assert 1 in [step for _, step, _ in events(node, "given up")]


class KeepsChunks(Double):
    """Deletes manifests, and no chunk."""

    async def delete(self, keys):
        if any(map(is_chunk, keys)):
            raise StoreUnavailable("not done within 600 s")
        await super().delete(keys)


def test_a_last_copy_is_reported_though_its_chunks_cannot_be_deleted(spool):
    """Simulation, seed 1000016: the report came with the last chunk, or never."""

    async def work():
        fast, slow = KeepsChunks(), Double()
        slow.error = StoreUnavailable("no route")
        made = daemon(spool, {"a": fast, "b": slow}, (ONE, TENS), keep_local=1, hold_for="0s")
        async with running(made) as node:
            for step in (10, 11):
                commit(spool, part(step))
                node.wake()
                await until(lambda step=step: node.tiers.observed.has(part(step), "a"))
            await until(lambda: ("a", 10) in {reported[:2] for reported in events(node, "pruned")})
            assert steps_on(fast.inner.objects) == [11]
            await until(lambda: ("local", 10) in {reported[:2] for reported in events(node, "pruned")})
        return node

    node = asyncio.run(work())
    assert 10 in [step for _, step, _ in events(node, "given up")]
    assert len([1 for place, step, _ in events(node, "pruned") if (place, step) == ("a", 10)]) == 1


async def test_hold_for_a_tier_ends_only_after_time_in_which_the_tier_was_asked_in_vain(spool, monkeypatch):
    """A daemon at rest looks seldom, and a machine is frozen: a look that fails then says nothing of before."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("tierd.daemon.tiers.tier_observations.time", clock)
    store = Double()
    node = daemon(spool, {"a": Double(), "b": store}, (ONE, TENS), hold_for="1h")
    commit(spool, part(1))

    async def silent(later, error=None):
        now[0] += later
        store.error = error
        with contextlib.suppress(StoreUnavailable):
            await node.observe("b")
        return node.inventory().silent

    down = StoreUnavailable("no route")
    assert not await silent(0.0)
    now[0] += 86_400.0
    node.tiers.observed.invalidate("b")  # what was seen there does not count any more, and nobody has asked yet
    assert not node.inventory().silent
    assert not await silent(0.0, down)
    for _ in range(5):
        assert not await silent(500.0, down)
    now[0] += 86_400.0
    assert not node.inventory().silent
    assert not await silent(0.0, down)
    assert await silent(500.0, down) == {"b"}
    assert not await silent(1.0)
    assert not await silent(3000.0, down)


class Small(Double):
    """Has room for so many manifests."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    async def put(self, key, data):
        if is_chunk(key) and len(steps_on(self.inner.objects)) >= self.room:
            raise StoreFull("the file system is full")
        return await super().put(key, data)


def test_a_full_tier_gives_up_the_oldest_it_holds_for_others_until_puts_work_again(spool):
    async def work():
        fast, slow = Small(4), Double()
        slow.error = StoreUnavailable("no route")
        async with running(daemon(spool, {"a": fast, "b": slow}, (ONE, FIVES), keep_local=1)) as node:
            for step in range(4, 27):
                commit(spool, part(step))
                node.wake()
                await until(lambda step=step: node.tiers.observed.has(part(step), "a"))
            await until(lambda: steps_on(fast.inner.objects)[-1] == 26 and len(steps_on(fast.inner.objects)) <= 4)
            slow.error = None
            await settle(node)
        return await contents(fast.inner), await contents(slow.inner), node

    fast, slow, node = asyncio.run(work())
    lost = [step for _, step, _ in events(node, "given up")]
    assert lost == [5, 10][: len(lost)] and lost
    assert steps_on(slow) == [step for step in (5, 10, 15, 20, 25) if step not in lost] + [26]
    assert steps_on(fast) == [26]


async def test_full_tier_continues_where_a_prune_waits_for_a_copy_that_nobody_may_quarantine(spool):
    """Step 1 waits on `a` for an hour each time, because `b` lets nothing be deleted, and has it without a chunk."""
    rich = RetentionPolicy(keep_last=1000)
    fast, slow = Small(5), Double()
    for step in range(4):
        commit(spool, part(step))
    async with running(daemon(spool, {"a": fast, "b": slow}, (rich, rich))) as node:
        await settle(node)
    await slow.inner.delete([key for key in slow.inner.keys if is_chunk(key) and part(1).checkpoint.name in key])

    def refuse(operation: str, key: str) -> None:
        if operation == "delete":
            raise DeleteRefused(key)
        if operation == "put" and is_chunk(key):
            raise StoreUnavailable(key)

    slow.before = refuse
    async with running(daemon(spool, {"a": fast, "b": slow}, (RetentionPolicy(keep_last=2), rich))) as node:
        for step in range(4, 10):
            commit(spool, part(step))
            await until(lambda step=step: node.retry_now() or node.tiers.observed.has(part(step), "a"))
        assert 1 in steps_on(fast.inner.objects)
        assert [step for _, step, _ in events(node, "given up")] == [4, 5]
