"""How long `tierd runs` takes for a whole file tier, beside `tierd ls`.

    python benchmarks/runs.py [--runs 200] [--checkpoints 50] [--ranks 8] [--ls] [--dir DIR] [--out benchmarks/results]

Each sample is a process of its own, as a person starts it: its wall time and its CPU seconds. Writes runs.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

from tierd.bench.growth.checkpoint_counts import put_runs_on_tier
from tierd.bench.growth.growth_result import Figures, median_figure, run_tierd, timed
from tierd.bench.report_page import write_result

SAMPLES = 5


def measured(command: list[str]) -> Figures:
    """What a command takes, as a process of its own."""
    return timed(lambda: run_tierd(*command))[1]


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
        put_runs_on_tier(tier, given.runs, given.checkpoints, given.ranks)
        samples = {"runs": [measured(["runs", str(tier)]) for _ in range(SAMPLES)]}
        if given.ls:
            samples["ls"] = [measured(["ls", str(tier)])]
    result = {
        "runs": given.runs,
        "checkpoints": given.checkpoints,
        "ranks": given.ranks,
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "median": {
            name: {figure: median_figure(samples, name, figure) for figure in ("wall_s", "cpu_s")} for name in samples
        },
        "samples": samples,
    }
    write_result(given.out, "runs", result)
    print(json.dumps(result["median"]))


if __name__ == "__main__":
    main()
