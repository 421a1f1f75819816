"""A prune takes long on a slow tier. What is pinned, saved or lost in any place meanwhile counts until it deletes."""

from __future__ import annotations

import asyncio

import pytest
from daemon.transfer.test_relay import daemon as of_tiers
from support.doubles import Double, flip, is_chunk, is_manifest
from support.timed import timed
from support.waiting import until
from support.world import RUN, commit, converge, part, reconciler, running, settle, steps_on

from tierd.core.errors import DeleteRefused, StoreUnavailable
from tierd.core.ids import IDENTITY_KEY, pin_key
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.reconciling.tier_worker import TierWorker
from tierd.daemon.tiers.manifest_listing import MAX_MANIFEST_READS
from tierd.daemon.tiers.tier_prune import prune


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


def put_there(store: Double, objects: dict[str, tuple[bytes, int]]) -> None:
    """Have objects appear as if another node had put them."""
    store.inner.objects |= objects
    store.inner.keys = sorted(store.inner.objects)


def quarantine_there(store: Double, *parts) -> None:
    """Have manifests moved away as if another node had found the copies corrupt."""
    for one in parts:
        store.inner.objects[one.quarantine_key] = store.inner.objects.pop(one.manifest_key)
    store.inner.keys = sorted(store.inner.objects)


@pytest.mark.parametrize("what", ["a pin", "pin_by_another_node", "a launch that resumed from it"])
async def test_checkpoint_that_becomes_wanted_before_its_deletion_begins_is_kept(spool, what):
    def act() -> None:
        if what == "a pin":
            spool.pin(part(1).checkpoint, pinned=True)
        elif what == "pin_by_another_node":
            put_there(store, {pin_key(part(1).checkpoint): (b"", 1000)})
        else:
            commit(spool, part(2, launch=2), origin=part(1).checkpoint)

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


async def test_a_launch_that_another_node_began_ends_the_pass(spool, tmp_path):
    """It may have resumed from a checkpoint that is about to go, and its node prunes from now on."""
    other = type(spool)(tmp_path / "other")
    store, theirs = Double(), Double()
    for step in range(6):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    commit(other, part(2, launch=2), origin=part(1).checkpoint)
    await converge(other, {"tier": theirs})
    new = {key: data for key, data in theirs.inner.objects.items() if part(2, launch=2).checkpoint.name in key}

    marks = once_marked(store, lambda: put_there(store, new))
    async with running(reconciler(spool, {"tier": store}, keep=2, keep_local=100)) as daemon:
        await until(lambda: marks)
        await settle(daemon)
    left = [key for key in store.inner.objects if is_manifest(key)]
    assert len(left) == 7, left


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["whole", "one_rank"])
async def test_nothing_is_deleted_because_of_checkpoints_that_were_deleted_meanwhile(spool, ranks):
    store = Double()
    for step in range(6):
        for rank in (0, 1):
            commit(spool, part(step, rank=rank, world=2))
    await converge(spool, {"tier": store}, keep_local=2)
    newest = [part(step, rank=rank, world=2) for step in (4, 5) for rank in (0, 1)]

    def lose() -> None:
        quarantine_there(store, *[one for one in newest if one.rank in ranks])
        spool.remove(newest)

    marks = once_marked(store, lose)
    async with running(reconciler(spool, {"tier": store}, keep=2, keep_local=2)) as daemon:
        await until(lambda: daemon.journal.counters["pruned"])
        await settle(daemon)
    assert any(part(3).checkpoint.name in key for key in marks), "it was not even to be deleted"
    assert {2, 3} <= set(steps_on(store.inner.objects)) and 1 not in steps_on(store.inner.objects)


async def test_one_loss_is_enough_to_end_a_pass(spool):
    """Flushes and pins wait for its marks while it reads, and somebody may have deleted a thousand parts."""
    lost = [part(2, rank=rank, world=4 * MAX_MANIFEST_READS) for rank in range(4 * MAX_MANIFEST_READS)]
    store = Double()
    for one in (part(1), *lost):
        commit(spool, one)
    await converge(spool, {"tier": store})
    daemon = reconciler(spool, {"tier": store})
    daemon.requests.requested_runs.add(RUN)
    await daemon.observe("tier")
    quarantine_there(store, *lost)
    store.calls.clear()
    store.delay = 0.001
    done = await prune(store, {part(1).checkpoint}, decided_on=daemon.inventory().tiers["tier"])
    assert done.is_stale and not done.deleted
    keys = {one.manifest_key for one in lost}
    assert 0 < sum(operation == "get" and key in keys for operation, key in store.calls) <= MAX_MANIFEST_READS


@pytest.mark.parametrize("what", ["gone", "corrupt", "no_answer"])
async def test_tier_is_asked_before_another_tier_deletes_its_wanted_checkpoints(spool, what):
    """`far` is in one long flush, so what the daemon knows of it is old."""
    near, far, gate = Double(), Double(), asyncio.Event()
    policies = RetentionPolicy(keep_last=4), RetentionPolicy(keep_last=1000)
    node = of_tiers(spool, {"near": near, "far": far}, policies)
    async with running(node):
        for step in range(4):
            commit(spool, part(step))
        await settle(node)
        put = far.put

        async def slow(key, data):
            if is_chunk(key):
                await gate.wait()
            return await put(key, data)

        def unavailable(operation: str, key: str) -> None:
            if operation == "get":
                raise StoreUnavailable("not now")

        far.put = slow
        far.calls.clear()
        commit(spool, part(4))
        node.wake()
        await until(lambda: node.workers["far"].doing)
        if what == "gone":
            quarantine_there(far, part(0))
        elif what == "corrupt":
            await flip(far.inner, part(0).manifest_key)
        else:
            far.before = unavailable
        await until(lambda: any(operation == "get" and key == part(0).manifest_key for operation, key in far.calls))
        await until(lambda: 4 in steps_on(near.inner.objects) and not node.workers["near"].doing)
        assert steps_on(near.inner.objects) == [0, 1, 2, 3, 4]
        far.before = None
        gate.set()
        far.put = put
        await settle(node)
        await until(lambda: steps_on(near.inner.objects) == [1, 2, 3, 4])
    assert steps_on(far.inner.objects) == [0, 1, 2, 3, 4], "what it had lost was sent again"


@pytest.mark.parametrize("is_pinned", [True, False])
async def test_incomplete_copy_in_the_spool_counts_as_wanted_until_its_deletion(spool, monkeypatch, is_pinned):
    """The tier's newer manifests are read before it goes."""
    store = Double()
    for step in (2, 3, 4):
        for rank in (0, 1):
            commit(spool, part(step, rank=rank, world=2))
    await converge(spool, {"tier": store}, keep=2, keep_local=1)
    commit(spool, part(1, rank=0, world=2))
    daemon = reconciler(spool, {"tier": store}, keep=2, keep_local=1)
    are_past, asked = daemon.tiers.have_newer_copies, []

    async def meanwhile(checkpoint, inventory):
        asked.append(checkpoint)
        spool.pin(checkpoint, pinned=is_pinned)
        return await are_past(checkpoint, inventory)

    monkeypatch.setattr(daemon.tiers, "have_newer_copies", meanwhile)
    async with running(daemon):
        await until(lambda: asked)
        await settle(daemon)
    assert (part(1, rank=0, world=2) in spool.parts()) == is_pinned


async def test_a_copy_that_another_tier_has_lost_holds_up_only_itself(spool, monkeypatch):
    """Its tier shows it as it was, and lets nobody quarantine it: the other checkpoints of the batch go."""
    near, far = Double(), Double()
    rich = RetentionPolicy(keep_last=1000)
    for step in range(6):
        commit(spool, part(step))
    async with running(of_tiers(spool, {"near": near, "far": far}, (rich, rich), keep_local=100)) as node:
        await settle(node)
    chunk = next(key for key in far.inner.keys if is_chunk(key) and part(1).checkpoint.name in key)
    await far.inner.delete([chunk])

    def refuse(operation: str, key: str) -> None:
        if operation == "delete":
            raise DeleteRefused(f"delete {key}: AccessDenied")

    far.before = refuse
    policies = RetentionPolicy(keep_last=2), rich
    async with running(of_tiers(spool, {"near": near, "far": far}, policies, keep_local=100)) as node:
        await until(lambda: steps_on(near.inner.objects) == [1, 4, 5])

        def asked() -> int:
            return far.calls.count(("get", part(1).manifest_key))

        known = asked()
        for _ in range(20):
            node.wake()
            await asyncio.sleep(0.02)
        assert asked() == known, "it is not asked for each minute"
        monkeypatch.setattr(TierWorker, "is_deferred", lambda self, what: False)  # as an hour later
        await until(lambda: node.wake() or asked() > known + 5)
        (found,) = [event for event in node.journal.events if event.what == "corrupt"]  # and not told each hour
        assert "cannot be quarantined: delete" in found.why


class Mute(Double):
    """Answers nothing any more once `muted`, but for the keys that it `shows`."""

    muted, shows = False, ""

    async def _enter(self, operation: str, key: str) -> None:
        await super()._enter(operation, key)
        if self.muted and key != self.shows:
            await asyncio.Event().wait()


@pytest.mark.parametrize("ends", [False, True], ids=["goes_on", "drains"])
async def test_a_tier_that_hangs_holds_up_no_flush_to_another(spool, monkeypatch, ends):
    """Its worker sits in a put, so it counts as known, and a prune on the other tier relies on it."""
    timed(monkeypatch, holds_s=0.05, stuck_s=60.0)
    near, far = Double(), Mute()
    policies = RetentionPolicy(keep_last=4), RetentionPolicy(keep_last=1000)
    node = of_tiers(spool, {"near": near, "far": far}, policies, keep_local=100)
    async with running(node):
        for step in range(4):
            commit(spool, part(step))
        await settle(node)
        far.calls.clear()
        far.muted = True
        far.shows = "" if ends else IDENTITY_KEY  # or each flush would be followed by five seconds of asking
        for step in range(4, 9):
            commit(spool, part(step))
            node.wake()
            if not ends:
                await until(lambda step=step: step in steps_on(near.inner.objects))
        if ends:
            drain = asyncio.ensure_future(node.drain(60.0))
            await until(lambda: {5, 6, 7, 8} <= set(steps_on(near.inner.objects)))
            drain.cancel()
        await until(lambda: not node.workers["near"].doing)
        manifests = [step for operation, key in far.calls if operation == "get" for step in steps_on([key])]
        asked = [step for step in manifests if step < 3]  # its own flush of step 4 reads that of step 3
        assert len(asked) <= 1, "it is asked for one checkpoint, and then left alone for a while"


async def test_tier_that_never_answers_for_a_checkpoint_holds_up_only_that_checkpoint(spool, monkeypatch):
    timed(monkeypatch, holds_s=0.05, stuck_s=0.2)
    near, far, rich = Double(), Double(), RetentionPolicy(keep_last=1000)
    for step in range(6):
        commit(spool, part(step))
    async with running(of_tiers(spool, {"near": near, "far": far}, (rich, rich), keep_local=100)) as node:
        await settle(node)
    get = far.get

    async def hang(key, into=None):
        if key == part(0).manifest_key and node.workers["near"].doing:
            await asyncio.Event().wait()
        return await get(key, into)

    policies = RetentionPolicy(keep_last=2), rich
    node = of_tiers(spool, {"near": near, "far": far}, policies, keep_local=100)
    far.get = hang
    async with running(node):
        await until(lambda: node.wake() or steps_on(near.inner.objects) == [0, 4, 5])


async def test_a_tier_that_answers_slowly_is_asked_to_the_end(spool, monkeypatch):
    """A part may have many chunks under many owners, and each listing is an answer."""
    timed(monkeypatch, holds_s=0.2)
    near, far = Double(), Double()
    rich = RetentionPolicy(keep_last=1000)
    for step in range(3):
        commit(spool, part(step))
    async with running(of_tiers(spool, {"near": near, "far": far}, (rich, rich), keep_local=100)) as node:
        await settle(node)
        names = {seen: [] for seen in ("scan", "get")}

        far.before = lambda operation, key: names[operation].append(key) if operation in names else None
        far.delay = 0.12
        assert await node.tiers.find_corrupt_parts("far", [part(0)]) == {}
        assert len(names["scan"]) + len(names["get"]) >= 2, "all answers together took longer than the limit"
