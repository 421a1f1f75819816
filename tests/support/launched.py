"""A small training of two ranks that any launcher can start, and kill points that kill it once each.

What it is to do stands in the environment (`ORDERS`), what it did in files beside the spool: `log` has a line for each
event (`resumed`, `acked`, `killed`), `final-RANK` the digest of everything that decided the last step. The rank is read
from the variables that the orders name, and never from tierd, which is to find it by itself.

    python launched.py [accelerate | lightning | ray]  # who makes the group, where the orders leave that to others
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from support.trainer import note
from torch import distributed

import tierd

ORDERS, RUN, WORLD = "TIERD_TEST_ORDERS", "job", 2
PLACES = ("before", "saving", "saved")  # a step whose checkpoint is due; its save has returned; is durable


@dataclass(frozen=True)
class Kill:
    """Rank `rank` is killed at `place` of step `step`, in the first launch that comes by."""

    rank: int
    step: int
    place: str


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
    """

    home: str
    numbers: tuple[str, str]
    group: str
    steps: int
    every: int
    kills: tuple[Kill, ...]
    meeting: str = ""
    attempt: str | None = None

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read() -> Orders:
        given = json.loads(os.environ[ORDERS])
        return Orders(**{**given, "kills": tuple(Kill(**one) for one in given["kills"])})


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
        state = self.state
        found = hashlib.blake2b(repr((state["rank"], state["step"], [loss.hex() for loss in state["losses"]])).encode())
        for tensor in (state["weights"], state["momentum"], state["noise"].get_state()):
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()


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

    def tell(line: str) -> None:
        note(str(home / "log"), f"{rank} {line}")

    def maybe_die(place: str) -> None:
        for number, kill in enumerate(orders.kills):
            if kill == Kill(rank, training.state["step"] + (place == "before"), place):
                try:
                    os.close(os.open(home / f"killed-{number}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                tell(f"killed {kill.step} {place}")
                os.kill(os.getpid(), signal.SIGKILL)

    training = Training(rank)
    state = training.state
    checkpointer = tierd.Checkpointer(home / "spool", RUN, attempt=orders.attempt, to=[])
    found = checkpointer.restore(state)
    assert state["rank"] == rank, f"rank {rank} restored what rank {state['rank']} saved"
    tell(f"resumed {found.step if found else 0} {checkpointer.attempt}")
    while state["step"] < orders.steps:
        due = (state["step"] + 1) % orders.every == 0
        maybe_die("before")
        gradient = training.gradient()
        if orders.group:
            distributed.all_reduce(gradient)
            gradient /= WORLD
        training.apply(gradient)
        if due:
            save = checkpointer.save(state["step"], state)
            maybe_die("saving")
            save.wait(timeout=60)
            tell(f"acked {state['step']} {checkpointer.attempt}")
            maybe_die("saved")
    checkpointer.close()
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
            storage_path=f"{orders.home}/ray", failure_config=FailureConfig(max_failures=len(orders.kills))
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
