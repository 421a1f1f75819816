"""Leave out the disk's part of `os.fsync`, because no test loses power: what was written is read back either way.

The call remains: a test replaces it to record, refuse or delay it, and it refuses a descriptor that fsync refuses. The
kits of faults that play a loss of power are tests marked `system`, or no tests, and keep the real call. Waiting for the
disk and its journal took a sixth of the CPU of tests that write files, and half of their time.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "TIERD_TESTS_UNSYNCED"  # for processes of tests
_real = os.fsync


def fsync(fd: Any) -> None:
    """Refuse a descriptor that is closed or names only a path, as the real call does, and return at once."""
    os.lseek(fd if isinstance(fd, int) else fd.fileno(), 0, os.SEEK_CUR)


def leave_out(leaves_out: bool) -> None:
    """Leave the disk's part out in this process and in those that it starts, or do as ever."""
    os.fsync = fsync if leaves_out else _real
    if leaves_out:
        os.environ[VARIABLE] = "1"
    else:
        os.environ.pop(VARIABLE, None)
