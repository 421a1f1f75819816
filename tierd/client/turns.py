"""Turns at the interpreter's lock: short ones while training waits.

Invariant: when the last thread leaves `short_turns`, the interpreter's switch interval is what the process had set.

A thread that asks for the lock gets it from one that computes after 5 ms, and from four of them after 20 ms. `save`
lets the lock go dozens of times, because torch does so in most of its operators. So threads that compute could hold up
a call of a millisecond for a quarter of a second.
"""

from __future__ import annotations

import sys
import time

_SHORT_S = 127e-6  # a value that nobody else would set
_GIVEN_S = 50e-6  # a thread that was woken has the lock by then

_waiting: list[None] = []  # one for each thread or handler inside; its methods are one step each
_usual_s = 0.0


class _ShortTurns:
    def __enter__(self) -> None:
        global _usual_s
        _waiting.append(None)
        interval_s = sys.getswitchinterval()
        if interval_s > 1.01 * _SHORT_S:
            _usual_s = interval_s
            sys.setswitchinterval(_SHORT_S)

    def __exit__(self, *_: object) -> None:
        _waiting.pop()
        if not _waiting and _usual_s and abs(sys.getswitchinterval() - _SHORT_S) < 0.01 * _SHORT_S:
            sys.setswitchinterval(_usual_s)


short_turns = _ShortTurns()


def give_way() -> None:
    """Let a thread that waits for the interpreter's lock have it. Work that nobody waits for calls this after every
    millisecond."""
    time.sleep(_GIVEN_S)
