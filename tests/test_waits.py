"""The tests' waits are for events. A bound of a few seconds fails a test because its machine is busy."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
_SECONDS = r"(?:[2-9]|[1-5]\d)(?:\.\d+)?"  # less than two are what a test shows, as that something has not happened yet
_SHORT = re.compile(
    rf"\.(?:wait|join|result|settimeout)\((?:timeout=)?{_SECONDS}\)"
    rf"|asyncio\.timeout\({_SECONDS}\)"
    rf"|(?<!acquire\()\btimeout={_SECONDS}[,)]"
)


def short_waits(source: str) -> list[str]:
    """The waits of a module that end after less than a minute."""
    return _SHORT.findall(source)


def test_no_test_waits_for_less_than_a_minute() -> None:
    """The kits of tests/faults have limits of their own."""
    modules = [path for path in TESTS.rglob("*.py") if "faults" not in path.parts and path != Path(__file__)]
    assert {path.name: found for path in modules if (found := short_waits(path.read_text()))} == {}


def test_short_wait_is_detected() -> None:
    assert short_waits("save.wait(timeout=20)\nthread.join(5)\nrun(command, timeout=30, check=True)\n") == [
        ".wait(timeout=20)",
        ".join(5)",
        "timeout=30,",
    ]
    assert short_waits("save.wait(timeout=60)\nassert not save.wait(0.2)\nasyncio.timeout(120)\n") == []
