"""How fast things go: each tier's link and the encoder, measured as the work is done, and so whether packing pays.

Law: a rate is bytes over the time in which at least one was on its way, so that waiting for something else makes
nothing look slow. Old measurements fade: half of what is known is of the last minute of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from tierd.codec import Encoded, encode
from tierd.core.effort import Effort, effort
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk

_FADE = 60.0  # seconds of work
_ENOUGH = 64 << 20  # bytes: less says more of the waiting than of the rate
_FADE_BYTES = 4 << 30  # of what was packed: ratios change as training goes on
_TRY = 64  # one chunk in so many is packed even where it does not pay


class Meter:
    """Bytes over time; any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, enough: int = _ENOUGH) -> None:
        self._clock, self._enough, self._lock = clock, enough, Lock()
        self._active, self._since = 0, 0.0
        self._bytes = self._seconds = 0.0

    @contextmanager
    def moving(self, size: int) -> Iterator[None]:
        """`size` bytes are on their way while the context lasts; they count if it ends well."""
        with self._lock:
            self._settle()
            self._active += 1
        done = 0
        try:
            yield
            done = size
        finally:
            with self._lock:
                self._settle()
                self._active -= 1
                self._bytes += done

    @property
    def rate(self) -> float | None:
        """Bytes per second; None before enough has been measured."""
        with self._lock:
            self._settle()
            return self._bytes / self._seconds if self._bytes >= self._enough and self._seconds else None

    def _settle(self) -> None:
        now = self._clock()
        if self._active:
            self._seconds += now - self._since
        self._since = now
        if self._seconds > 2 * _FADE:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2


class Pace:
    """What one daemon's flushes have measured, and the encoder that goes by it.

    One answer for all tiers, since a chunk is the same bytes on each: it packs as long as one of them gains by it.
    """

    def __init__(self) -> None:
        self._links: dict[str, Meter] = {}
        self._encoder = Meter()
        self._raw = self._stored = 0.0  # bytes that were packed, and what became of them
        self._efforts: dict[str, Effort] = {}
        self._unpacked = 0

    def link(self, tier: str) -> Meter:
        """The meter of what is put on a tier."""
        return self._links.setdefault(tier, Meter())

    def effort(self, tier: str) -> Effort:
        """Whether packing pays on this tier's account, and why."""
        before = self._efforts.get(tier)
        ratio = self._stored / self._raw if self._raw >= _ENOUGH else None
        found = effort(self.link(tier).rate, self._encoder.rate, ratio, before.pack if before else True)
        self._efforts[tier] = found
        return found

    def encode(self, part: PartId, chunk: Chunk, raw: bytes | bytearray | memoryview) -> Encoded:
        """`codec.encode`, packing if it pays on any tier; now and then anyway, to know."""
        pays = any([self.effort(tier).pack for tier in tuple(self._links)] or [True])
        self._unpacked = 0 if pays else self._unpacked + 1
        if not pays and self._unpacked % _TRY:
            return encode(part, chunk, raw, pack=False)
        with self._encoder.moving(chunk.size):
            encoded = encode(part, chunk, raw)
        fade = 0.5 if self._raw > _FADE_BYTES else 1.0
        self._raw = self._raw * fade + chunk.size
        self._stored = self._stored * fade + encoded.stored.size
        return encoded
