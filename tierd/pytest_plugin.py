"""The pytest fixture `tierd_resumes`, with which a project's own tests prove that a training loop resumes exactly.

Invariant: this module imports nothing of tierd until a test uses the fixture, because pytest loads the module in every
project that has tierd installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tierd.check import Report


@pytest.fixture
def tierd_resumes() -> Callable[..., Report]:
    """Run a training loop once uninterrupted and once killed and restarted; fail the test unless both give the same.

    In `tierd_resumes("train:main", steps=40)` the named function takes a spool's path, restores, trains and calls
    `tierd.observe`. By default `kill_at` is one kill after two thirds of the steps, by which time a save has to be
    complete. Other options are those of `tierd.check.check_resume`, whose report is returned.
    """

    def resumes(target: str, steps: int, kill_at: Sequence[int | str] | None = None, **options: Any) -> Report:
        from tierd.check import check_resume

        report = check_resume(target, steps=steps, kill_at=kill_at or (max(1, 2 * steps // 3),), **options)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return resumes
