"""One rank of a training of several, as a process of its own. What it saw and was promised, it writes down outside.

A small model under `torch.distributed` with gloo; gradients are averaged over the ranks; each rank has its own samples
in its own order, its own dropout, its own loss. So a rank that got another rank's state, or its own of another step, or
whose peer did, goes another way than the run that nobody interrupted, and its log shows where.

The log's lines, each `LAUNCH WHAT …`: `restoring`; `resumed STEP ATTEMPT TIER`, or `resumed none`; `skipped …`;
`attempt NAME ORIGIN`, the name that this launch saves under; `step N LOSS SAMPLES`, the loss in hexadecimal, which
keeps every bit; `saving N`; `acked N`, durable in the spool; `kept N`, verified on the tier; `failed N why`; `ended`;
`died why`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from support.trainer import note
from torch import distributed, nn
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
from tierd.core.errors import TierdError

WORLD = 4
RUN = "job"
SEED = 20_240_229
SHARD, BATCH, WIDTH = 60, 4, 16
AHEAD = 2  # saves on their way to the tier at which training waits for them


@dataclass(frozen=True)
class Orders:
    """What a rank is started with. `spool` None: the uninterrupted run, which knows nothing of tierd."""

    launch: int
    rank: int
    world: int
    spool: str | None
    tier: str
    log: str
    meeting: str  # a file of this launch's own that the ranks meet at
    steps: int
    every: int
    pace: float  # seconds that a step takes longer


class Shuffled(Sampler[int]):
    """A rank's own samples, shuffled anew for ever. Where it is lies in its state alone, not in its arguments."""

    def __init__(self, samples: range, seed: int) -> None:
        self._samples, self._generator = samples, torch.Generator().manual_seed(seed)
        self._before, self._position = self._generator.get_state(), 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self._generator.set_state(self._before)
            order = torch.randperm(len(self._samples), generator=self._generator).tolist()
            while self._position < len(order):
                self._position += 1
                yield self._samples[order[self._position - 1]]
            self._before, self._position = self._generator.get_state(), 0

    def state_dict(self) -> dict[str, Any]:
        return {"before": self._before.clone(), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._position = state["before"].clone(), state["position"]


def fresh(rank: int, world: int) -> dict[str, Any]:
    """Everything that decides the next step."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(SEED + 1 + rank)  # dropout is each rank's own
    rows = torch.randn(SHARD * world, WIDTH, generator=torch.Generator().manual_seed(SEED))
    loader = StatefulDataLoader(
        list(enumerate(rows)),
        batch_size=BATCH,
        sampler=Shuffled(range(rank, SHARD * world, world), SEED + rank),
        generator=torch.Generator().manual_seed(0),  # its own: a new iterator draws from it, not from dropout's
        collate_fn=list,
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 25, 0.9),
        "data": loader,
        "rng": tierd.RngState(),
        "step": 0,
    }


def average(model: nn.Module, world: int) -> None:
    """The gradients of all ranks, by one collective."""
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    distributed.all_reduce(flat)
    flat /= world
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


class Witness:
    """Writes down what was promised, from threads of its own."""

    def __init__(self, report: Any, tier: str) -> None:
        self._report, self._tier = report, tier
        self._few = threading.Semaphore(AHEAD)
        self._saves: queue.SimpleQueue[tierd.Save] = queue.SimpleQueue()
        self._acked: queue.SimpleQueue[tierd.Save] = queue.SimpleQueue()
        for work in (self._local, self._kept):
            threading.Thread(target=work, daemon=True).start()

    def watch(self, save: tierd.Save) -> None:
        """Returns once there are few saves that the tier does not have yet: as in real life, flushes keep up."""
        self._saves.put(save)
        self._few.acquire(timeout=5)

    def _local(self) -> None:
        while True:
            save = self._saves.get()
            try:
                save.wait(timeout=60)
                self._report(f"acked {save.step}")
                self._acked.put(save)
            except (TierdError, TimeoutError) as error:
                self._report(f"failed {save.step} {error}")
                self._few.release()

    def _kept(self) -> None:
        while True:
            save = self._acked.get()
            try:
                save.wait(self._tier, timeout=60)
                self._report(f"kept {save.step}")
            except (TierdError, TimeoutError):
                pass  # no promise was made: the daemon was killed, or a newer one has retired this
            finally:
                self._few.release()


def train(orders: Orders, report: Any) -> None:
    """Train from where `restore` says to the last step."""
    state = fresh(orders.rank, orders.world)
    checkpointer = witness = None
    if orders.spool is not None:
        report("restoring")
        checkpointer, witness = tierd.Checkpointer(orders.spool, RUN), Witness(report, orders.tier)
        found = checkpointer.restore(state)
        report(f"resumed {found.step} {found.attempt} {found.tier}" if found else "resumed none")
        for one in found.skipped if found else ():
            report(f"skipped {one}")
        report(f"attempt {checkpointer.attempt} {f'{found.step}.{found.attempt}' if found else 'none'}")
    model, optimizer, batches = state["model"], state["optimizer"], iter(state["data"])
    while state["step"] < orders.steps:
        state["step"] += 1
        numbers, rows = zip(*next(batches), strict=True)
        inputs = torch.stack(rows)
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average(model, orders.world)
        optimizer.step()
        state["scheduler"].step()
        report(f"step {state['step']} {loss.item().hex()} {','.join(map(str, numbers))}")
        if checkpointer and witness and state["step"] % orders.every == 0:
            report(f"saving {state['step']}")
            witness.watch(checkpointer.save(state["step"], state))
        time.sleep(orders.pace)
    if checkpointer:
        checkpointer.close()
        assert not checkpointer.stats.failed, "a save failed"
    distributed.barrier()


def main(orders: Orders) -> None:
    """The whole life of a rank."""
    errors = os.open(f"{orders.log}.err", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(errors, 2)

    def report(line: str) -> None:
        note(orders.log, f"{orders.launch} {line}")

    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{orders.meeting}",
            rank=orders.rank,
            world_size=orders.world,
            timeout=timedelta(seconds=100),
        )
        train(orders, report)
        report("ended")
        distributed.destroy_process_group()
    except BaseException as error:
        report(f"died {type(error).__name__}: {error}".replace("\n", " | "))
        raise
