"""Seeds of the histories that tests draw and play: four in `make test`, a hundred in `make gate`."""

from __future__ import annotations

import os

_COUNT = int(os.environ.get("TIERD_SEEDS", "4"))


def seeds(first: int = 0, weight: int = 1) -> range:
    """Return the seeds of a test.

    Args:
        first: the first seed. A test that counts what the histories have plays those before it.
        weight: how many times as many seeds as usual, for histories that take a few milliseconds each.
    """
    return range(first, first + weight * _COUNT)
