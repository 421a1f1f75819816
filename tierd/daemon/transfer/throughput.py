"""Measure the throughput of each tier's link and of the encoder, and decide whether compression pays.

Invariant: a rate is bytes over the time in which at least one byte was in transfer, so that other waits do not lower
it. Old measurements fade: half of the weight is on the last minute of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from tierd.codec.codec import EncodedChunk, encode
from tierd.core.compression_policy import CompressionChoice, compression_choice
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk

_FADE = 60.0  # seconds of work
_MIN_MEASURED_BYTES = 64 << 20  # bytes; fewer measure the latency rather than the rate
_FADE_BYTES = 4 << 30  # bytes that were compressed; older ones fade, because ratios change as training goes on
_TRY = 64  # one chunk in so many is compressed even if that does not pay, as a measurement


class ThroughputMeter:
    """Bytes over time. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, enough: int = _MIN_MEASURED_BYTES) -> None:
        self._clock, self._min_bytes, self._lock = clock, enough, Lock()
        self._active, self._since = 0, 0.0
        self._bytes = self._seconds = 0.0

    @contextmanager
    def moving(self, size: int) -> Iterator[None]:
        """Measure the transfer of `size` bytes until the context ends. An exception leaves the bytes uncounted."""
        with self._lock:
            self._settle()
            self._active += 1
        moved_bytes = 0
        try:
            yield
            moved_bytes = size
        finally:
            with self._lock:
                self._settle()
                self._active -= 1
                self._bytes += moved_bytes

    @property
    def rate(self) -> float | None:
        """Bytes per second; None until enough bytes have been measured."""
        with self._lock:
            self._settle()
            return self._bytes / self._seconds if self._bytes >= self._min_bytes and self._seconds else None

    def _settle(self) -> None:
        now = self._clock()
        if self._active:
            self._seconds += now - self._since
        self._since = now
        if self._seconds > 2 * _FADE:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2


class Throughput:
    """The measurements of one daemon's flushes, and the encoder that uses them.

    The decision is the same for all tiers, because a chunk has the same bytes on each. Chunks are compressed as long as
    one tier gains by it.
    """

    def __init__(self) -> None:
        self._links: dict[str, ThroughputMeter] = {}
        self._encoder = ThroughputMeter()
        self._raw = self._stored = 0.0  # bytes that were compressed, before and after
        self._choices: dict[str, CompressionChoice] = {}
        self._unpacked = 0

    def link(self, tier: str) -> ThroughputMeter:
        """Return the meter of the bytes that are put on a tier."""
        return self._links.setdefault(tier, ThroughputMeter())

    def compression(self, tier: str) -> CompressionChoice:
        """Return whether compression pays for this tier alone, and why."""
        before = self._choices.get(tier)
        ratio = self._stored / self._raw if self._raw >= _MIN_MEASURED_BYTES else None
        choice = compression_choice(self.link(tier).rate, self._encoder.rate, ratio, before.pack if before else True)
        self._choices[tier] = choice
        return choice

    def packs(self) -> bool:
        """Whether to compress the next chunk: if that pays for any tier, and sometimes as a measurement."""
        pays = any([self.compression(tier).pack for tier in tuple(self._links)] or [True])
        self._unpacked = 0 if pays else self._unpacked + 1
        return pays or not self._unpacked % _TRY

    def encode(self, part: PartId, chunk: Chunk, raw: bytes | bytearray | memoryview, pack: bool) -> EncodedChunk:
        """Encode a chunk as `codec.encode` does, and measure it."""
        if not pack:
            return encode(part, chunk, raw, pack=False)
        with self._encoder.moving(chunk.size):
            encoded = encode(part, chunk, raw)
        fade = 0.5 if self._raw > _FADE_BYTES else 1.0
        self._raw = self._raw * fade + chunk.size
        self._stored = self._stored * fade + encoded.stored.size
        return encoded
