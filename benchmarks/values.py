"""What values that are no tensors cost a save and a restore, beside torch.save with fsync and torch.load.

    python benchmarks/values.py --rounds 5 --out benchmarks/results/values.json

Each row is one state; tierd and torch take turns on it, round by round, in one process. `blocked` is the time inside
`Checkpointer.save`, the first save's apart; `torch_save` is `torch.save`, flushed and synced with its directory.
`restore` loads into an empty value of the same kind; `torch_load` is `torch.load(weights_only=False)`, whose pickle is
read in C; the default takes several times as long. Another row saves 10,000 small tensors: once the same ones at each
save, once with one added before each. `refused` is the time until an array of objects is refused.

Invariant: every sample is kept, as seconds of the clock and CPU seconds of this process, which a busy machine changes
less; medians are made from them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tierd
from tierd.core.errors import StateRefused

MANY, ENTRIES, TENSORS = 1_000_000, 300_000, 10_000
Sample = tuple[float, float]  # seconds of the clock, and of the CPU
RATIOS = (("blocked", "torch_save", 0.5), ("restore", "torch_load", 1.5), ("added", "fixed", 2))


def _floats(count: int) -> list[float]:
    draw = random.Random(1)
    return [draw.random() for _ in range(count)]


def _table(count: int) -> dict[str, float]:
    return {f"sample-{number}": value for number, value in enumerate(_floats(count))}


STATES: dict[str, tuple[Callable[[], Any], Any]] = {  # name -> makes the value; what it is restored into
    "list of 1,000,000 floats": (lambda: _floats(MANY), []),
    "list of 1,000,000 ints": (lambda: random.Random(1).sample(range(MANY), MANY), []),
    "tuple of 1,000,000 floats": (lambda: tuple(_floats(MANY)), ()),
    "dict of 300,000 str to float": (lambda: _table(ENTRIES), {}),
    "3 dicts of 100,000 str to float": (lambda: {f"rank {n}": _table(ENTRIES // 3) for n in range(3)}, {}),
    "1,000 dicts of 300 str to float": (lambda: {f"layer {n}": _table(300) for n in range(1000)}, {}),
    "list of 200,000 short strings": (lambda: [f"sample {number:06}" for number in range(200_000)], []),
    "50 MB of bytes": (lambda: random.Random(1).randbytes(50_000_000), b""),
}


def _timed(work: Callable[[], object]) -> Sample:
    gc.collect()
    begun, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - used


def _save_by_torch(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    fd = os.open(path.parent, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def values(home: Path, name: str, rounds: int) -> dict[str, list[Sample]]:
    """The samples of one row of `STATES`. Raises `AssertionError` where a value does not come back."""
    make, empty = STATES[name]
    value = make()
    state = {"value": value, "w": torch.zeros(1024)}
    samples: dict[str, list[Sample]] = {"first": [], "blocked": [], "torch_save": [], "restore": [], "torch_load": []}
    with tierd.Checkpointer(home / "spool", "run", to=[]) as checkpointer:
        for step in range(rounds + 1):
            saves: list[tierd.Save] = []
            blocked = _timed(lambda step=step, saves=saves: saves.append(checkpointer.save(step, state)))
            samples["blocked" if step else "first"].append(blocked)
            saves[0].wait()
            if not step:
                continue
            samples["torch_save"].append(_timed(lambda: _save_by_torch(state, home / "state.pt")))
            into = {"value": empty.copy() if hasattr(empty, "copy") else empty, "w": torch.zeros(1024)}
            samples["restore"].append(_timed(lambda into=into: checkpointer.restore(into)))
            assert into["value"] == value, name
            samples["torch_load"].append(_timed(lambda: torch.load(home / "state.pt", weights_only=False)))
    return samples


def tensors(home: Path, rounds: int) -> dict[str, list[Sample]]:
    """The samples of both rows of tensors, in turns: `fixed` and `added` are times inside `save`."""
    fixed = {f"layer.{number}": torch.full((16,), float(number)) for number in range(TENSORS)}
    growing = dict(fixed)
    samples: dict[str, list[Sample]] = {"fixed": [], "added": []}
    with (
        tierd.Checkpointer(home / "spool", "fixed", to=[]) as one,
        tierd.Checkpointer(home / "spool", "added", to=[]) as other,
    ):
        for step in range(rounds + 2):
            growing[f"added.{step}"] = torch.full((16,), float(step))
            for kind, checkpointer, state in (("fixed", one, fixed), ("added", other, growing)):
                saves: list[tierd.Save] = []
                blocked = _timed(lambda c=checkpointer, s=state, to=saves: to.append(c.save(step, {"model": s})))  # noqa: B023
                saves[0].wait()
                if step > 1:  # the first two plan and touch
                    samples[kind].append(blocked)
    return samples


def refused(home: Path, rounds: int) -> dict[str, list[Sample]]:
    """How long an array of objects takes to be refused."""
    import numpy as np

    state, samples = {"value": np.array([None] * MANY)}, []

    def save(step: int) -> None:
        try:
            checkpointer.save(step, state)
        except StateRefused:
            return
        raise AssertionError("an array of objects was taken")

    with tierd.Checkpointer(home / "spool", "run", to=[]) as checkpointer:
        for step in range(rounds):
            samples.append(_timed(lambda step=step: save(step)))
    return {"refused": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="", help="only rows whose name holds this")
    parser.add_argument("--dir", type=Path, default=Path(), help="where the spool lies; a real disk, not tmpfs")
    parser.add_argument("--out", type=Path, help="JSON with every sample")
    args = parser.parse_args()
    rows: dict[str, Callable[[Path], dict[str, list[Sample]]]] = {
        name: lambda home, name=name: values(home, name, args.rounds) for name in STATES
    }
    rows["10,000 tensors, one added per save"] = lambda home: tensors(home, args.rounds)
    rows["array of 1,000,000 objects"] = lambda home: refused(home, args.rounds)
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "rows": {},
    }
    for name, measure in rows.items():
        if args.rows not in name:
            continue
        home = Path(tempfile.mkdtemp(prefix="values-", dir=args.dir))
        try:
            samples = found["rows"][name] = measure(home)
        finally:
            shutil.rmtree(home)
        print(_line(name, samples), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def _line(name: str, samples: dict[str, list[Sample]]) -> str:
    medians = {
        kind: [statistics.median(sample[which] for sample in taken) for which in (0, 1)]
        for kind, taken in samples.items()
    }
    said = [f"{kind} {1000 * clock:.0f} ms (CPU {1000 * cpu:.0f})" for kind, (clock, cpu) in medians.items()]
    for ours, theirs, goal in RATIOS:
        if ours in medians and theirs in medians:
            clock, cpu = (a / b for a, b in zip(medians[ours], medians[theirs], strict=True))
            said.append(f"{ours}/{theirs} {clock:.2f} (CPU {cpu:.2f}, goal {goal})")
    return f"{name}: {', '.join(said)}"


if __name__ == "__main__":
    main()
