"""One rank of a training under FSDP2, as a process that can be killed. What it saw it writes down outside.

Each rank has its own samples and its own dropout, and what it goes by is in its state; with `alike` all ranks have the
same samples, derived from the step, and no dropout, so that one rank goes the same way as two: a mean of two equal
gradients is exact.

The log's lines, each `LAUNCH WHAT …`: `resumed STEP TIER HOW`, or `resumed none`; `step N LOSS DIGEST`, the loss in
hexadecimal, which keeps every bit, the digest of this rank's shards, or with `alike` of the whole tensors; `saved N`;
`ended`; `died why`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.nursery import context as nursery
from support.trainer import note

RUN = "sharded"
WIDTH, BATCH, EVERY = 96, 6, 3


@dataclass(frozen=True)
class Orders:
    """What a rank is started with.

    Attributes:
        spool: None: the uninterrupted run, which knows nothing of tierd.
        halt: a line of its log behind which it waits to be killed.
    """

    launch: int
    rank: int
    world: int
    spool: str | None
    log: str
    meeting: str
    steps: int
    alike: bool = False
    halt: str = ""


def start(orders: Orders) -> multiprocessing.process.BaseProcess:
    process = nursery.Process(target=_main, args=(orders,), daemon=False)
    process.start()
    return process


def _main(orders: Orders) -> None:
    import torch
    from torch import distributed

    os.dup2(os.open(f"{orders.log}.err", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), 2)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    def report(line: str) -> None:
        note(orders.log, f"{orders.launch} {line}")
        if orders.halt and f"{line} ".startswith(f"{orders.halt} "):
            time.sleep(1000)

    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{orders.meeting}", rank=orders.rank, world_size=orders.world
        )
        _train(orders, report)
        distributed.barrier()
        report("ended")
        distributed.destroy_process_group()
    except BaseException as error:
        report(f"died {type(error).__name__}: {error}".replace("\n", " | "))
        raise


def _train(orders: Orders, report: Any) -> None:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import tierd

    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(WIDTH, 131), nn.GELU(), nn.Dropout(0.0 if orders.alike else 0.2), nn.Linear(131, WIDTH)
    )
    mesh = init_device_mesh("cpu", (orders.world,), mesh_dim_names=("dp",))
    for part in (model[0], model[3], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1000 + orders.rank)  # dropout is each rank's own
    dice = torch.Generator().manual_seed(orders.rank)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0, "rng": tierd.RngState(), "dice": dice}
    checkpointer = None
    if orders.spool is not None:
        checkpointer = tierd.Checkpointer(orders.spool, RUN)
        report(f"resumed {_resume(checkpointer, state)}")
        checkpointer.attach(optimizer)
    while state["step"] < orders.steps:
        state["step"] += 1
        own = torch.Generator().manual_seed(state["step"]) if orders.alike else dice
        inputs = torch.randn(BATCH, WIDTH, generator=own)
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(f"step {state['step']} {loss.item().hex()} {_digest(model, optimizer, orders.alike)}")
        if checkpointer and state["step"] % EVERY == 0:
            checkpointer.save(state["step"], state)
            report(f"saved {state['step']}")
    if checkpointer:
        checkpointer.close()
        assert not checkpointer.stats.failed, "a save failed"


def _resume(checkpointer: Any, state: dict[str, Any]) -> str:
    import tierd
    import tierd.dcp

    try:
        found, how = checkpointer.restore(state), "restored"
    except tierd.StateMismatch:
        whole = {name: state[name] for name in ("model", "optimizer", "step")}
        found, how = tierd.dcp.load(whole, checkpointer), "resharded"
        state |= whole
    return f"{found.step} {found.tier} {how}" if found else "none"


def _digest(model: Any, optimizer: Any, whole: bool) -> str:
    """Of every tensor of the model and of the optimizer's state."""
    from support.state_digests import state_digest
    from torch.distributed.tensor import DTensor

    def tensors() -> Iterator[Any]:
        yield from model.parameters()
        for parameter in model.parameters():
            yield from optimizer.state[parameter].values()

    def held(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.full_tensor() if whole else tensor.to_local()

    return state_digest([held(tensor) for tensor in tensors()])[:16]


@dataclass(frozen=True)
class Reported:
    """What a rank's log says."""

    resumed: dict[int, str]  # by launch
    steps: dict[int, dict[int, str]]  # by launch and step: loss and digest
    saved: dict[int, list[int]]
    ended: set[int]
    died: list[str]


def reported(log: Path) -> Reported:
    found = Reported({}, {}, {}, set(), [])
    lines = log.read_text().splitlines() if log.exists() else []
    for line in lines:
        number, what, rest = f"{line} ".split(" ", 2)
        launch, rest = int(number), rest.strip()
        if what == "resumed":
            found.resumed[launch] = rest
        elif what == "step":
            step, seen = rest.split(" ", 1)
            found.steps.setdefault(launch, {})[int(step)] = seen
        elif what == "saved":
            found.saved.setdefault(launch, []).append(int(rest))
        elif what == "ended":
            found.ended.add(launch)
        elif what == "died":
            found.died.append(rest)
    return found
