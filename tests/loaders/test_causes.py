"""`tierd check-resume` names the cause of a mistake in loops of real frameworks, and nothing that only follows."""

from __future__ import annotations

import re

import pytest
from check.bed.forked import check_forked

LIGHTNING = ('state["lightning"]["loops"]', "_*")  # counters of batches, moved after a step was observed


@pytest.mark.loaders
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("loop", "package", "kind", "says"),
    [
        ("own_loop", "torch", "position", "very first sample|DataLoader of Ids"),
        ("lightning_loop", "lightning", "position", "DataLoader of Ids"),
        ("trainer_that_skips_nothing", "transformers", "position", "DataLoader of Rows"),
        ("trainer_that_freezes_again", "transformers", "mode", r"net\.0\.\w+.*requires_grad"),
    ],
)
def test_the_cause_of_a_mistake_is_named(loop: str, package: str, kind: str, says: str) -> None:
    pytest.importorskip(package)
    ignore = LIGHTNING if package == "lightning" else ()
    report, _ = check_forked(f"loaders.loops_mistakes:{loop}", steps=12, kill_at=("7",), patience=300, ignore=ignore)
    first = report.causes[0]
    assert first.kind == kind and re.search(says, first.says), str(report)
    assert not any(cause.kind == "generator" for cause in report.causes), str(report)
