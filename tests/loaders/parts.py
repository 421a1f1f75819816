"""What the loops of the matrix share: a model whose loss tells when its weights, its dropout or its samples are others.

A loop is `train(spool)`: it restores at its start, calls `tierd.observe` once a step and goes on until it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierd

EVERY = 3  # steps from a save to the next


def begin() -> nn.Module:
    """The same few weights in each process, and generators that are not where they were in the last one."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def features(ids: torch.Tensor) -> torch.Tensor:
    """Of samples, from their ids: (batch,) -> (batch, 4)."""
    return torch.sin(ids.double()[:, None] * torch.tensor([0.3, 0.7, 1.1, 1.9])).float()


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean squared error of what the model makes of the samples."""
    return nn.functional.mse_loss(model(features(ids))[:, 0], torch.cos(ids.float()))


def trainer_arguments(home: Path, **options: Any) -> Any:
    """Arguments of a `Trainer` on the CPU that prints nothing and saves nothing by itself; `options` add to them."""
    from transformers import TrainingArguments

    quiet = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(str(home / "trainer"), **{**quiet, "remove_unused_columns": False, **options})


def loop(
    spool: Path,
    data: Any,
    batches: Callable[[int], Iterable[torch.Tensor]],
    after: Callable[[torch.Tensor], None] | None = None,
    at_the_end: bool = False,
) -> None:
    """Train epoch after epoch on `batches(epoch)`, tensors of sample ids, with `data` in the state.

    `at_the_end`: save after each epoch's loop, and not within it.

    A sample is told with its epoch: one that is skipped must not be made up for by the next epoch's.
    """
    model = begin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data, "rng": tierd.RngState()}
    state["epoch"] = 0
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        found = ckpt.restore(state)
        step = found.step + 1 if found else 0
        while True:
            for ids in batches(state["epoch"]):
                loss = loss_of(model, ids)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                if after:
                    after(ids)
                tierd.observe(step, [f"{state['epoch']}:{one}" for one in ids.tolist()], loss.item())
                if step % EVERY == EVERY - 1 and not at_the_end:
                    ckpt.save(step, state)
                step += 1
            state["epoch"] += 1
            if at_the_end:
                ckpt.save(step - 1, state)
