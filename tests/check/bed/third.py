"""The third drawing of the bed: mistakes by an author who knew the guides and none of the rules, and correct loops.

Nothing here was played before the right causes of it were written down in `expected`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from check.bed import pipes, second
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler

import tierd

EVERY = 3


# -- data -------------------------------------------------------------------------------------------------------------


class Window:
    """A shuffle window. Its state is restored, and `iter` fills it anew, because that runs after the load."""

    def __init__(self) -> None:
        self.source = pipes.Sampler(seed=12)
        self.window: list[int] = []
        self.chance = random.Random(6)
        self.stream: Iterator[int] | None = None

    def __iter__(self) -> Iterator[int]:
        self.window = [next(self.source) for _ in range(8)]
        while True:
            place = self.chance.randrange(8)
            one, self.window[place] = self.window[place], next(self.source)
            yield one

    def __next__(self) -> int:
        if self.stream is None:
            self.stream = iter(self)
        return next(self.stream)

    def state_dict(self) -> dict[str, Any]:
        return {"window": list(self.window), "chance": self.chance.getstate(), "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window = list(state["window"])
        self.chance.setstate(state["chance"])
        self.source.load_state_dict(state["source"])


class Prefetcher:
    """Has the next batch ready, as one does that copies to a GPU on a stream of its own. It has no state."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.preload()

    def preload(self) -> None:
        self.ahead = [next(self.source) for _ in range(pipes.BATCH)]

    def __next__(self) -> list[int]:
        batch = self.ahead
        self.preload()
        return batch


def prefetches(spool: Path) -> None:
    """The prefetcher is made, and so reads, before the sampler under it is restored; its batch is in no checkpoint."""
    sampler = pipes.Sampler(seed=16)
    batches = Prefetcher(sampler)
    weight = torch.zeros(2)
    state: dict[str, Any] = {"sampler": sampler, "weight": weight, "step": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    ckpt.restore(state)
    while True:
        state["step"] += 1
        batch = next(batches)
        weight += torch.tensor([sum(batch) / 100, 1.0])
        tierd.observe(state["step"], batch, weight.sum())
        if state["step"] % EVERY == 0:
            ckpt.save(state["step"], state)


class Readers:
    """Twelve readers that take turns and give unequal numbers of samples. A load sorts their names: 0, 1, 10, 11, 2."""

    def __init__(self) -> None:
        self.readers = [pipes.Sampler(seed=14, size=120, first=number, every=12) for number in range(12)]
        self.turn = self.given = 0

    def __next__(self) -> int:
        if self.given > self.turn % 3:
            self.turn, self.given = (self.turn + 1) % 12, 0
        self.given += 1
        return next(self.readers[self.turn])

    def state_dict(self) -> dict[str, Any]:
        readers = {f"reader_{number}": one.state_dict() for number, one in enumerate(self.readers)}
        return {"readers": readers, "turn": self.turn, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for reader, name in zip(self.readers, sorted(state["readers"]), strict=True):
            reader.load_state_dict(state["readers"][name])
        self.turn, self.given = state["turn"], state["given"]


def loads(wrong: str, spool: Path) -> None:
    """torch's own loader, fast-forwarded in its epoch; the epochs are short."""
    generator = torch.Generator().manual_seed(7)
    if wrong == "epochs_counted_from_zero":
        sampler = DistributedSampler(range(16), num_replicas=1, rank=0, seed=11)
        loader = DataLoader(range(16), 4, sampler=sampler, generator=generator)
    else:
        sampler, loader = None, DataLoader(range(16), 4, shuffle=True, generator=generator)
    weight = torch.zeros(2)
    state: dict[str, Any] = {"weight": weight, "step": 0, "epoch": 0, "batch": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    ckpt.restore(state)
    for epoch in itertools.count(0 if wrong == "epochs_counted_from_zero" else state["epoch"]):
        state["epoch"] = epoch
        if sampler is not None:
            sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number < state["batch"]:
                continue
            state["step"] += 1
            state["batch"] = number + 1
            weight += torch.tensor([float(batch[0]), float(batch.sum())])
            tierd.observe(state["step"], batch, weight.sum())
            if state["step"] % EVERY == 0:
                ckpt.save(state["step"], state)
        state["batch"] = 0


# -- a model ----------------------------------------------------------------------------------------------------------


class Jitter:
    """Adds noise to what a model sees."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.2 * torch.randn(x.shape, generator=self.generator)


class Accumulator:
    """Steps the optimizer after every fourth batch. The gradients are in its state, the number of batches is not."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.net, self.optimizer, self.every = net, optimizer, every
        self.pending = 0

    def step(self) -> None:
        self.pending += 1
        if self.pending == self.every:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
            self.pending = 0

    def state_dict(self) -> dict[str, Any]:
        of = enumerate(self.net.parameters())
        return {str(number): torch.zeros_like(one) if one.grad is None else one.grad.clone() for number, one in of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, one in enumerate(self.net.parameters()):
            one.grad = state[str(number)].clone()


class Meter:
    """The mean of the last losses."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=5)

    def update(self, value: float) -> float:
        self.recent.append(value)
        return sum(self.recent) / len(self.recent)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent = deque(state["recent"], maxlen=5)


def trains(wrong: str, spool: Path) -> None:
    """A regression. What `wrong` names is wrong, and nothing else of the loop depends on a launch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator = torch.Generator().manual_seed(21)
    jitter, meter, average = Jitter(generator), Meter(), AveragedModel(net)
    accumulator = Accumulator(net, optimizer, 4 if wrong == "micro_counter_lost" else 1)
    state: dict[str, Any] = {
        "model": dict(net.named_parameters()) if wrong == "only_parameters_saved" else net,
        "optimizer": optimizer,
        "accumulator": accumulator,
        "step": 0,
    }
    if wrong == "scheduler_steps_after_the_save":
        state["scheduler"] = scheduler
    elif wrong == "generator_restored_into_another":
        state["noise"] = generator.get_state()
    elif wrong == "count_of_the_average_lost":
        state["ema"] = average.module
    elif wrong == "meter_lost":
        state |= {"best": float("inf"), "waited": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    if ckpt.restore(state) is not None and wrong == "generator_restored_into_another":
        generator = torch.Generator()
        generator.set_state(state["noise"])
    for done_here in itertools.count():
        state["step"] += 1
        step = state["step"]
        if wrong == "rate_by_steps_of_the_launch":
            optimizer.param_groups[0]["lr"] = 0.03 * min(1.0, (done_here + 1) / 10)
        samples = [(step * 11 + one * one) % 83 for one in range(6)]
        x = torch.tensor(samples).float().unsqueeze(1) / torch.tensor([83.0, 41.0, 19.0])
        y = x.sum(1, keepdim=True) + step * 5 % 7
        if wrong == "generator_restored_into_another":
            x = jitter(x)
        loss = (net(x) - y).square().mean()
        loss.backward()
        accumulator.step()
        if wrong == "count_of_the_average_lost":
            average.update_parameters(net)
        if wrong == "meter_lost":
            waits(meter.update(loss.item()), state, optimizer)
        tierd.observe(step, samples, loss)
        if step % EVERY == 0:
            if wrong == "generator_restored_into_another":
                state["noise"] = generator.get_state()
            ckpt.save(step, state)
        if wrong == "scheduler_steps_after_the_save":
            scheduler.step()


def waits(value: float, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Lower the learning rate where the mean loss was no better for four steps."""
    better = value < state["best"]
    state["best"], state["waited"] = min(value, state["best"]), 0 if better else state["waited"] + 1
    if state["waited"] == 4:
        optimizer.param_groups[0]["lr"] *= 0.5
        state["waited"] = 0


# -- right ------------------------------------------------------------------------------------------------------------


class Cached:
    """Right: a bounded cache that is no part of the state, because a sample is the same without it."""

    def __init__(self) -> None:
        self.source = pipes.Sampler(seed=15, size=16)
        self.cache: OrderedDict[int, int] = OrderedDict()
        self.hits = 0

    def __next__(self) -> int:
        one = next(self.source)
        if one in self.cache:
            self.hits += 1
        else:
            self.cache[one] = one * one
        self.cache.move_to_end(one)
        if len(self.cache) > 12:
            self.cache.popitem(last=False)
        return one + self.cache[one]

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state)


class LazyNet(nn.Module):
    """Layers that learn their size from a first batch, and a table that is made when it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.LazyLinear(8), nn.Dropout(0.2), nn.Linear(8, 1)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 8)
        return self.last(self.drop(torch.relu(self.first(x)) * self.table))


def lazy_layers(spool: Path) -> None:
    """Right: a launch makes the layers, the table and the optimizer's state when it first needs them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = LazyNet()
    net.first(torch.zeros(1, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    ckpt.restore(state)
    while True:
        state["step"] += 1
        samples = [(state["step"] * 11 + one) % 83 for one in range(6)]
        x = torch.tensor(samples).float().unsqueeze(1) / torch.tensor([83.0, 41.0, 19.0])
        loss = (net(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tierd.observe(state["step"], samples, loss)
        if state["step"] % EVERY == 0:
            ckpt.save(state["step"], state)


def counts_launches(spool: Path) -> None:
    """Right, because it is declared: launches, their seconds and the steps of the last one, for a log."""
    weight = torch.zeros(2)
    state: dict[str, Any] = {"weight": weight, "step": 0, "timing": {"launches": 0, "seconds": 0.0, "steps": 0}}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    ckpt.restore(state)
    before, began = state["timing"], time.monotonic()
    for done_here in itertools.count(1):
        state["step"] += 1
        weight += torch.tensor([state["step"] / 7, 1.0])
        state["timing"] = {
            "launches": before["launches"] + 1,
            "seconds": before["seconds"] + time.monotonic() - began,
            "steps": done_here,
        }
        tierd.observe(state["step"], [state["step"]], weight.sum())
        if state["step"] % EVERY == 0:
            ckpt.save(state["step"], state)


def windows(spool: Path) -> None:
    second.reads(Window(), spool)


def readers(spool: Path) -> None:
    second.reads(Readers(), spool)


def cached(spool: Path) -> None:
    second.reads(Cached(), spool)


planted = {
    "window_filled_again": windows,
    "preloaded_before_the_load": prefetches,
    "readers_in_order_of_text": readers,
    **{one: partial(loads, one) for one in ("epochs_counted_from_zero", "loader_generator_never_saved")},
    **{
        one: partial(trains, one)
        for one in (
            "only_parameters_saved", "count_of_the_average_lost", "rate_by_steps_of_the_launch",
            "generator_restored_into_another", "micro_counter_lost", "scheduler_steps_after_the_save", "meter_lost",
        )
    },
}  # fmt: skip

right = {"cached": cached, "lazy_layers": lazy_layers, "counts_launches": counts_launches}
