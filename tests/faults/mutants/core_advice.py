"""Mutants of `tierd/core/advice/`."""

from __future__ import annotations

from faults.rounds import Mutant

MUTANTS = (
    Mutant(
        "preemption: nothing is counted for the steps in hand",
        "tierd/core/advice/notice.py",
        " + 2 * step_s",
        "",
        "pytest tests/cli/test_advise.py -k in_json_without",
    ),
    Mutant(
        "a tier always has caught up when training goes on",
        "tierd/core/advice/save_interval.py",
        "goodput(interval, costs) - backlog(interval, period, costs)",
        "goodput(interval, costs)",
        "pytest tests/core/advice/test_save_interval.py -k 200_drawn",
    ),
)
