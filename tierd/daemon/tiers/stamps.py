"""Stamps: when and by which node an intent, a mark or an announcement was put, and whether it has expired.

A stamp is the end of such an object's name: `.<when>-<who>`, in milliseconds since 1970 and by the node's id. A node
that is cut off leaves its objects, so each one expires.
"""

from __future__ import annotations

import re
import secrets
import time

from tierd.core.errors import TierdError
from tierd.daemon.timings import DaemonTimings
from tierd.stores.base import Store

STALE_MS = 86_400_000  # until the objects of any node expire; long, because clocks differ. A node's own objects expire
# sooner for it: see `DaemonTimings.own_stale_ms`.
STAMP = re.compile(r"(.+)\.([0-9a-f]{12})-([0-9a-f]{8})")

_ahead: dict[str, float] = {}  # own stamps ahead of this clock -> monotonic seconds when first seen


def stamp_now(who: str, timings: DaemonTimings) -> str:
    """Return a new stamp; `who` is 8 hex digits, or empty for random ones."""
    return f"{timings.now_ms():012x}-{who or secrets.token_hex(4)}"


def age_ms(stamp: str, timings: DaemonTimings) -> int:
    """Return the age by a stamp's time, 12 hex digits."""
    return timings.now_ms() - int(stamp, 16)


def is_over(stamp: str, by: str, who: str, timings: DaemonTimings) -> bool:
    """Whether an object that `by` stamped has expired for `who`.

    It has if it is too old, or stamped so far in the future that its clock cannot be trusted. If this node's own clock
    was set back since, its own stamps age from their first observation.
    """
    age = age_ms(stamp, timings)
    if by == who and age < 0:
        now_s = time.monotonic()
        age = int(1000 * (now_s - _ahead.setdefault(stamp, now_s)))
    return not -STALE_MS < age < (timings.own_stale_ms if by == who else STALE_MS)


async def forget(store: Store, keys: list[str]) -> None:
    """Delete stamped objects, if the store lets it."""
    try:
        await store.delete(keys)
    except TierdError:
        pass  # harmless: it expires within a day, and until then only keeps too much
