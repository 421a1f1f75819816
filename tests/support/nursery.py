"""Where tests fork ranks, trainers and followers from: a process that has loaded what they need, which takes seconds.

Invariant: nothing else sets a preload (tests/test_imports.py), because a process of tests has one fork server, whatever
asks for a context. With a second list, ranks that were forked after followers each imported torch anew, at five times
the CPU. The list names only what is importable without pytest's paths, which the server does not have. An optimizer's
first step loads torch._dynamo.
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
        "tierd.reading",
    ]
)
