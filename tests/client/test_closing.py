"""`close`: what this launch saved and no tier has is waited for on request, and told of where it may be lost."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.doubles import Double
from support.smalldisk import SmallDisk
from support.timed import timed_client
from support.training import tensors
from support.waiting import wait_until
from support.world import Daemon, commit, part

import tierd
from tierd.client import daemon_attachment, unflushed_saves
from tierd.client.checkpointer import internals
from tierd.client.daemon_attachment import Attachment
from tierd.client.saving import save_pipeline
from tierd.client.unflushed_saves import would_end
from tierd.client.user_messages import TierAcceptance
from tierd.core.errors import ConfigError, DaemonUnavailable, SaveFailed, StoreRefused, StoreUnavailable
from tierd.core.planning.unflushed_parts import TierReadiness, UnflushedPart, UnflushedParts
from tierd.spool.spool import Spool


def failing(error: Exception) -> Double:
    store = Double()
    store.error = error
    return store


def warnings(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "tierd" and one.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def fast(monkeypatch, quick):
    timed_client(monkeypatch, close_poll_s=0.02)


@pytest.fixture
def mortal(monkeypatch):
    """The daemon ends with this process."""
    monkeypatch.setattr(unflushed_saves, "ends_with_us", lambda connection: True)


def saved(spool, *steps: int) -> tierd.Checkpointer:
    checkpointer = tierd.Checkpointer(spool.root, "run")
    for step in steps:
        checkpointer.save(step, tensors(step)).wait(timeout=60)
    return checkpointer


# -- a named tier -----------------------------------------------------------------------------------------------------


def test_close_waits_until_the_named_tier_has_verified_every_save(spool):
    slow = failing(StoreUnavailable("503"))
    with Daemon(spool.root, {"nfs": Double(), "s3": slow}) as daemon:
        checkpointer = saved(spool, 1, 2)
        threading.Timer(0.3, lambda: setattr(slow, "error", None)).start()
        checkpointer.close(wait="s3", timeout=60)
        assert all(daemon.reconciler.tiers.observed.has(one, "s3") for one in spool.parts())


def test_close_names_the_saves_that_the_tier_lacks_when_the_time_is_over(spool):
    commit(spool, part(77))  # another launch's, of which nothing is said
    with Daemon(spool.root, {"s3": failing(StoreUnavailable("503 Slow Down"))}):
        checkpointer = saved(spool, 1, 2)
        with pytest.raises(TimeoutError, match=r"s3: 2 saves \(steps 1, 2\) are not verified there.*503 Slow Down"):
            checkpointer.close(wait="s3", timeout=0.3)
        with pytest.raises(ConfigError, match="closed"):
            checkpointer.save(3, tensors(3))  # it is closed all the same


def test_close_raises_at_once_where_the_tier_refuses(spool):
    refused = pytest.raises(StoreRefused, match=r"1 save \(step 1\) is not there: 403 Forbidden")
    with Daemon(spool.root, {"s3": failing(StoreRefused("403 Forbidden"))}), refused:
        saved(spool, 1).close(wait="s3", timeout=60)


def test_close_does_not_wait_for_retired_checkpoints(spool):
    store = Double()
    with Daemon(spool.root, {"s3": store}, keep=1, keep_local=100) as daemon:
        saved(spool, 1, 2, 3).close(wait="s3", timeout=60)
        daemon.settle()
        assert [one.checkpoint.step for one in spool.parts() if daemon.reconciler.tiers.observed.has(one, "s3")] == [3]


@pytest.mark.parametrize(("wait", "timeout"), [(7, None), ("", None), ("s3", -1), ("s3", "1s"), ("s3", True)])
def test_a_wait_of_the_wrong_kind_is_refused_and_closes_nothing(spool, wait, timeout):
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        with pytest.raises(ConfigError, match=r"wait=|timeout="):
            checkpointer.close(wait=wait, timeout=timeout)
        checkpointer.save(1, tensors(1)).wait(timeout=60)


def test_a_tier_that_is_not_there_is_refused(spool):
    with pytest.raises(ConfigError, match="no tier"):
        tierd.Checkpointer(spool.root, "run", to=[]).close(wait="s3")
    with pytest.raises(DaemonUnavailable):
        saved(spool, 1).close(wait="s3")
    with Daemon(spool.root, {"nfs": Double()}), pytest.raises(ConfigError, match="it has nfs"):
        saved(spool, 2).close(wait="s3")


def test_a_wait_that_did_not_succeed_is_waited_for_again(spool):
    slow = failing(StoreUnavailable("503"))
    with Daemon(spool.root, {"s3": slow}) as daemon:
        checkpointer = saved(spool, 1, 2)
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"2 saves \(steps 1, 2\)"):
                checkpointer.close(wait="s3", timeout=0.3)
        for wrong in ({"wait": "typo"}, {"wait": 7}, {"wait": "s3", "timeout": "soon"}):
            with pytest.raises(ConfigError):
                checkpointer.close(**wrong)
            with pytest.raises(TimeoutError):
                checkpointer.close(wait="s3", timeout=0.3)
        checkpointer.close()
        slow.error = None
        checkpointer.close(wait="s3", timeout=60)
        assert all(daemon.reconciler.tiers.observed.has(one, "s3") for one in spool.parts())
    checkpointer.close(wait="s3", timeout=60)  # that is known


def test_a_save_that_failed_is_on_no_tier(spool, monkeypatch):
    disk = SmallDisk(monkeypatch, spool.root, 0)
    with Daemon(spool.root, {"s3": Double()}) as daemon:
        checkpointer = tierd.Checkpointer(spool.root, "run")
        for step in (1, 2):
            with pytest.raises(SaveFailed):
                checkpointer.save(step, tensors(step)).wait(timeout=60)
        for _ in range(2):
            with pytest.raises(SaveFailed, match=r"s3: 2 saves \(steps 1, 2\) are not there, because saving failed: "):
                checkpointer.close(wait="s3", timeout=60)
        checkpointer = tierd.Checkpointer(spool.root, "run")
        with pytest.raises(SaveFailed):
            checkpointer.save(3, tensors(3)).wait(timeout=60)
        disk.size_bytes = 1 << 30
        checkpointer.save(3, tensors(3)).wait(timeout=60)  # it is saved after all
        checkpointer.close(wait="s3", timeout=60)
        assert [daemon.reconciler.tiers.observed.has(one, "s3") for one in spool.parts()] == [True]


@pytest.mark.parametrize("how", [{"wait": "s3", "timeout": 1}, {}])
def test_a_daemon_that_hangs_costs_a_bounded_wait_and_the_steps_are_named(spool, caplog, monkeypatch, how):
    with Daemon(spool.root, {"s3": Double()}) as daemon:
        checkpointer = saved(spool, 1, 2)
        hung, go_on = threading.Event(), threading.Event()
        daemon.loop.call_soon_threadsafe(lambda: (hung.set(), go_on.wait(60)))
        assert hung.wait(60)
        begun_s = time.monotonic()
        try:
            if how:
                with pytest.raises(TimeoutError, match=r"s3: 2 saves \(steps 1, 2\) are not known to be verified"):
                    checkpointer.close(**how)
            else:
                checkpointer.close()
                assert warnings(caplog)[-1].startswith("closed: 2 saves (steps 1, 2) are in the spool, and on no tier ")
            took_s = time.monotonic() - begun_s
        finally:
            go_on.set()
    assert took_s < (how.get("timeout", 5) + 3), "a hung daemon must not hold up the end"


def test_a_close_that_waits_for_no_tier_says_that_nobody_waited(spool, caplog, mortal):
    with Daemon(spool.root, {"nfs": Double(), "s3": Double()}) as daemon:
        checkpointer = saved(spool, 1)
        daemon.settle()
        stale = UnflushedParts(
            left=(UnflushedPart(part=spool.parts()[0], size_bytes=1, on=(), lacks=("s3",)),), tiers={}
        )
        daemon.reconciler.backlog.summary = lambda: stale
        checkpointer.close(wait="local")
    assert "only in the spool: this close waited for no tier; the daemon ends with" in warnings(caplog)[0]


# -- the last state is in no place ------------------------------------------------------------------------------------


@pytest.fixture
def alone(spool):
    """A checkpointer without tiers, which each test closes itself."""
    return tierd.Checkpointer(spool.root, "run", to=[])


def save_all(checkpointer: tierd.Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, tensors(step)).error()


@pytest.mark.parametrize("how", [{}, {"timeout": 5}, {"wait": "local"}, {"deadline": 5}])
def test_close_raises_if_the_last_saves_met_a_full_disk(spool, alone, monkeypatch, how):
    disk = SmallDisk(monkeypatch, spool.root, 1 << 30)
    save_all(alone, 1, 2)
    internals(alone).pipeline.drain()
    disk.size_bytes = 0
    save_all(alone, 3, 4)
    with pytest.raises(SaveFailed) as raised:
        alone.close(**how)
    text = str(raised.value)
    for words in ("2 saves (steps 3, 4) are in no place", str(spool.root), "No space left on device", "bytes are free"):
        assert words in text
    assert "free space on that file system" in text and "start the job again" in text
    assert (alone.stats.saves, alone.stats.durable, alone.stats.failed) == (4, 2, 2)
    alone.close()  # it has raised once


def test_close_raises_nothing_if_a_later_save_became_durable(spool, alone, monkeypatch):
    disk = SmallDisk(monkeypatch, spool.root, 0)
    save_all(alone, 1, 2)
    internals(alone).pipeline.drain()
    disk.size_bytes = 1 << 30
    save_all(alone, 3)
    alone.close()
    assert (alone.stats.durable, alone.stats.failed) == (1, 2)


def test_close_raises_nothing_if_the_same_step_was_saved_again(spool, alone, monkeypatch):
    disk = SmallDisk(monkeypatch, spool.root, 0)
    save_all(alone, 1)
    internals(alone).pipeline.drain()
    disk.size_bytes = 1 << 30
    save_all(alone, 1)
    alone.close()


def test_close_raises_nothing_for_a_failed_step_that_a_restore_left_behind(spool, alone, monkeypatch):
    disk = SmallDisk(monkeypatch, spool.root, 1 << 30)
    save_all(alone, 1)
    internals(alone).pipeline.drain()
    disk.size_bytes = 0
    save_all(alone, 9)
    internals(alone).pipeline.drain()
    disk.size_bytes = 1 << 30
    assert alone.restore(tensors(0)).step == 1
    save_all(alone, 2)
    alone.close()


def test_close_raises_nothing_for_a_skipped_save(spool, monkeypatch):
    go_on, real = threading.Event(), save_pipeline.write_part
    monkeypatch.setattr(save_pipeline, "write_part", lambda *a: go_on.wait(60) and real(*a))
    checkpointer = tierd.Checkpointer(spool.root, "run", to=[], when_busy="skip")
    checkpointer.save(1, tensors(1))
    assert isinstance(checkpointer.save(2, tensors(2)).error(), tierd.SaveSkipped)
    go_on.set()
    checkpointer.close()


def test_close_raises_for_a_stage_whose_exception_the_loop_caught(spool, alone):
    with pytest.raises(ZeroDivisionError), alone.stage(1):
        1 / 0  # noqa: B018
    assert alone.stats.failed == 1
    with pytest.raises(SaveFailed, match=r"1 save \(step 1\) is in no place.*division by zero"):
        alone.close()


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_the_loops_exception_is_kept_and_gets_a_note_of_the_lost_state(spool, monkeypatch, caplog, kind):
    SmallDisk(monkeypatch, spool.root, 0)
    raised = kind("mine")
    with pytest.raises(kind) as seen, tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        save_all(checkpointer, 1)
        raise raised
    assert seen.value is raised
    assert "1 save (step 1) is in no place" in "".join(raised.__notes__) and "closing failed, too" in caplog.text


def test_a_tier_that_is_not_reached_in_time_hides_no_lost_state(spool, monkeypatch, caplog):
    disk = SmallDisk(monkeypatch, spool.root, 1 << 30)
    with Daemon(spool.root, {"s3": failing(StoreUnavailable("503"))}):
        checkpointer = saved(spool, 1)
        disk.size_bytes = 0
        save_all(checkpointer, 2)
        with pytest.raises(TimeoutError, match="step 1"):
            checkpointer.close(wait="s3", timeout=0.3)
    assert "1 save (step 2) is in no place" in caplog.text


# -- nobody flushes on ------------------------------------------------------------------------------------------------


def test_a_plain_close_says_nothing_and_waits_for_no_tier_where_the_daemon_flushes_on(spool, caplog):
    with Daemon(spool.root, {"nfs": Double(), "s3": failing(StoreUnavailable("503"))}):
        saved(spool, 1).close()
    assert warnings(caplog) == []


def test_close_repeats_that_no_tier_accepts_checkpoints_with_the_count(spool, caplog):
    with Daemon(spool.root, {"nfs": failing(StoreRefused("/mnt/typo does not exist"))}) as daemon:
        checkpointer = saved(spool, *range(12))
        wait_until(lambda: daemon.reconciler.workers["nfs"].last_error)
        checkpointer.close()
    [said] = warnings(caplog)
    assert said == (
        "closed: 12 saves (2 older and steps 2, 3, 4, 5, 6, 7, 8, 9, 10, 11) are on no tier, only in the spool: "
        "no tier accepts checkpoints (nfs: /mnt/typo does not exist)"
    )


def test_close_says_so_where_no_daemon_answers(spool, caplog):
    saved(spool, 1, 2).close()
    [said] = warnings(caplog)
    assert said.startswith("closed: 2 saves (steps 1, 2) are in the spool, and on no tier that is known of: spool ")


def test_a_signal_handler_renews_while_the_thread_that_it_interrupts_does(spool, monkeypatch):
    """As `close` in a handler does while a restore registers with a daemon that answers slowly."""
    made = Attachment(spool, None, "run")
    attached: list[int] = []

    def link(spool: Spool, **options: float) -> None:
        attached.append(1)
        made.renew()
        raise DaemonUnavailable("none")

    monkeypatch.setattr(daemon_attachment, "DaemonConnection", link)
    for times in (1, 2):
        training = threading.Thread(target=made.renew, daemon=True)
        training.start()
        training.join(60)
        assert not training.is_alive()
        assert len(attached) == times, "the handler leaves it to the call that it interrupted"


def test_without_tiers_close_says_nothing(spool, caplog):
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.save(1, tensors(1))
    assert warnings(caplog) == []


def test_where_the_daemon_ends_with_this_process_a_plain_close_waits_for_the_tiers(spool, caplog, mortal):
    slow = failing(StoreUnavailable("503"))
    with Daemon(spool.root, {"nfs": slow}) as daemon:
        checkpointer = saved(spool, 1, 2)
        threading.Timer(0.3, lambda: setattr(slow, "error", None)).start()
        checkpointer.close()
        assert all(daemon.reconciler.tiers.observed.has(one, "nfs") for one in spool.parts())
    assert warnings(caplog) == []


@pytest.mark.parametrize("how", [{"timeout": 0.2}, {"wait": "local"}])
def test_close_warns_of_saves_that_no_tier_gets_when_it_does_not_wait_longer(spool, caplog, mortal, how):
    with Daemon(spool.root, {"nfs": failing(StoreUnavailable("503"))}):
        saved(spool, 1, 2).close(**how)
    [said] = warnings(caplog)
    assert said.startswith("closed: 2 saves (steps 1, 2) are on no tier, only in the spool: ")
    assert said.endswith("; the daemon ends with this container, and nobody flushes them")


def test_it_does_not_wait_for_a_tier_that_refuses(spool, caplog, mortal):
    with Daemon(spool.root, {"nfs": failing(StoreRefused("403"))}):
        saved(spool, 1).close()  # and not for 10 minutes
    assert "no tier accepts checkpoints (nfs: 403); the daemon ends with this container" in warnings(caplog)[0]


def test_exception_in_flight_reaches_the_caller(spool, caplog, monkeypatch):
    def broken(self, *args, **kwargs):
        raise StoreUnavailable("broken")

    monkeypatch.setattr(unflushed_saves.UnflushedSaves, "report", broken)
    with Daemon(spool.root, {"nfs": Double()}):
        with pytest.raises(ZeroDivisionError), saved(spool, 1):
            1 / 0  # noqa: B018
        assert warnings(caplog) == ["closing failed, too: broken"]
        with pytest.raises(StoreUnavailable, match="broken"), saved(spool, 2):
            pass


# -- does the daemon outlive us? --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pid", "ancestors", "first", "own", "ends"),
    [
        (1, [0], ["python", "train.py"], True, True),
        (7, [1, 0], ["sh", "-c", "python train.py"], True, True),
        (7, [1, 0], ["/bin/bash", "./train.sh"], True, True),
        (7, [1, 0], ["/usr/bin/tini", "--", "python", "train.py"], True, True),
        (9, [7, 1, 0], ["python", "-m", "torch.distributed.run", "train.py"], True, True),
        (7, [1, 0], ["bash"], True, False),  # somebody types
        (7, [1, 0], ["-bash", "-l"], True, False),
        (7, [1, 0], ["/lib/systemd/systemd", "--system"], True, False),
        (7, [1, 0], ["/pause"], True, False),
        (7, [0], ["python", "serve.py"], True, False),  # `docker exec`
        (7, [5, 1, 0], ["/sbin/init"], False, False),
        (7, [5, 1, 0], ["sh", "-c", "x"], False, False),  # the machine's own namespace
        (7, [1, 0], [], True, False),
    ],
)
def test_whether_the_namespace_ends_with_us(pid, ancestors, first, own, ends):
    assert would_end(pid, ancestors, first, own_namespace=own) is ends


def test_who_is_at_the_other_end_matters_only_in_a_namespace_that_ends(monkeypatch):
    ours, other = socket.socketpair()
    with ours, other:
        for ends in (True, False):
            monkeypatch.setattr(unflushed_saves, "namespace_ends_with_us", lambda ends=ends: ends)
            assert unflushed_saves.ends_with_us(ours) is ends


CONTAINER = """
import logging, os, sys
import torch, tierd
logging.basicConfig(level=logging.INFO)
ckpt = tierd.Checkpointer(sys.argv[1], "run", to=["file://" + sys.argv[2]])
ckpt.save(1, {"weights": torch.rand(1 << 24)})
ckpt.close()
print("closed", flush=True)
os._exit(0)  # as fast as a process may end
"""


@pytest.mark.system
@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; exit $?', "sh"]])
def test_container_of_its_own_ends_after_its_saves_are_on_the_tier(tmp_path, wrapper):
    """The trainer, or the shell that runs it, is PID 1; the kernel kills the daemon with it."""
    (tmp_path / "tier").mkdir()
    command = [*wrapper, sys.executable, "-c", CONTAINER, str(tmp_path / "spool"), str(tmp_path / "tier")]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=root,
    )
    assert done.returncode == 0 and "closed" in done.stdout, done.stderr
    assert list((tmp_path / "tier").glob("run/manifests/*/*")), done.stderr


@pytest.mark.system
def test_container_of_its_own_warns_of_saves_that_are_on_no_tier(tmp_path):
    command = [sys.executable, "-c", CONTAINER, str(tmp_path / "spool"), str(tmp_path / "typo")]
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert (
        "closed: 1 save (step 1) is on no tier, only in the spool: no tier accepts checkpoints (file: " in done.stderr
    )
    assert "the daemon ends with this container" in done.stderr


# -- a mistyped tier --------------------------------------------------------------------------------------------------


def test_mistyped_tier_is_warned_of_within_seconds_and_again_by_close(spool, caplog, tmp_path, monkeypatch):
    timed_client(monkeypatch, acceptance_s=0.1)
    with tierd.Checkpointer(spool.root, "run", to=[f"file://{tmp_path}/typo"]) as checkpointer:
        wait_until(lambda: warnings(caplog))  # before anything is saved
        [said] = warnings(caplog)
        assert said.startswith("no tier accepts checkpoints, they are only in the spool: file: ")
        assert "/typo does not exist" in said
        for step in (1, 2):
            checkpointer.save(step, tensors(step))
    again = warnings(caplog)[1:]
    assert len(again) == 1 and again[0].startswith("closed: 2 saves (steps 1, 2) are on no tier, only in the spool: ")
    assert "/typo does not exist" in again[0]
    (tmp_path / "typo").mkdir()  # so that the daemon, which outlives the trainer, ends


DOWN = UnflushedParts(tiers={"nfs": TierReadiness(reached=False, error="503")})
REFUSED = UnflushedParts(tiers={"nfs": TierReadiness(reached=False, error="403", refused=True)})
FINE = UnflushedParts(tiers={"nfs": TierReadiness(reached=True), "s3": TierReadiness(reached=False, error="503")})


def test_lasting_trouble_that_may_pass_is_warned_of_late_and_then_rarely(caplog):
    heard = TierAcceptance()
    for second in range(2):
        heard.log_change(DOWN, second)
    assert warnings(caplog) == []
    for second in range(2, 1200):
        heard.log_change(DOWN, second)
    assert warnings(caplog) == ["no tier accepts checkpoints, they are only in the spool: nfs: 503"] * 2
    heard.log_change(FINE, 1300.0)
    heard.log_change(FINE, 1301.0)
    assert warnings(caplog)[2:] == ["a tier accepts checkpoints again"]


def test_refusing_tier_is_warned_of_at_once_and_a_down_tier_of_two_is_not(caplog):
    heard = TierAcceptance()
    heard.log_change(FINE, 0.0)
    assert warnings(caplog) == []
    heard.log_change(REFUSED, 1.0)
    assert len(warnings(caplog)) == 1
