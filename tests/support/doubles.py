"""Stores that misbehave on purpose, around one that does not."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.stores.base import Buffer, ObjectInfo, Store, StoreWrapper
from tierd.stores.memory_store import MemoryStore


def is_chunk(key: str) -> bool:
    return "/chunks/" in key


def is_manifest(key: str) -> bool:
    return "/manifests/" in key


class Double(StoreWrapper):
    """Passes every call on to `inner` and notes it; each fault is an attribute to set.

    `error` is raised by every call while set. `before` is asked with `(operation, key)` before each call and may raise
    or sleep. `spoil` alters what is put. `lose` is a number of puts that are done and then answered with a failure.
    `verifies` is what a put answers instead of what `inner` does: the checksum that the place is proven to check.
    """

    def __init__(self, inner: Store | None = None) -> None:
        self.inner: Store = inner or MemoryStore()
        super().__init__(self.inner)
        self.calls: list[tuple[str, str]] = []
        self.error: Exception | None = None
        self.before: Callable[[str, str], None] | None = None
        self.spoil: Callable[[str, bytes], bytes] | None = None
        self.lose = 0
        self.verifies: str | None = None
        self.delay = 0.0

    def puts(self, of: Callable[[str], bool] = lambda key: True) -> list[str]:
        return [key for operation, key in self.calls if operation == "put" and of(key)]

    async def _enter(self, operation: str, key: str) -> None:
        self.calls.append((operation, key))
        if self.delay:
            await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        if self.before is not None:
            self.before(operation, key)

    async def put(self, key: str, data: Buffer) -> str:
        checksum = await self._put(self.inner.put, key, data)
        assert checksum is not None
        return checksum

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        return await self._put(self.inner.put_if_absent, key, data)

    async def _put(self, put: Callable[[str, Buffer], Awaitable[str | None]], key: str, data: Buffer) -> str | None:
        await self._enter("put", key)
        checksum = await put(key, self.spoil(key, bytes(data)) if self.spoil else data)
        if self.lose:
            self.lose -= 1
            raise StoreUnavailable(f"put {key}: the answer was lost")
        return checksum if self.verifies is None or checksum is None else self.verifies

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        await self._enter("get", key)
        return await self.inner.get(key, into)

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        await self._enter("scan", prefix)
        async for info in self.inner.scan(prefix, after):
            yield info

    async def directories(self, prefix: str) -> list[str] | None:
        await self._enter("names", prefix)
        return await self.inner.directories(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._enter("delete", key)
        await self.inner.delete(keys)


class Halting(Double):
    """Waits at its request number `at` until `go` is set."""

    def __init__(self, inner: Store, at: int) -> None:
        super().__init__(inner)
        self.at, self.go = at, asyncio.Event()

    async def _enter(self, operation: str, key: str) -> None:
        await super()._enter(operation, key)
        if len(self.calls) == self.at:
            await self.go.wait()


class Killed(BaseException):
    """The process is gone: no later request of it happens either."""


def dying(inner: Store, at: int, after: bool) -> Double:
    """A store of which a process makes `at` requests; with `after` the last one is done, and not answered."""
    double = Double(inner)

    def before(operation: str, key: str) -> None:
        number = len(double.calls)
        if number > at or (number == at and not after):
            raise Killed

    double.before = before
    return double


_DATED = "/retention/", "/timeline/", "README.md.id"  # what says when it was written


async def contents(store: Store, *, policies: bool = False) -> dict[str, bytes]:
    """Everything that a store holds; with `policies` also the runs' retention and heads, which say when they were
    written. An object that a daemon deletes meanwhile is left out."""
    keys = [info.key async for info in store.scan("") if policies or not any(room in info.key for room in _DATED)]
    objects = {}
    for key in keys:
        with suppress(ObjectNotFound):
            objects[key] = bytes(await store.get(key))
    return objects


def flipped(data: bytes, at: int | None = None) -> bytes:
    """`data` with one bit flipped."""
    changed = bytearray(data)
    changed[len(data) // 2 if at is None else at] ^= 0x10
    return bytes(changed)


async def flip(store: Store, key: str) -> None:
    """Flip one bit of a stored object."""
    await store.put(key, flipped(bytes(await store.get(key))))


def damage(path: Path, harm: str) -> None:
    """Harm a file in one of the ways in which files come to harm."""
    match harm:
        case "flip":
            path.write_bytes(flipped(path.read_bytes()))
        case "truncate":
            os.truncate(path, path.stat().st_size // 2)
        case "empty":
            os.truncate(path, 0)
        case "lengthen":
            path.write_bytes(path.read_bytes() + b"more")
        case "remove":
            path.unlink()
        case "directory":
            path.unlink()
            (path / "inside").mkdir(parents=True)
        case "symlink":
            path.rename(path.with_suffix(".aside"))
            path.symlink_to(path.with_suffix(".aside"))
        case "fifo":
            path.unlink()
            os.mkfifo(path)


class Counting(MemoryStore):
    """Counts requests as S3 would: a listing's pages, and deletions by the batch. `first` and `page`: keys a page."""

    def __init__(self, first: int = 16, page: int = 1000) -> None:
        super().__init__()
        self.first, self.page = first, page
        self.count: Counter[str] = Counter()

    def pages(self, keys: int) -> int:
        """The requests of a listing that shows so many keys."""
        return 1 + max(0, -(-(keys - self.first) // self.page))

    async def put(self, key: str, data: Buffer) -> str:
        self.count["PUT"] += 1
        return await super().put(key, data)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        self.count["GET"] += 1
        return await super().get(key, into)

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        shown = 0
        self.count["LIST"] += 1
        async for info in super().scan(prefix, after):
            shown += 1
            if self.pages(shown) > self.pages(shown - 1):
                self.count["LIST"] += 1
            yield info

    async def directories(self, prefix: str) -> list[str] | None:
        names = await super().directories(prefix)
        self.count["LIST"] += max(1, -(-len(names or ()) // self.page))
        return names

    async def delete(self, keys: Sequence[str]) -> None:
        self.count["DELETE"] += -(-len(keys) // 1000)
        await super().delete(keys)

    def taken(self) -> dict[str, int]:
        """What was counted since the last time."""
        found, self.count = dict(self.count), Counter()
        return found
