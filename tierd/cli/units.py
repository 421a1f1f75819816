"""Parses values with units: times, sizes and bandwidths.

Invariant: a value without its unit is an error that names its option.
"""

from __future__ import annotations

import re

from tierd.core.errors import ConfigError

_BYTES: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_SIZE = re.compile(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,9}})?)({'|'.join(_BYTES)})")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,9}})?)({'|'.join(_SECONDS)})")
SHORTEST, LONGEST = 1e-6, 1e12  # seconds; beyond these, counts of steps would not fit JSON's integers
_MAX_COUNT = 10**9


def time(option: str, text: str, *, zero: bool = False) -> float:
    """Parse a time, in seconds; raises `ConfigError`."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(f"{option}: {text!r} is no duration: write 50ms, 90s, 10m, 12h or 7d")
    value = float(match[1]) * _SECONDS[match[2]]
    if not (SHORTEST <= value <= LONGEST or (zero and value == 0)):
        raise ConfigError(
            f"{option} {text}: out of range; at least {'nothing' if zero else '1 µs'}, at most 30000 years"
        )
    return value


def size(option: str, text: str) -> float:
    """Parse a size, in bytes; raises `ConfigError`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{option}: {text!r} is no size: write 800MB, 96GB or 90GiB")
    value = float(match[1]) * _BYTES[match[2]]
    if value < 1:
        raise ConfigError(f"{option} {text}: less than a byte")
    return value


def rate(option: str, text: str) -> float:
    """Parse a bandwidth, in bytes a second; raises `ConfigError`."""
    if not text.endswith("/s"):
        raise ConfigError(f"{option}: {text!r} is no bandwidth: write 800MB/s or 4GB/s")
    return size(option, text.removesuffix("/s"))


def count(option: str, value: int) -> int:
    """Parse a count; raises `ConfigError`."""
    if not 1 <= value <= _MAX_COUNT:
        raise ConfigError(f"{option} {value}: at least 1, at most {_MAX_COUNT}")
    return value


def span(time: float) -> str:
    """Format a time for people: three digits and the unit that suits it."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if time >= length:
            digits = f"{time / length:#.3g}" if time < 1000 * length else f"{time / length:.0f}"
            return f"{digits.rstrip('.')} {unit}"
    return f"{1000 * time:.3g} ms" if 0 < time < 0.1 else f"{time:.3g} s"
