"""`tierd.open`: loads what a trainer would load, from the tiers alone, any rank's part, and writes nothing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from support.chunk_keys import owner_name
from support.doubles import Double, contents, flip, is_chunk, is_manifest
from support.s3stub import Bucket, serving
from support.saved import ReadOnly, files_of, put
from support.training import fresh, train
from support.world import commit, content, part

import tierd
from tierd.core.errors import CheckpointNotFound, ConfigError, StateMismatch, StoreUnavailable
from tierd.core.ids import retention_key
from tierd.core.manifest import MANIFEST_NAME
from tierd.core.retention.policy import RetentionPolicy, StoredRetention, encode_policy
from tierd.core.urls import parse_url
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.tiers.summaries import due_summaries, put_summaries
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.tiers.tier_prune import prune
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.reading import Reader
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.open import open_store


@pytest.fixture
def spool(tmp_path) -> Spool:
    return Spool(tmp_path / "spool")


def state_of(step: int, rank: int = 0) -> dict:
    """Two entries that all ranks have the same, two that they have not; some tensors larger than a chunk."""
    torch.manual_seed(step)
    return {
        "model": {"weight": torch.randn(40, 50), "bias": torch.randn(7), "tied": torch.full((3,), float(step))},
        "optimizer": {"moment": torch.randn(900), "step": step, "lr": 0.1},
        "data": {"rank": rank, "order": torch.arange(30 + 11 * rank)},  # of another size on each rank
        "rng": torch.arange(12) + rank,
    }


def into() -> dict:
    return {"model": None, "optimizer": None, "data": None, "rng": None}


def same(one: object, other: object) -> bool:
    return files_of({"x": one}) == files_of({"x": other})


def saved(spool: Spool, *steps: int, world: int = 1, stores: tuple = (), **more) -> None:
    async def work() -> None:
        for step in steps:
            for rank in range(world):
                which = part(step, rank=rank, world=world)
                await put(spool, which, state_of(step, rank), *stores, metrics={"loss": 10.0 / step}, **more)

    asyncio.run(work())


def reader(**stores) -> Reader:
    return Reader({name: ReadOnly(store) for name, store in stores.items()}, "run")


def objects(store) -> dict[str, bytes]:
    return asyncio.run(contents(store))


def tree(root: Path) -> dict[str, tuple]:
    """Every file below a directory: its bytes, and when it and its directory changed."""
    return {
        str(path.relative_to(root)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in [root, *root.rglob("*")]
    }


# -- what a trainer saved ---------------------------------------------------------------------------------------------


def test_evaluation_elsewhere_loads_the_saved_state_and_changes_nothing(tmp_path, spool):
    (tmp_path / "tier").mkdir()
    state = fresh() | {"shuffle": torch.Generator().manual_seed(4), "\ud800": torch.ones(3)}
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        for step in range(8):
            train(state)
            checkpointer.save(step, state, {"loss": float(step)}).wait()

    async def flushed() -> None:
        store = FileStore(tmp_path / "tier")
        for which in spool.parts():
            await flush(spool, which, TierUploadContext(store))
        await store.aclose()

    asyncio.run(flushed())
    before = tree(tmp_path / "tier")
    other = fresh(seed=1) | {"shuffle": torch.Generator(), "\ud800": None}
    os.chmod(tmp_path / "tier", 0o555)
    with tierd.open(f"file://{tmp_path}/tier", "run") as opened:
        assert [one.step for one in opened.checkpoints()] == [7, 6, 5, 4, 3, 2, 1, 0]
        found = opened.restore(other)
        opened.restore(other, step=7, only=("model", "shuffle", "\ud800"))
        opened.download(tmp_path / "out", step=3)
    assert (found.step, found.rank, found.world_size, found.tier, found.metrics) == (7, 0, 1, "file", {"loss": 7.0})
    assert (found.skipped, found.unreached) == ((), ())
    os.chmod(tmp_path / "tier", 0o755)
    assert tree(tmp_path / "tier") == before
    assert not list(tmp_path.rglob("control.sock"))  # no daemon was started
    torch.manual_seed(3)
    assert same(other["model"].state_dict(), state["model"].state_dict())
    assert same(other["optimizer"].state_dict(), state["optimizer"].state_dict())
    assert torch.equal(other["shuffle"].get_state(), state["shuffle"].get_state())
    assert other["epoch"] == 8 and other["seen"] == state["seen"]


def test_a_state_that_does_not_fit_is_named_as_by_a_trainers_restore(spool):
    store = MemoryStore()
    saved(spool, 1, stores=(store,))
    with reader(tier=store) as opened:
        state = {**into(), "rng": torch.zeros(5)}
        with pytest.raises(
            StateMismatch, match=r'state\["rng"\]: int64 \(12,\) in the checkpoint, float32 \(5,\) here'
        ):
            opened.restore(state)
        assert state["model"] is None
        with pytest.raises(StateMismatch, match='"ema" not in the checkpoint; it has "model", "optimizer"'):
            opened.restore({"ema": None}, only="ema")
        with pytest.raises(ConfigError, match='"ema" not in the state passed'):
            opened.restore(into(), only="ema")
        with pytest.raises(ConfigError, match=r"download\(DIR\) copies files"):
            opened.restore(None)
        with pytest.raises(ConfigError, match=r'^only: it names nothing; the state passed has "model", "optimizer"'):
            opened.restore(into(), only=())


def test_only_some_entries_are_read_and_no_chunk_of_others(spool):
    store = Double()
    saved(spool, 1, stores=(store,))
    whole = {key for key in objects(store.inner) if is_chunk(key)}
    store.calls.clear()
    state = into()
    with reader(tier=store) as opened:
        assert opened.restore(state, only=("rng",)).step == 1
    assert torch.equal(state["rng"], state_of(1)["rng"]) and state["model"] is None
    assert len({key for operation, key in store.calls if operation == "get" and is_chunk(key)}) < len(whole) / 2


def test_the_best_an_attempt_and_a_step_are_asked_for_as_of_a_trainers_restore(spool):
    store = MemoryStore()
    saved(spool, 1, 2, 3, stores=(store,))
    with reader(tier=store) as opened:
        assert opened.restore(into(), best="loss").step == 3
        assert opened.restore(into(), best="loss", mode="max").step == 1
        assert opened.restore(into(), step=2, attempt=part(2).checkpoint.attempt).step == 2
        with pytest.raises(CheckpointNotFound, match="metric 'f1'; there are: loss"):
            opened.restore(into(), best="f1")
        with pytest.raises(ConfigError, match="one of the two"):
            opened.restore(into(), best="loss", step=1)
        with pytest.raises(CheckpointNotFound, match="step 9: there is no such checkpoint"):
            opened.restore(into(), step=9)


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_single_process_reads_the_states_of_eight_ranks(spool):
    store = MemoryStore()
    saved(spool, 4, world=8, stores=(store,))
    with reader(tier=store) as opened:
        for rank in (0, 5, 7):
            state = into()
            found = opened.restore(state, rank=rank)
            assert (found.step, found.rank, found.world_size) == (4, rank, 8)
            assert same(state, state_of(4, rank))
        state = into()
        assert opened.restore(state, only=("model", "optimizer")).rank == 0
        assert same(state["model"], state_of(4)["model"]) and same(state["optimizer"], state_of(4)["optimizer"])
        assert state["data"] is None
        with pytest.raises(
            StateMismatch, match=r'by 8 ranks, and "data", "rng" differ between .*restore\(state, rank=0\)'
        ):
            opened.restore(into())
        with pytest.raises(StateMismatch, match=r'"data" differs between them'):
            opened.restore(into(), only=("model", "data"))
        for rank in (8, -1, "0", True):
            with pytest.raises(ConfigError, match=r"has ranks 0\.\.7"):
                opened.restore(into(), rank=rank)


DIFFERENT = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ("a", "b"),
    (None, torch.zeros(2)),
    (torch.zeros(2), torch.zeros(3)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    (torch.zeros(2), -torch.zeros(2)),  # equal numbers of other bytes
    (torch.zeros(5000), torch.cat([torch.zeros(4999), torch.ones(1)])),
    (torch.zeros(5000), torch.cat([torch.ones(1), torch.zeros(4999)])),
    ({"a": 1}, {"a": 1, "b": 2}),
    (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    (float("nan"), -float("nan")),
    ([0.0] * 2000, [0.0] * 1999 + [-0.0]),
    ([1] * 2000, [True] * 2000),
    ([0.0] * 2000, [0.0] * 2001),
    (dict.fromkeys(range(2000), 1), dict.fromkeys(range(1, 2001), 1)),
    (b"a" * 70_000, b"a" * 69_999 + b"b"),
]


@pytest.mark.parametrize(
    ("mine", "theirs", "shift"),
    [(*pair, (0, 300)[index % 2]) for index, pair in enumerate(DIFFERENT)]
    + [(*DIFFERENT[5], shift) for shift in (0, 1)],
)
async def test_entries_are_the_same_only_if_every_bit_of_them_is(spool, mine, theirs, shift):
    """Also where the same tensor lies elsewhere in another rank's file, and in other chunks."""
    store, first = MemoryStore(), torch.arange(600.0)
    for rank, value in enumerate((mine, theirs)):
        state = {"first": first, "value": value, "size": torch.ones(40 + shift * rank), "z": torch.arange(2000)}
        await put(spool, part(1, rank=rank, world=2), state, store)
    with reader(tier=store) as opened:
        state = {"first": None, "z": None}
        opened.restore(state, only=("first", "z"))
        assert torch.equal(state["first"], first) and torch.equal(state["z"], torch.arange(2000))
        with pytest.raises(StateMismatch, match='"value" differs'):
            opened.restore({"value": None}, only="value")


async def test_entry_that_is_equal_on_all_ranks_needs_no_rank(spool):
    store = MemoryStore()
    for rank in range(3):
        await put(spool, part(1, rank=rank, world=3), {"model": torch.ones(9000), "n": 3}, store)
    state = {"model": None, "n": 0}
    with reader(tier=store) as opened:
        assert opened.restore(state).world_size == 3
    assert state["n"] == 3 and torch.equal(state["model"], torch.ones(9000))


def test_a_trainers_mismatch_names_the_reader(spool):
    for rank in range(2):
        commit(spool, part(1, rank=rank, world=2), files_of(state_of(1)))
    with (
        tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer,
        pytest.raises(StateMismatch, match=r"2 ranks.*has 1;.*tierd\.open\(url, 'run'\)\.restore\(state, rank=0\)"),
    ):
        checkpointer.restore(into())


# -- what is wrong ----------------------------------------------------------------------------------------------------


def spoil(store, step: int, of=is_chunk) -> None:
    async def work() -> None:
        for key in await contents(store):
            if of(key) and part(step).checkpoint.name in key:
                await flip(store, key)

    asyncio.run(work())


@pytest.mark.parametrize("of", [is_chunk, is_manifest])
@pytest.mark.parametrize("only", [None, ("model",)])
def test_checkpoint_that_is_corrupt_everywhere_is_passed_over_and_left_as_it_is(spool, of, only):
    store = MemoryStore()
    saved(spool, 1, 2, stores=(store,))
    spoil(store, 2, of)
    before = objects(store)
    state = into()
    with reader(tier=store) as opened:
        found = opened.restore(state, only=only)
    assert found.step == 1 and same(state["model"], state_of(1)["model"])
    assert [one.step for one in found.skipped] == [2] and found.skipped[0].reason
    assert objects(store) == before


def test_each_chunk_is_read_from_the_first_place_that_has_it_right(spool):
    one, other = MemoryStore(), MemoryStore()
    saved(spool, 1, stores=(one, other))
    for number, key in enumerate(sorted(key for key in objects(one) if is_chunk(key))):
        asyncio.run(flip(one if number % 2 else other, key))
    state = into()
    with reader(one=one, other=other) as opened:
        assert opened.restore(state).tier == "one"
    assert same(state, state_of(1))


def test_silent_place_is_reported_and_never_a_reason_to_step_back(spool):
    one, other = MemoryStore(), Double()
    saved(spool, 1, 2, stores=(one, other))
    other.error = StoreUnavailable("down")
    with reader(one=one, other=other) as opened:
        assert [item.step for item in opened.checkpoints()] == [2, 1] and opened.unreached == ("other",)
        assert opened.restore(into()).unreached == ("other",)
        for of in (is_chunk, is_manifest):
            spoil(one, 2, of)
            with pytest.raises(StoreUnavailable, match="down"):
                opened.restore(into())
        with pytest.raises(StoreUnavailable, match="best by 'loss' cannot be told: other did not answer"):
            opened.restore(into(), best="loss")
        other.error = None
        state = into()
        assert opened.restore(state).tier == "other" and same(state, state_of(2))
    with reader(other=other) as opened:
        other.error = StoreUnavailable("down")
        for call in (opened.checkpoints, lambda: opened.restore(into())):
            with pytest.raises(StoreUnavailable, match="no tier could be asked: other: down"):
                call()


def test_tier_whose_bytes_are_right_is_believed_where_tiers_contradict_each_other(tmp_path, spool):
    one, other = MemoryStore(), MemoryStore()
    saved(spool, 1, stores=(other,))
    asyncio.run(put(Spool(tmp_path / "liar"), part(1), {**state_of(1), "rng": torch.zeros(3)}, one))
    for key in objects(one):
        if is_chunk(key):
            asyncio.run(flip(one, key))
    for only in (None, ("rng",)):
        state = into()
        with reader(one=one, other=other) as opened:
            assert opened.restore(state, only=only).skipped == ()
        assert torch.equal(state["rng"], torch.arange(12))


class Vanishing(ReadOnly):
    """Prunes a checkpoint when a chunk of it is asked for, before it answers; so many checkpoints."""

    def __init__(self, inner, times: int) -> None:
        super().__init__(inner)
        self.times, self.gone = times, set[int]()

    async def get(self, key, into=None):
        step = int(owner_name(key)[:12]) if is_chunk(key) else None
        if step is not None and step not in self.gone and len(self.gone) < self.times:
            self.gone.add(step)
            await prune(self.inner, [part(step).checkpoint])
        return await super().get(key, into)


@pytest.mark.parametrize("way", ["restore", "download"])
def test_reader_searches_again_for_a_checkpoint_that_is_pruned_while_it_is_read(tmp_path, spool, way):
    store = MemoryStore()
    saved(spool, 1, 2, 3, 4, stores=(store,))

    def read(times: int):
        with Reader({"tier": Vanishing(store, times)}, "run") as opened:
            return opened.restore(into()) if way == "restore" else opened.download(tmp_path / f"out-{times}")

    found = read(1)
    assert (found.step, found.skipped) == (3, ())  # nothing was wrong with 4: it is not there any more
    saved(Spool(tmp_path / "more"), 5, 6, 7, stores=(store,))
    with pytest.raises(StoreUnavailable, match=r"while .* read, 3 times; try again"):
        read(9)


@pytest.mark.parametrize("way", ["restore", "download"])
def test_reader_searches_again_if_a_summary_stands_for_a_manifest_that_a_person_deleted(tmp_path, spool, way):
    store = MemoryStore()
    saved(spool, 1, 2, world=2, stores=(store,))

    async def summarise() -> None:
        observer = TierObserver(store)
        due = due_summaries(
            await observer.observe({"run"}),
            observer.manifests,
            "run",
            DaemonTimings(summarised_ranks=1, summarised_manifests=0),
        )
        await put_summaries(store, observer.manifests, due)
        await store.delete([part(2, rank=1, world=2).manifest_key])

    asyncio.run(summarise())
    with Reader({"tier": store}, "run") as opened:
        assert {own.step for own in opened.checkpoints()} == {1, 2}
        found = opened.restore(into(), rank=1) if way == "restore" else opened.download(tmp_path / "out")
    assert found.step == 1


def test_checkpoint_of_another_program_is_refused_with_a_remedy(tmp_path, spool):
    store = MemoryStore()

    async def work(step: int, files: dict[str, bytes]) -> None:
        commit(spool, part(step), files)
        await flush(spool, part(step), TierUploadContext(store))

    asyncio.run(work(1, content(1)))
    with reader(tier=store) as opened:
        for only, rank in ((None, None), ("model", None), ("model", 0)):
            with pytest.raises(StateMismatch, match=r"written through stage\(\).*download\(DIR\)"):
                opened.restore(into(), only=only, rank=rank)
        asyncio.run(work(2, {"__0_0.distcp": b"x", ".metadata": b"y"}))
        with pytest.raises(StateMismatch, match=r"through DCP: tierd\.dcp\.load.*download\(DIR\)"):
            opened.restore(into())
        reported: list[tuple[int, int]] = []
        found = opened.download(tmp_path / "out", on_progress=lambda done, total: reported.append((done, total)))
        assert (
            reported == sorted(reported) and reported[0] == (0, found.size) and reported[-1] == (found.size, found.size)
        )
        assert {path.name for path in Path(found.directories[0]).iterdir()} == {
            "__0_0.distcp",
            ".metadata",
            MANIFEST_NAME,
        }


def test_a_run_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path, spool):
    store = MemoryStore()
    with Reader({"tier": store}, "rum") as opened:
        assert opened.checkpoints() == ()
        with pytest.raises(CheckpointNotFound, match=r"run 'rum': .*there is no run at all"):
            opened.restore(into())
        saved(spool, 1, stores=(store,))
        for call in (lambda: opened.restore(into()), lambda: opened.download(tmp_path / "out")):
            with pytest.raises(
                CheckpointNotFound, match=r"'rum': the tiers have no complete .*the runs there are: run$"
            ):
                call()
        assert not (tmp_path / "out").exists()


def test_an_incomplete_checkpoint_is_listed_and_not_loaded(spool):
    store = MemoryStore()
    asyncio.run(put(spool, part(1, rank=0, world=2), state_of(1), store))
    with reader(tier=store) as opened:
        (one,) = opened.checkpoints()
        assert (one.complete, one.resumes, one.tiers, one.world_size) == (False, False, (), 2)
        with pytest.raises(CheckpointNotFound, match=r"step 1 .*: incomplete"):
            opened.restore(into(), rank=0)


# -- what there is ----------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_as_a_resume_would_try_them(spool):
    one, other = MemoryStore(), MemoryStore()
    saved(spool, 1, 2, 3, stores=(one,))

    async def work() -> None:
        await flush(spool, part(2), TierUploadContext(other))
        await put(spool, part(3, launch=2), state_of(3), other, origin=part(2).checkpoint)
        await put(spool, part(4, launch=2, rank=1, world=2), state_of(3), one, origin=part(2).checkpoint)

    asyncio.run(work())
    with reader(one=one, other=other) as opened:
        found = opened.checkpoints()
    first, second = part(1).checkpoint.attempt, part(3, launch=2).checkpoint.attempt
    assert [(item.step, item.attempt) for item in found] == [
        (3, second),
        (2, first),
        (1, first),
        (4, second),  # incomplete
        (3, first),  # off the timeline
    ]
    assert [item.tiers for item in found] == [("other",), ("one", "other"), ("one",), (), ("one",)]
    assert [item.resumes for item in found] == [True, False, False, False, False]
    assert found[1].metrics == {"loss": 5.0} and found[1].created.isoformat() == "2026-01-01T00:02:00+00:00"


def overwrite(store, step: int, data: bytes = b"{}", rank: int | None = None) -> None:
    """Replace a checkpoint's manifests by `data`; of one rank, where one is given."""

    async def work() -> None:
        for key in await contents(store):
            which = part(step, rank=rank or 0).checkpoint.name
            if is_manifest(key) and which in key and (rank is None or f"/{rank:05}-of" in key):
                await store.put(key, data)

    asyncio.run(work())


def facts_of(listed) -> tuple:
    return listed.step, listed.complete, listed.tiers, listed.resumes


def test_a_checkpoint_is_not_complete_where_its_manifests_are_known_to_be_unusable(spool):
    one, other = MemoryStore(), MemoryStore()
    saved(spool, 1, 2, world=2, stores=(one,))
    overwrite(one, 2)
    with reader(one=one) as opened:
        newest, older = opened.checkpoints()
        assert facts_of(newest) == (2, False, (), False) and facts_of(older) == (1, True, ("one",), True)
        assert (newest.created, newest.metrics, newest.world_size) == (None, {}, 2)
        state = into()
        assert opened.restore(state, rank=0).step == 1  # as `resumes` says
    saved(Spool(spool.root.parent / "again"), 2, world=2, stores=(other,))
    with reader(one=one, other=other) as opened:
        assert facts_of(opened.checkpoints()[0]) == (2, True, ("other",), True)
        assert opened.checkpoints()[0].created is not None


def test_one_unusable_manifest_makes_a_checkpoint_incomplete_unless_another_tier_has_that_part(spool):
    one, other = MemoryStore(), Double()
    saved(spool, 1, 2, world=2, stores=(one,))
    overwrite(one, 2, rank=0)
    asyncio.run(flush(spool, part(2, rank=0, world=2), TierUploadContext(other)))
    with reader(one=one) as opened:
        assert [facts_of(item)[1:] for item in opened.checkpoints()] == [(False, (), False), (True, ("one",), True)]
    with reader(one=one, other=other) as opened:
        assert facts_of(opened.checkpoints()[0]) == (2, True, (), True)
        other.error = StoreUnavailable("down")
        found = opened.checkpoints()  # a restore would not step back: `other` may hold the right copy
        assert [(item.complete, item.resumes) for item in found] == [(False, False), (True, False)]


def test_without_the_right_key_nothing_is_complete_and_no_message_speaks_of_deletions(tmp_path, spool, caplog):
    (tmp_path / "tier").mkdir()
    for name, byte in (("key", "1f"), ("other", "2e")):
        (tmp_path / name).write_text(byte * 32 + "\n")
        (tmp_path / name).chmod(0o600)
    policy = StoredRetention("run", "0a1b2c3d", "trainer", retention=RetentionPolicy())
    with tierd.open(tmp_path / "tier", "run", key_file=tmp_path / "key") as opened:
        (store,) = opened.tiers.stores.values()

        async def work() -> None:
            await put(spool, part(2), state_of(2), store)
            await store.put(retention_key("run", policy.by, policy.given), encode_policy(policy))
            await put(spool, part(1), state_of(1), FileStore(tmp_path / "tier"))

        asyncio.run(work())
        assert facts_of(opened.checkpoints()[0]) == (2, True, ("file",), True)
    for key in (None, tmp_path / "other"):
        with tierd.open(tmp_path / "tier", "run", key_file=key) as opened:
            newest, older = opened.checkpoints()
            assert facts_of(newest) == (2, False, (), False) and newest.created is None
            assert not older.resumes  # a restore would not pass over what another key reads
    assert "deleted" not in caplog.text and "policy" not in caplog.text


# -- copying out ------------------------------------------------------------------------------------------------------


def test_files_are_copied_out_one_directory_a_rank(tmp_path, spool):
    store = MemoryStore()
    saved(spool, 1, 2, world=2, stores=(store,))
    with reader(tier=store) as opened:
        found = opened.download(tmp_path / "out", best="loss", mode="max")
        assert (found.step, [Path(one).name for one in found.directories]) == (1, ["00000-of-00002", "00001-of-00002"])
        found = opened.download(tmp_path / "one", rank=1)
        assert found.step == 2 and os.listdir(tmp_path / "one") == ["00001-of-00002"]
        files = files_of(state_of(2, rank=1))
        assert {name: (Path(found.directories[0]) / name).read_bytes() for name in files} == files
        for rank in (2, "1", True):
            with pytest.raises(ConfigError, match=r"has ranks 0\.\.1"):
                opened.download(tmp_path / "two", rank=rank)
        with pytest.raises(ConfigError, match=rf"^{tmp_path}/out: it exists and is not an empty directory"):
            opened.download(tmp_path / "out")
        for directory in (None, 3, b"out"):
            with pytest.raises(ConfigError, match=r"^download\(directory\): a path, and not a "):
                opened.download(directory)
        with pytest.raises(ConfigError, match="one of the two"):
            opened.download(tmp_path / "three", best="loss", step=1)


# -- parts of two histories -------------------------------------------------------------------------------------------


def put_apart(spool: Spool, *stores) -> None:
    """Put step 5 as ranks leave it that cannot talk, and resumed from different steps under one given attempt. Both
    have the same state, so only their manifests tell.
    """

    async def work() -> None:
        for rank in (0, 1):
            origin = part(1 if rank == 0 else 2).checkpoint
            await put(spool, part(5, 2, rank, 2), state_of(5), *stores, origin=origin)

    asyncio.run(work())


def test_parts_of_two_histories_are_no_checkpoint_for_a_reader(tmp_path, spool):
    store = MemoryStore()
    saved(spool, 1, 2, world=2, stores=(store,))
    put_apart(spool, store)
    with reader(tier=store) as opened:
        found = [
            opened.download(tmp_path / "all"),
            opened.download(tmp_path / "rank", rank=1),
            opened.restore(into(), rank=1),
            opened.restore(into(), only="model"),
        ]
        for one in found:
            assert one.step == 1 and "do not belong together" in str(one.skipped[0])
        assert opened.download(tmp_path / "own", rank=0).step == 5  # the lowest rank speaks for its attempt
        assert [one.step for one in opened.follow(once=True)] == [1, 2]
        with pytest.raises(CheckpointNotFound, match="do not belong together"):
            opened.download(tmp_path / "step", step=5)


def test_another_tiers_content_of_another_history_completes_no_checkpoint(tmp_path, spool):
    """Rank 1's part is corrupt on the tier whose parts belong together, and right on another."""
    one, other = MemoryStore(), MemoryStore()
    saved(spool, 1, 2, world=2, stores=(one,))
    put_apart(Spool(tmp_path / "apart"), other)
    for key in [key for key in objects(other) if "00000-of-00002" in key]:
        asyncio.run(other.delete([key]))

    async def work() -> None:
        for rank in (0, 1):
            await put(spool, part(5, 2, rank, 2), state_of(6), one, origin=part(1).checkpoint)
        await put(spool, part(6, 2, 0, 2), state_of(6), other, origin=part(1).checkpoint)  # it speaks for the attempt

    asyncio.run(work())
    name = part(5, 2).checkpoint.name
    for key in [key for key in objects(one) if is_chunk(key) and f"{name}/00001/" in key]:
        asyncio.run(flip(one, key))
    with reader(one=one, other=other) as opened:
        for found in (opened.download(tmp_path / "out"), opened.restore(into(), rank=1)):
            assert found.step == 1 and "do not belong together" in str(found.skipped)


# -- opening ----------------------------------------------------------------------------------------------------------


def test_it_works_where_a_loop_is_running_as_in_a_notebook(spool):
    store = MemoryStore()
    saved(spool, 1, stores=(store,))

    async def cell() -> int:
        with reader(tier=store) as opened:
            return opened.restore(into()).step

    assert asyncio.run(cell()) == 1


def test_a_bucket_is_read_by_its_url(spool, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with serving(Bucket()) as bucket:

        async def work() -> None:
            store = open_store(parse_url(bucket.url()))
            for rank in range(2):
                await put(spool, part(1, rank=rank, world=2), state_of(1, rank), store)
            await store.aclose()

        asyncio.run(work())
        before, state = dict(bucket.objects), into()
        with tierd.open(bucket.url(), "run") as opened:
            assert [one.tiers for one in opened.checkpoints()] == [("s3",)]
            assert opened.restore(state, rank=1).tier == "s3"
            opened.restore(state, only=("model", "optimizer"))
        assert same(state, state_of(1, rank=1)) and bucket.objects == before


def test_an_encrypted_tier_is_read_with_its_key(tmp_path, spool):
    (tmp_path / "tier").mkdir()
    for name, byte in (("key", "1f"), ("other", "2e")):
        (tmp_path / name).write_text(byte * 32 + "\n")
        (tmp_path / name).chmod(0o600)

    opened = tierd.open(tmp_path / "tier", "run", key_file=tmp_path / "key")
    (store,) = opened.tiers.stores.values()  # encrypts as a daemon's would
    asyncio.run(put(spool, part(1), state_of(1), store))
    opened.close()
    with tierd.open([str(tmp_path / "tier")], "run", key_file=str(tmp_path / "key")) as opened:
        state = into()
        opened.restore(state)
        assert same(state, state_of(1))
    for key in (None, tmp_path / "other"):
        with tierd.open(tmp_path / "tier", "run", key_file=key) as opened, pytest.raises(StoreUnavailable, match="key"):
            opened.restore(into())


def test_open_refuses_invalid_arguments_at_once(tmp_path):
    for urls, match in (([], "at least one"), ("tier", "absolute"), (["s3://bucket/p", "s3://bucket/p"], "same place")):
        with pytest.raises(ConfigError, match=match):
            tierd.open(urls, "run")
    with pytest.raises(ConfigError, match="run"):
        tierd.open(tmp_path, "no/run")
    for urls in (None, 3, b"/tier", [None], (tmp_path, b"/tier")):
        with pytest.raises(ConfigError, match=r"^tierd\.open\(url_or_urls\): a URL, a path or a list of them, and not"):
            tierd.open(urls, "run")
    with pytest.raises(ConfigError, match=r"^tierd\.open\(key_file\): a path, and not a"):
        tierd.open(tmp_path, "run", key_file=3)
    with pytest.raises(ConfigError, match="openssl rand"):
        tierd.open(tmp_path, "run", key_file=tmp_path / "none")
    with (
        tierd.open(tmp_path / "typo", "run") as opened,
        pytest.raises(StoreUnavailable, match=r"file: .*typo does not exist: mount it; mkdir only for a new tier"),
    ):
        opened.restore(into())


async def test_the_how_to_evaluates_elsewhere(tmp_path, spool, capsys):
    (tmp_path / "tier").mkdir()
    model = torch.nn.Linear(3, 2)
    store = FileStore(tmp_path / "tier")
    for rank in range(4):
        state = {"model": model, "rng": torch.tensor(rank)}
        await put(spool, part(1, rank=rank, world=4, run="llama-7b"), state, store, metrics={"val_loss": 0.5})
    await store.aclose()
    page = (Path(tierd.__file__).parent.parent / "docs" / "howto" / "evaluate.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    other = torch.nn.Linear(3, 2)
    exec(
        code.replace("s3://bucket/checkpoints", f"file://{tmp_path}/tier"),
        {"tierd": tierd, "model": other, "evaluate": lambda model: model.weight.sum().item()},
    )
    assert capsys.readouterr().out.splitlines() == [
        "1 {'val_loss': 0.5} ('file',)",
        f"1 {model.weight.sum().item()}",
    ]


def test_a_closed_reader_and_one_of_the_parent_say_so(spool):
    store = MemoryStore()
    saved(spool, 1, stores=(store,))
    opened = reader(tier=store)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            opened.checkpoints()
        except ConfigError as error:
            os.write(write, str(error).encode())
        opened.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(read, 1000)
    assert len(opened.checkpoints()) == 1
    opened.close()
    opened.close()
    with pytest.raises(ConfigError, match="closed"):
        opened.checkpoints()
