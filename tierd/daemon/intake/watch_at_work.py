"""The state of one `[[watch]]` at work, and calls in its thread.

Invariant: the thread has ended its call when `run_in` returns or raises, also if it was cancelled.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from tierd.core.config import WatchConfig
from tierd.core.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

TRIES = 3  # failed tries in a row after which nothing waits for a directory


class RunNotWatched(ConfigError):
    """The run that a watch names is a trainer's, or that of another directory."""


class Stopped(Exception):
    """The daemon ends, or the watch was removed from its configuration."""


@dataclass(slots=True)
class WatchAtWork:
    """A watch at work.

    Attributes:
        ending: whether its thread has to end soon.
        idle: whether its last listing left nothing to take.
        tries: how many times in a row the directory could not be watched.
        error: why it cannot be watched.
        refused: the units that are not taken as they are, by path, and why.
    """

    watch: WatchConfig
    ending: bool = False
    idle: bool = False
    tries: int = 0
    error: Exception | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is left to take, or the directory cannot be watched."""
        return self.idle or self.tries >= TRIES or isinstance(self.error, RunNotWatched)

    def going(self) -> None:
        if self.ending:
            raise Stopped


async def run_in(
    pool: ThreadPoolExecutor, one: WatchAtWork, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a call in the watch's thread. If cancelled, have the call end, and wait for that."""
    work = asyncio.get_running_loop().run_in_executor(pool, functools.partial(call, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        one.ending = True
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # retrieved, so that asyncio does not warn
        raise
