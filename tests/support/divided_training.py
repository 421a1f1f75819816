"""A rank's state of replicated tensors and tensors of its own, for launches of changing numbers of ranks."""

from __future__ import annotations

from typing import Any

import torch
from support.state_digests import state_digest
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """Parameters of all sizes: some are divided, some too small for that; one is frozen, two are one tensor."""

    def __init__(self, frozen_elements: int) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 96)
        self.deep = nn.Linear(96, 64, bias=False)
        self.tied = nn.Linear(64, 96, bias=False)
        self.tied.weight = self.wide.weight
        self.still = nn.Parameter(torch.arange(float(frozen_elements)), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.rough = nn.Parameter(torch.ones(3001, dtype=torch.bfloat16), requires_grad=False)
        self.turned = nn.Parameter(torch.arange(2400.0).view(40, 60).t(), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1500))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.deep((self.wide(inputs) + self.tied(inputs)).tanh())


class Training:
    """A rank's state: the same model on all ranks, and tensors of the rank's own."""

    def __init__(self, seed: int, number: int, rank: int, frozen_elements: int, *, is_wrapped: bool) -> None:
        torch.manual_seed(seed)
        self.rank = rank
        self.model = Model(frozen_elements)
        with torch.no_grad():
            self.model.seen.fill_(1000.0 * number + rank)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.wrapped = DistributedDataParallel(self.model, broadcast_buffers=False) if is_wrapped else None
        origin = 7919 * number + rank
        self.state: dict[str, Any] = {
            "model": self.wrapped or self.model,
            "optimizer": self.optimizer,
            "average": {name: one.detach().clone() for name, one in self.model.named_parameters()},
            "own": torch.full((2000,), float(origin)),
            "noise": torch.Generator().manual_seed(origin),
            "apart": {"rank": rank, "row": torch.full((40,), origin), "launch": number},
            "epoch": 0,
            "empty": {"names": ["a", "b"]},
        }
        self.replicated = ("average", "empty") if is_wrapped else ("model", "optimizer", "average", "empty")
        self.step = 0

    def train(self) -> None:
        inputs = torch.randn(4, 64, generator=self.state["noise"])
        loss = (self.wrapped or self.model)(inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        if self.wrapped is None:
            for one in self.model.parameters():
                if one.grad is not None:
                    distributed.all_reduce(one.grad)
                    one.grad /= distributed.get_world_size()
        self.optimizer.step()
        self.step += 1
        with torch.no_grad():
            for name, one in self.model.named_parameters():
                self.state["average"][name].lerp_(one, 0.1 if one.is_floating_point() else 1)
            self.state["own"].add_(self.rank + 1)
            self.model.seen.add_(self.rank + 1)
            self.model.rough.add_(1)
        self.state["epoch"] = self.step

    def digests(self) -> dict[str, str]:
        """Of what is the same on all ranks; of this rank's own entries; and of the model's buffers."""
        common = [self.optimizer.state_dict(), self.state["average"], self.state["epoch"], self.state["empty"]]
        common.append(dict(self.model.named_parameters(remove_duplicate=False)))
        own = [self.state["own"], self.state["noise"].get_state(), self.state["apart"]]
        return {"common": state_digest(common), "own": state_digest(own), "buffers": state_digest(self.model.seen)}
