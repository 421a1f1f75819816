"""The tiers as a reader sees them: what lies there of one run, and any verified range of a part's files.

Law: only `get` and `scan` of a store are called.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from itertools import accumulate

import msgspec

from tierd.client.files import Ranges, Span
from tierd.core.errors import CorruptChunk, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.sight import Sight, see
from tierd.core.world import Place, World
from tierd.daemon.budget import Budget
from tierd.daemon.copies import Copies, is_there
from tierd.daemon.observe import TierEye
from tierd.daemon.together import to_the_end, together
from tierd.reading.loop import Loop
from tierd.stores.base import Store

log = logging.getLogger("tierd")

_HANDS = 8  # chunks on their way at once for one caller, as far as the budget goes


class Tiers:
    """One run on its tiers.

    Attributes:
        unreached: tiers that did not answer the last look, with the reason.
    """

    def __init__(self, stores: Mapping[str, Store], run: str) -> None:
        self.stores, self.run, self.loop, self.budget = stores, run, Loop(), Budget()
        self.unreached: dict[str, str] = {}
        self._eyes = {name: TierEye(store) for name, store in stores.items()}

    def look(self) -> World:
        """Look at every tier.

        Raises:
            StoreUnavailable: none of them answered; says why.
        """
        return self.loop.run(self._look())

    def runs(self) -> list[str]:
        """The runs that any tier has. Raises `StoreUnavailable` or `StoreRefused` where one does not answer."""
        return self.loop.run(self._runs())

    def has(self, checkpoint: CheckpointId, world: int) -> bool:
        """Whether the tiers still list every rank's part. Raises as `runs`."""
        return self.loop.run(is_there(self.stores, checkpoint, world))

    def close(self) -> None:
        """Close the stores, and end the thread. Harmless the second time, and in a forked process."""
        if self.loop.is_gone:
            return
        try:
            self.loop.run(self._close())
        finally:
            self.loop.close()

    async def _look(self) -> World:
        unreached: dict[str, str] = {}

        async def one(name: str) -> Place | None:
            try:
                return await self._eyes[name].look({self.run})
            except (StoreUnavailable, StoreRefused) as error:
                log.warning("%s: cannot be asked: %s", name, error)
                unreached[name] = str(error)
                return None

        places = await together(len(self._eyes), [one(name) for name in self._eyes])
        self.unreached = {name: unreached[name] for name in self._eyes if name in unreached}
        if len(unreached) == len(self._eyes):
            why = "; ".join(f"{name}: {reason}" for name, reason in self.unreached.items())
            raise StoreUnavailable(f"run {self.run!r}: no tier could be asked: {why}")
        return World(Place(), dict(zip(self._eyes, places, strict=True)))

    async def _runs(self) -> list[str]:
        return sorted({run for eye in self._eyes.values() for run in await eye.runs()})

    async def _close(self) -> None:
        for store in self.stores.values():
            await store.aclose()


class TierView:
    """Shows a search what the tiers alone hold.

    Args:
        metrics: whose values a look tells.
    """

    def __init__(self, tiers: Tiers, metrics: Collection[str]) -> None:
        self._tiers, self._metrics = tiers, metrics

    def sight(self) -> Sight:
        sight = see(self._tiers.look(), self._tiers.run, self._metrics)
        return msgspec.structs.replace(sight, silent=self._tiers.unreached)

    def flush(self, checkpoint: CheckpointId) -> None:
        """Nothing: a reader holds nothing that others lack."""

    def close(self) -> None:
        """Nothing: the tiers outlive a search."""


class TierFiles(Ranges):
    """Reads one checkpoint's files. May be used by several threads at once."""

    def __init__(self, tiers: Tiers, checkpoint: CheckpointId, world: int) -> None:
        super().__init__()
        self._tiers, self.checkpoint, self.world = tiers, checkpoint, world
        self._copies: dict[PartId, Copies] = {}
        self._contents: dict[PartId, list[Manifest]] = {}  # what the tiers say that the part holds; the first counts
        self._corrupt: PartId | None = None

    def part(self, rank: int) -> PartId:
        return PartId(self.checkpoint, rank, self.world)

    @property
    def used(self) -> tuple[str, ...]:
        """The tiers that gave something, in order."""
        used = {name for copies in self._copies.values() for name in copies.used}
        return tuple(name for name in self._tiers.stores if name in used)

    def manifest(self, part: PartId) -> Manifest:
        if part not in self._contents:
            copies = Copies(part, self._tiers.stores)
            self._tiers.loop.run(copies.ask())
            contents = copies.contents()
            if not contents:
                if not copies.defects and not copies.unavailable:
                    raise ObjectNotFound(f"{part}: no tier has a copy")
                copies.give_up("its manifest", copies.unavailable)
            copies.agree(contents[0])
            self._copies[part], self._contents[part] = copies, contents
        return self._contents[part][0]

    def fill(self, memory: memoryview, spans: Collection[Span], base: int = 0) -> None:
        for file, some in _by_file(spans).items():
            self.manifest(file[0])
            try:
                self._tiers.loop.run(self._fill(memory, base, *file, some))
            except CorruptChunk:
                self._corrupt = file[0]
                raise

    def turn(self) -> bool:
        """After `CorruptChunk`: whether tiers contradict each other about that part, and there is a content left to
        believe. What was read before is void then."""
        part, self._corrupt = self._corrupt, None
        if part is None or len(self._contents[part]) < 2:
            return False
        self._contents[part].pop(0)
        self._copies[part].agree(self._contents[part][0])
        self._files.pop(part, None)
        return True

    async def _fill(self, memory: memoryview, base: int, part: PartId, path: str, spans: list[Span]) -> None:
        copies, files = self._copies[part], self._contents[part][0].files
        number = next(number for number, file in enumerate(files) if file.path == path)
        wanted: dict[tuple[int, int], list[Span]] = {}  # index and offset of a chunk -> what lies in it
        for span in spans:
            sizes = (chunk.size for chunk in span.file.chunks[span.first : span.end])
            for chunk in enumerate(accumulate(sizes, initial=span.start), span.first):
                if chunk[0] < span.end:
                    wanted.setdefault(chunk, []).append(span)
        todo = iter(sorted(wanted.items()))

        async def hand() -> None:
            for (index, offset), some in todo:
                async with self._tiers.budget.take(copies.weight(number, index)):
                    raw = memoryview(await copies.chunk(number, index, path)).cast("B")
                    await to_the_end(_place, memory, base, raw, offset, some)

        await together(_HANDS, [hand() for _ in range(min(_HANDS, len(wanted)))])


def _by_file(spans: Collection[Span]) -> dict[tuple[PartId, str], list[Span]]:
    found: dict[tuple[PartId, str], list[Span]] = {}
    for span in spans:
        found.setdefault((span.part, span.path), []).append(span)
    return found


def _place(memory: memoryview, base: int, raw: memoryview, offset: int, spans: list[Span]) -> None:
    """Copy of a chunk, which begins at `offset` of its file, what `spans` want of it."""
    for span in spans:
        begin, end = max(span.offset, offset), min(span.offset + span.length, offset + len(raw))
        memory[begin - base : end - base] = raw[begin - offset : end - offset]
