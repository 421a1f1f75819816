"""What it costs to keep another program's checkpoints, beside `cp`; what `prepare` reads; how long an export takes.

    python -m benchmarks.watched --dir DIR         writes benchmarks/results/watched.json

DIR is on the file system to measure, with room for five times the largest state.

- **take**: a program puts a checkpoint of `--gb` (`torch.save`, float32) into a directory at once. The time until it is
  on a tier of the same file system, verified, divided by that of `cp` and `sync` to the same place; in turns. The ten
  seconds without a change for which a watch waits are not part of it.
- **training beside it**: steps a second of a training process with nothing beside it, beside `cp`, and beside the
  watch, for as long as either takes; in turns.
- **prepare**: the bytes that its process read, as the kernel counts them, divided by those of the checkpoints.
- **export**: the time of an export, with a cold page cache, divided by that of reading the tier's files with `cat`; in
  turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import tierd

RESULT = Path(__file__).parent / "results" / "watched.json"
TIERD = [sys.executable, "-c", "import sys; from tierd.cli import run; sys.exit(run())"]
# A watch that takes what it sees at once, because the wait is not what is measured.
WATCH = """
import functools, sys
from tierd.cli import run
from tierd.daemon.intake import intake, unit_watch
intake._LOOK_S = 0.05
intake.UnitWatch = functools.partial(unit_watch.UnitWatch, settle_s=0.0)
sys.exit(run())
"""
TRAIN = """
import sys, time, torch
torch.set_num_threads(1)
layer = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(layer.parameters())
data = torch.randn(128, 1024)
print("ready", flush=True)
while True:
    layer(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(time.monotonic(), flush=True)
"""


def cold() -> None:
    """Write everything back, and drop the page cache where that is allowed (root)."""
    os.sync()
    caches = Path("/proc/sys/vm/drop_caches")
    if os.access(caches, os.W_OK):
        caches.write_text("1")


def model(gigabytes: float, seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    count = max(1, round(gigabytes * 16))
    rows = round(gigabytes * 1e9 / count / 4 / 1024)
    return {f"layer{number}.weight": torch.randn(rows, 1024, generator=noise) * 0.02 for number in range(count)}


def timed(command: list[str]) -> float:
    """The seconds of a command that begins with a cold page cache."""
    cold()
    begin = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin


# -- take -------------------------------------------------------------------------------------------------------------


class Watching:
    """A watch of `outputs` in a directory, and what it tells."""

    def __init__(self, room: Path) -> None:
        self.outputs, self.tier = room / "outputs", room / "tier"
        self.outputs.mkdir()
        self.tier.mkdir()
        command = ["watch", str(self.outputs), "--run", "watched", "--to", f"file://{self.tier}", "--json"]
        command = [sys.executable, "-c", WATCH, *command, "--keep-last", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def until_durable(self, step: int) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["what"] == "durable" and event["step"] == step:
                return
        raise RuntimeError("the watch has ended")

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)


def copied(source: Path, target: Path) -> None:
    subprocess.run(["cp", str(source), str(target)], check=True)
    subprocess.run(["sync", str(target)], check=True)


class Training:
    """A training process, and the times of its steps on the monotonic clock."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", TRAIN], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def end(self) -> list[float]:
        self._process.terminate()
        said, _ = self._process.communicate(timeout=60)
        return [float(line) for line in re.findall(r"^[0-9.]+$", said, re.MULTILINE)]


@contextmanager
def watching(room: Path) -> Iterator[Watching]:
    made = Watching(room)
    try:
        yield made
    finally:
        made.end()


def take(room: Path, gigabytes: float, rounds: int) -> dict[str, object]:
    times: dict[str, list[float]] = {"cp": [], "tierd": []}
    rates: dict[str, list[float]] = {"none": [], "cp": [], "tierd": []}
    with watching(room) as watch:
        for step in range(1, 2 * rounds + 1):
            trains = step > rounds  # the second half has a training beside it
            made, here = room / "made.pt", watch.outputs / f"model_{step}.pt"
            torch.save(model(gigabytes, step), made)
            os.sync()
            training = Training() if trains else None
            time.sleep(3 if trains else 0)
            spans = {"none": (time.monotonic() - 2, time.monotonic())}
            for arm in ("cp", "tierd") if step % 2 else ("tierd", "cp"):
                begin = time.monotonic()
                if arm == "cp":
                    copied(made, room / "copy.pt")
                else:
                    os.link(made, here)
                    watch.until_durable(step)
                spans[arm] = (begin, time.monotonic())
                os.sync()
            if training:
                steps = training.end()
                for arm, (begin, end) in spans.items():
                    rates[arm].append(sum(begin <= at < end for at in steps) / (end - begin))
            else:
                for arm in times:
                    times[arm].append(spans[arm][1] - spans[arm][0])
            (room / "copy.pt").unlink()
            made.unlink()
            here.unlink()
    ratios = [ours / theirs for ours, theirs in zip(times["tierd"], times["cp"], strict=True)]
    lost = {
        arm: statistics.median(1 - there / none for there, none in zip(rates[arm], rates["none"], strict=True))
        for arm in ("cp", "tierd")
    }
    return {"seconds": times, "ratio": statistics.median(ratios), "steps_per_s": rates, "lost": lost}


# -- prepare ----------------------------------------------------------------------------------------------------------


def read_bytes(command: list[str]) -> tuple[int, float]:
    """The bytes that a process and its threads asked to read, and the seconds that it took."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    waited = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    took = time.monotonic() - begin
    counted = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines())
    assert process.wait() == 0 and waited is not None
    return int(counted["rchar"]), took


def prepare(room: Path, gigabytes: float, units: int) -> dict[str, object]:
    outputs, tier = room / "outputs", room / "tier"
    outputs.mkdir()
    tier.mkdir()
    for step in range(1, units + 1):
        torch.save(model(gigabytes, step), outputs / f"model_{step}.pt")
    size = sum(path.stat().st_size for path in outputs.iterdir())
    common = ["--run", "watched", "--to", f"file://{tier}"]
    nothing, _ = read_bytes([*TIERD, "prepare", str(empty(room)), *common])
    watched = [*TIERD, "watch", str(outputs), *common, "--keep-last", str(units), "--until-idle"]
    subprocess.run(watched, check=True, stdout=subprocess.DEVNULL)
    cold()
    read, took = read_bytes([*TIERD, "prepare", str(outputs), *common])
    plain = timed(["cat", *map(str, outputs.iterdir())])
    return {
        "units": units,
        "bytes": size,
        "read_bytes": read,
        "read_bytes_without_units": nothing,
        "ratio": (read - nothing) / size,
        "seconds": took,
        "cat_s": plain,
    }


def empty(room: Path) -> Path:
    made = room / "empty"
    made.mkdir(exist_ok=True)
    return made


# -- export -----------------------------------------------------------------------------------------------------------


def export(room: Path, gigabytes: float, rounds: int, out: Path) -> dict[str, object]:
    url = f"file://{room / 'tier'}"
    (room / "tier").mkdir()
    with tierd.Checkpointer(room / "spool", "export", to=[url]) as ckpt:
        ckpt.save(1, {"model": model(gigabytes, 1)})
        ckpt.close(wait="file", timeout=1800)
    shutil.rmtree(room / "spool")
    files = [str(path) for path in (room / "tier" / "export").rglob("*") if path.is_file()]
    times: dict[str, list[float]] = {"cat": [], "export": []}
    command = [*TIERD, "export", url, "--run", "export", "--to", str(out / "exported"), "--format", "safetensors"]
    for _ in range(rounds):
        times["cat"].append(timed(["cat", *files]))
        times["export"].append(timed(command))
        shutil.rmtree(out / "exported")
    ratios = [ours / theirs for ours, theirs in zip(times["export"], times["cat"], strict=True)]
    stored = sum(Path(path).stat().st_size for path in files)
    return {"bytes": stored, "seconds": times, "ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--units", type=int, default=10)
    parser.add_argument("--export-gb", type=float, default=8.0)
    parser.add_argument("--export-to", type=Path, help="where an export is written; --dir if not given")
    parser.add_argument("--only", choices=["take", "prepare", "export"])
    given = parser.parse_args()
    result = json.loads(RESULT.read_text()) if given.only and RESULT.exists() else {}
    parts: dict[str, Callable[[Path], dict[str, object]]] = {
        "take": lambda room: take(room, given.gb, given.rounds),
        "prepare": lambda room: prepare(room, given.gb, given.units),
        "export": lambda room: export(room, given.export_gb, min(3, given.rounds), given.export_to or room),
    }
    for name, part in parts.items():
        if given.only in (None, name):
            room = given.dir / f"watched-{name}"
            room.mkdir()
            result[name] = part(room)
            shutil.rmtree(room)
            print(name, json.dumps(result[name]))
            RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
