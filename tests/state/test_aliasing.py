"""Targets that share memory take a checkpoint that has the same bytes for all of them, and no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.training import through
from torch import nn

from tierd.core.errors import StateMismatch
from tierd.state.state_loading import load_restored


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"emb": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["emb"].weight
    return model


def views(*cuts: slice) -> dict[str, torch.Tensor]:
    flat = torch.zeros(8)
    return {f"v{index}": flat[cut] for index, cut in enumerate(cuts)}


def as_bytes(target: torch.Tensor) -> dict[str, object]:
    return {"t": target, "bytes": target.view(torch.uint8)}


w, matrix, row = torch.zeros(3), torch.zeros(3, 4), np.zeros(6, "f4")
spread = torch.zeros(20, dtype=torch.cfloat)

# What is saved, what it is loaded into, and the places that the error names.
DIFFERENT = {
    "tied weights": (
        {"m": nn.ModuleDict({"emb": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})},
        {"m": tied()},
        ['"emb.weight" of state["m"]', '"head.weight" of state["m"]'],
    ),
    "one tensor": ({"a": torch.arange(3.0), "b": torch.ones(3)}, {"a": w, "b": w}, ['state["a"]', 'state["b"]']),
    "a sign of zero": ({"a": torch.zeros(3), "b": -torch.zeros(3)}, {"a": w, "b": w}, ['state["a"]', 'state["b"]']),
    "a module and a plain tensor": (
        {"m": nn.Linear(2, 2), "w": torch.ones(2, 2)},
        {"m": (linear := nn.Linear(2, 2)), "w": linear.weight},
        ['"weight" of state["m"]', 'state["w"]'],
    ),
    "views that overlap": (
        {"v0": torch.ones(5), "v1": torch.zeros(5)},
        views(slice(0, 5), slice(3, 8)),
        ['state["v0"]', 'state["v1"]'],
    ),
    "beyond a smaller view": (
        {"v0": torch.ones(8), "v1": torch.ones(2), "v2": torch.zeros(2)},
        views(slice(0, 8), slice(1, 3), slice(5, 7)),
        ['state["v0"]', 'state["v2"]'],
    ),
    "a transposed view": (
        {"a": torch.arange(9.0).view(3, 3), "b": torch.arange(9.0).view(3, 3)},
        {"a": (square := torch.zeros(3, 3)), "b": square.t()},
        ['state["a"]', 'state["b"]'],
    ),
    "columns that overlap": (
        {"a": torch.ones(3, 3), "b": torch.zeros(3, 2)},
        {"a": matrix[:, :3], "b": matrix[:, 2:]},
        ['state["a"]', 'state["b"]'],
    ),
    "itself": (
        {"t": torch.arange(9.0).view(3, 3)},
        {"t": torch.zeros(5).as_strided((3, 3), (1, 1))},
        ['state["t"]: its own elements share memory'],
    ),
    "an array and a tensor": (
        {"a": np.arange(6, dtype="f4"), "t": torch.zeros(6)},
        {"a": row, "t": torch.from_numpy(row)},
        ['state["a"]', 'state["t"]'],
    ),
    "an array and its reverse": (
        {"a": np.arange(6), "b": np.arange(6)},
        {"a": (numbers := np.zeros(6, "i8")), "b": numbers[::-1]},
        ['state["a"]', 'state["b"]'],
    ),
    "a conjugate": (
        {"a": torch.full((3,), 1j), "b": torch.full((3,), 1j)},
        {"a": spread[:3], "b": spread[:3].conj()},
        ['state["a"]', 'state["b"]'],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_tensors_that_share_memory_and_were_not_the_same_are_named(name):
    saved, target, named = DIFFERENT[name]
    target = {**target, "first": 0}
    with pytest.raises(StateMismatch, match="share memory") as caught:
        load_restored(target, through({**saved, "first": 7}))
    assert all(place in str(caught.value) for place in named), caught.value
    assert target["first"] == 0
    for value in target.values():
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            assert not value.any()


def loaded(saved: dict[str, object], target: dict[str, object]) -> None:
    load_restored(target, through(saved))
    for name, value in saved.items():
        assert (target[name] == value).all(), name


def test_tied_or_equal_tensors_are_loaded():
    model, other = tied(), tied()
    load_restored({"m": other}, through({"m": model}))
    assert torch.equal(other["head"].weight, model["emb"].weight)
    nan = torch.tensor([float("nan"), 1.0])
    load_restored({"a": (both := torch.zeros(2)), "b": both}, through({"a": nan, "b": nan.clone()}))
    assert both.isnan()[0] and both[1] == 1
    loaded(as_bytes(torch.arange(3.0)), as_bytes(torch.zeros(3)))
    base = torch.arange(8.0)
    loaded({"v0": base[:5], "v1": base[3:], "v2": base[4:5]}, views(slice(0, 5), slice(3, 8), slice(4, 5)))
    whole = torch.zeros(3, 3)
    loaded({"a": (nine := torch.arange(9.0).view(3, 3)), "b": nine.t().clone()}, {"a": whole, "b": whole.t()})
    line = torch.arange(5.0)
    loaded({"t": line.as_strided((3, 3), (1, 1)).clone()}, {"t": torch.zeros(5).as_strided((3, 3), (1, 1))})
    row = np.zeros(6)
    loaded({"a": np.arange(6.0), "b": np.arange(6.0)[::-1].copy()}, {"a": row, "b": row[::-1]})
    pair = torch.zeros(3, dtype=torch.cfloat)
    loaded({"a": torch.full((3,), 1 + 1j), "b": torch.full((3,), 1 - 1j)}, {"a": pair, "b": pair.conj()})


def test_views_that_lie_side_by_side_are_loaded():
    """As FSDP and DDP keep parameters in one flat tensor; columns alternate in memory, and share none of it."""
    loaded({f"v{i}": torch.full((2,), i + 1.0) for i in range(4)}, views(*(slice(i, i + 2) for i in range(0, 8, 2))))
    fused = torch.zeros(4, 6)
    loaded({"q": torch.ones(4, 3), "k": torch.full((4, 3), 2.0)}, {"q": fused[:, :3], "k": fused[:, 3:]})
    strided = torch.zeros(8)
    loaded({"even": torch.ones(4), "odd": torch.full((4,), 3.0)}, {"even": strided[::2], "odd": strided[1::2]})
    loaded({"a": torch.ones(0), "b": torch.zeros(0)}, {"a": (none := torch.zeros(0)), "b": none})


@pytest.mark.parametrize(
    ("a", "b"),
    [([1], [2]), ({"x": 1}, {"x": 1, "y": 2}), ({"x": [torch.ones(2)]}, {"x": [torch.zeros(2)]})],
)
def test_one_container_takes_no_two_contents(a, b):
    one = type(a)()
    with pytest.raises(StateMismatch, match=r'state\["a"\] and state\["b"\] are one (list|dict) here'):
        load_restored({"a": one, "b": one}, through({"a": a, "b": b}))
    assert not one
    load_restored(into := {"a": one, "b": one}, through({"a": a, "b": a}))
    assert into["a"] is into["b"] is one and len(one) == len(a)
    load_restored(into := {"a": (other := type(a)()), "b": other}, through({"a": a, "b": None}))  # replaced, not filled
    assert into["a"] is other and into["b"] is None
