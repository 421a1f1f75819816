"""Disable garbage collection during walks over states."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's cyclic garbage collection during a walk.

    A walk makes thousands of small objects but no cycle. One collection traverses every object that torch has loaded,
    which takes longer than the walk.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
