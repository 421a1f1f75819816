"""Objects in a dict, for tests and simulation. Keeps the whole contract except durability."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncGenerator, Sequence

from tierd.core.errors import ObjectNotFound
from tierd.stores.base import PAGE, Buffer, ObjectInfo, Store, check_key, destination, octets


class MemoryStore(Store):
    """A `Store` that lives as long as the process. Each call yields to the loop once, as a networked store would.

    Attributes:
        objects: by key, the content and the sequence number of its put. Read or spoil it without yielding to the loop.
        keys: the keys of `objects`, sorted. Code that adds an object there adds its key here.
        sequence: the number of the latest put.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.keys: list[str] = []
        self.sequence = 0

    def __repr__(self) -> str:
        return f"MemoryStore({len(self.keys)} objects)"

    async def put(self, key: str, data: Buffer) -> str:
        check_key(key)
        await asyncio.sleep(0)
        self._set(key, data)
        return ""

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        if type(self).put is not MemoryStore.put:  # what a subclass does in `put` counts
            return await super().put_if_absent(key, data)
        check_key(key)
        await asyncio.sleep(0)
        if key in self.objects:
            return None
        self._set(key, data)
        return ""

    def _set(self, key: str, data: Buffer) -> None:
        self.sequence += 1
        if key not in self.objects:
            insort(self.keys, key)
        self.objects[key] = bytes(octets(data)), self.sequence

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        check_key(key)
        await asyncio.sleep(0)
        try:
            content = self.objects[key][0]
        except KeyError:
            raise ObjectNotFound(key) from None
        if into is None:
            return content
        view = destination(into, len(content), f"get {key}")
        view[:] = content
        return view

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        await asyncio.sleep(0)
        at = max(bisect_left(self.keys, prefix), bisect_right(self.keys, after))
        while at < len(self.keys) and (key := self.keys[at]).startswith(prefix):
            content, number = self.objects[key]
            yield ObjectInfo(key, len(content), str(number))
            at = bisect_right(self.keys, key)  # other tasks may have changed the list at the yield

    async def scan_pages(self, prefix: str, after: str = "") -> AsyncGenerator[Sequence[ObjectInfo], None]:
        if type(self).scan is not MemoryStore.scan:  # what a subclass does in `scan` counts
            async for page in super().scan_pages(prefix, after):
                yield page
            return
        await asyncio.sleep(0)
        while True:
            at = max(bisect_left(self.keys, prefix), bisect_right(self.keys, after))
            keys = [key for key in self.keys[at : at + PAGE] if key.startswith(prefix)]
            if not keys:
                return
            yield [ObjectInfo(key, len(self.objects[key][0]), str(self.objects[key][1])) for key in keys]
            after = keys[-1]

    async def directories(self, prefix: str) -> list[str] | None:
        await asyncio.sleep(0)
        names, at = [], bisect_left(self.keys, prefix)
        while at < len(self.keys) and (key := self.keys[at]).startswith(prefix):
            names.append(key[len(prefix) :].partition("/")[0])
            at = bisect_left(self.keys, f"{prefix}{names[-1]}/\x7f") if "/" in key[len(prefix) :] else at + 1
        return names

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        await asyncio.sleep(0)
        for key in keys:
            if self.objects.pop(key, None) is not None:
                del self.keys[bisect_left(self.keys, key)]

    async def aclose(self) -> None:
        """Do nothing: the store holds no connections or threads."""
