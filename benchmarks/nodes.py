"""What a restore on several nodes reads from a tier, and how long it takes, with and without the ranks' exchange.

    sudo python benchmarks/nodes.py --dir /nvme/bench --out benchmarks/results      # leaves nodes.json and nodes.md

Each node is a network namespace with a spool, a daemon and one rank, on one bridge. The tier is an S3 stub in a
namespace of its own, whose link lets `--tier-mbit` through for all nodes together; the nodes' links let ten times as
much through. The links are slow, because one machine computes for all nodes. The ranks hold one replicated state under
gloo; they save it, the spools are deleted, and they restore it. The two arms take turns. Bytes are those that the
tier's network device sent, with the protocol's own. Each rank compares what it restored, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import tierd
from tierd.bench.process_counters import describe_machine
from tierd.bench.report_page import machine_text, markdown_table, spread_text, write_result
from tierd.client.ranks.ranks import Ranks
from tierd.core.manifest import CHUNK_SIZE
from tierd.core.replicas.exchange_plan import ShareOffer, exchange_plans, reader_of_chunks

ROOT = Path(__file__).resolve().parents[1]
ARMS = ("exchange", "each for itself")
TENSORS = 64
STEP = 1
COMPUTED_GB = 16  # of the state that the page computes for more nodes than were played


# -- a rank, in the namespace of its node -----------------------------------------------------------------------------


def state_of(megabytes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    elements = megabytes * 10**6 // 4 // TENSORS
    return {"model": {f"layer{number}": torch.randn(elements, generator=generator) for number in range(TENSORS)}}


def run_rank(order: dict[str, Any]) -> None:
    """Save or restore once as a rank, and print the seconds that it took as JSON."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    torch.set_num_threads(1)
    rank, world = order["rank"], order["world"]
    if world > 1:
        store = distributed.TCPStore(order["host"], 29500, world, rank == 0, timedelta(seconds=120))
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    if order["arm"] != "exchange":
        Ranks.can_exchange = property(lambda ranks: False)  # type: ignore[assignment, method-assign]
    state = state_of(order["megabytes"])
    with tierd.Checkpointer(
        order["spool"], "run", to=[order["tier"]], replicated=("model",), retention=tierd.Retention(keep_last=100)
    ) as checkpointer:
        if order["phase"] == "save":
            checkpointer.restore()
            checkpointer.save(STEP, state).wait("s3", timeout=300)
            seconds = 0.0
        else:
            live = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
            if world > 1:
                distributed.barrier()
            begun_s = time.perf_counter()
            restored = checkpointer.restore(live)
            seconds = time.perf_counter() - begun_s
            assert restored is not None and restored.step == STEP
            assert all(torch.equal(live["model"][name], tensor) for name, tensor in state["model"].items())
    if world > 1:
        distributed.barrier()
    print(json.dumps({"seconds": seconds}))


# -- the nodes --------------------------------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Network:
    """A bridge, the namespace of the tier, and one for each node. They end with the context."""

    def __init__(self, nodes: int, tier_mbit: int) -> None:
        self.prefix = f"tb{os.getpid()}"
        self.nodes, self._tier_mbit = nodes, tier_mbit
        self._names = ["tier", *(f"n{number}" for number in range(nodes))]

    def name(self, place: str) -> str:
        return f"{self.prefix}-{place}"

    def address(self, place: str) -> str:
        return f"10.213.0.{self._names.index(place) + 1}"

    def __enter__(self) -> Network:
        switch = self.name("switch")
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for place in self._names:
            self._connect(place, switch, self._tier_mbit * (1 if place == "tier" else 10))
        return self

    def _connect(self, place: str, switch: str, mbit: int) -> None:
        node, port = self.name(place), f"p-{place}"
        ip("netns", "add", node)
        ip("link", "add", "eth0", "netns", node, "type", "veth", "peer", "name", port, "netns", switch)
        ip("-n", switch, "link", "set", port, "master", "br0", "up")
        ip("-n", node, "addr", "add", f"{self.address(place)}/24", "dev", "eth0")
        ip("-n", node, "link", "set", "lo", "up")
        ip("-n", node, "link", "set", "eth0", "up")
        shaping = ["rate", f"{mbit}mbit", "burst", "128k", "latency", "50ms"]
        subprocess.run(["tc", "-n", node, "qdisc", "add", "dev", "eth0", "root", "tbf", *shaping], check=True)

    def __exit__(self, *error: object) -> None:
        for place in (*self._names, "switch"):
            subprocess.run(["ip", "netns", "del", self.name(place)], check=False)

    def start(self, place: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(["ip", "netns", "exec", self.name(place), *command], text=True, **options)

    def tier_bytes(self) -> int:
        """Return how many bytes the tier's device has sent."""
        command = ["ip", "-n", self.name("tier"), "-s", "-j", "link", "show", "eth0"]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return int(answer[0]["stats64"]["tx"]["bytes"])

    def await_end(self, place: str) -> None:
        """Wait until the daemon of a node has ended, some seconds after its trainer."""
        for _ in range(600):
            command = ["ip", "netns", "pids", self.name(place)]
            if not subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip():
                return
            time.sleep(0.1)
        raise SystemExit(f"the daemon of {place} does not end")


@contextmanager
def serving(network: Network) -> Iterator[str]:
    """Run the S3 stub; yield the tier's URL."""
    host = network.address("tier")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-m", "support.s3stub", host]
    server = network.start("tier", command, env=environment, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait()


def run_phase(network: Network, base: Path, world: int, order: dict[str, Any]) -> dict[str, float]:
    """Run one phase on fresh nodes; return the slowest rank's seconds and the bytes that the tier sent."""
    before = network.tier_bytes()
    ranks = []
    for rank in range(world):
        spool = base / f"spool{rank}"
        shutil.rmtree(spool, ignore_errors=True)
        facts = {"rank": rank, "world": world, "host": network.address("n0"), "spool": str(spool)}
        command = [sys.executable, str(Path(__file__).resolve()), "--order", json.dumps(order | facts)]
        ranks.append(network.start(f"n{rank}", command, stdout=subprocess.PIPE))
    answers = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    seconds = max(json.loads(answer.strip().splitlines()[-1])["seconds"] for answer in answers)
    sent = network.tier_bytes() - before
    for rank in range(world):
        network.await_end(f"n{rank}")
    return {"seconds": seconds, "tier_bytes": sent}


def measure(network: Network, world: int, megabytes: int, rounds: int, directory: Path) -> dict[str, Any]:
    samples: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with serving(network) as tier, tempfile.TemporaryDirectory(dir=directory) as base:
        order = {"tier": tier, "megabytes": megabytes, "arm": "exchange", "phase": "save"}
        run_phase(network, Path(base), world, order)
        for number in range(rounds):
            for arm in ARMS if number % 2 else reversed(ARMS):
                order |= {"arm": arm, "phase": "restore"}
                samples[arm].append(run_phase(network, Path(base), world, order))
    return {"nodes": world, "samples": samples}


def computed_row(result: dict[str, Any], nodes: int, gigabytes: int) -> list[str]:
    """What more nodes than one machine can play would read: the plan of their ranks, and the bytes that were measured
    for each node more."""
    sent = [
        statistics.median(sample["tier_bytes"] for sample in group["samples"]["exchange"]) for group in result["groups"]
    ]
    per_node = (sent[-1] - sent[0]) / (result["groups"][-1]["nodes"] - result["groups"][0]["nodes"])
    stored = (sent[0] - per_node) / result["bytes"] * gigabytes * 1e9
    plans = exchange_plans([ShareOffer(content="same", node=rank) for rank in range(nodes)])
    chunks = [CHUNK_SIZE] * (gigabytes * 10**9 // CHUNK_SIZE)
    shares = Counter(reader_of_chunks(chunks, plans[0].readers))
    return [
        f"{nodes:,}",
        f"{len(plans[0].leaders)}",
        f"{max((len(plan.team) for plan in plans), default=0) or 1}",
        f"{max(shares.values()) * CHUNK_SIZE / 1e6:.0f} MB",
        f"{(stored + nodes * per_node) / stored:.3f}",
    ]


def page(result: dict[str, Any]) -> str:
    single = statistics.median(sample["seconds"] for arm in ARMS for sample in result["groups"][0]["samples"][arm])
    rows = []
    for group in result["groups"]:
        for arm in ARMS:
            seconds = [sample["seconds"] for sample in group["samples"][arm]]
            sent = statistics.median(sample["tier_bytes"] for sample in group["samples"][arm])
            of_one = statistics.median(seconds) / single
            copies = sent / result["bytes"]
            rows.append([str(group["nodes"]), arm, spread_text(seconds, ".2f"), f"{of_one:.2f}", f"{copies:.2f}"])
    computed = [computed_row(result, nodes, COMPUTED_GB) for nodes in (64, 1024)]
    columns = ["nodes", "arm", "seconds", "of one node", "bytes from the tier ÷ state"]
    return f"""# Restoring on several nodes

Written by `benchmarks/nodes.py`; every sample is in [nodes.json](nodes.json). A replicated state of
{result["bytes"] / 1e6:.0f} MB, a rank, a daemon and an empty spool on each node; {result["rounds"]} restores each,
arms in turns. The tier's link lets {result["tier_mbit"]} Mbit/s through for all nodes, each node's
{result["tier_mbit"] * 10} Mbit/s. {machine_text(result["machine"])}, shared with other work; {result["date"]}.

{markdown_table(columns, rows)}

*Seconds* is the slowest rank's `restore` (median and range). *Of one node* divides its median by that of one node.
Bytes are those that the tier's network device sent, divided by the state's: with headers, manifests and listings, and
after compression.

## Computed for more nodes

For a state of {COMPUTED_GB} GB and a rank a node, by the plan that the ranks make, and by the bytes that each node more
read above (manifests, listings, and what is a rank's own). *Leaders* read, and each sends all of it to its *team*.

{markdown_table(["nodes", "leaders", "ranks in a team", "a leader reads", "bytes from the tier ÷ distinct"], computed)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--megabytes", type=int, default=64, help="of the state")
    parser.add_argument("--tier-mbit", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="a directory for the spools")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.order:
        run_rank(args.order)
        return
    with Network(max(args.nodes), args.tier_mbit) as network:
        groups = [measure(network, nodes, args.megabytes, args.rounds, args.dir) for nodes in args.nodes]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "rounds": args.rounds,
        "tier_mbit": args.tier_mbit,
        "bytes": args.megabytes * 10**6 // 4 // TENSORS * TENSORS * 4,
        "machine": describe_machine(args.dir, 1, {"torch": str(torch.__version__)}),
        "groups": groups,
    }
    print(page(result))
    if args.out:
        write_result(args.out, "nodes", result, page(result))


if __name__ == "__main__":
    main()
