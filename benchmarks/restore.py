"""Restores beside an unverified copy and `torch.load`: `python benchmarks/restore.py [--before TREE] [--rounds 5]`.

A tier in a directory, and the tests' stub of S3 on loopback; fp32 and bf16; and a restart on the node whose spool has
the checkpoint. Every turn is a forked process of its own, the page cache is dropped before it, the arms take turns
round by round, and each compares the state with what was saved. With `--write`, the samples go into
`results/restore.json`, and the table for `results/restore.md` is printed.

The memory that a restore touches beyond the state is measured in turns of their own, without the arena that tierd
touches for the next save, because that is no memory of the restore.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import torch

import tierd
from tierd.bench import process_counters
from tierd.bench.growth import cold_restores
from tierd.bench.growth.growth_result import Clock, Figures
from tierd.bench.report_page import markdown_table, write_result
from tierd.client.saving.save_pipeline import SavePipeline

HERE = Path(__file__).resolve().parent
LOCAL = "local"  # the place of a restart on the same node
State = dict[str, torch.Tensor]


def load_straight(kind: str, url: str, work: Path) -> tuple[State, Figures]:
    """`torch.load` straight from the tier's directory, and copy into the state."""
    state, clock = cold_restores._blank(kind), Clock()
    for name, tensor in torch.load(work / cold_restores.PLAIN, weights_only=True).items():
        state[name].copy_(tensor)
    return state, clock.read()


def restart(kind: str, url: str, work: Path) -> tuple[State, Figures]:
    """Restore from the spool, with a daemon that has listed its tier, as after a crash."""
    state = cold_restores._blank(kind)
    with tierd.Checkpointer(work / "spool", run=cold_restores.RUN, to=[]) as checkpointer:
        clock = Clock()
        restored = checkpointer.restore(state)
        figures = clock.read()
    assert restored is not None and restored.tier == "local"
    return state, figures


Turn = Callable[[str, str, Path], tuple[State, Figures]]
TIER_ARMS: dict[str, Turn] = {
    "unverified": cold_restores.restore_unverified,
    "straight": load_straight,
    "tierd": cold_restores.restore_verified,
}
LOCAL_ARMS: dict[str, Turn] = {"straight": load_straight, "tierd": restart}


def put(kind: str, url: str, work: Path) -> None:
    """Put the checkpoint where it will be restored from, and a file of `torch.save` beside it."""
    if url != LOCAL:
        cold_restores.put_state(kind, url, work)
        return
    state = cold_restores.make_state(kind)
    (work / cold_restores.DIGESTS).write_text(json.dumps(cold_restores.tensor_digests(state)))
    with tierd.Checkpointer(work / "spool", run=cold_restores.RUN) as checkpointer:
        checkpointer.save(1, state).wait()
    (work / cold_restores.PLAIN).parent.mkdir()
    torch.save(state, work / cold_restores.PLAIN)


def turn(arm: str, kind: str, url: str, work: Path) -> None:
    """Do one turn in this process, and print what it took."""
    arms = LOCAL_ARMS if url == LOCAL else TIER_ARMS
    call = arms["tierd" if arm == "memory" else arm]
    if arm == "memory":
        SavePipeline.reserve = lambda *_: None  # type: ignore[method-assign]
    torch.full((16,), 1.0).copy_(torch.zeros(16))  # starts torch's threads
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    state, figures = call(kind, url, work)
    figures["extra_bytes"] = resident_bytes("VmHWM") - before - sum(tensor.nbytes for tensor in state.values())
    if cold_restores.tensor_digests(state) != json.loads((work / cold_restores.DIGESTS).read_text()):
        raise SystemExit("what was restored is not what was saved")
    print(json.dumps(figures))


def resident_bytes(name: str) -> int:
    """This process's memory by one line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def measure(kind: str, url: str, trees: dict[str, Path], rounds: int, room: Path, gigabytes: float) -> dict[str, list]:
    """Every arm's turns, by the arm's name and the tree's."""
    with tempfile.TemporaryDirectory(dir=room) as directory:
        work = Path(directory)
        place = url or f"file://{work}/tier"
        if not url:
            (work / "tier").mkdir()

        with ExitStack() as stack:
            workers = {name: stack.enter_context(worker(tree, gigabytes)) for name, tree in trees.items()}

            def run(name: str, arm: str) -> Figures:
                given, answers = workers[name].stdin, workers[name].stdout
                assert given is not None and answers is not None
                print(arm, kind, place, work, file=given, flush=True)
                figures: Figures = json.loads(answers.readline())
                return figures

            run("now", "put")
            return take_turns(run, kind, url, list(trees), rounds, work)


def take_turns(
    run: Callable[[str, str], Figures], kind: str, url: str, trees: list[str], rounds: int, work: Path
) -> dict[str, list[Figures]]:
    """Call `run` with a tree's name and an arm, in turns."""
    arms = LOCAL_ARMS if url == LOCAL else TIER_ARMS
    turns = [(arm, name) for arm in arms for name in trees if arm == "tierd" or name == "now"]
    turns = [(arm, name) for arm, name in turns if not (arm == "straight" and url.startswith("s3"))]
    samples: dict[str, list[Figures]] = {f"{arm}, {name}" if arm == "tierd" else arm: [] for arm, name in turns}
    for number in range(rounds):
        for arm, name in reversed(turns) if number % 2 else turns:
            process_counters.drop_cache(work)
            label = f"{arm}, {name}" if arm == "tierd" else arm
            samples[label].append(run(name, arm))
            print(f"{kind} {url or 'file'}: {label}: {samples[label][-1]}", flush=True)
    samples["memory, now"] = [run("now", "memory")]
    return samples


@contextmanager
def worker(tree: Path, gigabytes: float) -> Iterator[subprocess.Popen[str]]:
    """A process with a checkout's tierd, which forks for each line that it reads."""
    command = [sys.executable, __file__, "--gigabytes", str(gigabytes), "--serve"]
    environ = os.environ | {"PYTHONPATH": str(tree)}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def serve() -> None:
    """Do each turn in a forked process, because importing torch takes longer than a turn."""
    for line in sys.stdin:
        arm, kind, url, work = line.split()
        sys.stdout.flush()
        child = os.fork()
        if not child:
            if arm == "put":
                put(kind, url, Path(work))
                print("{}", flush=True)
            else:
                turn(arm, kind, url, Path(work))
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"a turn failed: {line}")


def rows(cell: str, samples: dict[str, list]) -> list[list[str]]:
    """A line of the table for each arm: medians, and how the others' seconds compare with it."""
    lines = []
    seconds = {arm: [figures["wall_s"] for figures in turns] for arm, turns in samples.items()}
    for arm, turns in samples.items():
        ratios = [
            f"{median(seconds[other]) / median(seconds[arm]):.2f}" if other in seconds else ""
            for other in ("unverified", "straight", "tierd, before")
        ]
        cpus = [figures["cpu_s"] for figures in turns]
        extra = samples.get(arm.replace("tierd", "memory"), turns)[0]["extra_bytes"]
        texts = (", ".join(f"{second:.2f}" for second in values) for values in (seconds[arm], cpus))
        lines.append([cell, arm, *texts, f"{extra / 2**20:.0f}", *ratios])
    return [line for line in lines if not line[1].startswith("memory")]


HEADINGS = ["from", "arm", "seconds", "CPU s", "MiB beyond the state", "unverified ÷", "torch.load ÷", "before ÷"]
RESULTS = HERE / "results" / "restore.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--cells", nargs="*", default=["file fp32", "file bf16", "s3 fp32", "s3 bf16", "local fp32"])
    parser.add_argument("--room", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--write", action="store_true", help="write the results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cold_restores.GIGABYTES = options.gigabytes
    if options.serve:
        serve()
        return
    trees = {"now": HERE.parent} | ({"before": options.before} if options.before else {})
    result: dict[str, dict[str, list[Figures]]] = {}
    for cell in options.cells:
        place, kind = cell.split()
        server, url = None, LOCAL if place == "local" else ""
        if place == "s3":
            command = [sys.executable, "-m", "support.s3stub"]
            environ = os.environ | {"PYTHONPATH": f"{HERE.parent / 'tests'}:{HERE.parent}"}
            server = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
            url = server.stdout.readline().strip()
            os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_EC2_METADATA_DISABLED="true")
        try:
            result[cell] = measure(kind, url, trees, options.rounds, options.room, options.gigabytes)
            if options.write:
                write_cell(f"{options.gigabytes:g} GB, {cell}", result[cell])
        finally:
            if server:
                server.terminate()
                server.wait()
    print(markdown_table(HEADINGS, [line for cell, samples in result.items() for line in rows(cell, samples)]))


def write_cell(name: str, samples: dict[str, list[Figures]]) -> None:
    """Write a cell's samples beside those of other cells and runs."""
    kept = json.loads(RESULTS.read_text()).get("cells", {}) if RESULTS.exists() else {}
    write_result(RESULTS.parent, RESULTS.stem, {"cells": kept | {name: samples}})


if __name__ == "__main__":
    main()
