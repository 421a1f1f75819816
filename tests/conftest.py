"""An event loop for each test that is a coroutine; which tests are slow or long; that no example of Hypothesis fails
for taking long, since machines are shared; what the processes that tests start load (`lean/`); that no test waits for
the disk, because none loses power; that garbage is looked for only in what tests make, because torch and 10,000 tests
are a million objects; and that threads of OpenMP sleep while they wait.

Between two operations of torch its threads spin for work, on the cores that other tests and processes need. Tests of
tensors took three times the CPU of their work by that.
"""

import asyncio
import gc
import inspect
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings
from lean import unsynced
from support.seeds import examples
from support.unskipped import pytest_make_collect_report, pytest_runtest_makereport

from tools import slow

__all__ = ["pytest_collection_modifyitems", "pytest_make_collect_report", "pytest_runtest_makereport"]

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "lean"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded, here and in processes of tests

settings.register_profile("tierd", deadline=None, max_examples=examples())
settings.load_profile("tierd")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while modules are imported and tests collected, nor later in what that made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Wait for the disk only in tests that play a loss of power, or need root for another reason."""
    unsynced.leave_out(item.get_closest_marker("system") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests/slow.txt lists, before pytest selects by marks."""
    listed = slow.listed(slow.LIST.read_text())
    for item in items:
        if cost := listed.get(slow.function(item.nodeid)):
            item.add_marker(pytest.mark.slow)
            if cost.is_long:
                item.add_marker(pytest.mark.long)
