"""The second drawing of the bed: mistakes like those that the check missed or misnamed in the first, and correct loops.

All were written before the rules were changed for those, and none was played until then.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from check.bed import pipes

import tierd

EVERY = 3


# -- data whose loss no sample shows, or only for a while --------------------------------------------------------------


class Kept:
    """A pipeline that keeps something which no sample of the next steps shows."""

    name = ""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.source = pipes.Sampler()
        self.begin()

    def begin(self) -> None:
        raise NotImplementedError

    def after(self, one: int) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        one = next(self.source)
        self.after(one)
        return one

    def state_dict(self) -> dict[str, Any]:
        kept = getattr(self, self.name)
        return {self.name: list(kept) if isinstance(kept, list) else kept, "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        if self.wrong != f"{self.name}_lost":
            setattr(self, self.name, state[self.name])


class Recent(Kept):
    """The last four. Nothing reads them, and the first step sets them all again, so that they need no restore."""

    name = "recent"

    def begin(self) -> None:
        self.recent: list[int] = []

    def after(self, one: int) -> None:
        self.recent = [*self.recent, one][-4:]


class Echo(Kept):
    """The last four, of which every fifth sample is one again."""

    name = "echo"

    def begin(self) -> None:
        self.echo: list[int] = []

    def __next__(self) -> int:
        one = next(self.source)
        if self.echo and self.source.position % 5 == 0:
            one = self.echo[0]
        self.after(one)
        return one

    def after(self, one: int) -> None:
        self.echo = [*self.echo, one][-4:]


class Largest(Kept):
    """The largest of the epoch so far."""

    name = "largest"

    def begin(self) -> None:
        self.largest = 0

    def after(self, one: int) -> None:
        self.largest = one if self.source.position == 1 else max(one, self.largest)


class Served(Kept):
    """How many it gave in all."""

    name = "served"

    def begin(self) -> None:
        self.served = 0

    def after(self, one: int) -> None:
        self.served += 1


class Reservoir(Kept):
    """Every fifth, to be repeated much later."""

    name = "reservoir"

    def begin(self) -> None:
        self.reservoir: list[int] = []

    def after(self, one: int) -> None:
        if one % 5 == 0:
            self.reservoir = [*self.reservoir, one][-400:]


class Mean(Kept):
    """The mean of what it gave, by which the loop centres a batch."""

    name = "mean"

    def begin(self) -> None:
        self.mean = 0.0

    def after(self, one: int) -> None:
        self.mean = 0.95 * self.mean + 0.05 * one


class Lazy:
    """Right: what a load leaves open is worked out with the next sample."""

    def __init__(self) -> None:
        self.at, self.order = 0, None

    def __next__(self) -> int:
        if self.order is None:
            self.order = random.Random(3).sample(range(100), 100)
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], None


def reads(data: Any, spool: Path) -> None:
    torch.manual_seed(0)
    weight = torch.zeros(2)
    state: dict[str, Any] = {"data": data, "weight": weight, "step": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    ckpt.restore(state)
    while True:
        state["step"] += 1
        batch = [next(data) for _ in range(pipes.BATCH)]
        weight += torch.tensor([sum(batch) / 100 - getattr(data, "mean", 0.0), 1.0])
        tierd.observe(state["step"], batch, weight.sum())
        if state["step"] % EVERY == 0:
            ckpt.save(state["step"], state)


def kept(kind: type[Kept], wrong: str, spool: Path) -> None:
    reads(kind(wrong), spool)


def lazy(spool: Path) -> None:
    reads(Lazy(), spool)


# -- ranks that share a run --------------------------------------------------------------------------------------------


def shared(wrong: str, spool: Path) -> None:
    """Two ranks of one run; each has its own part of every checkpoint."""
    rank = int(os.environ["RANK"])
    own_seed = wrong == "seed_of_rank_0_everywhere"

    def sampler(rank: int) -> pipes.Sampler:
        if own_seed:
            return pipes.Sampler(seed=20 + rank)
        return pipes.Sampler(seed=8, size=2 * pipes.SIZE, first=rank, every=2)

    data = sampler(rank)
    state: dict[str, Any] = {"data": data.state_dict(), "step": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=rank, world_size=2)
    if ckpt.restore(state) is not None:
        if wrong in ("rank_offset_lost", "seed_of_rank_0_everywhere"):
            data = sampler(0)
            state["data"]["seed"] = data.seed
        data.load_state_dict(state["data"])
        if wrong == "one_rank_begins_anew" and rank == 1:
            data, state["step"] = sampler(rank), 0
    while True:
        state["step"] += 1
        batch = [next(data) for _ in range(pipes.BATCH)]
        tierd.observe(state["step"], batch)
        time.sleep(0.005)
        if state["step"] % EVERY == 0:
            state["data"] = data.state_dict()
            ckpt.save(state["step"], state)


# -- losses that move by very little -----------------------------------------------------------------------------------


def faint(wrong: str, spool: Path) -> None:
    """Noise, a drift and an order of summation that change the loss by less than a millionth."""
    torch.manual_seed(0)
    random.seed(0)
    weight = torch.full((50,), 0.3, dtype=torch.float64)
    drift = torch.zeros(1, dtype=torch.float64)
    state: dict[str, Any] = {"weight": weight, "drift": drift, "rng": tierd.RngState(), "step": 0}
    forgotten = {"jitter_rng_lost": "rng", "drift_lost": "drift"}.get(wrong)
    if forgotten:
        del state[forgotten]
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    backwards = ckpt.restore(state) is not None and wrong == "sums_backwards"
    while True:
        state["step"] += 1
        step = state["step"]
        samples = [(step * 7 + one) % 89 for one in range(50)]
        x = torch.tensor(samples, dtype=torch.float64) / 89
        if wrong in ("", "jitter_rng_lost"):
            x = x + 1e-7 * random.random()
        if wrong in ("", "drift_lost"):
            drift.mul_(0.99).add_(1e-8)
            x = x + drift
        terms = ((weight * x - 1) ** 2).float().tolist()
        loss = torch.zeros(1)
        for one in terms[::-1] if backwards else terms:
            loss += one
        weight -= 1e-3 * x * float(loss)
        tierd.observe(step, samples, loss)
        if step % EVERY == 0:
            ckpt.save(step, state)


KEPT = (Echo, Largest, Served, Reservoir, Mean)
planted = {
    **{f"{kind.name}_lost": partial(kept, kind, f"{kind.name}_lost") for kind in KEPT},
    **{one: partial(shared, one) for one in ("rank_offset_lost", "seed_of_rank_0_everywhere", "one_rank_begins_anew")},
    **{one: partial(faint, one) for one in ("jitter_rng_lost", "drift_lost", "sums_backwards")},
}

right = {
    "recent": partial(kept, Recent, ""),
    "recent_unrestored": partial(kept, Recent, "recent_lost"),
    "largest": partial(kept, Largest, ""),
    "lazy_order": lazy,
    "shared_run": partial(shared, ""),
    "faint": partial(faint, ""),
}
