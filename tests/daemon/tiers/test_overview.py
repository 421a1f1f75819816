"""`tierd runs`: what one line of a run says, and that no more is read than that takes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from stores.s3.test_s3_store import credentials
from support.s3stub import Bucket, serving
from support.world import attempt, commit, described, part

from tierd.cli import run as tierd
from tierd.core.ids import CheckpointId, PartId, chunk_key
from tierd.core.manifest import Chunk, File, StoredChunk
from tierd.core.manifest_codec import encode
from tierd.daemon.tiers.run_overview import RunOverview, compare_runs, observe_runs
from tierd.spool.spool import Spool
from tierd.stores.base import Store, list_names
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.file_descriptors import list_directory
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.retry import RetryingStore
from tierd.stores.store_wrappers import LimitedStore

__all__ = ["credentials"]  # the fixture
SIZE, STORED = 2000, 1500
MADE = datetime(2026, 1, 1, tzinfo=UTC)
NOW = MADE + timedelta(hours=5)


def manifest(which: PartId) -> bytes:
    digest = "ab" * 16
    key = chunk_key(which, digest, "zstd")
    chunk = Chunk(size=SIZE, xxh3_128=digest, stored=StoredChunk(codec="zstd", size=STORED, xxh3_128=digest, key=key))
    made = (MADE + timedelta(minutes=which.checkpoint.step)).isoformat()
    return encode(described(which, created=made, files=(File(path="w.bin", size=SIZE, chunks=(chunk,)),)))


async def fill(store: Store, *parts: PartId) -> None:
    for one in parts:
        await store.put(one.manifest_key, manifest(one))


def parts(step: int, world: int, launch: int = 1, run: str = "a", without: tuple[int, ...] = ()) -> list[PartId]:
    ranks = (rank for rank in range(world) if rank not in without)
    return [part(step, launch, rank, world, run) for rank in ranks]


def lines(store: Store, *wanted: PartId, local: tuple[CheckpointId, ...] = ()) -> list[RunOverview]:
    async def work() -> list[RunOverview]:
        await fill(store, *wanted)
        return list(compare_runs({"t": await observe_runs(store)}, local, NOW))

    return asyncio.run(work())


def test_overview_line_has_the_verified_step_its_age_and_its_size() -> None:
    (line,) = lines(MemoryStore(), *parts(60, 3), *parts(120, 3))
    assert (line.run, line.tier, line.step, line.attempt, line.world_size) == ("a", "t", 120, attempt(1), 3)
    assert (line.age_s, line.lag_steps, line.missing_ranks) == (3 * 3600, 0, ())
    assert (line.size, line.stored_size, line.read, line.checkpoints) == (3 * SIZE, 3 * STORED, 3, 2)


def test_newer_incomplete_checkpoint_is_the_lag() -> None:
    (line,) = lines(MemoryStore(), *parts(60, 4), *parts(90, 4, without=(3,)), *parts(120, 4, without=(0, 2)))
    assert (line.step, line.newest_step, line.lag_steps, line.missing_ranks) == (60, 120, 60, (0, 2))


def test_later_launch_is_newer_at_any_step() -> None:
    (line,) = lines(MemoryStore(), *parts(200, 1), *parts(150, 1, launch=2))
    assert (line.step, line.attempt) == (150, attempt(2))


def test_overview_shows_a_run_without_a_complete_checkpoint_and_leaves_out_a_run_without_checkpoints() -> None:
    async def more(store: Store) -> None:
        await store.put("b/pins/x", b"")
        await store.put("README.md", b"")

    store = MemoryStore()
    asyncio.run(more(store))
    (line,) = lines(store, *parts(60, 4, without=(1,)))
    assert (line.step, line.age_s, line.lag_steps, line.size, line.missing_ranks) == (None, None, None, 0, (1,))


def test_other_places_show_how_far_a_tier_is_behind() -> None:
    async def work() -> tuple[RunOverview, ...]:
        fast, slow = MemoryStore(), MemoryStore()
        await fill(fast, *parts(60, 1), *parts(120, 1))
        await fill(slow, *parts(60, 1))
        return compare_runs(
            {"fast": await observe_runs(fast), "slow": await observe_runs(slow)}, [part(180, run="a").checkpoint], NOW
        )

    assert [(one.tier, one.step, one.lag_steps) for one in asyncio.run(work())] == [
        ("fast", 120, 60),
        ("slow", 60, 120),
    ]


@pytest.mark.parametrize("damage", [b"", b"{}", b"x" * 100])
def test_a_checkpoint_whose_manifest_is_damaged_is_not_verified(damage: bytes) -> None:
    store = MemoryStore()
    lines(store, *parts(60, 2), *parts(120, 2))
    asyncio.run(store.put(part(120, rank=1, world=2, run="a").manifest_key, damage))
    (line,) = lines(store)
    assert (line.step, line.lag_steps, line.missing_ranks) == (60, 60, ())


def test_of_many_ranks_one_manifest_is_read_and_the_size_is_a_lower_bound() -> None:
    (line,) = lines(MemoryStore(), *parts(60, 100))
    assert (line.step, line.world_size, line.read, line.size) == (60, 100, 1, SIZE)


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    async def get(self, key, into=None):
        self.asked[key] += 1
        return await super().get(key, into)


def test_only_the_manifests_of_each_runs_newest_verified_checkpoint_are_read() -> None:
    store, runs, ranks = Counting(), [f"run-{number}" for number in range(20)], 4
    wanted = [one for run in runs for step in range(6) for one in parts(step, ranks, run=run)]
    wanted += [one for run in runs for one in parts(9, ranks, run=run, without=(2,))]
    assert len(lines(store, *wanted)) == len(runs)
    assert set(store.asked) == {one.manifest_key for run in runs for one in parts(5, ranks, run=run)}
    assert set(store.asked.values()) == {1}


def test_a_directory_is_listed_once_and_a_bucket_by_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [one for run in "abc" for step in range(5) for one in parts(step, 2, run=run)]
    (tmp_path / "tier").mkdir()
    store, calls = FileStore(tmp_path / "tier"), Counter[str]()

    def counted(root: int, directory: str, prefix: str, after: str, most: int = 0) -> object:
        calls[directory] += 1
        return list_directory(root, directory, prefix, after, most)

    monkeypatch.setattr("tierd.stores.file_tree.list_directory", counted)
    assert len(lines(store, *wanted)) == 3
    newest = {f"{run}/manifests/{part(4).checkpoint.name}/" for run in "abc"}
    assert set(calls) == {"", *(f"{run}/manifests/" for run in "abc"), *newest}
    assert set(calls.values()) == {1}
    bucket = Bucket()
    bucket.objects = {f"p/{one.manifest_key}": manifest(one) for one in wanted}
    with serving(bucket):
        assert tierd(["runs", bucket.url()]) == 0
    assert bucket.asked["GetObject"] == 3 * 2
    assert bucket.asked["ListBucket"] <= 12


@pytest.mark.parametrize("wrap", ["plain", "retrying", "limited", "encrypted"])
async def test_directories_are_the_names_that_a_listing_shows(tmp_path: Path, wrap: str) -> None:
    (tmp_path / "tier").mkdir()
    inner = FileStore(tmp_path / "tier")
    store: Store = {
        "plain": lambda: inner,
        "retrying": lambda: RetryingStore(inner),
        "limited": lambda: LimitedStore(inner, 10**9, None),
        "encrypted": lambda: EncryptedStore(inner, EncryptionKey(b"k" * 32)),
    }[wrap]()
    key = f"a/{chunk_key(part(1), 'ab' * 16, 'raw')}"
    for one in (key, "a/pins/x", "b/pins/y", "README.md"):
        await store.put(one, b"x")
    for prefix in ("", "a/", "a/chunks/", "none/"):
        assert set(await store.directories(prefix) or ()) == await list_names(store, prefix)
    hidden = await store.directories(key.rpartition("/")[0] + "/")
    assert hidden == (None if wrap == "encrypted" else [key.rpartition("/")[2]])


def test_the_command_shows_a_line_a_run_and_adds_the_spools_steps(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "tier").mkdir()
    spool = Spool(tmp_path / "spool")
    commit(spool, part(500, run="a"))
    asyncio.run(
        fill(FileStore(tmp_path / "tier"), *parts(60, 3), *parts(120, 3, without=(0, 1)), *parts(7, 1, run="b"))
    )
    assert tierd(["runs", str(tmp_path / "tier"), "--spool", str(spool.root)]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == ["RUN", "TIER", "STEP", "AGE", "LAG", "MISSING", "RANKS", "SIZE"]
    assert shown[1][:3] == ["a", "file", "60"] and "2 of 3: 0-1" in " ".join(shown[1]) and "440" in shown[1]
    assert shown[2][:3] == ["b", "file", "7"]
    assert tierd(["runs", str(tmp_path / "tier"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found["runs"]] == [60, 7] and found["unreached"] == []
    assert set(found["runs"][0]) == set(RunOverview.__slots__)


def test_a_tier_that_does_not_answer_is_said(tmp_path: Path, capsys) -> None:
    (tmp_path / "tier").mkdir()
    assert tierd(["runs", str(tmp_path / "tier"), str(tmp_path / "none")]) == 6
    assert "file-2 did not answer" in capsys.readouterr().err
    assert tierd(["runs"]) == tierd(["runs", "--spool", str(Spool(tmp_path / "spool").root)]) == 3
