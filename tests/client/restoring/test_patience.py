"""A restore and a tier that answers, but slowly."""

from __future__ import annotations

import shutil
import time

import pytest
import torch
from support.doubles import Double
from support.timed import timed
from support.world import Daemon, hurry

import tierd
from tierd.core.errors import StoreUnavailable
from tierd.daemon.daemon_timings import USUAL


@pytest.fixture
def store(tmp_path, monkeypatch) -> Double:
    """A tier, and a spool, that have steps 1 and 2."""
    hurry(monkeypatch)
    store = Double()
    with Daemon(tmp_path / "spool", {"tier": store}), tierd.Checkpointer(tmp_path / "spool", "r") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.full((10,), float(step))}).wait("tier", timeout=60)
    return store


def restored(spool, store: Double, delay: float) -> int:
    """The step that a restore gave while the tier took `delay` seconds for each answer."""
    with Daemon(spool, {"tier": store}) as daemon, tierd.Checkpointer(spool, "r") as ckpt:
        daemon.settle()
        store.delay = delay
        state = {"w": torch.zeros(10)}
        try:
            found = ckpt.restore(state)
        finally:
            store.delay = 0.0
        assert found and bool((state["w"] == found.step).all())
        return found.step


def test_complete_checkpoint_in_the_spool_waits_for_a_slow_tier_no_longer_than_documented(
    tmp_path, store, caplog, monkeypatch
):
    assert USUAL.restore_s == 60.0  # as the page on restores says
    timed(monkeypatch, restore_s=0.3)
    assert restored(tmp_path / "spool", store, 3600.0) == 2
    assert "tier: slow, not down: no answer within 0 s; a restore of r" in caplog.text


@pytest.mark.parametrize("known", [True, False])
def test_a_node_that_was_stopped_while_its_tier_answered_restores_the_newest(tmp_path, store, monkeypatch, known):
    """A scheduler may stop all processes of a job for hours. When they go on, every deadline is past."""
    timed(monkeypatch, restore_s=3.0, answers_s=3.0)
    spool = tmp_path / "spool"
    shutil.rmtree(next(spool.glob("r/000000000002.*")))
    (spool / ".tierd/timeline/r.json").unlink(missing_ok=True)
    stopped = []

    def stop_once(operation: str, key: str) -> None:
        if not stopped and operation == "scan":
            stopped.append(key)
            time.sleep(5.0)

    store.error = None if known else StoreUnavailable("down")
    with Daemon(spool, {"tier": store}), tierd.Checkpointer(spool, "r") as ckpt:
        store.error, store.delay, store.before = None, 0.02, stop_once
        found = ckpt.restore(state := {"w": torch.zeros(10)})
        store.delay = 0.0
    assert stopped and found and found.step == 2 and found.unreached == () and bool((state["w"] == 2).all())


@pytest.mark.parametrize("lost", ["run", "newest"])
def test_restore_waits_for_a_slow_tier_that_may_have_a_newer_checkpoint(tmp_path, store, caplog, monkeypatch, lost):
    timed(monkeypatch, restore_s=0.05)
    home = tmp_path / "spool" / "r"
    for path in home.glob("0*" if lost == "run" else "000000000002.*"):
        for part in path.iterdir():
            for file in part.iterdir():
                file.unlink()
            part.rmdir()
        path.rmdir()
    assert restored(tmp_path / "spool", store, 0.5) == 2
    assert "slow, not down" not in caplog.text
