"""Mutants of `tools/`."""

from __future__ import annotations

from faults.rounds import Mutant

_DIST_PY = "tools/dist.py"
_TEST_DIST = "pytest tests/test_dist.py"

MUTANTS = (
    Mutant(
        "an archive holds the hour at which it was built",
        _DIST_PY,
        "member.mtime, member.pax_headers = epoch, {}",
        "member.pax_headers = {}",
        f"{_TEST_DIST} -k complete",
        "two builds of one commit differ",
    ),
    Mutant(
        "a release leaves out what was changed and not committed",
        _DIST_PY,
        'if run("git", "status", "--porcelain", "--untracked-files=no"):',
        "if False:",
        f"{_TEST_DIST} -k committed_tree",
    ),
    Mutant(
        "a release is silently unsigned",
        _DIST_PY,
        "if (given.key is None) != given.unsigned:",
        "if False:",
        f"{_TEST_DIST} -k committed_tree",
    ),
    Mutant(
        "a lock takes any platform's wheels",
        "tools/lock.py",
        "return recent and _PLATFORM.fullmatch(platform) is not None",
        "return recent",
        "pytest tests/test_supply.py -k other_files",
    ),
    Mutant(
        "a yanked version is locked",
        "tools/lock.py",
        'if any(it.get("yanked") for it in fitting):',
        "if False:",
        "pytest tests/test_supply.py -k cannot_be_locked",
    ),
    Mutant(
        "the bill leaves out what extras need",
        "tools/sbom.py",
        'graph = needs(wheel, wheel.get_all("Provides-Extra", []))',
        "graph = needs(wheel, ())",
        f"{_TEST_DIST} -k the_bill",
    ),
)
