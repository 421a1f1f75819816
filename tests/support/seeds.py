"""How many histories and examples tests draw: three of each, and three tenths, in `make test`; all in `make gate`."""

from __future__ import annotations

import os

_COUNT = int(os.environ.get("TIERD_SEEDS", "3"))


def seeds(first: int = 0, weight: int = 1) -> range:
    """Return the seeds of a test.

    Args:
        first: the first seed. A test that counts what the histories have plays those before it.
        weight: how many times as many seeds as usual, for histories that take a few milliseconds each.
    """
    return range(first, first + weight * _COUNT)


def examples(most: int = 100) -> int:
    """Return how many of at most `most` examples Hypothesis draws for a test. Each run draws others."""
    return min(most, most * _COUNT // 10)
