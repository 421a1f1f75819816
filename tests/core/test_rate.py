"""Rates: what is written is what is meant, and what has no unit or moves nothing is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.retention.policy import Rate, parse_rate


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1kB/s", 1000),
        ("1KiB/s", 1024),
        ("200MB/s", 200_000_000),
        ("64MiB/s", 64 << 20),
        ("1.5GB/s", 1_500_000_000),
        ("0.5GiB/s", 1 << 29),
        ("0.001kB/s", 1),
    ],
)
def test_a_rate_is_bytes_per_second(text, meant):
    assert parse_rate(text) == meant
    assert msgspec.convert(text, Rate) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "200", "200MB", "200 MB/s", "MB/s", "200mb/s", "1kiB/s", "1KB/s", "1B/s", "1TB/s", "1MB/sec", "1MB/m"),
        *("-1MB/s", "+1MB/s", "1e3MB/s", ".5MB/s", "5.MB/s", "nanMB/s", "1MB/s\n", " 1MB/s", "1MB/s/s", "٣MB/s"),
        "1234567890GB/s",
    ],
)
def test_invalid_rate_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="200MB/s"):
        parse_rate(text)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text, Rate)


@pytest.mark.parametrize("text", ["0kB/s", "0.0GB/s", "0.0009kB/s"])
def test_a_rate_that_moves_nothing_is_refused(text):
    with pytest.raises(ValueError, match="never move a byte"):
        parse_rate(text)


@given(st.text())
def test_any_text_is_a_rate_in_both_readings_or_in_none(text):
    try:
        msgspec.convert(text, Rate)
    except msgspec.ValidationError:
        with pytest.raises(ValueError):
            parse_rate(text)
    else:
        assert parse_rate(text) >= 1
