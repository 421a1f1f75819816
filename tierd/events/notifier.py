"""Send events to the receivers that the configuration names, each in a thread and from a bounded queue of its own."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

import msgspec

from tierd.core.config import NotifyConfig
from tierd.core.event_kinds import EVENT_KINDS, MORE_EVENTS, USUAL_KINDS, Event
from tierd.events.journal import Journal, utc_timestamp
from tierd.events.receivers import DeliveryFailed, Receiver, open_receiver
from tierd.threads import lower_priority

ROOM = 1000  # events
_MINUTE = 60.0  # seconds


class Outbox:
    """Events of the kinds in `events` for one receiver, in order. Times are monotonic seconds.

    A minute begins with the first event after the last minute. After `per_minute` events, the others of that minute are
    held back. An urgent event counts too, and passes in any case. At most `room` events are queued.

    Attributes:
        unreported_drops: by kind, events that were dropped and not reported yet.
        held_back: events that were held back since the start.
        overflowed: events for which the queue had no space since the start.
    """

    def __init__(self, events: Collection[str], per_minute: int, room: int = ROOM) -> None:
        self._events, self._per_minute, self._room = frozenset(events), per_minute, room
        self._waiting: deque[Event] = deque()
        self._end = 0.0  # when the current minute ends
        self._passed = 0  # events in the current minute
        self.unreported_drops: Counter[str] = Counter()
        self.held_back = self.overflowed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, event: Event, now: float) -> bool:
        """Queue an event. Returns whether the thread now has something to do."""
        if event.what not in self._events:
            return False
        urgent = EVENT_KINDS[event.what].is_urgent
        self._begin_minute(now)
        if self._passed >= self._per_minute and not urgent:
            self.held_back += 1
            self.count_dropped(event)
            return True
        if len(self._waiting) >= self._room:
            self.overflowed += 1
            queued = (waiting for waiting in self._waiting if not EVENT_KINDS[waiting.what].is_urgent)
            plain = next(queued, None) if urgent else event
            self.count_dropped(event if plain is None else plain)
            if plain is None or plain is event:
                return True
            self._waiting.remove(plain)
        self._passed += 1
        self._waiting.append(event)
        return True

    def _begin_minute(self, now: float) -> None:
        if now >= self._end:
            self._end, self._passed = now + _MINUTE, 0

    def count_dropped(self, event: Event) -> None:
        self.unreported_drops[event.what] += 1

    def take(self, now: float, *, last: bool = False) -> Event | Counter[str] | None:
        """Return the next event to send; else the counts of dropped events, or None.

        Counts are returned once the minute has ended, or if this is the `last` call.
        """
        if self._waiting:
            return self._waiting.popleft()
        if self.unreported_drops and (last or now >= self._end):
            self._begin_minute(now)
            self._passed += 1
            missed, self.unreported_drops = self.unreported_drops, Counter()
            return missed
        return None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until `take` returns something without a further offer; None if it never will."""
        if self._waiting:
            return 0.0
        return max(0.0, self._end - now) if self.unreported_drops else None


_KILL_GRACE_S = 3.0  # further seconds for the tries that are then cut off
_MAX_WHY = 4000  # characters of an event's `why` that are sent


class NotifyStatus(msgspec.Struct, frozen=True):
    """One receiver of events. Counts are since the daemon's start.

    Attributes:
        name: `notify[0]`, `notify[1]` … in the order of the configuration.
        to: the part of the receiver's address that may be shown.
        delivered: events that the receiver accepted.
        failures: failed tries.
        dropped: events that the receiver did not get: `held`, `lost`, and those that were given up.
        held: events held back because of `per_minute`.
        lost: events for which the queue had no space.
        queued: events in the queue now.
        last_error: the last failure; None if the last try worked or there was no try.
    """

    name: str
    to: str
    delivered: int
    failures: int
    dropped: int
    held: int
    lost: int
    queued: int
    last_error: str | None


class Channel:
    """One receiver, its outbox, and the thread between them.

    `head` are members that are added to every event; `again_s` are the seconds before the second try.
    """

    def __init__(
        self, name: str, config: NotifyConfig, receiver: Receiver, head: dict[str, str], again_s: float
    ) -> None:
        self.name, self._receiver, self._head = name, receiver, head
        self._timeout, self._again_s = config.timeout_s, again_s
        self._outbox = Outbox(config.events or USUAL_KINDS, config.per_minute)
        self._changed = threading.Condition()
        self._ending = self._stopped = False
        self._delivered = self._failures = self._given_up = 0
        self._error: str | None = None
        self._in_vain = 0  # failed tries in a row
        self._thread = threading.Thread(target=self._run, name=f"tierd-{name}", daemon=True)
        self._journal: Journal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, journal: Journal) -> None:
        """Start the thread. The running loop then records in `journal` how tries end."""
        self._journal, self._loop = journal, asyncio.get_running_loop()
        self._thread.start()

    def offer(self, event: Event) -> None:
        """Queue an event without blocking."""
        if event.what == "failing" and (event.doing, event.place) == ("notify", self.name):
            return
        with self._changed:
            if self._outbox.offer(event, time.monotonic()):
                self._changed.notify()

    def end(self) -> None:
        """Send the queued events, with one try each, and end the thread."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def stop(self) -> None:
        """Cancel the try in progress."""
        self._stopped = True
        self._receiver.stop()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def status(self) -> NotifyStatus:
        with self._changed:
            box = self._outbox
            return NotifyStatus(
                name=self.name,
                to=self._receiver.name,
                delivered=self._delivered,
                failures=self._failures,
                dropped=box.held_back + box.overflowed + self._given_up,
                held=box.held_back,
                lost=box.overflowed,
                queued=len(box),
                last_error=self._error,
            )

    # -- its thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                at = time.monotonic()
                outgoing = self._outbox.take(at, last=self._ending)
                if outgoing is None:
                    if self._ending:
                        return
                    self._changed.wait(self._outbox.wait_s(at))
                    continue
            if isinstance(outgoing, Event):
                if not self._deliver(outgoing):
                    with self._changed:
                        self._given_up += 1
                        self._outbox.count_dropped(outgoing)
            elif not self._deliver(_summary(outgoing, self.name)):
                with self._changed:
                    self._outbox.unreported_drops.update(outgoing)
                    if self._ending:
                        return

    def _deliver(self, event: Event) -> bool:
        body = encode_event(event, self._head)
        for number in range(self._receiver.tries):
            if number and ((self._in_vain >= self._receiver.tries) or self._pause(self._again_s * 2 ** (number - 1))):
                return False
            try:
                self._receiver.deliver(body, self._timeout)
            except DeliveryFailed as error:
                if self._stopped:
                    return False
                self._record_try(str(error))
                if not error.is_retryable:
                    return False
            except Exception as error:  # a bug must not end the thread, and its text may contain secrets
                self._record_try(f"it failed: {type(error).__name__}")
                return False
            else:
                self._record_try(None)
                return True
        return False

    def _pause(self, seconds: float) -> bool:
        """Wait before another try. Returns True if there must be no other try, because the daemon ends."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ending, seconds)

    def _record_try(self, why: str | None) -> None:
        with self._changed:
            self._error = why
            self._delivered += why is None
            self._failures += why is not None
            self._in_vain = 0 if why is None else self._in_vain + 1
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._journal_try, why)

    def _journal_try(self, why: str | None) -> None:
        assert self._journal is not None
        work = ("notify", self.name)
        if why is None:
            self._journal.record_success(work)
        else:
            self._journal.record_failure(work, "notify", self.name, self._receiver.name, why)


def node_members(spool: str) -> dict[str, str]:
    """Return the members of an event that say where the daemon of this spool runs."""
    return {"node": socket.gethostname(), "spool": spool}


def encode_event(event: Event, node: Mapping[str, str]) -> bytes:
    """Encode an event as receivers get it, with the members of `node_members`."""
    body = msgspec.to_builtins(event) | {"level": event.level, "id": secrets.token_hex(8), **node}
    body["why"] = event.why[:_MAX_WHY]
    body["text"] = f"{node['node']}: {event.place}: {event.what} {event.subject}: {body['why']}"
    return msgspec.json.encode(body)


class Notifier:
    """All receivers of a configuration.

    The spool's path is a member of every event besides the node. The second try to deliver an event is after `again_s`
    seconds, then after twice as long; `close` sends queued events for `end_s`.

    Raises:
        ConfigError: a secret or file to which a `[[notify]]` refers cannot be read.
    """

    def __init__(
        self, configs: Sequence[NotifyConfig] = (), spool: str = "", *, again_s: float = 1.0, end_s: float = 5.0
    ) -> None:
        self._end_s = end_s
        head = node_members(spool)
        self._channels = [
            Channel(f"notify[{index}]", config, open_receiver(config, f"notify[{index}]"), head, again_s)
            for index, config in enumerate(configs)
        ]

    def start(self, journal: Journal) -> None:
        for channel in self._channels:
            channel.start(journal)

    def offer(self, event: Event) -> None:
        """Send an event to every receiver that subscribes to its kind, without blocking."""
        for channel in self._channels:
            channel.offer(event)

    async def close(self) -> None:
        """Send queued events for at most `end_s` seconds, then end every thread and process."""
        for channel in self._channels:
            channel.end()
        await self._join(self._end_s)
        for channel in self._channels:
            channel.stop()
        await self._join(_KILL_GRACE_S)

    async def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while any(channel.alive for channel in self._channels) and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def status(self) -> tuple[NotifyStatus, ...]:
        return tuple(channel.status() for channel in self._channels)


def _summary(counts: Counter[str], place: str) -> Event:
    why = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    return Event(
        at=utc_timestamp(),
        what=MORE_EVENTS,
        place=place,
        subject=f"{counts.total()} more",
        why=why,
        counts=dict(counts),
    )
