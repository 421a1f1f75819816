"""A rank's state of DTensors on a mesh of two dimensions (HSDP), for launches of changing numbers of ranks."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from support.state_digests import state_digest
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree

import tierd.dcp

COMMON = ("model", "optimizer", "tables", "average", "epoch", "empty")  # entries that any number of ranks can load


class ShardedTraining:
    """A model under HSDP with its optimizer, DTensors in other placements, and tensors of the rank's own.

    Gradients are made of the parameters and the step, so that no forward needs the network.

    Args:
        shards: into how many a parameter is divided; the mesh's other dimension replicates it.
    """

    replicated = ("average", "empty")

    def __init__(self, seed: int, number: int, rank: int, shards: int) -> None:
        mesh = init_device_mesh(
            "cpu", (distributed.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard")
        )
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.rank, self.step = rank, 0
        model = nn.Sequential(nn.Linear(64, 150), nn.Linear(150, 70), nn.LayerNorm(70))
        fully_shard(model, mesh=mesh)
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01)
        origin = 7919 * number + rank
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": self.optimizer,
            "tables": {
                "rows": distribute_tensor(torch.randn(7, 900, generator=generator), mesh, (Replicate(), Shard(0))),
                "columns": distribute_tensor(torch.randn(60, 301, generator=generator), mesh, (Shard(1), Replicate())),
                "both": distribute_tensor(torch.randn(90, 130, generator=generator), mesh, (Shard(0), Shard(1))),
                "whole": distribute_tensor(torch.randn(5000, generator=generator), mesh, (Replicate(), Replicate())),
            },
            "average": {f"number {number}": torch.full((1500 + number,), float(number)) for number in range(5)},
            "own": torch.full((2000,), float(origin)),
            "noise": torch.Generator().manual_seed(origin),
            "apart": {"rank": rank, "row": torch.full((40,), origin), "launch": number},
            "epoch": 0,
            "empty": {"names": ["a", "b"]},
        }

    def train(self) -> None:
        self.step += 1
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() * 0.1 + self.step
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.randn(4, generator=self.state["noise"])
        for tensor in (*self.state["tables"].values(), *self.state["average"].values()):
            tensor.mul_(0.9).add_(self.step)
        self.state["own"].add_(self.rank + 1)
        self.state["epoch"] = self.step

    def digests(self) -> dict[str, str]:
        """Of what is the same on all ranks, DTensors put together; and of this rank's own entries. Every rank calls
        this."""
        entries = [self.model.state_dict(), self.optimizer.state_dict(), *(self.state[name] for name in COMMON[2:])]
        common = _pytree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, entries)
        own = [self.state["own"], self.state["noise"].get_state(), self.state["apart"]]
        return {"common": state_digest(common), "own": state_digest(own), "buffers": ""}

    def load_common(self, checkpointer: tierd.Checkpointer, **which: Any) -> Any:
        """Load the entries of `COMMON` onto this mesh, from any other one."""
        entries: MutableMapping[str, Any] = {name: self.state[name] for name in COMMON}
        restored = tierd.dcp.load(entries, checkpointer, **which)
        self.state |= entries
        return restored
