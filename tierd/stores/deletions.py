"""A wrapper for stores that permit no deletions: append-only credentials, a bucket policy, object locks.

Invariant: the wrapper remembers a refused deletion and refuses further ones itself, so that the daemon does not repeat
a request in vain. It asks the store again after a while, because permissions change. All calls but deletions pass
through.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tierd.core.errors import DeleteRefused
from tierd.stores.base import Store, StoreWrapper


class DeletionGuard(StoreWrapper):
    """Wrap `inner` and remember which deletions it refuses.

    Args:
        inner: the store.
        again_s: how long a refusal counts before the store is asked again.

    Attributes:
        refused: the latest reason that the store gave; empty while no refusal is known.
        has_left: whether a deletion was refused since the owner last set this to False, so that its objects may still
            be there although the store permits deletions again.
    """

    def __init__(self, inner: Store, again_s: float = 600.0) -> None:
        super().__init__(inner)
        self._again_s = again_s
        self.refused = ""
        self.has_left = False
        self._until: dict[str, float] = {}  # kind of object -> monotonic seconds until which no deletion of it is tried
        self._worked = False

    @property
    def rests(self) -> bool:
        """Whether deletions should pause, because the store would refuse some of them."""
        return any(time.monotonic() < until for until in self._until.values())

    async def check(self, key: str) -> None:
        """Find out whether the store permits deletions, before the caller puts an object that must later be deleted.

        Args:
            key: a key that no object uses. It is deleted if no deletion has succeeded yet. After a refusal an empty
                object is put there first, because a file system refuses only the deletion of a file that exists.

        Raises:
            DeleteRefused: the store permits no deletion.
        """
        refused = self.refused
        if not self._worked or refused:
            await self.delete([key])
        if refused:
            await self.put(key, b"")
            await self.delete([key])

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete `keys` as a `Store` does. Raise DeleteRefused at once if an earlier refusal still counts."""
        sorts = {_object_kind(key) for key in keys}
        if any(time.monotonic() < self._until.get(sort, 0.0) for sort in sorts):
            self.has_left = True
            raise DeleteRefused(self.refused)
        try:
            await self._inner.delete(keys)
        except DeleteRefused as error:
            self.refused, self.has_left = str(error), True
            self._until |= dict.fromkeys(sorts, time.monotonic() + self._again_s)
            raise
        for sort in sorts:
            self._until.pop(sort, None)
            self._worked = True
        if not self._until:
            self.refused = ""


def _object_kind(key: str) -> str:
    """Return the kind of the object at `key`: ``<run>/<kind>/…``. A bucket policy may permit deleting marks only."""
    return key.partition("/")[2].partition("/")[0]
