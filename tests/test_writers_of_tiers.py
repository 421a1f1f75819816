"""Who can write where: each cell of the attackers page's tables, by a writer to a tier.

A test is named after its cell: `no-key/name` is `test_no_key_name…`. `tests/test_writers_table.py` compares.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from support.doubles import Double, flipped
from support.ranks import Group
from support.s3stub import Bucket, serving
from support.saved import put
from support.timed import timed
from support.world import RUN, Daemon, attempt, commit, content, hurry, part
from support.writers import (
    daemon_until,
    failing,
    forge,
    head,
    history,
    kinds,
    on_a_node,
    raw,
    replace,
    restored,
    state,
    steps,
)

import tierd
from tierd.core.errors import CheckpointNotFound, ManifestError, StoreFull, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId, flushing_prefix, head_key, pin_key, pruning_prefix, retention_key
from tierd.core.manifest_codec import decode, seal
from tierd.core.retention.policy import RetentionPolicy, StoredRetention, encode_policy
from tierd.core.urls import parse_url
from tierd.daemon.daemon_timings import USUAL
from tierd.daemon.tiers.tier_objects import verify_part
from tierd.spool import leases
from tierd.spool.spool import Spool
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore
from tierd.stores.open import open_store

KEY, OTHER = EncryptionKey(bytes(range(32))), EncryptionKey(bytes(32))
FAR = "0690ffffffff-00000000"  # a launch of the year 2198


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """Of the node that trains."""
    return Spool(tmp_path / "spool")


@pytest.fixture
def fresh(tmp_path: Path) -> Spool:
    """Of a node that remembers nothing."""
    return Spool(tmp_path / "fresh")


@pytest.fixture
def bucket() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def tier(bucket: MemoryStore, spool: Spool) -> EncryptedStore:
    """An encrypted tier with the steps 1, 2 and 3, which lie in `bucket`."""
    tier = EncryptedStore(bucket, KEY)
    history(tier, spool)
    return tier


@pytest.fixture
def plain(spool: Spool) -> MemoryStore:
    """A tier with the same that is not encrypted: who writes there needs no key."""
    store = MemoryStore()
    history(store, spool)
    return store


def lies(found: dict[str, bytes], step: int) -> list[str]:
    return [key for key in found if f"/{step:012}." in key]


# -- a bucket writer without the key ----------------------------------------------------------------------------------


def test_no_key_bytes(tier, bucket):
    found = raw(bucket)
    for harm in ("flipped", "cut", "swapped"):
        bad = dict(found)
        mine, theirs = ([key for key in lies(found, step) if "/chunks/" in key] for step in (3, 2))
        for key, other in zip(mine, theirs, strict=False):
            bad[key] = {"flipped": flipped(found[key]), "cut": b"", "swapped": found[other]}[harm]
        replace(bucket, bad)
        step, value, skipped = restored(tier)
        assert (step, value, [one for one, _ in skipped]) == (2, 2.0, [3])
        assert asyncio.run(verify_part(tier, part(3), lambda size: None))[1]


def test_no_key_deleted(tier, bucket, fresh):
    replace(bucket, {key: data for key, data in raw(bucket).items() if key not in lies(raw(bucket), 3)})
    step, value, skipped = restored(tier)
    assert (step, value) == (2, 2.0) and [(one, why[:4]) for one, why in skipped] == [(3, "gone")]
    replace(bucket, {key: data for key, data in raw(bucket).items() if "/timeline/" in key})
    with pytest.raises(CheckpointNotFound, match=r"step 3 .*gone"):
        on_a_node(tier, fresh)


def test_no_key_deleted_with_the_heads_a_node_that_remembers_nothing_begins_anew(tier, bucket, fresh, spool):
    replace(bucket, {})
    for one in (1, 2, 3):
        spool.remove([part(one)])
    assert on_a_node(tier, fresh) is None
    with pytest.raises(CheckpointNotFound, match="step 1 or later"):
        on_a_node(tier, fresh, at_least=1)
    with pytest.raises(CheckpointNotFound, match="gone"):
        on_a_node(tier, spool)


def test_no_key_rolled_back(tier, bucket, spool, fresh):
    before = raw(bucket)
    history(tier, spool, 4)
    replace(bucket, before)
    for one in spool.parts():
        spool.remove([one])
    assert restored(tier) == (3, 3.0, [])  # who remembers nothing notices nothing,
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 4 or later"):
        on_a_node(tier, fresh, at_least=4)  # unless it knows better
    found = on_a_node(tier, spool)
    assert found and found[:2] == (3, 3.0) and [(one, why[:4]) for one, why in found[2]] == [(4, "gone")]


@pytest.mark.parametrize(("launch", "says"), [(1, "its manifest"), (5, "unreadable: no manifest of its launch")])
@pytest.mark.parametrize("data", [b"", b"garbage"])
def test_no_key_name(tier, bucket, spool, data, launch, says):
    asyncio.run(bucket.put(part(999, launch).manifest_key, data))
    step, value, [(skipped, why)] = restored(tier)
    assert (step, value, skipped) == (3, 3.0, 999) and why.startswith(says)
    daemon = daemon_until(tier, spool, lambda one: "quarantined" in kinds(one))
    assert steps(bucket) == [1, 2, 3] and not daemon.journal.alerts()


def test_no_key_name_of_another_world_stops_no_rank(bucket, spool, tmp_path, monkeypatch):
    tier, group = EncryptedStore(bucket, KEY), Group(2)
    for rank in (0, 1):
        asyncio.run(put(spool, part(1, rank=rank, world=2), state(1), tier))
    asyncio.run(bucket.put(part(2).manifest_key, b""))
    group.install(monkeypatch)

    def restore(number: int) -> int:
        with tierd.Checkpointer(spool.root, RUN) as ckpt:
            return ckpt.restore(state(0)).step

    double = Double(tier)
    with Daemon(spool.root, {"tier": double}) as daemon:
        daemon.settle()
        assert group.run(restore) == [1, 1]
    for rank in (0, 1):
        spool.remove([part(1, rank=rank, world=2)])
    asyncio.run(bucket.put(part(2).manifest_key, b""))

    def no_quarantine(operation: str, key: str) -> None:
        if operation == "put" and "/quarantine/" in key:
            raise StoreUnavailable("not yet")

    double.before = no_quarantine
    with Daemon(spool.root, {"tier": double}):
        assert group.run(restore) == [1, 1]


@pytest.mark.parametrize("by", ["another key", "nobody"])
def test_no_key_foreign(tier, bucket, spool, by):
    for launch in (5, 1):
        which = part(999, launch)
        if by == "nobody":
            found = decode(bytes(asyncio.run(tier.get(part(3).manifest_key))))
            asyncio.run(bucket.put(which.manifest_key, seal(found)))
        else:
            asyncio.run(EncryptedStore(bucket, OTHER).put(which.manifest_key, b"{}"))
        if launch == 5:
            step, value, [(skipped, why)] = restored(tier)
            assert (step, value, skipped) == (3, 3.0, 999) and "of another key" in why
        else:
            with pytest.raises(StoreUnavailable, match=r"could be anybody's|encrypted with key"):
                restored(tier)
    commit(spool, part(4))
    daemon = daemon_until(tier, spool, failing, keep=1)
    assert "is not put beside what cannot be read here" in failing(daemon)
    assert "failing" in kinds(daemon) and steps(bucket) == [1, 2, 3, 999, 999]  # nor is anything pruned there


def test_no_key_head(tier, bucket, spool, caplog):
    asyncio.run(bucket.put(head_key(RUN, "deadbeef"), head(attempt(5))))
    assert restored(tier) == (3, 3.0, [])
    assert "cannot be read here, and passed over" in caplog.text
    daemon_until(tier, spool, lambda daemon: daemon.tiers.observed.places["tier"])
    (kept,) = (spool.control / "timeline").glob("*.json")
    assert attempt(5) not in kept.read_text()


def test_no_key_retention(tier, bucket, spool):
    for step in range(100, 110):
        for rank in (0, 1):
            asyncio.run(bucket.put(part(step, rank=rank, world=2).manifest_key, b""))
    daemon_until(tier, spool, lambda daemon: daemon.journal.counters["quarantined"] >= 20)
    assert steps(bucket) == [1, 2, 3]  # ten newer names retire none of the three that are kept
    assert restored(tier)[:2] == (3, 3.0)


def test_no_key_retention_an_old_mark_has_nothing_deleted_that_has_a_manifest(tier, bucket, spool):
    """A mark that is older than a day stands for a deletion that was cut off, and is to be done again."""
    mark = f"{pruning_prefix(RUN)}{part(2).checkpoint.name}.{int(time.time() - 2 * 86400) * 1000:012x}-deadbeef"
    asyncio.run(bucket.put(mark, b""))
    for name in ("one", "two"):  # a daemon looks for marks when it starts
        daemon_until(tier, spool, lambda daemon: steps_seen(daemon) and mark not in bucket.objects)
        assert steps(bucket) == [1, 2, 3] and restored(tier, step=2)[:2] == (2, 2.0), name


def test_no_key_policy(tier, bucket, spool):
    """A daemon without a configuration keeps what the run's policy says, or by default three."""
    rich = StoredRetention(RUN, "abcdef01", "configuration", retention=RetentionPolicy(keep_last=10))
    asyncio.run(tier.put(retention_key(RUN, rich.by, rich.given), encode_policy(rich)))
    policies = {key: data for key, data in raw(bucket).items() if "/retention/" in key}
    asyncio.run(bucket.delete([key for key in policies if "abcdef01" not in key]))
    for step in range(4, 7):
        commit(spool, part(step))
    daemon_until(tier, spool, lambda daemon: steps_seen(daemon) == {1, 2, 3, 4, 5, 6}, keep=None)
    assert steps(bucket) == [1, 2, 3, 4, 5, 6]
    key = retention_key(RUN, rich.by, rich.given)
    whole = raw(bucket)[key]
    asyncio.run(bucket.put(key, whole[:-9]))  # one that cannot be read stops all deleting,
    daemon_until(tier, spool, lambda daemon: daemon.tiers.observed.places["tier"], keep=1)
    assert steps(bucket) == [1, 2, 3, 4, 5, 6]
    asyncio.run(bucket.delete([key for key in raw(bucket) if "/retention/" in key]))
    daemon_until(tier, spool, lambda daemon: steps_seen(daemon) == {4, 5, 6}, keep=None)  # and none leaves the default
    assert steps(bucket) == [4, 5, 6]


def steps_seen(daemon) -> set[int]:
    place = daemon.tiers.observed.places["tier"]
    return {one.step for one in place.checkpoints} if place else set()


def test_no_key_held_up(tier, bucket, spool, monkeypatch, caplog):
    timed(monkeypatch, mark_reads=2)
    asyncio.run(bucket.put(pin_key(part(1).checkpoint), b""))
    asyncio.run(bucket.put(f"{pruning_prefix(RUN)}{part(4).checkpoint.name}.{USUAL.now_ms():012x}-deadbeef", b""))
    commit(spool, part(4))
    daemon = daemon_until(tier, spool, failing)
    assert "are being deleted" in failing(daemon) and "failing" in kinds(daemon)
    assert steps(bucket) == [1, 2, 3]
    asyncio.run(bucket.delete([key for key in raw(bucket) if "/pruning/" in key]))
    intent = f"{flushing_prefix(RUN)}{part(9).checkpoint.name}/{part(9).name}.{USUAL.now_ms():012x}-deadbeef"
    asyncio.run(bucket.put(intent, b""))
    daemon_until(tier, spool, lambda daemon: 4 in steps_seen(daemon) and "not pruned yet" in caplog.text, keep=1)
    assert steps(bucket) == [1, 2, 3, 4]
    asyncio.run(bucket.delete([intent]))
    daemon_until(tier, spool, lambda daemon: steps_seen(daemon) == {1, 4}, keep=1)
    assert steps(bucket) == [1, 4]


def test_no_key_flood(tier, bucket, spool):
    """Each made-up name is asked for at each look, until a daemon has set it aside."""
    for number in range(20):
        asyncio.run(bucket.put(part(1000 + number, 5).manifest_key, b""))
    double = Double(tier)
    daemon_until(double, spool, lambda daemon: daemon.journal.counters["quarantined"] == 20)
    assert steps(bucket) == [1, 2, 3]
    first = double.calls.index(("put", next(key for key in double.puts() if "/quarantine/" in key)))
    asked = {key for operation, key in double.calls[:first] if operation == "get" and "/manifests/" in key}
    assert len(asked) == 23
    double.calls.clear()
    daemon_until(double, spool, lambda daemon: daemon.tiers.observed.places["tier"])
    assert len([key for operation, key in double.calls if operation == "get" and "/manifests/" in key]) == 3


# -- one with the key, or to a tier that is not encrypted -------------------------------------------------------------


def test_key_bytes(plain, tmp_path, spool):
    replace(plain, {key: data for key, data in raw(plain).items() if key not in lies(raw(plain), 3)})
    forge(plain, Spool(tmp_path / "evil"), part(3))
    assert restored(plain) == (3, 666.0, [])
    assert asyncio.run(verify_part(plain, part(3), lambda size: None))[1] == []
    assert on_a_node(plain, spool) == (3, 3.0, [])  # who has a copy in its spool reads that


def test_key_newest(plain, tmp_path, spool):
    forge(plain, Spool(tmp_path / "evil"), part(500, 5))
    assert restored(plain) == (500, 666.0, [])
    quiet = daemon_until(plain, spool, lambda daemon: 500 in steps_seen(daemon), keep=1)
    assert not kinds(quiet) and not quiet.journal.alerts()  # without a trainer nothing notices it
    leases.acquire_lease(spool.control, part(3))
    daemon = daemon_until(plain, spool, lambda daemon: "two launches" in kinds(daemon), keep=1)
    assert "pruned" not in kinds(daemon) and steps(plain) == [1, 2, 3, 500]  # it is no janitor any more
    leases.release_lease(spool.control, part(3))
    assert on_a_node(plain, spool) == (500, 666.0, [])


def test_key_head(plain, spool, fresh):
    asyncio.run(plain.put(head_key(RUN, "deadbeef"), head(attempt(5))))
    with pytest.raises(CheckpointNotFound, match=rf"step 7 \(attempt {attempt(5)}\): gone"):
        restored(plain)
    daemon_until(plain, spool, lambda daemon: remembers(spool, attempt(5)))
    asyncio.run(plain.delete([head_key(RUN, "deadbeef")]))
    with pytest.raises(CheckpointNotFound, match="gone"):  # because spools and the next head remember it, too
        restored(plain)
    with Daemon(spool.root, {"tier": plain}, keep=3) as daemon, tierd.Checkpointer(spool.root, RUN) as ckpt:
        ckpt.restore(state(0), step=3)  # a person's decision; what goes on from there is the newest
        ckpt.save(4, state(4)).wait("tier", timeout=60)
        daemon.settle()
    assert on_a_node(plain, fresh) == (4, 4.0, [])


def remembers(spool: Spool, name: str) -> bool:
    return any(name in path.read_text() for path in (spool.control / "timeline").glob("*.json"))


def test_key_head_of_a_launch_that_nobody_can_have_made_is_none(plain):
    asyncio.run(plain.put(head_key(RUN, "deadbeef"), head("ffffffffffff-00000000")))
    assert restored(plain) == (3, 3.0, [])


def test_key_future(plain, tmp_path, spool):
    """Nobody follows it, because names are followed for fifty years: all that is later saved is older than it."""
    which = PartId(CheckpointId(RUN, FAR, 1), 0, 1)
    forge(plain, Spool(tmp_path / "evil"), which)
    not_saved = f"resumes from {FAR}, which is not an earlier attempt"
    with Daemon(spool.root, {"tier": plain}, keep=3):
        ckpt = tierd.Checkpointer(spool.root, RUN)
        assert ckpt.restore(state(0)).attempt == FAR
        with pytest.raises(tierd.SaveFailed, match=not_saved):
            ckpt.save(2, state(2)).wait(timeout=60)
        with pytest.raises(tierd.SaveFailed, match=not_saved):
            ckpt.close()
    spool.remove([which])
    for key in [key for key in raw(plain) if FAR in key or "/timeline/" in key]:
        asyncio.run(plain.delete([key]))
    for path in (spool.control / "timeline").glob("*.json"):
        path.unlink()
    assert on_a_node(plain, spool) == (3, 3.0, [])


def test_key_future_as_a_head_a_persons_choice_is_not_gone_on_from(plain, spool):
    asyncio.run(plain.put(head_key(RUN, "deadbeef"), head(FAR)))
    with Daemon(spool.root, {"tier": plain}, keep=3) as daemon, tierd.Checkpointer(spool.root, RUN) as ckpt:
        ckpt.restore(state(0), step=3)
        ckpt.save(4, state(4)).wait("tier", timeout=60)
        daemon.settle()
    with pytest.raises(CheckpointNotFound, match="gone"):
        on_a_node(plain, spool)


def test_key_retention(plain, tmp_path, spool):
    evil = Spool(tmp_path / "evil")
    for step in (501, 502, 503):
        forge(plain, evil, part(step))
    daemon = daemon_until(plain, spool, lambda daemon: daemon.journal.counters["pruned"] == 3)
    assert steps(plain) == [501, 502, 503] and "pruned" in kinds(daemon)
    assert [one.checkpoint.step for one in spool.parts()] == [1, 2, 3]  # a spool counts its own


# -- another tenant ---------------------------------------------------------------------------------------------------

LIKE = ["run2", "run.x", "run-1", "ru"]


def test_tenant_bytes(plain, tmp_path):
    before = raw(plain)
    mine = [bytes(before[key]) for key in lies(before, 3) if "/manifests/" in key]
    for other in LIKE:
        forge(plain, Spool(tmp_path / other), part(3, run=other))
        asyncio.run(plain.put(f"{other}/manifests/{part(4).checkpoint.name}/00000-of-00001.json", mine[0]))
    assert {key: data for key, data in raw(plain).items() if key in before} == before
    assert restored(plain) == (3, 3.0, [])
    with pytest.raises(ManifestError, match="it says that it is"):
        decode(mine[0], part(3, run="run2"))


def test_tenant_newest(plain, tmp_path):
    for other in LIKE:
        forge(plain, Spool(tmp_path / other), part(900, 7, run=other))
        asyncio.run(plain.put(head_key(other, "deadbeef"), head(attempt(9))))
        asyncio.run(plain.put(part(900, 9, run=other).quarantine_key, b""))
    assert restored(plain) == (3, 3.0, [])


def test_tenant_retention(plain, tmp_path):
    before = {key: data for key, data in raw(plain).items() if key.startswith(f"{RUN}/")}
    for other in LIKE:
        theirs = Spool(tmp_path / other)
        for step in range(1, 6):
            commit(theirs, part(step, 9, run=other))
        daemon_until(plain, theirs, lambda daemon: steps_seen(daemon) == {5}, keep=1)
        assert steps(plain, other) == [5]
    assert {key: data for key, data in raw(plain).items() if key.startswith(f"{RUN}/")} == before


def test_tenant_prefix():
    """Of two prefixes, where one begins as the other does, each is a directory of its own."""
    bucket = Bucket()
    with serving(bucket), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

        async def work() -> None:
            one, two = (open_store(parse_url(bucket.url(prefix))) for prefix in ("team", "team2"))
            await one.put("run/pins/x", b"one")
            await two.put("run/pins/y", b"two")
            assert [info.key async for info in one.scan("")] == ["run/pins/x"]
            await one.delete(["run/pins/y"])
            assert bytes(await two.get("run/pins/y")) == b"two"
            await one.aclose()
            await two.aclose()

        asyncio.run(work())


def test_tenant_full(plain, spool):
    full = Double(plain)

    def refuse(operation: str, key: str) -> None:
        if operation == "put":
            raise StoreFull("the bucket is full")

    full.before = refuse
    for step in (4, 5):
        commit(spool, part(step), content(step))
    daemon = daemon_until(full, spool, failing)
    assert "the bucket is full" in failing(daemon) and steps(plain) == [1, 2, 3]
    assert {4, 5} <= {one.checkpoint.step for one in spool.parts()}  # what no tier has stays
    full.before = None
    daemon_until(full, spool, lambda daemon: steps_seen(daemon) >= {4, 5})
    assert steps(plain)[-2:] == [4, 5]
