"""What values that are no tensors, and many tensors, cost a save and a restore, beside torch's own ways.

Arms take turns on each state, round by round, in one process. `save` is the time inside `Checkpointer.save`, the first
save's apart; `torch.save+fsync` syncs file and directory. `restore` loads into an empty value of the same kind;
`torch.load` is called with `weights_only=False`, because that pickle is read in C, and the default takes several times
as long. DCP saves without fsync of the directory and loads in place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import tierd
from tierd.bench.growth.measured import Rows, Samples, timed
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
    "50 MB of bytes": (
        lambda: _noise(50_000_000),
        b"",
    ),
}


def values(home: Path, name: str) -> Samples:
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


def tensors(home: Path) -> Samples:
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


def refused(home: Path) -> Samples:
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


def parts() -> dict[str, Rows]:
    """This module's parts of the page."""
    return {
        "values": [
            *((name, partial(values, name=name)) for name in STATES),
            ("array of 1,000,000 objects", refused),
        ],
        "tensors": [("10,000 tensors of 64 bytes", tensors)],
    }
