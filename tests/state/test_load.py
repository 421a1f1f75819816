"""A restored state goes back into live objects: equal behaviour afterwards, or a refusal before anything was loaded."""

from __future__ import annotations

import copy
import gc
import mmap
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType

import numpy as np
import pytest
import torch
from support.state_files import flatten
from support.training import stored, through
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset

from tierd.core.errors import StateMismatch
from tierd.state.kinds.random_generators import RngState, SavedGenerator
from tierd.state.kinds.stored_arrays import OPAQUE_DTYPES
from tierd.state.load_check import check_fit
from tierd.state.state_loading import load_restored, unflatten
from tierd.state.tensor_header import parse_layout


class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.3), nn.Linear(hidden, 4))
        self.tied = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, x):
        return self.head(self.tied(self.body(x)))


SCHEDULERS = {
    "multistep": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 3, 3, 7]),
    "onecycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 10)], [3]
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.95**step),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, cycle_momentum=False),
    "warm restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "one lambda object": lambda opt: lr_scheduler.LambdaLR(opt, Halves()),
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Halves:
    """A schedule with a state of its own, which LambdaLR saves as a dict."""

    def __init__(self):
        self.factor = 0.5

    def __call__(self, step):
        return self.factor**step


def make_job(optimizer="adamw", scheduler="multistep", seed=0):
    torch.manual_seed(seed)
    model = Net()
    opt = OPTIMIZERS[optimizer](model.parameters())
    return {
        "model": model,
        "optimizer": opt,
        "scheduler": SCHEDULERS[scheduler](opt),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
        "ema": {name: p.detach().clone() for name, p in model.named_parameters()},
        "rng": RngState(),
        "epoch": 0,
        "history": [],
    }


def train(job, steps):
    for _ in range(steps):
        x = torch.randn(16, 4)

        def closure(x=x):
            job["optimizer"].zero_grad()
            loss = (job["model"](x) - x).pow(2).mean()
            loss.backward()
            return loss

        if isinstance(job["optimizer"], torch.optim.LBFGS):
            loss = job["optimizer"].step(closure)
        else:
            job["optimizer"].zero_grad()
            loss = (job["model"](x) - x).pow(2).mean()
            job["scaler"].scale(loss).backward()
            job["scaler"].step(job["optimizer"])
            job["scaler"].update()
        if isinstance(job["scheduler"], lr_scheduler.ReduceLROnPlateau):
            job["scheduler"].step(loss.item())
        else:
            job["scheduler"].step()
        for name, p in job["model"].named_parameters():
            job["ema"][name].lerp_(p.detach(), 0.1)
        job["epoch"] += 1
        job["history"].append(loss.item())


@pytest.mark.filterwarnings("ignore:enable_grad")
@pytest.mark.parametrize(
    ("optimizer", "scheduler"), [(o, "multistep") for o in OPTIMIZERS] + [("adamw", s) for s in SCHEDULERS]
)
def test_training_continues_as_if_nothing_had_happened(optimizer, scheduler):
    job = make_job(optimizer, scheduler)
    train(job, 4)
    tree, file = stored(job)
    train(job, 5)

    fresh = make_job(optimizer, scheduler, seed=1)
    torch.rand(17)
    load_restored(fresh, unflatten(tree, file))
    file[:] = b"\xff" * len(file)  # whatever is still a view of the file would now be NaN
    train(fresh, 5)
    assert fresh["history"] == job["history"]
    assert len(fresh["history"]) == fresh["epoch"] == 9
    for name, value in job["model"].state_dict().items():
        assert torch.equal(fresh["model"].state_dict()[name], value), name
        assert name not in job["ema"] or torch.equal(fresh["ema"][name], job["ema"][name])
    assert fresh["model"].head.weight is fresh["model"].tied.weight
    assert fresh["scaler"].state_dict() == job["scaler"].state_dict()
    assert fresh["optimizer"].param_groups[0]["lr"] == job["optimizer"].param_groups[0]["lr"]


def test_the_same_job_rolls_back():
    job = make_job()
    train(job, 3)
    tree, file = stored(job)
    before = flatten(job).tree
    train(job, 3)
    load_restored(job, unflatten(tree, file))
    assert flatten(job).tree == before


class Numbers(Dataset):
    def __init__(self, n=40):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor(i), torch.rand(1)


# ---- what is given to whom


class Keeps:
    """Keeps what it is given, as optimizers do."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_everything_but_modules_gets_memory_of_its_own():
    w = torch.ones(3)
    tree, file = stored(
        {"a": Keeps(w=w, tied=[w], sizes=torch.Size([1]), dtype=torch.int8, device=torch.device("cpu"))}
    )
    fresh = {"a": Keeps()}
    load_restored(fresh, unflatten(tree, file))
    file[:] = b"\0" * len(file)
    state = fresh["a"].state
    assert state["w"].tolist() == [1, 1, 1]
    assert state["w"] is state["tied"][0]
    assert state["sizes"] == torch.Size([1])
    assert type(state["sizes"]) is torch.Size
    assert (state["dtype"], state["device"]) == (torch.int8, torch.device("cpu"))


def test_tied_tensors_are_cloned_once_across_entries():
    w = torch.ones(3)
    fresh = {"a": Keeps(), "b": None, "c": {}}
    load_restored(fresh, through({"a": Keeps(w=w), "b": [w], "c": {"w": w}}))
    assert fresh["a"].state["w"] is fresh["b"][0] is fresh["c"]["w"]


def test_modules_are_given_views_unless_they_may_keep_them():
    class Metric(nn.Module):  # torchmetrics does this
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(2)
            self.linear = nn.Linear(2, 2)

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "total"] = self.total

        def _load_from_state_dict(self, state_dict, prefix, *rest):
            self.total = state_dict.pop(prefix + "total")
            super()._load_from_state_dict(state_dict, prefix, *rest)

    class Extra(nn.Linear):
        extra = None

        def get_extra_state(self):
            return {"t": torch.ones(2)}

        def set_extra_state(self, state):
            self.extra = state

    hooked = {}

    def keep(module, state_dict, prefix, *rest):
        hooked["weight"] = state_dict[prefix + "weight"]

    def make():
        last = nn.Linear(2, 2)
        last.register_load_state_dict_pre_hook(keep)
        return nn.Sequential(last, nn.Linear(2, 2), Metric(), Extra(2, 2), nn.BatchNorm1d(2))

    model = make()
    model[2].total = torch.tensor([3.0, 4.0])
    tree, file = stored({"m": model})
    fresh = {"m": make()}
    restored = unflatten(tree, file)
    load_restored(fresh, restored)
    file[:] = b"\0" * len(file)
    assert fresh["m"][2].total.tolist() == [3, 4]
    assert fresh["m"][3].extra["t"].tolist() == [1, 1]
    for (name, a), (_, b) in zip(model.named_parameters(), fresh["m"].named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(hooked["weight"], model[0].weight)


def test_no_tensor_of_a_plain_module_is_cloned(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    restored = through({"m": model})
    seen = []
    original = nn.Module.load_state_dict
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda self, state: (seen.append(state), original(self, state)))
    load_restored({"m": model}, restored)
    assert all(seen[0][key] is value for key, value in restored["m"].items())
    assert seen[0]._metadata == model.state_dict()._metadata


def test_a_lazy_module_takes_the_saved_shapes():
    model = nn.Linear(3, 2)
    fresh = nn.LazyLinear(2)
    load_restored({"m": fresh}, through({"m": model}))
    assert torch.equal(fresh.weight, model.weight)


def test_random_generators_are_set_last():
    class Draws(Keeps):
        def load_state_dict(self, state):
            torch.rand(3)

    torch.manual_seed(0)
    state = {"rng": RngState(), "a": Draws()}
    restored = through(state)
    expected = torch.rand(2)
    load_restored(state, restored)
    assert torch.equal(torch.rand(2), expected)


# ---- plain values


def test_plain_values_are_put_back_in_place():
    inner = [1, 2]
    nested = {"inner": inner, "old": 1}
    array, scalar_array = np.zeros(2), np.array(0.0)
    weight = nn.Parameter(torch.zeros(2, 2))
    strided = torch.zeros(2, 2).t()
    state = {
        "epoch": 0,
        "nested": nested,
        "array": array,
        "scalar array": scalar_array,
        "weight": weight,
        "strided": strided,
        "tuple": (weight, 1),
        "none": None,
        "name": "x",
        "best": float("inf"),
    }
    saved = {
        "epoch": 7,
        "nested": {"new": (1,), "inner": [5, 6, [7]]},
        "array": np.ones(2),
        "scalar array": np.array(4.0),
        "weight": torch.full((2, 2), 3.0),
        "strided": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "tuple": (torch.full((2, 2), 3.0), 2),
        "none": [torch.ones(1)],
        "name": b"y",
        "best": np.float32(0.5),
    }
    tree, file = stored(saved)
    load_restored(state, unflatten(tree, file))
    file[:] = b"\0" * len(file)
    assert state["epoch"] == 7
    assert state["nested"] is nested
    assert list(nested.items()) == [("new", (1,)), ("inner", [5, 6, [7]])]
    assert nested["inner"] is inner
    assert state["array"] is array
    assert array.tolist() == [1, 1]
    assert scalar_array == 4
    assert state["weight"] is weight
    assert weight.requires_grad
    assert weight.tolist() == [[3, 3], [3, 3]]
    assert strided.tolist() == [[1, 2], [3, 4]]
    assert state["tuple"][0] is weight
    assert state["tuple"][1] == 2
    assert state["none"][0].tolist() == [1]
    assert state["name"] == b"y"
    assert type(state["best"]) is np.float32


def test_containers_of_every_kind_keep_their_type_and_identity():
    state = {
        "counter": Counter(a=1),
        "default": defaultdict(int, x=1),
        "ordered": OrderedDict(a=1, b=2),
        "deque": deque([1], maxlen=2),
        "tuple": (1, 2),
        "list": [[1], [2], [3]],
    }
    kept = dict(state)
    saved = {
        "counter": Counter(b=2),
        "default": {"y": 2},
        "ordered": OrderedDict(b=3, a=4),
        "deque": deque([3, 4, 5], maxlen=3),
        "tuple": (1, 2, 3),
        "list": [[9]],
    }
    load_restored(state, through(saved))
    for key in ("counter", "default", "ordered", "list"):
        assert state[key] is kept[key]
    assert state["counter"] == Counter(b=2)
    assert state["default"] == {"y": 2}
    assert state["default"]["z"] == 0
    assert list(state["ordered"].items()) == [("b", 3), ("a", 4)]
    assert state["deque"] == deque([3, 4, 5])
    assert state["tuple"] == (1, 2, 3)
    assert state["list"] == [[9]]


def test_members_of_a_deque_are_loaded_in_place_as_in_a_list():
    def made(value):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, value)
        generator = torch.Generator().manual_seed(int(value))
        return deque([model, torch.full((2,), value), np.full(2, value), generator, [value], value])

    saved, target = made(1.0), made(0.0)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(1)).tolist()
    state, inside = {"q": target}, list(target)
    load_restored(state, through({"q": saved}))
    model, tensor, array, generator, listed, number = target
    assert state["q"] is target and all(one is other for one, other in zip(inside[:5], target, strict=False))
    assert model.weight == 1 and tensor.tolist() == array.tolist() == [1, 1] and listed == [1] and number == 1
    assert torch.rand(2, generator=generator).tolist() == expected


def test_deque_of_another_length_limit_is_replaced_and_its_members_are_loaded():
    model, saved = nn.Linear(1, 1), nn.Linear(1, 1)
    state = {"q": deque([model], maxlen=1), "r": deque([0], maxlen=1)}
    load_restored(state, through({"q": deque([saved, 1], maxlen=4), "r": deque([1, 2])}))
    assert state["q"][0] is model and torch.equal(model.weight, saved.weight)
    assert list(state["q"])[1:] == [1] and state["q"].maxlen == 4
    assert state["r"] == deque([1, 2]) and state["r"].maxlen is None


def test_a_subclass_of_list_is_filled_in_place():
    class Losses(list):
        pass

    tensor = torch.zeros(1)
    state = {"plain": Losses([0]), "tensors": Losses([tensor])}
    kept = dict(state)
    load_restored(state, through({"plain": [1, 2], "tensors": [torch.ones(1)]}))
    assert all(state[name] is kept[name] for name in kept)
    assert state["plain"] == [1, 2] and state["tensors"][0] is tensor and tensor == 1


def test_a_module_state_as_a_plain_value_keeps_its_metadata():
    model = nn.BatchNorm1d(2)
    state = {"best": OrderedDict()}
    load_restored(state, through({"best": model.state_dict()}))
    assert state["best"]._metadata == model.state_dict()._metadata
    model.load_state_dict(state["best"])


def test_read_only_tensor_is_replaced():
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with torch.inference_mode():
        inferred = torch.zeros(2)
    state = {"expanded": torch.zeros(1).expand(2), "frozen": frozen, "inferred": inferred}
    load_restored(state, through({"expanded": torch.ones(2), "frozen": np.ones(2), "inferred": torch.ones(2)}))
    assert state["expanded"].tolist() == state["frozen"].tolist() == state["inferred"].tolist() == [1, 1]
    assert frozen.tolist() == [0, 0]


def test_an_immutable_mapping():
    model, listed, tensor = nn.Linear(1, 1), [1], torch.zeros(1)
    proxy = MappingProxyType({"m": model, "l": listed, "t": tensor, "p": (model, tensor)})
    saved = nn.Linear(1, 1)
    load_restored(proxy, through({"m": saved, "l": [2], "t": torch.ones(1), "p": (saved, torch.ones(1))}))
    assert listed == [2]
    assert tensor == 1
    with pytest.raises(StateMismatch) as caught:
        load_restored(MappingProxyType({"l": listed, "epoch": 0}), through({"l": [3], "epoch": 1}))
    assert str(caught.value) == 'state["epoch"]: cannot be replaced in a mappingproxy; pass a dict'
    assert listed == [2]
    other = UserDict(epoch=0)
    load_restored(other, through({"epoch": 1}))
    assert other["epoch"] == 1


# ---- mismatches


def linear(n, m, dtype=None):
    return nn.Linear(n, m, dtype=dtype)


def optimizer(*sizes):
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1)) for _ in range(n)]} for n in sizes])


OUT = "(None in this place takes what was saved)"
MISMATCHES = {
    "missing and extra entries": (
        {"a": 1, "b": 2},
        {"b": 1, "c": 2, "d": 3, "e": 4, "f": 5, "g": 6},
        'state: "a" not in the checkpoint; '
        'state: "c", "d", "e" and 2 more in the checkpoint, but not in the state passed',
    ),
    "keys of a module": (
        {"m": nn.ModuleDict({"a": linear(1, 1), "b": linear(1, 1)})},
        {"m": nn.ModuleDict({"a": linear(1, 1), "c": linear(1, 1)})},
        'state["m"]: "b.weight", "b.bias" not in the checkpoint; '
        'state["m"]: "c.weight", "c.bias" in the checkpoint, but not in the module',
    ),
    "many keys": (
        {"m": nn.Sequential(*(linear(1, 1) for _ in range(4)))},
        {"m": nn.Sequential(linear(1, 1))},
        'state["m"]: "1.weight", "1.bias", "2.weight" and 3 more not in the checkpoint',
    ),
    "shapes and dtypes": (
        {"m": nn.Sequential(linear(2, 3), linear(1, 1))},
        {"m": nn.Sequential(linear(2, 4), linear(1, 1, torch.float64))},
        'state["m"]: of another shape or dtype: "0.weight" (float32 (4, 2) in the checkpoint, float32 (3, 2) here), '
        '"0.bias" (float32 (4,) in the checkpoint, float32 (3,) here), '
        '"1.weight" (float64 (1, 1) in the checkpoint, float32 (1, 1) here) and 1 more',
    ),
    "no module": ({"m": linear(1, 1)}, {"m": 3}, 'state["m"]: int in the checkpoint, a module here'),
    "no tensor in a module": (
        {"m": linear(1, 1)},
        {"m": {"weight": torch.ones(1, 1), "bias": 2}},
        'state["m"]: of another shape or dtype: "bias" (int in the checkpoint, a tensor here)',
    ),
    "groups": (
        {"o": optimizer(1, 2)},
        {"o": optimizer(3)},
        'state["o"]: parameter groups of [3] parameters in the checkpoint, of [1, 2] here',
    ),
    "no optimizer": ({"o": optimizer(1)}, {"o": {}}, 'state["o"]: not the state of an optimizer'),
    "no generators": ({"r": RngState()}, {"r": {}}, 'state["r"]: not the state of a RngState'),
    "tensor": (
        {"a": [{"t": torch.ones(2)}, torch.ones(1)]},
        {"a": [{"t": torch.ones(3)}, torch.ones(1, dtype=torch.int64)]},
        f'state["a"][0]["t"]: float32 (3,) in the checkpoint, float32 (2,) here {OUT}; '
        f'state["a"][1]: int64 (1,) in the checkpoint, float32 (1,) here {OUT}',
    ),
    "no tensor": (
        {"a": torch.ones(2)},
        {"a": [1]},
        f'state["a"]: list in the checkpoint, a tensor here {OUT}',
    ),
    "array": (
        {"a": np.ones(2)},
        {"a": np.ones(2, dtype=">f4")},
        f'state["a"]: array >f4 (2,) in the checkpoint, array <f8 (2,) here {OUT}',
    ),
    "no array": (
        {"a": np.ones(2)},
        {"a": torch.ones(2)},
        f'state["a"]: torch.Tensor in the checkpoint, array <f8 (2,) here {OUT}',
    ),
    "live things that were not saved": (
        {"a": {"w": torch.ones(1), "n": 3}, "b": [Keeps(), 1], "c": (np.ones(1),)},
        {"a": {"n": 4}, "b": 5, "c": ()},
        'state["a"]["w"]: not in the checkpoint; state["b"][0]: not in the checkpoint; '
        'state["c"][0]: not in the checkpoint',
    ),
    "a tensor that cannot be loaded into": (
        {"a": torch.ones(2, device="meta")},
        {"a": torch.ones(2)},
        f'state["a"]: a meta tensor, which holds no data; materialize it first {OUT}',
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_named_and_nothing_is_loaded(name):
    state, saved, message = MISMATCHES[name]
    before, model = 1, linear(1, 1)
    state = {"first": model, "epoch": before, "list": [before]} | state
    weight = model.weight.item()
    restored = through({"first": linear(1, 1), "epoch": 2, "list": [2]} | saved)
    for act in (check_fit, load_restored):
        with pytest.raises(StateMismatch) as caught:
            act(state, restored)
        assert str(caught.value) == message
    assert (model.weight.item(), state["epoch"], state["list"]) == (weight, 1, [1])


def test_only_the_first_few_are_named():
    state = {str(i): torch.ones(2) for i in range(20)}
    with pytest.raises(StateMismatch) as caught:
        check_fit(state, through({str(i): torch.ones(3) for i in range(20)}))
    assert str(caught.value).endswith("; and 15 more")
    assert str(caught.value).count("in the checkpoint") == 5


def test_check_fit_changes_nothing():
    state = {"m": linear(1, 1), "epoch": 1, "l": [1], "t": torch.zeros(1)}
    before = flatten(state).tree, state["m"].weight.item()
    check_fit(state, through({"m": linear(1, 1), "epoch": 2, "l": [2], "t": torch.ones(1)}))
    assert (flatten(state).tree, state["m"].weight.item(), state["t"].item()) == (*before, 0)


def test_error_of_load_state_dict_is_chained_and_names_the_loaded_entries():
    class Fails(Keeps):
        def load_state_dict(self, state):
            raise KeyError("moon")

    state = {"a": Keeps(n=1), "f": [Fails()], "epoch": 1}
    restored = through({"a": Keeps(n=2), "f": [Keeps()], "epoch": 2})
    with pytest.raises(StateMismatch) as caught:
        load_restored(state, restored)
    assert str(caught.value) == 'state["f"][0]: load_state_dict() raised KeyError: \'moon\'; already loaded: state["a"]'
    assert isinstance(caught.value.__cause__, KeyError)
    assert state["epoch"] == 1
    with pytest.raises(StateMismatch, match="nothing was loaded before it"):
        load_restored({"f": Fails()}, through({"f": Keeps()}))


def test_an_error_of_the_modules_own_state_dict_is_a_mismatch():
    class Broken(nn.Module):
        def state_dict(self, *args, **kwargs):
            raise OSError("gone")

    with pytest.raises(StateMismatch, match=r'state\["m"\]: its own state_dict\(\) raised OSError: gone'):
        check_fit({"m": Broken()}, through({"m": nn.Linear(1, 1)}))


def test_a_cyclic_template_is_refused():
    inner: list[object] = []
    inner.append(inner)
    with pytest.raises(StateMismatch, match="nested too deeply, or a cycle"):
        load_restored({"a": inner}, through({"a": [1]}))


def test_restored_twice_into_two_jobs():
    restored = through({"l": [torch.ones(1)], "d": {"k": {"n": [1]}}, "o": None})
    one, two = ({"l": [], "d": {}, "o": None} for _ in range(2))
    load_restored(one, restored)
    one["l"][0].zero_()
    one["d"]["k"]["n"].append(2)
    load_restored(two, copy.copy(restored))
    assert two["l"][0] == 1
    assert two["d"] == {"k": {"n": [1]}}


# ---- memory that is the restore's own


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)


def trained():
    torch.manual_seed(1)
    model = Large()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "ema": torch.randn(64, 64), "log": {"best": torch.randn(64, 64)}}


def mapped(state):
    """As a restore reads it: in private memory of its own."""
    tree, file = stored(state)
    memory = mmap.mmap(-1, len(file), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = bytes(file)
    return tree, memoryview(memory)


def lies_in(tensor, file):
    begin = torch.frombuffer(file, dtype=torch.uint8).data_ptr()
    return begin <= tensor.data_ptr() < begin + len(file)


def same_tensors(one, two):
    ones, twos = flatten(one).tensors, flatten(two).tensors
    return ones.keys() == twos.keys() and all(torch.equal(ones[name], twos[name]) for name in ones)


@pytest.mark.parametrize("is_checked_before", [False, True])
def test_an_optimizer_keeps_its_tensors_where_they_were_read_and_the_rest_is_given_back(is_checked_before):
    old = trained()
    tree, file = mapped(old)
    fresh = {"model": Large(), "log": {}, "ema": torch.zeros(64, 64)}
    fresh = {"model": fresh["model"], "optimizer": torch.optim.AdamW(fresh["model"].parameters()), **fresh}
    restored = unflatten(tree, file)
    fitting = check_fit(fresh, restored) if is_checked_before else None
    load_restored(fresh, restored, handed_over=False, files=[file], fitting=fitting)
    assert restored == {}
    moments = [value for state in fresh["optimizer"].state.values() for value in state.values()]
    assert [lies_in(moment, file) for moment in moments] == [moment.nbytes >= 4096 for moment in moments]
    assert not lies_in(fresh["log"]["best"], file)
    assert not lies_in(fresh["model"].a.weight, file)
    entries = parse_layout(bytes(file)).entries
    weight, moment = entries["model/a.weight"], entries["optimizer/state/0/exp_avg"]
    assert not any(file[weight.offset + 4096 : weight.offset + weight.nbytes - 4096])
    assert any(file[moment.offset : moment.offset + moment.nbytes])
    assert same_tensors(fresh, old | {"log": dict(old["log"])})
    for state in (old, fresh):
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()
    del file
    gc.collect()
    assert same_tensors(fresh, old)


@pytest.mark.parametrize("how", ["view", "numpy", "graph", "hook"])
def test_pages_of_a_tensor_that_is_still_referenced_are_not_returned(how):
    old = trained()
    tree, file = mapped(old)
    fresh = trained()
    restored = unflatten(tree, file)
    weight = restored["model"]["a.weight"]
    if how == "hook":
        keeps = []
        for module in fresh["model"].modules():  # runs behind load_state_dict, on what torch copies from
            module._load_from_state_dict = keeper(module, keeps)
        kept = lambda: keeps[0]  # noqa: E731
    elif how == "view":
        row = weight[5:]
        kept = lambda: row  # noqa: E731
    elif how == "numpy":
        array = weight.numpy()
        kept = lambda: torch.from_numpy(array)  # noqa: E731
    else:
        product = nn.Parameter(torch.ones(128, 128)) * weight
        kept = lambda: product.grad_fn._saved_other  # noqa: E731
    before = kept().clone() if how != "hook" else weight.clone()
    del weight
    load_restored(fresh, restored, handed_over=False, files=[file])
    assert torch.equal(kept(), before)
    entries = parse_layout(bytes(file[: 1 << 20]) + bytes(file[1 << 20 :])).entries
    other = entries["model/b.weight"]
    if how != "hook":
        assert not any(file[other.offset + 4096 : other.offset + other.nbytes - 4096])
    assert same_tensors(fresh, old)


def keeper(module, keeps):
    original = type(module)._load_from_state_dict

    def load_and_keep(state_dict, prefix, *rest):
        keeps.extend(value for key, value in state_dict.items() if key.startswith("a.weight") or key == "weight")
        original(module, state_dict, prefix, *rest)

    return load_and_keep


def test_handed_over_or_unmapped_memory_is_not_returned_to_the_system():
    for make, handed_over in ((mapped, True), (stored, False)):
        old, fresh = trained(), trained()
        tree, file = make(old)
        before = bytes(file)
        load_restored(fresh, unflatten(tree, file), handed_over=handed_over, files=[file])
        assert bytes(file) == before
        assert same_tensors(fresh, old)


def test_handed_over_memory_may_be_overwritten_after_the_load():
    old, fresh = trained(), trained()
    tree, file = mapped(old)
    load_restored(fresh, unflatten(tree, file), handed_over=True)
    file[:] = b"\xff" * len(file)
    assert same_tensors(fresh, old)


def test_tensor_that_an_optimizer_shares_with_another_entry_is_still_shared():
    class Owns(Keeps, torch.optim.Optimizer):
        param_groups = ()

    tensor = torch.randn(64, 64)
    saved = Keeps(state={"t": tensor}, param_groups=[])
    tree, file = mapped({"a": saved, "b": Keeps(t=tensor), "c": [tensor]})
    one = Owns.__new__(Owns)
    fresh = {"a": one, "b": Keeps(), "c": None}
    load_restored(fresh, unflatten(tree, file), handed_over=False, files=[file])
    assert one.state["state"]["t"] is fresh["b"].state["t"] is fresh["c"][0]
    assert torch.equal(fresh["c"][0], tensor)


def test_a_mismatch_leaves_the_memory_alone():
    tree, file = mapped(trained())
    before = bytes(file)
    restored = unflatten(tree, file)
    with pytest.raises(StateMismatch):
        load_restored({"model": nn.Linear(1, 1)}, restored, handed_over=False, files=[file])
    assert restored.keys() == {"model", "optimizer", "ema", "log"}
    assert bytes(file) == before


# ---- dtypes that torch cannot copy


@pytest.mark.parametrize("dtype", sorted(OPAQUE_DTYPES, key=str), ids=str)
def test_targets_of_a_few_bits(dtype):
    def make(bits):
        module = nn.Linear(2, 2)
        module.register_buffer("codes", bits.view(dtype))
        return {
            "plain": bits.view(dtype),
            "turned": bits.view(2, 3).t().view(dtype),
            "m": module,
            "in": [bits.view(dtype)],
        }

    bits = torch.tensor([1, 2, 255, 4, 5, 6], dtype=torch.uint8)
    saved, fresh = make(bits), make(torch.zeros(6, dtype=torch.uint8))
    kept = dict(fresh)
    tree, file = stored(saved)
    load_restored(fresh, unflatten(tree, file))
    file[:] = b"\0" * len(file)
    assert fresh["plain"] is kept["plain"] and fresh["turned"] is kept["turned"]
    for mine, theirs in (
        (fresh["plain"], saved["plain"]),
        (fresh["turned"], saved["turned"]),
        (fresh["in"][0], saved["in"][0]),
        (fresh["m"].codes, saved["m"].codes),
    ):
        assert mine.dtype == dtype and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(fresh["m"].weight, saved["m"].weight)


def test_a_target_whose_memory_was_freed_is_not_written_to():
    restored = through({"w": torch.ones(1000), "n": 1})
    target = torch.zeros(1000)
    target.untyped_storage().resize_(0)
    state = {"w": target, "n": 0}
    with pytest.raises(StateMismatch, match=r'^state\["w"\]: a tensor of 4000 bytes in a storage of 0: its memory was'):
        load_restored(state, restored)
    assert state["n"] == 0


# ---- generators


def test_a_generator_is_set_where_it_is():
    saved = {"g": torch.Generator().manual_seed(1), "data": {"g": [torch.Generator().manual_seed(2)]}}
    torch.rand(5, generator=saved["g"])
    tree, file = stored(saved)
    expected = [torch.rand(3, generator=g).tolist() for g in (saved["g"], saved["data"]["g"][0])]
    state = {"g": torch.Generator(), "data": {"g": [torch.Generator()]}}
    loaders = (state["g"], state["data"]["g"][0])
    restored = unflatten(tree, file)
    load_restored(state, restored)
    file[:] = b"\0" * len(file)
    assert (state["g"], state["data"]["g"][0]) == loaders
    assert [torch.rand(3, generator=g).tolist() for g in loaders] == expected


def test_none_in_its_place_takes_a_new_generator():
    generator = torch.Generator().manual_seed(5)
    state = {"g": None, "d": None, "box": Keeps()}
    load_restored(state, through({"g": generator, "d": {"in": [generator]}, "box": Keeps(g=generator)}))
    for found in (state["g"], state["d"]["in"][0], state["box"].state["g"]):
        assert type(found) is torch.Generator and torch.equal(found.get_state(), generator.get_state())


SAVED_GENERATOR = {"x": torch.Generator(), "d": {"g": torch.Generator(), "n": 1}, "l": [1, torch.Generator()]}
ELSEWHERE = SavedGenerator(torch.zeros(16, dtype=torch.uint8), torch.device("cuda:0"))
NONE_HERE = "a torch.Generator in the checkpoint, none here (None in this place takes what was saved)"
GENERATOR_MISFITS = {
    "a value": ({"x": 0}, None, f'state["x"]: {NONE_HERE}'),
    "a tensor": ({"x": torch.ones(1)}, None, 'state["x"]: a torch.Generator in the checkpoint, a tensor here'),
    "no such key": ({"d": {"n": 0}}, None, f'state["d"]["g"]: {NONE_HERE}'),
    "a shorter list": ({"l": [0]}, None, f'state["l"][1]: {NONE_HERE}'),
    "another container": ({"d": [1]}, None, f'state["d"]["g"]: {NONE_HERE}'),
    "not saved": (
        {"d": {"g": torch.Generator(), "n": torch.Generator()}},
        None,
        'state["d"]["n"]: int in the checkpoint',
    ),
    "not there": (
        {"d": {"g": torch.Generator(), "x": torch.Generator()}},
        None,
        'state["d"]["x"]: not in the checkpoint',
    ),
    "a device": ({"x": torch.Generator()}, ELSEWHERE, "a torch.Generator on cuda:0 in the checkpoint, on cpu here"),
    "no device": ({"x": None}, ELSEWHERE, 'state["x"]: a torch.Generator that cannot be set on cuda:0: '),
    "no state": (
        {"x": torch.Generator()},
        SavedGenerator(torch.zeros(16, dtype=torch.uint8), torch.device("cpu")),
        'state["x"]: a torch.Generator that cannot be set on cpu: ',
    ),
}


@pytest.mark.parametrize("name", GENERATOR_MISFITS)
def test_a_generator_that_does_not_fit_is_named_and_nothing_is_loaded(name):
    if name == "no device" and torch.cuda.is_available():
        pytest.skip("it is there")
    target, saved, message = GENERATOR_MISFITS[name]
    restored = through(SAVED_GENERATOR) | ({"x": saved} if saved else {})
    state = {"x": None, "d": None, "l": None, "n": 0, **target}
    before = copy.copy(state)
    with pytest.raises(StateMismatch) as caught:
        load_restored(state, restored | {"n": 1})
    assert message in str(caught.value)
    assert state == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_generator_on_a_device():
    generator = torch.Generator("cuda").manual_seed(3)
    torch.rand(7, device="cuda", generator=generator)
    restored = through({"g": generator, "new": generator})
    expected = torch.rand(7, device="cuda", generator=generator)
    state = {"g": torch.Generator("cuda"), "new": None}
    load_restored(state, restored)
    for found in state.values():
        assert torch.equal(torch.rand(7, device="cuda", generator=found), expected)


class LibrarysOwn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(("error", "own"), [(LibrarysOwn(1, 2), True), (KeyError("x"), False)])
def test_error_of_a_librarys_own_class_can_be_caught_as_documented(error, own):
    class Data:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise error

    with pytest.raises(StateMismatch, match="load_state_dict\\(\\) raised") as caught:
        load_restored({"data": Data()}, {"data": {}})
    assert isinstance(caught.value, LibrarysOwn) == own and caught.value.__cause__ is error
    assert type(caught.value).__name__ == "StateMismatch"
