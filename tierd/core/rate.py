"""Rates in bytes per second: ``"200MB/s"`` in a configuration.

Invariant: a rate names its unit, and no unit is guessed. kB, MB and GB are powers of 1000; KiB, MiB and GiB of 1024.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

_UNITS = {
    f"{prefix}{kind}": base**power
    for kind, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("kMG" if base == 1000 else "KMG", 1)
}
_FORM = rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)({'|'.join(_UNITS)})/s"
_RATE = re.compile(_FORM)
RATE_PATTERN = rf"^{_FORM}\Z"
Rate = Annotated[str, Meta(pattern=RATE_PATTERN)]  # "200MB/s", "1.5GiB/s"


def rate(text: str) -> int:
    """A `Rate` in bytes per second, at least 1.

    Raises:
        ValueError: the text is not a rate, or less than a byte per second; the message shows how to write one.
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no rate: write 800kB/s, 200MB/s or 1GiB/s")
    bytes_per_s = int(float(match[1]) * _UNITS[match[2]])
    if bytes_per_s < 1:
        raise ValueError(f"{text!r} would never move a byte: write at least 1kB/s")
    return bytes_per_s
