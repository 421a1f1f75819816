"""A tier's manifests: which there are, and what those say that were read.

Law: names alone tell what is complete, so a look lists every name and reads few manifests: the one that speaks for each
checkpoint, and those of ranks that the asker has parts of. Each is read once, and again only when its listing shows
that it was replaced. What nobody has read is not known: a prune reads it before anything is deleted, and tells here.
Of all that were read it is remembered which chunks of others they name, so that no prune reads them again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

import xxhash

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import CheckpointId, PartId, manifests_prefix
from tierd.core.world import Facts, Seen, is_complete
from tierd.daemon.borrowed import Borrowed, Memory, named_by
from tierd.daemon.copies import read_manifest
from tierd.daemon.together import each
from tierd.stores.base import ObjectInfo, Store

READERS = 8  # manifests read at once

Unusable: TypeAlias = ManifestError | FormatTooNew


@dataclass(slots=True)
class _Read:
    """What was read of one checkpoint's manifests.

    `found` is by file name, with the token of what was read: what looks read, and whatever proved unusable. `borrowed`
    is of all usable ones, by a digest of name and token: of a million, only this is kept. `lent` are the owners in what
    prunes read. `listed` manifests were there at the last listing.
    """

    found: dict[str, tuple[str, Facts | Unusable]] = field(default_factory=dict)
    borrowed: dict[bytes, Borrowed] = field(default_factory=dict)
    lent: set[CheckpointId] = field(default_factory=set)
    listed: int = 0


@dataclass(slots=True)
class _Listed:
    """One checkpoint in a listing: the ranks whose manifests passed by, and what those say that were read."""

    id: CheckpointId
    ranks: dict[int, set[int] | frozenset[int]] = field(default_factory=dict)
    said: dict[PartId, Facts | Unusable] = field(default_factory=dict)
    todo: list[tuple[ObjectInfo, PartId]] = field(default_factory=list)

    def seen(self) -> Seen:
        return Seen(
            self.id,
            {world: frozenset(some) for world, some in self.ranks.items() if some},
            {part: said for part, said in self.said.items() if isinstance(said, Facts)},
            {part: said for part, said in self.said.items() if not isinstance(said, Facts)},
        )


class Manifests:
    """One tier's, as far as they were listed and read. `cut`: by run, what was being deleted when that was cut off."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.cut: dict[str, set[CheckpointId]] = {}
        self._read: dict[CheckpointId, _Read] = {}
        self._whole: dict[int, frozenset[int]] = {}  # world size -> all of its ranks
        self._memory = Memory()
        self._listed: set[str] = set()  # runs of which all names were listed

    # -- looking ----------------------------------------------------------------------------------------------------

    async def look(
        self, run: str, mine: Collection[int], *, few: int = 0, told: Callable[[], None] = lambda: None
    ) -> dict[CheckpointId, Seen]:
        """Every checkpoint of `run` that any manifest is of.

        Args:
            mine: the ranks whose manifests are all read.
            few: read all others, too, where they are at most this many.
            told: called whenever the tier has answered something more.
        """
        before = {checkpoint for checkpoint in self._read if checkpoint.run == run}  # another look may find more
        self._memory.count()
        listed = await self._list(run, mine, few, told)

        async def hear(todo: tuple[_Listed, ObjectInfo, PartId]) -> None:
            await self._hear(*todo)
            told()

        await each(READERS, hear, ((one, info, part) for one in listed for info, part in one.todo))
        for one in listed:
            if not any(isinstance(said, Facts) for said in one.said.values()):
                await self._find_a_voice(one)
        for gone in before - {one.id for one in listed}:
            self._read.pop(gone, None)
        for one in listed:
            if one.id in self._read:
                self._read[one.id].listed = sum(map(len, one.ranks.values()))
        self._listed.add(run)
        return {one.id: one.seen() for one in listed if any(one.ranks.values())}

    async def _list(self, run: str, mine: Collection[int], few: int, told: Callable[[], None]) -> list[_Listed]:
        listed: list[_Listed] = []
        spare: list[tuple[_Listed, ObjectInfo, PartId]] = []
        found: dict[str, tuple[str, Facts | Unusable]] = {}
        async with aclosing(self.listing(run)) as walk:
            async for info, checkpoint, name, rank, world in walk:
                if not listed or listed[-1].id != checkpoint:
                    self._share(listed[-1:])
                    listed.append(_Listed(checkpoint))
                    found = self._read.setdefault(checkpoint, _Read()).found
                    told()
                here = listed[-1]
                first, old = not here.ranks, found.get(name)
                here.ranks.setdefault(world, set()).add(rank)  # type: ignore[union-attr]  # shared when it is done
                known = old is not None and old[0] == info.token
                # Put anew, what was damaged has the token that it had on S3: it is read again until it can be used.
                if old and known and not isinstance(old[1], ManifestError):
                    here.said[PartId(checkpoint, rank, world)] = old[1]
                elif first or known or rank in mine:
                    here.todo.append((info, PartId(checkpoint, rank, world)))
                elif few:
                    spare.append((here, info, PartId(checkpoint, rank, world)))
                    if len(spare) > few:
                        spare, few = [], 0
        self._share(listed[-1:])
        for here, info, part in spare:
            here.todo.append((info, part))
        return listed

    async def listing(self, run: str) -> AsyncGenerator[tuple[ObjectInfo, CheckpointId, str, int, int], None]:
        """Every manifest's listing, with what its key says: checkpoint, file name, rank and world size. There may be a
        million: names are taken apart once."""
        prefix = manifests_prefix(run)
        names: dict[str, tuple[int, int] | None] = {}
        here: str | None = None
        checkpoint: CheckpointId | None = None
        async with aclosing(self.store.scan(prefix)) as listing:
            async for info in listing:
                directory, _, name = info.key.rpartition("/")
                if directory != here:
                    here, checkpoint = directory, CheckpointId.parse(run, directory[len(prefix) :])
                if name not in names:
                    names[name] = PartId.parse_name(name)
                pair = names[name]
                if pair and checkpoint:
                    yield info, checkpoint, name, *pair

    def _share(self, done: list[_Listed]) -> None:
        for one in done:
            for world, ranks in one.ranks.items():
                if len(ranks) == world:  # nearly all of them
                    one.ranks[world] = self._whole.setdefault(world, frozenset(range(world)))
                else:
                    one.ranks[world] = frozenset(ranks)

    async def _hear(self, one: _Listed, info: ObjectInfo, part: PartId) -> None:
        try:
            manifest = await read_manifest(self.store, part, info.key, info.size)
        except ObjectNotFound:  # pruned between the listing and now
            one.ranks[part.world] = one.ranks[part.world] - {part.rank}
            return
        except (ManifestError, FormatTooNew) as error:
            why = _bare(error)
            self._spoilt(one.id, info, why)
            one.said[part] = why
        else:
            one.said[part] = said = Facts.of(manifest)
            self._remember(one.id, info, named_by(manifest))
            self._read[one.id].found[_name(info)] = info.token, said

    async def _find_a_voice(self, one: _Listed) -> None:
        """Where the lowest rank's manifest cannot be used, the next one tells the timeline."""
        async with aclosing(self.store.scan(f"{manifests_prefix(one.id.run)}{one.id.name}/")) as listing:
            async for info in listing:
                part = PartId.parse_key(info.key)
                if part and part not in one.said and part.rank in one.ranks.get(part.world, ()):
                    await self._hear(one, info, part)
                    if isinstance(one.said.get(part), Facts):
                        return

    def lent(self, checkpoints: Collection[CheckpointId]) -> frozenset[CheckpointId]:
        """The checkpoints of which manifests that prunes read, of these checkpoints, name chunks."""
        return frozenset[CheckpointId]().union(*(self._read[one].lent for one in checkpoints if one in self._read))

    # -- what a deletion has to know --------------------------------------------------------------------------------

    def unread(self, run: str) -> float:
        """How many manifests of a run, as last listed, nobody has read, about; infinite where it never was listed."""
        if run not in self._listed:
            return math.inf
        return sum(max(0, read.listed - len(read.borrowed)) for one, read in self._read.items() if one.run == run)

    def is_read(self, checkpoint: CheckpointId) -> bool:
        """Whether all manifests of a checkpoint, as last listed, were read, and all that they borrow is remembered."""
        read = self._read.get(checkpoint, _Read())
        known = [borrowed for borrowed in read.borrowed.values() if borrowed.chunks is not None]
        return checkpoint.run in self._listed and len(known) >= read.listed

    def remembered(self, run: str) -> Iterator[tuple[CheckpointId, Borrowed]]:
        """What was read of a run, by checkpoint."""
        for one, read in self._read.items():
            if one.run == run:
                yield from ((one, borrowed) for borrowed in read.borrowed.values())

    def borrowed(self, checkpoint: CheckpointId, info: ObjectInfo) -> Borrowed | None:
        """What a manifest borrows, by its listing; None where nobody has read it, or it could not be used."""
        read = self._read.get(checkpoint)
        return read.borrowed.get(_mark(info)) if read else None

    async def learn(self, run: str, doomed: Collection[CheckpointId]) -> None:
        """Read all manifests of a run that nobody has read.

        Raises:
            ManifestError, FormatTooNew: one cannot be used. If it is one of `doomed`, only the latter is raised.
        """

        count: Counter[CheckpointId] = Counter()

        async def unknown() -> AsyncGenerator[ObjectInfo]:
            async with aclosing(self.listing(run)) as listing:
                async for info, owner, _, _, _ in listing:
                    count[owner] += 1
                    known = self.borrowed(owner, info)
                    if known is None or (known.chunks is None and owner in doomed):
                        yield info

        async def learn(info: ObjectInfo) -> None:
            part = PartId.parse_key(info.key)
            try:
                await self.read(info)
            except ObjectNotFound:
                pass
            except ManifestError:
                if part is None or part.checkpoint not in doomed:
                    raise

        async with aclosing(unknown()) as todo:
            await each(READERS, learn, todo)
        for owner, listed in count.items():
            self._read.setdefault(owner, _Read()).listed = listed
        self._listed.add(run)

    async def read(self, info: ObjectInfo) -> Borrowed:
        """Read a manifest for what it borrows, and remember that, or that it cannot be used.

        Raises:
            ObjectNotFound, ManifestError, FormatTooNew.
        """
        part = PartId.parse_key(info.key)
        try:
            manifest = await read_manifest(self.store, part, info.key, info.size)
        except (ManifestError, FormatTooNew) as error:
            if part:
                self._spoilt(part.checkpoint, info, _bare(error))
            raise
        borrowed = named_by(manifest)
        self._remember(manifest.part.checkpoint, info, borrowed)
        self._read[manifest.part.checkpoint].lent |= borrowed.owners
        return borrowed

    def _remember(self, checkpoint: CheckpointId, info: ObjectInfo, borrowed: Borrowed) -> None:
        self._read.setdefault(checkpoint, _Read()).borrowed[_mark(info)] = self._memory.kept(borrowed)

    def _spoilt(self, checkpoint: CheckpointId, info: ObjectInfo, why: Unusable) -> None:
        read = self._read.setdefault(checkpoint, _Read())
        read.found[_name(info)] = info.token, why
        read.borrowed.pop(_mark(info), None)

    async def are_usable(self, checkpoint: CheckpointId) -> bool:
        """Whether all manifests of a checkpoint are there and can be used; those that nobody has read are read now."""
        ranks: dict[int, set[int]] = {}
        todo = []
        async with aclosing(self.store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/")) as listing:
            async for info in listing:
                part = PartId.parse_key(info.key)
                if part:
                    ranks.setdefault(part.world, set()).add(part.rank)
                    if self.borrowed(checkpoint, info) is None:
                        todo.append(info)
        try:
            await each(READERS, self.read, todo)
        except (ObjectNotFound, ManifestError, FormatTooNew):
            return False
        return is_complete(ranks)


def _bare(error: Unusable) -> Unusable:
    """The same without its traceback and causes, whose frames hold what was read."""
    return type(error)(str(error))


def _name(info: ObjectInfo) -> str:
    return info.key.rpartition("/")[2]


def _mark(info: ObjectInfo) -> bytes:
    return xxhash.xxh3_128_digest(f"{_name(info)} {info.token}".encode())
