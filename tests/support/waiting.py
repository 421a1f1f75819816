"""The tests' waits: for a condition, never for a time.

Invariant: no test fails because its machine is slow. `BOUND_S` is many times as long as any condition takes. It is
there because a test that waits in vain should say where, before pytest's own limit ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BOUND_S = 150.0  # half of pytest's limit


def holds(condition: Callable[[], object], bound_s: float, pause_s: float = 0.01) -> bool:
    """Whether a condition holds within `bound_s`; it is tried every `pause_s`."""
    end_s = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(pause_s)
    return True


def wait_until(condition: Callable[[], object], bound_s: float = BOUND_S, pause_s: float = 0.01) -> None:
    """Wait until a condition holds; fail the test after `bound_s`."""
    assert holds(condition, bound_s, pause_s), f"the condition did not hold within {bound_s:.0f} s"


async def until(condition: Callable[[], object], bound_s: float = BOUND_S) -> None:
    """As `wait_until`, in an event loop that goes on meanwhile."""
    end_s = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < end_s, f"the condition did not hold within {bound_s:.0f} s"
        await asyncio.sleep(0.005)
