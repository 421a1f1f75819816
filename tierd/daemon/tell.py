"""Telling: events to those whom the configuration names, each in a thread of its own.

Law: telling neither delays nor fails the daemon's work. Offering an event costs no more than putting it into a bounded
outbox; what is not told is counted, and told of later. That a receiver fails is told to the others, not through itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from tierd.core.config import TellConfig
from tierd.core.events import MORE, USUAL, Event
from tierd.core.outbox import Outbox
from tierd.daemon.journal import Journal, now
from tierd.daemon.receivers import Receiver, Untold, open_receiver
from tierd.priority import lower

_LAST = 5.0  # seconds that what is queued has when the daemon ends
_KILLED = 3.0  # seconds more for what was cut off by that
_PAUSE = 1.0  # seconds before the second try; then twice as long
_WHY = 4000  # characters of an event's `why` that are told


class TellStatus(msgspec.Struct, frozen=True):
    """One `[[tell]]`: `to` is what may be shown of it. Counts are since the start: events `told`; `failures`, tries in
    vain; events `untold`, that is `held` back, `lost` for want of room, and given up; `waiting` now."""

    name: str
    to: str
    told: int
    failures: int
    untold: int
    held: int
    lost: int
    waiting: int
    last_error: str | None


class Channel:
    """One receiver, its outbox, and the thread between them.

    Args:
        head: members of every event that is told.
    """

    def __init__(self, name: str, config: TellConfig, receiver: Receiver, head: dict[str, str]) -> None:
        self.name, self._receiver, self._head = name, receiver, head
        self._timeout = config.timeout_s
        self._outbox = Outbox(config.events or USUAL, config.per_minute)
        self._changed = threading.Condition()
        self._ending = self._stopped = False
        self._told = self._failures = self._given_up = 0
        self._error: str | None = None
        self._in_vain = 0  # tries in a row
        self._thread = threading.Thread(target=self._run, name=f"tierd-{name}", daemon=True)
        self._journal: Journal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, journal: Journal) -> None:
        """Begin to tell; `journal` is told in the running loop how tries fare."""
        self._journal, self._loop = journal, asyncio.get_running_loop()
        self._thread.start()

    def offer(self, event: Event) -> None:
        """Take an event in; returns at once."""
        if event.what == "failing" and (event.doing, event.place) == ("tell", self.name):
            return
        with self._changed:
            if self._outbox.offer(event, time.monotonic()):
                self._changed.notify()

    def end(self) -> None:
        """Tell what is queued, each once, and then no more."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def stop(self) -> None:
        """Give up what is under way."""
        self._stopped = True
        self._receiver.stop()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def status(self) -> TellStatus:
        with self._changed:
            box = self._outbox
            return TellStatus(
                name=self.name,
                to=self._receiver.name,
                told=self._told,
                failures=self._failures,
                untold=box.held + box.lost + self._given_up,
                held=box.held,
                lost=box.lost,
                waiting=len(box),
                last_error=self._error,
            )

    # -- its thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower()
        while True:
            with self._changed:
                at = time.monotonic()
                found = self._outbox.take(at, last=self._ending)
                if found is None:
                    if self._ending:
                        return
                    self._changed.wait(self._outbox.wait(at))
                    continue
            if isinstance(found, Event):
                if not self._deliver(found):
                    with self._changed:
                        self._given_up += 1
                        self._outbox.miss(found)
            elif not self._deliver(_summary(found, self.name)):
                with self._changed:
                    self._outbox.missed.update(found)
                    if self._ending:
                        return

    def _deliver(self, event: Event) -> bool:
        body = self._body(event)
        for number in range(self._receiver.tries):
            if number and (self._error_lasts or self._rest(_PAUSE * 2 ** (number - 1))):
                return False
            try:
                self._receiver.give(body, self._timeout)
            except Untold as error:
                if self._stopped:
                    return False
                self._tried(str(error))
                if not error.again:
                    return False
            except Exception as error:  # a bug must not end the thread, and its text may repeat anything
                self._tried(f"it failed: {type(error).__name__}")
                return False
            else:
                self._tried(None)
                return True
        return False

    @property
    def _error_lasts(self) -> bool:
        """Whether an earlier event was given up, and none told since: one try is then enough."""
        return self._in_vain >= self._receiver.tries

    def _rest(self, seconds: float) -> bool:
        """Wait before another try; whether there is to be none, since the daemon ends."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ending, seconds)

    def _tried(self, why: str | None) -> None:
        with self._changed:
            self._error = why
            self._told += why is None
            self._failures += why is not None
            self._in_vain = 0 if why is None else self._in_vain + 1
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._note, why)

    def _note(self, why: str | None) -> None:
        assert self._journal is not None
        thing = ("tell", self.name)
        if why is None:
            self._journal.worked(thing)
        else:
            self._journal.failed(thing, "tell", self.name, self._receiver.name, why)

    def _body(self, event: Event) -> bytes:
        told = msgspec.to_builtins(event) | {"level": event.level, "id": secrets.token_hex(8), **self._head}
        told["why"] = event.why[:_WHY]
        told["text"] = f"{self._head['node']}: {event.place}: {event.what} {event.subject}: {told['why']}"
        return msgspec.json.encode(told)


class Teller:
    """All receivers of a configuration.

    Args:
        spool: named in every event, beside the node.

    Raises:
        ConfigError: something that a `[[tell]]` refers to cannot be read.
    """

    def __init__(self, tells: Sequence[TellConfig] = (), spool: str = "") -> None:
        head = {"node": socket.gethostname(), "spool": spool}
        self._channels = [
            Channel(f"tell[{index}]", tell, open_receiver(tell, f"tell[{index}]"), head)
            for index, tell in enumerate(tells)
        ]

    def start(self, journal: Journal) -> None:
        for channel in self._channels:
            channel.start(journal)

    def offer(self, event: Event) -> None:
        """Have an event told to whoever wants it; returns at once."""
        for channel in self._channels:
            channel.offer(event)

    async def close(self) -> None:
        """Give what is queued a last, short time; then end all that was begun."""
        for channel in self._channels:
            channel.end()
        await self._ended(_LAST)
        for channel in self._channels:
            channel.stop()
        await self._ended(_KILLED)

    async def _ended(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while any(channel.alive for channel in self._channels) and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def status(self) -> tuple[TellStatus, ...]:
        return tuple(channel.status() for channel in self._channels)


def _summary(counts: Counter[str], place: str) -> Event:
    why = ", ".join(f"{number} {what}" for what, number in counts.most_common())
    return Event(at=now(), what=MORE, place=place, subject=f"{counts.total()} more", why=why, counts=dict(counts))
