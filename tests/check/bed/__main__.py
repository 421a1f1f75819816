"""Play loops of the test bed: `python -m check.bed NAME…`; one JSON object a line."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch._dynamo  # what an optimizer loads when the first one is made
from check.bed import forked
from check.bed.collecting import COLLECTED
from check.bed.expected import EXPECTED, IGNORED, RANKED, REAL

import tierd.client.checkpointer  # noqa: F401
from tierd.check import check_resume, resume_check

STEPS, KILLS = 14, ("8",)


def play(name: str) -> dict[str, object]:
    begun = time.monotonic()
    if name in COLLECTED:
        return _of(name, f"collected.{name}:main", begun, COLLECTED[name].options)
    group = "planted" if name in EXPECTED else "right"
    kills = ("13",) if name in ("epoch_lost", "short_epochs") else KILLS
    options = {
        "steps": STEPS + (4 if kills != KILLS else 0),
        "kill_at": kills,
        "ranks": 2 if name in RANKED else 1,
        "ignore": IGNORED.get(name, ()),
    }
    return _of(name, f"check.bed.loops:{group}.{name}", begun, options)


def _of(name: str, target: str, begun: float, options: Mapping[str, object]) -> dict[str, object]:
    try:
        report = check_resume(target, patience=120.0, **options)  # type: ignore[arg-type]
    except Exception as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}"}
    causes = [(one.kind, one.says) for one in report.causes]
    took = round(time.monotonic() - begun, 1)
    return {"name": name, "ok": report.ok, "causes": causes, "s": took, "text": str(report)}


def _load_packages(names: Sequence[str]) -> None:
    """Import what the loops import, once for all launches, and choose what a user's environment has to choose."""
    os.environ.update(KERAS_BACKEND="torch", HF_HUB_OFFLINE="1")
    for package in sorted({package for name in names if name in COLLECTED for package in COLLECTED[name].packages}):
        importlib.import_module(package)


def _write_collected(folder: str) -> None:
    """Write the collected loops as modules of a package `collected` that this process and its launches import."""
    package = Path(folder) / "collected"
    package.mkdir()
    for name, loop in COLLECTED.items():
        (package / f"{name}.py").write_text(loop.source)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ['PYTHONPATH']}"


def main(folder: str) -> None:
    torch.set_num_threads(1)
    _load_packages(sys.argv[1:])
    _write_collected(folder)
    whole = resume_check.CheckedLoop
    for name in sys.argv[1:]:
        if name in REAL or (name in COLLECTED and COLLECTED[name].fresh):
            resume_check.CheckedLoop = whole  # type: ignore[misc]
        else:
            forked.install()
        print(json.dumps(play(name)), flush=True)


with tempfile.TemporaryDirectory() as folder:
    main(folder)
