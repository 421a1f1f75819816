"""Tiers that let nothing be deleted: everything is flushed, nothing is pruned, and that is said once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path

import pytest
from stores.s3.test_s3_store import credentials
from support.doubles import Double, contents, flip, is_chunk
from support.s3stub import Bucket, serving
from support.timed import timed
from support.waiting import until
from support.world import commit, converge, part, reconciler, running, settle, steps_in, steps_on

from tierd.cli import run
from tierd.cli.commands.status_lines import prunes_text
from tierd.core.errors import CorruptChunk, DeleteRefused, StoreRefused
from tierd.core.urls import parse_url
from tierd.daemon.daemon_status import make_status
from tierd.daemon.daemon_timings import USUAL
from tierd.spool.spool import Spool
from tierd.stores import store_wrappers
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.open import open_store
from tierd.stores.s3.server_errors import ACTIONS
from tierd.stores.store_wrappers import DeletionGuard

__all__ = ["credentials"]  # the fixture


class Lasting(Double):
    """A place that lets nothing be deleted whose key has one of these words in it; by default, nothing at all."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words = words or ("/",)
        self.before = self._keep

    def _keep(self, operation: str, key: str) -> None:
        if operation == "delete" and any(word in key for word in self.words):
            raise DeleteRefused(f"delete {key}: AccessDenied")

    def asked(self) -> int:
        """How often it was asked to delete."""
        return sum(operation == "delete" for operation, _ in self.calls)


def reported(daemon) -> list[str]:
    return [event.why for event in daemon.journal.events if event.what == "append only"]


async def test_every_save_reaches_a_bucket_without_delete_object(spool: Spool) -> None:
    with serving(Bucket()) as bucket:
        bucket.deny("DeleteObject")
        store = open_store(parse_url(bucket.url()))
        async with running(reconciler(spool, {"s3": store}, keep=2)) as daemon:
            for step in range(6):
                commit(spool, part(step))
                await settle(daemon)
            assert steps_on(key.removeprefix("p/") for key in bucket.objects) == list(range(6))
            assert daemon.journal.counters["flushed"] == 6
            assert daemon.journal.counters["errors"] == 0
            assert not daemon.journal.alerts()
            [why] = reported(daemon)
            assert "s3:DeleteObject" in why
            [tier] = make_status(daemon, 0, 0).tiers
            assert tier.append_only
            assert tier.pending_prunes == 0
            assert tier.failures == 0
            assert steps_in(spool) == [4, 5]  # what a tier has verified leaves the spool as ever
        await store.aclose()


async def test_a_directory_whose_entries_cannot_be_removed_is_append_only_too(
    spool: Spool, tmp_path, monkeypatch
) -> None:
    """Each failed prune held the tier worker back and left marks, until no tier seemed to accept checkpoints."""

    def marks() -> list[str]:
        return [path.name for path in (tmp_path / "tier").rglob("pruning/*") if path.name != "none"]

    timed(monkeypatch, own_stale_ms=USUAL.own_stale_ms)  # what a flush has left is too young to be tried again
    (tmp_path / "tier").mkdir()
    store = FileStore(tmp_path / "tier")
    async with running(reconciler(spool, {"nas": store}, keep=2)) as daemon:
        commit(spool, part(0))
        await settle(daemon)
        real = os.unlink

        def unlink(path, *, dir_fd=None) -> None:
            here = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
            if here.startswith(str(tmp_path / "tier")) and not here.endswith("/.tmp"):
                os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
                raise PermissionError(errno.EPERM, "injected")
            real(path, dir_fd=dir_fd)

        monkeypatch.setattr(os, "unlink", unlink)
        for step in range(1, 6):
            commit(spool, part(step))
            await settle(daemon)
        refused = daemon.tiers._guards["nas"]._until
        refused |= dict.fromkeys(refused, 0.0)  # ten minutes later
        await settle(daemon)
        there = [str(path.relative_to(tmp_path / "tier")) for path in (tmp_path / "tier").rglob("*.json")]
        assert steps_on(there) == list(range(6))
        assert daemon.journal.counters["errors"] == 0
        assert not marks()
        [why] = reported(daemon)
        assert "chattr +a" in why
        assert make_status(daemon, 0, 0).tiers[0].append_only
    await store.aclose()


@pytest.mark.parametrize("words", [("/",), ("/manifests/", "/chunks/")])
async def test_nothing_is_pruned_no_mark_is_left_and_nobody_asks_again_and_again(spool: Spool, words) -> None:
    """Also by a daemon that has nothing to flush, and where a policy lets marks be deleted and checkpoints not."""
    store = Lasting(*words)
    for step in range(5):
        commit(spool, part(step))
        await converge(spool, {"tier": store}, keep=100)
    # Nothing is left to tidy up, so that the first deletion that is tried is the prune's.
    await store.inner.delete([key for key in await contents(store.inner) if "/flushing/" in key])
    store.calls.clear()
    async with running(reconciler(spool, {"tier": store}, keep=1, keep_local=100)) as daemon:
        await settle(daemon)
        await until(lambda: reported(daemon))
        asked = store.asked()
        for _ in range(5):
            daemon.wake()
            await settle(daemon)
        assert store.asked() == asked
    there = await contents(store.inner)
    assert steps_on(there) == list(range(5))
    assert not [key for key in there if "/pruning/" in key]
    assert len(reported(daemon)) == 1
    assert daemon.journal.counters["errors"] == daemon.journal.counters["pruned"] == 0


async def test_object_that_can_be_neither_deleted_nor_replaced_stops_no_flush(spool: Spool) -> None:
    """WORM: also the policy and the head that a daemon would replace are there for good."""

    class Worm(Lasting):
        async def put(self, key: str, data) -> str:
            if key in await contents(self.inner, policies=True):
                raise StoreRefused(f"put {key}: AccessDenied")
            return await super().put(key, data)

    store = Worm()
    for step in range(3):
        commit(spool, part(step))
        daemon = await converge(spool, {"tier": store}, keep=10 + step, keep_local=100)
        assert daemon.journal.counters["errors"] == 0
    assert steps_on(await contents(store.inner)) == [0, 1, 2]


async def test_retention_continues_when_deleting_is_allowed_again(spool: Spool, monkeypatch) -> None:
    timed(monkeypatch, refused_s=0.2)
    store = Lasting()
    async with running(reconciler(spool, {"tier": store}, keep=1)) as daemon:
        for step in range(4):
            commit(spool, part(step))
            await settle(daemon)
        assert steps_on(await contents(store.inner)) == [0, 1, 2, 3]
        store.words = ("never",)
        daemon.tiers._guards["tier"]._until.clear()  # ten minutes later
        await settle(daemon)
        await until(lambda: not make_status(daemon, 0, 0).tiers[0].append_only)
    assert steps_on(await contents(store.inner)) == [3]


async def test_intents_that_could_not_be_deleted_are_deleted_when_that_is_allowed_again(
    spool: Spool, monkeypatch
) -> None:
    """S3 kit, seed 420: one 403 in a storm, and the intent stood until a restart or a prune of the next day."""
    now_ns = [time.time_ns()]
    timed(monkeypatch, own_stale_ms=USUAL.own_stale_ms, wall_ns=lambda: now_ns[0])
    store = Lasting("/flushing/")
    async with running(reconciler(spool, {"tier": store}, keep=100)) as daemon:
        commit(spool, part(1))
        await settle(daemon)
        assert [key for key in await contents(store.inner) if "/flushing/" in key]
        now_ns[0] += 900 * 10**9  # a quarter of an hour later
        await settle(daemon)
        assert [key for key in await contents(store.inner) if "/flushing/" in key], "still refused"
        store.words = ("never",)
        daemon.tiers._guards["tier"]._until.clear()
        await settle(daemon)
        assert not [key for key in await contents(store.inner) if "/flushing/" in key]


async def test_leftover_of_a_refused_deletion_is_known_though_the_next_deletion_succeeded(
    spool: Spool, monkeypatch
) -> None:
    """S3 kit, seed 420 again: another deletion of its kind was allowed before anybody had noticed the refusal."""
    now_ns = [time.time_ns()]
    timed(monkeypatch, own_stale_ms=USUAL.own_stale_ms, wall_ns=lambda: now_ns[0])
    store = Lasting("/flushing/")
    async with running(reconciler(spool, {"tier": store}, keep=100)) as daemon:
        await settle(daemon)
        commit(spool, part(1))
        await daemon.flushes.flush(part(1), "tier")
        left = [key for key in await contents(store.inner) if "/flushing/" in key]
        assert left
        store.words = ("never",)
        guard = daemon.tiers._guards["tier"]
        guard._until.clear()
        await guard.delete(["r/flushing/another"])
        assert not guard.refused and daemon.tiers.has_leftovers("tier")
        now_ns[0] += 900 * 10**9  # a quarter of an hour later
        await settle(daemon)
        await until(lambda: not daemon.tiers.has_leftovers("tier"))
        assert not [key for key in await contents(store.inner) if "/flushing/" in key]


async def test_head_is_not_written_again_for_others_that_cannot_be_deleted(tmp_path, spool: Spool) -> None:
    store = Lasting()
    commit(spool, part(1))
    await converge(spool, {"tier": store})
    other = Spool(tmp_path / "other")
    commit(other, part(2, launch=2), origin=part(1).checkpoint)
    await converge(other, {"tier": store})
    assert len([key for key in await contents(store.inner) if "/timeline/" in key]) in (0, 2)
    async with running(reconciler(other, {"tier": store})) as daemon:
        await settle(daemon)
        store.calls.clear()
        for _ in range(4):
            daemon.wake()
            await settle(daemon)
        assert not store.puts(lambda key: "/timeline/" in key)


async def test_restore_continues_where_a_corrupt_copy_cannot_be_quarantined(spool: Spool) -> None:
    bad, good = Lasting(), MemoryStore()
    commit(spool, part(1))
    await converge(spool, {"bad": bad, "good": good})
    for key in filter(is_chunk, await contents(bad.inner)):
        await flip(bad.inner, key)
    spool.remove([part(1)])
    daemon = reconciler(spool, {"bad": bad, "good": good})
    assert "good" in (await daemon.repairs.fetch(part(1))).tiers
    assert spool.has(part(1))
    spool.remove([part(1)])
    for key in filter(is_chunk, await contents(good)):
        await flip(good, key)
    with pytest.raises(CorruptChunk):
        await daemon.repairs.fetch(part(1))


def test_prune_command_reports_a_refused_deletion_and_leaves_no_mark(spool: Spool, capsys) -> None:
    async def flushed(bucket: Bucket) -> None:
        store = open_store(parse_url(bucket.url()))
        for step in (1, 2):
            commit(spool, part(step))
        await converge(spool, {"s3": store})
        await store.aclose()

    with serving(Bucket()) as bucket:
        asyncio.run(flushed(bucket))
        bucket.deny("DeleteObject")
        assert run(["prune", bucket.url(), "--keep-last", "1"]) == 6
        assert "s3:DeleteObject" in capsys.readouterr().err
        assert not [key for key in bucket.objects if "/pruning/" in key]
        bucket.deny()
        assert run(["prune", bucket.url(), "--keep-last", "1"]) == 0
        assert steps_on(key.removeprefix("p/") for key in bucket.objects) == [2]


def test_policy_of_the_how_to_allows_the_actions_of_tierd() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "s3.md").read_text()
    policy = json.loads(page.split("```json")[1].split("```")[0])
    granted = [one["Action"] for one in policy["Statement"]]
    assert {action for one in granted for action in ([one] if isinstance(one, str) else one)} == set(ACTIONS.values())


def test_status_shows_it_where_the_copies_to_prune_stand() -> None:
    assert prunes_text({"append_only": True, "pending_prunes": 0}) == "append-only"
    assert prunes_text({"append_only": False, "pending_prunes": 3}) == prunes_text({"pending_prunes": 3}) == "3"


async def test_the_guard_asks_for_each_sort_by_itself_and_again_later(monkeypatch) -> None:
    store = Lasting("/manifests/")
    guard = DeletionGuard(store)
    await guard.check("run/pruning/none")
    assert not guard.is_resting
    for _ in range(3):
        with pytest.raises(DeleteRefused):
            await guard.delete(["run/manifests/a"])
        await guard.delete(["run/flushing/a"])
    assert store.asked() == 1 + 1 + 3
    assert guard.is_resting
    assert "AccessDenied" in guard.refused
    now = store_wrappers.time.monotonic()
    monkeypatch.setattr(store_wrappers.time, "monotonic", lambda: now + 601)
    assert not guard.is_resting
    store.words = ("never",)
    await guard.delete(["run/manifests/a"])
    assert not guard.refused


async def test_a_corrupt_copy_that_nobody_may_quarantine_holds_up_no_other_in_the_spool(spool):
    store = Lasting()
    for step in range(6):
        commit(spool, part(step))
    await converge(spool, {"tier": store}, keep=100, keep_local=100)
    chunk = next(key for key in store.inner.keys if is_chunk(key) and part(1).checkpoint.name in key)
    await store.inner.delete([chunk])
    async with running(reconciler(spool, {"tier": store}, keep=100, keep_local=2)) as daemon:
        await until(lambda: steps_in(spool) == [1, 4, 5])
        for _ in range(20):
            daemon.wake()
            await asyncio.sleep(0.02)
        assert sum(event.what == "corrupt" for event in daemon.journal.events) == 1
        assert daemon.workers["local"].last_error is None
