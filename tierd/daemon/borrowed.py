"""Which chunks of other checkpoints each manifest names, in so little memory that a prune need not read it again.

Law: what is remembered may say that a chunk is still named when it is not, never the reverse. A key is remembered as
eight bytes of its digest: two keys that agree in these keep an object that could go, which the next prune of its owner
meets again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakValueDictionary

import xxhash

from tierd.core.ids import CheckpointId, chunk_owner
from tierd.core.manifest import Manifest

LIMIT_BYTES = 32 << 20  # of keys, a tier; a manifest that finds no room is read again by a prune that asks about it


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Borrowed:
    """The other checkpoints whose chunks one manifest names, and by owner which ones: marks of keys, in order. `chunks`
    is None where only the owners are remembered."""

    owners: frozenset[CheckpointId]
    chunks: Mapping[CheckpointId, array[int]] | None


NOTHING = Borrowed(frozenset(), {})
_Name: TypeAlias = tuple[frozenset[CheckpointId], tuple[int, ...] | None]


def mark_of(key: str) -> int:
    """Eight bytes that stand for a chunk's key, relative to its run."""
    return xxhash.xxh3_64_intdigest(key.encode())


def named_by(manifest: Manifest, *, own: bool = False) -> Borrowed:
    """The chunks of other checkpoints that a manifest names; with `own`, all that it names."""
    marks: dict[CheckpointId, set[int]] = {}
    homes: dict[str, CheckpointId | None] = {}
    for chunk in manifest.chunks():
        if chunk.stored is None:
            continue
        home = chunk.stored.key.rpartition("/")[0]
        if home not in homes:
            homes[home] = chunk_owner(manifest.run, chunk.stored.key)
        owner = homes[home]
        if owner and (own or owner != manifest.part.checkpoint):
            marks.setdefault(owner, set()).add(mark_of(chunk.stored.key))
    return Borrowed(frozenset(marks), {owner: array("Q", sorted(some)) for owner, some in marks.items()})


class Memory:
    """Makes what manifests of one tier borrow small: what is equal is kept once, and all of it has a limit."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = self._room = limit_bytes
        self._sets: WeakValueDictionary[bytes, array[int]] = WeakValueDictionary()
        self._all: WeakValueDictionary[_Name, Borrowed] = WeakValueDictionary()

    def count(self) -> None:
        """Take note of what was forgotten meanwhile: there is room again."""
        self._room = self._limit - sum(len(one) * one.itemsize for one in self._sets.values())

    def kept(self, borrowed: Borrowed) -> Borrowed:
        """The same, to be remembered: without the chunks where there is no room for them."""
        if not borrowed.owners:
            return NOTHING
        given = borrowed.chunks or {}
        found = {owner: marks for owner in sorted(given) if (marks := self._kept(owner, given[owner])) is not None}
        whole = len(found) == len(borrowed.owners)
        name = borrowed.owners, tuple(map(id, found.values())) if whole else None
        return self._all.setdefault(name, Borrowed(borrowed.owners, found if whole else None))

    def _kept(self, owner: CheckpointId, marks: array[int]) -> array[int] | None:
        name = xxhash.xxh3_128_digest(f"{owner.run} {owner.name} ".encode() + marks.tobytes())
        old = self._sets.get(name)
        if old is None and len(marks) * marks.itemsize <= self._room:
            self._room -= len(marks) * marks.itemsize
            old = self._sets[name] = marks
        return old


class Named:
    """Of the chunks that lie under some checkpoints, those that are named.

    Args:
        owners: these checkpoints.
    """

    def __init__(self, owners: Iterable[CheckpointId]) -> None:
        self._sets: dict[CheckpointId, dict[int, array[int]]] = {owner: {} for owner in owners}
        self._all: dict[CheckpointId, frozenset[int]] = {}

    def add(self, borrowed: Borrowed) -> None:
        """What one manifest names. Most name the same sets, which count once."""
        for owner, marks in (borrowed.chunks or {}).items():
            if owner in self._sets:
                self._sets[owner][id(marks)] = marks
                self._all.pop(owner, None)

    def under(self, owner: CheckpointId) -> frozenset[int]:
        """The marks of the chunks under `owner` that are named."""
        if owner not in self._all:
            self._all[owner] = frozenset().union(*self._sets.get(owner, {}).values())
        return self._all[owner]
