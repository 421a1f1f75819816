"""Whether training waits for what is being done: then it is neither limited nor put behind others.

Law: haste is a context's, and of every task begun in it; who says nothing is in no hurry.
"""

from __future__ import annotations

from contextvars import ContextVar

_hasty: ContextVar[bool] = ContextVar("hasty", default=False)


def hasten() -> None:
    """From here on in this context: training, or somebody at a terminal, waits for it."""
    _hasty.set(True)


def is_hasty() -> bool:
    """Whether somebody waits for what is done in this context."""
    return _hasty.get()
