"""torchft over tierd: one replica group saves what all groups hold alike, and any group may die in its save.

    torchft_lighthouse --min_replicas 1 &
    export REPLICA_GROUP_ID=0 TORCHFT_LIGHTHOUSE=http://node:29510
    torchrun --nproc-per-node 1 examples/torchft_ddp.py /nvme/tierd 1000

Invariant: a checkpoint is saved only at a step that the groups have committed, by the one group of the quorum whose
participating rank is 0.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import tierd


def train(spool: str, steps: int, every: int = 100) -> None:
    """Train one replica group."""
    group = os.environ["REPLICA_GROUP_ID"]
    net = torch.nn.Linear(8, 1)
    adamw = torch.optim.AdamW(net.parameters(), lr=0.01)
    shared: dict[str, Any] = {"model": net, "optimizer": adamw}

    def load(states: dict[str, Any]) -> None:  # torchft recovers this group from another one
        for name, part in shared.items():
            part.load_state_dict(states[name])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {name: part.state_dict() for name, part in shared.items()},
        min_replica_size=1,
        replica_id=f"group{group}",
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, adamw)

    # A run for each group: its newest checkpoint may be older than another group's, and then torchft recovers it.
    ckpt = tierd.Checkpointer(spool, run=f"llama-{group}", to=[])
    state: dict[str, Any] = {**shared, "torchft": manager}
    ckpt.restore(state)
    while manager.current_step() < steps:
        before = manager.current_step()
        optimizer.zero_grad()  # begins a quorum
        loss = model(torch.full((4, 8), float(before + 1)).sin()).square().mean()
        loss.backward()
        optimizer.step()  # leaves the parameters as they are if the groups do not commit
        step = manager.current_step()
        if step > before and step % every == 0 and manager.participating_rank() == 0:
            ckpt.save(step, state)
    ckpt.close()
    manager.shutdown()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
