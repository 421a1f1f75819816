"""One seeded event loop with a simulated clock: nothing waits, and one seed is one order of events.

Invariant: callbacks run in the order that asyncio promises. What a real machine leaves open, how long a thread or a
network takes, is drawn from the seed; so is everything that tierd asks the system for: clocks, tokens, threads. When
nothing is ready, the clock jumps to the next timer; when there is none, or the trial goes on for too long, that is a
hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

from faults.rounds import Lost

# Seconds that one plan may cost: as on a quiet machine, nothing, or so much that each is good for half a minute.
_COSTS_S = (0.0001, 0.001, 0.01), (0.0,), (0.0001, 0.01, 0.3), (0.01, 0.3, 3.0)
EPOCH = 1_790_000_000.0  # seconds since 1970 when a trial begins


class ProcessLife:
    """One life of a node's processes: from a start to a crash. What is done in its context is its own."""

    def __init__(self, name: str, skew: float = 0.0) -> None:
        self.name, self.skew = name, skew  # seconds that its wall clock is wrong
        self.dead = False
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something in this life."""
        context = contextvars.copy_context()
        context.run(LIFE.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    def run(self, call: Callable[[], Any]) -> Any:
        context = contextvars.copy_context()
        context.run(LIFE.set, self)
        return context.run(call)

    def end(self) -> None:
        """From here on nothing that it does has any effect outside, whatever its `finally`s try."""
        self.dead = True
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()

    def note(self, task: asyncio.Task[Any]) -> None:
        self.tasks.append(task)
        if len(self.tasks) > 200:
            self.tasks = [one for one in self.tasks if not one.done()]


LIFE: contextvars.ContextVar[ProcessLife | None] = contextvars.ContextVar("life", default=None)


class SimLoop(asyncio.BaseEventLoop):
    """`steps` callbacks were run, `after` is called after each, and with `most` of them it is a hang."""

    def __init__(self, rng: random.Random, most: int) -> None:
        super().__init__()
        self.rng, self.most = rng, most
        self.now, self.steps = 1000.0, 0
        self.slept = 0.0  # seconds of these in which nobody could do anything
        self.after: Callable[[], None] = lambda: None
        self.failed: BaseException | None = None
        self.set_task_factory(_make_task)
        self.set_exception_handler(self._handle)

    def time(self) -> float:
        return self.now

    def jump(self, seconds: float) -> None:
        """Let time pass at once, as on a machine that slept."""
        self.now += seconds
        self.slept += seconds

    def lose(self, error: BaseException) -> None:
        """A promise was broken, noticed where nobody waits for the answer: the trial ends after this step."""
        self.failed = self.failed or error

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Lost):
            self.lose(error)

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        while scheduled and scheduled[0]._cancelled:
            self._drop()
        if not ready:
            if not scheduled:
                raise Lost("a hang: everybody waits, and nothing will ever happen")
            self.now = max(self.now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self.now:
            handle = self._drop()
            if not handle._cancelled:
                ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            self.steps += 1
            handle._run()
            self.after()
            if self.failed:
                raise self.failed
        if self.steps > self.most:
            raise Lost(f"a hang: {self.steps} steps, and {self.now - 1000:.0f} simulated seconds, without an end")

    def _drop(self) -> asyncio.TimerHandle:
        handle = heapq.heappop(self._scheduled)
        if handle._cancelled:
            self._timer_cancelled_count -= 1
        handle._scheduled = False
        return handle

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def run_in_executor(self, executor: Any, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A thread: it does all at once, after a while. Cancelled, it goes on if it had begun; dead, it does not."""
        done = self.create_future()
        life = LIFE.get()

        def work() -> None:
            if life is not None and life.dead:
                done.cancel()
                return
            if done.cancelled() and self.rng.random() < 0.5:
                return
            try:
                found = call(*args)
            except BaseException as error:
                if not done.done():
                    done.set_exception(error)
                elif isinstance(error, Lost):
                    self.lose(error)
            else:
                if not done.done():
                    done.set_result(found)

        self.call_later(self.rng.choice((0.0, 0.0, 0.0003, 0.002, 0.02)), work)
        return done


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Any = None) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    life = context.get(LIFE) if context is not None else LIFE.get()
    if life is not None:
        life.note(task)
        if life.dead:
            task.cancel()
    return task


@contextlib.contextmanager
def clocked(loop: SimLoop) -> Iterator[None]:
    """Within, clocks and tokens are the trial's."""
    drawn = loop.rng.random()
    tokens, speed, worked_s = random.Random(drawn), random.Random(f"speed {drawn}"), 0.0
    costs_s = speed.choice(_COSTS_S)

    def wall() -> float:
        life = LIFE.get()
        return EPOCH + loop.now + (life.skew if life else 0.0)

    def thread_time() -> float:
        """What planning costs is measured, and sets how long a plan is good: a seed draws that, too."""
        nonlocal worked_s
        worked_s += speed.choice(costs_s)
        return worked_s

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (time, "monotonic", loop.time),
            (time, "time", wall),
            (time, "time_ns", lambda: int(wall() * 1e9)),
            (time, "thread_time", thread_time),
            (secrets, "token_hex", lambda size=32: tokens.randbytes(size).hex()),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def run(loop: SimLoop, work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; what is left then is dropped."""
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.after = lambda: None
        loop.failed, loop.most = None, loop.steps + 20_000
        with contextlib.suppress(BaseException):
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
