"""A tier's manifests: which there are, and what those say that were read.

Law: names alone tell what is complete, so a look lists every name and reads few manifests: the one that speaks for each
checkpoint, and those of ranks that the asker has parts of. Each is read once, and again only when its listing shows
that it was replaced. What nobody has read is not known: a prune reads it before anything is deleted, and tells here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

import xxhash

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import CheckpointId, PartId, manifests_prefix
from tierd.core.manifest import Manifest
from tierd.core.world import Facts, Seen, is_complete
from tierd.daemon.copies import read_manifest
from tierd.daemon.together import each
from tierd.stores.base import ObjectInfo, Store

READERS = 8  # manifests read at once

Unusable: TypeAlias = ManifestError | FormatTooNew


@dataclass(slots=True)
class _Read:
    """What was read of one checkpoint's manifests.

    `found` is by file name, with the token of what was read: what looks read, and whatever proved unusable. `others`
    are usable ones that prunes read, by a digest of name and token: of a million, only what each borrows is kept.
    `lent` is all of that together.
    """

    found: dict[str, tuple[str, Facts | Unusable]] = field(default_factory=dict)
    others: dict[bytes, frozenset[CheckpointId]] = field(default_factory=dict)
    lent: set[CheckpointId] = field(default_factory=set)


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
        self._kinds: dict[frozenset[CheckpointId], frozenset[CheckpointId]] = {}

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
        return {one.id: one.seen() for one in listed if any(one.ranks.values())}

    async def _list(self, run: str, mine: Collection[int], few: int, told: Callable[[], None]) -> list[_Listed]:
        listed: list[_Listed] = []
        spare: list[tuple[_Listed, ObjectInfo, PartId]] = []
        found: dict[str, tuple[str, Facts | Unusable]] = {}
        async with aclosing(self._walk(run)) as walk:
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

    async def _walk(self, run: str) -> AsyncGenerator[tuple[ObjectInfo, CheckpointId, str, int, int], None]:
        """Every manifest's listing, with what its key says. There may be a million: names are taken apart once."""
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
            said: Facts | Unusable = Facts.of(await read_manifest(self.store, part, info.key, info.size))
        except ObjectNotFound:  # pruned between the listing and now
            one.ranks[part.world] = one.ranks[part.world] - {part.rank}
            return
        except (ManifestError, FormatTooNew) as error:
            said = _bare(error)
        one.said[part] = said
        self._read.setdefault(one.id, _Read()).found[_name(info)] = info.token, said

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

    async def naming(self, checkpoint: CheckpointId, owners: Collection[CheckpointId]) -> AsyncGenerator[ObjectInfo]:
        """The listings of all manifests of a run, beside `checkpoint`'s, that may name chunks under `owners`: of those,
        that borrow from them, and that nobody has read yet."""
        asked = frozenset(owners)
        async with aclosing(self._walk(checkpoint.run)) as walk:
            async for info, owner, name, _, _ in walk:
                if owner == checkpoint:
                    continue
                borrowed = None if owner in asked else self._borrowed(owner, name, info.token)
                if borrowed is None or not borrowed.isdisjoint(asked):
                    yield info

    def _borrowed(self, checkpoint: CheckpointId, name: str, token: str) -> frozenset[CheckpointId] | None:
        read = self._read.get(checkpoint)
        if read is None:
            return None
        old = read.found.get(name)
        if old and old[0] == token:
            return old[1].borrowed if isinstance(old[1], Facts) else None
        return read.others.get(_mark(name, token))

    async def read(self, info: ObjectInfo) -> Manifest:
        """Read a manifest, and remember what it borrows, or that it cannot be used.

        Raises:
            ObjectNotFound, ManifestError, FormatTooNew.
        """
        part = PartId.parse_key(info.key)
        try:
            manifest = await read_manifest(self.store, part, info.key, info.size)
        except (ManifestError, FormatTooNew) as error:
            if part:
                self._read.setdefault(part.checkpoint, _Read()).found[_name(info)] = info.token, _bare(error)
            raise
        borrowed = manifest.owners - {manifest.part.checkpoint}
        borrowed = self._kinds.setdefault(borrowed, borrowed)
        read = self._read.setdefault(manifest.part.checkpoint, _Read())
        read.others[_mark(_name(info), info.token)] = borrowed
        read.lent |= borrowed
        return manifest

    async def are_usable(self, checkpoint: CheckpointId) -> bool:
        """Whether all manifests of a checkpoint are there and can be used; those that nobody has read are read now."""
        ranks: dict[int, set[int]] = {}
        todo = []
        async with aclosing(self.store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/")) as listing:
            async for info in listing:
                part = PartId.parse_key(info.key)
                if part:
                    ranks.setdefault(part.world, set()).add(part.rank)
                    if self._borrowed(checkpoint, _name(info), info.token) is None:
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


def _mark(name: str, token: str) -> bytes:
    return xxhash.xxh3_128_digest(f"{name} {token}".encode())
