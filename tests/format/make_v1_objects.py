"""Writes the golden fixture of plain objects: `PYTHONPATH=tests python tests/format/make_v1_objects.py DIRECTORY`.

Invariant: run once, for `tests/format/v1-objects/`; what lies there is never edited and never written again. It is the
two files of a part whose state has a plain object of every tag. `tests/test_format.py` reads it, and writes it anew.
"""

from __future__ import annotations

import datetime
import decimal
import io
import pathlib
import random
import sys
import uuid
from pathlib import Path

import numpy as np
from support.state_files import files_of, write_fixture


def state() -> dict[str, object]:
    zone = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
    buffer = io.BytesIO(b"scales \x00\xff")
    buffer.seek(3)
    return {
        "buffer": buffer,
        "datetime": datetime.datetime(2026, 10, 25, 2, 30, 0, 7, tzinfo=zone, fold=1),
        "date": datetime.date(2026, 11, 29),
        "time": datetime.time(23, 59, 59, tzinfo=datetime.UTC),
        "timedelta": datetime.timedelta(-1, 2, 3),
        "paths": [pathlib.Path("/data/ä"), pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath(r"C:\x")],
        "uuid": uuid.UUID(int=7),
        "decimal": decimal.Decimal("-1.10E+7"),
        "random": {
            "python": random.Random(1),
            "legacy": np.random.RandomState(2),
            **{
                kind.__name__: np.random.Generator(kind(3))
                for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
            },
        },
    }


def files() -> dict[str, bytes]:
    return files_of(state())


if __name__ == "__main__":
    write_fixture(Path(sys.argv[1]), files())
