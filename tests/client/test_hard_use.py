"""How real trainers treat a Checkpointer: signals in the middle of a save, forks, directories kept in use."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import threading
import time

import pytest
import torch
from support.doubles import Double
from support.timed import timed_client
from support.training import restored, same, tensors
from support.waiting import wait_until
from support.world import Daemon, hurry

import tierd
from tierd.client.checkpointer import internals
from tierd.client.saving import slots
from tierd.client.saving.snapshot import Snapshot
from tierd.core.errors import ConfigError, SaveFailed, StateRefused
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.file_io import FileWriter


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)
    timed_client(monkeypatch, start_s=0.2)


def after(seconds: float, handler) -> None:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.mark.parametrize(
    ("errors", "number"), [(0, 2), (0, 5), (1, 2)], ids=["amid", "after the last tensor", "in a second pass, after EIO"]
)
def test_a_save_that_is_interrupted_while_it_streams_is_no_checkpoint(spool, local, monkeypatch, errors, number):
    """With no memory for an arena, the disk is written from the tensors that training changes from then on."""
    monkeypatch.setattr(slots, "available", lambda: 0)
    write, finish, begun, changed = FileWriter.write, FileWriter.finish, [], threading.Event()

    def interrupt(*_):
        raise KeyboardInterrupt

    def write_slowly(file, piece):
        write(file, piece)
        begun.extend([file] if len(piece) >= 4096 else [])  # not the file of other values
        if begun.count(file) == number and len(set(begun)) == errors + 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            changed.wait(60)

    def fail_at_first(file):
        done = finish(file)
        if file in begun and len(set(begun)) <= errors:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return done

    signal.signal(signal.SIGALRM, interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "write", write_slowly)
        patch.setattr(FileWriter, "finish", fail_at_first)
        state = {"x": torch.ones(1 << 24)}  # four times the arena
        with pytest.raises(KeyboardInterrupt):
            local.save(1, state)
        state["x"].zero_()
        changed.set()
        internals(local).pipeline.drain()
    assert not spool.parts() and not list((spool.control / "stage").iterdir())
    assert begun.count(begun[-1]) == number  # it ended soon, because a later save waits for it
    assert local.stats.failed == errors  # the step was given up, or had been claimed and has failed
    local.save(1, tensors(1)).wait(timeout=60)
    assert same(restored(spool, 1)[1], 1)


def test_copy_that_fails_is_a_value_and_blocks_no_later_save(spool, local, monkeypatch):
    def fails(*_):
        raise MemoryError("no room for the arena")

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "copy", fails)
        save = local.save(1, tensors(1))
        with pytest.raises(SaveFailed, match="no room"):
            save.wait(timeout=60)
    local.save(1, tensors(1)).wait(timeout=60)
    assert (local.stats.saves, local.stats.failed) == (2, 1)


def test_a_tree_that_is_too_large_is_the_callers_to_hear_of(spool, local, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tierd.state.single_values.MAX_TREE", 100)
        with pytest.raises(StateRefused, match="100 at most"):
            local.save(1, {"text": "x" * 200})
    local.save(1, tensors(1)).wait(timeout=60)


def child(work) -> int:
    """The exit code of a forked child that does `work`."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        try:
            work()
            os._exit(0)
        except ConfigError:
            os._exit(7)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_save_and_cannot_reach_the_arena(spool, local):
    local.save(1, tensors(1)).wait()
    assert child(lambda: local.save(2, tensors(2))) == 7
    arena = internals(local).pipeline.slots[0].arena
    before = bytes(arena.view[:4096])
    assert child(lambda: arena.view.__setitem__(slice(0, 4096), b"\xff" * 4096)) == -signal.SIGSEGV
    assert bytes(arena.view[:4096]) == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_its_parent_attached(spool):
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        from tierd.ipc.messages import Attach

        link = DaemonConnection(spool)
        link.ask(Attach())
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        try:
            assert daemon.control.trainers == 1
            link.close()
            wait_until(lambda: not daemon.control.trainers)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_restored_directory_is_kept_until_the_next_restore(spool):
    """The spool keeps one, and an old one is asked for: retention must not take it from under its reader."""
    with Daemon(spool.root, {"tier": Double()}, keep=10, keep_local=1) as daemon:
        with tierd.Checkpointer(spool.root, "run") as ckpt:
            for step in (1, 2, 3):
                with ckpt.stage(step) as home:
                    (home / "model.bin").write_bytes(bytes([step]) * 1000)
            daemon.settle()
        with tierd.Checkpointer(spool.root, "run") as ckpt:
            found = ckpt.restore(step=1)
            assert found.tier == "tier"
            daemon.settle()
            assert (found.directory / "model.bin").read_bytes() == b"\1" * 1000
            newest = ckpt.restore()
            daemon.settle()
            assert (newest.step, newest.tier) == (3, "local")
            assert not found.directory.exists()


def test_a_list_of_urls_is_a_list(spool):
    for wrong in ("file:///x", [3]):
        with pytest.raises(ConfigError, match="a list of URLs"):
            tierd.Checkpointer(spool.root, "run", to=wrong)


def test_a_loss_that_still_has_its_graph_is_a_metric_without_a_warning(local, recwarn):
    loss = torch.ones((), requires_grad=True) * 2
    local.save(1, tensors(1), metrics={"loss": loss}).wait()
    assert not [one for one in recwarn if "requires_grad" in str(one.message)]
    assert local.restore(tensors(0)).metrics == {"loss": 2.0}
