"""Mutants of `tierd/core/diagnosis/`."""

from __future__ import annotations

from faults.rounds import Mutant

MUTANTS = (
    Mutant(
        "doctor: a full disk proves something of direct I/O",
        "tierd/core/diagnosis/node.py",
        "    if number in (errno.ENOSPC, errno.EDQUOT):\n",
        "    if False:\n",
        "pytest tests/doctor/test_node.py -k nearly_full",
    ),
    Mutant(
        "doctor overlooks a rule of the whole bucket",
        "tierd/core/diagnosis/tier.py",
        "(base.startswith(rule.prefix) or rule.prefix.startswith(base))",
        "rule.prefix.startswith(base)",
        "pytest tests/core/diagnosis/test_findings.py -k rules_of",
    ),
)
