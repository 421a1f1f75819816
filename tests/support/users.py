"""Another user of the node, as a process of their own."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def by_nobody(act: Callable[[], int]) -> int:
    """What `act` gives, done by another user in a process of its own."""
    child = os.fork()
    if not child:
        code = 99
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
