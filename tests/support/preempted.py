"""A small training on two ranks over gloo that is told that it ends: which step each rank saved, and what it then said.

    python preempted.py RANK WORLD PORT SPOOL TIER STEP_S

With PORT 0 the ranks have no process group: they run freely, and meet in the spool by the launcher's variables. Each
rank writes `at STEP` to stdout before the collective of a step, so that a test can signal it in the middle of one,
`due STEP NOTICE` where it saved, and `ended` after `close`.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
from support.training import tensors
from torch import distributed

import tierd

MOST = 2000  # steps


def main(rank: int, world: int, port: str, spool: str, tier: str, step_s: float) -> None:
    group = world > 1 and port != "0"
    if group:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        distributed.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    when = tierd.When(steps=10_000, preemption=True)
    to = [f"file://{tier}"]
    ckpt = tierd.Checkpointer(spool, "run", to=to, when=when)
    ckpt.restore(tensors(0))
    found = []
    for step in range(1, MOST):
        print("at", step, flush=True)
        time.sleep(step_s * (1 + rank))
        if group:
            distributed.all_reduce(torch.ones(1))
        if ckpt.due(step):
            found.append(step)
            ckpt.save(step, tensors(step))
        if ckpt.notice is not None:
            print("due", *found, ckpt.notice, flush=True)
            break
    ckpt.close(wait="file", deadline="100s")
    print("ended", flush=True)
    if group:
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    one, two, three, four, five, six = sys.argv[1:]
    main(int(one), int(two), three, four, five, float(six))
