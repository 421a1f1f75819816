"""The save path of two checkouts side by side: `python benchmarks/before.py OTHER [--gigabytes 1] [--rounds 15]`.

Both run the arms of `tierd bench overhead`, each in a process of its own with its own checkout, and take turns round by
round, so that a noisy machine's drift hits both alike. Writes `results/before.json` and `results/before.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from tierd.bench import process_counters
from tierd.bench.interleaved_run import WorkerProcess, steps_for

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
    lanes, found, steps = {}, {}, 0
    try:
        for arm in ARMS:
            for name, path in checkouts.items():
                os.environ["PYTHONPATH"] = str(path)  # the process is started elsewhere, so this decides
                which = f"{name} {arm}"
                (room / name).mkdir(exist_ok=True)
                lanes[which] = WorkerProcess(arm, gigabytes, room / name)
                facts, _ = lanes[which].request("base", steps=steps)
                steps = steps or steps_for(gigabytes, facts["step_s"])
                lanes[which].request("start")
                found[which] = {}
        for number in range(rounds):
            print(f"{gigabytes:g} GB: round {number + 1} of {rounds}", flush=True)
            for which in sorted(lanes, reverse=bool(number % 2)):
                samples, _ = lanes[which].request("round", steps=steps)
                for figure, value in samples.items():
                    found[which].setdefault(figure, []).append(value)
                process_counters.sync_filesystem(room)
    finally:
        for lane in lanes.values():
            lane.close()
    return found


def page(result: dict) -> str:
    """The table: medians, and the ratio of the medians of the rounds."""
    lines = [
        "# The save path, before and after",
        "",
        f"`python benchmarks/before.py`: {result['gigabytes']:g} GB, {result['rounds']} rounds in turns, "
        f"{result['before']} and {result['after']}; medians in seconds. {result['machine']}.",
        "",
        "| arm | figure | before | after | after / before |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm in ARMS:
        for figure, what in FIGURES.items():
            old, new = (result["samples"][f"{name} {arm}"].get(figure) for name in ("before", "after"))
            if old and new:
                a, b = median(old), median(new)
                ratio = f"{b / a:.2f}" if abs(a) > 1e-3 else ""
                lines.append(f"| {arm} | {what} | {a:.3f} | {b:.3f} | {ratio} |")
    return "\n".join(lines) + "\n"


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
    (HERE / "results" / "before.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "results" / "before.md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
