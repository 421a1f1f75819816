"""A `ZeroRedundancyOptimizer` by the class of docs/howto/sharded.md: training continues as if it had not ended."""

from __future__ import annotations

import hashlib

import pytest
from support import dcp_ranks
from support.snippets import ROOT, blocks


def train(rank: int, spool: str, last: int, has_adapter: bool) -> tuple[str, float]:
    """Go on until step `last`, with a save at the end; what the model and the learning rate are then."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    names: dict = {}
    (code,) = (block for block in blocks(ROOT / "docs" / "howto" / "sharded.md") if "class LocalPart" in block)
    exec(code, names)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    saved = names["LocalPart"](optimizer) if has_adapter else optimizer
    state = {"model": model, "optimizer": saved, "scheduler": scheduler, "step": 0}
    with dcp_ranks.checkpointer(spool, to=[]) as checkpointer:
        checkpointer.restore(state)
        while state["step"] < last:
            state["step"] += 1
            draw = torch.Generator().manual_seed(10 * state["step"] + rank)
            loss = model(torch.randn(8, 64, generator=draw)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        checkpointer.save(last, state).wait()
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    return hashlib.sha256(weights).hexdigest(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("ended_at", [3, 4])  # after a step that changed the learning rate, and before one
def test_training_continues_exactly(tmp_path, ended_at):
    whole = dcp_ranks.run(2, tmp_path / "first", train, str(tmp_path / "whole"), 6, True)
    dcp_ranks.run(2, tmp_path / "second", train, str(tmp_path / "ended"), ended_at, True)
    assert dcp_ranks.run(2, tmp_path / "third", train, str(tmp_path / "ended"), 6, True) == whole
    assert isinstance(whole[0], tuple) and whole[0] == whole[1]


def test_refusal_names_the_page(tmp_path):
    for refusal in dcp_ranks.run(2, tmp_path / "meeting", train, str(tmp_path / "spool"), 1, False):
        assert "docs/howto/sharded.md#zeroredundancyoptimizer" in str(refusal)
