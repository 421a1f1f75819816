"""Which tests are slow or long; that no example of Hypothesis fails for taking long, since machines are shared; what
the processes that tests start load (`lean/`); and that threads of OpenMP sleep while they wait.

Between two operations of torch its threads spin for work, on the cores that other tests and processes need. Tests of
tensors took three times the CPU of their work by that.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from support.unskipped import pytest_make_collect_report, pytest_runtest_makereport

from tools import slow

__all__ = ["pytest_collection_modifyitems", "pytest_make_collect_report", "pytest_runtest_makereport"]

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "lean"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded, here and in processes of tests

settings.register_profile("tierd", deadline=None)
settings.load_profile("tierd")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests/slow.txt lists, before pytest selects by marks."""
    listed = slow.listed(slow.LIST.read_text())
    for item in items:
        if cost := listed.get(slow.function(item.nodeid)):
            item.add_marker(pytest.mark.slow)
            if cost.is_long:
                item.add_marker(pytest.mark.long)
