"""A Lightning training with schedulers and callbacks that have state, killed at moments of its training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from loaders.loops_lightning import quiet_trainer
from loaders.loops_torch import BATCH, SAMPLES, Ids, Order
from loaders.parts import begin, loss_of
from support.killed import Moment
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
from tierd.adapters.lightning import TierdCheckpointIO

EVERY = 3


class Module(lightning.LightningModule):
    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.net, self.schedule = begin(), schedule

    def training_step(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        return loss_of(self.net, ids)

    def validation_step(self, ids: torch.Tensor, number: int) -> None:
        self.log("val_loss", loss_of(self.net, ids))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=0.3)
            return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}]


class Watch(lightning.Callback):
    """Records each step and each validation, and kills."""

    def __init__(self, moment: Moment, stopping: EarlyStopping) -> None:
        self.moment, self.stopping = moment, stopping

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.moment.record("resumed", trainer.global_step)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.moment.reached("step", trainer.global_step, trainer.global_step // EVERY * EVERY)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, ids: torch.Tensor, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.moment.record(f"step {trainer.global_step}", [ids.tolist(), outputs["loss"].item(), rate])

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.moment.reached("evaluation", trainer.global_step, (trainer.global_step - 1) // EVERY * EVERY)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            measured = trainer.callback_metrics["val_loss"].item()
            self.moment.record(f"evaluation {trainer.global_step}", [measured])

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.moment.reached("epoch", trainer.global_step, trainer.global_step // EVERY * EVERY)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        weights = [value.sum().item() for value in module.parameters()]
        self.moment.record("end", [trainer.global_step, trainer.current_epoch, self.stopping.wait_count, weights])


def _fit(home: Path, moment: Moment, schedule: str, **options: Any) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = StatefulDataLoader(Ids(), BATCH, sampler=Order(SAMPLES, 5), generator=torch.Generator())
    held_out = DataLoader(torch.arange(200, 216), 8)
    stopping = EarlyStopping("val_loss", patience=9, min_delta=0.3)
    often = ModelCheckpoint(home / "often", every_n_train_steps=EVERY, save_top_k=-1)
    best = ModelCheckpoint(home / "best", monitor="val_loss", filename="{step}", save_top_k=2)
    with tierd.Checkpointer(home / "spool", "run", to=[]) as ckpt:
        io = TierdCheckpointIO(ckpt)
        trainer = quiet_trainer(
            io, home, Watch(moment, stopping), stopping, often, best, **({"max_epochs": 4} | options)
        )
        trainer.fit(Module(schedule), loader, held_out, ckpt_path=io.latest())
        moment.record("best", best.best_model_score.item())


def within_epochs(home: Path, moment: Moment) -> None:
    """An epoch has 12 steps; saves come every 3, validations every 4."""
    _fit(home, moment, "steps", val_check_interval=4)


def at_epochs(home: Path, moment: Moment) -> None:
    """Validations come at an epoch's end."""
    _fit(home, moment, "steps")


def on_plateau(home: Path, moment: Moment) -> None:
    """A scheduler that steps by the validation at an epoch's end."""
    _fit(home, moment, "plateau")


def by_steps(home: Path, moment: Moment) -> None:
    """Training ends after a number of steps, not of epochs, which Lightning restarts in another way."""
    _fit(home, moment, "steps", max_epochs=-1, max_steps=40)
