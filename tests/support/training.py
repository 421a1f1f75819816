"""A small training, and ways to compare what it holds to the last bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from support.state_files import copy_into, flatten, plan_layout
from torch import nn

import tierd
from tierd.spool.spool import Spool
from tierd.state.state_loading import unflatten


def fresh(seed: int = 0) -> dict[str, Any]:
    """A state as a trainer has it: model with buffers, AdamW, scheduler, generators, counters."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        "rng": tierd.RngState(),
        "epoch": 0,
        "seen": {"samples": [], "best": float("inf"), "name": "ä"},
    }


def train(state: dict[str, Any], steps: int = 1) -> list[float]:
    """Some steps that depend on everything in the state; their losses."""
    losses = []
    for _ in range(steps):
        loss = (state["model"](torch.randn(16, 8)) * random.random() * np.random.rand()).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["epoch"] += 1
        state["seen"]["samples"].append(random.randrange(1000))
        losses.append(loss.item())
    return losses


def tensors(step: int) -> dict[str, torch.Tensor]:
    """A state of plain tensors whose every value tells the step."""
    return {
        "a": torch.full((3000,), float(step)),
        "b": torch.arange(step, step + 500),
        "c": torch.full((7, 11), step % 2 == 0),
        "d": torch.full((100,), float(step)).bfloat16(),
    }


def same(state: dict[str, torch.Tensor], step: int) -> bool:
    """Whether a state is, bit for bit, the one of `step`."""
    expected = tensors(step)
    return state.keys() == expected.keys() and all(
        state[name].dtype == expected[name].dtype and torch.equal(state[name], expected[name]) for name in expected
    )


def restored(spool: Spool, step: int | None = None) -> tuple[tierd.Restored, dict]:
    """The checkpoint that a launch without a daemon resumes from, and what it loaded."""
    state = tensors(10**6)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        return checkpointer.restore(state, step=step), state


def stored(state: dict) -> tuple[bytes, bytearray]:
    """A state as a part holds it: its tree and its tensor file."""
    flat = flatten(state)
    layout = plan_layout(flat.tensors)
    buffer = bytearray(layout.size)
    copy_into(layout, flat.tensors, buffer)
    return flat.tree, buffer


def through(state: dict) -> dict:
    """What comes back of a state."""
    return unflatten(*stored(state))
