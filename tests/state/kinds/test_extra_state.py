"""A module decides what it takes as its extra state, as in torch's own `load_state_dict`."""

from __future__ import annotations

import io

import pytest
import torch
from support.training import through
from torch import nn

from tierd.core.errors import StateMismatch
from tierd.state.aliasing import is_same_content
from tierd.state.state_loading import load_restored


class Scaled(nn.Module):
    """Has an extra state, as Transformer Engine's modules have."""

    def __init__(self, extra):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        if state is None:
            raise RuntimeError("not mine")
        self.extra = state


def content(extra):
    return extra.getvalue() if isinstance(extra, io.BytesIO) else extra


EXTRAS = {
    "longer": (torch.arange(7), torch.zeros(3, dtype=torch.int64)),
    "shorter": (torch.arange(2, dtype=torch.uint8), torch.zeros(30, dtype=torch.uint8)),
    "of another dtype": (torch.arange(7.0), torch.zeros(7, dtype=torch.int64)),
    "empty here": (torch.arange(7), torch.zeros(0, dtype=torch.uint8)),
    "bytes in memory": (io.BytesIO(b"scales"), io.BytesIO()),
    "bytes for a tensor": (io.BytesIO(b"scales"), torch.zeros(3)),
    "a tensor for nothing": (torch.ones(3), None),
    "a dict": ({"amax": torch.ones(2), "recipe": "delayed"}, None),
}


@pytest.mark.parametrize(("saved", "own"), EXTRAS.values(), ids=EXTRAS)
def test_a_module_is_given_the_extra_state_that_was_saved(saved, own):
    model = nn.Sequential(nn.Linear(2, 2), Scaled(own))
    load_restored({"model": model}, through({"model": nn.Sequential(nn.Linear(2, 2), Scaled(saved))}))
    assert is_same_content(content(model[1].extra), content(saved))


def test_a_tensor_that_the_module_keeps_as_its_extra_state_is_its_own():
    model = Scaled(torch.zeros(1))
    restored = through({"model": Scaled(torch.ones(3))})
    load_restored({"model": model}, restored)
    restored["model"]["_extra_state"].fill_(9)
    assert model.extra.tolist() == [1, 1, 1]


def test_refusal_of_a_module_is_its_own_error():
    model = Scaled(torch.zeros(1))
    with pytest.raises(StateMismatch, match="RuntimeError: not mine"):
        load_restored({"model": model}, through({"model": Scaled(None)}))


def test_a_missing_extra_state_is_named_before_anything_is_loaded():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    model = Scaled(torch.zeros(1))
    with pytest.raises(StateMismatch, match=r'"_extra_state" not in the checkpoint'):
        load_restored({"model": model}, through({"model": Plain()}))
    assert not model.weight.any()


def test_a_parameter_of_another_shape_is_still_named_before_anything_is_loaded():
    wide = Scaled(torch.ones(3))
    wide.weight = nn.Parameter(torch.ones(3))
    model = Scaled(torch.zeros(1))
    with pytest.raises(StateMismatch, match=r'"weight" \(float32 \(3,\) in the checkpoint'):
        load_restored({"model": model}, through({"model": wide}))
    assert model.extra.tolist() == [0]
