"""Checkpoints as `save` writes them, put on a tier without a trainer and without a daemon's loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from support.state_files import files_of
from support.world import commit

from tierd.core.ids import PartId
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer, Store, StoreWrapper


async def put(spool: Spool, which: PartId, state: Mapping[str, Any], *stores: Store, **more: Any) -> None:
    """Have a state on these tiers as a rank's part; `more` as for `commit`."""
    commit(spool, which, files_of(state), **more)
    for store in stores:
        await flush(spool, which, TierUploadContext(store))


class ReadOnly(StoreWrapper):
    """Passes reads on, and fails the test at a write."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.inner = inner
        self.wrote: list[str] = []

    async def put(self, key: str, data: Buffer) -> str:
        self.wrote.append(key)
        raise AssertionError(f"a reader put {key}")

    async def delete(self, keys: Sequence[str]) -> None:
        self.wrote += keys
        raise AssertionError(f"a reader deleted {list(keys)}")
