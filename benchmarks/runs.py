"""How long `tierd runs` takes for a whole file tier, beside `tierd ls`.

    python benchmarks/runs.py [--runs 200] [--checkpoints 50] [--ranks 8] [--ls] [--dir DIR] [--out benchmarks/results]

Each sample is a process of its own, as a person starts it: its wall time and its CPU seconds. Writes runs.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tierd.bench.growth.checkpoint_counts import make_part, put_on_tier

SAMPLES = 5


def fill(tier: Path, runs: int, checkpoints: int, ranks: int) -> None:
    for run in range(runs):
        for step in range(checkpoints):
            for rank in range(ranks):
                put_on_tier(tier, make_part(step, f"run-{run:04}", rank, ranks))


def measured(command: list[str]) -> dict[str, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "tierd", *command], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall_s": wall, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--runs", type=int, default=200)
    options.add_argument("--checkpoints", type=int, default=50)
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--ls", action="store_true", help="Measure `tierd ls`, too, once.")
    options.add_argument("--dir", type=Path, default=None)
    options.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as room:
        tier = Path(room) / "tier"
        tier.mkdir()
        fill(tier, given.runs, given.checkpoints, given.ranks)
        samples = {"runs": [measured(["runs", str(tier)]) for _ in range(SAMPLES)]}
        if given.ls:
            samples["ls"] = [measured(["ls", str(tier)])]
    result = {
        "runs": given.runs,
        "checkpoints": given.checkpoints,
        "ranks": given.ranks,
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "median": {
            name: {key: statistics.median(it[key] for it in some) for key in some[0]} for name, some in samples.items()
        },
        "samples": samples,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "runs.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["median"]))


if __name__ == "__main__":
    main()
