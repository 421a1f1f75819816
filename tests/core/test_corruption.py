"""Which reads of one place prove that its bytes are corrupt."""

from __future__ import annotations

import pytest

from tierd.core.errors import CorruptChunk, ManifestError, StoreUnavailable
from tierd.core.storage_faults import MOST_READS, Reading, ReadVerdict, UnstableRead, judge_readings, read_until_proven


def test_single_right_read_outweighs_all_wrong_reads():
    wrong = [Reading("a", "direct"), Reading("a", "cached")]
    assert judge_readings([*wrong, Reading("b", is_right=True)], paths=2) is ReadVerdict.RIGHT


def test_the_same_wrong_bytes_twice_are_corrupt():
    assert judge_readings([Reading("a")]) is ReadVerdict.READ_AGAIN
    assert judge_readings([Reading("a"), Reading("b")]) is ReadVerdict.READ_AGAIN
    assert judge_readings([Reading("a"), Reading("b"), Reading("a")]) is ReadVerdict.CORRUPT


def test_the_same_wrong_bytes_by_one_path_prove_nothing_where_two_are_needed():
    cached = [Reading("a", "cached")] * 2
    assert judge_readings(cached, paths=2) is ReadVerdict.READ_AGAIN
    assert judge_readings([*cached, Reading("a", "direct")], paths=2) is ReadVerdict.CORRUPT


def test_different_wrong_bytes_are_no_corruption():
    assert judge_readings([Reading(str(number)) for number in range(MOST_READS)]) is ReadVerdict.UNSTABLE
    numbers = iter(range(MOST_READS))

    def read() -> None:
        raise CorruptChunk(f"bytes {next(numbers)}")

    with pytest.raises(UnstableRead, match="disk") as raised:
        read_until_proven(read, "/spool/weights.bin")
    assert isinstance(raised.value, StoreUnavailable) and "/spool/weights.bin" in str(raised.value)
    assert next(numbers, None) is None


def test_messages_alike_with_different_bytes_are_no_corruption():
    numbers = iter(range(2))

    def read() -> str:
        number = next(numbers, None)
        if number is None:
            return "right"
        error = ManifestError("its bytes differ from its own digest")
        error.read_digest = str(number)
        raise error

    assert read_until_proven(read, "manifest") == "right"
