"""What was observed: the spool and the tiers, as planning and restoring see them.

Law: these are facts and nothing else. A tier that did not answer is None in the `World`: absence of an answer is never
an empty place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest

SPOOL = "local"  # the spool's name wherever a tier's name can stand


@dataclass(frozen=True, slots=True)
class Facts:
    """What planning needs of one readable manifest. Sizes in bytes; `stored_size` is 0 in the spool."""

    created: datetime
    metrics: Mapping[str, float]
    origin: CheckpointId | None
    size: int
    stored_size: int
    borrowed: frozenset[CheckpointId]  # other checkpoints whose chunks this manifest names

    @staticmethod
    def of(manifest: Manifest) -> Facts:
        return Facts(
            manifest.created_at,
            manifest.numbers,
            manifest.origin,
            manifest.size,
            manifest.stored_size,
            manifest.owners - {manifest.part.checkpoint},
        )


@dataclass(frozen=True, slots=True)
class Place:
    """What one place, the spool or a tier, was seen to hold.

    A part maps to None where its manifest is there but cannot be used; `defects` then says why. `owners` are the
    checkpoints under whose name chunks lie on a tier. Quarantined parts still tell the timeline where they can.
    """

    parts: Mapping[PartId, Facts | None] = field(default_factory=dict)
    defects: Mapping[PartId, TierdError] = field(default_factory=dict)
    pins: frozenset[CheckpointId] = frozenset()
    owners: frozenset[CheckpointId] = frozenset()
    quarantined: Mapping[PartId, Facts | None] = field(default_factory=dict)

    @property
    def checkpoints(self) -> dict[CheckpointId, list[PartId]]:
        """The parts of each checkpoint that has any."""
        return by_checkpoint(self.parts)


@dataclass(frozen=True, slots=True)
class World:
    """Everything observed. `held` and `busy` are what the daemon itself has in hand: nothing there is deleted."""

    spool: Place
    tiers: Mapping[str, Place | None]  # in order of preference; None: it did not answer
    free: float = 1.0  # share of the spool's file system that is free, 0..1
    leftovers: tuple[str, ...] = ()  # stages whose writer is gone
    held: frozenset[CheckpointId] = frozenset()  # being restored
    busy: frozenset[PartId] = frozenset()  # being flushed


def by_checkpoint(parts: Iterable[PartId]) -> dict[CheckpointId, list[PartId]]:
    found: dict[CheckpointId, list[PartId]] = defaultdict(list)
    for part in parts:
        found[part.checkpoint].append(part)
    return dict(found)


def is_complete(parts: Iterable[PartId]) -> bool:
    """Whether ranks 0..W-1 of one world size are all among one checkpoint's parts."""
    ranks: dict[int, set[int]] = defaultdict(set)
    for part in parts:
        ranks[part.world].add(part.rank)
    return any(len(found) == world for world, found in ranks.items())


def runs(world: World) -> list[str]:
    """Every run that any place shows."""
    places = [world.spool, *(place for place in world.tiers.values() if place)]
    return sorted({part.checkpoint.run for place in places for part in place.parts})
