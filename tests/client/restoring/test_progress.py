"""What a trainer sees of a fetch: progress while bytes come, an end when none do, and the rest the next time."""

from __future__ import annotations

import logging
import time
import weakref

import pytest
import torch
from support.doubles import Double, flipped, is_chunk
from support.timed import timed_client
from support.training import same, tensors
from support.waiting import until
from support.world import Daemon, commit, content, hurry, part

import tierd
from tierd.client.client_timings import USUAL_TIMINGS
from tierd.client.restoring import verified_chunks
from tierd.client.restoring.part_fetch import FetchProgress
from tierd.core.errors import ConfigError, StoreUnavailable
from tierd.core.manifest import TENSORS
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Fetch
from tierd.spool import direct_io
from tierd.spool.spool import Spool

PART = part(7)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)
    monkeypatch.setattr("tierd.ipc.messages.HEARTBEAT", 0.02)


@pytest.fixture
def spool(tmp_path) -> Spool:
    return Spool(tmp_path / "spool")


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class AfterReport(Double):
    """Serves one chunk of a fetch; the others follow when `reported` has a line that counts bytes."""

    reported: list[dict] | None = None  # no fetch yet
    served = 0

    async def get(self, key, into=None):
        if is_chunk(key) and self.reported is not None:
            self.served += 1
            if self.served > 1:
                await until(lambda: any(line.get("done") for line in self.reported))
        return await super().get(key, into)


def test_daemon_reports_the_progress_of_a_fetch(spool):
    store = AfterReport()
    commit(spool, PART)
    with Daemon(spool.root, {"tier": store}) as daemon, DaemonConnection(spool) as link:
        daemon.settle()
        spool.remove([PART])
        reported = store.reported = []
        assert link.ask(Fetch(part=PART), on_progress=reported.append)["tiers"] == ["tier"]
    progress = [(line["done"], line["total"]) for line in reported if line.get("total")]
    whole = sum(map(len, content(7).values()))
    assert progress == sorted(progress) and {total for _, total in progress} == {whole}
    assert any(0 < done < whole for done, _ in progress)
    assert ["tier"] in [line.get("tiers") for line in reported]


def test_fetch_may_take_its_time_while_bytes_arrive(clock, caplog):
    watch = FetchProgress(PART)
    with caplog.at_level(logging.INFO, "tierd"):
        for done in range(100):
            clock[0] += USUAL_TIMINGS.stalled_s - 1
            watch({"working": True, "done": done * 10**9, "total": 96 * 10**9, "tiers": ["s3"]})
    assert "step 7" in caplog.text and "from s3: 41.0 of 96.0 GB" in caplog.text


def test_fetch_logs_a_line_each_minute_and_a_line_at_the_end(clock, caplog):
    watch = FetchProgress(PART)
    with caplog.at_level(logging.INFO, "tierd"):
        for done in range(31):
            clock[0] += 5
            watch({"working": True, "done": done * 10**9, "total": 30 * 10**9, "tiers": ["s3"]})
    said = [one.getMessage().split("from s3: ")[1] for one in caplog.records]
    assert said == [
        "0.0 of 30.0 GB",
        "12.0 of 30.0 GB, 0.20 GB/s, 90 s left",
        "24.0 of 30.0 GB, 0.20 GB/s, 30 s left",
        "30.0 of 30.0 GB, 0.20 GB/s, 0 s left",
    ]


@pytest.mark.parametrize("there", [False, True])
def test_only_a_damaged_part_is_called_not_whole(spool, caplog, there):
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        saved = checkpointer.save(3, tensors(3))
        saved.wait()
    with Daemon(spool.root, {"tier": Double()}, keep=100) as daemon:
        daemon.settle()
        if there:
            (spool.path(saved.part) / TENSORS).unlink()
        else:
            spool.remove([saved.part])  # as on a fresh node
        with caplog.at_level(logging.INFO, "tierd"), tierd.Checkpointer(spool.root, "run") as checkpointer:
            checkpointer.restore(tensors(10**6))
    said = [one.getMessage() for one in caplog.records]
    assert any("not whole in the spool" in one for one in said) == there
    assert any("is fetched from the tiers" in one for one in said) != there


@pytest.mark.parametrize("line", [{}, {"done": 5, "total": 9, "tiers": []}])
def test_fetch_that_brings_no_byte_is_given_up(clock, line):
    watch = FetchProgress(PART)
    watch(line)
    clock[0] += USUAL_TIMINGS.stalled_s - 1
    watch(line)
    clock[0] += 1
    with pytest.raises(StoreUnavailable, match="no byte"):
        watch(line)


def test_restore_from_a_tier_that_hangs_ends_and_the_next_restore_continues(spool, monkeypatch):
    store = Double()
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        first = checkpointer.save(3, tensors(3)).part
        first_done = checkpointer.save(4, tensors(4))
        first_done.wait()
    with Daemon(spool.root, {"tier": store}, keep=100) as daemon:
        daemon.settle()
        for one in (first, first_done.part):
            spool.remove([one])
        chunks: list[str] = []

        def hang(operation: str, key: str) -> None:
            if operation == "get" and is_chunk(key):
                chunks.append(key)
                store.delay = 1000.0 if len(chunks) == 1 else 0.0

        store.before = hang
        state = tensors(10**6)
        with tierd.Checkpointer(spool.root, "run") as checkpointer:
            timed_client(monkeypatch, stalled_s=0.5)
            with pytest.raises(StoreUnavailable, match="no byte"):
                checkpointer.restore(state)
            with pytest.raises(ConfigError, match="the last restore failed"):  # live tensors may be partly new
                checkpointer.save(5, state)
            timed_client(monkeypatch, stalled_s=600.0)
            store.before, store.delay = None, 0.0
            assert checkpointer.restore(state).step == 4
        assert same(state, 4)
        assert not spool.has(first_done.part), "nothing was written to the spool"


def test_bad_copy_holds_no_memory_while_it_is_repaired(spool, monkeypatch):
    store, held, seen = Double(), [], []

    def noted(size: int) -> memoryview:
        memory = direct_io.memory_for(size)
        if size >= direct_io.LARGE:
            held.append(weakref.ref(memory.obj))
        return memory

    with Daemon(spool.root, {"tier": store}, keep=100, keep_local=100) as daemon:
        with tierd.Checkpointer(spool.root, "run") as checkpointer:
            state = {"weights": torch.arange(1_000_000.0)}
            saved = checkpointer.save(1, state)
            saved.wait()
        daemon.settle()
        path = spool.path(saved.part) / TENSORS
        path.write_bytes(flipped(path.read_bytes()))
        monkeypatch.setattr(verified_chunks, "memory_for", noted)
        monkeypatch.setattr("tierd.client.saving.snapshot_handoff.HandoffClient.recall", lambda self, part: None)
        store.before = lambda operation, key: is_chunk(key) and seen.append(sum(one() is not None for one in held))
        with tierd.Checkpointer(spool.root, "run") as checkpointer:
            assert checkpointer.restore({"weights": torch.zeros(1_000_000)}).tier == "tier"
    assert held and seen and not any(seen)
