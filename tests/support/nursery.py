"""Where tests fork ranks and trainers from: a process that has loaded what they need, which takes seconds.

A process of tests has one fork server, whose first user decides what it has loaded: so the list is here, for all. It
names only what is importable without pytest's paths, which the server does not have. An optimizer's first step loads
torch._dynamo.
"""

from __future__ import annotations

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "torch._inductor",
        "torchdata.stateful_dataloader",
        "tierd.client.checkpointer",
        "tierd.dcp",
    ]
)
