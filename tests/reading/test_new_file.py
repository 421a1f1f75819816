"""An export's file holds what a plain file would, whichever of its writes go past the page cache."""

from __future__ import annotations

import io
import os
import random

import pytest

from tierd.exporting.format_writers import NewFile
from tierd.spool.direct_io import LARGE, PAGE, memory_for


@pytest.mark.parametrize("seed", range(6))
def test_small_and_large_writes_from_anywhere_in_memory_end_up_in_order(tmp_path, seed):
    """And a header that is written again at the end, as zipfile does."""
    chance, expected = random.Random(seed), io.BytesIO()
    with io.BufferedWriter(NewFile(tmp_path / "new"), LARGE) as file:
        for _ in range(8):
            size = chance.choice([3, 30, PAGE, LARGE - 1, LARGE, LARGE + 77, 2 * LARGE])
            lead = chance.choice([0, 0, 64, 1])
            memory = memory_for(lead + size)[: lead + size]
            memory[:] = chance.randbytes(lead + size)
            assert file.write(memory[lead:]) == expected.write(memory[lead:])
            assert file.tell() == expected.tell()
        for one in (file, expected):
            end = one.tell()
            one.seek(5)
            one.write(b"again")
            one.seek(0, io.SEEK_END)
            assert one.tell() == end
            one.seek(-2, io.SEEK_CUR)
            one.write(b"end")
    assert (tmp_path / "new").read_bytes() == expected.getvalue()


def test_a_file_that_exists_is_left_alone(tmp_path):
    (tmp_path / "new").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        NewFile(tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == b"old"


def test_its_mode_is_the_umasks(tmp_path):
    mask = os.umask(0o027)
    try:
        NewFile(tmp_path / "new").close()
    finally:
        os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
