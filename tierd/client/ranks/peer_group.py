"""Some ranks of a launch that send each other bytes, over gloo and the process group's store.

Invariant: no rank waits here for I/O, because ranks enter only after all of them have said that they hold what they
send. So a wait is for a rank that died, and is bounded. The group is none of `torch.distributed`'s own: training's
collectives have others, and may run meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch

from tierd.core.errors import StoreUnavailable
from tierd.core.units import list_few

TIMEOUT_S = 20.0  # of one broadcast, and of finding each other
_IN_FLIGHT = 8  # broadcasts at once, so that several ranks send at the same time


def can_exchange(store: Any) -> bool:
    """Whether this torch has gloo, and `store` is one over which its ranks find each other."""
    distributed = _distributed()
    return distributed.is_gloo_available() and isinstance(store, distributed.Store)


class PeerGroup:
    """The ranks `members`, each of which makes a `PeerGroup` with the same arguments.

    Args:
        store: the process group's.
        name: what this group alone is called in the store, the same on all its ranks.

    Raises:
        StoreUnavailable: from `__enter__` and `broadcast`, if a rank did not come, is gone, or the network failed.
    """

    def __init__(self, store: Any, name: str, members: Sequence[int], rank: int, timeout_s: float = TIMEOUT_S) -> None:
        self._store, self._name, self._members, self._rank = store, name, members, rank
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None

    def __enter__(self) -> Self:
        distributed = _distributed()
        # A connection of its own, because the signs of life need the store while this waits.
        clone = getattr(self._store, "clone", None)
        try:
            store = distributed.PrefixStore(self._name, clone() if clone else self._store)
            self._group = distributed.ProcessGroupGloo(
                store, self._members.index(self._rank), len(self._members), self._timeout
            )
        except RuntimeError as error:
            raise StoreUnavailable(f"ranks {list_few(self._members, 8)} do not find each other: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        self._group = None  # this ends when no thread of the group can write into a buffer any more

    def broadcast(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Send and receive in the given order, which is the same on all members: each piece from the rank that holds
        it, into the other ranks' memory. Every piece has a byte at least.
        """
        distributed = _distributed()
        running: deque[Any] = deque()
        try:
            for owner, memory in pieces:
                options = distributed.BroadcastOptions()
                options.rootRank = self._members.index(owner)
                running.append(self._group.broadcast([torch.frombuffer(memory, dtype=torch.uint8)], options))
                if len(running) == _IN_FLIGHT:
                    running.popleft().wait()
            while running:
                running.popleft().wait()
        except RuntimeError as error:
            raise StoreUnavailable(f"ranks {list_few(self._members, 8)}: the exchange failed: {error}") from error


def _distributed() -> Any:
    """Return `torch.distributed`, whose stub lacks what it exports."""
    from torch import distributed

    return distributed
