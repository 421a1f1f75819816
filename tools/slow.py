"""`python -m tools.slow [FILE...]`: measure each test, and list in tests/slow.txt those that `make check` leaves out.

A test's cost is the CPU seconds of its process and of all descendants, because seconds of the clock would depend on
what else the machine does. tests/conftest.py marks the listed functions `slow`, each with all its cases, and of these
the ones that together cost `LONG_S` or more `long`, which `make test` leaves to `make long`. Most of those start whole
programs, each of which loads torch. A new test is fast until it is measured. A line is kept while its costs differ by
no more than a factor of `NEAR`, because a faster machine would otherwise rewrite lines of tests that did not change.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests" / "slow.txt"
CASE_S = 0.05  # CPU seconds, because thousands of cases have to fit into two minutes on two cores
FUNCTION_S = 2.0
NEAR = 2.0
LONG_S = 3.0  # CPU seconds of all cases; most such functions start whole programs
HEADER = f"""\
# What `make check` leaves to `make test`: functions whose mean case costs more than {CASE_S:g} CPU seconds, or all of
# whose cases together cost more than {FUNCTION_S:g}. Of {LONG_S:g} or more, they are left to `make long`.
# Beside each its mean case and all its cases; `python -m tools.slow` wrote them.
"""
_TICKS = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """The CPU seconds of a function's mean case, and of all its cases together."""

    mean_s: float
    all_s: float

    @property
    def is_long(self) -> bool:
        return self.all_s >= LONG_S

    def is_near(self, other: Cost) -> bool:
        """Whether neither cost differs from the other's by more than a factor of `NEAR`."""
        return all(one / NEAR <= peer <= one * NEAR for one, peer in zip(self, other, strict=True))


def function(case: str) -> str:
    """The function of a case, by pytest's id for it."""
    return case.partition("[")[0]


def listed(text: str) -> dict[str, Cost]:
    """The functions of a list, each with its cost as written there."""
    lines = [line.split(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: Cost(float(mean_s), float(all_s)) for name, mean_s, all_s in lines}


def written(costs: dict[str, Cost]) -> str:
    """The text of a list."""
    return HEADER + "".join(f"{name} {one.mean_s:.2f} {one.all_s:.1f}\n" for name, one in sorted(costs.items()))


def merged(old: dict[str, Cost], cases: dict[str, list[float]]) -> dict[str, Cost]:
    """The list after a measurement: a file that was measured has only the functions that proved slow, others stay.

    A function keeps its line, also one below the limits, if the line is near to what was measured.
    """
    files = {name.partition("::")[0] for name in cases}
    kept = {name: cost for name, cost in old.items() if name.partition("::")[0] not in files}
    found = {name: Cost(mean(costs), sum(costs)) for name, costs in cases.items()}
    measured = {name: cost for name, cost in found.items() if cost.mean_s > CASE_S or cost.all_s > FUNCTION_S}
    return kept | measured | {name: cost for name, cost in old.items() if name in found and cost.is_near(found[name])}


# -- a plugin of pytest, in each of its processes ---------------------------------------------------------------------


def _descendants(process: int) -> Iterator[int]:
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = thread.read_text().split()
        except OSError:  # it has ended
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def _cpu_of_living() -> float:
    """CPU seconds of the descendants that nobody has waited for, such as a fork server, and of their ended children."""
    ticks = 0
    for process in _descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def _cpu() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + _cpu_of_living()


_begun = pytest.StashKey[float]()
_cases: defaultdict[str, list[float]] = defaultdict(list)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Note the CPU seconds until now, before the test's fixtures."""
    item.stash[_begun] = _cpu()
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Add the cost to what the test's last report says."""
    yield
    item.user_properties.append(("cost", _cpu() - item.stash[_begun]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Gather the costs, in the process that hears of all tests."""
    cost = dict(report.user_properties).get("cost")
    if report.when == "teardown" and isinstance(cost, float):
        _cases[function(report.nodeid)].append(cost)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the list."""
    if not hasattr(session.config, "workerinput") and _cases:
        old = listed(LIST.read_text()) if LIST.exists() else {}
        LIST.write_text(written(merged(old, _cases)))


def main() -> None:
    """Run the tests of `sys.argv`'s files, or all, and rewrite the list."""
    chosen = ["-p", "tools.slow", "-n", "2", "--dist", "worksteal", "-q", "-m", "not system and not loaders"]
    sys.exit(pytest.main([*chosen, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
