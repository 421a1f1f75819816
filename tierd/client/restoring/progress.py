"""Progress of the daemon's fetch of a part: log it, and end a fetch that brings no bytes.

Invariant: a fetch may take as long as bytes arrive. A fetch that brings no byte for `_STALLED` seconds is given up.
That says nothing about the checkpoint, so no rank tries an older one because of it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from tierd.core.errors import StoreUnavailable
from tierd.core.ids import PartId

log = logging.getLogger("tierd")

_STALLED = 600.0  # seconds without a byte; well above the time that a tier gets for one chunk
_EVERY = 60.0  # seconds between two lines of the log


class Fetching:
    """Called with each progress message of a daemon that fetches `part`.

    Raises:
        StoreUnavailable: no byte arrived for too long.
    """

    def __init__(self, part: PartId) -> None:
        self._part, self._at, self._since = part, -1, time.monotonic()
        self._began: tuple[float, int] | None = None  # when the first size came, and what was there
        self._logged = -_EVERY

    def __call__(self, progress: dict[str, Any]) -> None:
        done, total, now = int(progress.get("done", -1)), int(progress.get("total", 0)), time.monotonic()
        if done != self._at:
            self._at, self._since = done, now
        elif now - self._since >= _STALLED:
            raise StoreUnavailable(
                f"{self._part}: no byte came from a tier for {_STALLED:.0f} s; restoring again goes on from "
                f"{max(done, 0)} of {total} bytes"
            )
        if not total:
            return
        began, before = self._began = self._began or (now, done)
        if now - self._logged < _EVERY and done < total:
            return
        self._logged = now
        tiers = ", ".join(progress.get("tiers", ())) or "the tiers"
        rate = (done - before) / (now - began) if done > before and now > began else 0.0
        pace = f", {rate / 1e9:.2f} GB/s, {(total - done) / rate:.0f} s left" if rate else ""
        log.info("fetching %s from %s: %.1f of %.1f GB%s", self._part, tiers, done / 1e9, total / 1e9, pace)
