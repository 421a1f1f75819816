"""A small Lightning training, launched from its beginning or from a step that an earlier launch saved.

A launch is a `fit` with a `Checkpointer` and objects of its own, so one that resumes is as one after a kill.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from loaders.loops_lightning import quiet_trainer
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
from tierd.adapters.lightning import TierdCheckpointIO

SAMPLES, BATCH = 16, 4  # four batches are an epoch


class Module(lightning.LightningModule):
    """Records the learning rate and the samples of each step. Its validation never improves, so a plateau always cuts.

    Args:
        frequency: at which epochs the `ReduceLROnPlateau` steps; 0 if there is none.
    """

    def __init__(self, frequency: int = 0) -> None:
        super().__init__()
        self.weight, self.frequency = torch.nn.Parameter(torch.zeros(1)), frequency
        self.rates: dict[int, float] = {}
        self.samples: dict[int, list[float]] = {}

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.rates[self.global_step] = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.samples[self.global_step] = batch[:, 0].tolist()
        return (self.weight - batch).square().mean()

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        if not self.frequency:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss", "frequency": self.frequency}]


def launch(
    home: Path,
    module: Module,
    resume: int | None,
    *callbacks: Any,
    stateful: bool = False,
    validates: bool = True,
    **options: Any,
) -> TierdCheckpointIO:
    """Train from the beginning, or from a step that an earlier launch saved."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = torch.arange(float(SAMPLES))[:, None] / SAMPLES
    kind = StatefulDataLoader if stateful else DataLoader
    order = DistributedSampler(data, num_replicas=1, rank=0, seed=3)  # another one in each epoch
    loader = kind(data, BATCH, sampler=order, generator=torch.Generator())
    held_out = [kind(data, BATCH, generator=torch.Generator())] if validates else []
    with tierd.Checkpointer(home / "spool", "run", to=[]) as ckpt:
        io = TierdCheckpointIO(ckpt)
        trainer = quiet_trainer(io, home, *callbacks, **options)
        trainer.fit(module, loader, *held_out, ckpt_path=None if resume is None else f"tierd:{resume}")
    return io
