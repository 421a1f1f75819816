"""A loop over Accelerate's `save_state`, killed at moments of its training."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from loaders.loops_torch import BATCH, SAMPLES, Ids
from loaders.parts import begin, loss_of
from support.killed import Moment
from torch.utils.data import DataLoader

import tierd
from tierd.adapters.accelerate import TierdStates

EVERY, EPOCHS = 5, 3
STEPS = SAMPLES // BATCH


def _train(home: Path, moment: Moment, seedable: bool, generator: torch.Generator | None) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    model = begin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader = DataLoader(Ids(), BATCH, shuffle=True, generator=generator)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with tierd.Checkpointer(home / "spool", "run", rank=0, world_size=1, to=[]) as ckpt:
        states = TierdStates(accelerator, ckpt)
        found = states.load()
        step = found.step if found else 0
        moment.record("resumed", step)
        for epoch in range(step // STEPS, EPOCHS):
            loader.set_epoch(epoch)
            skipped = step % STEPS
            for ids in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
                optimizer.zero_grad()
                loss = loss_of(model, ids)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                step += 1
                rate = optimizer.param_groups[0]["lr"]
                moment.record(f"step {step}", [ids.tolist(), loss.item(), rate])
                if step % EVERY == 0:
                    states.save(step)
                moment.reached("step", step, step // EVERY * EVERY)


def seedable(home: Path, moment: Moment) -> None:
    _train(home, moment, True, torch.Generator())


def unseeded(home: Path, moment: Moment) -> None:
    _train(home, moment, False, torch.Generator())


def without_generator(home: Path, moment: Moment) -> None:
    _train(home, moment, True, None)
