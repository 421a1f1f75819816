"""An optimizer's saved state reaches the parameters it belongs to, or is refused before anything was loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from support.training import through
from torch import nn

from tierd.core.errors import StateMismatch
from tierd.state.aliasing import is_same_content
from tierd.state.state_loading import load_restored

ADAM = (torch.optim.AdamW, {"lr": 0.1})
SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (3, 3), "b.bias": (3,)}
OTHER = ("b.bias", "a.weight", "b.weight", "a.bias")


def parameters(shapes=SHAPES, seed=0):
    noise = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=noise)) for name, shape in shapes.items()}


def stepped(optimizer, seed=0):
    """Take two steps, with gradients that depend on the seed and on the position of each parameter."""
    for step in range(2):
        for place, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
            noise = torch.Generator().manual_seed(1000 * seed + 100 * step + place)
            parameter.grad = torch.randn(parameter.shape, generator=noise)
        optimizer.step()
    return optimizer


def named(order, own=None, kind=ADAM, prefix=""):
    own = own or parameters()
    return kind[0]([(f"{prefix}{name}", own[name]) for name in order], **kind[1]), own


def moments(optimizer, own):
    return {name: optimizer.state[parameter] for name, parameter in own.items() if parameter in optimizer.state}


def refusal(state, saved):
    """The message with which a state is refused, after a check that nothing was loaded."""
    before = {name: copy.deepcopy(value.state_dict()) for name, value in state.items() if hasattr(value, "state_dict")}
    with pytest.raises(StateMismatch) as refused:
        load_restored(state, saved)
    assert all(is_same_content(state[name].state_dict(), value) for name, value in before.items())
    return str(refused.value)


KINDS = {
    "adamw": ADAM,
    "amsgrad": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1}),
    "rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_moments_are_assigned_by_name_for_parameters_in_another_order(kind):
    saved, own = named(SHAPES, kind=kind)
    stepped(saved)
    restored, fresh = named(OTHER, kind=kind)
    load_restored({"optimizer": restored}, through({"optimizer": saved}))
    expected = moments(saved, own)
    assert expected.keys() == SHAPES.keys()
    assert is_same_content(moments(restored, fresh), expected)
    assert restored.param_groups[0]["param_names"] == list(OTHER)


def test_training_continues_exactly_with_parameters_in_another_order():
    saved, own = named(SHAPES)
    stepped(saved)
    restored, fresh = named(OTHER)
    model = {name: parameter.detach() for name, parameter in own.items()}
    load_restored({"optimizer": restored, "model": fresh}, through({"optimizer": saved, "model": model}))
    for optimizer, where in ((saved, own), (restored, fresh)):
        for place, parameter in enumerate(where.values()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place))
        optimizer.step()
    assert is_same_content({k: v.detach() for k, v in fresh.items()}, {k: v.detach() for k, v in own.items()})


def test_parameters_without_state_are_assigned_by_name_too():
    saved, own = named(SHAPES)
    own["a.bias"].requires_grad = False
    for name in ("a.weight", "b.weight", "b.bias"):
        own[name].grad = torch.ones_like(own[name])
    saved.step()
    restored, fresh = named(OTHER)
    load_restored({"optimizer": restored}, through({"optimizer": saved}))
    assert moments(restored, fresh).keys() == {"a.weight", "b.weight", "b.bias"}
    assert is_same_content(moments(restored, fresh), moments(saved, own))


def test_names_are_compared_without_the_prefixes_of_wrappers():
    saved, own = named(SHAPES, prefix="module._orig_mod.")
    stepped(saved)
    restored, fresh = named(OTHER)
    load_restored({"optimizer": restored}, through({"optimizer": saved}))
    assert is_same_content(moments(restored, fresh), moments(saved, own))
    assert restored.param_groups[0]["param_names"] == list(OTHER)


def test_the_options_of_each_group_are_those_that_were_saved():
    def groups(order, lr):
        own = parameters()
        halves = [[(name, own[name]) for name in order if name.startswith(part)] for part in ("a", "b")]
        return torch.optim.AdamW([{"params": half, "lr": lr * (1 + n)} for n, half in enumerate(halves)]), own

    saved, own = groups(SHAPES, 0.1)
    stepped(saved)
    restored, fresh = groups(OTHER, 0.7)
    load_restored({"optimizer": restored}, through({"optimizer": saved}))
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.2]
    assert is_same_content(moments(restored, fresh), moments(saved, own))


def test_other_names_are_refused_by_name():
    saved, _ = named(SHAPES)
    shapes = {"head.weight" if name == "b.weight" else name: shape for name, shape in SHAPES.items()}
    restored, _ = named(shapes, parameters(shapes))
    message = refusal({"optimizer": restored}, through({"optimizer": stepped(saved)}))
    assert 'the parameters "head.weight" not in the checkpoint; "b.weight" in the checkpoint' in message


def test_names_say_which_parameters_a_group_lacks():
    saved, _ = named(SHAPES)
    restored, _ = named(["a.weight", "a.bias", "b.bias"])
    assert '"b.weight" in the checkpoint' in refusal({"o": restored}, through({"o": stepped(saved)}))


def test_parameters_that_changed_their_group_are_refused_by_name():
    def two(first, second):
        own = parameters()
        return torch.optim.AdamW([{"params": [(name, own[name]) for name in names]} for names in (first, second)])

    saved = stepped(two(["a.weight", "a.bias"], ["b.weight", "b.bias"]))
    restored = two(["a.weight", "b.bias"], ["b.weight", "a.bias"])
    message = refusal({"o": restored}, through({"o": saved}))
    assert '"b.bias" in group 1 in the checkpoint, in group 0 here' in message


def test_groups_with_names_in_another_order_are_refused():
    def two(names):
        return torch.optim.SGD([{"params": [one], "name": name} for one, name in zip(ones, names, strict=True)], lr=1)

    ones = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    saved = two(["decay", "no decay"])
    message = refusal({"o": two(["no decay", "decay"])}, through({"o": saved}))
    assert "parameter groups in the order ['decay', 'no decay'] in the checkpoint" in message


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_without_names_shapes_decide_and_the_message_names_the_parameters(kind):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    saved = stepped(kind[0](model.parameters(), **kind[1]))
    turned = list(model.parameters())[::-1]
    restored = kind[0](turned, **kind[1])
    message = refusal({"optimizer": restored, "model": model}, through({"optimizer": saved, "model": model}))
    assert '"1.bias", "0.bias"' in message
    assert "has another shape than its parameter" in message


def test_one_side_with_names_is_compared_by_shapes():
    saved, _ = named(SHAPES)
    own = parameters()
    restored = torch.optim.AdamW([own[name] for name in OTHER])
    assert "parameter 0 of group 0" in refusal({"o": restored}, through({"o": stepped(saved)}))
    load_restored({"o": torch.optim.AdamW(own.values())}, through({"o": saved}))


def test_a_moment_of_one_element_is_no_moment_of_a_larger_parameter():
    saved = stepped(torch.optim.AdamW([nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(3))]))
    restored = torch.optim.AdamW([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))])
    assert "another shape" in refusal({"o": restored}, through({"o": saved}))


class Foreign(torch.optim.Optimizer):
    """An optimizer of which tierd knows nothing."""

    def __init__(self, parameters, state):
        super().__init__(parameters, {"lr": 0.1})
        self.made = state

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.made(parameter)


def test_another_order_of_an_unknown_optimizer_is_refused_by_shapes():
    own = parameters()
    saved = Foreign(own.values(), lambda parameter: {"momentum": torch.zeros_like(parameter), "step": 3})
    saved.step()
    restored = Foreign([own[name] for name in OTHER], lambda parameter: {})
    assert "'momentum'" in refusal({"o": restored}, through({"o": saved})).replace('"', "'")


STATES = {
    "projected": lambda p: {"exp_avg": torch.zeros(*p.shape[:-1], 2)},
    "rows and columns": lambda p: {"row": torch.zeros(p.shape[:-1]), "column": torch.zeros(p.shape[-1:])},
    "blocks": lambda p: {"state1": torch.zeros(p.shape), "absmax": torch.zeros(2), "codes": torch.zeros(256)},
    "factors": lambda p: {"factors": [torch.zeros(size, size) for size in p.shape]},
    "on one": lambda p: {"all": torch.zeros(24)} if p.dim() == 2 and p.shape[1] == 4 else {},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_an_unknown_optimizer_s_own_shapes_are_no_mismatch(state):
    own = parameters()
    saved = Foreign(own.values(), state)
    saved.step()
    restored = Foreign(own.values(), state)
    load_restored({"o": restored}, through({"o": saved}))
    assert is_same_content(restored.state_dict(), saved.state_dict())


@pytest.mark.parametrize("state", [STATES["blocks"], STATES["factors"], STATES["on one"]])
def test_state_that_may_depend_on_the_order_is_refused_in_another_order(state):
    own = parameters()
    saved = Foreign(own.items(), state)
    saved.step()
    restored = Foreign([(name, own[name]) for name in OTHER], state)
    message = refusal({"o": restored}, through({"o": saved}))
    assert "come in another order" in message
    assert '"a.weight"' in message


def test_lbfgs_is_restored_in_its_order_and_refused_in_another():
    def made(order):
        own = parameters()
        return torch.optim.LBFGS([(name, own[name]) for name in order], lr=0.1), own

    saved, own = made(SHAPES)

    def closure():
        saved.zero_grad()
        loss = sum((one**2).sum() for one in own.values())
        loss.backward()
        return loss

    saved.step(closure)
    tree = through({"o": saved})
    same, _ = made(SHAPES)
    load_restored({"o": same}, tree)
    assert is_same_content(same.state_dict()["state"][0]["d"], saved.state_dict()["state"][0]["d"])
    assert "come in another order" in refusal({"o": made(OTHER)[0]}, tree)


def test_an_optimizer_with_a_hook_of_its_own_adapts_the_state_itself():
    saved, own = named(SHAPES)
    stepped(saved)
    shapes = {f"new.{name}": shape for name, shape in SHAPES.items()}
    restored, fresh = named(shapes, parameters(shapes))
    given = []

    def renamed(optimizer, state):
        given.append(state["param_groups"][0]["param_names"])
        state["param_groups"][0]["param_names"] = list(shapes)

    restored.register_load_state_dict_pre_hook(renamed)
    load_restored({"o": restored}, through({"o": saved}))
    assert given == [list(SHAPES)]
    assert is_same_content(list(moments(restored, fresh).values()), list(moments(saved, own).values()))


def test_state_is_not_reordered_for_an_optimizer_whose_hook_does_that():
    """torch passes the state to the hook as it was saved, in the order of that time."""
    saved, own = named(SHAPES)
    stepped(saved)
    restored, fresh = named(OTHER, parameters())
    given = []

    def reordered(optimizer, state):
        given.append(list(state["param_groups"][0]["param_names"]))
        places = [given[0].index(name) for name in OTHER]
        state["state"] = {at: state["state"][place] for at, place in enumerate(places)}
        state["param_groups"][0]["param_names"] = list(OTHER)

    restored.register_load_state_dict_pre_hook(reordered)
    load_restored({"o": restored}, through({"o": saved}))
    assert given == [list(SHAPES)]
    assert all(is_same_content(moments(restored, fresh)[name], moments(saved, own)[name]) for name in SHAPES)


def test_state_dict_whose_parameters_are_in_another_order_is_refused():
    saved, _ = named(("a.bias", "b.bias"))
    restored, _ = named(("b.bias", "a.bias"))
    state = {"o": stepped(restored, seed=1).state_dict()}
    before = copy.deepcopy(state)
    with pytest.raises(StateMismatch, match=r'"a.bias", "b.bias" in the checkpoint where here are "b.bias", "a.bias"'):
        load_restored(state, through({"o": stepped(saved).state_dict()}))
    assert is_same_content(state, before)


def test_an_optimizer_that_never_stepped_fits_in_any_order_without_names():
    own = parameters()
    load_restored(
        {"o": torch.optim.AdamW([own[name] for name in OTHER])}, through({"o": torch.optim.AdamW(own.values())})
    )


def test_lazy_parameters_have_no_shapes_to_compare():
    model = nn.LazyLinear(3)
    saved = stepped(torch.optim.AdamW(nn.Linear(4, 3).parameters()))
    load_restored({"o": torch.optim.AdamW(model.parameters())}, through({"o": saved}))
