"""Training loops that `tierd check-resume` has to judge: right ones, and ones with a fault planted in them.

Those that only read data keep their state in one small file beside the spool's own, so that they need no torch.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tierd

EVERY = 2  # steps from one save to the next


def keep(spool: Path, state: Any) -> None:
    """One small file, whole or not at all."""
    part = spool / "state.part"
    part.write_text(json.dumps(state))
    part.replace(spool / "state")


def kept(spool: Path) -> Any:
    try:
        return json.loads((spool / "state").read_text())
    except FileNotFoundError:
        return None


# -- data only --------------------------------------------------------------------------------------------------------


def read(spool: Path, *, seed: int | None = 0, forget: str = "", last: int = 10**6, batch: int = 4) -> None:
    """Epochs of 40 samples in an order of their own, exactly resumed, or with something forgotten."""
    state = {"step": 0, "epoch": 0, "position": 0, "seed": seed, **(kept(spool) or {})}
    if forget == "position":
        state["position"] = 0
    if forget == "seed" and kept(spool):
        state["seed"] = os.getpid()
    while state["step"] < last:
        order = list(range(40))
        random.Random(None if state["seed"] is None else state["seed"] + state["epoch"]).shuffle(order)
        while state["position"] < 40 and state["step"] < last:
            samples = order[state["position"] : state["position"] + batch]
            state["position"] += batch
            state["step"] += 1
            tierd.observe(state["step"], samples, 1 / state["step"])
            if state["step"] % EVERY == 0 and forget != "all":
                keep(spool, {**state, "step": state["step"] + (forget == "step")})
        if state["position"] == 40:
            state["epoch"], state["position"] = state["epoch"] + 1, 0


def unseeded(spool: Path) -> None:
    read(spool, seed=None)


def reshuffled(spool: Path) -> None:
    """Each launch draws a seed, but the first one's is always the same: only the resume is wrong."""
    read(spool, forget="seed")


def never_saved(spool: Path) -> None:
    read(spool, forget="all")


def off_by_one(spool: Path) -> None:
    read(spool, forget="step")


def ends_early(spool: Path) -> None:
    print("that was all")
    read(spool, last=3)


def breaks(spool: Path) -> None:
    tierd.observe(1, [1])
    raise RuntimeError("the GPU fell off")


def hangs(spool: Path) -> None:
    tierd.observe(1, [1])
    time.sleep(1000)


def leaks(spool: Path) -> None:
    """Keeps its state where every run finds it."""
    read(spool.parent.parent)


def prefetched(spool: Path) -> None:
    """A queue of three batches is read ahead, and its reader's position is what is saved."""
    state = {"step": 0, "read": 0, **(kept(spool) or {})}
    queue: deque[list[int]] = deque()
    while True:
        while len(queue) < 3:
            queue.append(list(range(state["read"], state["read"] + 4)))
            state["read"] += 4
        state["step"] += 1
        tierd.observe(state["step"], queue.popleft())
        if state["step"] % EVERY == 0:
            keep(spool, state)


def shards(spool: Path) -> None:
    """Shards of six samples: what was read of the one that it is in is read again."""
    state = {"step": 0, "read": 0, **(kept(spool) or {})}
    state["read"] -= state["read"] % 6
    while True:
        samples = list(range(state["read"], state["read"] + 4))
        state["read"] += 4
        state["step"] += 1
        tierd.observe(state["step"], samples, float(sum(samples)))
        if state["step"] % EVERY == 0:
            keep(spool, state)


def by_rank(spool: Path) -> None:
    """Two ranks; rank 1 is slower and has its own samples."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (world, os.environ["MASTER_ADDR"], os.environ["LOCAL_RANK"]) == (2, "127.0.0.1", str(rank))
    mine = spool / str(rank)
    mine.mkdir(exist_ok=True)
    while True:
        time.sleep(0.01 * rank)
        read(mine, seed=rank, last=10**6)


# -- with a model -----------------------------------------------------------------------------------------------------


def naive(spool: Path, seed: int | None = None) -> None:
    """The dataset without checkpoint support that everybody begins with: step and epoch are saved, the position is
    not, and each launch shuffles anew."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class NaiveDataset(Dataset[int]):
        def __init__(self, num_samples: int) -> None:
            self.data = list(range(num_samples))

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> int:
            return self.data[index]

    if seed is not None:
        torch.manual_seed(seed)
    loader = DataLoader(NaiveDataset(96), batch_size=8, shuffle=True)
    state: dict[str, Any] = {"step": 0, "epoch": 0}
    checkpointer = tierd.Checkpointer(spool, "naive", to=[])
    checkpointer.restore(state)
    for epoch in range(state["epoch"], 1000):
        state["epoch"] = epoch
        for batch in loader:
            state["step"] += 1
            tierd.observe(state["step"], batch)
            if state["step"] % EVERY == 0:
                checkpointer.save(state["step"], state)


def naive_seeded(spool: Path) -> None:
    naive(spool, seed=0)


def learn(spool: Path, forget: str = "", to: Sequence[str] = ()) -> None:
    """A model with dropout; everything is restored but what is forgotten."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    state = {"model": model, "rng": tierd.RngState(), "step": 0}
    state.pop(forget, None)
    checkpointer = tierd.Checkpointer(spool, "learn", to=to)
    checkpointer.restore(state)
    while True:
        state["step"] += 1
        samples = [(state["step"] * 5 + one) % 97 for one in range(5)]
        inputs = torch.tensor(samples).float().unsqueeze(1) / torch.tensor([97.0, 53.0, 29.0, 11.0])
        loss = model(inputs).square().mean()
        loss.backward()
        with torch.no_grad():  # by hand: torch's own optimizers take seconds to import
            for weight in model.parameters():
                weight -= 0.05 * weight.grad
                weight.grad = None
        tierd.observe(state["step"], torch.tensor(samples), loss)
        if state["step"] % EVERY == 0:
            checkpointer.save(state["step"], state)


def without_rng(spool: Path) -> None:
    learn(spool, "rng")


def without_model(spool: Path) -> None:
    learn(spool, "model")


def late_rank(spool: Path) -> None:
    """Rank 1 is still in step 4 when rank 0 dies after it. Python's generator is saved, and nobody has seeded it."""
    import torch

    state = {"weights": torch.zeros(3), "rng": tierd.RngState(), "step": 0}
    checkpointer = tierd.Checkpointer(spool, "late", to=[])
    checkpointer.restore(state)
    while True:
        state["step"] += 1
        if state["step"] == 4 and os.environ["RANK"] == "1":
            time.sleep(1.5)
        state["weights"] += state["step"]
        tierd.observe(state["step"], [state["step"]], state["weights"].sum())
        if state["step"] % EVERY == 0:
            checkpointer.save(state["step"], state)


class Drift:
    """What an adapter saves as an object, and restores as a plain value. Its state takes long to give at `slow_at`."""

    def __init__(self, slow_at: int) -> None:
        import torch

        self.slow_at = slow_at
        self.count, self.mean = 0, torch.zeros(3)

    def move(self, by: float) -> None:
        self.count, self.mean = self.count + 1, 0.9 * self.mean + by

    def state_dict(self) -> dict[str, Any]:
        if self.count == self.slow_at:
            time.sleep(1)
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["mean"].clone()


def adapted(spool: Path, into: str = "values", slow_at: int = 0) -> None:
    """It trains with what it made of the `values` or of the `other` object that it restored into, as adapters of
    frameworks do, and saves that; or with what it restored into `itself`."""
    drift = Drift(slow_at)
    given = {"values": None, "other": Drift(0), "itself": drift}[into]
    found: dict[str, Any] = {"drift": given, "note": 0}
    checkpointer = tierd.Checkpointer(spool, "adapted", to=[])
    restored = checkpointer.restore(found)
    step = restored.step if restored else 0
    if restored and into != "itself":
        drift.load_state_dict(found["drift"] if into == "values" else found["drift"].state_dict())
    while True:
        step += 1
        drift.move(step)
        found["note"] = step
        tierd.observe(step, [step], drift.mean.sum())
        if step % EVERY == 0:
            checkpointer.save(step, found if into == "itself" else {"drift": drift, "note": step})


def adapted_other(spool: Path) -> None:
    adapted(spool, "other")


def adapted_itself(spool: Path) -> None:
    adapted(spool, "itself")


def adapted_slow_at_step_9(spool: Path) -> None:
    adapted(spool, slow_at=9)


def handed_over(spool: Path) -> None:
    """A daemon does the writing, and copies to a tier."""
    tier = spool.parent / "tier"
    tier.mkdir(exist_ok=True)
    learn(spool, to=[tier.as_uri()])
