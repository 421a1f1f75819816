"""The save path of two checkouts side by side: `python benchmarks/before.py OTHER [--gigabytes 1] [--rounds 15]`.

Both run the arms of `tierd bench overhead`, each in a process of its own with its own checkout, and take turns round by
round, so that a noisy machine's drift hits both alike. Writes `results/before.json` and `results/before.md`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from tierd.bench import process_counters
from tierd.bench.interleaved_run import WorkerProcess, steps_for
from tierd.bench.report_page import markdown_table, write_result

HERE = Path(__file__).resolve().parent
ARMS = ("tierd", "tierd-overlapped")
FIGURES = {
    "blocked_s": "the call of `save`",
    "waited_s": "wait at the end of the window",
    "added_s": "added to the window's steps",
    "durable_s": "until durable, beside training",
    "quiet_blocked_s": "the call of `save`, without training",
    "quiet_durable_s": "until durable, without training",
    "cpu_s": "CPU of a quiet save",
}


def measure(checkouts: dict[str, Path], gigabytes: float, rounds: int, room: Path) -> dict[str, dict[str, list[float]]]:
    """By checkout and arm, the samples of each figure, seconds."""
    workers, found, steps = {}, {}, 0
    try:
        for arm in ARMS:
            for name, path in checkouts.items():
                os.environ["PYTHONPATH"] = str(path)  # the process is started elsewhere, so this decides
                which = f"{name} {arm}"
                (room / name).mkdir(exist_ok=True)
                workers[which] = WorkerProcess(arm, gigabytes, room / name)
                facts, _ = workers[which].request("base", steps=steps)
                steps = steps or steps_for(gigabytes, facts["step_s"])
                workers[which].request("start")
                found[which] = {}
        for number in range(rounds):
            print(f"{gigabytes:g} GB: round {number + 1} of {rounds}", flush=True)
            for which in sorted(workers, reverse=bool(number % 2)):
                samples, _ = workers[which].request("round", steps=steps)
                for figure, value in samples.items():
                    found[which].setdefault(figure, []).append(value)
                process_counters.sync_filesystem(room)
    finally:
        for worker in workers.values():
            worker.close()
    return found


def page(result: dict) -> str:
    """The table: medians, and the ratio of the medians of the rounds."""
    rows = []
    for arm in ARMS:
        for figure, label in FIGURES.items():
            old, new = (result["samples"][f"{name} {arm}"].get(figure) for name in ("before", "after"))
            if old and new:
                a, b = median(old), median(new)
                rows.append((arm, label, f"{a:.3f}", f"{b:.3f}", f"{b / a:.2f}" if abs(a) > 1e-3 else ""))
    return (
        "# The save path, before and after\n\n"
        f"`python benchmarks/before.py`: {result['gigabytes']:g} GB, {result['rounds']} rounds in turns, "
        f"{result['before']} and {result['after']}; medians in seconds. {result['machine']}.\n\n"
        f"{markdown_table(('arm', 'figure', 'before', 'after', 'after / before'), rows)}\n"
    )


def commit(path: Path) -> str:
    """A checkout's commit, short."""
    return subprocess.check_output(["git", "-C", str(path), "rev-parse", "--short=9", "HEAD"], text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    checkouts = {"before": given.other.resolve(), "after": HERE.parent}
    with tempfile.TemporaryDirectory(prefix="tierd-before-") as made:
        os.chdir(made)
        samples = measure(checkouts, given.gigabytes, given.rounds, Path(made))
        os.chdir(HERE)
    result = {
        "gigabytes": given.gigabytes,
        "rounds": given.rounds,
        **{name: commit(path) for name, path in checkouts.items()},
        "machine": f"{os.cpu_count()} cores, Linux {os.uname().release}",
        "samples": samples,
    }
    write_result(HERE / "results", "before", result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
