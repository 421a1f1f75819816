"""Objects that other programs put: names of any form, objects of any size, read by range.

Invariant: nothing is written. A name is what the server says it is, so a caller that makes a path of it checks it
first.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable

from tierd.stores.base import ObjectInfo, Store
from tierd.stores.retry import RetryingStore


class ForeignStore(Store):
    """A `Store` that also lists and reads objects whose names are no keys of tierd's."""

    @abstractmethod
    def names(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """List every object whose name begins with `prefix` and sorts after `after`; otherwise as `Store.scan`."""

    @abstractmethod
    async def get_range(self, info: ObjectInfo, offset: int, into: memoryview) -> None:
        """Fill `into`, which is not empty, with the bytes of a listed object from `offset` on.

        Raises:
            ObjectNotFound: the listed object is not there any more, or another one has its name.
        """


class RetryingForeignStore(RetryingStore, ForeignStore):
    """The deadlines and retries of `RetryingStore` around a `ForeignStore`."""

    def __init__(self, inner: ForeignStore, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        super().__init__(inner, sleep=sleep)
        self._foreign = inner

    def names(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """List as `inner` does."""
        return self.resumed(self._foreign.names, prefix, after)

    async def get_range(self, info: ObjectInfo, offset: int, into: memoryview) -> None:
        """Read as `inner` does."""
        allowed_s = into.nbytes / self._slowest
        await self.call(f"get {info.key!a}", allowed_s, lambda: self._foreign.get_range(info, offset, into))
