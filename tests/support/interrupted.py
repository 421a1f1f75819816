"""A signal handler's work, at a chosen line of the code under test."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path


@contextlib.contextmanager
def at_line(moment: int, files: Collection[str], handler: Callable[[], object]) -> Iterator[list[str]]:
    """Call `handler` before the line numbered `moment` that this thread runs in one of `files`.

    Yields:
        a list that holds the line after `handler` was called; empty if fewer lines ran.
    """
    fired: list[str] = []
    count = 0

    def line(frame, event, arg):
        nonlocal count
        if event == "line" and not fired:
            if count == moment:
                fired.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                sys.settrace(None)
                handler()
            count += 1
        return line

    sys.settrace(lambda frame, event, arg: line if Path(frame.f_code.co_filename).name in files else None)
    try:
        yield fired
    finally:
        sys.settrace(None)
