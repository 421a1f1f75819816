"""A small training of two ranks that any launcher can start, and kill points that kill it once each.

What it is to do stands in the environment (`ORDERS`), what it did in files beside the spool. `log` has a line for each
event (`resumed`, `acked`, `killed`), `waits` one for each call of tierd (`RANK CALL SECONDS`), and `final-RANK` the
digest of everything that decided the last step. The rank is read from the variables that the orders name, and never
from tierd, which is to find it by itself.

    python launched.py [accelerate | lightning | ray]  # who makes the group, where the orders leave that to others
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from support.srun import NODE
from support.state_digests import state_digest
from support.trainer import note
from torch import distributed

import tierd

ORDERS, RUN, WORLD = "TIERD_TEST_ORDERS", "job", 2
PLACES = ("before", "saving", "saved")  # a step whose checkpoint is due; its save has returned; is durable
OF_RANK = ("kill", "raise", "stop", "stop-kill")
OF_DAEMON = ("daemon-kill", "daemon-stop", "daemon-kill+kill", "daemon-stop+kill")
NODE_LOST = "node-lost"
STOPPED_S = 3.0


@dataclass(frozen=True)
class Fault:
    """What is done to rank `rank`, or to its node's daemon, at `place` of step `step`, in the first launch that comes
    by: SIGKILL, an exception, SIGSTOP and SIGCONT or SIGKILL `STOPPED_S` seconds later; or the node is lost: rank and
    daemon are killed, and its spool is gone. At step 0 the place is `restoring`: the rank has its `Checkpointer`."""

    rank: int
    step: int
    place: str
    what: str = "kill"

    @property
    def is_deadly(self) -> bool:
        return self.what.endswith(("kill", "raise", "lost")) and self.what != "daemon-kill"

    @property
    def is_exact(self) -> bool:
        """Whether it costs one launch or none: not where the next launch may find a stopped daemon, or ranks raise."""
        return self.step > 0 and not self.what.startswith(("daemon", "node"))

    def happen(self, spool: Path) -> None:
        if self.what == "raise":
            raise RuntimeError("planted")
        if self.what.startswith(("daemon", "node")):
            lock = spool / ".tierd" / "lock"
            if lock.exists() and (pid := lock.read_text().strip()):
                lost = self.what == NODE_LOST
                _signal(int(pid), "kill" if lost else self.what.partition("+")[0].removeprefix("daemon-"))
            if self.what == NODE_LOST:
                shutil.rmtree(spool, ignore_errors=True)
            if self.is_deadly:
                _signal(os.getpid(), "kill")
        else:
            _signal(os.getpid(), self.what)


def _signal(pid: int, what: str) -> None:
    if what == "kill":
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return
    after = "KILL" if what == "stop-kill" else "CONT"
    subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -{after} {pid}"], start_new_session=True)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)


@dataclass(frozen=True)
class Orders:
    """What ranks are started with.

    Attributes:
        home: a directory of the test's own.
        numbers: the launcher's variables of rank and world size; the tests' own knowledge of them.
        group: whether the ranks average their gradients: "env" and "file" make the group before the `Checkpointer`,
            "others" leaves that to the launcher's library, and "" is without one.
        meeting: of group "file": a file of this launch's own.
        attempt: given to the `Checkpointer`; None where ranks agree or derive it.
        tier: the URL of the one tier of nodes that each have a spool and a daemon of their own; "" without nodes.
        durable: the place where a save counts as durable.
    """

    home: str
    numbers: tuple[str, str]
    group: str
    steps: int
    every: int
    faults: tuple[Fault, ...]
    meeting: str = ""
    attempt: str | None = None
    tier: str = ""
    durable: str = "local"

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read() -> Orders:
        given = json.loads(os.environ[ORDERS])
        return Orders(**{**given, "faults": tuple(Fault(**one) for one in given["faults"])})


@contextmanager
def timed(home: Path, rank: int, call: str) -> Iterator[None]:
    """Note how long a call of tierd took, also if it raised."""
    began = time.monotonic()
    try:
        yield
    finally:
        note(str(home / "waits"), f"{rank} {call} {time.monotonic() - began:.2f}")


class Training:
    """Everything that decides a rank's next step."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {
            "weights": torch.arange(256, dtype=torch.float32).view(16, 16).sin(),
            "momentum": torch.zeros(16, 16),
            "noise": torch.Generator().manual_seed(100 + rank),
            "rank": rank,
            "step": 0,
            "losses": [],
        }

    def gradient(self) -> torch.Tensor:
        state = self.state
        weights = state["weights"].clone().requires_grad_()
        inputs = torch.randn(8, 16, generator=state["noise"])
        loss = ((inputs @ weights).tanh() - inputs.flip(1)).square().mean()
        (found,) = torch.autograd.grad(loss, weights)
        state["losses"].append(loss.item())
        return found

    def apply(self, gradient: torch.Tensor) -> None:
        state = self.state
        state["momentum"].mul_(0.9).add_(gradient)
        state["weights"].sub_(0.05 * state["momentum"])
        state["step"] += 1

    def digest(self) -> str:
        return state_digest(self.state | {"noise": self.state["noise"].get_state()})


def uninterrupted(steps: int, averaged: bool) -> list[str]:
    """The digests of both ranks after `steps`, with nobody killed and without tierd."""
    ranks = [Training(rank) for rank in range(WORLD)]
    for _ in range(steps):
        gradients = [one.gradient() for one in ranks]
        mean = (gradients[0] + gradients[1]) / WORLD
        for one, own in zip(ranks, gradients, strict=True):
            one.apply(mean if averaged else own)
    return [one.digest() for one in ranks]


def train(orders: Orders, rank: int) -> None:
    """From where `restore` says to the last step."""
    home = Path(orders.home)
    spool = home / (f"spool-{os.environ[NODE]}" if orders.tier else "spool")

    def report(line: str) -> None:
        note(str(home / "log"), f"{rank} {line}")

    def maybe_die(place: str) -> None:
        for number, fault in enumerate(orders.faults):
            if (fault.rank, fault.step, fault.place) == (rank, training.state["step"] + (place == "before"), place):
                try:
                    os.close(os.open(home / f"killed-{number}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                report(f"killed {fault.step} {place} {fault.what}")
                fault.happen(spool)

    training = Training(rank)
    state = training.state
    to = [orders.tier] if orders.tier else []
    with timed(home, rank, "Checkpointer"):
        checkpointer = tierd.Checkpointer(spool, RUN, attempt=orders.attempt, to=to)
    maybe_die("restoring")
    with timed(home, rank, "restore"):
        found = checkpointer.restore(state)
    assert state["rank"] == rank, f"rank {rank} restored what rank {state['rank']} saved"
    report(f"resumed {found.step if found else 0} {checkpointer.attempt}")
    while state["step"] < orders.steps:
        due = (state["step"] + 1) % orders.every == 0
        maybe_die("before")
        gradient = training.gradient()
        if orders.group:
            distributed.all_reduce(gradient)
            gradient /= WORLD
        training.apply(gradient)
        if due:
            with timed(home, rank, "save"):
                save = checkpointer.save(state["step"], state)
            maybe_die("saving")
            with timed(home, rank, "wait"):
                save.wait(orders.durable, timeout=60)
            report(f"acked {state['step']} {checkpointer.attempt}")
            maybe_die("saved")
    with timed(home, rank, "close"):
        checkpointer.close()
    if orders.group:  # else a node whose rank has ended would not come back to a launch that begins again
        distributed.barrier()
    (home / f"final-{rank}").write_text(training.digest())


def run(orders: Orders, rank: int, world: int) -> None:
    """A rank's life, as the orders have it."""
    torch.set_num_threads(1)
    assert world == WORLD, f"{world} ranks"
    if orders.group in ("env", "file"):
        where = "env://" if orders.group == "env" else f"file://{orders.meeting}"
        distributed.init_process_group("gloo", where, timedelta(seconds=60), rank=rank, world_size=world)
    train(orders, rank)
    if orders.group in ("env", "file"):
        distributed.destroy_process_group()


def spawned(rank: int) -> None:
    """What `mp.spawn` calls: nothing in the environment tells who this is."""
    run(Orders.read(), rank, WORLD)


def under_ray(orders: Orders) -> None:
    """Ray Train starts both ranks, makes their group, and starts them again after a failure."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def rank() -> None:
        from support import launched  # this file, and not the script that Ray would take apart for its workers

        launched.run(launched.Orders.read(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    with tempfile.TemporaryDirectory(prefix="ray-") as room:  # a short path: Ray has sockets in there
        ray.init(
            num_cpus=WORLD,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            _temp_dir=room,
            _node_ip_address="127.0.0.1",
        )
        kept = RunConfig(
            storage_path=f"{orders.home}/ray", failure_config=FailureConfig(max_failures=2 * len(orders.faults))
        )
        TorchTrainer(
            rank,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=WORLD),
            run_config=kept,
        ).fit()
        ray.shutdown()


def main(library: str = "") -> None:
    """What every other launcher starts."""
    orders = Orders.read()
    if library == "lightning":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
        fabric.launch()  # starts the other rank, and makes the group
        run(orders, fabric.global_rank, fabric.world_size)
    elif library == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        run(orders, accelerator.process_index, accelerator.num_processes)
        accelerator.end_training()
    elif library == "ray":
        under_ray(orders)
    else:
        rank, world = (int(os.environ[name]) for name in orders.numbers)
        run(orders, rank, world)


if __name__ == "__main__":
    main(*sys.argv[1:])
