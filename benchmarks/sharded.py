"""What saving a model under FSDP2 and HSDP costs: tierd beside `dcp.async_save`, on several ranks with gloo.

    python benchmarks/sharded.py --dir /nvme/bench --out benchmarks/results      # leaves sharded.json and sharded.md

Every rank holds one model, sharded over all of them or, as HSDP, over some of them, and its AdamW. The arms save it in
turns, round by round, in the same processes: a window of training steps begins with the save, and then the rank waits
until the save is durable. Blocked is what training loses at once: the time in the call that saves, and in the next step
as far as it waits for a copy. DCP has a process group of its own, because its collectives run beside training's.
Nothing is pruned or recycled: each arm writes new files, and they are removed between windows, untimed.

Invariant: each sample is the largest of all ranks' for one save, because training waits for the slowest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tierd
import tierd.dcp
from tierd.bench.process_counters import describe_machine, run_ranks
from tierd.bench.report_page import machine_text, markdown_table, spread_text, write_result
from tierd.client.checkpointer import internals

Waits = Callable[[], None]
ABOUT = {
    "dcp.async": "`dcp.async_save` with its `FileSystemWriter` (fsync), as it comes: new memory for every save",
    "dcp.async-reused": "the same, with a `DefaultStager` that is kept, and its memory with it",
    "tierd.dcp": "`dcp.async_save` with `tierd.dcp.StorageWriter`",
    "tierd.dcp-overlapped": "the same after `attach(optimizer)`",
    "tierd": "`Checkpointer.save`",
    "tierd-overlapped": "the same after `attach(optimizer)`",
}
LAYERS = 6


class Rank:
    """One rank's model, and how each arm saves it."""

    def __init__(self, base: Path, width: int, shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for part in (*self.model, self.model):
            fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.width, self.base, self.number = width, base, 0
        self.beside = distributed.new_group()
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.checkpointers: dict[str, tierd.Checkpointer] = {}
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, self.width)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def checkpointer(self, arm: str) -> tierd.Checkpointer:
        if arm not in self.checkpointers:
            self.checkpointers[arm] = made = tierd.Checkpointer(self.base / arm, "run", to=[])
            made.restore({"model": self.model, "optimizer": self.optimizer})  # there is none: it makes memory ready
        return self.checkpointers[arm]

    def save(self, arm: str) -> Waits:
        """Save; what is returned waits until that is durable."""
        self.number += 1
        if arm.startswith("dcp"):
            return self._dcp(arm)
        ckpt = self.checkpointer(arm)
        if "dcp" not in arm:
            save = ckpt.save(self.number, {"model": self.model, "optimizer": self.optimizer})
            return lambda: save.wait(timeout=600)
        writer = tierd.dcp.StorageWriter(ckpt, self.number)
        future = dcp.async_save(self.state(), storage_writer=writer, process_group=self.beside)
        assert isinstance(future, Future)
        return lambda: _await(future)

    def _dcp(self, arm: str) -> Waits:
        future = dcp.async_save(
            self.state(),
            storage_writer=dcp.FileSystemWriter(self.base / arm / str(self.number)),
            process_group=self.beside,
            async_stager=self.stager if arm.endswith("reused") else None,
        )
        assert isinstance(future, Future)
        return lambda: _await(future)

    def window(self, arm: str, steps: int) -> dict[str, float]:
        overlaps = arm.endswith("overlapped")
        if overlaps:
            self.checkpointer(arm).attach(self.optimizer)
        stats = self.checkpointer(arm).stats if arm.startswith("tierd") else None
        waited = stats.step_waited_s if stats else 0.0
        distributed.barrier()
        begun = time.perf_counter()
        wait = self.save(arm)
        called = time.perf_counter() - begun
        ended: list[float] = []

        def watch() -> None:
            wait()
            ended.append(time.perf_counter() - begun)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(steps):
            self.step()
        trained = time.perf_counter() - begun
        watcher.join()
        waited = stats.step_waited_s - waited if stats else 0.0
        if overlaps:
            internals(self.checkpointer(arm)).gate.detach()
        distributed.barrier()
        written = sum(path.stat().st_size for path in (self.base / arm).rglob("*") if path.is_file())
        return {
            "blocked_s": called + waited,
            "called_s": called,
            "step_waited_s": waited,
            "window_s": trained,
            "durable_s": ended[0],
            "bytes": float(written),
        }

    def clear(self, arm: str) -> None:
        """Remove what was saved; one rank does it for all."""
        distributed.barrier()
        if distributed.get_rank() == 0:
            for place in (self.base / arm, self.base / arm / "run"):
                for saved in place.iterdir() if place.is_dir() else ():
                    if saved.name not in (".tierd", "run"):
                        shutil.rmtree(saved)
            os.sync()
        distributed.barrier()


def _await(future: Future[Any]) -> None:
    future.result(600)


def _rank(rank: int, shape: tuple[int, ...], base: str, width: int, rounds: int, steps: int) -> None:
    world = math.prod(shape)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{base}/meeting", rank=rank, world_size=world)
    work, samples = Rank(Path(base), width, shape), []
    for number in range(-1, rounds):  # the first is thrown away: it lays memory out
        for arm in ABOUT:
            gathered: list[Any] = [None] * world
            distributed.all_gather_object(gathered, work.window(arm, steps))
            work.clear(arm)
            if number >= 0:
                samples.append({"arm": arm, "round": number, "ranks": gathered})
    if rank == 0:
        Path(base, "samples.json").write_text(json.dumps(samples))
    for ckpt in work.checkpointers.values():
        ckpt.close()
    distributed.barrier()
    distributed.destroy_process_group()


def measured(samples: list[dict[str, Any]], arm: str, name: str) -> list[float]:
    """One value a round: the slowest rank's. Bytes are of all ranks together, which any of them has counted."""
    return [max(rank[name] for rank in sample["ranks"]) for sample in samples if sample["arm"] == arm]


def _rows(group: dict[str, Any]) -> list[tuple[str, ...]]:
    samples, rows = group["samples"], []
    middle = {arm: statistics.median(measured(samples, arm, "blocked_s")) for arm in ABOUT}
    for arm in ABOUT:
        called, durable = (statistics.median(measured(samples, arm, name)) for name in ("called_s", "durable_s"))
        written = statistics.median(measured(samples, arm, "bytes")) / 1e6
        blocked = spread_text(measured(samples, arm, "blocked_s"), ".4f")
        ratio = f"{middle[arm] / middle['dcp.async']:.3f}"
        rows.append((group["mesh"], arm, blocked, ratio, f"{called:.4f}", f"{durable:.2f}", f"{written:.0f}"))
    return rows


def page(result: dict[str, Any]) -> str:
    rows = [row for group in result["groups"] for row in _rows(group)]
    columns = ("mesh", "arm", "blocked s", "of `dcp.async`", "in the call s", "durable s", "written MB")
    return f"""# Saving a sharded model

Written by `benchmarks/sharded.py`; every sample is in [sharded.json](sharded.json). Medians (and ranges) of
the slowest rank's: ranks with gloo, a model of {LAYERS} layers under FSDP2 with AdamW,
{result["bytes"] / 1e6:.0f} MB of state on all of them; {result["rounds"]} rounds, arms in turns in the same
processes. A mesh of two numbers is HSDP: so many replicas of so many shards. {machine_text(result["machine"])}, shared
with other work; {result["date"]}.

{markdown_table(columns, rows)}

*Blocked* is the time in the call, and in the next step as far as it waits for a copy. *Durable* counts from
the call, beside training; a copy behind training is kept only when the next step has confirmed it.

""" + "".join(f"- **{arm}**: {text}.\n" for arm, text in ABOUT.items())


def measure(mesh: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks of one mesh; return their samples."""
    shape = tuple(map(int, mesh.split("x")))
    with tempfile.TemporaryDirectory(dir=args.dir) as base:
        run_ranks(_rank, math.prod(shape), shape, base, args.width, args.rounds, args.steps)
        return {"mesh": mesh, "samples": json.loads(Path(base, "samples.json").read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--meshes", nargs="+", default=["2", "2x2"], help="SHARDS, or REPLICASxSHARDS for HSDP")
    parser.add_argument("--width", type=int, default=2048, help=f"of the model's {LAYERS} layers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="from a save to the wait for it")
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the disk to measure")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": str(torch.__version__),
        "rounds": args.rounds,
        "steps": args.steps,
        "bytes": 3 * 4 * LAYERS * (args.width * args.width + args.width),
        "machine": describe_machine(args.dir, 1, {"torch": str(torch.__version__)}),
        "groups": [measure(mesh, args) for mesh in args.meshes],
    }
    print(page(result))
    if args.out:
        write_result(args.out, "sharded", result, page(result))


if __name__ == "__main__":
    main()
