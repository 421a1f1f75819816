"""A part that the daemon fetches: its manifest, progress shown, and a fetch without bytes ended.

Invariant: a fetch may take as long as bytes arrive. A fetch that brings no byte for `stalled_s` is given up. That says
nothing about the checkpoint, so no rank tries an older one because of it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tierd.client.client_timings import USUAL_TIMINGS
from tierd.client.user_messages import TerminalLine, transfer_rate_text
from tierd.core.errors import StoreUnavailable
from tierd.core.ids import PartId
from tierd.core.manifest import DRAFT_NAME, Manifest
from tierd.core.manifest_codec import MAX_MANIFEST_SIZE, decode
from tierd.spool.file_io import open_plain

log = logging.getLogger("tierd")

_LOG_INTERVAL_S = 60.0  # seconds between two lines of the log


class FetchProgress:
    """Called with each progress message of a daemon that fetches `part`.

    Rank 0's is a line on the terminal, if there is one, until the context ends. Otherwise it is a line of the log, once
    a minute. Raises `StoreUnavailable` if no byte arrived for `stalled_s`.
    """

    def __init__(self, part: PartId, stalled_s: float = USUAL_TIMINGS.stalled_s) -> None:
        self._stalled_s = stalled_s
        self._part, self._at, self._since = part, -1, time.monotonic()
        self._began: tuple[float, int] | None = None  # when the first size came, and what was there
        self._logged = -_LOG_INTERVAL_S
        self._line = TerminalLine()

    def __call__(self, progress: dict[str, Any]) -> None:
        done_bytes, total, now = int(progress.get("done", -1)), int(progress.get("total", 0)), time.monotonic()
        if done_bytes != self._at:
            self._at, self._since = done_bytes, now
        elif now - self._since >= self._stalled_s:
            raise StoreUnavailable(
                f"{self._part}: no byte came from a tier for {self._stalled_s:.0f} s; restoring again goes on from "
                f"{max(done_bytes, 0)} of {total} bytes"
            )
        if not total:
            return
        began, before = self._began = self._began or (now, done_bytes)
        tiers = ", ".join(progress.get("tiers", ())) or "the tiers"
        sizes = (
            f"{done_bytes / 1e9:.1f} of {total / 1e9:.1f} "
            f"GB{transfer_rate_text(done_bytes - before, now - began, total - done_bytes)}"
        )
        activity = f"fetching {self._part} from {tiers}"
        if self._part.rank == 0 and self._line.draw(f"tierd: {sizes}: {activity}"):  # ranks may share a terminal
            return
        if now - self._logged >= _LOG_INTERVAL_S or done_bytes >= total:
            self._logged = now
            log.info("%s: %s", activity, sizes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._line.__exit__(*error)


def fetched_tiers(part: PartId, answer: Mapping[str, Any]) -> list[str]:
    """Return the tiers that provided chunks, by a daemon's answer to `Fetch`; log what is corrupt on others."""
    for defect in answer.get("defects", ()):  # an older daemon does not say
        log.warning("%s: a copy is corrupt, and another one was read; the daemon repairs it: %s", part, defect)
    return list(answer["tiers"])


def read_draft(directory: Path, part: PartId) -> Manifest:
    """Read the manifest of a part that the daemon fetches into `directory`."""
    with os.fdopen(open_plain(directory / DRAFT_NAME), "rb") as file:
        return decode(file.read(MAX_MANIFEST_SIZE + 1), part)
