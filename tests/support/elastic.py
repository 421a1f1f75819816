"""A training whose number of ranks changes while it runs: replicated state, saved and resharded through DCP.

Every rank computes the same, so that the end hangs on no number of ranks. `log` has a line for each launch of a rank:
`RANK resumed STEP ATTEMPT WORLD`; and `RANK acked STEP ATTEMPT` once its part is durable. Each agent's ranks have the
spool of its node; the tier is one.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from support.launched import timed
from support.srun import NODE
from support.state_digests import state_digest
from support.trainer import note
from torch import distributed

import tierd
import tierd.dcp

EVERY, PACE_S = 3, 0.3


def fresh() -> dict[str, torch.Tensor]:
    weights = torch.arange(64, dtype=torch.float32).view(8, 8).cos()
    return {"weights": weights, "momentum": torch.zeros(8, 8), "step": torch.zeros((), dtype=torch.int64)}


def advance(state: dict[str, torch.Tensor]) -> None:
    noise = torch.Generator().manual_seed(int(state["step"]))
    weights = state["weights"].clone().requires_grad_()
    loss = (torch.randn(4, 8, generator=noise) @ weights).tanh().square().mean()
    (gradient,) = torch.autograd.grad(loss, weights)
    state["momentum"].mul_(0.9).add_(gradient)
    state["weights"].sub_(0.1 * state["momentum"])
    state["step"] += 1


def digest(state: dict[str, torch.Tensor]) -> str:
    return state_digest([state[name] for name in sorted(state)])


def main(home: Path, steps: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = distributed.get_rank(), distributed.get_world_size()
    state = fresh()
    with timed(home, rank, "Checkpointer"):
        checkpointer = tierd.Checkpointer(home / f"spool-{os.environ[NODE]}", "job", to=[f"file://{home / 'tier'}"])
    with timed(home, rank, "load"):
        found = tierd.dcp.load(state, checkpointer)
    note(str(home / "log"), f"{rank} resumed {found.step if found else 0} {checkpointer.attempt} {world}")
    assert int(state["step"]) == (found.step if found else 0)
    while int(state["step"]) < steps:
        advance(state)
        distributed.all_reduce(torch.zeros(1))  # ranks go on together, and a dead one is noticed
        step = int(state["step"])
        if step % EVERY == 0:
            with timed(home, rank, "save"):
                dcp.save(state, storage_writer=tierd.dcp.StorageWriter(checkpointer, step))
            note(str(home / "log"), f"{rank} acked {step} {checkpointer.attempt}")
        time.sleep(PACE_S)
    checkpointer.close()
    distributed.barrier()
    if rank == 0:
        (home / "final").write_text(digest(state))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
