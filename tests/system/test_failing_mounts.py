"""A spool whose disk fills up, turns read-only or goes away: training goes on, and the next save is a fresh try."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.training import restored, same, tensors

import tierd
from tierd.core.errors import SaveFailed, SpoolFull, SpoolUnusable
from tierd.spool.spool import Spool

pytestmark = pytest.mark.system


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=60)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """An 8 MiB file system of this test's own."""
    path = tmp_path / "nvme"
    path.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m", "tierd-test", str(path))
    try:
        yield path
    finally:
        while subprocess.run(["umount", str(path)], capture_output=True, timeout=60, check=False).returncode == 0:
            pass


def refused(ckpt: tierd.Checkpointer, step: int, state: dict[str, torch.Tensor], why: type[Exception]) -> None:
    failed = ckpt.stats.failed
    save = ckpt.save(step, state)
    with pytest.raises(SaveFailed) as raised:
        save.wait(timeout=60)
    assert isinstance(raised.value.__cause__, why) and ckpt.stats.failed == failed + 1


@pytest.mark.parametrize("slots", [1, 2])
def test_a_full_spool(mounted: Path, caplog: pytest.LogCaptureFixture, slots: int) -> None:
    large = {"x": torch.ones(4 << 20)}  # 16 MiB
    with tierd.Checkpointer(mounted / "spool", "run", to=[], slots=slots) as ckpt:
        ckpt.save(1, tensors(1)).wait()
        for step in (2, 3):
            refused(ckpt, step, large, SpoolFull)
        assert caplog.text.count("save failed, training goes on") == 2
        ckpt.save(3, tensors(3)).wait()
    spool = Spool(mounted / "spool")
    assert same(restored(spool)[1], 3) and not list((spool.control / "stage").iterdir())


def test_a_spool_that_turns_read_only(mounted: Path) -> None:
    with tierd.Checkpointer(mounted / "spool", "run", to=[]) as ckpt:
        ckpt.save(1, tensors(1)).wait()
        mount("-o", "remount,ro", str(mounted))
        refused(ckpt, 2, tensors(2), SpoolUnusable)
        mount("-o", "remount,rw", str(mounted))
        ckpt.save(2, tensors(2)).wait()
    assert same(restored(Spool(mounted / "spool"))[1], 2)


def test_vanished_mount_is_not_replaced_by_the_directory_under_it(mounted: Path) -> None:
    with tierd.Checkpointer(mounted / "spool", "run", to=[]) as ckpt:
        ckpt.save(1, tensors(1)).wait()
        subprocess.run(["umount", "--lazy", str(mounted)], check=True, timeout=60)
        for step in (2, 3):
            refused(ckpt, step, tensors(step), SpoolUnusable)
        assert not list(mounted.iterdir()), "nothing was written to the disk below"
        mount("-t", "tmpfs", "-o", "size=8m", "tierd-test", str(mounted))
        Spool(mounted / "spool")
        ckpt.save(4, tensors(4)).wait()
    assert same(restored(Spool(mounted / "spool"))[1], 4)
