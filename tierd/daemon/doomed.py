"""What a prune may delete: settled after its marks are there, by what manifests say that were read or are read now.

Law: a chunk goes only if no manifest names it but those that go with it, and only after its checkpoint was marked and
all others were listed. Under a checkpoint whose own manifests stay, everything stays.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from tierd.core.errors import ManifestError, ObjectNotFound
from tierd.core.ids import CheckpointId, PartId
from tierd.core.world import Place
from tierd.daemon.borrowed import Borrowed, Named, named_by
from tierd.daemon.copies import read_manifest
from tierd.daemon.manifests import READERS, Manifests
from tierd.daemon.together import each
from tierd.daemon.turns import Marks, ends, sweep
from tierd.stores.base import ObjectInfo, Store

_WHEN = "%Y-%m-%d %H:%M:%S %Z"


@dataclass(slots=True)
class Listed:
    """What a listing of all manifests shows: of the doomed, the keys and what they borrow; of the others, who is there
    and which chunks they name. `grown`: doomed ones of which there is more than whoever decided knew, and why that is
    known."""

    named: Named
    own: dict[CheckpointId, list[str]] = field(default_factory=dict)
    borrowed: list[Borrowed] = field(default_factory=list)
    alive: set[CheckpointId] = field(default_factory=set)
    grown: dict[CheckpointId, str] = field(default_factory=dict)

    @property
    def lenders(self) -> set[CheckpointId]:
        """The checkpoints whose chunks the doomed borrow."""
        return set().union(*(one.owners for one in self.borrowed))

    def orphans(self, doomed: Collection[CheckpointId]) -> dict[CheckpointId, frozenset[int]]:
        """The chunks that nothing names but the doomed, under checkpoints whose own manifests are gone."""
        found = {}
        for owner in self.lenders - self.alive - set(doomed):
            marks = frozenset[int]().union(*((one.chunks or {}).get(owner, ()) for one in self.borrowed))
            if left := marks - self.named.under(owner):
                found[owner] = left
        return found


@dataclass(slots=True)
class Going:
    """What one pass deletes, as it was settled after the marks: nobody names any of it but the doomed. `held`: what it
    was to delete and does not, each with the reason."""

    doomed: set[CheckpointId]
    listed: Listed
    orphans: dict[CheckpointId, frozenset[int]]
    cut: dict[CheckpointId, list[str]]
    held: dict[CheckpointId, str]

    def goes(self, owner: CheckpointId, mark: int) -> bool:
        """Whether a chunk that lies under `owner` is deleted."""
        if owner in self.doomed:
            return mark not in self.listed.named.under(owner)
        return mark in self.orphans.get(owner, ())


@dataclass(slots=True)
class Pass:
    """Finds out what can go. Law: it marks first and looks then, again for each further mark: whoever it does not see
    sees the marks."""

    store: Store
    doomed: set[CheckpointId]
    who: str
    known: Manifests
    marks: Marks
    seen: Place

    async def settle(self, *, listed: bool) -> Going:
        """Mark and look until nothing that goes lies under a checkpoint that is not marked.

        Args:
            listed: what is there now is what the decision rests on.
        """
        run, asked, remembered = self.marks.run, *self._remembered()
        held: dict[CheckpointId, str] = {}
        await self.marks.put(self.doomed | remembered)
        while True:
            swept = await sweep(self.store, run, self.who)
            cut = {one: own for one, keys in swept.cut.items() if (own := sorted({*keys} - {*self.marks.keys}))}
            self.known.cut[run] = set(cut)
            found = Listed(Named(asked))
            await self._coming(found, swept.intents)
            await self._list(found, asked, listed=listed)
            if found.grown:
                self.doomed -= found.grown.keys()
                held |= found.grown
            elif not found.lenders <= asked:
                asked |= found.lenders
            elif not (orphans := found.orphans(self.doomed)).keys() <= self.marks.owners:
                await self.marks.put(orphans.keys())
            else:
                return Going(self.doomed, found, orphans, cut, held)

    def _remembered(self) -> tuple[set[CheckpointId], set[CheckpointId]]:
        """By what was read before: the owners of all chunks that the doomed name, and those under whose names some will
        go with them."""
        found = Listed(Named(()))
        others: list[Borrowed] = []
        for one, borrowed in self.known.remembered(self.marks.run):
            (found.borrowed if one in self.doomed else others).append(borrowed)
            found.alive.add(one)
        asked = found.lenders | self.doomed
        if asked <= found.alive:
            return asked, set()
        found.named = Named(asked)
        for borrowed in others:
            found.named.add(borrowed)
        return asked, set(found.orphans(self.doomed))

    async def _coming(self, found: Listed, intents: list[tuple[str, PartId]]) -> None:
        """What is about to be put. It is read before manifests are listed: one that is gone by then is among those."""

        async def read(intent: tuple[str, PartId]) -> None:
            with suppress(ObjectNotFound):
                found.named.add(named_by(await read_manifest(self.store, None, intent[0]), own=True))

        await each(READERS, read, intents)
        for key, part in sorted(intents, key=lambda one: ends(one[0])):
            if part.checkpoint in self.doomed:
                found.grown[part.checkpoint] = (
                    f"{key} says that it is being flushed; that is over by {ends(key):{_WHEN}}"
                )
            else:
                found.alive.add(part.checkpoint)

    async def _list(self, found: Listed, asked: Collection[CheckpointId], *, listed: bool) -> None:
        async def unknown() -> AsyncGenerator[tuple[ObjectInfo, CheckpointId]]:
            async with aclosing(self.known.listing(self.marks.run)) as listing:
                async for info, owner, _, rank, world in listing:
                    borrowed = self.known.borrowed(owner, info)
                    if owner in self.doomed:
                        found.own.setdefault(owner, []).append(info.key)
                        if not listed and not self.seen.lists(PartId(owner, rank, world)):
                            found.grown[owner] = "more of it has come since it was looked at"
                        if borrowed and borrowed.chunks is not None:
                            found.borrowed.append(borrowed)
                        else:
                            yield info, owner
                        continue
                    found.alive.add(owner)
                    if borrowed is None or (borrowed.chunks is None and not borrowed.owners.isdisjoint(asked)):
                        yield info, owner
                    else:
                        found.named.add(borrowed)

        async def read(one: tuple[ObjectInfo, CheckpointId]) -> None:
            info, owner = one
            with suppress(ObjectNotFound):
                if owner not in self.doomed:
                    found.named.add(await self.known.read(info))
                    return
                with suppress(ManifestError):  # damaged, it names nothing
                    found.borrowed.append(await self.known.read(info))

        async with aclosing(unknown()) as todo:
            await each(READERS, read, todo)
