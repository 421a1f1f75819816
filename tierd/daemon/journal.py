"""What happened: events for people, counters for machines, and a log line for each.

Law: an event is told once, when it is so, with the place it happened in; nothing here can fail the work it tells of.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tierd.core.ids import CheckpointId, PartId

log = logging.getLogger("tierd.daemon")

_KEPT = 256  # events
_BAD = ("corrupt", "quarantined", "persist failed")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a checkpoint or part: `at` is RFC 3339 in UTC, `why` may be empty."""

    at: str
    what: str
    place: str
    subject: str
    why: str = ""


class Journal:
    """The daemon's memory of what it did; `told` is called with every event as it happens."""

    def __init__(self, told: Callable[[Event], None] | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self.events: deque[Event] = deque(maxlen=_KEPT)
        self._told = told or (lambda event: None)

    def tell(self, what: str, place: str, subject: PartId | CheckpointId, why: str) -> None:
        """Tell of an event."""
        event = Event(datetime.now(UTC).isoformat(timespec="milliseconds"), what, place, str(subject), why)
        self.events.append(event)
        self._told(event)
        log.log(logging.ERROR if what in _BAD else logging.INFO, "%s: %s %s: %s", place, what, subject, why)
