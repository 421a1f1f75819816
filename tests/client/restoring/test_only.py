"""Some entries of a checkpoint: loaded verified, from no more bytes than they take, and nothing else is touched."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from support.doubles import Double, is_chunk
from support.ranks import Group
from support.training import fresh, train
from support.world import Daemon
from torch import nn

import tierd
from tierd.core.errors import ConfigError, StateMismatch
from tierd.spool.spool import Spool


def trained(spool: Spool) -> dict:
    """A state after three steps, saved at 2."""
    state = fresh()
    train(state, 3)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.save(2, state, {"loss": 1.0}).wait()
    return state


def frozen(state: dict) -> list:
    """Everything but the model, as values."""
    return [state["optimizer"].state_dict(), state["scheduler"].state_dict(), state["epoch"], dict(state["seen"])]


def equal(one: nn.Module, other: nn.Module) -> bool:
    here, there = one.state_dict(), other.state_dict()
    return here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)


def test_the_model_alone_is_loaded_and_nothing_else_is_touched(spool):
    saved = trained(spool)
    state = fresh(seed=1)
    train(state, 1)
    random, before, optimizer = torch.get_rng_state(), str(frozen(state)), state["optimizer"]
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        found = checkpointer.restore(state, only="model")
        assert (found.step, found.tier, found.metrics) == (2, "local", {"loss": 1.0})
        assert equal(state["model"], saved["model"])
        assert str(frozen(state)) == before and state["optimizer"] is optimizer
        assert torch.equal(torch.get_rng_state(), random)
        train(state, 1)
        checkpointer.save(3, state).wait()  # and training goes on from there
    bare = {"model": fresh(seed=2)["model"]}
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        assert checkpointer.restore(bare, step=2, only=("model",)).step == 2
        assert equal(bare["model"], saved["model"])


def test_generators_and_names_of_any_kind_are_restored_alone(local):
    generator = torch.Generator().manual_seed(4)
    saved = {"\ud800": torch.arange(3), "g": {"deep": [generator]}, "w": torch.zeros(4000), "$x": 1}
    local.save(1, saved).wait()
    for name in ("\ud800", "g"):
        state = {"\ud800": None, "g": {"deep": [torch.Generator()]}, "w": 0, "$x": 0}
        local.restore(state, only=name)
        assert (state["w"], state["$x"]) == (0, 0)
        if name == "g":
            assert torch.equal(state["g"]["deep"][0].get_state(), generator.get_state())
        else:
            assert state[name].tolist() == [0, 1, 2]


def test_plain_values_tensors_and_arrays_are_restored_alone(spool):
    state = {"$a": torch.arange(5), "b": [1, {"x": torch.ones(3, dtype=torch.complex64)}], "n": 7, "z": torch.zeros(4)}
    state["np"] = torch.arange(6).numpy().reshape(2, 3)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.save(1, state).wait()
        into = dict.fromkeys(state)
        checkpointer.restore(into, only=("$a", "b", "np"))
        assert into["n"] is None and into["z"] is None and (into["np"] == state["np"]).all()
        assert torch.equal(into["$a"], state["$a"]) and torch.equal(into["b"][1]["x"], state["b"][1]["x"])
        given = torch.zeros(5, dtype=torch.int64)
        checkpointer.restore(MappingProxyType({"$a": given}), only="$a")
        assert torch.equal(given, state["$a"])


def test_restore_of_some_entries_names_a_mismatch_and_loads_nothing(spool):
    trained(spool)
    state = fresh(seed=1)
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        with pytest.raises(StateMismatch, match='"ema" not in the checkpoint; it has "model", "optimizer"'):
            checkpointer.restore({**state, "ema": nn.Linear(1, 1)}, only=("model", "ema"))
        with pytest.raises(ConfigError, match='"epoch" not in the state passed, which has "model"'):
            checkpointer.restore({"model": state["model"]}, only=("model", "epoch"))
        with pytest.raises(ConfigError, match="names nothing"):
            checkpointer.restore(state, only=())
        with pytest.raises(ConfigError, match="no entry"):
            checkpointer.restore(only="model")
        with pytest.raises(StateMismatch, match=r"state\[.model.\].*of another shape"):
            checkpointer.restore({"model": nn.Sequential(nn.Linear(8, 17))}, only="model")
        with pytest.raises(StateMismatch, match="but not in the state passed"):
            checkpointer.restore({"model": state["model"]})
        assert all(torch.equal(value, before[name]) for name, value in state["model"].state_dict().items())
        with tierd.Checkpointer(spool.root, "run", to=[]) as other, other.stage(9) as directory:
            (directory / "weights").write_bytes(b"1")
        with pytest.raises(StateMismatch, match=r"written through stage"):
            checkpointer.restore(state, only="model")


@pytest.fixture
def large() -> dict:
    """Entries of several chunks each."""
    return {
        name: torch.full((24 << 20,), float(n), dtype=torch.bfloat16) for n, name in enumerate(("a", "b", "c", "d"))
    }


def test_no_more_is_read_than_is_wanted_and_all_of_that_is_verified(spool, quick, tmp_path, large):
    tier = Double()
    with Daemon(spool.root, {"tier": tier}) as daemon:
        with tierd.Checkpointer(spool.root, "run") as checkpointer:
            for step in (1, 2):
                large["b"][5] = step
                checkpointer.save(step, large).wait()
        daemon.settle()
    path = next(spool.root.glob("run/000000000002.*/*/tensors.safetensors"))
    data = bytearray(path.read_bytes())
    data[-10] ^= 1  # of the last one
    path.write_bytes(data)
    into = dict.fromkeys(large)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        assert checkpointer.restore(into, only="a").skipped == ()
        found = checkpointer.restore(into, only="d")
    assert found.step == 1 and [one.step for one in found.skipped] == [2], "a corrupt one steps back as ever"
    assert torch.equal(into["a"], large["a"]) and into["b"] is None

    other, gets = Spool(tmp_path / "other"), len(tier.calls)
    with Daemon(other.root, {"tier": tier}), tierd.Checkpointer(other.root, "run") as checkpointer:
        found = checkpointer.restore(into, only="b")
        assert (found.step, found.tier) == (2, "tier") and torch.equal(into["b"], large["b"])
    chunks = [key for operation, key in tier.calls[gets:] if operation == "get" and is_chunk(key)]
    assert 2 <= len(chunks) <= 5, "two of its own, and those of the tree and the header"
    assert not other.parts(), "what is not whole is not committed"


def test_a_rank_that_cannot_load_them_keeps_all_from_it(spool, monkeypatch):
    group = Group(2)
    group.install(monkeypatch)

    def work(number: int):
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            more = {} if number else {"x": 2}
            checkpointer.save(1, {"a": torch.full((9,), number), "b": 1, **more}).wait()
            group.together.wait()
            into = {"a": torch.zeros(9, dtype=torch.int64), "x": 0}
            assert checkpointer.restore(into, only="a").step == 1 and (into["a"] == number).all()
            return checkpointer.restore(into, only="x")

    first, second = group.run(work)
    assert isinstance(first, StateMismatch) and "rank 1" in str(first)
    assert isinstance(second, StateMismatch) and '"x" not in the checkpoint; it has "a", "b"' in str(second)
