"""The list of slow tests, which `make check` leaves out: it names tests that exist, and leaves some of each package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from tools import slow
from tools.slow import ROOT, Cost

DEFINED = re.compile(r"^([ ]*)(?:async def|def|class) (\w+)", re.M)
WHOLE = {
    "end_to_end",
    "examples",
    "faults",
    "format",
    "loaders",
    "support",
    "system",
}  # no package of tierd has their name


def test_every_listed_test_exists_and_every_package_has_tests_that_are_not_listed():
    """A class's test may stand in a class that it inherits from, in another file."""
    listed = slow.listed(slow.LIST.read_text())
    places, names = set(), set()
    for path in (ROOT / "tests").rglob("*.py"):
        defined = DEFINED.findall(path.read_text())
        names |= {name for _, name in defined}
        places |= {f"{path.relative_to(ROOT).as_posix()}::{name}" for indent, name in defined if not indent}
    gone = {it for it in listed if "::".join(it.split("::")[:2]) not in places or it.split("::")[-1] not in names}
    assert gone == set(), "removed or renamed: take their lines out of tests/slow.txt"
    fast = {it.split("/")[1] for it in places - listed.keys() if "::test_" in it}
    packages = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and list(path.rglob("test_*.py"))}
    assert packages - fast - WHOLE == set()


def test_the_list_is_as_the_tool_writes_it():
    text = slow.LIST.read_text()
    assert slow.written(slow.listed(text)) == text


def test_a_function_is_slow_by_its_mean_case_or_by_all_together():
    cases = {"a::one": [slow.CASE_S * 3], "a::outlier": [slow.CASE_S * 1.5, 0, 0], "a::many": [0.06] * 100}
    assert slow.merged({}, cases) == {"a::one": (slow.CASE_S * 3, slow.CASE_S * 3), "a::many": pytest.approx((0.06, 6))}


def test_a_file_that_was_measured_again_loses_its_old_lines_and_no_other_does():
    old = {name: Cost(0.5, 0.5) for name in ("a::one", "a::two", "b::three")}
    assert slow.merged(old, {"a::one": [0.01], "a::four": [4.0, 5.0]}) == {
        "b::three": (0.5, 0.5),
        "a::four": (4.5, 9.0),
    }


def test_line_is_kept_while_measured_cost_is_within_a_factor_of_two():
    old = {"a::one": Cost(0.5, 5.0), "a::two": Cost(0.06, 0.1), "a::three": Cost(0.5, 0.5), "a::four": Cost(0.5, 0.5)}
    cases = {"a::one": [0.3] * 10, "a::two": [0.04, 0.04], "a::three": [1.1], "a::four": [0.3] * 4}
    assert slow.merged(old, cases) == {
        "a::one": (0.5, 5.0),  # a faster machine
        "a::two": (0.06, 0.1),  # below the limit there
        "a::three": (1.1, 1.1),
        "a::four": (0.3, 1.2),  # more cases
    }


def test_long_function_is_a_function_whose_cases_cost_much_together():
    assert Cost(0.1, slow.LONG_S).is_long and not Cost(slow.LONG_S - 1, slow.LONG_S - 1).is_long


PROJECT = r"""
import subprocess, sys

import pytest

COMPUTE = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\nsys.stdin.read()"
STARTED = []


def test_whose_child_has_ended():
    subprocess.run([sys.executable, "-c", COMPUTE], stdin=subprocess.DEVNULL)


def test_whose_child_lives_on():
    STARTED.append(subprocess.Popen([sys.executable, "-c", COMPUTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert STARTED[0].stdout.readline()


@pytest.mark.parametrize("case", [1, 2])
def test_alone(case):
    pass
"""


@pytest.mark.timeout(600)
def test_cpu_of_children_counts_and_listed_tests_are_not_selected(tmp_path):
    supports = ("tests/lean/unsynced.py", "tests/support/seeds.py", "tests/support/unskipped.py")
    # With `__init__.py`, because the checkout's own `tools`, if it is on the path, would otherwise run and write there.
    for path in ("tools/__init__.py", "tools/slow.py", "tests/conftest.py", *supports):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    marks = "markers =\n  slow\n  long\n  system\n  loaders\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = . tests\n{marks}")
    (tmp_path / "tests" / "test_two.py").write_text(PROJECT)
    slow_list = tmp_path / "tests" / "slow.txt"
    slow_list.write_text("tests/test_two.py::test_alone 9.00 9.0\n")
    python = [sys.executable, "-m"]
    subprocess.run([*python, "tools.slow", "-n1", "tests"], cwd=tmp_path, check=True, capture_output=True)
    listed = slow.listed(slow_list.read_text())
    assert listed.keys() == {f"tests/test_two.py::test_whose_child_{ends}" for ends in ("has_ended", "lives_on")}
    select = [*python, "pytest", "-q", "--collect-only", "-m", "not slow"]
    done = subprocess.run(select, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if "::" in line] == [
        f"tests/test_two.py::test_alone[{case}]" for case in (1, 2)
    ]
    slow_list.write_text(
        "tests/test_two.py::test_alone 9.00 18.0\ntests/test_two.py::test_whose_child_has_ended 1.00 1.0\n"
    )
    done = subprocess.run([*select[:-1], "long"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line] == [
        "test_alone[1]",
        "test_alone[2]",
    ]
