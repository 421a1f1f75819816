"""What retention gave up and is still there is told by `status`, and an alert tells when it becomes ever more."""

from __future__ import annotations

import msgspec
from daemon.transfer.test_relay import daemon as of_tiers
from support.doubles import Double, is_chunk
from support.waiting import until
from support.world import RUN, commit, converge, part, reconciler, running, settle, steps_on

from tierd.core.errors import DeleteRefused, StoreUnavailable
from tierd.core.planning.prune_batches import PruneBacklog
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.daemon_status import make_status
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.tiers.tier_prune import prune
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.events.journal import Journal


def pending(daemon) -> int:
    return make_status(daemon, 0, 0).tiers[0].pending_prunes


async def test_status_counts_the_copies_that_wait_to_be_pruned(spool):
    store = Double()
    for step in range(8):
        commit(spool, part(step))
    assert pending(await converge(spool, {"tier": store})) == 0

    def refuse(operation: str, key: str) -> None:
        if operation == "delete":
            raise StoreUnavailable("not now")

    store.before = refuse
    daemon = reconciler(spool, {"tier": store}, keep=3, keep_local=100)
    async with running(daemon):
        await until(lambda: daemon.workers["tier"].last_error)
        assert pending(daemon) == 5
        store.before = None
        await settle(daemon)
        assert pending(daemon) == 0
        assert daemon.journal.counters["pruned"] == 5


async def test_the_backlog_alert_of_a_tier_that_was_taken_out_ends(spool):
    stores = {"tier": Double(), "gone": Double()}
    stores["gone"].error = StoreUnavailable("its worker counts nothing")
    async with running(reconciler(spool, stores)) as daemon:
        daemon.journal.record_backlog("gone", 5, True)
        assert "prune" in [alert.doing for alert in daemon.journal.alerts()]
        config = msgspec.structs.replace(daemon.config, tier=daemon.config.tier[:1])
        await daemon.reconfigure(config, {"tier": stores["tier"]})
        assert daemon.journal.alerts() == ()


def test_a_backlog_that_grows_is_an_alert_until_it_is_gone():
    reported = []
    journal, backlog = Journal(reported.append), PruneBacklog()
    for number in range(200):
        journal.record_backlog("tier", number, backlog.record(number, 5.0 * number))
    assert [event.what for event in reported] == ["failing"]
    assert (reported[0].doing, reported[0].place, reported[0].level) == ("prune", "tier", "alert")
    assert "ever more" in reported[0].why
    assert [alert.doing for alert in journal.alerts()] == ["prune"]
    assert journal.counters["alerts"] == 1
    journal.record_backlog("tier", 0, backlog.record(0, 1005.0))
    assert [event.what for event in reported] == ["failing", "works again"] and journal.alerts() == ()


async def test_a_pass_marks_all_that_it_dooms_before_it_looks(spool):
    """A flush that begins to share a chunk meanwhile sees the mark, or is seen."""
    store = Double()
    for step in range(4):
        commit(spool, part(step))
        await flush(spool, part(step), TierUploadContext(store))
    eye = TierObserver(store)
    seen = await eye.observe({RUN})
    to_delete = [part(step).checkpoint for step in range(2)]
    marked = []

    def note(operation: str, key: str) -> None:
        if operation == "scan" and "/manifests/" in key:
            marks = [one for one in store.inner.objects if "/pruning/" in one]
            marked.append([one for one in to_delete if any(one.name in mark for mark in marks)])

    store.before = note
    done = await prune(store, to_delete, "", eye.manifests, seen)
    assert done.deleted == set(to_delete)
    assert marked and all(found == to_delete for found in marked)


async def test_checkpoint_that_a_node_is_flushing_is_kept_while_others_of_its_pass_are_deleted(spool):
    """There is more of it than its plan knew."""
    store = Double()
    for step in range(3):
        commit(spool, part(step, rank=0, world=2))
        commit(spool, part(step, rank=1, world=2))
        await flush(spool, part(step, rank=0, world=2), TierUploadContext(store))
    eye = TierObserver(store)
    seen = await eye.observe({RUN}, {RUN: {0}})
    await flush(spool, part(1, rank=1, world=2), TierUploadContext(store))
    to_delete = [part(step, rank=0, world=2).checkpoint for step in range(2)]
    done = await prune(store, to_delete, "", eye.manifests, seen)
    assert done.deleted == {to_delete[0]}
    left = (await TierObserver(store).observe({RUN})).checkpoints
    assert set(left) == {to_delete[1], part(2).checkpoint}
    assert not [info.key async for info in store.scan(f"{RUN}/pruning/")], "marks are left"


async def test_a_prune_that_waits_for_another_tier_keeps_no_alert_of_a_flush(spool):
    """It waits an hour each time, because the other tier's copy is corrupt and can be neither moved nor replaced."""

    def refuse_deletions(operation: str, key: str) -> None:
        if operation == "delete" and "/manifests/" in key:
            raise DeleteRefused(key)

    def refuse_step_4(operation: str, key: str) -> None:
        if operation == "put" and is_chunk(key) and part(4).checkpoint.name in key:
            raise StoreUnavailable(key)

    near, far, rich = Double(), Double(), RetentionPolicy(keep_last=1000)
    for step in range(4):
        commit(spool, part(step))
    async with running(of_tiers(spool, {"near": near, "far": far}, (rich, rich))) as node:
        await settle(node)
    await far.inner.delete([key for key in far.inner.keys if is_chunk(key) and part(1).checkpoint.name in key])
    far.before, near.before = refuse_deletions, refuse_step_4
    node = of_tiers(spool, {"near": near, "far": far}, (RetentionPolicy(keep_last=2), rich))
    async with running(node):
        await until(lambda: steps_on(near.inner.objects) == [1, 2, 3])
        commit(spool, part(4))
        node.wake()
        await until(lambda: node.retry_now() or node.journal.alerts())
        for step in range(5, 8):
            commit(spool, part(step))
            node.wake()
            await until(lambda step=step: node.retry_now() or step in steps_on(near.inner.objects))
        await until(lambda: node.retry_now() or not node.journal.alerts())
        assert node.workers["near"].deferred_s > 600, "the prune still waits"
        assert node.workers["near"].blocking_error is None
