"""Ranks that hold replicated tensors and tensors of their own, forked for launches of changing numbers of ranks.

`launch` forks the ranks of a `Plan`, because torch's import takes longer than their training. Each rank appends to
`log` one JSON object for each event, which `support.divided_launches` judges. The digests in there are taken by this
module and not by tierd.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it, in seconds: once here, and not in each rank
from support.launched import ORDERS
from support.state_digests import state_digest
from support.trainer import note
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import tierd
from tierd.core.errors import StateMismatch, TierdError

RUN = "job"
OWN = ("own", "noise", "apart")
_LONGEST_S = 240  # of a launch
PLACES = ("restoring", "restored", "saving", "saved")


@dataclass(frozen=True)
class Harm:
    """SIGKILL of a rank, or of the daemon of its node.

    Attributes:
        place: at which of `PLACES` of the rank.
        save: which of the launch's saves it is, from 1; 0 for a restore.
        after_s: seconds after the rank came there. Training goes on meanwhile.
    """

    rank: int
    place: str
    save: int
    after_s: float
    daemon: bool = False


@dataclass(frozen=True)
class Plan:
    """What one launch does.

    Attributes:
        nodes: the node of each rank, so that there are as many ranks.
        kind: "plain" names replicated entries; "ddp" wraps the model and names only the moving average.
        waits: for each save the place that it is waited for; "" for none.
        harms: what is killed.
        refuses: `restore` is first called without `fresh`.
        steps: checkpoints that are restored one after the other instead of the newest one, each `(attempt, step)`.
        patience_s: how long the other ranks run on when one has ended badly.
        attached: the optimizer is attached, so that it is copied behind training.
        flushes: `close` waits for the tier.
        frozen_elements: of a float32 parameter that is not trained, so that checkpoints share its chunks.
    """

    home: str
    number: int
    seed: int
    nodes: tuple[int, ...]
    kind: str
    waits: tuple[str, ...]
    harms: tuple[Harm, ...] = ()
    refuses: bool = False
    steps: tuple[tuple[str, int], ...] = ()
    patience_s: float = 0.0
    attached: bool = False
    flushes: bool = False
    frozen_elements: int = 3000


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

    def __init__(self, plan: Plan, rank: int) -> None:
        torch.manual_seed(plan.seed)
        self.rank, self.kind = rank, plan.kind
        self.model = Model(plan.frozen_elements)
        with torch.no_grad():
            self.model.seen.fill_(1000.0 * plan.number + rank)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.wrapped = DistributedDataParallel(self.model, broadcast_buffers=False) if plan.kind == "ddp" else None
        origin = 7919 * plan.number + rank
        self.state: dict[str, Any] = {
            "model": self.wrapped or self.model,
            "optimizer": self.optimizer,
            "average": {name: one.detach().clone() for name, one in self.model.named_parameters()},
            "own": torch.full((2000,), float(origin)),
            "noise": torch.Generator().manual_seed(origin),
            "apart": {"rank": rank, "row": torch.full((40,), origin), "launch": plan.number},
            "epoch": 0,
            "empty": {"names": ["a", "b"]},
        }
        self.replicated = ("average", "empty") if plan.kind == "ddp" else ("model", "optimizer", "average", "empty")
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


class Rank:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.home = plan, rank, Path(plan.home)
        self.node = plan.nodes[rank]
        self.spool = self.home / f"spool-{self.node}"
        self.saves = 0

    def report(self, event: str, **facts: Any) -> None:
        common = {"event": event, "launch": self.plan.number, "rank": self.rank, "at": round(time.time(), 3)}
        note(str(self.home / "log"), json.dumps(common | facts))

    @contextmanager
    def timed(self, call: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.report("took", call=call, seconds=round(time.monotonic() - began, 2))

    def harm(self, place: str) -> None:
        for harm in self.plan.harms:
            if (harm.rank, harm.place, harm.save) == (self.rank, place, self.saves):
                timer = threading.Timer(harm.after_s, self._kill, [harm])
                timer.daemon = True
                timer.start() if harm.after_s else self._kill(harm)

    def _kill(self, harm: Harm) -> None:
        self.report("killed", daemon=harm.daemon, place=harm.place)
        pid = os.getpid()
        if harm.daemon:
            lock = self.spool / ".tierd" / "lock"
            if not lock.exists() or not (text := lock.read_text().strip()):
                return
            pid = int(text)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def run(self) -> None:
        plan, world = self.plan, len(self.plan.nodes)
        torch.set_num_threads(1)
        meeting = f"file://{self.home / f'meeting-{plan.number}'}"
        distributed.init_process_group("gloo", meeting, timedelta(seconds=60), rank=self.rank, world_size=world)
        training = Training(plan, self.rank)
        with self.timed("Checkpointer"):
            checkpointer = tierd.Checkpointer(
                self.spool, RUN, to=[f"file://{self.home / 'tier'}"], replicated=training.replicated, rank_timeout=20.0
            )
        if plan.attached:
            checkpointer.attach(training.optimizer)
        for attempt, step in plan.steps:
            self.restore(checkpointer, training, attempt=attempt, step=step)
        if not plan.steps:
            self.restore(checkpointer, training)
            self.train(checkpointer, training)
        with self.timed("close"):
            checkpointer.close(wait="file" if plan.flushes else None, timeout=60)
        distributed.barrier()
        self.report("ended")

    def restore(self, checkpointer: tierd.Checkpointer, training: Training, **which: Any) -> None:
        before = training.digests()
        self.harm("restoring")
        fresh: tuple[str, ...] = OWN
        if self.plan.refuses:
            try:
                with self.timed("restore"):
                    restored = checkpointer.restore(training.state, **which)
            except StateMismatch as error:
                self.report("refused", why=str(error), untouched=training.digests() == before)
            else:
                self.resumed(checkpointer, training, restored, before)
                return
        with self.timed("restore"):
            restored = checkpointer.restore(training.state, fresh=fresh, **which)
        self.resumed(checkpointer, training, restored, before)

    def resumed(self, checkpointer: tierd.Checkpointer, training: Training, restored: Any, before: Any) -> None:
        origin = (restored.attempt, restored.step) if restored else None
        training.step = restored.step if restored else 0
        skipped = [f"{skip}" for skip in restored.skipped] if restored else []
        facts = {"origin": origin, "skipped": skipped, "attempt": checkpointer.attempt, "node": self.node}
        self.report("resumed", world=len(self.plan.nodes), before=before, epoch=training.state["epoch"], **facts)
        self.report("has", origin=origin, **training.digests())
        self.harm("restored")

    def train(self, checkpointer: tierd.Checkpointer, training: Training) -> None:
        world = len(self.plan.nodes)
        for place in self.plan.waits:
            training.train()
            self.saves += 1
            which = {"step": training.step, "attempt": checkpointer.attempt, "world": world, "node": self.node}
            self.report("saves", **which, **training.digests())
            self.harm("saving")
            with self.timed("save"):
                save = checkpointer.save(training.step, training.state)
            self.harm("saved")
            if place:
                try:
                    with self.timed("wait"):
                        save.wait(place, timeout=60)
                    self.report("durable", place=place, **which)
                except (TierdError, TimeoutError) as error:
                    self.report("not durable", place=place, why=f"{type(error).__name__}: {error}", **which)
            time.sleep(0.02)


def launch(plan: Plan) -> int:
    """Fork the ranks; end the others some time after one has ended badly. Returns how many ended badly."""
    home = Path(plan.home)
    children: dict[int, int] = {}
    for rank in random.Random(plan.seed).sample(range(len(plan.nodes)), len(plan.nodes)):
        pid = os.fork()
        if not pid:
            _live(plan, rank)
        children[pid] = rank
    failed, end_s = 0, time.monotonic() + _LONGEST_S
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            del children[pid]
            if status:
                failed += 1
                end_s = min(end_s, time.monotonic() + plan.patience_s)
        elif time.monotonic() > end_s:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            if not failed:
                facts = {"event": "hung", "launch": plan.number, "ranks": [*children.values()]}
                note(str(home / "log"), json.dumps(facts))
            end_s, failed = time.monotonic() + 30, failed + 1
        else:
            time.sleep(0.01)
    return failed


def _live(plan: Plan, number: int) -> None:
    code = 1
    try:
        os.environ.update({ORDERS: json.dumps({"home": plan.home}), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
        with open(Path(plan.home) / f"output-{plan.number}-{number}", "a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        rank = Rank(plan, number)
        try:
            rank.run()
            code = 0
        except BaseException as error:
            rank.report("raised", kind=type(error).__name__, why=str(error), where=traceback.format_exc()[-1500:])
    finally:
        os._exit(code)
