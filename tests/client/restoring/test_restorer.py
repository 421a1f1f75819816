"""Restoring: the newest verified checkpoint of the timeline or a reason, the same for every rank, and never silence."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch
from support.doubles import Double, contents, flip, flipped, is_chunk
from support.timed import timed_client
from support.training import fresh, same, tensors, train
from support.waiting import wait_until
from support.world import Daemon, attempt, hurry, listing

import tierd
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    DaemonUnavailable,
    SaveFailed,
    SpoolFull,
    SpoolUnusable,
    StateMismatch,
    StepRefused,
    StoreUnavailable,
)
from tierd.spool.spool import Spool


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)
    timed_client(monkeypatch, start_s=0.2)


def save(spool: Spool, *steps: int, after: int | None = None, **options) -> str:
    """One launch: resume from `after`, or from nothing at all, and save `steps`; its attempt."""
    with tierd.Checkpointer(spool.root, "run", **{"to": [], **options}) as checkpointer:
        if after is not None:
            checkpointer.restore(tensors(0), step=after)
        for step in steps:
            checkpointer.save(step, tensors(step)).wait()
        return checkpointer.attempt


def resume(spool: Spool, **options) -> tuple[tierd.Restored | None, dict]:
    """One launch that resumes; the checkpoint that it gets was loaded bit for bit."""
    asked = {name: options.pop(name) for name in ("step", "attempt") if name in options}
    state = tensors(10**6)
    with tierd.Checkpointer(spool.root, "run", **{"to": [], **options}) as checkpointer:
        found = checkpointer.restore(state, **asked)
    assert same(state, found.step if found else 10**6)
    return found, state


def files(spool: Spool, step: int) -> list[Path]:
    return sorted(spool.root.glob(f"run/{step:012}.*/*/tensors.safetensors"))


def corrupt(spool: Spool, step: int) -> None:
    for path in files(spool, step):
        path.write_bytes(flipped(path.read_bytes()))


# -- the timeline -----------------------------------------------------------------------------------------------------


def test_rollback_continues_from_the_checkpoint_that_it_restored(spool):
    save(spool, 100, 200, 300)
    save(spool, 210, after=200)
    assert resume(spool)[0].step == 210
    corrupt(spool, 210)
    found = resume(spool)[0]
    assert found.step == 200 and [one.step for one in found.skipped] == [210]
    corrupt(spool, 200)
    assert resume(spool)[0].step == 100, "never 300, which the timeline has left"


def test_checkpoint_that_the_timeline_left_can_be_asked_for(spool):
    first = save(spool, 100, 200, 300)
    save(spool, 210, after=200)
    assert resume(spool, step=300)[0].step == 300
    assert resume(spool, attempt=first)[0].step == 300
    for step in (100, 200, 210):
        corrupt(spool, step)
    with pytest.raises(CheckpointNotFound, match=rf"step 300 of attempt {first}"):
        resume(spool)


def test_restoring_after_saving_begins_a_new_attempt(spool):
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        before = checkpointer.save(1, tensors(1)).part.checkpoint.attempt
        checkpointer.save(2, tensors(2))
        assert checkpointer.restore(tensors(0), step=1).attempt == before
        again = checkpointer.save(2, tensors(2))  # the step is free in the new attempt
        again.wait()
        assert again.part.checkpoint.attempt > before
    found = resume(spool)[0]
    assert (found.step, found.attempt) == (2, again.part.checkpoint.attempt)
    corrupt(spool, 2)
    assert resume(spool)[0].step == 1


def test_a_clock_set_back_reorders_nothing(spool, monkeypatch):
    first = save(spool, 100, 200)
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)  # in 2001
    second = save(spool, 110, after=100)
    third = save(spool, 105, after=100)
    assert first < second < third
    assert resume(spool)[0].step == 105


def test_given_attempt_must_be_later_than_the_attempt_that_it_resumes_from(spool):
    save(spool, 5, attempt=attempt(2))
    with pytest.raises(ConfigError, match="later"):
        _with_given(spool, attempt(1))
    with pytest.raises(ConfigError, match="an earlier launch's"):
        _with_given(spool, attempt(2))
    assert _with_given(spool, attempt(3)).step == 5


def _with_given(spool: Spool, name: str):
    with tierd.Checkpointer(spool.root, "run", attempt=name, to=[]) as checkpointer:
        return checkpointer.restore(tensors(0))


# -- what cannot be verified ------------------------------------------------------------------------------------------


def test_without_tiers_a_corrupt_newest_steps_back_and_says_so(spool):
    save(spool, 1, 2, 3)
    corrupt(spool, 3)
    found = resume(spool)[0]
    assert found.step == 2
    assert [(one.step, "differ from their digest" in one.reason) for one in found.skipped] == [(3, True)]
    later = resume(spool)[0]
    assert later.step == 2 and [one.step for one in later.skipped] == [3], "and the next launch is told as well"


def test_a_run_that_lost_every_checkpoint_never_starts_anew_in_silence(spool):
    """A launcher that restarts the failed trainer must not get None the second time."""
    save(spool, 1, 2)
    corrupt(spool, 1)
    corrupt(spool, 2)
    for _ in range(3):
        with pytest.raises(CheckpointNotFound) as error:
            resume(spool)
        assert "step 1" in str(error.value) and "step 2" in str(error.value)
    with tierd.Checkpointer(spool.root, "another", to=[]) as checkpointer:
        assert checkpointer.restore() is None


def test_restore_is_no_fresh_start_when_the_daemon_quarantined_every_checkpoint_before(spool):
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        checkpointer.save(1, tensors(1))
    manifest = files(spool, 1)[0].with_name("manifest.json")
    manifest.write_bytes(flipped(manifest.read_bytes()))
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        daemon.settle()
        assert not spool.parts() and spool.quarantined()
        with pytest.raises(CheckpointNotFound, match="quarantined"):
            resume(spool, to=None)


def test_no_daemon_and_an_empty_spool_is_no_fresh_start(spool):
    with pytest.raises(DaemonUnavailable, match="tiers cannot be asked"):
        resume(spool, to=None)


def test_no_daemon_and_a_corrupt_newest_is_no_step_back(spool):
    save(spool, 1, 2)
    corrupt(spool, 2)
    before = listing(spool)
    with pytest.raises(DaemonUnavailable, match=r"step 2.*restore\(state, step="):
        resume(spool, to=None)
    assert listing(spool) == before, "and nothing is set aside"
    assert resume(spool, to=None, step=1)[0].step == 1


def test_no_daemon_and_a_whole_newest_is_enough(spool):
    save(spool, 1, 2)
    assert resume(spool, to=None)[0].step == 2


def test_an_unreadable_disk_is_no_corruption(spool, monkeypatch):
    save(spool, 1, 2)
    bad, real = files(spool, 2)[0], os.preadv

    def failing(fd, *rest):
        if os.readlink(f"/proc/self/fd/{fd}") == str(bad):
            raise OSError(5, os.strerror(5))
        return real(fd, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StoreUnavailable, match=r"cannot be read"):
        resume(spool)
    assert bad.exists()
    monkeypatch.setattr(os, "preadv", real)
    assert resume(spool)[0].step == 2


def test_a_tier_that_does_not_answer_is_named_and_never_a_fresh_start(spool):
    store = Double()
    with Daemon(spool.root, {"tier": store}):
        assert resume(spool, to=None)[0] is None
        store.error = StoreUnavailable("down")
        with pytest.raises(StoreUnavailable, match="tier did not answer"):
            resume(spool, to=None)
        save(spool, 1, to=None)
        assert resume(spool, to=None)[0].unreached == ("tier",)


# -- from the tiers ---------------------------------------------------------------------------------------------------


def test_corrupt_local_copy_is_repaired_and_a_corrupt_pair_is_skipped(spool):
    store = Double()
    with Daemon(spool.root, {"tier": store}) as daemon:
        save(spool, 1, 2, to=None)
        daemon.settle()
        corrupt(spool, 2)
        assert (resume(spool, to=None)[0].step, resume(spool, to=None)[0].tier) == (2, "local")
        corrupt(spool, 2)
        for key in daemon.call(contents(store.inner)):
            if is_chunk(key) and "/000000000002." in key:
                daemon.call(flip(store.inner, key))
        found = resume(spool, to=None)[0]
        assert found.step == 1 and [one.step for one in found.skipped] == [2]
        assert "local" in found.skipped[0].reason and "tier" in found.skipped[0].reason
        corrupt(spool, 1)
        store.error = StoreUnavailable("down")
        with pytest.raises(StoreUnavailable):
            resume(spool, to=None)


# -- into the state ---------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_left_as_it_is(spool):
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        state = fresh()
        train(state, 2)
        checkpointer.save(1, state)
    other = fresh(seed=3)
    other["model"] = torch.nn.Sequential(torch.nn.Linear(8, 17))
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
    before = {name: value.clone() for name, value in other["model"].state_dict().items()}
    generator = torch.get_rng_state()
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        with pytest.raises(StateMismatch, match="model"):
            checkpointer.restore(other)
        after = other["model"].state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before) and before.keys() == after.keys()
        assert other["epoch"] == 0 and torch.equal(generator, torch.get_rng_state())
        found = checkpointer.restore(None)
        assert sorted(path.name for path in found.directory.iterdir()) == [
            "manifest.json",
            "state.json",
            "tensors.safetensors",
        ]


@pytest.mark.parametrize("step", [1.0, True, -1, "1"], ids=repr)
def test_a_step_that_is_no_step_cannot_be_asked_for(spool, step):
    save(spool, 1)
    with pytest.raises(StepRefused):
        resume(spool, step=step)


def test_a_step_that_is_not_there_is_an_error(spool):
    save(spool, 1, 2)
    with pytest.raises(CheckpointNotFound, match="step 7: there is no such checkpoint"):
        resume(spool, step=7)
    with pytest.raises(ConfigError), tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.restore(attempt="../../etc")


@pytest.mark.parametrize("below", [False, True], ids=["nothing is there", "an empty mount point is there"])
def test_a_spool_that_vanished_is_no_fresh_start(spool, below):
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.save(1, tensors(1)).wait()
        away = spool.root.rename(spool.root.with_name("away"))
        if below:
            spool.root.mkdir()
        with pytest.raises(SpoolUnusable, match="mounted"):
            checkpointer.restore(tensors(10**6))
        if below:
            spool.root.rmdir()
        away.rename(spool.root)
        assert checkpointer.restore(tensors(10**6)).step == 1


def test_one_unreadable_manifest_hides_no_other_checkpoint(spool, monkeypatch):
    save(spool, 1, 2)
    real = Spool.manifest

    def fail(self, part):
        if part.checkpoint.step == 1:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, part)

    monkeypatch.setattr(Spool, "manifest", fail)
    assert resume(spool)[0].step == 2
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        resume(spool, step=1)


# -- what the daemon is told ------------------------------------------------------------------------------------------


def test_daemon_is_notified_of_samples_that_repeat(spool):
    with Daemon(spool.root, {}) as daemon, tierd.Checkpointer(spool.root, "run") as checkpointer:
        watch = tierd.SampleWatch(checkpointer)
        assert watch.see(6, [3, 4], 0) == 0 and watch.see(7, [4, 5], 0) == 1
        journal = daemon.reconciler.journal
        wait_until(lambda: "samples leaked" in [event.what for event in journal.events])
        (reported,) = [event for event in journal.events if event.what == "samples leaked"]
        assert (reported.step, reported.rank, reported.level) == (7, 0, "error")
        assert reported.why == "1 samples of step 7 came twice in epoch 0: 4"


def corrupt_everywhere(spool, daemon, step: int) -> None:
    corrupt(spool, step)
    store = daemon.reconciler.stores["tier"]
    for key, data in daemon.call(contents(store)).items():
        if is_chunk(key) and f"{step:012}." in key:
            daemon.call(store.put(key, flipped(data)))


def test_older_quarantined_checkpoint_makes_no_restore_a_fallback(spool):
    with Daemon(spool.root, {"tier": Double()}) as daemon:

        def steps() -> list[int | None]:
            return [event.step for event in daemon.reconciler.journal.events if event.what == "fell back"]

        save(spool, 1, 2, 3, to=None)
        daemon.settle()
        corrupt_everywhere(spool, daemon, 2)
        with pytest.raises(CheckpointNotFound):
            resume(spool, to=None, step=2)
        assert resume(spool, to=None)[0].step == 3
        corrupt_everywhere(spool, daemon, 3)
        assert resume(spool, to=None)[0].step == 1
        wait_until(lambda: 1 in steps())
        assert steps() == [1]


def test_daemon_is_notified_of_checkpoints_that_a_restore_passed_over_and_of_saves_given_up(spool, monkeypatch):
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        journal = daemon.reconciler.journal
        save(spool, 1, 2, to=None)
        daemon.settle()
        assert resume(spool, to=None)[0].step == 2 and "fell back" not in [event.what for event in journal.events]
        corrupt_everywhere(spool, daemon, 2)
        assert resume(spool, to=None)[0].step == 1
        wait_until(lambda: "fell back" in [event.what for event in journal.events])
        (reported,) = [event for event in journal.events if event.what == "fell back"]
        assert (reported.step, reported.run, reported.rank) == (1, "run", None) and "step 2" in reported.why

        monkeypatch.setattr("tierd.client.saving.save_pipeline.write_part", _no_room)
        monkeypatch.setattr(
            "tierd.client.saving.snapshot_handoff.HandoffClient.hand_over", lambda *_: None
        )  # the daemon cannot know
        with (
            pytest.raises(SaveFailed, match=r"3 saves \(steps 3, 4, 5\) are in no place"),
            tierd.Checkpointer(spool.root, "run") as checkpointer,
        ):
            for step in (3, 4, 5):
                handle = checkpointer.save(step, tensors(step))
                with pytest.raises(SaveFailed):
                    handle.wait()
        wait_until(lambda: journal.alerts())
        failed = [event for event in journal.events if event.what == "persist failed"]
        assert [(event.step, event.rank) for event in failed] == [(3, 0), (4, 0), (5, 0)]
        assert [(alert.doing, alert.place) for alert in journal.alerts()] == [("save", "local")]


def test_daemon_is_notified_of_a_stage_that_could_not_be_written(spool, monkeypatch):
    with Daemon(spool.root, {"tier": Double()}) as daemon, tierd.Checkpointer(spool.root, "run") as checkpointer:
        journal = daemon.reconciler.journal

        def failed() -> list[tuple[int | None, str]]:
            return [(event.step, event.why) for event in journal.events if event.what == "persist failed"]

        def fails(step: int, error: BaseException) -> None:
            with pytest.raises(type(error)), checkpointer.stage(step):
                raise error

        fails(1, RuntimeError("the other library came to a bad end"))
        wait_until(lambda: failed() == [(1, "the other library came to a bad end")])
        fails(2, KeyboardInterrupt())  # somebody's decision
        with checkpointer.stage(3) as directory:
            (directory / "weights").write_bytes(b"right")
        with pytest.raises(StepRefused), checkpointer.stage(3):
            pass  # what is there was not lost
        daemon.settle()
        with monkeypatch.context() as patch:
            patch.setattr("tierd.client.saving.savers.describe_directory", _no_room)
            for step in (4, 5, 6):
                with pytest.raises(SpoolFull), checkpointer.stage(step):
                    pass
                wait_until(lambda step=step: failed()[-1][0] == step)
        assert [step for step, _ in failed()] == [1, 4, 5, 6] and "no space" in failed()[-1][1].lower()
        assert [(alert.doing, alert.tries) for alert in journal.alerts()] == [("save", 3)]
        with checkpointer.stage(7) as directory:
            (directory / "weights").write_bytes(b"right")
        daemon.settle()
        assert not journal.alerts()


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
