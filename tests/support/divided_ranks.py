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
import socket
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
from support.divided_training import Training
from support.launched import ORDERS
from support.sharded_training import ShardedTraining
from support.trainer import note
from torch import distributed

import tierd
from tierd.client.ranks.peer_group import PeerGroup
from tierd.client.restoring import slot_ring
from tierd.core.errors import StateMismatch, TierdError

RUN = "job"
OWN = ("own", "noise", "apart")
_LONGEST_S = 240  # of a launch
PLACES = ("restoring", "restored", "saving", "saved")
FILLING = "filling"  # a chunk came past the spool, in a restore
SENDING = "sending"  # ranks begin to send each other chunks, in a restore


@dataclass(frozen=True)
class Harm:
    """SIGKILL of a rank or of the daemon of its node, or what else `kind` says.

    Attributes:
        place: at which of `PLACES` of the rank, or `FILLING` or `SENDING`.
        save: which of the launch's saves it is, from 1; 0 for a restore.
        after_s: seconds after the rank came there. Training goes on meanwhile.
        kind: "kill", "daemon-kill"; "daemon-stop", which stops the daemon for `stopped_s`; or "disconnect", which shuts
            the connections down over which this rank's group sends, so that the group fails and nobody dies.
    """

    rank: int
    place: str
    save: int
    after_s: float
    kind: str = "kill"
    stopped_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What one launch does.

    Attributes:
        nodes: the node of each rank, so that there are as many ranks.
        kind: "plain" names replicated entries; "ddp" wraps the model and names only the moving average; "hsdp" has
            DTensors.
        waits: for each save the place that it is waited for; "" for none.
        harms: what is killed.
        refuses: `restore` is first called without `fresh`.
        steps: checkpoints that are restored one after the other instead of the newest one, each `(attempt, step)`.
        patience_s: how long the other ranks run on when one has ended badly.
        attached: the optimizer is attached, so that it is copied behind training.
        flushes: `close` waits for the tier.
        frozen_elements: of a float32 parameter that is not trained, so that checkpoints share its chunks.
        shards: of "hsdp", into how many a parameter is divided.
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
    shards: int = 1


class Rank:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.home = plan, rank, Path(plan.home)
        self.node = plan.nodes[rank]
        self.spool = self.home / f"spool-{self.node}"
        self.saves = 0
        self._begun: set[Harm] = set()
        self._connections: set[int] = set()  # the descriptors over which this rank sends

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
            if (harm.rank, harm.place, harm.save) == (self.rank, place, self.saves) and harm not in self._begun:
                self._begun.add(harm)
                timer = threading.Timer(harm.after_s, self._inflict, [harm])
                timer.daemon = True
                timer.start() if harm.after_s else self._inflict(harm)

    def _inflict(self, harm: Harm) -> None:
        self.report("harmed", kind=harm.kind, place=harm.place)
        if harm.kind == "disconnect":
            for fd in self._connections:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            return
        pid = os.getpid()
        if harm.kind != "kill":
            lock = self.spool / ".tierd" / "lock"
            if not lock.exists() or not (text := lock.read_text().strip()):
                return
            pid = int(text)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if harm.kind == "daemon-stop" else signal.SIGKILL)
        if harm.kind == "daemon-stop" and not os.fork():  # of a process of its own, because this rank may end
            time.sleep(harm.stopped_s)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            os._exit(0)

    def _watch_restores(self) -> None:
        """Come to `FILLING` with each chunk that the daemon brought, and to `SENDING` with each group of ranks."""
        copy, enter, send = slot_ring.copy_bytes, PeerGroup.__enter__, PeerGroup.broadcast

        def filled(*memories: memoryview) -> None:
            self.harm(FILLING)
            copy(*memories)

        def entered(group: PeerGroup) -> PeerGroup:
            before = _connections()
            enter(group)
            self._connections = _connections() - before
            return group

        def sent(group: PeerGroup, pieces: Any) -> None:
            self.report("sends")
            self.harm(SENDING)
            send(group, pieces)

        slot_ring.copy_bytes = filled
        PeerGroup.__enter__, PeerGroup.broadcast = entered, sent  # type: ignore[assignment, method-assign]

    def run(self) -> None:
        plan, world = self.plan, len(self.plan.nodes)
        torch.set_num_threads(1)
        meeting = f"file://{self.home / f'meeting-{plan.number}'}"
        distributed.init_process_group("gloo", meeting, timedelta(seconds=60), rank=self.rank, world_size=world)
        training = self._training()
        self._watch_restores()
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

    def _training(self) -> Training | ShardedTraining:
        plan = self.plan
        if plan.kind == "hsdp":
            return ShardedTraining(plan.seed, plan.number, self.rank, plan.shards)
        return Training(plan.seed, plan.number, self.rank, plan.frozen_elements, is_wrapped=plan.kind == "ddp")

    def restore(self, checkpointer: tierd.Checkpointer, training: Training | ShardedTraining, **which: Any) -> None:
        before = training.digests()
        self.harm("restoring")
        tries: list[dict[str, Any]] = [{"fresh": OWN}]
        if self.plan.refuses:
            tries.insert(0, {})
        for options in tries:
            try:
                with self.timed("restore"):
                    restored = checkpointer.restore(training.state, **options, **which)
            except StateMismatch as error:
                self.report("refused", why=str(error), untouched=training.digests() == before)
                if options and not isinstance(training, ShardedTraining):
                    raise
            else:
                self.resumed(checkpointer, training, restored, before)
                return
        assert isinstance(training, ShardedTraining)
        with self.timed("load"):
            restored = training.load_common(checkpointer, **which)
        self.resumed(checkpointer, training, restored, before, is_common=True)

    def resumed(
        self,
        checkpointer: tierd.Checkpointer,
        training: Training | ShardedTraining,
        restored: Any,
        before: Any,
        is_common: bool = False,
    ) -> None:
        origin = (restored.attempt, restored.step) if restored else None
        training.step = restored.step if restored else 0
        skipped = [f"{skip}" for skip in restored.skipped] if restored else []
        facts = {"origin": origin, "skipped": skipped, "attempt": checkpointer.attempt, "node": self.node}
        facts["common alone"] = is_common
        self.report("resumed", world=len(self.plan.nodes), before=before, epoch=training.state["epoch"], **facts)
        self.report("has", origin=origin, **training.digests())
        self.harm("restored")

    def train(self, checkpointer: tierd.Checkpointer, training: Training | ShardedTraining) -> None:
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


def _connections() -> set[int]:
    """The descriptors of this process's TCP connections; gloo ends the process if its listening socket fails."""
    descriptors = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                descriptors.add(int(entry))
    return descriptors


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
