"""`tierd.dcp` in one process: torch's files in a part, verified whichever way they come back."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
import threading
from collections import deque

import numpy as np
import pytest
import torch
from support.doubles import contents, flip, flipped, is_chunk
from support.saved import files_of
from support.waiting import wait_until
from support.world import Daemon, attempt, commit, corrupt, part
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import tierd
import tierd.dcp
from tierd.cli import run
from tierd.client.checkpointer import internals
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptChunk,
    StateMismatch,
    StateRefused,
    StepRefused,
    StoreUnavailable,
)
from tierd.dcp import metadata as dcp_metadata
from tierd.dcp import save_steps as dcp_streams
from tierd.spool.spool import Spool
from tierd.state.aliasing import is_same_content
from tierd.stores.file_store import FileStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(step: int) -> dict:
    """Large tensors have chunks of their own, small ones share; all values tell the step."""
    noise = torch.Generator().manual_seed(step)
    return {
        "large": {str(number): torch.randn(700, 1000, generator=noise) for number in range(4)},
        "small": {str(number): torch.full((number + 1,), step, dtype=torch.int64) for number in range(20)},
        "scalar": torch.tensor(float(step)),
        "note": {"step": step, "names": [str(step)], "none": None},
    }


def empty() -> dict:
    blank = state(0)
    return {
        "large": {name: torch.zeros_like(one) for name, one in blank["large"].items()},
        "small": {name: torch.zeros_like(one) for name, one in blank["small"].items()},
        "scalar": torch.tensor(-1.0),
        "note": {"step": -1, "names": [""], "none": 0},
    }


def same(found: dict, step: int) -> bool:
    expected = state(step)
    return (
        all(torch.equal(found[kind][name], one) for kind in ("large", "small") for name, one in expected[kind].items())
        and found["scalar"] == expected["scalar"]
        and found["note"] == expected["note"]
    )


def save(ckpt: tierd.Checkpointer, step: int, **more: object) -> None:
    dcp.save(state(step), storage_writer=tierd.dcp.StorageWriter(ckpt, step, {"loss": step / 2}, **more))


def part_of(spool: Spool, step: int):
    [found] = [one for one in spool.parts() if one.checkpoint.step == step]
    return found


def swept(node: Daemon, place) -> None:
    def observe() -> bool:
        node.loop.call_soon_threadsafe(node.reconciler.wake)
        return not place.exists()

    wait_until(observe)


@pytest.fixture
def fresh(tmp_path, daemon):
    """A checkpointer on another node, with the same tier."""
    double = daemon._stores["tier"]
    with (
        Daemon(tmp_path / "fresh", {"tier": double}, keep=100, keep_local=100) as other,
        tierd.Checkpointer(other.spool.root, "run") as made,
    ):
        made.node = other
        yield made


@pytest.fixture
def tiered(spool, daemon):
    """A checkpointer beside a daemon with one tier, a `Double`."""
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        yield checkpointer


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_saved_state_is_loaded(local, spool, options):
    save(local, 3, **options)
    save(local, 4, **options)
    found_state = empty()
    found = tierd.dcp.load(found_state, local)
    assert same(found_state, 4)
    assert (found.step, found.tier, found.metrics, found.skipped) == (4, "local", {"loss": 2.0}, ())
    assert found.directory == spool.path(part_of(spool, 4)).parent
    older = empty()
    assert tierd.dcp.load(older, local, step=3).step == 3 and same(older, 3)


def test_load_converts_a_dtype_that_restore_refuses(local):
    weights = torch.tensor([1.0, 1.0 + 2**-20])
    local.save(1, {"weights": weights}).wait()
    state = {"weights": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(StateMismatch, match="weights"):
        local.restore(state)
    assert not state["weights"].any()
    assert tierd.dcp.load(state, local).step == 1
    assert torch.equal(state["weights"], weights.bfloat16())


def test_best_checkpoint_is_loaded_and_saves_through_dcp_count(spool):
    when = tierd.When(steps=2, best="loss")
    with tierd.Checkpointer(spool.root, "run", to=[], when=when) as checkpointer:
        assert checkpointer.due(2) and checkpointer.due(3)
        save(checkpointer, 3)
        assert not checkpointer.due(3) and not checkpointer.due(3, metrics={"loss": 1.5})
        save(checkpointer, 2)
        save(checkpointer, 5)
        assert not checkpointer.due(5, metrics={"loss": 1.0})
        found_state = empty()
        found = tierd.dcp.load(found_state, checkpointer, best="loss")
        assert found.step == 2 and same(found_state, 2)
        assert not checkpointer.due(3, metrics={"loss": 1.0}) and checkpointer.due(3, metrics={"loss": 0.9})
        with pytest.raises(CheckpointNotFound, match="metric 'f1'; there are: loss"):
            tierd.dcp.load(empty(), checkpointer, best="f1")
        reader = tierd.dcp.StorageReader(checkpointer, best="loss", mode="max")
        by_hand = empty()
        dcp.load(by_hand, storage_reader=reader)
        assert reader.step == 5 and reader.metrics == {"loss": 2.5} and same(by_hand, 5)


def test_a_fresh_start_is_none_and_a_reader_says_so(local):
    assert tierd.dcp.load(empty(), local) is None
    reader = tierd.dcp.StorageReader(local)
    assert reader.step is None
    with pytest.raises(CheckpointException, match="fresh start"):
        dcp.load(empty(), storage_reader=reader)


def test_launch_continues_from_the_loaded_checkpoint(local, spool):
    save(local, 3)
    before = local.attempt
    reader = tierd.dcp.StorageReader(local)
    assert reader.step == 3 and local.attempt > before
    dcp.load(empty(), storage_reader=reader)
    save(local, 4)
    assert spool.manifest(part_of(spool, 4)).origin == part_of(spool, 3).checkpoint


def test_a_reader_that_the_launch_left_behind_is_refused(local):
    save(local, 3)
    save(local, 4)
    for step in (5, None):
        reader = tierd.dcp.StorageReader(local, step=3)
        if step is not None:
            dcp.load(empty(), storage_reader=reader)
            save(local, step)
        else:
            tierd.dcp.load(empty(), local, step=3)
        attempt = local.attempt
        with pytest.raises(CheckpointException, match="make a new one"):
            dcp.load(empty(), storage_reader=reader)
        assert local.attempt == attempt


def test_state_that_dcp_cannot_plan_is_a_mismatch_and_an_interrupt_is_raised(local, monkeypatch):
    save(local, 3)
    before = local.attempt
    with pytest.raises(StateMismatch, match="other"):
        tierd.dcp.load(empty() | {"other": torch.zeros(3)}, local)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("tierd.dcp.storage_reader.OpenReader.read_data", interrupted)
    save(local, 4)  # nothing was loaded, so the launch goes on
    with pytest.raises(KeyboardInterrupt):
        tierd.dcp.load(empty(), local)
    assert local.attempt == before


@pytest.mark.parametrize("through", ["load", "a reader"])
def test_interrupted_load_blocks_saves_until_a_load_succeeds(local, monkeypatch, through):
    def load() -> None:
        if through == "load":
            tierd.dcp.load(empty(), local)
        else:
            dcp.load(empty(), storage_reader=tierd.dcp.StorageReader(local))

    def interrupted(*args):
        raise KeyboardInterrupt

    save(local, 3)
    with monkeypatch.context() as patch:
        patch.setattr("tierd.dcp.storage_reader.OpenReader.prepare_local_plan", interrupted)
        with pytest.raises((KeyboardInterrupt, CheckpointException)):
            load()
        if through == "load":
            save(local, 4)  # nothing was loaded, because DCP still planned
        else:  # the launch has gone on from the reader's checkpoint
            with pytest.raises(CheckpointException, match=r"because a reader of run step 3 .* was made"):
                save(local, 4)
        patch.undo()
        patch.setattr("tierd.dcp.storage_reader.load_tensor", interrupted)
        with pytest.raises((KeyboardInterrupt, CheckpointException)):
            load()
    with pytest.raises(ConfigError, match="nothing is saved, because the last restore failed"):
        local.save(5, {"a": 1})
    with pytest.raises(CheckpointException, match="nothing is saved, because the last restore failed"):
        save(local, 5)
    load()
    save(local, 5)


def test_a_load_through_a_reader_that_fails_while_dcp_plans_replaces_nothing(local, spool):
    save(local, 3)
    local.close()
    refused = r"nothing is saved, because a reader of .*nothing has been loaded through it"
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        reader = tierd.dcp.StorageReader(checkpointer)
        with pytest.raises(ConfigError, match=refused):  # as in a signal's handler
            checkpointer.save(1, empty())
        with pytest.raises(CheckpointException, match="new_head"):
            dcp.load(empty() | {"new_head": torch.zeros(2)}, storage_reader=reader)
        with pytest.raises(ConfigError, match=refused):
            checkpointer.save(1, empty())
        dcp.load(empty(), storage_reader=reader)
        save(checkpointer, 4)
    assert [part.checkpoint.step for part in spool.parts()] == [3, 4]


def test_a_step_is_saved_once(local):
    save(local, 3)
    with pytest.raises(CheckpointException, match=r"step 3.*already committed"):
        save(local, 3)  # where all ranks are told
    with pytest.raises(StepRefused, match=r"step 3.*already committed"):
        local.save(3, {"a": 1})
    writer = tierd.dcp.StorageWriter(local, 5)
    dcp.save({"a": 1}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="already committed"):
        dcp.save({"a": 1}, storage_writer=writer)


class Slow(DefaultSavePlanner):
    """Plans when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def create_global_plan(self, all_plans):
        self.reached.set()
        assert self.go.wait(60)
        return super().create_global_plan(all_plans)


def test_an_async_save_is_of_the_moment_when_it_was_called(local, spool):
    writer, planner = tierd.dcp.StorageWriter(local, metrics={"loss": 1.0}), Slow()
    first = dcp.async_save(state(1), checkpoint_id="step-1", storage_writer=writer, planner=planner)
    assert planner.reached.wait(60)
    writer.metrics = {"loss": 2.0}
    with pytest.raises(ConfigError, match="still saves step 1: wait for it"):
        dcp.async_save(state(2), checkpoint_id="step-2", storage_writer=writer)
    with pytest.raises(ConfigError, match="still saves step 1: wait for it"):
        dcp.save(state(2), checkpoint_id="step-2", storage_writer=writer)
    planner.go.set()
    first.result(60)
    for step in (2, 3):
        dcp.async_save(state(step), checkpoint_id=f"step-{step}", storage_writer=writer).result(60)
    found = [(one.checkpoint.step, spool.manifest(one).numbers["loss"]) for one in spool.parts()]
    assert found == [(1, 1.0), (2, 2.0), (3, 2.0)]


def test_an_async_save_over_a_load_is_of_no_attempt(local, spool):
    save(local, 1)
    planner = Slow()
    pending = dcp.async_save(state(9), storage_writer=tierd.dcp.StorageWriter(local, 9), planner=planner)
    assert planner.reached.wait(60)
    assert tierd.dcp.load(empty(), local).step == 1
    planner.go.set()
    with pytest.raises(CheckpointException, match="went on from another checkpoint while this was being saved"):
        pending.result(60)
    assert [one.checkpoint.step for one in spool.parts()] == [1]


class Extra(tierd.dcp.StorageWriter):
    """Writes past the stream."""

    def finish(self, metadata, results):
        (self.path / "extra.bin").write_bytes(b"x")
        super().finish(metadata, results)


def test_a_file_that_nobody_digested_as_it_was_written_fails_the_save(local, spool):
    with pytest.raises(CheckpointException, match=r"extra\.bin"):
        dcp.save(state(3), storage_writer=Extra(local, 3))
    assert not spool.parts()


def test_a_kept_writer_takes_the_step_from_the_checkpoints_id(local, spool, tmp_path):
    writer = tierd.dcp.StorageWriter(local)
    for name in ("step-100", "ckpt/global_step_200", "300"):
        dcp.save({"a": torch.ones(3)}, checkpoint_id=str(tmp_path / name), storage_writer=writer)
    assert [one.checkpoint.step for one in spool.parts()] == [100, 200, 300]
    assert not (tmp_path / "step-100").exists()
    with pytest.raises(ConfigError, match=r"'last'.*no number ends it"):
        dcp.save({"a": torch.ones(3)}, checkpoint_id="last", storage_writer=writer)
    with pytest.raises(CheckpointException, match="which step"):
        dcp.save({"a": torch.ones(3)}, storage_writer=tierd.dcp.StorageWriter(local))


def test_pickled_writer_carries_names_and_saves_where_it_is_unpickled(local, spool):
    writer = tierd.dcp.StorageWriter(local, 7, {"loss": 1.0}, cache_staged_state_dict=False)
    data = pickle.dumps(writer)
    assert len(data) < 4096
    dcp.save(state(7), storage_writer=pickle.loads(data))
    manifest = spool.manifest(part_of(spool, 7))
    assert manifest.numbers == {"loss": 1.0} and manifest.attempt == local.attempt
    with pytest.raises(StepRefused):  # although nobody told this launch
        local.save(7, {"a": 1})
    with pytest.raises(CheckpointException, match="already committed"):
        dcp.save(state(7), storage_writer=pickle.loads(data))
    writer = pickle.dumps(tierd.dcp.StorageWriter(local))
    dcp.save(state(8), checkpoint_id="step-8", storage_writer=pickle.loads(writer))
    dcp.save({"a": 1}, checkpoint_id="/data/llama-v2", storage_writer=tierd.dcp.StorageWriter(local, 500))
    assert spool.has(part_of(spool, 8)) and spool.has(part_of(spool, 500))


@pytest.mark.parametrize("threads", [1, 3])
def test_file_that_differs_from_the_written_bytes_fails_the_save(local, spool, monkeypatch, threads):
    """A bit that flips between torch's memory and the file is found by the read that digests the chunks."""
    write = dcp_streams.write_all

    def flipping(fd, data, offset):
        changed = bytearray(data)
        changed[len(changed) // 2] ^= len(changed) > 100_000
        return write(fd, changed, offset)

    monkeypatch.setattr(dcp_streams, "write_all", flipping)
    with pytest.raises(CheckpointException, match=r"CorruptChunk.*__0_.*that were written"):
        save(local, 3, thread_count=threads)
    assert spool.parts() == [] and spool.leftovers() == [] and not list((spool.control / "stage").iterdir())
    monkeypatch.undo()
    save(local, 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the threads are torch's
@pytest.mark.parametrize("threads", [1, 3])
def test_a_stream_that_fails_in_any_thread_fails_the_save(local, spool, monkeypatch, threads):
    """torch loses what its second thread raises, and writes `.metadata` without those entries."""

    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp_streams, "write_all", full)
    with pytest.raises(CheckpointException, match="SpoolFull"):
        save(local, 3, thread_count=threads)
    for thread in threading.enumerate():  # whom torch does not wait for
        if "_write_files" in thread.name:
            thread.join(60)
    assert spool.parts() == []
    assert spool.leftovers() == [f"stage/{path.name}" for path in (spool.control / "stage").iterdir()]


def test_daemon_is_notified_of_a_save_that_dcp_could_not_write(daemon, spool, monkeypatch):
    journal = daemon.reconciler.journal
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr("tierd.dcp.storage_writer.describe_directory", _torn)
            for tries, step in enumerate((1, 2, 3), 1):
                with pytest.raises(CheckpointException, match="CorruptChunk"):
                    save(ckpt, step)
                wait_until(lambda tries=tries: journal.counters["persist_failures"] == tries)
        failed = [event for event in journal.events if event.what == "persist failed"]
        assert [(event.step, event.rank, event.why) for event in failed] == [(n, 0, "torn") for n in (1, 2, 3)]
        wait_until(lambda: [alert.doing for alert in journal.alerts()] == ["save"])
        save(ckpt, 4)
        daemon.settle()
        assert not journal.alerts()


def _torn(*_: object) -> None:
    raise CorruptChunk("torn")


def test_each_file_is_synced_once(local, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    save(local, 3, thread_count=2)
    files = [one for one in synced if one.endswith((".distcp", ".metadata", ".tmp"))]
    assert len(files) == len(set(files)) == 3


def test_a_stream_that_seeks_is_refused(tmp_path):
    with dcp_streams.DigestingFileSystem().create_stream(tmp_path / "file", "wb") as stream:
        stream.write(b"abc")
        assert stream.tell() == 3
        with pytest.raises(io.UnsupportedOperation):
            stream.seek(0)


# -- metadata ---------------------------------------------------------------------------------------------------------


def test_huge_metadata_is_refused_unread(local, monkeypatch):
    save(local, 3)
    monkeypatch.setattr(dcp_metadata, "MAX_SIZE", 10)
    monkeypatch.setattr("tierd.dcp.storage_reader.OpenReader.prepare_local_plan", None)
    with pytest.raises(CheckpointNotFound, match="at most 10 are read"):
        tierd.dcp.StorageReader(local)


class OwnStream(io.BytesIO):
    """Another such value."""


class Own:
    """A value that DCP pickles."""

    def __init__(self) -> None:
        self.value = 5


def test_an_entry_that_must_be_unpickled_is_refused_unless_the_caller_says_so(local):
    whole = state(3) | {"own": Own()}
    dcp.save(whole, storage_writer=tierd.dcp.StorageWriter(local, 3))
    before = empty() | {"own": Own()}
    before["own"].value = 1
    with pytest.raises(StateRefused, match=r"'own' holds .*Own.*add_safe_globals"):
        tierd.dcp.load(before, local)
    assert not before["large"]["0"].any() and before["own"].value == 1  # nothing was loaded
    assert tierd.dcp.load(before, local, weights_only=False).step == 3
    assert before["own"].value == 5
    with torch.serialization.safe_globals([Own]):
        assert tierd.dcp.load(before, local).step == 3


class Odd(DefaultSavePlanner):
    """Keeps an object of its own in the metadata."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data={"own": Own()})


def test_metadata_that_could_not_be_read_again_fails_the_save(local, spool):
    with pytest.raises(CheckpointException, match=r"\.metadata: it names .*Own"):
        dcp.save(state(3), storage_writer=tierd.dcp.StorageWriter(local, 3), planner=Odd())
    assert not spool.parts() and not list((spool.control / "stage").iterdir())


def test_bytes_in_a_stream_are_plain_and_an_own_class_is_not(local):
    dcp.save({"losses": io.BytesIO(b"abc")}, storage_writer=tierd.dcp.StorageWriter(local, 3))
    found = {"losses": io.BytesIO()}
    assert tierd.dcp.load(found, local).step == 3 and found["losses"].getvalue() == b"abc"
    dcp.save({"losses": OwnStream(b"abc")}, storage_writer=tierd.dcp.StorageWriter(local, 4))
    with pytest.raises(StateRefused, match="OwnStream"):
        tierd.dcp.load(found, local)


# -- from the tier ----------------------------------------------------------------------------------------------------


def test_fresh_node_loads_from_the_tier_and_keeps_no_chunk_for_long(tiered, fresh, daemon):
    save(tiered, 3)
    daemon.settle()
    found_state = empty()
    found = tierd.dcp.load(found_state, fresh)
    assert same(found_state, 3) and found.tier == "tier"
    fresh.node.settle()
    for place in (fresh.node.spool.control / "fetch").iterdir():
        swept(fresh.node, place)


def test_only_the_wanted_chunks_are_fetched(tiered, fresh, daemon):
    save(tiered, 3)
    daemon.settle()
    double = daemon._stores["tier"]
    double.calls.clear()
    some = {"large": {"2": torch.zeros(700, 1000)}, "scalar": torch.tensor(0.0)}
    reader = tierd.dcp.StorageReader(fresh)
    dcp.load(some, storage_reader=reader)
    expected = state(3)
    assert torch.equal(some["large"]["2"], expected["large"]["2"]) and some["scalar"] == 3
    manifest = internals(tiered).spool.manifest(part_of(internals(tiered).spool, 3))
    got = {key for operation, key in double.calls if operation == "get" and is_chunk(key)}
    sizes = {chunk.xxh3_128: chunk.size for chunk in manifest.chunks()}
    brought = sum(sizes[key.rpartition("/")[2].partition(".")[0]] for key in got)
    assert 700 * 1000 * 4 < brought < manifest.size / 2
    [place] = (fresh.node.spool.control / "fetch").iterdir()
    assert sum(path.stat().st_blocks * 512 for path in place.rglob("*.distcp")) < manifest.size / 2
    # What another reader brought is there, as long as one of them reads.
    other = tierd.dcp.StorageReader(fresh)
    double.calls.clear()
    dcp.load(some, storage_reader=other)
    assert not [key for operation, key in double.calls if operation == "get" and is_chunk(key)]
    reader.close()
    fresh.node.settle()
    assert place.is_dir()
    other.close()
    swept(fresh.node, place)


def test_whole_fetch_uses_the_chunks_of_a_reader_and_the_reader_continues(tiered, fresh, daemon):
    save(tiered, 3)
    daemon.settle()
    reader = tierd.dcp.StorageReader(fresh)
    fresh.node.call(fresh.node.reconciler.repairs.fetch(part_of(internals(tiered).spool, 3)))
    assert fresh.node.spool.parts() == internals(tiered).spool.parts()
    found = empty()
    dcp.load(found, storage_reader=reader)
    assert same(found, 3)


def test_flipped_bit_is_repaired_in_place(tiered, spool, daemon):
    save(tiered, 3)
    daemon.settle()
    path = spool.path(part_of(spool, 3)) / "__0_0.distcp"
    right = path.read_bytes()
    corrupt(path)
    found_state = empty()
    found = tierd.dcp.load(found_state, tiered)
    assert same(found_state, 3) and found.tier == "tier"
    assert path.read_bytes() == right
    assert daemon.reconciler.journal.counters["healed_chunks"] == 1


@pytest.mark.parametrize("victim", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_the_spool_is_enough_while_no_tier_answers(tiered, spool, daemon, victim):
    save(tiered, 3)
    daemon.settle()
    daemon._stores["tier"].error = StoreUnavailable("down")
    found = empty()
    assert tierd.dcp.load(found, tiered).tier == "local" and same(found, 3)
    save(tiered, 4)
    corrupt(spool.path(part_of(spool, 4)) / victim)
    with pytest.raises(StoreUnavailable):  # a place that does not answer is no reason to step back
        tierd.dcp.load(found, tiered)


@pytest.mark.parametrize("victim", ["__0_0.distcp", ".metadata"])
def test_checkpoint_that_is_corrupt_everywhere_steps_back(tiered, fresh, spool, daemon, victim):
    save(tiered, 3)
    daemon.settle()
    save(tiered, 4)
    daemon.settle()
    part = part_of(spool, 4)
    [file] = [one for one in spool.manifest(part).files if one.path == victim]
    index = max(range(len(file.chunks)), key=lambda number: file.chunks[number].size)
    key, at = file.chunks[index].xxh3_128, sum(one.size for one in file.chunks[:index])
    double = daemon._stores["tier"]
    [found] = [one for one in daemon.call(contents(double)) if key in one and is_chunk(one)]
    daemon.call(flip(double, found))
    path = spool.path(part) / victim
    path.write_bytes(flipped(path.read_bytes(), at + file.chunks[index].size // 2))
    for ckpt in (fresh, tiered):
        found_state = empty()
        found = tierd.dcp.load(found_state, ckpt)
        assert found.step == 3 and same(found_state, 3)
        assert [one.step for one in found.skipped] == [4]
    assert not spool.has(part)


def test_error_without_a_usable_checkpoint_names_the_skipped_checkpoints(local, spool):
    save(local, 3)
    save(local, 4)
    for step in (3, 4):
        corrupt(spool.path(part_of(spool, step)) / "__0_0.distcp")
    with pytest.raises(CheckpointNotFound, match=r"(?s)skipped step 4.*__0_0.distcp.*skipped step 3"):
        tierd.dcp.load(empty(), local)


# -- beside what else there is ----------------------------------------------------------------------------------------


def test_restore_of_a_dcp_checkpoint_names_the_function_that_loads_it(local):
    save(local, 3)
    with pytest.raises(StateMismatch, match=r"tierd\.dcp\.load"):
        local.restore({"scalar": torch.tensor(0.0)})


def test_checkpoint_of_save_is_loaded_as_if_dcp_had_written_it(local):
    """Every kind of value: what DCP flattens, and what it takes whole."""
    odd = {
        "complex": torch.randn(3, 4, dtype=torch.complex64),
        "number": torch.tensor(2 + 3j),
        "bits": torch.randn(6, 5).to(torch.bfloat16),
        "turned": torch.randn(6, 5).t(),
        "nothing": torch.empty(0, 3),
        "in a list": [torch.arange(4), {"deep": torch.arange(5)}],
        "array": np.arange(12).reshape(3, 4),
        "in a tuple": (1, "two", np.float32(3)),
        "set": {1, 2},
    }
    local.save(3, {**state(3), "odd": odd}).wait()
    blank = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for name, value in odd.items()
    } | {"in a list": [torch.zeros_like(odd["in a list"][0]), {"deep": torch.zeros(5, dtype=torch.int64)}]}
    found = {**empty(), "odd": blank}
    assert tierd.dcp.load(found, local).step == 3
    assert same(found, 3)
    assert is_same_content(found["odd"], odd), found["odd"]


def test_tensors_that_dcp_takes_in_one_value_are_read(local):
    """It enters mappings and lists alone, so a tuple or a deque is one value to it, with all that it holds."""
    odd = {
        "tuple": (torch.arange(3), {"deep": [torch.randn(2, 2).to(torch.bfloat16)]}),
        "in a list": [(torch.randn(3, dtype=torch.complex64), 1)],
        "deque": deque([torch.arange(4), np.arange(2), b"x" * 100_000], maxlen=3),
        "nested": {"deque": deque([(torch.tensor(2 + 3j), torch.empty(0, 3))])},
    }
    local.save(3, {"scalar": torch.tensor(3.0), "odd": odd}).wait()
    found = {"scalar": torch.tensor(0.0), "odd": dict.fromkeys(odd) | {"nested": {"deque": None}}}
    assert tierd.dcp.load(found, local).step == 3
    assert found["scalar"] == 3 and is_same_content(found["odd"], odd), found["odd"]


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["arrays", "tensors"])
def test_deques_that_ranks_saved_are_compared(spool, make):
    for rank in (0, 1):
        with tierd.Checkpointer(spool.root, "run", rank=rank, world_size=2, attempt=attempt(1), to=[]) as saving:
            saving.save(1, {"same": deque([make([5])]), "own": deque([make([rank])])}).wait()
    with tierd.Checkpointer(spool.root, "run", to=[]) as alone:
        found = {"same": None}
        assert tierd.dcp.load(found, alone).step == 1 and list(found["same"]) == [5]
        with pytest.raises(StateMismatch, match="'own': it differs between the 2 ranks"):
            tierd.dcp.load({"own": None}, alone)


def test_parts_of_two_histories_are_not_loaded(spool):
    files = files_of({"same": torch.arange(5)})
    for rank, origin in enumerate((part(1).checkpoint, None)):
        commit(spool, part(1, rank=rank, world=2), files)
        commit(spool, part(5, 2, rank, 2), files, origin=origin)
    with tierd.Checkpointer(spool.root, "run", to=[]) as alone:
        found = tierd.dcp.load({"same": torch.zeros(5, dtype=torch.int64)}, alone)
    assert found.step == 1 and "do not belong together" in found.skipped[0].reason


def test_checkpoint_of_stage_is_not_read_as_dcp(local):
    with local.stage(3) as directory:
        (directory / "weights.bin").write_bytes(b"x")
    with pytest.raises(StateMismatch, match=r"through stage\(\): .*`directory`"):
        tierd.dcp.load(empty(), local)


@pytest.mark.parametrize("how", ["save", "dcp"])
def test_optimizer_that_took_no_step_gets_the_saved_state(local, how):
    """DCP fills tensors that are there; there are none. SGD without momentum has None in their place."""
    model = torch.nn.Linear(40, 30)
    for step, kind in enumerate((torch.optim.AdamW, torch.optim.SGD)):
        optimizer = kind(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        if how == "save":
            local.save(step, {"optimizer": optimizer}).wait()
        else:
            dcp.save({"optimizer": optimizer}, storage_writer=tierd.dcp.StorageWriter(local, step))
        other = kind(torch.nn.Linear(40, 30).parameters(), lr=0.5)
        assert tierd.dcp.load({"optimizer": other}, local).step == step
        assert is_same_content(other.state_dict(), optimizer.state_dict())


def test_a_generator_is_not_loaded_through_dcp(local):
    local.save(3, {"scalar": torch.tensor(1.0), "dice": torch.Generator()}).wait()
    found = {"scalar": torch.tensor(0.0)}
    assert tierd.dcp.load(found, local).step == 3 and found["scalar"] == 1
    with pytest.raises(StateMismatch, match=r"'dice': a torch\.Generator"):
        tierd.dcp.load({"dice": None}, local)


def test_a_dcp_checkpoint_that_was_staged_is_loaded_too(local):
    with local.stage(3) as directory:
        dcp.save(state(3), storage_writer=dcp.FileSystemWriter(directory))
    found = empty()
    assert tierd.dcp.load(found, local).step == 3 and same(found, 3)


def test_torch_alone_reads_a_checkpoint_restored_from_a_tier(spool, tmp_path, quick):
    tier = tmp_path / "tier"
    tier.mkdir()
    with Daemon(spool.root, {"tier": FileStore(tier)}) as daemon, tierd.Checkpointer(spool.root, "run") as ckpt:
        save(ckpt, 3)
        daemon.settle()
    target = tmp_path / "out"
    assert run(["restore", f"file://{tier}", "--run", "run", "--to", str(target)]) == 0
    shutil.copy(target / "00000-of-00001" / ".metadata", target)
    found = empty()
    dcp.load(found, storage_reader=dcp.FileSystemReader(target))
    assert same(found, 3)
