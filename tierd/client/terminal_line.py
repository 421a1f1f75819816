"""One line of progress on the terminal of a training process, drawn anew each time.

Invariant: the line is erased when the work ends, so nothing that training prints shares it. Nothing is written unless
the standard error is a terminal.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Self

from tierd.core.printable import printable

_ERASE = "\r\x1b[K"  # ECMA-48: to the line's begin, and erase to its end


class TerminalLine:
    """The line. A context: its end erases the line."""

    def __init__(self) -> None:
        self._drawn = False

    def draw(self, text: str) -> bool:
        """Show `text` in place of the last one. Returns whether there is a terminal that shows it."""
        with suppress(OSError, ValueError, AttributeError):  # closed, or replaced by something without a descriptor
            if sys.stderr.isatty():
                width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
                self._write(_ERASE + printable(text)[:width])
                self._drawn = True
                return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            with suppress(OSError, ValueError, AttributeError):
                self._write(_ERASE)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def pace(moved: float, took_s: float, left_bytes: float) -> str:
    """Describe the rate by which `moved` bytes were moved, and the time that `left_bytes` take; empty if unknown."""
    if moved <= 0 or took_s <= 0:
        return ""
    rate = moved / took_s
    return f", {rate / 1e9:.2f} GB/s, {left_bytes / rate:.0f} s left"
