"""Play loops of the test bed: `python -m check.bed NAME…`; one JSON object a line."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch._dynamo  # what an optimizer loads when the first one is made
from check.bed import forked
from check.bed.expected import EXPECTED, IGNORED, RANKED, REAL

import tierd.client.checkpointer  # noqa: F401
from tierd.check import check_resume, engine

STEPS, KILLS = 14, ("8",)


def play(name: str) -> dict[str, object]:
    begun = time.monotonic()
    group = "planted" if name in EXPECTED else "right"
    kills = ("13",) if name in ("epoch_lost", "short_epochs") else KILLS
    try:
        report = check_resume(
            f"check.bed.loops:{group}.{name}",
            steps=STEPS + (4 if kills != KILLS else 0),
            kill_at=kills,
            ranks=2 if name in RANKED else 1,
            ignore=IGNORED.get(name, ()),
        )
    except Exception as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}"}
    causes = [(one.kind, one.says) for one in report.causes]
    took = round(time.monotonic() - begun, 1)
    return {"name": name, "ok": report.ok, "causes": causes, "s": took, "text": str(report)}


def main() -> None:
    torch.set_num_threads(1)
    whole = engine.CheckedLoop
    for name in sys.argv[1:]:
        if name in REAL:
            engine.CheckedLoop = whole  # type: ignore[misc]
        else:
            forked.install()
        print(json.dumps(play(name)), flush=True)


main()
