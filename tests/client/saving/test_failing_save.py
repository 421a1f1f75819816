"""What fails behind `save` is a value, a log line and a count; training goes on, and so does the next save."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest
from support.doubles import Double, is_manifest
from support.timed import timed_client
from support.training import restored, same, tensors
from support.world import Daemon, hurry, part

import tierd
from tierd.client import daemon_attachment
from tierd.client.checkpointer import internals
from tierd.client.saving import save_pipeline
from tierd.core.errors import ConfigError, DaemonUnavailable, SaveFailed, SpoolFull, SpoolUnusable, StoreUnavailable
from tierd.ipc.messages import SaveGivenUp


class Disk:
    """A disk whose next `count` writes fail with `number`; notes what is synced."""

    def __init__(self, monkeypatch, number: int, count: int, call: str = "pwrite") -> None:
        self.left, self.failed, self.synced_after_failure = count, [], []
        real = {name: getattr(os, name) for name in ("pwrite", "fsync")}

        def run(name, fd, *rest):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if name == "fsync" and path in self.failed:
                self.synced_after_failure.append(path)
            if name == call and self.left and "tensors" in path:
                self.left -= 1
                self.failed.append(path)
                raise OSError(number, os.strerror(number))
            return real[name](fd, *rest)

        monkeypatch.setattr(os, "pwrite", lambda *a: run("pwrite", *a))
        monkeypatch.setattr(os, "fsync", lambda *a: run("fsync", *a))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_after_one_eio_it_is_written_anew_from_memory(local, spool, monkeypatch, call):
    disk = Disk(monkeypatch, errno.EIO, 1, call)
    save = local.save(1, tensors(1))
    save.wait()
    assert len(disk.failed) == 1 and not disk.synced_after_failure
    assert local.stats.failed == 0 and not list((spool.control / "stage").iterdir())
    assert same(restored(spool)[1], 1)


@pytest.mark.parametrize(
    ("number", "count", "condition"),
    [
        (errno.EIO, 2, SpoolUnusable),
        (errno.ENOSPC, 1, SpoolFull),
        (errno.EDQUOT, 1, SpoolFull),
        (errno.EROFS, 1, SpoolUnusable),
    ],
    ids=["EIO twice", "ENOSPC", "EDQUOT", "EROFS"],
)
def test_failed_save_is_a_value_and_training_continues(local, spool, monkeypatch, caplog, number, count, condition):
    Disk(monkeypatch, number, count)
    save = local.save(1, tensors(1))
    with pytest.raises(SaveFailed) as failed:
        save.wait()
    assert isinstance(failed.value.__cause__, condition) and save.error() is failed.value.__cause__ and save.done()
    assert local.stats.failed == 1 and "save failed, training goes on" in caplog.text
    assert not list((spool.control / "stage").iterdir()) and not spool.parts()
    local.save(1, tensors(1)).wait()  # the step is free again
    local.save(2, tensors(2)).wait()
    local.close()
    assert same(restored(spool)[1], 2)


def test_a_wait_has_an_end(local, monkeypatch):
    gate, real = threading.Event(), save_pipeline.write_part
    monkeypatch.setattr(save_pipeline, "write_part", lambda *a: gate.wait(60) and real(*a))
    save = local.save(1, tensors(1))
    assert not save.done() and save.error() is None
    with pytest.raises(TimeoutError, match="not durable after"):
        save.wait(timeout=0.05)
    with pytest.raises(TimeoutError):
        save.wait("tier", timeout=0.05)
    gate.set()
    save.wait(timeout=60)
    with pytest.raises(DaemonUnavailable):
        save.wait("tier", timeout=1)


def test_waiting_for_a_tier(spool, monkeypatch):
    hurry(monkeypatch)
    store = Double()
    with Daemon(spool.root, {"tier": store}), tierd.Checkpointer(spool.root, "run") as checkpointer:
        checkpointer.save(1, tensors(1)).wait("tier", timeout=60)
        assert len(store.puts(is_manifest)) == 1
        store.error = StoreUnavailable("down for now")
        with pytest.raises(TimeoutError, match=r"^not within 0\.5 s: .*down for now"):
            checkpointer.save(2, tensors(2)).wait("tier", timeout=0.5)
        with pytest.raises(ConfigError, match="no tier of that name"):
            checkpointer.save(3, tensors(3)).wait("s3", timeout=60)


def test_a_hung_tier_does_not_hold_up_the_first_save(spool, monkeypatch):
    timed_client(monkeypatch, names_s=0.3)
    store = Double()
    with Daemon(spool.root, {"tier": store}) as daemon, tierd.Checkpointer(spool.root, "run") as checkpointer:
        store.delay = 3600.0
        checkpointer.save(1, tensors(1)).wait()
        assert daemon.spool.parts()


def test_a_daemon_that_takes_its_time_holds_up_no_save(spool, tmp_path, monkeypatch):
    """Its tie is broken, and a new one comes only after eight saves are durable."""
    checkpointer = tierd.Checkpointer(spool.root, "run", to=[])
    internals(checkpointer).daemon._to = (f"file://{tmp_path}",)
    tries, answers = [], threading.Event()
    monkeypatch.setattr(internals(checkpointer).daemon, "_attach", lambda to: tries.append(answers.wait(200)))
    for step in range(8):
        checkpointer.save(step, tensors(step)).wait()
    answers.set()
    checkpointer.close()
    assert 1 <= len(tries) <= 3


def test_failures_are_reported_in_their_order_though_the_first_report_takes_longest(spool, daemon, monkeypatch):
    link, waits = daemon_attachment.DaemonConnection, iter([0.5, 0.2])

    def slow(spool, **options):
        time.sleep(next(waits, 0.0))
        return link(spool, **options)

    monkeypatch.setattr(daemon_attachment, "DaemonConnection", slow)
    tie = daemon_attachment.Attachment(spool, None, "run")
    for step in (1, 2, 3, 4):
        tie.report(SaveGivenUp(part=part(step), why="no room"))
    tie.close()
    assert [event.step for event in daemon.reconciler.journal.events if event.what == "persist failed"] == [1, 2, 3, 4]


def test_a_failure_that_is_quicker_than_the_caller_is_still_no_exception_of_save(local, monkeypatch):
    def fails(*_):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(save_pipeline, "write_part", fails)
    for step in range(100):
        save = local.save(step, tensors(step))
        with pytest.raises(SaveFailed):
            save.wait(timeout=60)
    assert local.stats.failed == 100
