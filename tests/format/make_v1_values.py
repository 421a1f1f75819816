"""Writes the golden fixture of packed runs: `PYTHONPATH=tests python tests/format/make_v1_values.py DIRECTORY`.

Invariant: run once, for `tests/format/v1-values/`; what lies there is never edited and never written again. It is the
two files of a part whose state has a run of every kind. `tests/test_format.py` reads it, and writes it anew to compare.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict, deque
from pathlib import Path

from support.state_files import files_of, write_fixture

COUNT = 1100  # values; more than enough to be packed


def state() -> dict[str, object]:
    nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    return {
        "losses": [nan, -0.0, float("inf"), 5e-324, *(n / 7 for n in range(COUNT))],
        "order": (*((n * 7919) % 1009 - 500 for n in range(COUNT)), 2**63 - 1, -(2**63)),
        "done": deque([n % 3 == 0 for n in range(COUNT)], maxlen=2000),
        "names": [f"ä{n}\n" for n in range(COUNT)],
        "table": {f"$sample {n}": n / 3 for n in range(COUNT)},
        "seen": {"by number": OrderedDict((n, str(n)) for n in range(COUNT, 0, -1)), "epoch": 3},
        "bytes": bytes(range(256)) * 257,
        "bytearray": bytearray(b"tierd" * 13_200),
    }


def files() -> dict[str, bytes]:
    return files_of(state())


if __name__ == "__main__":
    write_fixture(Path(sys.argv[1]), files())
