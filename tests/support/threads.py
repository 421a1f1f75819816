"""Several calls at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def together(*works: Callable[[], Any], limit_s: float = 30.0) -> list[Any]:
    """Each in a thread, which ends within `limit_s` seconds; what each returned or raised."""
    results: list[Any] = [None] * len(works)

    def one(number: int) -> None:
        try:
            results[number] = works[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), "somebody waits without an end"
    return results
