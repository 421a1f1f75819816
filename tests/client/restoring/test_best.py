"""Restoring the best: by rank 0's manifests, verified like any other, or a reason; never a guess."""

from __future__ import annotations

import shutil

import pytest
import torch
from support.doubles import Double, flipped
from support.ranks import Group
from support.training import fresh, same, tensors, train
from support.world import Daemon

import tierd
from tierd.core.errors import CheckpointNotFound, ConfigError, StoreUnavailable
from tierd.spool.spool import Spool

LOSSES = {1: 4.0, 2: 2.0, 3: 1.0, 4: 3.0, 5: float("nan")}


def save(spool: Spool, losses=LOSSES, **options) -> None:
    with tierd.Checkpointer(spool.root, "run", **{"to": [], **options}) as checkpointer:
        for step, loss in losses.items():
            checkpointer.save(step, tensors(step), {"loss": loss, "acc": 1 - loss}).wait()


def restore(spool: Spool, **asked) -> tierd.Restored | None:
    state, options = tensors(0), {"to": asked.pop("to", [])}
    with tierd.Checkpointer(spool.root, "run", **options) as checkpointer:
        found = checkpointer.restore(state, **asked)
    assert same(state, found.step if found else 0)
    return found


def harm(spool: Spool, step: int, number: int = 0, world: int = 1, name: str = "tensors.safetensors") -> None:
    path = next(spool.root.glob(f"run/{step:012}.*/{number:05}-of-{world:05}/{name}"))
    path.write_bytes(flipped(path.read_bytes()))


def test_best_checkpoint_is_restored_and_training_continues_from_there(spool):
    save(spool)
    assert restore(spool, best="loss").step == 3
    assert restore(spool, best="loss", mode="max").step == restore(spool, best="acc").step == 1
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        assert checkpointer.restore(tensors(0), best="loss").metrics["loss"] == 1.0
        checkpointer.save(4, tensors(4), {"loss": 9.0}).wait()  # the step is free on the branch
    assert restore(spool).step == 4
    assert restore(spool, best="loss").step == 3
    assert restore(spool, best="loss", mode="max").metrics == {"loss": 9.0}, "the 4.0 of step 1 lies below"


def test_corrupt_best_checkpoint_is_named_and_the_next_best_is_restored(spool):
    save(spool)
    harm(spool, 3)
    found = restore(spool, best="loss")
    assert found.step == 2 and [one.step for one in found.skipped] == [3]
    assert [one.step for one in restore(spool, best="loss").skipped] == [3], "also when it was set aside before"
    assert restore(spool, best="loss", mode="max").skipped == (), "which is not better by that"
    harm(spool, 2, name="manifest.json")
    found = restore(spool, best="loss")
    assert found.step == 4 and {one.step for one in found.skipped} == {2, 3}


def test_restore_of_best_refuses_invalid_arguments(spool):
    assert restore(spool, best="loss") is None, "a fresh start"
    save(spool)
    with pytest.raises(CheckpointNotFound, match=r"metric 'val'; there are: acc, loss"):
        restore(spool, best="val")
    with pytest.raises(ConfigError, match="one of the two"):
        restore(spool, best="loss", step=3)
    for asked in ({"best": ""}, {"best": 3}, {"best": "loss", "mode": "auto"}):
        with pytest.raises(ConfigError, match=r"mode=|best="):
            restore(spool, **asked)


def test_best_checkpoint_is_fetched_from_a_tier_and_never_guessed(spool, quick, tmp_path):
    tier = Double()
    with Daemon(spool.root, {"tier": tier}) as daemon:
        save(spool, to=None)
        daemon.settle()
        other = Spool(tmp_path / "other")
    with Daemon(other.root, {"tier": tier}):
        assert restore(other, best="loss", to=None).tier == "tier"
    shutil.rmtree(other.root)
    with Daemon(other.root, {"tier": tier}):
        tier.error = StoreUnavailable("down")
        with pytest.raises(StoreUnavailable, match=r"best by 'loss' cannot be told: tier did not answer"):
            restore(other, best="loss", to=None)
    with Daemon(spool.root, {"tier": tier}), pytest.raises(StoreUnavailable, match="cannot be told"):
        restore(spool, best="loss", to=None)  # though it has one, there may be a better one


def test_all_ranks_get_the_best_of_rank_0_and_step_back_together(spool, monkeypatch):
    group = Group(2)
    group.install(monkeypatch)

    def saving(number: int) -> None:
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            for step, loss in LOSSES.items():
                checkpointer.save(step, tensors(step + number), {"loss": loss if number == 0 else -loss}).wait()

    def restoring(number: int, **asked):
        state = tensors(0)
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            found = checkpointer.restore(state, **{"best": "loss", **asked})
            assert same(state, found.step + number)
            return found.step, [one.reason[:6] for one in found.skipped]

    assert group.run(saving) == [None] * 2
    assert group.run(restoring) == [(3, [])] * 2
    harm(spool, 3, 1, 2)
    assert group.run(restoring) == [(2, ["rank 1"])] * 2
    for error in group.run(lambda number: restoring(number, mode=("min", "max")[number])):
        assert isinstance(error, ConfigError) and "the best checkpoint (max loss)" in str(error)


def test_early_stopping_restores_the_best_at_the_end(spool):
    torch.manual_seed(0)
    state = {**fresh(), "stopping": tierd.EarlyStopping("loss", patience=2)}
    weights = {}
    with tierd.Checkpointer(spool.root, "run", to=[], when=tierd.When(best="loss")) as checkpointer:
        for step, loss in enumerate([5.0, 3.0, 4.0, 3.5, 1.0]):
            train(state)
            weights[step] = {name: value.clone() for name, value in state["model"].state_dict().items()}
            if checkpointer.due(step, metrics={"loss": loss}):
                checkpointer.save(step, state)
            if state["stopping"].stop({"loss": loss}):
                assert checkpointer.restore(state, best="loss").step == 1
                break
        train(state)
        assert checkpointer.restore(state, best="loss", only="model").step == 1
    assert step == 3
    found = state["model"].state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights[1].items())
    assert state["stopping"].state_dict()["best"] == 5.0, "as it was when step 1 was saved, before its loss was told"
