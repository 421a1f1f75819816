"""Learn of a run's new checkpoints from its heads: one GET a period for each tier, in place of a listing.

Invariant: a head is a hint. A checkpoint that it names is taken only by its manifests, and a head that is missing,
damaged, older than before or wrong only delays a follower until the next listing, which is at most `_LIST_S` later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.core.errors import CorruptChunk, FormatTooNew, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, head_key
from tierd.core.timeline.launch_chain import Head, LaunchRecord, decode_head, merge_heads
from tierd.core.timeline.restore_order import Candidate, restore_candidates
from tierd.daemon.concurrency import gather_limited
from tierd.reading.run_on_tiers import RunOnTiers
from tierd.stores.base import octets

_LIST_S = 300.0  # seconds between listings while a head can be read, which also find what no head tells
_LIST_WITHOUT_HEAD_S = 5.0  # as before a run's first head, which follows its first manifest
_ANSWER_S = 5.0  # seconds that a tier may take for its head


@dataclass(frozen=True, slots=True)
class NewerCheckpoints:
    """What may be newer than the checkpoint that a follower holds.

    Attributes:
        candidates: in the order in which a restore tries them.
        origins: by attempt, the checkpoint that it resumed from.
        is_listed: whether a listing shows them, and not a head alone.
    """

    candidates: tuple[Candidate, ...]
    origins: Mapping[str, CheckpointId | None]
    is_listed: bool


class HeadWatch:
    """Watches the heads of one run on its tiers."""

    def __init__(self, tiers: RunOnTiers) -> None:
        self._tiers = tiers
        self._writers: set[str] = set()  # the nodes whose heads the last listing with heads showed on any tier
        self._listed: Mapping[str, LaunchRecord] | None = None  # as the heads told at the last listing
        self._listed_at = 0.0  # monotonic seconds

    def list_next(self) -> None:
        """List at the next call of `find`, because a checkpoint could not be read."""
        self._listed = None

    def find(self, held: Candidate | None) -> NewerCheckpoints | None:
        """Return what to try next; None if the heads show nothing new.

        Raises:
            StoreUnavailable, StoreRefused: a tier did not answer, and the others show nothing new.
        """
        if self._listed is None or held is None:
            return self._list()
        heads, errors = self._tiers.loop.run(self._read_heads())
        launches = merge_heads(heads)
        newest = max(launches, default="")
        step = launches[newest].newest if launches else None
        if launches != self._listed and (newest, step) != (held.checkpoint.attempt, held.checkpoint.step):
            if newest == held.checkpoint.attempt and step is not None and step > held.checkpoint.step:
                named = Candidate(CheckpointId(self._tiers.run, newest, step), held.world)
                return NewerCheckpoints((named,), _origins(self._tiers.run, launches), is_listed=False)
            return self._list()
        if errors:
            raise errors[0]
        limit_s = _LIST_S if launches else _LIST_WITHOUT_HEAD_S
        return self._list() if time.monotonic() - self._listed_at >= limit_s else None

    def _list(self) -> NewerCheckpoints:
        inventory = self._tiers.observe()
        places = [place for place in inventory.tiers.values() if place is not None]
        heads = [head for place in places for head in place.heads.get(self._tiers.run, ())]
        self._writers = {head.by for head in heads} or self._writers
        self._listed = merge_heads(heads)
        self._listed_at = time.monotonic()
        order = restore_candidates(inventory, self._tiers.run)
        return NewerCheckpoints(order.candidates, order.origins, is_listed=True)

    async def _read_heads(self) -> tuple[list[Head], list[StoreUnavailable | StoreRefused]]:
        """Read the heads of the known writers on every tier, also one that did not answer the last listing."""
        errors: list[StoreUnavailable | StoreRefused] = []

        async def read(name: str, by: str) -> Head | None:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    data = await self._tiers.stores[name].get(head_key(self._tiers.run, by))
                return decode_head(bytes(octets(data)), self._tiers.run, by)
            except (ObjectNotFound, ManifestError, CorruptChunk, FormatTooNew):
                return None
            except (StoreUnavailable, StoreRefused) as error:
                errors.append(error)
            except TimeoutError:
                errors.append(StoreUnavailable(f"{name}: did not answer within {_ANSWER_S:.0f} s"))
            return None

        known = [(name, by) for name in self._tiers.stores for by in sorted(self._writers)]
        heads = [head for head in await gather_limited(8, [read(*place) for place in known]) if head]
        return heads, errors


def _origins(run: str, launches: Mapping[str, LaunchRecord]) -> dict[str, CheckpointId | None]:
    return {
        attempt: CheckpointId(run, record.resumed_from.attempt, record.resumed_from.step)
        if record.resumed_from
        else None
        for attempt, record in launches.items()
    }
