"""Signs of life, and how long a rank is waited for that gives them or does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

_PATIENT_S = 1.0  # how long a rank is waited for before its signs of life are read


class Sign(msgspec.Struct, frozen=True, array_like=True):
    """A sign of life.

    Attributes:
        number: counts this rank's signs.
        inside: whether the rank is in an `attending` block, where others wait for it.
        said: the number of exchanges for which the rank has put its message.
        ended: the number of exchanges whose end rank 0 has published.
    """

    number: int = 0
    inside: bool = False
    said: int = 0
    ended: int = 0


class Signs(Protocol):
    """What a `Watch` asks about other ranks.

    Attributes:
        silent_s: seconds after which a rank that gave no sign of life counts as gone.
        beat_s: seconds between two signs of life.
    """

    @property
    def silent_s(self) -> float: ...

    @property
    def beat_s(self) -> float: ...

    def signs(self, ranks: Collection[int]) -> dict[int, Sign]:
        """Return each rank's last sign of life; one with number 0 if there is none."""
        ...

    def name(self, rank: int) -> str:
        """Return the rank and its process, for messages."""
        ...

    def died(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        ...


class Watch:
    """Decide how long to wait for some ranks.

    Args:
        arrived: whether a rank's sign shows that the rank has put the awaited note. If the note is missing then,
            another process has removed it.
    """

    def __init__(self, exchange: Signs, late_s: float, arrived: Callable[[Sign], bool]) -> None:
        self._exchange, self._late_s, self._has_arrived = exchange, late_s, arrived
        self._start_s = self._read = time.monotonic()
        self._signs: dict[int, tuple[Sign, float]] = {}  # by rank: the last sign, and when it was first read
        # By rank: when its note was first seen to be missing although the rank had put it.
        self._missing_since: dict[int, float] = {}

    def given_up(self, ranks: Collection[int]) -> str:
        """Describe which of `ranks` are not waited for any longer, and why; empty if all may still arrive."""
        now = time.monotonic()
        if now - self._read < min(_PATIENT_S, self._exchange.beat_s):
            return ""
        self._read = now
        signs = self._exchange.signs(ranks) if ranks else {}
        return "; ".join(why for rank in sorted(ranks) if (why := self._hopeless(rank, signs[rank], now)))

    def _hopeless(self, rank: int, sign: Sign, now: float) -> str:
        exchange = self._exchange
        if exchange.died(rank):
            return f"{exchange.name(rank)} has ended"
        if rank not in self._signs or self._signs[rank][0] != sign:
            self._signs[rank] = sign, now
        silent_s, waited_s = now - self._signs[rank][1], now - self._start_s
        if self._has_arrived(sign) and now - self._missing_since.setdefault(rank, now) > exchange.silent_s:
            return f"what {exchange.name(rank)} said is not there any more"
        if sign.inside:
            if silent_s > exchange.silent_s:
                return f"{exchange.name(rank)} has given no sign of life for {silent_s:.0f} s"
        elif waited_s > self._late_s:
            return f"{exchange.name(rank)} did not come within {waited_s:.0f} s"
        return ""
