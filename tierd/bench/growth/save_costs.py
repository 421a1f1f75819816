"""What saves cost training: values that are no tensors, many tensors, overlapped saves, and every library at two sizes.

Libraries take turns on each state, round by round, in one process. `save` is the time inside `Checkpointer.save`,
`step` the time that the optimizer's next step waited for the copy; `least` is what no call can leave out. `torch.load`
is called with `weights_only=False`, because that pickle is read in C, and the default takes several times as long. Busy
threads end before the next step, because torch gives up the lock for each operation, and a step of training beside
them would take minutes.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import tierd
from tierd.bench import interleaved_run
from tierd.bench.growth.growth_result import Figures, Rows, Samples, timed
from tierd.bench.training import Training
from tierd.core.errors import StateRefused
from tierd.spool.file_io import sync_directory

ROUNDS = 5
ONCE_S = 20.0
MANY, ENTRIES, TENSORS = 1_000_000, 300_000, 10_000


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _floats(count: int) -> list[float]:
    return torch.rand(count, dtype=torch.float64, generator=_draw()).tolist()


def _table(count: int) -> dict[str, float]:
    return {f"sample-{number}": value for number, value in enumerate(_floats(count))}


def _noise(size: int) -> bytes:
    return bytes(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=_draw()).numpy())


STATES: dict[str, tuple[Callable[[], Any], Any]] = {  # name -> makes the value; what it is restored into
    "list of 1,000,000 floats": (lambda: _floats(MANY), []),
    "list of 1,000,000 ints": (lambda: torch.randperm(MANY, generator=_draw()).tolist(), []),
    "tuple of 1,000,000 floats": (lambda: tuple(_floats(MANY)), ()),
    "dict of 300,000 str to float": (lambda: _table(ENTRIES), {}),
    "3 dicts of 100,000 str to float": (lambda: {f"rank {n}": _table(ENTRIES // 3) for n in range(3)}, {}),
    "1,000 dicts of 300 str to float": (lambda: {f"layer {n}": _table(300) for n in range(1000)}, {}),
    "list of 200,000 short strings": (lambda: [f"sample {number:06}" for number in range(200_000)], []),
    "50 MB of bytes": (lambda: _noise(50_000_000), b""),
}


def value_samples(home: Path, name: str) -> Samples:
    """The samples of one row of `STATES`. Raises `AssertionError` where a value does not come back."""
    make, empty = STATES[name]
    value = make()
    state = {"value": value, "w": torch.zeros(1024)}
    arms = ("first save", "save", "torch.save+fsync", "dcp.save", "restore", "torch.load", "dcp.load")
    samples: Samples = {arm: [] for arm in arms}
    with tierd.Checkpointer(home / "spool", "run", to=[]) as checkpointer:
        for step in range(ROUNDS + 1):
            save, blocked = timed(partial(checkpointer.save, step, state))
            samples["save" if step else "first save"].append(blocked)
            save.wait()
            if not step:
                continue
            into = {"value": empty.copy() if hasattr(empty, "copy") else empty, "w": torch.zeros(1024)}
            calls: dict[str, Callable[[], object]] = {
                "torch.save+fsync": partial(save_by_torch, state, home / "state.pt"),
                "dcp.save": partial(save_by_dcp, state, home / "dcp"),
                "restore": partial(checkpointer.restore, into),
                "torch.load": partial(torch.load, home / "state.pt", weights_only=False),
                "dcp.load": partial(load, dict(state), checkpoint_id=home / "dcp", no_dist=True),
            }
            for arm, call in calls.items():
                if not samples[arm] or samples[arm][-1]["wall_s"] < ONCE_S:
                    samples[arm].append(timed(call)[1])
            assert into["value"] == value, name
    return samples


def save_by_torch(state: dict[str, Any], path: Path) -> None:
    """`torch.save`, with fsync of the file and its directory."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def save_by_dcp(state: dict[str, Any], path: Path) -> None:
    """`dcp.save` into a new directory."""
    shutil.rmtree(path, ignore_errors=True)
    dcp_save(state, checkpoint_id=path, no_dist=True)


def many_tensors(home: Path) -> Samples:
    """Saves of many small tensors: the same ones at each save, and with one more at each; in turns."""
    fixed = {f"layer.{number}": torch.full((16,), float(number)) for number in range(TENSORS)}
    growing = dict(fixed)
    samples: Samples = {arm: [] for arm in ("fixed", "added", "least", "torch.save+fsync", "dcp.save")}
    with (
        tierd.Checkpointer(home / "spool", "fixed", to=[]) as fixed_checkpointer,
        tierd.Checkpointer(home / "spool", "added", to=[]) as growing_checkpointer,
    ):
        for step in range(ROUNDS + 2):
            growing[f"added.{step}"] = torch.full((16,), float(step))
            for kind, checkpointer, state in (
                ("fixed", fixed_checkpointer, fixed),
                ("added", growing_checkpointer, growing),
            ):
                save, blocked = timed(partial(checkpointer.save, step, {"model": state}))
                save.wait()
                if step > 1:  # the first two plan and touch
                    samples[kind].append(blocked)
            if step > 1:
                by_torch = partial(save_by_torch, {"model": growing}, home / "state.pt")
                remade = timed(partial(_remake, growing))[1]
                samples["least"].append({name: value + remade[name] for name, value in samples["fixed"][-1].items()})
                samples["torch.save+fsync"].append(timed(by_torch)[1])
                samples["dcp.save"].append(timed(partial(save_by_dcp, {"model": growing}, home / "dcp"))[1])
    return samples


def _remake(state: dict[str, torch.Tensor]) -> None:
    """Make a file's header and views anew, because one more name moves all that follow: no save can leave that out."""
    ends = [0, *accumulate(tensor.nbytes for tensor in state.values())]
    places = dict(zip(state, pairwise(ends), strict=True))
    entries = {name: {"dtype": "F32", "shape": [16], "data_offsets": place} for name, place in places.items()}
    msgspec.json.encode(entries)
    memory = torch.empty(ends[-1], dtype=torch.uint8)
    for place in places.values():
        memory[slice(*place)]


def refused_values(home: Path) -> Samples:
    """How long an array of objects takes to be refused."""
    import numpy as np

    state = {"value": np.array([None] * MANY)}

    def save(step: int) -> None:
        try:
            checkpointer.save(step, state)
        except StateRefused:
            return
        raise AssertionError("an array of objects was taken")

    with tierd.Checkpointer(home / "spool", "run", to=[]) as checkpointer:
        return {"refused": [timed(partial(save, step))[1] for step in range(ROUNDS)]}


def value_parts() -> dict[str, Rows]:
    """This module's parts of the page."""
    return {
        "values": [
            *((name, partial(value_samples, name=name)) for name in STATES),
            ("array of 1,000,000 objects", refused_values),
        ],
        "tensors": [("10,000 tensors of 64 bytes", many_tensors)],
    }


GIGABYTES, OVERLAPPED_ROUNDS, THREADS, LIST = 0.25, 5, 4, 200_000


def overlapped_saves(home: Path, *, threads: int = 0, listed: int = 0) -> Samples:
    """Saves of an attached optimizer, with so many threads that hold the interpreter's lock, and so long a list."""
    training = Training(GIGABYTES)
    values = [number / 7 for number in range(listed)]
    samples: Samples = {"call": [], "step": [], "least": []}
    with tierd.Checkpointer(home / "spool", "run", to=[]) as checkpointer:
        checkpointer.attach(training.optimizer)
        training.step()
        for number in range(OVERLAPPED_ROUNDS + 2):
            state: dict[str, Any] = {**training.state, **({"losses": values} if listed else {})}
            with _busy(threads) if threads else nullcontext():
                save, call = timed(partial(checkpointer.save, training.number, state))
                floor = timed(lambda: (training.model.state_dict(), training.optimizer.state_dict()))[1]
            waited = _time_step(training, checkpointer)
            save.wait()
            if number > 1:  # the first two plan and touch
                samples["call"].append(call)
                samples["step"].append(waited)
                samples["least"].append(floor)
    return samples


def _time_step(training: Training, checkpointer: tierd.Checkpointer) -> Figures:
    before = checkpointer.stats.step_waited_s
    training.step()
    return {"wall_s": checkpointer.stats.step_waited_s - before}


@contextmanager
def _busy(threads: int) -> Iterator[None]:
    """Run threads that compute in Python, as a data loader's or a logger's may."""
    end = threading.Event()

    def compute() -> None:
        while not end.is_set():
            sum(range(10_000))

    started = [threading.Thread(target=compute) for _ in range(threads)]
    for thread in started:
        thread.start()
    time.sleep(0.05)
    try:
        yield
    finally:
        end.set()
        for thread in started:
            thread.join()


def overlapped_parts() -> dict[str, Rows]:
    """This module's part of the page."""
    return {
        "attached": [
            ("alone", overlapped_saves),
            (f"{THREADS} threads compute in Python", partial(overlapped_saves, threads=THREADS)),
            (f"a list of {LIST:,} floats beside it", partial(overlapped_saves, listed=LIST)),
        ]
    }


SMALL_GB, STEPS_PER_SAVE = 0.043, 10
_ROUNDS = {SMALL_GB: 8, 0.25: 5}
_ARMS = {
    SMALL_GB: ("none", "torch_checkpointing", "dcp.async-reused", "tierd-overlapped", "tierd-overlapped+daemon"),
    0.25: ("torch.save+fsync", "dcp.save", "torch_checkpointing", "tierd", "tierd+daemon"),
}


def library_samples(home: Path, gigabytes: float, say: Callable[[str], None]) -> Samples:
    """Every arm's samples, and the machine's limits as the arm `ceiling`."""
    steps_per_save = STEPS_PER_SAVE if gigabytes == SMALL_GB else None
    size_result = interleaved_run.measure_size(
        gigabytes, _ARMS[gigabytes], _ROUNDS[gigabytes], steps_per_save, home, say
    )
    samples = {name: _by_round(arm.samples) for name, arm in size_result.measured_methods.items()}
    for figures in (figures for arm in samples.values() for figures in arm):
        if "step_s" in figures and "added_s" in figures:
            cost = max(figures.get("flush_added_s", figures["added_s"]), figures.get("blocked_s", 0.0))
            figures["lost_share"] = cost / (size_result.steps * figures["step_s"] + cost)
    samples["ceiling"] = _by_round(size_result.ceilings)
    return samples


def _by_round(samples: dict[str, list[float]]) -> list[Figures]:
    count = max(map(len, samples.values()), default=0)
    return [{name: values[n] for name, values in samples.items() if n < len(values)} for n in range(count)]


def library_parts(say: Callable[[str], None]) -> dict[str, Rows]:
    """This module's part of the page."""
    return {
        "training": [
            (f"{gigabytes:g} GB", partial(library_samples, gigabytes=gigabytes, say=say)) for gigabytes in _ARMS
        ]
    }
