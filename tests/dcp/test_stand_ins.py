"""`tierd.dcp.load` into objects whose own state has no right size before: optimizers, and modules' extra states."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import tierd
import tierd.dcp
from tierd.core.errors import StateMismatch
from tierd.state.aliasing import is_same_content

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES = {"a": (3, 3), "b": (3, 3), "c": (3,)}


def save(checkpointer, how, state):
    if how == "save":
        checkpointer.save(1, state).wait()
    else:
        dcp.save(state, storage_writer=tierd.dcp.StorageWriter(checkpointer, 1))


def optimizer(order, *, seed=None, names=True, kind=torch.optim.AdamW):
    own = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    made = kind([(name, own[name]) for name in order] if names else [own[name] for name in order])
    if seed is not None:
        for place, name in enumerate(SHAPES):
            own[name].grad = torch.full(SHAPES[name], float(seed + place))
        made.step()
    return made, own


def moments(made, own):
    return {name: made.state[parameter] for name, parameter in own.items()}


@pytest.mark.parametrize("how", ["save", "dcp"])
@pytest.mark.parametrize("seed", [None, 9], ids=["fresh", "stepped"])
def test_moments_are_assigned_by_name_for_parameters_in_another_order(local, how, seed):
    saved, own = optimizer("abc", seed=1)
    save(local, how, {"optimizer": saved})
    restored, fresh = optimizer("bca", seed=seed)
    assert tierd.dcp.load({"optimizer": restored}, local).step == 1
    assert is_same_content(moments(restored, fresh), moments(saved, own))
    assert restored.param_groups[0]["param_names"] == ["b", "c", "a"]


@pytest.mark.parametrize("how", ["save", "dcp"])
def test_without_names_shapes_decide_before_anything_is_loaded(local, how):
    saved, _ = optimizer("abc", seed=1, names=False)
    save(local, how, {"optimizer": saved, "t": torch.ones(3)})
    restored, _ = optimizer("bca", names=False)
    state = {"optimizer": restored, "t": torch.zeros(3)}
    with pytest.raises(StateMismatch, match=r"'optimizer': \"exp_avg\" of parameter 1 of group 0"):
        tierd.dcp.load(state, local)
    assert not restored.state
    assert not state["t"].any()


@pytest.mark.parametrize("how", ["save", "dcp"])
def test_other_names_are_refused_before_anything_is_loaded(local, how):
    saved, _ = optimizer("abc", seed=1)
    save(local, how, {"optimizer": saved})
    restored = torch.optim.AdamW(
        [(name, nn.Parameter(torch.zeros(SHAPES["abc"[at]]))) for at, name in enumerate("abd")]
    )
    with pytest.raises(StateMismatch, match=r'the parameters "d" not in the checkpoint; "c" in the checkpoint'):
        tierd.dcp.load({"optimizer": restored}, local)
    assert not restored.state


@pytest.mark.parametrize("how", ["save", "dcp"])
@pytest.mark.parametrize("names", [(True, False), (False, True)], ids=str)
def test_one_side_with_names_is_loaded_by_position(local, how, names):
    saved, own = optimizer("abc", seed=1, names=names[0])
    save(local, how, {"optimizer": saved})
    restored, fresh = optimizer("abc", names=names[1])
    assert tierd.dcp.load({"optimizer": restored}, local).step == 1
    assert is_same_content(moments(restored, fresh), moments(saved, own))


class Extra(nn.Module):
    def __init__(self, extra, *, takes=True):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra, self.takes = extra, takes

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        if not self.takes:
            raise RuntimeError("not mine")
        self.extra = state


EXTRAS = {
    "longer": (torch.arange(7), torch.zeros(3, dtype=torch.int64)),
    "of another dtype": (torch.arange(7.0), torch.zeros(3, dtype=torch.int64)),
    "empty before": (torch.arange(7), torch.zeros(0, dtype=torch.uint8)),
    "a tensor for a dict": (torch.arange(7), {"amax": torch.zeros(2)}),
    "a dict for a tensor": ({"amax": torch.ones(2), "step": 3}, torch.zeros(2)),
    "a dict": ({"amax": [torch.ones(2), torch.ones(3)], "step": 3}, {"amax": [], "step": 0}),
    "bytes": (io.BytesIO(b"scales"), io.BytesIO()),
}


def content(extra):
    return extra.getvalue() if isinstance(extra, io.BytesIO) else extra


@pytest.mark.parametrize("how", ["save", "dcp"])
@pytest.mark.parametrize(("saved", "own"), EXTRAS.values(), ids=EXTRAS)
def test_a_module_is_given_the_extra_state_that_was_saved(local, how, saved, own):
    save(local, how, {"model": nn.Sequential(Extra(saved), nn.Linear(2, 2))})
    model = nn.Sequential(Extra(own), nn.Linear(2, 2))
    assert tierd.dcp.load({"model": model}, local).step == 1
    assert is_same_content(content(model[0].extra), content(saved))


@pytest.mark.parametrize("how", ["save", "dcp"])
def test_a_model_s_state_dict_takes_an_extra_state_of_another_length(local, how):
    save(local, how, {"model": Extra(torch.arange(7))})
    model = Extra(torch.zeros(3, dtype=torch.int64))
    state = {"model": model.state_dict()}
    given = state["model"]
    assert tierd.dcp.load(state, local).step == 1
    assert state["model"] is given
    model.load_state_dict(given)
    assert model.extra.tolist() == list(range(7))
