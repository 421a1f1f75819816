"""The objects on a tier under the names of which a part's chunks are put, from an earlier try or from other nodes.

Invariant: a listing proves nothing about the bytes. The caller reads and compares an object before a manifest names it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable

from tierd.core.ids import PartId, chunk_directory
from tierd.core.manifest import Chunk, is_patch
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.tiers.tier_observer import list_chunks
from tierd.stores.base import Store


class ObjectListing:
    """The keys in the directories of one part's chunks. Those that other nodes put, too, are listed again."""

    def __init__(self, store: Store, part: PartId, timings: DaemonTimings) -> None:
        self._store, self._part, self._timings = store, part, timings
        self._keys: dict[str, dict[str, list[str]]] = {}  # directory -> digest -> keys
        # The same of patches, whose names do not tell their bases.
        self._patches: dict[str, dict[str, list[str]]] = {}
        self._listed_s: dict[str, float] = {}  # directory -> when it was listed
        self.version = 0  # grows with each listing
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def read(self, chunks: Iterable[Chunk]) -> None:
        """List the directories of these chunks."""
        for directory in sorted({self._directory(chunk) for chunk in chunks}):
            await self._list(directory)

    def keys(self, chunk: Chunk) -> list[str]:
        """Return the keys of listed objects that hold a chunk in some encoding, by their names."""
        return self._keys[self._directory(chunk)].get(chunk.xxh3_128, [])

    def has_patch(self, key: str) -> bool:
        """Whether a patch with this key was listed."""
        digest = key.rpartition("/")[2].partition(".")[0]
        return any(key in patches.get(digest, ()) for patches in self._patches.values())

    def is_put(self, chunk: Chunk) -> bool:
        """Whether an object that holds the chunk, or a patch of it, was listed."""
        return bool(self.keys(chunk)) or chunk.xxh3_128 in self._patches[self._directory(chunk)]

    async def refresh(self, chunk: Chunk, since_s: float = 0.0) -> None:
        """List the chunk's directory again if other nodes may have put the chunk since, and after `since_s`, in
        monotonic seconds.
        """
        directory = self._directory(chunk)
        if chunk.home is None:
            return
        async with self._locks[directory]:
            if self._listed_s[directory] < max(since_s, time.monotonic() - self._timings.chunks_listed_s):
                await self._list(directory)

    async def wait(self) -> None:
        """Wait until another listing is due."""
        await asyncio.sleep(self._timings.chunks_listed_s)

    def _directory(self, chunk: Chunk) -> str:
        return chunk_directory(self._part.checkpoint, self._part.rank if chunk.home is None else chunk.home)

    async def _list(self, directory: str) -> None:
        began_s = time.monotonic()
        keys: dict[str, list[str]] = {}
        patches: dict[str, list[str]] = {}
        for key in await list_chunks(self._store, self._part.checkpoint.run, [directory]):
            name, _, codec = key.rpartition("/")[2].partition(".")
            (patches if is_patch(codec) else keys).setdefault(name, []).append(key)
        self._keys[directory], self._patches[directory], self._listed_s[directory] = keys, patches, began_s
        self.version += 1
