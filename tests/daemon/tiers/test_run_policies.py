"""A run owns its policy: it lies on each tier, a daemon without a configuration obeys it, and who only restored prunes
nothing."""

from __future__ import annotations

import asyncio
import json
import logging

import msgspec
import pytest
from support.bad_readers import BadNetwork
from support.doubles import Double, contents
from support.waiting import until
from support.world import RUN, commit, config, converge, part, reconciler, running, settle, steps_in, steps_on

from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.core.ids import retention_key
from tierd.core.retention.policy import (
    MAX_POLICY_SIZE,
    Best,
    RetentionPolicy,
    StoredRetention,
    decode_policy,
    encode_policy,
)
from tierd.core.run_report import make_report
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.daemon_status import make_status
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool.run_records import record_policy
from tierd.spool.spool import Spool
from tierd.spool.spool_directory import node_id
from tierd.stores.base import Buffer, Store
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore

TEN = RetentionPolicy(keep_last=10)


def policies(store: MemoryStore) -> dict[str, StoredRetention]:
    """What lies on a tier, by file name."""
    found = asyncio.run(contents(store, policies=True))
    return {
        key.split("/")[2]: decode_policy(data, RUN, *key.split("/")[2].split(".")[:2])
        for key, data in found.items()
        if "/retention/" in key
    }


def steps(store: MemoryStore) -> list[int]:
    return steps_on(asyncio.run(contents(store)))


def save(spool: Spool, *steps: int, launch: int = 1) -> None:
    """Each launch goes on from where the last one ended."""
    for step in steps:
        commit(spool, part(step, launch), origin=part(steps[0] - 1, launch - 1).checkpoint if launch > 1 else None)


@pytest.fixture
def trained(spool) -> MemoryStore:
    """A tier on which training, which keeps 10, has 8 checkpoints."""
    store = MemoryStore()
    save(spool, *range(1, 9))
    asyncio.run(converge(spool, {"tier": store}, keep=10))
    return store


# -- who may prune ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("stored", [True, False])
def test_a_daemon_beside_a_reader_deletes_nothing(trained, tmp_path, keep, stored):
    """Whatever its policy, whether or not the run's lies there, also once the newest checkpoint came to its spool, and
    however often it looks again."""
    other = Spool(tmp_path / "evaluation")
    if not stored:  # an older tierd trains
        asyncio.run(trained.delete([key for key in asyncio.run(contents(trained, policies=True)) if "/ret" in key]))
    before = asyncio.run(contents(trained, policies=True))

    async def work():
        async with running(reconciler(other, {"tier": trained}, keep=keep, rescan="0.05s")) as daemon:
            daemon.requests.requested_runs.add(RUN)
            await settle(daemon)
            for step in (8, 3):
                await daemon.repairs.fetch(part(step))
            for _ in range(3):
                await settle(daemon)
            assert daemon.journal.counters["pruned"] == (1 if keep else 0)  # in its own spool, where keep_last is 1

    asyncio.run(work())
    assert steps_in(other) == ([8] if keep else [3, 8])
    assert asyncio.run(contents(trained, policies=True)) == before


async def test_reader_does_not_delete_leftover_intents_of_others(trained, tmp_path):
    old = f"{RUN}/pruning/{part(1).checkpoint.name}.000000000001-abcdef01"
    other = Spool(tmp_path / "evaluation")
    await trained.put(old, b"")
    await fetch(other, part(8), {"tier": trained}, MemoryBudget(), Progress())
    async with running(reconciler(other, {"tier": trained}, keep=None)) as daemon:
        await settle(daemon)
    assert old in await contents(trained)


async def test_who_saves_the_newest_launch_prunes_and_who_restored_it_does_not(trained, spool, tmp_path):
    """The job moved to another node, which restored, saved, and is now the one that prunes."""
    other = Spool(tmp_path / "moved")
    async with running(reconciler(other, {"tier": trained}, keep=10)) as daemon:
        await daemon.repairs.fetch(part(8))
        await settle(daemon)
        commit(other, part(9, 2), origin=part(8).checkpoint)
        await settle(daemon)
    await converge(spool, {"tier": trained}, keep=2)  # the first node: no janitor any more
    assert steps_on(await contents(trained)) == list(range(1, 10))
    for step in (10, 11):
        commit(other, part(step, 2), origin=part(8).checkpoint)
    await converge(other, {"tier": trained}, keep=10)
    assert steps_on(await contents(trained)) == list(range(2, 12))


async def test_a_node_that_names_fewer_tiers_deletes_nothing_that_the_others_may_want(spool, tmp_path):
    """The tier that wants every fourth step was away, and the job went on on a node whose configuration lacks it."""
    near, far, other = MemoryStore(), Double(), Spool(tmp_path / "moved")
    fours = RetentionPolicy(keep_last=1, keep_every_steps=4)

    def daemon(where: Spool, stores: dict[str, Store]) -> Reconciler:
        made = config(where, *stores, keep=1)
        tiers = [msgspec.structs.replace(one, retention=fours) if one.name == "far" else one for one in made.tier]
        return Reconciler(msgspec.structs.replace(made, tier=tuple(tiers)), where, stores)

    save(spool, 1)
    async with running(daemon(spool, {"near": near, "far": far})) as first:
        await settle(first)
        far.error = StoreUnavailable("away")
        for step in range(2, 9):
            save(spool, step)
            first.wake()
            await until(lambda step=step: step in steps_on(near.objects))
        await until(lambda: steps_on(near.objects) == [4, 8])
    save(other, 9, 10, launch=2)
    async with running(daemon(other, {"near": near})) as second:
        await settle(second)
    assert steps_on(near.objects) == [4, 8, 10], "9 is the launch's own, whose node names no tier that wants it"
    far.error = None
    save(spool, 11, launch=3)
    async with running(daemon(spool, {"near": near, "far": far})) as first:
        await settle(first)
    assert steps_on(far.inner.objects) == [4, 8, 11] and steps_on(near.objects) == [11]


# -- the run's own policy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
def test_daemon_without_a_configuration_obeys_the_policy_on_the_tier(trained, spool, tmp_path, elsewhere):
    """On the same spool after the configured daemon ended, or on another that saves the run now."""
    where = Spool(tmp_path / "other") if elsewhere else spool
    save(where, 9, 10, 11, 12, launch=2 if elsewhere else 1)
    asyncio.run(converge(where, {"tier": trained}, keep=None))
    assert steps(trained) == list(range(3, 13))
    assert [one.given for one in policies(trained).values()] == ["configuration"]
    assert len(steps_in(where)) == 3  # in the spool the default holds: a tier has the rest


def test_default_policy_is_recorded_and_logged_and_gives_way_to_any_given_policy(spool, tmp_path, caplog):
    store = MemoryStore()
    save(spool, *range(1, 6))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            asyncio.run(converge(spool, {"tier": store}, keep=None))
    assert sum("keep_last = 3" in record.message for record in caplog.records) == 1
    assert steps(store) == [3, 4, 5]
    (name,) = found = policies(store)
    assert name == f"{node_id(spool.root)}.default.json" and found[name].retention == RetentionPolicy()

    other = Spool(tmp_path / "other")
    save(other, 6, launch=2)
    asyncio.run(converge(other, {"tier": store}, keep=2))
    assert steps(store) == [5, 6]  # less than the default: somebody said so
    save(spool, 7, 8, 9, launch=3)
    asyncio.run(converge(spool, {"tier": store}, keep=None))
    assert steps(store) == [8, 9]


def test_a_trainers_policy_needs_no_file_and_outlives_trainer_and_daemon(spool):
    store = MemoryStore()
    save(spool, *range(1, 9))
    record_policy(spool.control, RUN, RetentionPolicy(keep_last=6))
    for _ in range(2):
        daemon = asyncio.run(converge(spool, {"tier": store}, keep=None))
    assert steps(store) == steps_in(spool) == [3, 4, 5, 6, 7, 8]
    assert [(one.given, one.retention.keep_last) for one in policies(store).values()] == [("trainer", 6)]
    assert not any(one.disagrees for one in make_status(daemon, 0, 0).policies)


def test_policy_that_keeps_more_wins_where_file_and_trainer_disagree_and_status_shows_both(spool):
    store = MemoryStore()
    save(spool, *range(1, 9))
    record_policy(spool.control, RUN, RetentionPolicy(keep_last=1, keep_every_steps=4))
    daemon = asyncio.run(converge(spool, {"tier": store}, keep=2))
    assert steps(store) == [4, 7, 8]
    assert steps_in(spool) == [7, 8]  # of its disk the configuration knows more
    shown = {one.given: one for one in make_status(daemon, 0, 0).policies}
    assert shown["configuration"].retention == RetentionPolicy(keep_last=2) and shown["configuration"].disagrees
    assert shown["trainer"].retention.keep_every_steps == 4 and shown["trainer"].disagrees
    assert {one.key for one in shown.values()} == {
        retention_key(RUN, node_id(spool.root), given) for given in ("configuration", "trainer")
    }


def test_configurations_of_two_nodes_merge_until_either_is_deleted(trained, tmp_path):
    other = Spool(tmp_path / "other")
    save(other, 9, 10, 11, 12, launch=2)
    daemon = asyncio.run(converge(other, {"tier": trained}, keep=2))
    assert steps(trained) == list(range(3, 13))
    assert {(one.retention.keep_last, one.disagrees) for one in make_status(daemon, 0, 0).policies} == {
        (10, True),
        (2, True),
    }
    (gone,) = [one.key for one in make_status(daemon, 0, 0).policies if one.retention == TEN]
    asyncio.run(trained.delete([gone]))
    asyncio.run(converge(other, {"tier": trained}, keep=2))
    assert steps(trained) == [11, 12]


def test_a_changed_configuration_replaces_this_nodes_own_policy(trained, spool):
    before = asyncio.run(contents(trained, policies=True))
    asyncio.run(converge(spool, {"tier": trained}, keep=10))
    assert asyncio.run(contents(trained, policies=True)) == before  # the same: it is not written again
    asyncio.run(converge(spool, {"tier": trained}, keep=4))
    assert steps(trained) == [5, 6, 7, 8]
    assert [one.retention.keep_last for one in policies(trained).values()] == [4]


async def test_observation_reads_at_once_the_policy_that_another_node_wrote(trained, spool):
    daemon = reconciler(spool, {"tier": trained}, keep=1)
    await daemon.observe("tier")
    for keep in (5, 7):
        theirs = StoredRetention(RUN, "abcdef01", "configuration", retention=RetentionPolicy(keep_last=keep))
        await trained.put(retention_key(RUN, theirs.by, theirs.given), encode_policy(theirs))
        await daemon.observe("tier")
        kept = [one for one in make_report(daemon.inventory(), daemon.config).checkpoints if one.copies[-1].keep]
        assert len(kept) == keep


# -- what cannot be read ----------------------------------------------------------------------------------------------

NEWER = {"format": 2, "run": RUN, "by": "abcdef01", "given": "configuration", "retention": {"keep_last": 1}}
RULE = {**NEWER, "format": 1, "retention": {"keep_last": 1, "keep_fibonacci": True}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"[" * 100_000,
        b" " * (MAX_POLICY_SIZE + 1),
        json.dumps(NEWER).encode(),
        json.dumps(RULE).encode(),
        json.dumps({**RULE, "retention": {"keep_last": 0}}).encode(),
        encode_policy(StoredRetention("another", "abcdef01", "configuration", retention=TEN)),
    ],
    ids=["empty", "garbage", "deep", "large", "newer", "unknown rule", "bad value", "of another run"],
)
def test_while_a_policy_cannot_be_read_nothing_of_the_run_is_pruned(trained, spool, caplog, data):
    key = retention_key(RUN, "abcdef01", "configuration")
    asyncio.run(trained.put(key, data))
    save(spool, *range(9, 13))
    with caplog.at_level(logging.WARNING):
        daemon = asyncio.run(converge(spool, {"tier": trained}, keep=1))
    assert steps(trained) == list(range(1, 13))
    assert any(key in record.message and "not known" in record.message for record in caplog.records)
    (bad,) = [one for one in make_status(daemon, 0, 0).policies if one.key == key]
    assert bad.disagrees and bad.retention is None and bad.why
    oldest = make_report(daemon.inventory(), daemon.config).checkpoints[-1]
    assert "not known" in oldest.copies[-1].reasons[0]
    asyncio.run(trained.delete([key]))
    asyncio.run(converge(spool, {"tier": trained}, keep=None))
    assert len(steps(trained)) == 1


def test_a_node_repairs_its_own_damaged_policy_though_another_node_prunes_now(trained, spool, tmp_path):
    """The simulation's seed 433: the policy was spoiled on its way to the tier, and before the next observation the job
    moved to another node. Nobody wrote it again, so nothing was ever deleted there."""
    other, key = Spool(tmp_path / "moved"), retention_key(RUN, node_id(spool.root), "configuration")
    save(other, *range(9, 13), launch=2)
    asyncio.run(trained.put(key, b"garbage"))
    asyncio.run(converge(other, {"tier": trained}, keep=2))
    assert steps(trained) == list(range(1, 13))
    asyncio.run(converge(spool, {"tier": trained}, keep=10))
    assert policies(trained)[key.split("/")[2]].retention == TEN
    asyncio.run(converge(other, {"tier": trained}, keep=2))
    assert steps(trained) == list(range(3, 13))


def test_a_node_repairs_the_default_that_it_recorded_though_somebody_gives_a_policy_now(spool, tmp_path):
    store, other, key = MemoryStore(), Spool(tmp_path / "moved"), retention_key(RUN, node_id(spool.root), "default")
    save(spool, 1, 2, 3)
    asyncio.run(converge(spool, {"tier": store}, keep=None))
    save(other, *range(4, 8), launch=2)
    asyncio.run(store.put(key, b"garbage"))
    asyncio.run(converge(other, {"tier": store}, keep=2))
    asyncio.run(converge(spool, {"tier": store}, keep=None))
    assert policies(store)[key.split("/")[2]].retention == RetentionPolicy()
    asyncio.run(converge(other, {"tier": store}, keep=2))
    assert steps(store) == [6, 7]


def test_a_node_that_does_not_prune_records_no_policy_and_changes_none(trained, spool, tmp_path):
    other = Spool(tmp_path / "moved")
    save(other, 9, launch=2)
    asyncio.run(converge(other, {"tier": trained}, keep=10))
    before = asyncio.run(contents(trained, policies=True))
    asyncio.run(converge(spool, {"tier": trained}, keep=4))
    assert asyncio.run(contents(trained, policies=True)) == before
    asyncio.run(trained.delete([retention_key(RUN, node_id(spool.root), "configuration")]))  # as a person may
    asyncio.run(converge(spool, {"tier": trained}, keep=4))
    assert len(policies(trained)) == 1


def test_a_damaged_trainers_policy_in_the_spool_keeps_everything_on_the_tier(spool):
    store = MemoryStore()
    save(spool, *range(1, 6))
    record_policy(spool.control, RUN, RetentionPolicy(keep_last=4))
    (spool.control / "retention" / f"{RUN}.json").write_bytes(b"garbage")
    asyncio.run(converge(spool, {"tier": store}, keep=None))
    assert steps(store) == [1, 2, 3, 4, 5]
    record_policy(spool.control, RUN, RetentionPolicy(keep_last=4))  # as the next launch does
    asyncio.run(converge(spool, {"tier": store}, keep=None))
    assert steps(store) == [2, 3, 4, 5]


async def test_a_policy_that_is_not_given_up_fails_the_look(trained, spool):
    store = Double(trained)

    def refuse(operation, key):
        if operation == "get" and "/retention/" in key:
            raise StoreUnavailable("no route")

    store.before = refuse
    async with running(reconciler(spool, {"tier": store}, keep=1)) as daemon:
        await until(lambda: isinstance(daemon.workers["tier"].last_error, StoreUnavailable))
        assert daemon.tiers.observed.places["tier"] is None
        assert steps_on(await contents(trained)) == list(range(1, 9))
        store.before = None
        await settle(daemon)
    assert steps_on(await contents(trained)) == [8]


class FlipsOneBit(Double):
    """The first answer for a policy has `keep_last: 1` instead of 10, a difference of one bit."""

    flips = 0

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        data = bytes(await super().get(key, into))
        if "/retention/" not in key or self.flips:
            return data
        self.flips += 1
        return data.replace(b'"keep_last": 10', b'"keep_last": 1 ')


def test_policy_that_is_misread_once_with_a_smaller_number_deletes_nothing(trained, spool):
    store = FlipsOneBit(trained)
    asyncio.run(converge(spool, {"tier": store}, keep=None))
    assert store.flips == 1
    assert steps(trained) == list(range(1, 9)) and all(one.retention == TEN for one in policies(trained).values())


def test_policy_that_is_missing_once_is_not_taken_for_deleted(trained, spool):
    key = retention_key(RUN, "abcdef01", "configuration")
    asyncio.run(trained.put(key, encode_policy(StoredRetention(RUN, "abcdef01", "configuration", retention=TEN))))
    store, answers = Double(trained), [ObjectNotFound(key)]

    def miss_once(operation, asked):
        if (operation, asked) == ("get", key) and answers:
            raise answers.pop()

    store.before = miss_once
    asyncio.run(converge(spool, {"tier": store}, keep=1))
    assert not answers and steps(trained) == list(range(1, 9))


def test_policy_of_which_all_reads_differ_is_not_known_and_deletes_nothing(trained, spool):
    key = retention_key(RUN, "abcdef01", "configuration")
    asyncio.run(trained.put(key, encode_policy(StoredRetention(RUN, "abcdef01", "configuration", retention=TEN))))
    network = BadNetwork(trained, lambda asked: asked == key)
    daemon = asyncio.run(converge(spool, {"tier": network}, keep=1))
    (unknown,) = [one for one in make_status(daemon, 0, 0).policies if one.key == key]
    assert unknown.retention is None and "reads gave different" in unknown.why
    assert steps(trained) == list(range(1, 9))


KEY, OTHER = EncryptionKey(bytes(range(32))), EncryptionKey(bytes(32))


def view(inner: MemoryStore, key: EncryptionKey | None) -> Store:
    return EncryptedStore(inner, key) if key else inner


@pytest.mark.parametrize("again", [KEY, OTHER, None], ids=["the key", "another key", "no key"])
def test_on_an_encrypted_tier_the_policy_is_encrypted_and_another_key_deletes_nothing(spool, tmp_path, again):
    inner, other = MemoryStore(), Spool(tmp_path / "other")
    save(spool, 1, 2, 3, 4)
    asyncio.run(converge(spool, {"tier": view(inner, KEY)}, keep=4))
    (stored,) = [data for key, data in asyncio.run(contents(inner, policies=True)).items() if "/retention/" in key]
    assert b"keep_last" not in stored and b'"cipher"' in stored
    save(other, 5, 6, launch=2)

    async def work():
        async with running(reconciler(other, {"tier": view(inner, again)}, keep=None)) as daemon:
            if again is KEY:
                await settle(daemon)
            else:
                await until(lambda: daemon.workers["tier"].failures)

    asyncio.run(work())
    found = asyncio.run(contents(inner, policies=True))
    assert steps_on(found) == ([3, 4, 5, 6] if again is KEY else [1, 2, 3, 4])
    assert len([key for key in found if "/retention/" in key]) == 1


@pytest.mark.parametrize(("here", "there"), [(None, KEY), (OTHER, KEY), (KEY, None)], ids=["none", "other", "plain"])
def test_no_policy_is_put_beside_manifests_that_cannot_be_read_here(spool, tmp_path, here, there):
    """Also where no policy lies that could tell: one that its daemon cannot read would end that one's retention."""
    inner, other = MemoryStore(), Spool(tmp_path / "other")
    save(spool, 1, 2)
    asyncio.run(converge(spool, {"tier": view(inner, there)}, keep=2))
    asyncio.run(inner.delete([key for key in asyncio.run(contents(inner, policies=True)) if "/retention/" in key]))
    save(other, 3, launch=2)

    async def work():
        async with running(reconciler(other, {"tier": view(inner, here)}, keep=None)) as daemon:
            await until(lambda: daemon.workers["tier"].failures)

    asyncio.run(work())
    assert not [key for key in asyncio.run(contents(inner, policies=True)) if "/retention/" in key]


@pytest.mark.parametrize(
    ("own", "stray", "says"),
    [(KEY, None, "it is not encrypted"), (None, KEY, f"it is encrypted with key {KEY.id}"), (KEY, OTHER, OTHER.id)],
    ids=["plain on an encrypted tier", "encrypted on a plain tier", "another key"],
)
def test_a_policy_that_a_daemon_with_another_key_left_names_the_way_out(spool, own, stray, says):
    inner = MemoryStore()
    key = retention_key(RUN, "abcdef01", "default")
    theirs = StoredRetention(RUN, "abcdef01", "default", retention=TEN)
    save(spool, 1, 2)
    asyncio.run(converge(spool, {"tier": view(inner, own)}, keep=2))
    asyncio.run(view(inner, stray).put(key, encode_policy(theirs)))
    save(spool, 3, 4, launch=2)
    daemon = asyncio.run(converge(spool, {"tier": view(inner, own)}, keep=2))
    assert steps_on(asyncio.run(contents(inner))) == [1, 2, 3, 4]
    (why,) = [one.why for one in make_status(daemon, 0, 0).policies if one.retention is None]
    assert key in why and says in why and "delete that object" in why
    asyncio.run(inner.delete([key]))
    asyncio.run(converge(spool, {"tier": view(inner, own)}, keep=2))
    assert steps_on(asyncio.run(contents(inner))) == [3, 4]


# -- when it is written -----------------------------------------------------------------------------------------------


def test_nothing_is_written_while_the_daemon_is_paused(spool):
    async def work():
        store = MemoryStore()
        save(spool, 1)
        daemon = reconciler(spool, {"tier": store})
        await daemon.pause.begin(None)
        async with running(daemon):
            await until(lambda: daemon.tiers.observed.places["tier"])
            await settle_observations(daemon)
            assert not await contents(store, policies=True)
            await daemon.pause.end()
            daemon.wake()
            await settle(daemon)
        assert any("/retention/" in key for key in await contents(store, policies=True))

    async def settle_observations(daemon: Reconciler) -> None:
        for _ in range(3):
            await daemon.observe("tier")

    asyncio.run(work())


def test_a_policy_for_each_tier_is_its_own(spool):
    settings = config(spool, "fast", "slow", keep=2)
    best = RetentionPolicy(keep_last=1, keep_best=Best(metric="loss"))
    tiers = settings.tier[0], msgspec.structs.replace(settings.tier[1], retention=best)
    settings = msgspec.structs.replace(settings, tier=tiers)
    stores = {"fast": MemoryStore(), "slow": MemoryStore()}
    save(spool, 1)

    async def work():
        async with running(Reconciler(settings, spool, stores)) as daemon:
            await settle(daemon)

    asyncio.run(work())
    assert [one.retention for one in policies(stores["fast"]).values()] == [RetentionPolicy(keep_last=2)]
    assert [one.retention for one in policies(stores["slow"]).values()] == [best]
