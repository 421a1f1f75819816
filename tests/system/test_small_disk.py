"""A small disk for real: a tmpfs under the spool, the daemon a process, a healthy tier."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.waiting import wait_until

import tierd

pytestmark = pytest.mark.system


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A 6 MB file system of this test's own."""
    path = tmp_path / "nvme"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tierd-test", str(path)], check=True, timeout=60)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], capture_output=True, timeout=60, check=False)


def test_every_save_on_a_small_disk_succeeds(small: Path, tmp_path: Path) -> None:
    """Row 6: a state of 2.4 MB, 18 saves, of which 16 found the disk full."""
    tier = tmp_path / "tier"
    tier.mkdir()
    with tierd.Checkpointer(small / "spool", "run", to=[str(tier)]) as ckpt:
        for step in range(1, 19):
            ckpt.save(step, {"x": torch.full((600_000,), float(step))}).wait(timeout=60)
        assert ckpt.stats.failed == 0
    wait_until(lambda: len(list(tier.glob("run/manifests/*18.*/*.json"))) == 1)
    wait_until(lambda: not (small / "spool" / ".tierd" / "control.sock").exists())


def test_job_after_job_on_one_small_disk(small: Path, tmp_path: Path) -> None:
    """Row 5: each job is a run of its own, and each starts its own daemon unless one is there."""
    tier = tmp_path / "tier"
    tier.mkdir()
    for job in range(1, 11):
        with tierd.Checkpointer(small / "spool", f"job-{job}", to=[str(tier)]) as ckpt:
            for step in (1, 2):
                ckpt.save(step, {"x": torch.full((300_000,), float(step))}).wait(timeout=60)
            assert ckpt.stats.failed == 0, f"job {job}"
    wait_until(lambda: not (small / "spool" / ".tierd" / "control.sock").exists())
