"""A loop of Hugging Face's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from loaders.parts import EVERY, begin, loss_of, trainer_arguments
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

import tierd
from tierd.adapters.transformers import TierdCallback

SAMPLES, BATCH = 48, 4


class Rows(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"ids": index}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = begin()
        self.seen: tuple[list[int], float] = ([], 0.0)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = loss_of(self.net, ids)
        self.seen = (ids.tolist(), loss.item())
        return {"loss": loss}


class Observe(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        tierd.observe(state.global_step - 1, *parts["model"].seen)


def train(spool: Path) -> None:
    args = trainer_arguments(
        spool.parent,
        per_device_train_batch_size=BATCH,
        num_train_epochs=100,
        learning_rate=0.01,
        logging_strategy="no",
        seed=3,
    )
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, every_steps=EVERY)
        trainer = Trainer(model=Net(), args=args, train_dataset=Rows(), callbacks=[Observe(), saving])
        trainer.train(resume_from_checkpoint=saving.resume(trainer))
