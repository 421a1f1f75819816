"""Loops of frameworks with a mistake each, of which `tierd check-resume` has to name the cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from loaders.parts import EVERY, begin, trainer_arguments
from torch.utils.data import DataLoader, Sampler

import tierd


class Order(Sampler[int]):
    """A permutation by the epoch. Nothing saves how far it is."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()


def own_loop(spool: Path) -> None:
    from loaders.loops_torch import BATCH, SAMPLES, Ids
    from loaders.parts import loop

    sampler = Order(SAMPLES)
    loader = DataLoader(Ids(), BATCH, sampler=sampler, generator=torch.Generator())

    def batches(epoch: int) -> DataLoader[int]:
        sampler.set_epoch(epoch)
        return loader

    loop(spool, None, batches)


def lightning_loop(spool: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from loaders.loops_lightning import Module, quiet_trainer
    from loaders.loops_torch import BATCH, SAMPLES, Ids

    from tierd.adapters.lightning import TierdCheckpointIO

    loader = DataLoader(Ids(), BATCH, sampler=Order(SAMPLES), generator=torch.Generator())
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        io = TierdCheckpointIO(ckpt)
        saving = ModelCheckpoint(dirpath=spool.parent / "lightning", every_n_train_steps=EVERY, save_top_k=-1)
        quiet_trainer(io, spool.parent, saving, max_epochs=-1).fit(Module(), loader, ckpt_path=io.latest())


def _trainer(spool: Path, net: Any, *callbacks: Any, **options: Any) -> None:
    from loaders.loops_transformers import BATCH, Observe, Rows
    from transformers import Trainer

    from tierd.adapters.transformers import TierdCallback

    args = trainer_arguments(
        spool.parent,
        per_device_train_batch_size=BATCH,
        num_train_epochs=100,
        logging_strategy="no",
        **options,
    )
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, every_steps=EVERY)
        trainer = Trainer(model=net, args=args, train_dataset=Rows(), callbacks=[*callbacks, Observe(), saving])
        trainer.train(resume_from_checkpoint=saving.resume(trainer))


def trainer_that_skips_nothing(spool: Path) -> None:
    from loaders.loops_transformers import Net

    _trainer(spool, Net(), ignore_data_skip=True)


def trainer_that_freezes_again(spool: Path) -> None:
    """The first layer is trained from step 3 on, and frozen in each launch."""
    from loaders.loops_transformers import Net
    from transformers import TrainerCallback

    class Unfreeze(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if state.global_step == 3:
                net.net[0].requires_grad_(True)

    begin()
    net = Net()
    net.net[0].requires_grad_(False)
    _trainer(spool, net, Unfreeze(), weight_decay=0.1)
