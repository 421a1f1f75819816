"""The tutorial's loop, whole: `tierd check-resume examples.quickstart:train --steps 40 --kill-at 8,14+save,33`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd

STEPS = 1000


def loss_of(model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
    """How badly the model tells even numbers from odd ones."""
    bits = (numbers.unsqueeze(1) >> torch.arange(10) & 1).float()
    return nn.functional.binary_cross_entropy_with_logits(model(bits).squeeze(1), (numbers % 2).float())


def train(spool: Path) -> None:
    """Learn to tell even numbers from odd ones, from wherever the last launch came to."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler(enabled=torch.cuda.is_available())
    loader = StatefulDataLoader(
        range(160), batch_size=16, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(0)
    )

    # -- the docs show from here
    # spool: a directory on local disk; to=["s3://bucket/checkpoints"] starts the daemon that copies there
    ckpt = tierd.Checkpointer(spool, run="quickstart", to=[])
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "data": loader,  # torchdata.StatefulDataLoader, or anything with state_dict()/load_state_dict()
        "rng": tierd.RngState(),  # Python, NumPy, torch CPU and every CUDA device
        "step": 0,
        "epoch": 0,
        "losses": [],
        "best": {"loss": float("inf"), "step": 0},
    }
    ckpt.restore(state)  # the newest verified checkpoint, wherever it lies; None on a fresh start
    while state["step"] < STEPS:
        for numbers in loader:
            state["step"] += 1
            loss = loss_of(model, numbers)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            state["losses"].append(loss.item())
            if loss.item() < state["best"]["loss"]:
                state["best"] = {"loss": loss.item(), "step": state["step"]}
            tierd.observe(state["step"], numbers, loss)  # does nothing; `tierd check-resume` listens to it
            if state["step"] % 5 == 0:
                ckpt.save(state["step"], state, metrics={"loss": loss.item()})  # returns when the snapshot is taken
        state["epoch"] += 1
    ckpt.close()  # waits until the last save is on local disk; the daemon finishes by itself
