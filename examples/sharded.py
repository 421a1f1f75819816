"""A model sharded by FSDP2, saved and resumed as it is, on any number of ranks:

torchrun --nproc-per-node 2 examples/sharded.py SPOOL [STEPS]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tierd
import tierd.dcp


def net() -> nn.Module:
    """A small model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def train(spool: str, steps: int, device: str = "cpu") -> float:
    """Learn to turn numbers around, from wherever the last launch came to. Returns the last loss."""
    rank, world = distributed.get_rank(), distributed.get_world_size()

    # -- the docs show from here
    model = net()
    fully_shard(model, mesh=init_device_mesh(device, (world,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0, "rng": tierd.RngState()}
    ckpt = tierd.Checkpointer(spool, run="sharded", to=[])
    try:
        ckpt.restore(state)  # on as many ranks and the same mesh: everything, into the live shards
    except tierd.StateMismatch:  # on another number of ranks, or another mesh: what is no rank's own
        whole = {name: state[name] for name in ("model", "optimizer", "step")}
        tierd.dcp.load(whole, ckpt)
        state |= whole
    ckpt.attach(optimizer)
    # -- to here

    print(f"rank {rank} of {world} begins behind step {state['step']}", flush=True)
    loss = torch.zeros(())
    while state["step"] < steps:
        state["step"] += 1
        numbers = torch.randn(16, 32, generator=torch.Generator().manual_seed(state["step"] * world + rank))
        loss = (model(numbers) - numbers.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state["step"] % 5 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
    return loss.item()


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
    distributed.destroy_process_group()
