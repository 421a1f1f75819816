"""Mutants of `tierd/daemon/reports/`."""

from __future__ import annotations

from faults.rounds import Mutant

MUTANTS = (
    Mutant(
        "log: any file of a standard error is renamed",
        "tierd/daemon/reports/own_log.py",
        "            return os.path.samestat(os.fstat(_ERR), self._path.lstat())\n",
        "            return True\n",
        "pytest tests/daemon/test_own_log.py -k another_file",
    ),
)
