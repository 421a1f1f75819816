"""A Lightning loop, saved by its own ModelCheckpoint through tierd."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loaders.loops_torch import BATCH, SAMPLES, Ids, Order
from loaders.parts import EVERY, begin, loss_of
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
from tierd.adapters.lightning import TierdCheckpointIO


def quiet_trainer(io: TierdCheckpointIO, home: Path, *callbacks: Any, **options: Any) -> lightning.Trainer:
    """A trainer that saves through `io`, writes only below `home`, and prints nothing."""
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=home,
        plugins=[io],
        callbacks=[*callbacks, io.callback],
        **options,
    )


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = begin()

    def training_step(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        return loss_of(self.net, ids)

    def on_train_batch_end(self, outputs: Any, ids: torch.Tensor, number: int) -> None:
        tierd.observe(self.trainer.global_step - 1, ids.tolist(), outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(spool: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sampler = Order(SAMPLES, 5)
    loader = StatefulDataLoader(Ids(), BATCH, sampler=sampler, generator=torch.Generator(), num_workers=2)
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        io = TierdCheckpointIO(ckpt)
        saving = ModelCheckpoint(dirpath=spool.parent / "lightning", every_n_train_steps=EVERY, save_top_k=-1)
        trainer = quiet_trainer(io, spool.parent, saving, max_epochs=-1)
        trainer.fit(Module(), loader, ckpt_path=io.latest())
