"""A `Checkpointer` that is told that it ends: `due`, the save, `close(deadline=…)`, alone and on several ranks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.doubles import Double
from support.metadata import serving, wait_for
from support.preemption_fixtures import usual  # noqa: F401
from support.ranks import Group, environment
from support.training import restored, same, tensors
from support.waiting import wait_until
from support.world import Daemon

import tierd
from tierd.client.checkpointer import internals
from tierd.client.preemption import notices
from tierd.client.preemption.agreement import Notice
from tierd.client.preemption.cloud_notices import ADDRESS
from tierd.client.preemption.notices import SIGNALS
from tierd.client.saving import save_pipeline
from tierd.core.errors import ConfigError, StoreUnavailable
from tierd.spool.spool import Spool

PREEMPTION = tierd.When(steps=1000, preemption=True)
TRAINER = Path(__file__).parents[2] / "support" / "preempted.py"


def made(spool: Spool, when: tierd.When = PREEMPTION, **options) -> tierd.Checkpointer:
    return tierd.Checkpointer(spool.root, "run", when=when, **{"to": [], **options})


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_makes_a_checkpoint_due_once(spool, caplog, number) -> None:
    with made(spool) as ckpt, caplog.at_level(logging.WARNING, "tierd"):
        assert not ckpt.due(1) and ckpt.notice is None
        os.kill(os.getpid(), number)
        assert ckpt.due(2) and ckpt.due(3), "until a save counts"
        assert ckpt.notice == f"{number.name} on {socket.gethostname()}"
        ckpt.save(3, tensors(3)).wait()
        os.kill(os.getpid(), number)
        assert not ckpt.due(4), "the same notice again"
    assert same(restored(spool, 3)[1], 3)
    assert caplog.text.count("a checkpoint is due at step 2") == 1
    assert signal.getsignal(number) == signal.SIG_DFL


def test_without_preemption_a_signal_is_none_of_tierds_business(spool) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with made(spool, tierd.When(steps=1)) as ckpt:
        assert [signal.getsignal(number) for number in SIGNALS] == before and ckpt.notice is None


def test_notice_overrides_best_only_and_a_busy_save(spool, monkeypatch) -> None:
    real, go_on = save_pipeline.write_part, threading.Event()

    def slow(*arguments, **options):
        assert go_on.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(save_pipeline, "write_part", slow)
    when = tierd.When(best="loss", best_only=True, preemption=True)
    with made(spool, when, when_busy="skip") as ckpt:
        assert ckpt.due(1, metrics={"loss": 1.0})
        ckpt.save(1, tensors(1))
        os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.due(2, metrics={"loss": 5.0}), "worse, and the last one"
        threading.Timer(0.3, go_on.set).start()
        ckpt.save(2, tensors(2)).wait()
    assert ckpt.stats.skipped == 0


def test_another_thread_cannot_ask_for_signals_and_nothing_is_left_behind(spool) -> None:
    said: list[BaseException] = []

    def work() -> None:
        try:
            made(spool)
        except ConfigError as error:
            said.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert "make the Checkpointer in the main thread" in str(said[0])
    made(spool).close()


def test_a_clouds_notice_is_read_where_it_is_asked_for_and_nowhere_else(spool, monkeypatch, caplog) -> None:
    monkeypatch.setattr(notices, "CLOUD_POLL_S", 0.05)
    with serving() as metadata:
        monkeypatch.setenv(ADDRESS, metadata.address)
        with made(spool) as ckpt:  # this is no machine of a cloud
            assert not ckpt.due(1)
        assert not metadata.asked
        metadata.broken = 500
        with made(spool, tierd.When(preemption="ec2")) as ckpt, caplog.at_level(logging.WARNING, "tierd"):
            wait_for(metadata, "/latest/meta-data/spot/instance-action")
            assert not ckpt.due(1)
            metadata.action, metadata.broken = {"action": "stop", "time": "2026-11-23T08:22:00Z"}, None
            wait_until(lambda: ckpt.due(2))
            assert ckpt.notice == f"EC2: stop at 2026-11-23T08:22:00Z (node {socket.gethostname()})"
            ckpt.save(2, tensors(2)).wait()
            metadata.asked.clear()
            wait_for(metadata, "/latest/meta-data/spot/instance-action")
            assert not ckpt.due(3), "it is there to be read for two minutes, and counts once"
    assert caplog.text.count("HTTP 500; asked again") == 1


# -- close ------------------------------------------------------------------------------------------------------------


def test_close_sends_the_newest_checkpoint_first_and_an_older_flush_gives_way(spool, quick) -> None:
    """Three checkpoints wait, and one of them is under way to a tier that hangs: the last one is there first."""
    slow = Double()
    with Daemon(spool.root, {"s3": slow}, keep=100, keep_local=100) as daemon:
        ckpt = made(spool, to=None)
        hung, real = threading.Event(), slow.put

        async def put(key, data):
            newest = daemon.reconciler.inventory().spool.run("run").newest
            if "/chunks/" in key and (newest is None or newest.step < 3):  # until its flush is given up
                hung.set()
                await asyncio.sleep(60)
            return await real(key, data)

        slow.put = put
        for step in (1, 2):
            ckpt.save(step, tensors(step)).wait(timeout=60)
        assert hung.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.due(3)
        ckpt.save(3, tensors(3)).wait(timeout=60)
        ckpt.close(wait="s3", deadline="60s")
        # The notice is sent beside training, and may come after the save.
        wait_until(lambda: any(event.what == "preempted" for event in daemon.reconciler.journal.events))
        events = tuple(daemon.reconciler.journal.events)
    flushed = [one.step for one in events if one.what == "flushed"]
    reported = [one for one in events if one.what == "preempted"]
    assert flushed[0] == 3 and sorted(flushed) == [1, 2, 3]
    assert len(reported) == 1 and reported[0].step == 3 and "SIGTERM" in reported[0].why


def test_close_names_at_the_deadline_the_saves_that_no_tier_has(spool, quick, caplog) -> None:
    broken = Double()
    broken.error = StoreUnavailable("503 Slow Down")
    with Daemon(spool.root, {"s3": broken}):
        ckpt = made(spool, to=None)
        ckpt.save(1, tensors(1)).wait(timeout=60)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.due(2)
        ckpt.save(2, tensors(2)).wait(timeout=60)
        begun_s = time.monotonic()
        ckpt.close(deadline=0.5)
        assert time.monotonic() - begun_s < 60
        with pytest.raises(TimeoutError, match=r"2 saves \(steps 1, 2\)"):
            ckpt.close(wait="s3", deadline=0.3)
    assert "2 saves (steps 1, 2) are on no tier, only in the spool" in caplog.text
    assert "the node ends, and nobody flushes them" in caplog.text


def test_close_names_at_the_deadline_the_saves_that_the_spool_lacks(spool, monkeypatch, caplog) -> None:
    real, go_on = save_pipeline.write_part, threading.Event()

    def slow(*arguments, **options):
        assert go_on.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(save_pipeline, "write_part", slow)
    ckpt = made(spool)
    ckpt.save(1, tensors(1))
    threading.Timer(1.0, go_on.set).start()
    ckpt.close(deadline=0.2)
    assert "not durable in the spool at the deadline" in caplog.text
    assert same(restored(spool, 1)[1], 1), "and it was waited for"


def test_deadline_counts_from_the_notice_and_without_a_notice_from_the_call(spool) -> None:
    with made(spool) as ckpt:
        before_s = time.monotonic()
        assert internals(ckpt).schedule.end_s("100s") >= before_s + 100
        os.kill(os.getpid(), signal.SIGTERM)
        known_s = time.monotonic()
        time.sleep(0.05)
        assert ckpt.due(1) and before_s + 100 <= internals(ckpt).schedule.end_s(100) <= known_s + 100
        assert internals(ckpt).schedule.end_s(None) is None


@pytest.mark.parametrize("deadline", [0, -1, "soon", True, float("inf")])
def test_a_deadline_that_is_no_time_is_refused_and_closes_nothing(spool, deadline) -> None:
    with made(spool) as ckpt:
        with pytest.raises(ConfigError, match="deadline="):
            ckpt.close(deadline=deadline)
        ckpt.save(1, tensors(1)).wait(timeout=60)


# -- several ranks ----------------------------------------------------------------------------------------------------


def test_preemption_is_refused_for_ranks_without_a_way_to_agree(spool) -> None:
    with pytest.raises(ConfigError, match=r"preemption=True\): 2 ranks have no way to agree"):
        made(spool, rank=0, world_size=2, attempt=f"{1:012x}-{1:08x}")


def test_a_notice_to_one_rank_is_due_on_all_at_one_step(spool, monkeypatch) -> None:
    """As threads, which take no signals: the notice is queued as its handler does."""
    group = Group(4)
    group.install(monkeypatch)
    monkeypatch.setattr(notices, "PreemptionSignals", lambda heard: type("None", (), {"close": lambda self: None})())

    def work(number: int):
        found = []
        with made(spool, tierd.When(steps=10_000, preemption=True)) as ckpt:
            assert ckpt.restore(tensors(0)) is None
            for step in range(1, 5000):
                if number == 2 and step == 5:
                    internals(ckpt).schedule.preemption._arrived.put(
                        Notice("SIGTERM", "SIGTERM to rank 2", time.monotonic())
                    )
                time.sleep(0.002 * (1 + number))
                group.together.wait()  # a collective of the step
                if ckpt.due(step):
                    found.append(step)
                    ckpt.save(step, tensors(step))
                if ckpt.notice:
                    break
            group.together.wait()
        return found, ckpt.notice

    results = group.run(work)
    assert all(one == results[0] for one in results), results
    (step,), why = results[0]
    assert step >= 5 and why == "SIGTERM to rank 2"


@contextmanager
def training(home: Path, world: int, step_s: float, *, group: bool = True) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a launch, each after its first line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1]) if group else "0"
    (home / "tier").mkdir()
    command = [sys.executable, str(TRAINER)]
    options = [str(world), port, str(home / "spool"), str(home / "tier"), str(step_s)]
    with ExitStack() as ending:
        running = []
        for rank in range(world):
            launcher = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            nobody = {ADDRESS: "127.0.0.1:9"}  # even where the tests run on a machine of a cloud
            process = subprocess.Popen(
                [*command, str(rank), *options],
                env=environment(**nobody, **({} if group else launcher)),
                stdout=subprocess.PIPE,
                text=True,
            )
            ending.callback(process.wait)
            ending.callback(process.kill)
            running.append(process)
        yield running


def test_ranks_that_run_freely_and_meet_in_the_spool_find_one_step_too(tmp_path: Path) -> None:
    """Without a process group and without a collective one rank is far ahead, and the other one was told."""
    with training(tmp_path, 2, 0.05, group=False) as running:
        while int(words_of(running[1], "at")[1]) < 3:
            pass
        running[1].send_signal(signal.SIGTERM)
        dues = [words_of(process, "due") for process in running]
        for process in running:
            assert process.wait(120) == 0
    assert dues[0] == dues[1] and int(dues[0][1]) > 3


def words_of(process: subprocess.Popen[str], word: str) -> list[str]:
    """The first line that begins with `word`, in words."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"{word} "):
            return line.split(maxsplit=2)
    raise AssertionError(f"it ended without {word}")


@pytest.mark.parametrize(
    ("world", "reported", "number"),
    [
        (2, (1,), signal.SIGTERM),
        (2, (0, 1), signal.SIGTERM),
        (2, (0,), signal.SIGUSR1),
        (1, (0,), signal.SIGTERM),
    ],
)
def test_real_ranks_save_the_same_step_and_it_is_on_the_tier(tmp_path: Path, world: int, reported, number) -> None:
    with training(tmp_path, world, 0.05) as running:
        for process in running:
            while int(words_of(process, "at")[1]) < 3:
                pass
        for rank in reported:
            running[rank].send_signal(number)
        dues = [words_of(process, "due") for process in running]
        for process in running:
            assert process.wait(120) == 0
    assert len({(step, why) for _, step, why in dues}) == 1, dues
    assert dues[0][2].startswith(number.name)
    step = int(dues[0][1])
    assert step >= 3
    with tierd.open(f"file://{tmp_path}/tier", "run") as reader:
        assert [(one.step, one.complete) for one in reader.checkpoints()] == [(step, True)], "close waited for the tier"
