"""A loop that saves and ends when Slurm asks for it: `python train.py SPOOL`, started by train.sbatch.

All ranks have to save at the same step, and the signal reaches each at another moment. So they agree at every step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

import tierd

STEPS = int(os.environ.get("STEPS", "1000"))
EVERY = 100


def main(spool: str) -> None:
    """Train until the end, or until all ranks have seen that the time is over."""
    over = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: over.set())
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world)

    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with tierd.Checkpointer(spool, run="slurm-example") as ckpt:
        state = {"model": model, "optimizer": optimizer}
        found = ckpt.restore(state)
        first = found.step + 1 if found else 1
        for step in range(first, STEPS + 1):
            loss = model(torch.full((4, 16), float(step))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = torch.tensor(float(over.is_set() or step == STEPS))
            dist.all_reduce(last, dist.ReduceOp.MAX)
            if last or step % EVERY == 0:
                ckpt.save(step, state)
            if rank == 0:
                print(f"step {step} from {first}", flush=True)
            if last:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
