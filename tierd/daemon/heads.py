"""The heads of runs on a tier and in a spool: reading them, and writing this node's own.

Law: only the run's janitor writes on a tier, after the manifests that a head speaks of, and only what is new. A head
that cannot be read counts as none: manifests say the same, and the next one says it again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from msgspec.structs import replace

from tierd.core.errors import CorruptChunk, FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.head import (
    MAX_SIZE,
    Head,
    Last,
    decode,
    encode,
    last_of,
    launches_of,
    rollback,
    seeing,
    successor,
    together,
)
from tierd.core.ids import head_key, heads_prefix, parse_head
from tierd.core.plan import is_janitor
from tierd.core.world import Place, World
from tierd.stores.base import ObjectInfo, Store, clear

log = logging.getLogger("tierd.daemon")


class Heads:
    """Reads one tier's heads; each again only when its listing shows that it was replaced."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[str, tuple[str, Head | None]] = {}  # key -> its token, and what it says

    async def read(self, run: str, info: ObjectInfo) -> Head | None:
        """The head that a listing of `run` shows; None where it is none, cannot be read, or is gone.

        Raises:
            StoreUnavailable, StoreRefused: it could not be asked for.
        """
        by = parse_head(run, info.key)
        if by is None:
            return None
        token, known = self._read.get(info.key, ("", None))
        if token != info.token or known is None:
            known = await self._fetch(run, by, info)
            self._read[info.key] = info.token, known
        return known

    async def _fetch(self, run: str, by: str, info: ObjectInfo) -> Head | None:
        try:
            if info.size > MAX_SIZE:
                raise ManifestError(f"{info.key}: {info.size} bytes, and a head has at most {MAX_SIZE}")
            return decode(bytes(await self._store.get(info.key)), run, by)
        except ObjectNotFound:
            return None
        except (CorruptChunk, ManifestError, FormatTooNew) as error:
            if self._read.get(info.key, ("", None))[0] != info.token:
                log.warning("%s: not a head of this run, and passed over: %s", info.key, error)
            return None


def unwritten(world: World, place: Place, run: str) -> Head | None:
    """The head that this node is to write in a tier's place: where it is the run's janitor, something of it is complete
    there, and its own head does not say it yet, or those of others are still there."""
    complete = [seen.id for seen in place.copies(run) if seen.usable]
    if not complete or not is_janitor(world, place, run):
        return None
    there = place.heads.get(run, ())
    head = _next(world, place, run, world.who, there)
    return None if [one.launches for one in there] == [head.launches] else head


def remembering(world: World, run: str, urls: Mapping[str, str]) -> Head | None:
    """The head that the spool is to remember, of all places that answered; None where it remembers that already.

    Args:
        urls: of each tier, by name.
    """
    before = world.spool.heads.get(run, ())
    there = {urls[name]: last_of(place.heads.get(run, ())) for name, place in world.tiers.items() if place}
    tiers = seeing(before[0].tiers if before else {}, there)
    head = replace(_next(world, world.spool, run, "", before), tiers=tiers)
    known = [(one.launches, one.tiers) for one in before]
    return None if not head.launches or known == [(head.launches, head.tiers)] else head


async def rolled_back(store: Store, run: str, seen: Last | None, heads: tuple[Head, ...]) -> str | None:
    """Why a run's history on a tier is older than what this node saw there; None where it is not.

    Args:
        seen: the last head that this node saw there.
        heads: what the latest look found.

    Raises:
        StoreUnavailable, StoreRefused: it could not be asked for.
    """
    if rollback(last_of(heads), seen) is None:
        return None
    # A head that another node replaced during that look is missing from it: only what is missing now is told of.
    again = Heads(store)
    now = [head async for info in store.scan(heads_prefix(run)) if (head := await again.read(run, info))]
    return rollback(last_of(now), seen)


async def write(store: Store, head: Head, others: tuple[Head, ...]) -> None:
    """Put a head on a tier, and delete those of other nodes, because it says what they said.

    Raises:
        StoreUnavailable, StoreRefused.
    """
    await store.put(head_key(head.run, head.by), encode(head))
    if stale := [head_key(one.run, one.by) for one in others if one.by != head.by]:
        await clear(store, stale)


def _next(world: World, place: Place, run: str, by: str, heads: tuple[Head, ...]) -> Head:
    copies = world.copies(run)
    where = [place] if by else list(world.places.values())
    complete = {seen.id for one in where for seen in one.copies(run) if seen.usable}
    remembered = together(heads) if by else world.remembered(run)
    launches = launches_of(complete, copies, world.origins(run), remembered)
    return successor(heads, run, by, launches, datetime.now(UTC).isoformat())
