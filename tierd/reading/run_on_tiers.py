"""Read one run from its tiers: list its checkpoints, and read any verified range of a part's files.

Invariant: this module calls only `get` and `scan` of a store.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from threading import Event, Lock, Thread
from typing import Any, TypeVar

import msgspec

from tierd.client.restoring.ranged_reader import NO_ORIGINS, PartRanges, Span
from tierd.core.errors import ConfigError, CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.timeline.launch_chain import check_origin
from tierd.core.timeline.restore_order import Candidate, describe_runs
from tierd.core.timeline.run_view import RunView, run_view_of
from tierd.daemon.concurrency import Buffers, MemoryBudget, gather_limited, thread_uncancelled
from tierd.daemon.tiers.tier_objects import has_all_manifests
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.transfer.replicas import Replicas
from tierd.stores.base import Store
from tierd.threads import mark_foreground

T = TypeVar("T")


class LoopThread:
    """Run coroutines until `close`, called from any thread but the loop's own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ready = Event()
        self._closed = False
        self._thread = Thread(target=lambda: asyncio.run(self._run_until_closed()), name="tierd-reader", daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def is_stopped(self) -> bool:
        """Whether there is no loop thread: it was closed, or this process was forked from the one that runs it."""
        return self._closed or os.getpid() != self._pid

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. An interrupt (Ctrl-C) cancels it. Raises `ConfigError` if
        `is_stopped`.
        """
        if self.is_stopped:
            coroutine.close()
            if self._closed:
                raise ConfigError("this Reader is closed")
            raise ConfigError("this process was forked from the one that opened the Reader: open one of its own")
        work = asyncio.run_coroutine_threadsafe(_hastily(coroutine), self._loop)
        try:
            return work.result()
        except BaseException:
            work.cancel()
            raise

    def close(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _run_until_closed(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._end.wait()


async def _hastily(coroutine: Coroutine[Any, Any, T]) -> T:
    mark_foreground()  # the caller waits for the result
    return await coroutine


log = logging.getLogger("tierd")

_CONCURRENCY = 8  # chunks in flight at once for one caller, within the memory budget


class RunOnTiers:
    """One run on its tiers. `unreached` are those that did not answer the last listing, with the reason."""

    def __init__(self, stores: Mapping[str, Store], run: str) -> None:
        self.stores, self.run, self.loop, self.budget = stores, run, LoopThread(), MemoryBudget()
        self.buffers = Buffers()
        self.unreached: dict[str, str] = {}
        self._eyes = {name: TierObserver(store) for name, store in stores.items()}

    def observe(self) -> Inventory:
        """List the run on every tier. Raises `StoreUnavailable`, with the reasons, if no tier answered."""
        return self.loop.run(self._observe())

    def runs(self) -> list[str]:
        """List the runs on all tiers. Raises `StoreUnavailable` or `StoreRefused` if a tier does not answer."""
        return self.loop.run(self._runs())

    def has_checkpoint(self, checkpoint: CheckpointId, world: int) -> bool:
        """Return whether the tiers still list every rank's part. Raises as `runs`."""
        has_all = self.loop.run(has_all_manifests(self.stores, checkpoint, world))
        if not has_all:
            self.list_all()
        return has_all

    def list_all(self) -> None:
        """List every manifest at the next `observe`, because one that a summary stands for is not there."""
        for eye in self._eyes.values():
            eye.list_all()

    def close(self) -> None:
        """Close the stores, and end the thread. Harmless when called twice, and in a forked process."""
        if self.loop.is_stopped:
            return
        try:
            self.loop.run(self._close())
        finally:
            self.loop.close()

    async def _observe(self) -> Inventory:
        unreached: dict[str, str] = {}

        async def observe_tier(name: str) -> Place | None:
            try:
                return await self._eyes[name].observe({self.run})
            except (StoreUnavailable, StoreRefused) as error:
                log.warning("%s: cannot be asked: %s", name, error)
                unreached[name] = str(error)
                return None

        places = await gather_limited(len(self._eyes), [observe_tier(name) for name in self._eyes])
        self.unreached = {name: unreached[name] for name in self._eyes if name in unreached}
        if len(unreached) == len(self._eyes):
            why = "; ".join(f"{name}: {reason}" for name, reason in self.unreached.items())
            raise StoreUnavailable(f"run {self.run!r}: no tier could be asked: {why}")
        return Inventory(Place(), dict(zip(self._eyes, places, strict=True)))

    async def _runs(self) -> list[str]:
        return sorted({run for eye in self._eyes.values() for run in await eye.runs()})

    async def _close(self) -> None:
        for store in self.stores.values():
            await store.aclose()


class TierView:
    """The view of a run that a search uses, from the tiers alone."""

    deep = True  # always, because a reader lists the names on the tiers anyway
    odd: Mapping[CheckpointId, str] = {}

    def __init__(self, tiers: RunOnTiers, metrics: Collection[str]) -> None:
        self._tiers, self._metrics = tiers, metrics

    def run_view(self) -> RunView:
        run_view = run_view_of(self._tiers.observe(), self._tiers.run, self._metrics)
        return msgspec.structs.replace(run_view, silent=self._tiers.unreached)

    def flush(self, checkpoint: CheckpointId) -> None:
        """Do nothing: a reader holds no part that a tier lacks."""

    def close(self) -> None:
        """Do nothing: the tiers outlive a search."""


class TierFiles(PartRanges):
    """Reads one checkpoint's files. Several threads may use it at once. `replicas` makes the access to one part."""

    def __init__(
        self,
        tiers: RunOnTiers,
        checkpoint: CheckpointId,
        world: int,
        origins: Mapping[str, CheckpointId | None] = NO_ORIGINS,
        replicas: Callable[[PartId, Mapping[str, Store]], Replicas] = Replicas,
    ) -> None:
        super().__init__(origins)
        self._tiers, self.checkpoint, self.world, self._replicas = tiers, checkpoint, world, replicas
        self._locks: dict[PartId, Lock] = {}  # held while a part's manifests are read, so once
        self._copies: dict[PartId, Replicas] = {}
        self._contents: dict[PartId, list[Manifest]] = {}  # what tiers claim for the part; the first one counts
        self._corrupt: PartId | None = None

    def part(self, rank: int) -> PartId:
        return PartId(self.checkpoint, rank, self.world)

    @property
    def used_tiers(self) -> tuple[str, ...]:
        """The tiers that provided bytes, in order of preference."""
        used = {name for copies in self._copies.values() for name in copies.used_tiers}
        return tuple(name for name in self._tiers.stores if name in used)

    def manifest(self, part: PartId) -> Manifest:
        with self._locks.setdefault(part, Lock()):
            if part not in self._contents:
                self._read_manifests(part)
        manifest = self._contents[part][0]
        check_origin(manifest, self._origins)  # each time, because `try_next` may have switched to another history
        return manifest

    def _read_manifests(self, part: PartId) -> None:
        copies = self._replicas(part, self._tiers.stores)
        self._tiers.loop.run(copies.read_manifests())
        contents = copies.contents()
        if not contents:
            if not copies.defects and not copies.unavailable:
                self._tiers.list_all()
                raise ObjectNotFound(f"{part}: no tier has a copy")
            raise copies.lost_error("its manifest", copies.unavailable)
        copies.trust(contents[0])
        self._copies[part], self._contents[part] = copies, contents

    def fill(self, memory: memoryview, spans: Collection[Span], base: int = 0) -> None:
        for file, file_spans in _group_by_file(spans).items():
            self.manifest(file[0])
            try:
                self._tiers.loop.run(self._fill(memory, base, *file, file_spans))
            except CorruptChunk:
                self._corrupt = file[0]
                raise

    def try_next(self) -> bool:
        """Switch to another content of the part that was corrupt, if the tiers contradict each other about it.

        Returns whether there is one. The caller must then discard all bytes that it read before.
        """
        part, self._corrupt = self._corrupt, None
        if part is None or len(self._contents[part]) < 2:
            return False
        self._contents[part].pop(0)
        self._copies[part].trust(self._contents[part][0])
        self._files.pop(part, None)
        return True

    async def _fill(self, memory: memoryview, base: int, part: PartId, path: str, spans: list[Span]) -> None:
        copies, files = self._copies[part], self._contents[part][0].files
        number = next(number for number, file in enumerate(files) if file.path == path)
        spans_by_chunk: dict[tuple[int, int], list[Span]] = {}  # by index and offset of a chunk
        for span in spans:
            sizes = (chunk.size for chunk in span.file.chunks[span.first : span.end])
            for chunk in enumerate(accumulate(sizes, initial=span.start), span.first):
                if chunk[0] < span.end:
                    spans_by_chunk.setdefault(chunk, []).append(span)
        todo = iter(sorted(spans_by_chunk.items()))

        async def hand() -> None:
            for (index, offset), chunk_spans in todo:
                size, buffers = files[number].chunks[index].size, self._tiers.buffers
                async with self._tiers.budget.take(copies.weight(number, index)):
                    with _room(memory, base, offset, size, chunk_spans, buffers) as room:
                        raw = memoryview(await copies.chunk(number, index, path, room, buffers)).cast("B")
                        if room.obj is not memory.obj or raw.obj is not room.obj:
                            await thread_uncancelled(_copy_spans, memory, base, raw, offset, chunk_spans)

        await gather_limited(_CONCURRENCY, [hand() for _ in range(min(_CONCURRENCY, len(spans_by_chunk)))])


def _group_by_file(spans: Collection[Span]) -> dict[tuple[PartId, str], list[Span]]:
    spans_by_file: dict[tuple[PartId, str], list[Span]] = {}
    for span in spans:
        spans_by_file.setdefault((span.part, span.path), []).append(span)
    return spans_by_file


@contextmanager
def _room(
    memory: memoryview, base: int, offset: int, size: int, spans: list[Span], buffers: Buffers
) -> Iterator[memoryview]:
    """Provide memory to decode a chunk into: its place in `memory` if a span wants all of it, else a buffer."""
    if any(span.offset <= offset and offset + size <= span.offset + span.length for span in spans):
        yield memory[offset - base : offset - base + size]
        return
    with buffers.hold(size) as memory:
        yield memory


def _copy_spans(memory: memoryview, base: int, raw: memoryview, offset: int, spans: list[Span]) -> None:
    """Copy into `memory` the parts of `spans` that a chunk holds. The chunk begins at `offset` of its file."""
    for span in spans:
        begin, end = max(span.offset, offset), min(span.offset + span.length, offset + len(raw))
        memory[begin - base : end - base] = raw[begin - offset : end - offset]


def read_verified(
    tiers: RunOnTiers, candidate: Candidate, files: TierFiles, read: Callable[[], T]
) -> tuple[T | None, Exception | None]:
    """Return what `read` returns, or the error; if the tiers contradict each other, for the content that verifies."""
    try:
        while True:
            try:
                return read(), None
            except CorruptChunk:
                if not files.try_next():
                    raise
    except (CorruptChunk, ManifestError) as error:
        return None, error_if_pruned(tiers, candidate, error)
    except Exception as error:
        return None, error


def error_if_pruned(tiers: RunOnTiers, candidate: Candidate, error: CorruptChunk | ManifestError) -> Exception:
    """Return `error`, or another one if the checkpoint was pruned while it was read, or that cannot be told."""
    try:
        exists = tiers.has_checkpoint(candidate.checkpoint, candidate.world)
    except (StoreUnavailable, StoreRefused) as unknown:
        return unknown
    pruned = ObjectNotFound(f"{candidate.checkpoint} was pruned, or quarantined, while it was read")
    return error.with_traceback(None) if exists else pruned


def no_checkpoint_text(tiers: RunOnTiers) -> str:
    """Return why nothing was found: the message names the runs that exist."""
    runs_text = describe_runs(tiers.run, tiers.runs())
    return f"run {tiers.run!r}: the tiers have no complete checkpoint of it; {runs_text}"
