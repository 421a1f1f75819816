"""A model that was compiled or wrapped loads from what was saved without it, and the reverse, when it is asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.watched_run import flush
from torch import nn

import tierd
from tierd.core.errors import StateMismatch
from tierd.spool.spool import Spool
from tierd.state.kinds.live_parameters import rename_like, wrapper_difference


def net(value: float) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    for parameter in made.parameters():
        nn.init.constant_(parameter, value)
    return made


def inner_compiled(model: nn.Module) -> nn.Module:
    model[0] = nn.ModuleDict({"_orig_mod": model[0]})  # type: ignore[operator]
    return model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": lambda model: nn.ModuleDict({"_orig_mod": model}),
    "data parallel": nn.DataParallel,
    "compiled in DDP": lambda model: nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": model})}),
    "DDP, compiled": lambda model: nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": model})}),
    "a layer compiled": inner_compiled,
    "FSDP1": lambda model: nn.ModuleDict({"_fsdp_wrapped_module": model}),
}


def values(model: nn.Module) -> list[float]:
    return [one.flatten()[0].item() for one in model.parameters()]


@pytest.mark.parametrize("there", WRAPS)
@pytest.mark.parametrize("here", WRAPS)
def test_names_are_those_of_the_target(there: str, here: str) -> None:
    target, saved = WRAPS[here](net(0.0)), WRAPS[there](net(2.0)).state_dict()
    found = rename_like({"model": target, "more": 1}, {"model": saved, "more": 2})
    assert set(found["model"]) == set(target.state_dict()) and found["more"] == 2
    assert (wrapper_difference(target.state_dict(), saved) is None) == (set(saved) == set(target.state_dict()))
    target.load_state_dict(found["model"])
    assert set(values(target)) == {2.0}
    versions = [one.get("version") for one in found["model"]._metadata.values()]
    assert 2 in versions  # BatchNorm's, without which torch takes the state for an old one


def test_torch_compile_itself() -> None:
    saved = torch.compile(net(2.0)).state_dict()
    assert wrapper_difference(net(0.0).state_dict(), saved)
    assert set(rename_like({"model": net(0.0)}, {"model": saved})["model"]) == set(net(0.0).state_dict())


def test_names_that_differ_by_more_than_a_wrapper_are_left_as_they_are() -> None:
    own = {"module.weight": 1, "head": 2}
    assert wrapper_difference(own, {"weight": 1, "head": 2}) is None, "a submodule of this name is no wrapper"
    assert wrapper_difference(own, {"_orig_mod.module.weight": 1, "_orig_mod.head": 2})
    assert wrapper_difference({"a": 1, "_orig_mod.a": 2}, {"a": 1, "b": 2}) is None
    twice = {"_orig_mod._orig_mod.a": 1, "_fsdp_wrapped_module.a": 2}
    assert wrapper_difference({"a": 1, "_orig_mod.a": 2}, twice) is None
    assert wrapper_difference({1: "a"}, {"module.1": "a"}) is None
    assert wrapper_difference([], []) is None
    saved = {"x": {"_orig_mod.a": 1, "b": 2}}
    assert rename_like({"x": {"a": 0}}, saved)["x"] is saved["x"]


def test_mappings_are_renamed_at_any_depth_and_copied_for_it() -> None:
    inner = OrderedDict({"_orig_mod.a": torch.ones(1)})
    saved = {"ema": {"shadow": inner, "decay": 0.9}}
    found = rename_like({"ema": {"shadow": {"a": torch.zeros(1)}, "decay": 0.5}}, saved)
    assert list(found["ema"]["shadow"]) == ["a"] and found["ema"]["shadow"]["a"] is inner["_orig_mod.a"]
    assert saved["ema"]["shadow"] is inner and list(inner) == ["_orig_mod.a"]


def test_the_error_names_the_argument_which_loads_it(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with tierd.Checkpointer(tmp_path / "spool", "run") as ckpt:
        wrapped = WRAPS["compiled in DDP"](net(2.0))
        ckpt.save(1, {"model": wrapped, "ema": wrapped.state_dict(), "step": 1}).wait()
        state = {"model": net(0.0), "ema": net(0.0).state_dict(), "step": 0}
        with pytest.raises(StateMismatch) as raised:
            ckpt.restore(state)
        for name in ("model", "ema"):
            assert f'state["{name}"]: the names differ by prefixes of wrappers alone' in str(raised.value)
        assert "'module._orig_mod.0.weight' in the checkpoint is '0.weight' here" in str(raised.value)
        assert "ignore_prefixes=True" in str(raised.value) and state["step"] == 0
        found = ckpt.restore(state, ignore_prefixes=True)
        assert found is not None and state["step"] == 1
        assert set(values(state["model"])) == {2.0} and state["ema"]["0.weight"].max() == 2.0  # type: ignore[arg-type, index]
        flush(Spool(tmp_path / "spool"), tier)
        again: dict[str, nn.Module] = {"model": net(0.0)}
        with tierd.open(f"file://{tier}", "run") as reader:
            with pytest.raises(StateMismatch, match="ignore_prefixes=True"):
                reader.restore(again, only="model")
            reader.restore(again, only="model", ignore_prefixes=True)
        assert set(values(again["model"])) == {2.0}
