"""The arms of `bench overhead` at two sizes: a small state that is saved often, and 0.25 GB."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tierd.bench import drive
from tierd.bench.growth.measured import Figures, Rows, Samples

SMALL_GB, EVERY = 0.043, 10
_ROUNDS = {SMALL_GB: 8, 0.25: 5}
_ARMS = {
    SMALL_GB: ("none", "torch_checkpointing", "dcp.async-reused", "tierd-overlapped", "tierd-overlapped+daemon"),
    0.25: ("torch.save+fsync", "dcp.save", "torch_checkpointing", "tierd", "tierd+daemon"),
}


def saving(home: Path, gigabytes: float, say: Callable[[str], None]) -> Samples:
    """Every arm's samples, and the machine's limits as the arm `ceiling`."""
    steps_per_save = EVERY if gigabytes == SMALL_GB else None
    size_result = drive.measure(gigabytes, _ARMS[gigabytes], _ROUNDS[gigabytes], steps_per_save, home, say)
    samples = {name: _by_round(arm.samples) for name, arm in size_result.measured.items()}
    for figures in (figures for arm in samples.values() for figures in arm):
        if "step_s" in figures and "added_s" in figures:
            cost = max(figures.get("flush_added_s", figures["added_s"]), figures.get("blocked_s", 0.0))
            figures["lost_share"] = cost / (size_result.steps * figures["step_s"] + cost)
    samples["ceiling"] = _by_round(size_result.ceilings)
    return samples


def _by_round(samples: dict[str, list[float]]) -> list[Figures]:
    count = max(map(len, samples.values()), default=0)
    return [{name: values[n] for name, values in samples.items() if n < len(values)} for n in range(count)]


def parts(say: Callable[[str], None]) -> dict[str, Rows]:
    """This module's part of the page."""
    return {
        "training": [(f"{gigabytes:g} GB", partial(saving, gigabytes=gigabytes, say=say)) for gigabytes in _ARMS],
    }
