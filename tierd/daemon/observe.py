"""Looking: what lies in the spool and on a tier, as the `Place`s that planning works on.

Law: a look changes nothing. A tier either answered everything that was asked or the whole look fails; half a listing is
never handed on, since deletions are decided from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing

from tierd.core.errors import (
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import (
    CheckpointId,
    PartId,
    chunks_prefix,
    manifests_prefix,
    pins_prefix,
    quarantine_prefix,
)
from tierd.core.manifest import Manifest, decode
from tierd.core.world import Facts, Place, World
from tierd.daemon.together import together
from tierd.spool import Spool, condition
from tierd.stores.base import ObjectInfo, Store, children

log = logging.getLogger("tierd.daemon")

_RELIST = 600.0  # seconds between listings of a run's chunks
_READERS = 8  # manifests read at once
_MANY = 1000  # chunks of a checkpoint: a page of a listing; the rest is skipped


async def look_around(spool: Spool | None, stores: Mapping[str, Store], run: str | None) -> World:
    """Look once at a spool and at tiers; one that did not answer is None in the world. Without `run`, at all runs."""
    place = SpoolEye(spool).look() if spool else Place()
    tiers: dict[str, Place | None] = {}
    for name, store in stores.items():
        eye = TierEye(store)
        try:
            tiers[name] = await eye.look({run} if run else await eye.runs())
        except (StoreUnavailable, StoreRefused) as error:
            log.warning("%s: cannot be asked: %s", name, error)
            tiers[name] = None
    return World(place, tiers)


async def chunks_there(store: Store, rank: int, owners: Iterable[CheckpointId]) -> dict[str, int]:
    """Every chunk of `rank` that lies under these checkpoints, by key, with its stored size in bytes."""
    found: dict[str, int] = {}
    for owner in sorted(owners):
        prefix = f"{chunks_prefix(owner.run)}{owner.name}/{rank:05}/"
        found |= {info.key: info.size async for info in store.scan(prefix)}
    return found


async def missing_chunks(store: Store, manifest: Manifest) -> set[str]:
    """The keys of the chunks that a manifest names and its tier lacks, or has in another size."""
    there = await chunks_there(store, manifest.rank, manifest.owners)
    wanted = {f"{manifest.run}/{chunk.stored.key}": chunk.stored.size for chunk in manifest.chunks() if chunk.stored}
    return {key for key, size in wanted.items() if there.get(key) != size}


class SpoolEye:
    """Looks at the spool. A manifest is parsed again only when its part is new: parts are immutable."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._cache: dict[tuple[PartId, int], Facts | TierdError] = {}

    def look(self) -> Place:
        """What the spool holds now. Raises OSError when it cannot be read."""
        parts: dict[PartId, Facts | None] = {}
        defects: dict[PartId, TierdError] = {}
        cache: dict[tuple[PartId, int], Facts | TierdError] = {}
        for part in self._spool.parts():
            found = self._facts(part, cache)
            if isinstance(found, Facts):
                parts[part] = found
            elif found is not None:
                parts[part], defects[part] = None, found
        self._cache = cache
        aside = {part: Facts.of(manifest) if manifest else None for part, manifest in self._spool.quarantined().items()}
        return Place(parts, defects, frozenset(self._spool.pins()), frozenset(), aside)

    def _facts(self, part: PartId, cache: dict[tuple[PartId, int], Facts | TierdError]) -> Facts | TierdError | None:
        try:
            key = (part, self._spool.manifest_stamp(part))
            found = self._cache.get(key) or Facts.of(self._spool.manifest(part))
        except ObjectNotFound:
            return None  # removed between the listing and now
        except (ManifestError, FormatTooNew) as error:
            return error
        except OSError as error:  # of this one file: says nothing about its bytes, nor about any other's
            return condition(error, f"manifest of {part}")
        cache[key] = found
        return found


class TierEye:
    """Looks at a tier. A manifest is read again only when its listing shows that it was replaced."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._cache: dict[tuple[str, str], Facts | TierdError] = {}
        self._owners: dict[str, set[CheckpointId]] = {}
        self._listed: dict[str, float] = {}  # run -> when its chunks were listed, monotonic seconds

    async def runs(self) -> set[str]:
        """Every run on the tier, at about one listing request each."""
        return {name async for name in children(self.store, "") if name != "README.md"}

    async def look(self, runs: set[str]) -> Place:
        """What the tier holds of `runs`.

        Raises:
            StoreUnavailable, StoreRefused: some of it could not be asked.
        """
        parts: dict[PartId, Facts | None] = {}
        aside: dict[PartId, Facts | None] = {}
        defects: dict[PartId, TierdError] = {}
        pins: set[CheckpointId | None] = set()
        owners: set[CheckpointId] = set()
        seen: set[tuple[str, str]] = set()
        for run in sorted(runs):
            for prefix, found in ((manifests_prefix(run), parts), (quarantine_prefix(run), aside)):
                infos = [info async for info in self.store.scan(prefix)]
                seen |= {(info.key, info.token) for info in infos}
                for part, facts in await self._read_all(infos):
                    found[part] = facts if isinstance(facts, Facts) else None
                    if isinstance(facts, TierdError) and found is parts:
                        defects[part] = facts
            owners |= await self._chunk_owners(run)
            pins |= {
                CheckpointId.parse(run, info.key.rsplit("/", 1)[1]) async for info in self.store.scan(pins_prefix(run))
            }
        self._cache = {key: found for key, found in self._cache.items() if key in seen}
        return Place(parts, defects, frozenset(pin for pin in pins if pin), frozenset(owners), aside)

    async def _chunk_owners(self, run: str) -> set[CheckpointId]:
        """Checkpoints under whose name chunks lie. It only finds what a dead flush or prune left, so it is asked at the
        first look and seldom again."""
        now = time.monotonic()
        if now - self._listed.get(run, -_RELIST) >= _RELIST:
            names = await self._chunk_directories(chunks_prefix(run))
            self._owners[run] = {found for name in names if (found := CheckpointId.parse(run, name))}
            self._listed[run] = now
        return self._owners[run]

    async def _chunk_directories(self, prefix: str) -> set[str]:
        """The names under `prefix`, going by the listing where they hold little and from name to name where much."""
        names, after = set[str](), ""
        while True:
            many = 0
            async with aclosing(self.store.scan(prefix, after)) as listing:
                async for info in listing:
                    name = info.key[len(prefix) :].partition("/")[0]
                    many = many + 1 if name in names else 0
                    names.add(name)
                    if many == _MANY:
                        after = f"{prefix}{name}/\x7f"  # '\x7f' sorts after every character of a key
                        break
                else:
                    return names

    def known(self, info: ObjectInfo) -> Facts | None:
        """What the last look read of a listed manifest."""
        found = self._cache.get((info.key, info.token))
        return found if isinstance(found, Facts) else None

    def forget(self, checkpoint: CheckpointId) -> None:
        """A checkpoint's chunks were just deleted."""
        self._owners.get(checkpoint.run, set()).discard(checkpoint)

    async def _read_all(self, infos: list[ObjectInfo]) -> list[tuple[PartId, Facts | TierdError]]:
        named = [(info, part) for info in infos if (part := PartId.parse_key(info.key))]
        found = await together(_READERS, [self._facts(info, part) for info, part in named])
        return [(part, facts) for (_, part), facts in zip(named, found, strict=True) if facts]

    async def _facts(self, info: ObjectInfo, part: PartId) -> Facts | TierdError | None:
        key = (info.key, info.token)
        if key not in self._cache:
            try:
                self._cache[key] = Facts.of(decode(bytes(await self.store.get(info.key)), part))
            except ObjectNotFound:
                return None  # pruned between the listing and now
            except (ManifestError, FormatTooNew) as error:
                self._cache[key] = error
        return self._cache[key]
