"""Training loops of the test bed: `planted.NAME` has the mistake NAME, `right.NAME` none."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from check.bed import pipes, second, third
from torch import nn

import tierd

EVERY = 3


class Named:
    """`planted.x` is the loop with the mistake x."""

    def __init__(self, loops: dict[str, Callable[[Path], None]]) -> None:
        self.__dict__.update(loops)


# -- data -------------------------------------------------------------------------------------------------------------


def reads(make: Callable[[str], Any], wrong: str, spool: Path, after: Callable[[Any], None] | None = None) -> None:
    """A pipeline, and a model so small that any difference is the data's."""
    torch.manual_seed(0)
    random.seed(0)
    weight = torch.zeros(3)
    data = make(wrong)
    state: dict[str, Any] = {"data": data, "weight": weight, "step": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    if ckpt.restore(state) is not None:
        if after is not None:
            after(data)
        if wrong == "step_one_too_high":
            state["step"] += 1
        elif wrong == "step_one_too_low":
            state["step"] -= 1
    while True:
        state["step"] += 1
        batch = [next(data) for _ in range(pipes.BATCH)]
        number = sum(hash_of(one) for one in batch) / 1000
        weight += torch.tensor([number, number**2, 1.0])
        tierd.observe(state["step"], batch, weight.sum())
        if state["step"] % EVERY == 0:
            ckpt.save(state["step"], state)


def hash_of(sample: Any) -> int:
    return sample if isinstance(sample, int) else sum(map(ord, str(sample)))


def sampled(wrong: str) -> Any:
    return pipes.Sampler(wrong)


def buffered(wrong: str) -> Any:
    return pipes.Buffer(pipes.Sampler(wrong), wrong)


def packed(wrong: str) -> Any:
    return pipes.Packing(pipes.Sampler(wrong), wrong)


def queued(wrong: str) -> Any:
    return pipes.Queue(pipes.Sampler(wrong), wrong)


def filtered(wrong: str) -> Any:
    return pipes.Filter(pipes.Sampler(wrong), wrong)


def stacked(wrong: str) -> Any:
    return pipes.Queue(pipes.Packing(pipes.Buffer(pipes.Sampler(wrong), wrong), wrong), wrong, depth=3)


class Streamed:
    """The blog's iterable dataset: a generator function, whose buffer is a variable of its own."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong
        self.current_epoch = self.current_sample = 0
        self.base_seed = 42

    def __iter__(self) -> Iterator[int]:
        while True:
            order = np.random.RandomState(self.base_seed + 1000 * self.current_epoch).permutation(pipes.SIZE)
            while self.current_sample < pipes.SIZE:
                self.current_sample += 1
                yield int(order[self.current_sample - 1])
            self.current_epoch, self.current_sample = self.current_epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.current_epoch, "sample": self.current_sample, "base_seed": self.base_seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current_epoch, self.base_seed = state["epoch"], state["base_seed"]
        if self.wrong != "stream_sample_lost":
            self.current_sample = state["sample"]
        if self.wrong == "stream_epoch_lost":
            self.current_epoch = 0


class Shuffled(Streamed):
    def __iter__(self) -> Iterator[int]:
        chance, held = random.Random(4), []
        for one in super().__iter__():
            held.append(one)
            if len(held) == 8:
                yield held.pop(chance.randrange(8))


class Iterated:
    """Whatever `dataset` gives, from one iterator; the state is the dataset's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.iterator: Iterator[int] | None = None

    def __next__(self) -> int:
        if self.iterator is None:
            self.iterator = iter(self.dataset)
        return next(self.iterator)

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


def streamed(wrong: str) -> Any:
    return Iterated(Shuffled(wrong) if wrong == "stream_buffer_unsaved" else Streamed(wrong))


def epoch_again(data: Any) -> None:
    data.set_epoch(data.epoch)


def ranked(wrong: str, spool: Path) -> None:
    """Two ranks, each with a run of its own."""
    rank = int(os.environ["RANK"])
    whose = {"ranks_swapped": 1 - rank, "all_from_rank_0": 0}.get(wrong, rank)
    torch.manual_seed(0)
    data = pipes.Sampler(seed=8, size=2 * pipes.SIZE, first=rank, every=2)
    state: dict[str, Any] = {"at": [data.epoch, data.position, rank], "step": 0}
    homes = [spool / str(one) for one in (0, 1)]
    for home in homes:
        home.mkdir(exist_ok=True)
    if not any(homes[rank].iterdir()):  # the first launch: what the other rank has saved meanwhile is not looked at
        whose = rank
    other = tierd.Checkpointer(homes[whose], "bed", to=[], rank=0, world_size=1)
    if other.restore(state) is not None:
        mine = pipes.Sampler(seed=8, size=2 * pipes.SIZE, first=state["at"][2], every=2)
        mine.load_state_dict({"epoch": state["at"][0], "position": state["at"][1], "seed": 8})
        data = mine
        if wrong == "world_size_changed":
            data.order = data.order[::2]
            data.position //= 2
    other.close()
    ckpt = tierd.Checkpointer(homes[rank], "bed", to=[], rank=0, world_size=1)
    while True:
        state["step"] += 1
        batch = [next(data) for _ in range(pipes.BATCH)]
        tierd.observe(state["step"], batch)
        time.sleep(0.005)
        if state["step"] % EVERY == 0:
            state["at"] = [data.epoch, data.position, data.first]
            ckpt.save(state["step"], state)


# -- a model ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Linear(12, 1)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(hidden) * self.scale


def learns(wrong: str, spool: Path) -> None:
    """Everything that a training loop carries from step to step; one thing is wrong."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    parts = PARTS.get(wrong, set())
    net = Net(0.3 if wrong.startswith(("torch_", "reseeded")) else 0.0)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    average = copy.deepcopy(net)
    noise = torch.Generator().manual_seed(3)
    dice, grains = random.Random(3), np.random.default_rng(3)
    bank, hidden, centre = torch.zeros(6, 4), torch.zeros(1), torch.zeros(1)
    state: dict[str, Any] = {
        "model": net,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "ema": average,
        "noise": noise,
        "rng": tierd.RngState(),
        "bank": bank,
        "hidden": hidden,
        "centre": centre,
        "dice": list(dice.getstate()[1]),
        "grains": grains.bit_generator.state,
        "step": 0,
        "best": {"loss": float("inf"), "waited": 0},
        "losses": [],
        "calls": 0,
        "scale": 1.0,
    }
    for name in FORGOTTEN.get(wrong, ()):
        del state[name]
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    if ckpt.restore(state) is not None:
        if "dice" in state:
            dice.setstate((3, tuple(state["dice"]), None))
        if "grains" in state:
            grains.bit_generator.state = state["grains"]
        net.calls, net.scale[:] = state.get("calls", 0), state.get("scale", 1.0)
        if wrong == "weights_reset":
            net.last.reset_parameters()
        elif wrong == "weights_pretrained_again":
            torch.manual_seed(0)
            net.load_state_dict(Net(0.0).state_dict(), strict=False)
        elif wrong == "one_bias_lost":
            nn.init.zeros_(net.first.bias)
        elif wrong == "batchnorm_reset":
            net.norm.reset_running_stats()
        elif wrong == "average_begun_anew":
            average.load_state_dict(net.state_dict())
        elif wrong == "optimizer_made_after":
            optimizer = torch.optim.AdamW(net.parameters(), lr=optimizer.param_groups[0]["lr"])
            scheduler.optimizer = optimizer
        elif wrong == "moments_cleared":
            optimizer.state.clear()
        elif wrong == "learning_rate_set_again":
            optimizer.param_groups[0]["lr"] = 1e-2
        elif wrong == "scheduler_made_after":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        elif wrong == "scheduler_one_ahead":
            scheduler.last_epoch += 1
        elif wrong == "scaler_made_after":
            scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        elif wrong == "reseeded_after_restore":
            torch.manual_seed(0)
        elif wrong == "best_reset":
            state["best"] = {"loss": float("inf"), "waited": 0}
        elif wrong == "history_reset":
            state["losses"] = []
        elif wrong == "model_left_in_eval":
            net.norm.eval()
        elif wrong == "weights_rounded":
            with torch.no_grad():
                for one in net.parameters():
                    one.copy_(one.bfloat16().float())
    for step in range(state["step"] + 1, 1000):
        state["step"] = step
        if wrong == "save_at_the_start_of_a_step" and step % EVERY == 0:
            ckpt.save(step, state)
        samples = [(step * 5 + one) % 97 for one in range(6)]
        x = torch.tensor(samples).float().unsqueeze(1) / torch.tensor([97.0, 53.0, 29.0, 11.0])
        if "noise" in parts:
            x = x + 0.1 * torch.randn(x.shape, generator=noise)
        if "dice" in parts:
            x = x * (1 + dice.random())
        if "grains" in parts:
            x = x + float(grains.normal())
        if "python" in parts:
            x = x * (1 + random.random())
        if "numpy" in parts:
            x = x + float(np.random.rand())
        if "bank" in parts:
            x = x + 0.1 * bank.mean(0)
            bank[step % 6] = x.detach().mean(0)
        if "hidden" in parts:
            hidden.copy_(0.9 * hidden + x.mean().detach())
            x = x + hidden
        if "calls" in parts:
            x = x * (1 + net.calls / 100)
        if "scale" in parts:
            net.scale *= 0.97
        if "average" in parts:
            with torch.no_grad():
                average.eval()
                target = average(x)
        else:
            target = torch.ones(6, 1)
        if "centre" in parts:
            target = target - centre
            centre.mul_(0.9).add_(0.1 * target.mean().detach())
        loss = (net(x) - target).square().mean()
        accumulate = 4 if "accumulate" in parts else 1
        scaler.scale(loss).backward()
        if wrong == "save_before_the_step" and step % EVERY == 0:
            ckpt.save(step, state)
        if step % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), net.parameters(), strict=True):
                kept.lerp_(new, 0.1)
        state["losses"] = [*state["losses"], loss.item()][-20:] if "losses" in state else []
        shown = loss.item() + (3.0 if step > 4 else 0.0)
        if "best" in state:
            better = shown < state["best"]["loss"]
            state["best"] = {
                "loss": min(shown, state["best"]["loss"]),
                "waited": 0 if better else state["best"]["waited"] + 1,
            }
        for name, value in (
            ("dice", list(dice.getstate()[1])),
            ("grains", grains.bit_generator.state),
            ("calls", net.calls),
            ("scale", float(net.scale)),
        ):
            if name in state:
                state[name] = value
        tierd.observe(step, samples, loss)
        if step % EVERY == 0 and not wrong.startswith("save_"):
            ckpt.save(step, state)


# What a loop of that name uses, and what it forgets to save.
PARTS: dict[str, set[str]] = {
    "private_torch_generator_lost": {"noise"},
    "private_random_lost": {"dice"},
    "private_numpy_generator_lost": {"grains"},
    "python_rng_lost": {"python"},
    "numpy_rng_lost": {"numpy"},
    "memory_bank_lost": {"bank"},
    "hidden_state_lost": {"hidden"},
    "call_counter_lost": {"calls"},
    "unsaved_buffer_lost": {"scale"},
    "average_never_saved_and_used": {"average"},
    "centre_lost": {"centre"},
    "gradients_lost": {"accumulate"},
    "all_of_it": {"noise", "dice", "grains", "python", "numpy", "bank", "hidden", "calls", "scale", "centre"},
    "teacher": {"average"},
}
FORGOTTEN: dict[str, tuple[str, ...]] = {
    "private_torch_generator_lost": ("noise",),
    "private_random_lost": ("dice",),
    "private_numpy_generator_lost": ("grains",),
    "python_rng_lost": ("rng",),
    "numpy_rng_lost": ("rng",),
    "torch_rng_lost": ("rng",),
    "memory_bank_lost": ("bank",),
    "hidden_state_lost": ("hidden",),
    "call_counter_lost": ("calls",),
    "unsaved_buffer_lost": ("scale",),
    "average_never_saved_and_used": ("ema",),
    "average_never_saved": ("ema",),
    "centre_lost": ("centre",),
    "optimizer_never_saved": ("optimizer",),
    "scheduler_never_saved": ("scheduler",),
    "scaler_never_saved": ("scaler",),
    "weights_never_saved": ("model",),
}


def unseeded_weights(spool: Path) -> None:
    """Made before any seed is set."""
    torch.seed()
    weights = nn.Linear(2, 1).weight.detach()
    torch.manual_seed(0)
    state: dict[str, Any] = {"weights": weights, "step": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    ckpt.restore(state)
    while True:
        state["step"] += 1
        weights += 0.1
        tierd.observe(state["step"], [state["step"]], weights.sum())
        if state["step"] % EVERY == 0:
            ckpt.save(state["step"], state)


def timed(spool: Path) -> None:
    """A clock and a process's number in the state, a counter and a mean that only logging uses, observed early."""
    torch.manual_seed(0)
    weights, since = torch.zeros(2), [0]
    state: dict[str, Any] = {"weights": weights, "step": 0, "timing": {"at": time.time(), "pid": os.getpid()}}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    found = ckpt.restore(state)
    start = 0 if found is None else found.step
    for step in range(start + 1, 1000):
        since[0] += 1
        loss = (weights - 1).square().sum()
        tierd.observe(step, [step, start * 0 + step], loss)
        weights += 0.1 * torch.randn(2, generator=torch.Generator().manual_seed(step))
        fresh = {"weights": weights, "step": step, "timing": {"at": time.time(), "pid": os.getpid()}}
        if step % EVERY == 0:
            ckpt.save(step, fresh)


def loaded(spool: Path) -> None:
    """torch's own loader, fast-forwarded by the number of batches, and its own generator."""
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    state: dict[str, Any] = {"step": 0, "epoch": 0, "batch": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    ckpt.restore(state)
    while True:
        generator = torch.Generator().manual_seed(state["epoch"])
        for number, batch in enumerate(DataLoader(range(40), 4, shuffle=True, generator=generator)):
            if number < state["batch"]:
                continue
            state["step"] += 1
            state["batch"] = number + 1
            tierd.observe(state["step"], batch, float(batch.sum()))
            if state["step"] % EVERY == 0:
                ckpt.save(state["step"], state)
        state["epoch"], state["batch"] = state["epoch"] + 1, 0


def stateful_loader(spool: Path) -> None:
    """torchdata's loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(0)
    generator = torch.Generator()
    loader = StatefulDataLoader(range(40), batch_size=4, shuffle=True, generator=generator)
    state: dict[str, Any] = {"data": loader, "rng": tierd.RngState(), "step": 0, "epoch": 0}
    ckpt = tierd.Checkpointer(spool, "bed", to=[], rank=0, world_size=1)
    ckpt.restore(state)
    while True:
        generator.manual_seed(state["epoch"])
        for batch in loader:
            state["step"] += 1
            tierd.observe(state["step"], batch, float(batch.sum()))
            if state["step"] % EVERY == 0:
                ckpt.save(state["step"], state)
        state["epoch"] += 1


def _data(make: Callable[[str], Any], *wrongs: str) -> dict[str, Callable[[Path], None]]:
    return {wrong: partial(reads, make, wrong) for wrong in wrongs}


planted = Named(
    _data(sampled, "position_lost", "position_ahead", "position_stale", "position_off_by_one", "epoch_one_too_high",
          "seed_lost", "order_from_global_rng", "step_one_too_high", "step_one_too_low")
    | {"set_epoch_after_the_load": partial(reads, sampled, "-", after=epoch_again)}
    | {"epoch_lost": partial(reads, lambda wrong: pipes.Sampler(wrong, size=16), "epoch_lost")}
    | _data(buffered, "buffer_lost", "buffer_halved", "buffer_generator_lost")
    | {"position_under_a_buffer_lost": partial(reads, buffered, "position_lost")}
    | _data(packed, "rest_lost", "rest_from_its_start")
    | _data(queued, "queue_lost", "source_of_the_queue_lost")
    | {f"deep_{one}": partial(reads, stacked, one) for one in ("buffer_lost", "rest_lost", "queue_lost", "seed_lost")}
    | _data(filtered, "lately_lost", "threshold_lost", "quota_lost")
    | _data(pipes.Curriculum, "level_lost", "level_off_by_one", "drawn_off_by_a_batch")
    | _data(pipes.Mixture, "second_source_lost", "mixing_generator_lost", "mixing_weight_lost")
    | _data(pipes.Workers, "workers_swapped", "one_worker_lost", "one_worker_ahead", "turn_lost")
    | _data(streamed, "stream_sample_lost", "stream_buffer_unsaved")
    | _data(pipes.Hashed, "hash_order")
    | _data(pipes.ByClock, "seeded_by_the_clock")
    | {wrong: partial(ranked, wrong) for wrong in ("ranks_swapped", "all_from_rank_0", "world_size_changed")}
    | {
        wrong: partial(learns, wrong)
        for wrong in (
            *(name for name in FORGOTTEN),
            "weights_reset", "weights_pretrained_again", "one_bias_lost", "batchnorm_reset", "average_begun_anew",
            "optimizer_made_after", "moments_cleared", "learning_rate_set_again", "scheduler_made_after",
            "scheduler_one_ahead", "scaler_made_after", "reseeded_after_restore", "best_reset", "history_reset",
            "model_left_in_eval", "weights_rounded", "gradients_lost", "save_before_the_step",
            "save_at_the_start_of_a_step",
        )
    }
    | {"unseeded_weights": unseeded_weights}
    | second.planted
    | third.planted
)  # fmt: skip

right = Named(
    {
        name: partial(reads, make, "")
        for name, make in {
            "sampler": sampled, "short_epochs": lambda wrong: pipes.Sampler(wrong, size=16), "buffer": buffered,
            "packing": packed, "queue": queued, "stack": stacked, "filter": filtered, "curriculum": pipes.Curriculum,
            "mixture": pipes.Mixture, "workers": pipes.Workers, "stream": streamed, "sorted_names": pipes.Hashed,
        }.items()
    }
    | {name: partial(learns, name) for name in ("model", "torch_dropout", "all_of_it", "teacher")}
    | {"ranks": partial(ranked, ""), "timed": timed, "loader": loaded, "stateful_loader": stateful_loader}
    | second.right
    | third.right
)  # fmt: skip
