"""A place that lets nothing be deleted: append-only credentials, a bucket's policy, locks on objects.

Law: what was refused is remembered, so that nobody asks in vain again and again; it is asked again after `_AGAIN_S`,
because permissions change. Only deletions are looked at; everything else passes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from tierd.core.errors import DeleteRefused
from tierd.stores.base import Buffer, ObjectInfo, Store, asked_s, is_authentic

_AGAIN_S = 600.0  # that a refusal is believed


class DeletionGuard:
    """`inner`, with a memory of what it does not let be deleted.

    Attributes:
        refused: why, as the place said it last; empty while nothing is known to be refused.
        encrypts: as `inner` has it.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.encrypts = is_authentic(inner)
        self.refused = ""
        self._until: dict[str, float] = {}  # sort of object -> monotonic seconds until which it is not asked for
        self._worked = False

    def __repr__(self) -> str:
        return f"DeletionGuard({self._inner!r})"

    @property
    def rests(self) -> bool:
        """Whether nothing should be deleted for now, because some of it would be refused."""
        return any(time.monotonic() < until for until in self._until.values())

    async def check(self, key: str) -> None:
        """Have it known whether anything can be deleted, before something is put that only a deletion can end.

        Args:
            key: one that nothing lies under; it is deleted where no deletion has worked yet. A file system refuses
                only where something lies, so after a refusal an empty object is put there first, which means nothing.

        Raises:
            DeleteRefused: nothing can.
        """
        refused = self.refused
        if not self._worked or refused:
            await self.delete([key])
        if refused:
            await self.put(key, b"")
            await self.delete([key])

    async def delete(self, keys: Sequence[str]) -> None:
        """As a `Store` does. Raises DeleteRefused at once where that is known."""
        sorts = {_sort(key) for key in keys}
        if any(time.monotonic() < self._until.get(sort, 0.0) for sort in sorts):
            raise DeleteRefused(self.refused)
        try:
            await self._inner.delete(keys)
        except DeleteRefused as error:
            self.refused = str(error)
            self._until |= dict.fromkeys(sorts, time.monotonic() + _AGAIN_S)
            raise
        for sort in sorts:
            self._until.pop(sort, None)
            self._worked = True
        if not self._until:
            self.refused = ""

    @property
    def asked_s(self) -> float:
        """As `inner` has it."""
        return asked_s(self._inner)

    async def put(self, key: str, data: Buffer) -> str:
        return await self._inner.put(key, data)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        return await self._inner.get(key, into)

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        return self._inner.scan(prefix, after)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _sort(key: str) -> str:
    """The sort of object that lies under a key: ``<run>/<sort>/…``. A policy may let marks go and keep manifests."""
    return key.partition("/")[2].partition("/")[0]
