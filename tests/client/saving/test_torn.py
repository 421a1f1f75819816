"""Overlap: a checkpoint is what the state was when `save` was called, bit for bit, whatever training does meanwhile."""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.attached import Pace, committed, differences, frozen, loaded
from support.seeds import seeds
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tierd
from tierd.core.errors import SaveSkipped

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning", "ignore:.*weights_only.*")


class FullSpeed:
    """As `Pace`, and holds nothing."""

    def free(self, step: int) -> None:
        pass


class Net(nn.Module):
    """Every kind of parameter and of buffer that a model may have; which of them, the dice say."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.width = width = dice.choice([4, 6, 8])
        self.embed = nn.Embedding(11, width)
        kinds = {
            "linear": lambda: nn.Linear(width, width, bias=dice.random() < 0.7),
            "norm": lambda: nn.BatchNorm1d(width, momentum=dice.choice([0.1, None])),
            "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, width)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()),
            "dropout": lambda: nn.Dropout(0.2),
            "layer norm": lambda: nn.LayerNorm(width),
            "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(width, width)),
        }
        self.body = nn.Sequential(*(kinds[dice.choice(list(kinds))]() for _ in range(dice.randint(1, 4))))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        if dice.random() < 0.4:
            self.head.weight = self.embed.weight
        self.coarse = nn.Linear(width, width).bfloat16() if dice.random() < 0.5 else None
        self.turned = nn.Parameter(torch.randn(width, 5).t()) if dice.random() < 0.6 else None
        self.strided = nn.Parameter(torch.randn(3, 2 * width)[1, ::2]) if dice.random() < 0.6 else None
        self.phase = nn.Parameter(torch.randn(width, dtype=torch.complex64)) if dice.random() < 0.3 else None
        self.empty = nn.Parameter(torch.empty(0, 3)) if dice.random() < 0.3 else None
        if dice.random() < 0.4:  # parameters that lie in one memory
            flat = torch.randn(3 * width)
            self.first, self.second = nn.Parameter(flat[:width]), nn.Parameter(flat[width:])
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(width, 7).t())
        for parameter in self.parameters():
            if dice.random() < 0.15 and parameter is not self.head.weight:
                parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.body(self.embed(tokens)))
        with torch.no_grad():
            self.calls += 1
            self.mean.mul_(0.9).add_(found[:7])
        if self.coarse is not None:
            found = found + self.coarse(found.bfloat16()).float()
        if self.turned is not None:
            found = found + self.turned.sum(0)
        if self.strided is not None:
            found = found * self.strided
        if self.phase is not None:
            found = found * self.phase.abs()
        if hasattr(self, "first"):
            found = found + self.first * self.second[: self.width]
        if self.empty is not None:
            found = found + self.empty.sum()
        return self.head(found)


def an_optimizer(dice: random.Random, own: list[nn.Parameter]) -> torch.optim.Optimizer:
    real = not any(parameter.is_complex() for parameter in own)
    plain = real and all(p.numel() and p.dtype == torch.float32 and p.is_contiguous() for p in own)
    foreach = dice.choice([True, False, None])
    if len(own) > 1 and dice.random() < 0.5:
        at = dice.randrange(1, len(own))
        groups: Any = [{"params": own[:at]}, {"params": own[at:], "lr": 0.005}]
    else:
        groups = own
    kinds = {
        "SGD": lambda: torch.optim.SGD(groups, 0.01, momentum=0.9, nesterov=dice.random() < 0.5, foreach=foreach),
        "no momentum": lambda: torch.optim.SGD(groups, 0.01, foreach=foreach),
        "Adam": lambda: torch.optim.Adam(groups, 0.01, amsgrad=dice.random() < 0.5, foreach=foreach),
        "AdamW": lambda: torch.optim.AdamW(groups, 0.01, foreach=foreach),
        "Adam with a tensor for lr": lambda: torch.optim.Adam(groups, torch.tensor(0.01), foreach=False),
        "Adagrad": lambda: torch.optim.Adagrad(groups, 0.01, foreach=foreach),
        "RMSprop": lambda: torch.optim.RMSprop(groups, 0.001, momentum=0.5, centered=True, foreach=foreach),
    }
    if real:
        kinds["fused AdamW"] = lambda: torch.optim.AdamW(groups, 0.01, fused=True)
        kinds["fused SGD"] = lambda: torch.optim.SGD(groups, 0.01, momentum=0.9, fused=True)
    if plain and groups is own:
        kinds["LBFGS"] = lambda: torch.optim.LBFGS(own, 0.01, max_iter=3, history_size=2)
    return kinds[dice.choice(list(kinds))]()


class Training:
    """A training whose every part, and the order of what it does, is random; the same for the same seed."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.model = Net(dice)
        own = list(self.model.parameters())
        dice.shuffle(own)
        count = min(dice.randint(1, 3), len(own))
        cuts = [0, *sorted(dice.sample(range(1, len(own)), count - 1)), len(own)]
        self.optimizers = [an_optimizer(dice, own[a:b]) for a, b in itertools.pairwise(cuts)]
        self.attached = dice.sample(self.optimizers, dice.randint(1, count))
        self.schedulers = [
            dice.choice(
                [
                    lambda o: StepLR(o, 2, 0.5),
                    lambda o: CosineAnnealingLR(o, 9),
                    lambda o: OneCycleLR(o, 0.1, 99, cycle_momentum=False),
                ]
            )(o)
            for o in self.optimizers
            if dice.random() < 0.6 and not isinstance(o, torch.optim.LBFGS)
        ]
        averaging = get_ema_multi_avg_fn(0.8) if dice.random() < 0.5 else None
        self.average = AveragedModel(self.model, multi_avg_fn=averaging, use_buffers=dice.random() < 0.5)
        self.copies = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.loader = {
            "order": list(range(20)),
            "at": 0,
            "seen": collections.Counter(),
            "last": collections.deque([0], 5),
        }
        self.array = np.arange(12.0)
        self.alone = torch.zeros(33)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizers": self.optimizers,
            "schedulers": self.schedulers,
            "average": self.average,
            "copies": self.copies,
            "rng": tierd.RngState(),
            "loader": self.loader,
            "array": self.array,
            "alone": self.alone,
            "count": 0,
        }
        if dice.random() < 0.4:
            self.state["gradients"] = {}
        keys = list(self.state)
        dice.shuffle(keys)
        self.state = {key: self.state[key] for key in keys}

    # What may happen between two saves, in any order.

    def learn(self) -> None:
        """Forward and backward: gradients add up, buffers and generators move on."""
        loss = self.model(torch.randint(0, 11, (8,))).square().mean() * np.random.rand()
        if loss.requires_grad:
            loss.backward()
        if "gradients" in self.state:
            self.state["gradients"] = {name: p.grad for name, p in self.model.named_parameters()}

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step(self.closure if isinstance(optimizer, torch.optim.LBFGS) else None)

    def closure(self) -> torch.Tensor:
        self.model.zero_grad()
        loss = self.model(torch.arange(8)).square().mean()
        if loss.requires_grad:
            loss.backward()
        return loss

    def keep_an_average(self) -> None:
        self.average.update_parameters(self.model)
        with torch.no_grad():
            for mine, parameter in zip(self.copies, self.model.parameters(), strict=True):
                mine.mul_(0.7).add_(parameter, alpha=0.3)

    def count(self) -> None:
        self.state["count"] += 1
        self.loader["at"] += 1
        self.dice.shuffle(self.loader["order"])
        self.loader["seen"][self.loader["at"] % 3] += 1
        self.loader["last"].append(self.loader["at"])
        self.array += 1
        self.alone.add_(1)
        random.random(), np.random.rand(), torch.rand(3)

    def zero(self) -> None:
        self.model.zero_grad(set_to_none=self.dice.random() < 0.5)

    def schedule(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


def race(spool, seed: int, pace: Pace | FullSpeed) -> None:
    """Train and save; fail if one checkpoint is not what the state was when `save` was called."""
    dice = random.Random(seed)
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    training = Training(dice)
    state, references, saves = training.state, {}, {}
    slots, busy = dice.choice([1, 2]), dice.choice(["wait", "wait", "skip"])
    about = f"seed {seed}, slots={slots}, when_busy={busy}, {[type(o).__name__ for o in training.optimizers]}"
    with tierd.Checkpointer(spool.root, "run", to=[], slots=slots, when_busy=busy) as checkpointer:
        checkpointer.attach(*training.attached)

        def save() -> None:
            if busy == "wait" or slots > 1:
                pace.free(len(saves))  # it would wait for ever
            number = len(saves) + 1
            references[number] = frozen(state)
            saves[number] = checkpointer.save(number, state)

        for _ in range(6):
            steps = [lambda o=o: training.step(o) for o in training.optimizers if dice.random() < 0.9]
            acts = [training.learn] * dice.randint(1, 3) + [save] * dice.randint(0, 2) + steps
            acts += [training.keep_an_average, training.count, training.schedule, training.zero]
            dice.shuffle(acts)
            for act in acts:
                if act in steps and any(act.__defaults__[0] is one for one in training.attached):
                    pace.free(len(saves))  # and not before: what comes between has overtaken the copy
                act()
        save()
        training.learn(), training.count(), training.keep_an_average()
        pace.free(len(saves))
    wrong = [f"step {number}: {one.error()!r}" for number, one in saves.items() if not _as_it_should(one)]
    durable = [number for number, one in saves.items() if one.error() is None]
    assert not wrong and sorted(committed(spool)) == durable, f"{about}: {wrong}, {committed(spool)}, {durable}"
    assert checkpointer.stats.failed == 0 and checkpointer.stats.saves == len(durable)
    for number, found in loaded(spool, durable, state):
        wrong = differences(references[number], found)
        assert not wrong, f"{about}: step {number} is torn: {'; '.join(wrong[:5])}"


def _as_it_should(save: tierd.Save) -> bool:
    return save.done() and (save.error() is None or isinstance(save.error(), SaveSkipped))


@pytest.mark.parametrize("seed", seeds(weight=3))
def test_a_checkpoint_is_the_state_at_the_call_of_save(spool, seed, pace):
    race(spool, seed, pace)
    assert pace.begun, "nothing was copied late: this has tested nothing"


@pytest.mark.parametrize("seed", seeds(first=500, weight=2))
def test_so_it_is_at_full_speed(spool, seed):
    race(spool, seed, FullSpeed())
