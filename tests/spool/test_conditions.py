"""What the spool's file system refused, and the way out that the error names."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from tierd.core.errors import SpoolFull, SpoolUnusable, TierdError
from tierd.spool.conditions import translated


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, SpoolFull, "df -i"),
        (errno.EDQUOT, SpoolFull, "free space"),
        (errno.EFBIG, SpoolUnusable, "ulimit -f"),
    ],
)
def test_error_of_the_file_system_names_the_way_out(number: int, kind: type[TierdError], words: str) -> None:
    with pytest.raises(kind, match=f"spool /s: .*{words}"), translated("spool /s"):
        raise OSError(number, os.strerror(number))


def test_arena_beyond_the_limit_of_a_file_size_names_the_limit() -> None:
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from tierd.spool.arena import Arena\n"
        "Arena(1 << 24)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MemoryError: an arena of 16777216 bytes: File too large" in ended.stderr
    assert "ulimit -f" in ended.stderr
