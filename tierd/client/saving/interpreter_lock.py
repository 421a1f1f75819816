"""Short turns at the interpreter's lock while training waits.

Invariant: when the last thread leaves `short_switches`, the interpreter's switch interval is the one that the
process had set.

A thread that asks for the lock gets it from one computing thread after 5 ms, and from four of them after 20 ms. `save`
releases the lock dozens of times, because torch does so in most of its operators. So computing threads could delay a
call of one millisecond by a quarter of a second.
"""

from __future__ import annotations

import sys
import time

_SHORT_S = 127e-6  # a value that no other code would set
_GIVEN_S = 50e-6  # a woken thread has the lock by then

_waiting: list[None] = []  # one entry for each thread or handler inside; its methods are atomic
_usual_s = 0.0


class _ShortSwitches:
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


short_switches = _ShortSwitches()


def give_way() -> None:
    """Release the interpreter's lock to a waiting thread. Background work calls this after every millisecond."""
    time.sleep(_GIVEN_S)
