"""Does a node that saves for long stay as it was? One trainer, one daemon, two tiers, a save every two seconds.

    python -m benchmarks.soak --minutes 30         writes benchmarks/results/soak.json

Retention keeps three checkpoints in each place. After the last save, each place is listed with plain file-system calls,
not with tierd, until it holds exactly the last three: `settled_s` says after how many seconds. While the run lasts, the
memory (proportional set size) and the open descriptors of trainer and daemon are sampled; they count as flat if the
median of the last third is at most a tenth above the median of the middle third. The first third is warm-up: arenas,
caches and thread pools reach their size there.

Half of the state never changes, so that checkpoints share chunks and every prune has to spare some.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import tierd
from tierd.bench.process_counters import pss_bytes
from tierd.bench.report_page import write_result

KEEP = 3
TIERS = ("near", "far")
RUN = "soak"
SETTLED = 60.0  # seconds after the last save that the places are watched; the goal is 10
SLACK = 1.1  # last third / middle third: above this something grows


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=30.0, help="at least 1, for enough samples")
    options.add_argument("--every", type=float, default=2.0, metavar="SECONDS")
    options.add_argument("--megabytes", type=float, default=8.0, help="size of the state")
    options.add_argument("--dir", type=Path, default=None, help="where the places lie; default: a temporary directory")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.dir, prefix="soak-") as room:
        found = soak(Path(room), asked.minutes * 60, asked.every, round(asked.megabytes * 1e6))
    write_result(asked.out.parent, asked.out.stem, found)
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}, indent=1))
    return 0 if found["ok"] else 1


def soak(room: Path, seconds: float, every: float, size: int) -> dict[str, Any]:
    """Save for so long, let the daemon come to rest, and judge."""
    spool = room / "spool"
    daemon = _daemon(room, spool)
    try:
        samples, saved, ended = _train(spool, daemon.pid, seconds, every, size)
        settled, held = _settle(_places(room, spool), saved[-KEEP:], ended)
        samples.append(_sample(daemon.pid, len(saved)))
    finally:
        daemon.terminate()
        daemon.wait(120)
    growth = {name: _growth([one[name] for one in samples]) for name in samples[0] if name not in ("at_s", "saves")}
    return {
        "saves": len(saved),
        "every_s": every,
        "state_bytes": size,
        "keep_last": KEEP,
        "settled_s": settled,
        "held": held,
        "growth": growth,
        "ok": settled is not None and settled <= 10 and all(ratio <= SLACK for ratio in growth.values()),
        "samples": samples,
    }


def _daemon(room: Path, spool: Path) -> subprocess.Popen[bytes]:
    tiers = ""
    for name in TIERS:
        (room / name).mkdir()
        tiers += f'[[tier]]\nname = "{name}"\nurl = "file://{room / name}"\nretention = {{ keep_last = {KEEP} }}\n'
    config = room / "tierd.toml"
    config.write_text(f'spool = "{spool}"\nretention = {{ keep_last = {KEEP} }}\n{tiers}')
    command = [sys.executable, "-m", "tierd", "run", "--config", str(config)]
    with (room / "daemon.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _train(
    spool: Path, daemon: int, seconds: float, every: float, size: int
) -> tuple[list[dict[str, float]], list[int], float]:
    """Samples, the steps saved, and the monotonic time of the last save."""
    samples: list[dict[str, float]] = []
    saved: list[int] = []
    half = size // 8
    frozen, trained = torch.randn(half), torch.randn(half)
    begun = last = time.monotonic()
    with tierd.Checkpointer(spool, run=RUN) as checkpointer:
        while time.monotonic() - begun < seconds:
            step = len(saved) + 1
            trained.add_(torch.randn(half), alpha=1e-3)
            checkpointer.save(step, {"frozen": frozen, "trained": trained, "step": step})
            saved.append(step)
            last = time.monotonic()
            if step % max(1, round(10 / every)) == 0:
                samples.append(_sample(daemon, step) | {"at_s": round(time.monotonic() - begun, 1)})
            time.sleep(max(0.0, begun + step * every - time.monotonic()))
    return samples, saved, last


def _sample(daemon: int, saves: int) -> dict[str, float]:
    found: dict[str, float] = {"saves": saves}
    for name, pid in (("trainer", os.getpid()), ("daemon", daemon)):
        # Of one process and not of its tree, because the trainer is the daemon's parent here.
        found[f"{name}_bytes"] = pss_bytes(pid)
        found[f"{name}_descriptors"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return found


def _places(room: Path, spool: Path) -> dict[str, Path]:
    return {"local": spool / RUN, **{name: room / name / RUN / "manifests" for name in TIERS}}


def _settle(places: dict[str, Path], last: list[int], begun: float) -> tuple[float | None, dict[str, list[int]]]:
    """Seconds since `begun` until each place holds exactly the steps in `last`, and the steps that each then holds."""
    while True:
        held = {name: _steps(path) for name, path in places.items()}
        past = time.monotonic() - begun
        if all(steps == last for steps in held.values()):
            return round(past, 2), held
        if past > SETTLED:
            return None, held
        time.sleep(0.1)


def _steps(directory: Path) -> list[int]:
    return sorted(int(path.name.partition(".")[0]) for path in directory.iterdir() if path.name[:12].isdigit())


def _growth(series: list[float]) -> float:
    third = len(series) // 3
    middle, last = statistics.median(series[third : 2 * third]), statistics.median(series[2 * third :])
    return round(last / middle, 3)


if __name__ == "__main__":
    raise SystemExit(main())
