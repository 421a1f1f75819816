"""Mutants of what `make` installs and what a release holds."""

from __future__ import annotations

from faults.rounds import Mutant

_LOCK, _DIST = "tools/lock.py", "tools/dist.py"
_LOCKED, _RELEASED = "pytest tests/test_supply.py", "pytest tests/test_dist.py"

SUPPLY = (
    Mutant(
        "a lock takes any platform's wheels",
        _LOCK,
        "return recent and _PLATFORM.fullmatch(platform) is not None",
        "return recent",
        f"{_LOCKED} -k other_files",
    ),
    Mutant(
        "a yanked version is locked",
        _LOCK,
        'if any(it.get("yanked") for it in fitting):',
        "if False:",
        f"{_LOCKED} -k cannot_be_locked",
    ),
    Mutant(
        "packages are installed without their hashes",
        "constraints.txt",
        "--require-hashes\n",
        "",
        f"{_LOCKED} -k that_is_pinned",
    ),
    Mutant(
        "an archive holds the hour at which it was built",
        _DIST,
        "member.mtime, member.pax_headers = epoch, {}",
        "member.pax_headers = {}",
        f"{_RELEASED} -k complete",
        "two builds of one commit differ",
    ),
    Mutant(
        "a release leaves out what was changed and not committed",
        _DIST,
        'if run("git", "status", "--porcelain", "--untracked-files=no"):',
        "if False:",
        f"{_RELEASED} -k committed_tree",
    ),
    Mutant(
        "a release is silently unsigned",
        _DIST,
        "if (given.key is None) != given.unsigned:",
        "if False:",
        f"{_RELEASED} -k committed_tree",
    ),
    Mutant(
        "a signature for any purpose is a release's",
        "SECURITY.md",
        "ssh-keygen -Y verify -f signers -I tierd -n tierd -s",
        "ssh-keygen -Y check-novalidate -n tierd -s",
        f"{_RELEASED} -k another_s_signature",
    ),
    Mutant(
        "the bill leaves out what extras need",
        "tools/sbom.py",
        'graph = needs(wheel, wheel.get_all("Provides-Extra", []))',
        "graph = needs(wheel, ())",
        f"{_RELEASED} -k the_bill",
    ),
)
