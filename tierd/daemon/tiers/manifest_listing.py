"""Listings of a run's manifests, checkpoint by checkpoint, and the summaries that stand before them in a listing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import xxhash

from tierd.core.errors import CorruptChunk, FormatTooNew, ManifestError, ObjectNotFound, TierdError
from tierd.core.ids import CheckpointId, PartId, manifests_prefix, parse_summary, summaries_prefix
from tierd.core.planning.checkpoint_summary import MAX_SUMMARY_SIZE, CheckpointSummary, decode_summary
from tierd.core.planning.copies import CheckpointCopy, ManifestFacts, division_mismatch
from tierd.daemon.concurrency import for_each_limited
from tierd.daemon.tiers.tier_objects import read_sealed
from tierd.stores.base import PAGE, ObjectInfo, Store

MAX_MANIFEST_READS = 8  # manifests read at once
_NO_DIRECTORY = "\n"  # begins no key

Unusable: TypeAlias = ManifestError | FormatTooNew


class ListedManifest(NamedTuple):
    """A manifest in a listing, with the parts of its key."""

    info: ObjectInfo
    name: str
    rank: int
    world: int


@dataclass(slots=True)
class ListedCheckpoint:
    """One checkpoint in a listing: the ranks whose manifests were listed, the facts of those that were read, and the
    keys of those that were gone by then.
    """

    id: CheckpointId
    ranks: dict[int, frozenset[int]] = field(default_factory=dict)
    outcomes: dict[PartId, ManifestFacts | Unusable] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    todo: list[tuple[ObjectInfo, PartId]] = field(default_factory=list)
    token: str = ""  # of the summary that stands for the manifests, which were not listed; empty if they were

    def as_copy(self, mismatched: Mapping[PartId, PartId]) -> CheckpointCopy:
        """Return the copy; `mismatched` are as `ReadManifest.mismatched`."""
        defects: dict[PartId, TierdError] = {part: division_mismatch(part, other) for part, other in mismatched.items()}
        return CheckpointCopy(
            self.id,
            {world: world_ranks for world, world_ranks in self.ranks.items() if world_ranks},
            {part: facts for part, facts in self.outcomes.items() if isinstance(facts, ManifestFacts)},
            defects | {part: why for part, why in self.outcomes.items() if not isinstance(why, ManifestFacts)},
        )


def listing_digest(manifests: Collection[ListedManifest]) -> str:
    """Return the digest of the objects that a listing shows of one checkpoint, in its order."""
    lines = (f"{manifest.name} {manifest.info.size} {manifest.info.token}\n" for manifest in manifests)
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


class ManifestListing:
    """One listing of all manifests of a run, or of one checkpoint's. Use `aclosing` on what its methods return.

    Attributes:
        summaries: by checkpoint, the summaries that were listed.
        pages: how many pages of a listing the manifests took so far, about.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        checkpoint: CheckpointId | None = None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._prefix, self._on_answer = run, manifests_prefix(run), on_answer
        self._pages = store.scan_pages(self._prefix + (f"{checkpoint.name}/" if checkpoint else ""))
        self._first: Sequence[ObjectInfo] = ()  # the manifests of the page in which the summaries end
        self.summaries: dict[CheckpointId, ObjectInfo] = {}
        self._count = 0

    @property
    def pages(self) -> int:
        return 1 + self._count // PAGE

    async def aclose(self) -> None:
        await self._pages.aclose()

    async def read_summaries(self) -> None:
        """List up to the first manifest."""
        prefix = summaries_prefix(self._run)
        async for page in self._pages:
            self._on_answer()
            number = 0
            for number, info in enumerate(page):
                if not info.key.startswith(prefix):
                    self._first = page[number:]
                    return
                if checkpoint := parse_summary(self._run, info.key):
                    self.summaries[checkpoint] = info

    async def checkpoints(self) -> AsyncGenerator[tuple[CheckpointId, list[ListedManifest]], None]:
        """Yield each checkpoint with its manifests, in order; no summary is among them if they were read before."""
        names: dict[str, tuple[int, int] | None] = {}
        directory, checkpoint = _NO_DIRECTORY, None
        group: list[ListedManifest] = []
        async with aclosing(self._rest()) as pages:
            async for page in pages:
                for info in page:
                    key = info.key
                    if not key.startswith(directory):
                        if group and checkpoint:
                            yield checkpoint, group
                        # Of an object that lies beside the directories this is "", which begins every key.
                        group, directory = [], key[: key.find("/", len(self._prefix)) + 1] or _NO_DIRECTORY
                        checkpoint = CheckpointId.parse(self._run, directory[len(self._prefix) : -1])
                    name = key[len(directory) :]
                    pair = names[name] if name in names else names.setdefault(name, PartId.parse_name(name))
                    if pair:
                        group.append(ListedManifest(info, name, *pair))
        if group and checkpoint:
            yield checkpoint, group

    async def _rest(self) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        self._count += len(self._first)
        yield self._first
        async for page in self._pages:
            self._on_answer()
            self._count += len(page)
            yield page


async def list_checkpoints(
    store: Store, run: str, checkpoint: CheckpointId | None = None, on_answer: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[CheckpointId, list[ListedManifest]]]:
    """Yield each checkpoint of a run, or this one, with the manifests that a listing shows."""
    listing = ManifestListing(store, run, checkpoint, on_answer)
    async with aclosing(listing), aclosing(listing.checkpoints()) as checkpoints:
        async for group in checkpoints:
            yield group


class SummaryReader:
    """Read one tier's summaries; each again only when its listing shows that it was replaced."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[CheckpointId, tuple[str, CheckpointSummary | None]] = {}  # with the token of the object
        self._distrusted: dict[CheckpointId, str] = {}  # the tokens of summaries that proved wrong

    async def read(
        self, run: str, listed: dict[CheckpointId, ObjectInfo], on_answer: Callable[[], None] = lambda: None
    ) -> None:
        """Read the listed summaries of a run that were not read yet, and forget the others of the run."""
        for forgotten in [
            checkpoint for checkpoint in self._read if checkpoint.run == run and checkpoint not in listed
        ]:
            del self._read[forgotten]
            self._distrusted.pop(forgotten, None)

        async def read(entry: tuple[CheckpointId, ObjectInfo]) -> None:
            await self._read_summary(*entry)
            on_answer()

        fresh = [
            (checkpoint, info)
            for checkpoint, info in listed.items()
            if self._read.get(checkpoint, ("", None))[0] != info.token
        ]
        await for_each_limited(MAX_MANIFEST_READS, read, fresh)

    async def _read_summary(self, checkpoint: CheckpointId, info: ObjectInfo) -> None:
        self._read.pop(checkpoint, None)
        try:
            if info.size > MAX_SUMMARY_SIZE:
                raise ManifestError(f"{info.key}: {info.size} bytes, and a summary has at most {MAX_SUMMARY_SIZE}")
            summary = await read_sealed(self._store, info.key, lambda data: decode_summary(data, checkpoint))
        except (CorruptChunk, ManifestError, FormatTooNew, ObjectNotFound):
            self._read[checkpoint] = info.token, None
        except TierdError:
            pass  # absent for now; the manifests that it stands for are listed
        else:
            self._read[checkpoint] = info.token, summary

    def orphans(self, run: str, checkpoints: Collection[CheckpointId]) -> list[CheckpointId]:
        """Return the listed summaries of a run that stand for none of `checkpoints`."""
        return sorted(known for known in self._read if known.run == run and known not in checkpoints)

    def get(self, checkpoint: CheckpointId) -> tuple[str, CheckpointSummary] | None:
        """Return a listed summary that can be used, with its token."""
        token, summary = self._read.get(checkpoint, ("", None))
        return None if summary is None or self._distrusted.get(checkpoint) == token else (token, summary)

    def distrust(self, checkpoint: CheckpointId) -> None:
        """Do not use the present summary of a checkpoint any more, because it is not what the tier has."""
        if checkpoint in self._read:
            self._distrusted[checkpoint] = self._read[checkpoint][0]

    def forget(self, checkpoint: CheckpointId) -> None:
        """Note that a checkpoint's summary was put or deleted."""
        self._read.pop(checkpoint, None)
