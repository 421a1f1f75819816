"""What waits to be told to one receiver: bounded, and no more of it a minute than was asked for.

Law: nothing vanishes uncounted. What was held back, found no room or was given up is told later as one event of how
many of each kind. What is urgent is never held back, and makes room for itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

from tierd.core.events import KINDS, Event

ROOM = 1000  # events
_MINUTE = 60.0  # seconds


class Outbox:
    """Events for one receiver, in order. Times are monotonic seconds.

    A minute begins with the first event after the last minute; after `per_minute` of them, the others of that minute
    are held back. What is urgent counts, and passes in any case.

    Attributes:
        missed: by kind, what was not told and not yet told of.
        held: events that were held back since the start.
        lost: events that found no room since the start.
    """

    def __init__(self, events: Collection[str], per_minute: int, room: int = ROOM) -> None:
        self._events, self._per_minute, self._room = frozenset(events), per_minute, room
        self._waiting: deque[Event] = deque()
        self._end = 0.0  # of the minute
        self._passed = 0  # events in it
        self.missed: Counter[str] = Counter()
        self.held = self.lost = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, event: Event, now: float) -> bool:
        """Take an event in; whether there is now something to do."""
        if event.what not in self._events:
            return False
        urgent = KINDS[event.what].urgent
        self._turn(now)
        if self._passed >= self._per_minute and not urgent:
            self.held += 1
            self.miss(event)
            return True
        if len(self._waiting) >= self._room:
            self.lost += 1
            plain = next((one for one in self._waiting if not KINDS[one.what].urgent), None) if urgent else event
            self.miss(event if plain is None else plain)
            if plain is None or plain is event:
                return True
            self._waiting.remove(plain)
        self._passed += 1
        self._waiting.append(event)
        return True

    def _turn(self, now: float) -> None:
        if now >= self._end:
            self._end, self._passed = now + _MINUTE, 0

    def miss(self, event: Event) -> None:
        """An event was not told, and will not be."""
        self.missed[event.what] += 1

    def take(self, now: float, *, last: bool = False) -> Event | Counter[str] | None:
        """The next event to tell; or, once the minute is over or this is the `last` call, how many were not told."""
        if self._waiting:
            return self._waiting.popleft()
        if self.missed and (last or now >= self._end):
            self._turn(now)
            self._passed += 1
            missed, self.missed = self.missed, Counter()
            return missed
        return None

    def wait(self, now: float) -> float | None:
        """Seconds until `take` gives something though nothing more is offered; None where it will not."""
        if self._waiting:
            return 0.0
        return max(0.0, self._end - now) if self.missed else None
