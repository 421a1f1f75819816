"""A daemon in a frozen control group: no signal shows it, nothing ends, and training goes on beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stopped import MOST_BLOCKED_S, check_nothing_failed, hand_over, running, save_all
from support.training import restored, same
from support.waiting import wait_until

import tierd
from tierd.spool.spool import Spool

pytestmark = pytest.mark.system


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group (v2) of this test's own, beside whatever else is there."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    roots = [Path(where) for _, where, kind, *_ in mounts if kind == "cgroup2"]
    assert roots, "no cgroup2 is mounted here, and without it no daemon can be frozen"
    path = roots[0] / f"tierd-test-{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        wait_until(lambda: "populated 0" in (path / "cgroup.events").read_text())
        path.rmdir()


def freeze(group: Path, *, on: bool) -> None:
    (group / "cgroup.freeze").write_text(f"{on:d}")
    wait_until(lambda: f"frozen {on:d}" in (group / "cgroup.events").read_text())


def test_a_frozen_daemon_is_met_once_and_nothing_is_lost(
    group: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path / "spool")
    with running(spool, tmp_path / "tier") as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        try:
            with tierd.Checkpointer(spool.root, "run") as ckpt:
                first = hand_over(ckpt, 0)
                freeze(group, on=True)
                assert save_all(ckpt, range(first, first + 40)) < MOST_BLOCKED_S
                assert caplog.text.count("the daemon was silent") == 1 and ckpt.stats.failed == 0
                freeze(group, on=False)
            wait_until(lambda: len(list((tmp_path / "tier").glob("run/manifests/*/*.json"))) == first + 40)
            check_nothing_failed(spool)
        finally:
            freeze(group, on=False)
    assert [part.checkpoint.step for part in spool.parts()] == list(range(first + 40))
    for step in (first - 1, first, first + 1, first + 39):
        assert same(restored(spool, step)[1], step)
