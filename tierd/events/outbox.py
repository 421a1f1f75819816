"""The queue of events for one receiver: bounded in length and in events a minute.

Invariant: every dropped event is counted. One later event reports, by kind, how many events were held back, found no
space or were given up. An urgent event is never held back, and displaces an event that is not urgent.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

from tierd.core.event_kinds import KINDS, Event

ROOM = 1000  # events
_MINUTE = 60.0  # seconds


class Outbox:
    """Events for one receiver, in order. Times are monotonic seconds.

    A minute begins with the first event after the last minute. After `per_minute` events, the others of that minute are
    held back. An urgent event counts too, and passes in any case.

    Args:
        events: the kinds of event that the receiver subscribes to.
        per_minute: the largest number of events a minute.
        room: the largest number of queued events.

    Attributes:
        missed: by kind, events that were dropped and not reported yet.
        held: events that were held back since the start.
        lost: events for which the queue had no space since the start.
    """

    def __init__(self, events: Collection[str], per_minute: int, room: int = ROOM) -> None:
        self._events, self._per_minute, self._room = frozenset(events), per_minute, room
        self._waiting: deque[Event] = deque()
        self._end = 0.0  # when the current minute ends
        self._passed = 0  # events in the current minute
        self.missed: Counter[str] = Counter()
        self.held = self.lost = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, event: Event, now: float) -> bool:
        """Queue an event. Returns whether the thread now has something to do."""
        if event.what not in self._events:
            return False
        urgent = KINDS[event.what].urgent
        self._begin_minute(now)
        if self._passed >= self._per_minute and not urgent:
            self.held += 1
            self.miss(event)
            return True
        if len(self._waiting) >= self._room:
            self.lost += 1
            plain = (
                next((waiting_event for waiting_event in self._waiting if not KINDS[waiting_event.what].urgent), None)
                if urgent
                else event
            )
            self.miss(event if plain is None else plain)
            if plain is None or plain is event:
                return True
            self._waiting.remove(plain)
        self._passed += 1
        self._waiting.append(event)
        return True

    def _begin_minute(self, now: float) -> None:
        if now >= self._end:
            self._end, self._passed = now + _MINUTE, 0

    def miss(self, event: Event) -> None:
        """Count an event that was dropped."""
        self.missed[event.what] += 1

    def take(self, now: float, *, last: bool = False) -> Event | Counter[str] | None:
        """Return the next event to send; else the counts of dropped events, or None.

        Counts are returned once the minute has ended, or if this is the `last` call.
        """
        if self._waiting:
            return self._waiting.popleft()
        if self.missed and (last or now >= self._end):
            self._begin_minute(now)
            self._passed += 1
            missed, self.missed = self.missed, Counter()
            return missed
        return None

    def wait(self, now: float) -> float | None:
        """Return the seconds until `take` returns something without a further offer; None if it never will."""
        if self._waiting:
            return 0.0
        return max(0.0, self._end - now) if self.missed else None
