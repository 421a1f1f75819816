"""Live tensors that take bytes before the load: only those of which the load would copy nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.state_files import files_of
from torch import nn

from tierd.core.manifest import TENSORS, TREE
from tierd.state.live_tensors import direct_targets
from tierd.state.state_loading import unflatten


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a restore reads it before the tensors' values were read."""
    files = files_of(state)
    return unflatten(files[TREE], bytearray(files[TENSORS]), is_read=False)


def direct(live: dict[str, Any], saved: dict[str, Any] | None = None) -> set[int]:
    """The addresses of the live tensors that take bytes directly."""
    return {tensor.data_ptr() for tensor in direct_targets(live, stored(live if saved is None else saved)).values()}


def test_plain_tensors_and_those_of_torch_modules_are_direct():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    live = {"a": torch.ones(3), "inner": {"b": [torch.ones(2, 2), 5]}, "model": module}
    expected = {live["a"].data_ptr(), live["inner"]["b"][0].data_ptr()}
    expected |= {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    assert direct(live) == expected


def test_optimizer_is_not_direct():
    module = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert direct({"optimizer": optimizer}) == set()


class Keeping(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Own(nn.Linear):
    def load_state_dict(self, *rest, **named):
        return super().load_state_dict(*rest, **named)


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    return module


@pytest.mark.parametrize("make", [lambda: Keeping(2, 2), lambda: Own(2, 2), hooked])
def test_module_with_code_of_its_own_is_not_direct(make):
    module, other = make(), nn.Linear(2, 2)
    assert direct({"model": module}) == set()
    both = nn.Sequential(module, other)
    if not isinstance(module, Own):
        assert direct({"model": both}) == {parameter.data_ptr() for parameter in other.parameters()}


@pytest.mark.parametrize(
    "alter",
    [
        lambda tensor: tensor.t(),
        lambda tensor: tensor[:1].expand(4, 4),
        lambda tensor: tensor.double(),
        lambda tensor: tensor[:2].clone(),
        lambda tensor: tensor.to("meta"),
        lambda tensor: tensor.to_sparse(),
        lambda tensor: 5,
        lambda tensor: None,
    ],
)
def test_target_of_another_form_is_not_direct(alter):
    state = {"a": torch.arange(16.0).reshape(4, 4), "b": torch.ones(3)}
    live = {**state, "a": alter(state["a"])}
    assert direct(live, state) == {live["b"].data_ptr()}


def test_targets_that_share_memory_are_not_direct():
    base, array = torch.zeros(8), np.zeros(4, np.float32)
    saved = {"a": torch.zeros(8), "b": torch.ones(4), "c": torch.zeros(4), "d": np.ones(4, np.float32)}
    saved["e"] = torch.ones(2)
    live = {"a": base, "b": base[4:], "c": torch.from_numpy(array), "d": array, "e": torch.zeros(2)}
    assert direct(live, saved) == {live["e"].data_ptr()}


def test_saved_tensor_for_two_targets_has_a_single_direct_target():
    tensor = torch.arange(4.0)
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}
    assert direct(live, {"a": tensor, "b": tensor}) == {live["a"].data_ptr()}


def test_target_of_two_saved_tensors_is_not_direct():
    tensor = torch.zeros(4)
    assert direct({"a": tensor, "b": tensor}, {"a": torch.ones(4), "b": torch.ones(4)}) == set()


def test_saved_tensor_that_something_else_reads_has_no_direct_target():
    tensor = torch.arange(4.0)
    assert direct({"a": torch.zeros(4), "b": None}, {"a": tensor, "b": [tensor]}) == set()


def test_tied_weights_are_direct_once():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    assert direct({"model": module}) == {parameter.data_ptr() for parameter in module.parameters()}
