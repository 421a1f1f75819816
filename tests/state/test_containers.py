"""The one walk over containers: what it yields, in which order, and that it ends."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque

import pytest
import torch

from tierd.client.saving.slots import device_of, estimate
from tierd.state.state_tree import instances, leaves, pair_values, replace_values, walk


def test_the_walk_yields_each_value_with_its_path_in_order():
    tensors = [torch.zeros(1) for _ in range(5)]
    a, b, c, d, e = tensors
    state = {"a": a, "l": [b, (c, None)], 3: OrderedDict(d=deque([d])), "u": UserDict(e=e)}
    found = list(instances(state, torch.Tensor))
    assert [path for path, _ in found] == [("a",), ("l", 0), ("l", 1, 0), (3, "d", 0), ("u", "e")]
    assert all(one is other for (_, one), other in zip(found, tensors, strict=True))
    assert list(instances(a, torch.Tensor, ("x",))) == [(("x",), a)]


def test_a_run_of_plain_values_has_no_leaves():
    assert list(leaves({"a": [1, 2.0, "b", None], "b": {"c": True}, "d": deque([b"e"]), "f": ()})) == []
    mixed = torch.zeros(1)
    assert list(leaves([1, mixed])) == [1, mixed]


@pytest.mark.timeout(30)
def test_a_container_in_two_places_or_in_itself_is_entered_once():
    tensor = torch.zeros(1)
    inner = [tensor]
    cycle: list[object] = [inner, inner]
    cycle.append({"back": cycle})
    assert [path for path, _, is_container in walk(cycle) if is_container] == [(), (0,), (2,)]
    assert list(leaves(cycle)) == [tensor]
    assert device_of({"a": cycle}) is None
    assert estimate({"a": cycle}) == estimate({"a": tensor})


def test_instances_are_replaced_in_place_but_in_tuples():
    tensor = torch.zeros(1)
    untouched = (1, [None, {"a": "b"}])
    value = {"l": [tensor], "q": deque([tensor, 1], maxlen=3), "t": (tensor, untouched), "u": untouched, "n": (1, 2)}
    kept = dict(value)
    assert replace_values(value, torch.Tensor, lambda one: one is tensor) is value
    assert value == {**kept, "t": (True, untouched)}
    assert all(value[key] is kept[key] for key in ("l", "q", "u", "n")) and value["t"][1] is untouched
    assert value["l"] == [True] and list(value["q"]) == [True, 1]
    assert replace_values(tensor, torch.Tensor, id) == id(tensor)


def test_saved_values_are_paired_with_the_values_in_their_place():
    assert list(pair_values({"a": 1, "c": 3}, {"b": 4, "a": 2})) == [("b", None, 4), ("a", 1, 2)]
    assert list(pair_values(deque([1]), [2, 3])) == [(0, 1, 2), (1, None, 3)]
