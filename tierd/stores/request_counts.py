"""Count the requests to a store, as an object store bills them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from tierd.stores.base import FIRST_PAGE, PAGE, Buffer, ObjectInfo, Store, StoreWrapper


class CountedStore(StoreWrapper):
    """Wrap `inner` and count its requests.

    A listing counts one request for each page that was begun, with the page sizes of `S3Store`. Retries inside `inner`
    are not counted.

    Attributes:
        kinds: the number so far of each kind: `put`, `get`, `list` (pages), `delete` (of up to 1,000 keys each).
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.kinds = Counter(put=0, get=0, list=0, delete=0)

    @property
    def requests(self) -> int:
        """The number of all requests so far."""
        return self.kinds.total()

    async def put(self, key: str, data: Buffer) -> str:
        self.kinds["put"] += 1
        return await self._inner.put(key, data)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        self.kinds["get"] += 1
        return await self._inner.get(key, into)

    async def digest(self, key: str) -> tuple[int, str]:
        self.kinds["get"] += 1
        return await self._inner.digest(key)

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        self.kinds["list"] += 1
        count = 0
        async with aclosing(self._inner.scan(prefix, after)) as listing:
            async for info in listing:
                if count >= FIRST_PAGE and (count - FIRST_PAGE) % PAGE == 0:
                    self.kinds["list"] += 1
                count += 1
                yield info

    async def delete(self, keys: Sequence[str]) -> None:
        self.kinds["delete"] += -(-len(keys) // PAGE)
        await self._inner.delete(keys)
