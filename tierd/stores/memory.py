"""Objects in a dict, for tests and simulation. Keeps the whole contract except durability."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncGenerator, Sequence

from tierd.core.errors import ObjectNotFound
from tierd.stores.base import Buffer, ObjectInfo, check_key, octets, room


class MemoryStore:
    """A `Store` that lives as long as the process. Each call yields to the loop once, as a networked store would."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, int]] = {}  # content, and the sequence number of its put
        self._keys: list[str] = []  # sorted
        self._puts = 0

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._keys)} objects)"

    async def put(self, key: str, data: Buffer) -> str:
        check_key(key)
        await asyncio.sleep(0)
        self._puts += 1
        if key not in self._objects:
            insort(self._keys, key)
        self._objects[key] = bytes(octets(data)), self._puts
        return ""

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        check_key(key)
        await asyncio.sleep(0)
        try:
            content = self._objects[key][0]
        except KeyError:
            raise ObjectNotFound(key) from None
        if into is None:
            return content
        view = room(into, len(content), f"get {key}")
        view[:] = content
        return view

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        await asyncio.sleep(0)
        at = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
        while at < len(self._keys) and (key := self._keys[at]).startswith(prefix):
            content, number = self._objects[key]
            yield ObjectInfo(key, len(content), str(number))
            at = bisect_right(self._keys, key)  # other tasks may have changed the list at the yield

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        await asyncio.sleep(0)
        for key in keys:
            if self._objects.pop(key, None) is not None:
                del self._keys[bisect_left(self._keys, key)]

    async def aclose(self) -> None:
        """Do nothing: the store holds no connections or threads."""
