"""What DDP ranks on one node save when they divide what all of them hold, beside ranks that each save everything.

    python benchmarks/replicas.py --dir /nvme/bench --out benchmarks/results      # leaves replicas.json and replicas.md

Every rank holds one model under DistributedDataParallel and its AdamW, with gloo. The two arms save the same state in
turns, in the same processes: `divided` with the DDP module, `whole` with the module below it and the optimizer's own
state, of which nothing is declared. All ranks begin a save at once. Blocked is the time in the call, of the slowest
rank. Each arm has a spool and a directory tier of its own. With --nodes N the ranks are spread over N spools with a
daemon each, and one tier.

A save also digests a share of the replicated tensors, to compare them between ranks. That is timed apart, after the
saves, for all shares in turn, and related to the time of a training step.

Invariant: figures of bytes are those of files that are there after the last save was flushed; nothing is pruned.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import tierd
from tierd.bench.process_counters import describe_machine, run_ranks
from tierd.bench.report_page import machine_text, markdown_table, spread_text, write_result
from tierd.client.checkpointer import internals
from tierd.client.saving.fingerprints import ReplicaFingerprints
from tierd.core.replicas.shares import ROUNDS
from tierd.daemon.status_file import read_status
from tierd.state.capturer import Capturer

LAYERS = 12
ARMS = ("divided", "whole")
_ENDS_S = 90  # until a daemon without a trainer has ended


class Rank:
    """One rank's model, and its checkpointer for each arm."""

    def __init__(self, base: Path, width: int, rank: int, world: int, nodes: int) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.width = width
        self.step()
        node = rank * nodes // world
        self.checkpointers = {}
        for arm in ARMS:
            tier = base / arm / "tier"
            tier.mkdir(parents=True, exist_ok=True)
            spool = base / arm / f"spool{node}"
            self.checkpointers[arm] = tierd.Checkpointer(
                spool, "run", to=[f"file://{tier}"], retention=tierd.Retention(keep_last=100)
            )
            self.checkpointers[arm].restore()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, self.width)).square().mean().backward()
        self.optimizer.step()

    def state(self, arm: str) -> dict[str, Any]:
        if arm == "divided":
            return {"model": self.model, "optimizer": self.optimizer}
        return {"model": self.model.module, "optimizer": self.optimizer.state_dict()}

    def save(self, arm: str, number: int) -> dict[str, float]:
        """Save once on all ranks at the same time; return this rank's seconds in the call and its memory."""
        checkpointer, state = self.checkpointers[arm], self.state(arm)
        distributed.barrier()
        begun_s = time.perf_counter()
        save = checkpointer.save(number, state)
        blocked_s = time.perf_counter() - begun_s
        save.wait()
        durable_s = time.perf_counter() - begun_s
        memory = sum(slot.arena.size for slot in internals(checkpointer).pipeline.slots if slot.arena is not None)
        return {"blocked_s": blocked_s, "durable_s": durable_s, "arena_bytes": memory}

    def digest(self) -> list[float]:
        """Return the seconds that each share of the replicated tensors takes to digest, as a save does."""
        group = internals(self.checkpointers["divided"]).state_saver.group
        capture = Capturer(group=group).capture(self.state("divided"))
        seconds = []
        for number in range(ROUNDS):
            begun_s = time.perf_counter()
            fingerprints = ReplicaFingerprints(capture.replicas(number))
            fingerprints.take()
            fingerprints.result()
            seconds.append(time.perf_counter() - begun_s)
        return seconds

    def close(self) -> None:
        for checkpointer in self.checkpointers.values():
            checkpointer.close(wait="file", timeout=600)


def _rank(rank: int, world: int, nodes: int, base: str, width: int, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    store = distributed.FileStore(f"{base}/store", world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    work = Rank(Path(base), width, rank, world, nodes)
    samples: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    step_s: list[float] = []
    for number in range(rounds):
        for arm in ARMS if number % 2 else reversed(ARMS):
            gathered: list[Any] = [None] * world
            distributed.all_gather_object(gathered, work.save(arm, number))
            samples[arm].append(
                {
                    "blocked_s": max(sample["blocked_s"] for sample in gathered),
                    "durable_s": max(sample["durable_s"] for sample in gathered),
                    "arena_bytes": sum(sample["arena_bytes"] for sample in gathered),
                }
            )
        begun_s = time.perf_counter()
        work.step()
        step_s.append(time.perf_counter() - begun_s)
    digest_s = work.digest()
    work.close()
    if rank == 0:
        timed = {"arms": samples, "step_s": step_s, "digest_s": digest_s}
        Path(base, "samples.json").write_text(json.dumps(timed))
    distributed.barrier()
    distributed.destroy_process_group()


def _file_bytes(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern) if path.is_file())


def measure(world: int, nodes: int, width: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Run one group of ranks; return the samples of each arm, and the bytes of one checkpoint in each place.

    `put_bytes` are those that all nodes' daemons sent, so a chunk that two nodes put counts twice.
    """
    with tempfile.TemporaryDirectory(dir=directory) as base:
        run_ranks(_rank, world, world, nodes, base, width, rounds)
        timed = json.loads(Path(base, "samples.json").read_text())
        samples, arms = timed["arms"], {}
        for arm in ARMS:
            arms[arm] = {
                "samples": samples[arm][1:],  # the first one touches its memory
                "spool_bytes": _file_bytes(Path(base, arm), "spool*/run/[0-9]*/*/*") / rounds,
                "tier_bytes": _file_bytes(Path(base, arm), "tier/run/**/*") / rounds,
                "put_bytes": sum(map(_put_bytes, sorted(Path(base, arm).glob("spool*")))) / rounds,
            }
    return {"ranks": world, "nodes": nodes, "arms": arms, "step_s": timed["step_s"], "digest_s": timed["digest_s"]}


def _put_bytes(spool: Path) -> int:
    """Return the bytes that the spool's daemon sent in its life. It records them when it ends, soon after its last
    trainer.
    """
    for _ in range(_ENDS_S * 10):
        counters = (read_status(spool / ".tierd") or {}).get("counters", {})
        if counters.get("flushed_sent_bytes"):
            return int(counters["flushed_sent_bytes"])
        time.sleep(0.1)
    raise TimeoutError(f"{spool}: its daemon has not ended")


def page(result: dict[str, Any]) -> str:
    """Lay out the page: each group of ranks as multiples of one rank that saves everything."""
    single = result["groups"][0]["arms"]["whole"]
    single_blocked = statistics.median(sample["blocked_s"] for sample in single["samples"])
    rows = []
    for group in result["groups"]:
        whole = statistics.median(sample["blocked_s"] for sample in group["arms"]["whole"]["samples"])
        for arm in ARMS:
            figures = group["arms"][arm]
            blocked = [sample["blocked_s"] for sample in figures["samples"]]
            median = statistics.median(blocked)
            rows.append(
                [
                    str(group["ranks"]),
                    str(group["nodes"]),
                    arm,
                    spread_text(blocked, ".4f"),
                    f"{median / single_blocked:.2f}",
                    f"{median / whole:.2f}",
                    f"{figures['spool_bytes'] / single['spool_bytes']:.2f}",
                    f"{figures['tier_bytes'] / single['tier_bytes']:.2f}",
                    f"{figures['put_bytes'] / single['put_bytes']:.2f}",
                    f"{figures['samples'][-1]['arena_bytes'] / result['bytes']:.2f}",
                ]
            )
    columns = ["ranks", "nodes", "arm", "blocked s", "of 1 rank", "of whole", "spool", "tier", "put", "arenas"]
    digests = [
        [
            str(group["ranks"]),
            spread_text([1000 * second for second in group["digest_s"]], ".2f"),
            spread_text([1000 * second for second in group["step_s"]], ".0f"),
            f"{statistics.mean(group['digest_s']) / 100 / statistics.median(group['step_s']):.4%}",
        ]
        for group in result["groups"]
        if group["ranks"] > 1
    ]
    return f"""# Saving what all ranks hold

Written by `benchmarks/replicas.py`; every sample is in [replicas.json](replicas.json). DDP with gloo over a model of
{LAYERS} layers and AdamW, {result["bytes"] / 1e6:.0f} MB of state on each rank; {result["rounds"]} saves,
arms in turns in the same processes. {machine_text(result["machine"])}, shared with other work;
{result["date"]}.

{markdown_table(columns, rows)}

*Blocked* is the time in the call, of the slowest rank (median and range). *Of 1 rank* divides it by that of one rank
that saves everything, *of whole* by that of as many ranks that each save everything; with more ranks than cores, copies
take turns on the cores. *Spool* and *tier* are bytes of a checkpoint, of all nodes together, divided by those of
one rank. *Put* are the bytes that all nodes sent to the tier, so a chunk that two of them put counts twice. *Arenas* is
the memory of all ranks' snapshots, divided by the state.

## Digesting replicas

A save digests a 32nd of the replicated tensors on each rank, to compare them. With a save every 100 steps this costs:

{markdown_table(["ranks", "digesting, ms a save", "step, ms", "of all steps"], digests)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--groups", nargs="+", default=["1:1", "4:1", "8:1", "4:2", "4:4"], help="ranks:nodes")
    parser.add_argument("--width", type=int, default=1536, help=f"of the model's {LAYERS} layers")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the disk to measure")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    groups = [tuple(map(int, text.split(":"))) for text in args.groups]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": str(torch.__version__),
        "rounds": args.rounds,
        "bytes": 3 * 4 * LAYERS * (args.width * args.width + args.width),
        "machine": describe_machine(args.dir, 1, {"torch": str(torch.__version__)}),
        "groups": [measure(world, nodes, args.width, args.rounds, args.dir) for world, nodes in groups],
    }
    print(page(result))
    if args.out:
        write_result(args.out, "replicas", result, page(result))


if __name__ == "__main__":
    main()
