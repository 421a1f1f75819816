"""A place that holds objects, over a line that fails in every way in which one can.

Invariant: a call that is answered well was done, and all of it. A call that is not, was done, will be within a minute,
was done in part, or never is; so is one whose caller was cancelled or died. A deletion that was asked for again and
then answered is over, and has no late effect: a store where it had one could not be told apart from one that loses what
was put since. What is there is always whole.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from faults.simulation.loop import ProcessLife

from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.stores.base import Buffer, ObjectInfo, Store, check_key, destination, octets

LATE = 60.0  # seconds after which a call whose answer was lost takes no effect any more


@dataclass
class Weather:
    """How a trial's lines misbehave: probabilities of one call."""

    fails: float = 0.0  # not done
    lost: float = 0.0  # done, and the answer is lost
    late: float = 0.0  # done later, or never
    stalls: float = 0.0  # never answered; done or not
    partial: float = 0.0  # of a deletion or a listing
    spoils: float = 0.0  # other bytes are stored than were put
    flips: float = 0.0  # other bytes come than are stored
    slow: float = 0.01  # seconds a call takes, about

    def calm(self) -> None:
        self.fails = self.lost = self.late = self.stalls = self.partial = self.spoils = self.flips = 0.0


class Bucket:
    """The objects of one tier. `changed` is told of every effect: the key, what it held, what it holds, who did it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.keys: list[str] = []
        self.puts = self.version = 0
        self.changed: Callable[[str, bytes | None, bytes | None, str], None] = lambda key, old, new, who: None

    def put(self, key: str, data: bytes, who: str) -> None:
        old = self.objects.get(key)
        self.puts += 1
        self.version += 1
        if old is None:
            insort(self.keys, key)
        self.objects[key] = data, self.puts
        self.changed(key, old[0] if old else None, data, who)

    def delete(self, key: str, who: str) -> None:
        old = self.objects.pop(key, None)
        self.version += 1
        if old is not None:
            del self.keys[bisect_left(self.keys, key)]
            self.changed(key, old[0], None, who)


class Line(Store):
    """One life's line to a bucket: a `Store`. `until`: it answers nothing but "slow down" before that time."""

    def __init__(
        self, bucket: Bucket, life: ProcessLife, weather: Weather, rng: random.Random, count: Counter[str]
    ) -> None:
        self.bucket, self._life, self._weather, self._rng, self._count = bucket, life, weather, rng, count
        self.until = 0.0
        self._deletions: dict[str, list[asyncio.TimerHandle]] = {}  # on their way
        self._late = ""  # " late" while something takes effect for which nobody waits any more
        self._loop = asyncio.get_running_loop()

    async def _travel(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.5, 1.0, 1.0, 3.0)) * self._weather.slow)

    def _fate(self, *kinds: str) -> str:
        if self._life.dead:
            raise StoreUnavailable("this node is dead")
        if self._loop.time() < self.until:
            self._count["store faults: slow down"] += 1
            return "fails"
        for kind in kinds:
            if self._rng.random() < getattr(self._weather, kind):
                self._count[f"store faults: {kind}"] += 1
                return kind
        return ""

    async def _do(self, effects: dict[str, Callable[[], None]], fate: str, doing: str) -> None:
        """Have these effects, one after the other, as fate will."""
        left = dict(effects)
        try:
            await self._travel()
            if fate == "fails":
                raise StoreUnavailable(f"{doing}: 503 SlowDown")
            if fate == "stalls":
                self._later(left)
                await asyncio.sleep(1e7)
            if fate == "late":
                self._later(left)
                raise StoreUnavailable(f"{doing}: reset")
            while left:
                if fate == "partial" and len(left) < len(effects) and self._rng.random() < 0.5:
                    raise StoreUnavailable(f"{doing}: {len(left)} were not done")
                if self._life.dead:
                    raise StoreUnavailable("this node is dead")
                left.pop(next(iter(left)))()
                if left and self._rng.random() < 0.3:
                    await self._travel()
            await self._travel()
        except asyncio.CancelledError:
            self._later(left)
            raise
        if fate in ("lost", "partial"):
            raise StoreUnavailable(f"{doing}: the answer was lost")

    def _later(self, effects: dict[str, Callable[[], None]]) -> None:
        """What is on its way may still arrive."""
        for key, effect in effects.items():
            if self._rng.random() < 0.6:
                handle = self._loop.call_later(self._rng.random() ** 3 * LATE, self._arrives, effect)
                self._deletions.setdefault(key, []).append(handle)

    def _arrives(self, effect: Callable[[], None]) -> None:
        self._late = " late"
        try:
            effect()
        finally:
            self._late = ""

    async def put(self, key: str, data: Buffer) -> str:
        await self._put(key, data, replace=True)
        return ""

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        return "" if await self._put(key, data, replace=False) else None

    async def _put(self, key: str, data: Buffer, *, replace: bool) -> bool:
        """Whether the object is put: what is there when the call takes effect is not replaced unless it may be."""
        check_key(key)
        content, who, is_put = bytes(octets(data)), self._life.name, False
        fate = self._fate("fails", "lost", "late", "stalls", "spoils")
        if fate == "spoils" and content:
            content = _flipped(content, self._rng)
            who += " spoiled"

        def put() -> None:
            nonlocal is_put
            is_put = replace or key not in self.bucket.objects
            if is_put:
                self.bucket.put(key, content, who + self._late)

        await self._do({f"put {key}": put}, fate, f"put {key}")
        self._count["puts of what was there"] += not is_put
        return is_put

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        check_key(key)
        fate = self._fate("fails", "stalls", "flips")
        await self._do({}, fate, f"get {key}")
        if key not in self.bucket.objects:
            raise ObjectNotFound(key)
        content = self.bucket.objects[key][0]
        if fate == "flips" and content:
            content = _flipped(content, self._rng)
        if into is None:
            return content
        view = destination(into, len(content), f"get {key}")
        view[:] = content
        return view

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        fate = self._fate("fails", "stalls", "partial")
        await self._do({}, "" if fate == "partial" else fate, f"scan {prefix}")
        page = self._rng.choice((2, 10, 50))
        shown, keys = 0, self.bucket.keys
        at = max(bisect_left(keys, prefix), bisect_right(keys, after))
        while at < len(keys) and (key := keys[at]).startswith(prefix):
            content, number = self.bucket.objects[key]
            if shown and fate == "partial" and self._rng.random() < 0.3:
                raise StoreUnavailable(f"scan {prefix}: cut off behind {key}")
            yield ObjectInfo(key, len(content), str(number))
            shown += 1
            if shown % page == 0:
                await self._travel()
            at = bisect_right(keys, key)  # what is there may have changed meanwhile
        if fate == "partial":
            raise StoreUnavailable(f"scan {prefix}: cut off at its end")

    async def directories(self, prefix: str) -> list[str] | None:
        await self._do({}, self._fate("fails", "stalls"), f"scan {prefix}")
        keys = (key for key in self.bucket.keys if key.startswith(prefix))
        return list(dict.fromkeys(key[len(prefix) :].partition("/")[0] for key in keys))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        fate = self._fate("fails", "lost", "late", "stalls", "partial")
        effects: dict[str, Callable[[], None]] = {
            key: lambda key=key: self.bucket.delete(key, self._life.name)  # type: ignore[misc]
            for key in self._rng.sample(list(keys), len(keys))
        }
        await self._do(effects, fate, f"delete {len(keys)} keys")
        for key in keys:
            for handle in self._deletions.pop(key, ()):
                handle.cancel()

    async def aclose(self) -> None: ...


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)
