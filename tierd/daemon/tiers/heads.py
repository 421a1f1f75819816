"""The heads of runs on a tier and in a spool: read them, and write this node's own.

Invariant: only the run's janitor, or a node that fills the tier with the run, writes heads on a tier. It writes them
after the manifests to which they refer, and only new content. An unreadable head counts as absent, because the
manifests hold the same facts and the next head repeats them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from msgspec.structs import replace

from tierd.core.errors import CorruptChunk, FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import head_key, heads_prefix, parse_head
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.janitor import is_janitor
from tierd.core.planning.place import Place
from tierd.core.timeline.head import (
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
from tierd.daemon.tiers.objects import read_sealed
from tierd.stores.base import ObjectInfo, Store, clear

log = logging.getLogger("tierd.daemon")


class Heads:
    """Read one tier's heads; each again only when its listing shows that it was replaced.

    Attributes:
        unreadable: why a head could not be read, the last one of them; empty if all could be.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.unreadable = ""
        self._read: dict[str, tuple[str, Head | None]] = {}  # key -> its token and content

    async def read(self, run: str, info: ObjectInfo) -> Head | None:
        """Read the head that a listing of `run` shows; None if it is no head, unreadable, or deleted.

        Raises:
            StoreUnavailable, StoreRefused: the tier failed.
        """
        by = parse_head(run, info.key)
        if by is None:
            return None
        token, head = self._read.get(info.key, ("", None))
        if token != info.token or head is None:
            head = await self._fetch(run, by, info)
            self._read[info.key] = info.token, head
        return head

    async def _fetch(self, run: str, by: str, info: ObjectInfo) -> Head | None:
        try:
            if info.size > MAX_SIZE:
                raise ManifestError(f"{info.key}: {info.size} bytes, and a head has at most {MAX_SIZE}")
            return await read_sealed(self._store, info.key, lambda data: decode(data, run, by))
        except ObjectNotFound:
            return None
        except (CorruptChunk, ManifestError, FormatTooNew) as error:
            if self._read.get(info.key, ("", None))[0] != info.token:
                reason = "cannot be read here" if isinstance(error, FormatTooNew) else "not a head of this run"
                log.warning("%s: %s, and passed over: %s", info.key, reason, error)
            self.unreadable = str(error)
            return None


def unwritten(inventory: Inventory, place: Place, run: str, *, fills: bool = False) -> Head | None:
    """Return the head that this node should write to a tier; None if there is none to write.

    There is one if this node is the run's janitor, or fills the tier with the run (`fills`), and a checkpoint is
    complete on the tier. In addition, its own head must lack something, or other nodes' heads must still be there.
    """
    complete = place.run(run).whole
    if not complete or not (fills or is_janitor(inventory, place, run)):
        return None
    tier_heads = place.heads.get(run, ())
    head = following(inventory, place, run, inventory.who, tier_heads)
    return None if [earlier.launches for earlier in tier_heads] == [head.launches] else head


def remembering(inventory: Inventory, run: str, urls: Mapping[str, str]) -> Head | None:
    """Return the head that the spool should record from all places that answered; None if it holds that already.

    Args:
        inventory: the latest inventory.
        run: the run.
        urls: tier name -> URL of the tiers whose last heads are remembered now. Another tier may show an older head
            than before, which must not be taken over before `rolled_back` compared it.
    """
    before = inventory.spool.heads.get(run, ())
    answering = {urls[name]: place for name, place in inventory.tiers.items() if place and name in urls}
    last_by_url = {url: last_of(place.heads.get(run, ())) for url, place in answering.items()}
    tiers = seeing(before[0].tiers if before else {}, last_by_url)
    head = replace(following(inventory, inventory.spool, run, "", before), tiers=tiers)
    recorded = [(earlier.launches, earlier.tiers) for earlier in before]
    return None if not head.launches or recorded == [(head.launches, head.tiers)] else head


def following(inventory: Inventory, place: Place, run: str, by: str, heads: tuple[Head, ...]) -> Head:
    """Return the head that follows `heads`, the earlier ones of a place.

    Args:
        inventory: the observed places, which give the origins of launches.
        place: the place that the head describes.
        run: the run.
        by: the id of the node that writes it, 8 hex digits; empty for a spool's, which describes all places.
        heads: the earlier heads.
    """
    where = [place] if by else list(inventory.places.values())
    complete = [newest for observed in where for newest in observed.run(run).newest_whole]
    remembered = together(heads) if by else inventory.remembered(run)
    checkpoints = [newest for observed in inventory.places.values() for newest in observed.run(run).newest_of_each]
    launches = launches_of(complete, checkpoints, inventory.origins(run), remembered)
    return successor(heads, run, by, launches, datetime.now(UTC).isoformat())


async def rolled_back(store: Store, run: str, remembered: Last | None, heads: tuple[Head, ...]) -> str | None:
    """Explain why a run's history on a tier is, or can be, older than this node saw there; None if it is not.

    Args:
        store: the tier's store.
        run: the run.
        remembered: the last head that this node saw there.
        heads: the heads that the latest observation found.

    Raises:
        StoreUnavailable, StoreRefused: the tier failed.
    """
    if rollback(last_of(heads), remembered) is None:
        return None
    # List again, because a head that another node replaced during the observation is missing from it.
    reader = Heads(store)
    now = [head async for info in store.scan(heads_prefix(run)) if (head := await reader.read(run, info))]
    return rollback(last_of(now), remembered, reader.unreadable)


async def write(store: Store, head: Head, heads: tuple[Head, ...]) -> None:
    """Put a head on a tier, and delete those of other nodes, because the new one contains their content.

    Raises:
        StoreUnavailable, StoreRefused: the tier failed.
    """
    await store.put(head_key(head.run, head.by), encode(head))
    if stale := [head_key(other_head.run, other_head.by) for other_head in heads if other_head.by != head.by]:
        await clear(store, stale)
