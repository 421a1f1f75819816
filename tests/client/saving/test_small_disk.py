"""A spool on a small disk: a tier has verified copies, so a save that finds it full succeeds at its second try."""

from __future__ import annotations

import asyncio
import errno
import logging
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.doubles import Double, contents
from support.smalldisk import SmallDisk
from support.world import Daemon, steps_on

import tierd
import tierd.dcp
from tierd.client.checkpointer import internals
from tierd.client.saving import snapshot_handoff
from tierd.core.errors import SaveFailed, SpoolFull

pytestmark = pytest.mark.usefixtures("quick")


def state(step: int, size_bytes: int = 2_400_000) -> dict[str, torch.Tensor]:
    return {"x": torch.full((size_bytes // 4,), float(step))}


@pytest.mark.parametrize("handed_over", [True, False], ids=["daemon", "trainer"])
def test_a_full_disk_gives_up_verified_copies_and_every_save_succeeds(spool, monkeypatch, handed_over):
    """Row 6: 6 MB, a state of 2.4 MB, a healthy tier, 18 saves."""
    disk = SmallDisk(monkeypatch, spool.root, 6_000_000)
    if not handed_over:
        monkeypatch.setattr(snapshot_handoff.HandoffClient, "renew", lambda self, patience_s=0.0: False)
    store = Double()
    with Daemon(spool.root, {"tier": store}, keep=100, keep_local=3) as daemon:
        with tierd.Checkpointer(spool.root, "run") as ckpt:
            for step in range(1, 19):
                ckpt.save(step, state(step)).wait(timeout=60)
            assert (ckpt.stats.failed, ckpt.stats.handed_over) == (0, 18 if handed_over else 0)
        assert disk.refused >= 16
        daemon.settle()
        assert steps_on(asyncio.run(contents(store.inner))) == list(range(1, 19)), "nothing was lost"
    last = state(0)
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        assert ckpt.restore(last).step == 18 and bool((last["x"] == 18.0).all())


def test_job_after_job_on_one_node(spool, monkeypatch):
    """Row 5: a new run name per job, `keep_last` of 2: the newest checkpoint of each job before fills the disk."""
    SmallDisk(monkeypatch, spool.root, 10_000_000)
    with Daemon(spool.root, {"tier": Double()}, keep=2, keep_local=2):
        for job in range(1, 9):  # five fill the disk
            with tierd.Checkpointer(spool.root, f"job-{job}") as ckpt:
                for step in (1, 2, 3):
                    ckpt.save(step, state(step, 2_000_000)).wait(timeout=60)
                assert ckpt.stats.failed == 0, f"job {job}"


def test_where_no_tier_has_anything_the_save_fails_as_before(spool, monkeypatch):
    SmallDisk(monkeypatch, spool.root, 6_000_000)
    with pytest.raises(SaveFailed, match="in no place"), tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).wait(timeout=60)
        with pytest.raises(SaveFailed) as raised:
            ckpt.save(3, state(3)).wait(timeout=60)
        assert isinstance(raised.value.__cause__, SpoolFull)


def test_stage_gets_room_before_another_library_writes(spool, monkeypatch):
    """What another library writes cannot be tried again, so room is made for as much as it wrote before."""
    disk = SmallDisk(monkeypatch, spool.root, 6_000_000)
    with (
        Daemon(spool.root, {"tier": Double()}, keep=100, keep_local=3) as daemon,
        tierd.Checkpointer(spool.root, "run") as ckpt,
    ):
        for step in (1, 2, 3, 4):
            with ckpt.stage(step) as directory:
                assert disk.size_bytes - disk.used() >= 2_400_000, f"step {step}"
                (directory / "weights").write_bytes(bytes(2_400_000))
            daemon.settle()


def test_a_disk_for_fewer_states_than_are_kept_is_said_once(spool, monkeypatch, caplog):
    SmallDisk(monkeypatch, spool.root, 7_000_000)
    caplog.set_level(logging.WARNING, "tierd")
    daemon = Daemon(spool.root, {"tier": Double()}, keep=100, keep_local=2)
    with daemon, tierd.Checkpointer(spool.root, "run") as ckpt:
        ckpt.restore(state(0))
        ckpt.save(1, state(1)).wait(timeout=60)
        ckpt.save(2, state(2)).wait(timeout=60)
    (said,) = [record.getMessage() for record in caplog.records if "its disk has" in record.getMessage()]
    assert "7000000 bytes" in said and "3 checkpoints" in said and "keep_last = 2" in said


def test_a_disk_for_all_that_is_kept_is_fine(spool, monkeypatch, caplog):
    SmallDisk(monkeypatch, spool.root, 8_000_000)
    daemon = Daemon(spool.root, {"tier": Double()}, keep=100, keep_local=2)
    with daemon, tierd.Checkpointer(spool.root, "run") as ckpt:
        ckpt.save(1, state(1)).wait(timeout=60)
    assert "its disk has" not in caplog.text


@pytest.mark.parametrize(("disk_bytes", "said"), [(5_000_000, False), (4_000_000, True)])
def test_the_trainers_own_retention_counts_where_the_spool_has_none(spool, monkeypatch, caplog, disk_bytes, said):
    SmallDisk(monkeypatch, spool.root, disk_bytes)
    with (
        Daemon(spool.root, {"tier": Double()}, keep=None),
        tierd.Checkpointer(spool.root, "run", retention=tierd.Retention(keep_last=1)) as ckpt,
    ):
        ckpt.save(1, state(1)).wait(timeout=60)
    assert ("its disk has" in caplog.text) is ("keep_last = 1" in caplog.text) is said


def test_a_dcp_save_that_finds_the_disk_full_is_tried_again(spool, monkeypatch):
    real, asked, tries = dcp.FileSystemWriter.write_data, [], []

    def write(self, plan, planner):
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, plan, planner)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write)
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        monkeypatch.setattr(
            internals(ckpt).daemon, "make_room", lambda part, size, quota: asked.append((size, quota)) or True
        )
        dcp.save(state(1), storage_writer=tierd.dcp.StorageWriter(ckpt, 1), no_dist=True)
    assert asked == [(2_400_000, False)] and len(tries) == 2 and len(spool.parts()) == 1
