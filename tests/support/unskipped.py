"""A pytest plugin: with TIERD_LOADERS=all no test of others' libraries may be skipped, because `make loaders` has
installed them all, and a skip would hide that a test never runs.

Such a test is marked `loaders`, and skips by `pytest.importorskip` or `pytest.skip` as any other.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

_Wrapper = Generator[None, pytest.TestReport, pytest.TestReport]
_Collecting = Generator[None, pytest.CollectReport, pytest.CollectReport]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> _Wrapper:
    report = yield
    if item.get_closest_marker("loaders"):
        _failed_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> _Collecting:
    """A file that skips itself has no tests yet that could be marked."""
    report = yield
    _failed_if_skipped(report)
    return report


def _failed_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("TIERD_LOADERS") == "all" and report.skipped and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{why}\nTIERD_LOADERS=all lets none be skipped: `make loaders/ready` installs what it needs"
