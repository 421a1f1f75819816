"""The chunks of several ranks that a copy has confirmed on its target, so that each is read and sent once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from tierd.core.manifest import Chunk, ContentId

_Key: TypeAlias = tuple[int | None, ContentId]  # the home, and the raw bytes


class ConfirmedChunks:
    """Chunks with a home, of one checkpoint on one tier. It is dropped with the checkpoint, because it only grows."""

    def __init__(self) -> None:
        self._entries: dict[_Key, Chunk] = {}
        self._locks: defaultdict[_Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    def entry(self, chunk: Chunk) -> Chunk | None:
        """Return the chunk's entry for a manifest if another part's transfer has confirmed it."""
        return self._entries.get((chunk.home, chunk.content))

    def add(self, chunk: Chunk) -> None:
        """Note that a chunk, as a manifest describes it, is confirmed on the tier."""
        if chunk.home is not None:
            self._entries[chunk.home, chunk.content] = chunk

    @asynccontextmanager
    async def exclusive(self, chunk: Chunk) -> AsyncIterator[None]:
        """A context within which no other part's transfer confirms the same chunk."""
        key = chunk.home, chunk.content
        if chunk.home is None or key in self._entries:
            yield
            return
        async with self._locks[key]:
            yield
        if key in self._entries:
            self._locks.pop(key, None)
