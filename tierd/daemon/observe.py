"""Looking: what lies in the spool and on a tier, as the `Place`s that planning works on.

Law: a look changes nothing. A tier either answered everything that was asked or the whole look fails; half a listing is
never handed on, since deletions are decided from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace

from tierd.core.errors import (
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TierdError,
)
from tierd.core.head import Head
from tierd.core.ids import (
    OWN_KEYS,
    CheckpointId,
    PartId,
    chunks_prefix,
    manifests_prefix,
    parse_pin,
    quarantine_prefix,
)
from tierd.core.manifest import Manifest
from tierd.core.run_retention import StoredRetention
from tierd.core.world import Facts, Place, Seen, World
from tierd.daemon.copies import read_manifest
from tierd.daemon.heads import Heads
from tierd.daemon.manifests import Manifests
from tierd.daemon.run_policies import RunPolicies
from tierd.living import ended, trainers
from tierd.records import committed, heads, launches, policies, saved
from tierd.spool import Spool, condition
from tierd.stores.base import ObjectInfo, Store, children

log = logging.getLogger("tierd.daemon")

_RELIST = 600.0  # seconds between listings of a run's chunks
_MANY = 999  # chunks of a checkpoint after its first: a page of a listing; the rest is skipped
_FEW = 1000  # manifests


async def look_around(spool: Spool | None, stores: Mapping[str, Store], run: str | None) -> World:
    """Look once at a spool and at tiers; one that did not answer is None in the world. Without `run`, at all runs.

    Where a run has few manifests on a tier, all are read: somebody asks who wants to see sizes, and no daemon does.
    """
    place = SpoolEye(spool).look() if spool else Place()
    mine = place.ranks
    tiers: dict[str, Place | None] = {}
    for name, store in stores.items():
        eye = TierEye(store)
        try:
            tiers[name] = await eye.look({run} if run else await eye.runs(), mine, few=_FEW)
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
    """Looks at the spool. A manifest is parsed again only when its part is new: parts are immutable.

    `touched`: by run, when its newest part was committed, by the spool's disk; seconds since 1970. Where no copy is
    left of what was saved here, when that was last saved.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.touched: dict[str, float] = {}
        self._cache: dict[tuple[PartId, int], Facts | TierdError] = {}

    def look(self) -> Place:
        """What the spool holds now. Raises OSError when it cannot be read."""
        before = committed(self._spool.control)
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
        touched: dict[str, float] = {}
        for part, stamp in cache:
            touched[part.checkpoint.run] = max(stamp / 1e9, touched.get(part.checkpoint.run, 0.0))
        own = launches(self._spool.control)
        for run in own.keys() - touched.keys():
            touched[run] = self._spool.saved_stamp(run, own[run].attempt) / 1e9
        self.touched = touched
        aside = {part: Facts.of(manifest) if manifest else None for part, manifest in self._spool.quarantined().items()}
        place = Place.of(parts, defects, frozenset(self._spool.pins()), quarantined=aside)
        newest = {seen.id.run: seen.id.attempt for seen in sorted(place.checkpoints.values(), key=lambda seen: seen.id)}
        marks, wanted = saved(self._spool.control, newest), policies(self._spool.control, newest | own)
        restored = frozenset(run for run, attempt in newest.items() if attempt not in marks.get(run, ()))
        alive = trainers(self._spool.control, newest)
        over = ended(self._spool.control, alive, alive)
        return replace(
            place,
            policies=wanted,
            restored=restored,
            launches=own,
            alive=alive,
            ended=over,
            committed=before,
            heads=heads(self._spool.control),
        )

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
    """Looks at a tier. `manifests` remembers what was read there.

    Args:
        prunes: whether its owner deletes what retention drops: a daemon, and not a reader.
    """

    def __init__(self, store: Store, *, prunes: bool = False) -> None:
        self.store = store
        self.manifests = Manifests(store)
        self._policies = RunPolicies(store, prunes=prunes)
        self._heads = Heads(store)
        self._aside: dict[tuple[str, str], Facts | None] = {}
        self._owners: dict[str, set[CheckpointId]] = {}
        self._listed: dict[str, float] = {}  # run -> when its chunks were listed, monotonic seconds

    async def runs(self) -> set[str]:
        """Every run on the tier, at about one listing request each."""
        return {name async for name in children(self.store, "") if name not in OWN_KEYS}

    async def look(
        self,
        runs: set[str],
        mine: Mapping[str, Collection[int]] | None = None,
        *,
        few: int = 0,
        told: Callable[[], None] = lambda: None,
    ) -> Place:
        """What the tier holds of `runs`.

        Args:
            mine: by run, the ranks whose manifests are all read.
            few: read all others of a run, too, where they are at most this many.
            told: called whenever the tier has answered something more.

        Raises:
            StoreUnavailable, StoreRefused: some of it could not be asked.
        """
        checkpoints: dict[CheckpointId, Seen] = {}
        aside: dict[PartId, Facts | None] = {}
        pins: set[CheckpointId] = set()
        wanted: dict[str, tuple[StoredRetention, ...]] = {}
        heads: dict[str, tuple[Head, ...]] = {}
        owners: set[CheckpointId] = set()
        for run in sorted(runs):
            checkpoints |= await self.manifests.look(run, (mine or {}).get(run, ()), few=few, told=told)
            beside = await self._beside_manifests(run)
            told()
            aside |= await self._quarantined(run, beside)
            told()
            wanted[run] = await self._stored_policies(run, beside)
            heads[run] = await self._stored_heads(run, beside)
            owners |= await self._chunk_owners(run, told)
            pins |= {pin for info in beside if (pin := parse_pin(run, info.key))}
        lent = self.manifests.lent(checkpoints.keys())
        cut = frozenset[CheckpointId]().union(*(self.manifests.cut.get(run, ()) for run in runs))
        return Place(
            checkpoints,
            frozenset(pins),
            frozenset(owners),
            aside,
            lent,
            cut,
            {run: found for run, found in wanted.items() if found},
            heads={run: found for run, found in heads.items() if found},
        )

    async def _beside_manifests(self, run: str) -> list[ObjectInfo]:
        """What is listed behind the manifests: pins, marks, quarantined manifests, policies, heads; in one listing."""
        behind = f"{manifests_prefix(run)}\x7f"  # '\x7f' sorts after every character of a key
        return [info async for info in self.store.scan(f"{run}/", behind)]

    async def _stored_policies(self, run: str, beside: Iterable[ObjectInfo]) -> tuple[StoredRetention, ...]:
        found = [await self._policies.read(run, info) for info in beside]
        return tuple(one for one in found if one)

    async def _stored_heads(self, run: str, beside: Iterable[ObjectInfo]) -> tuple[Head, ...]:
        found = [await self._heads.read(run, info) for info in beside]
        return tuple(one for one in found if one)

    async def _quarantined(self, run: str, beside: Iterable[ObjectInfo]) -> dict[PartId, Facts | None]:
        """What was set aside; None where that cannot be read."""
        found: dict[PartId, Facts | None] = {}
        seen: dict[tuple[str, str], Facts | None] = {}
        for info in beside:
            part, key = PartId.parse_key(info.key), (info.key, info.token)
            if part is None or not info.key.startswith(quarantine_prefix(run)):
                continue
            try:
                if key not in self._aside:
                    self._aside[key] = Facts.of(await read_manifest(self.store, part, info.key, info.size))
            except ObjectNotFound:
                continue  # pruned between the listing and now
            except (ManifestError, FormatTooNew):
                self._aside[key] = None
            found[part] = seen[key] = self._aside[key]
        self._aside = {key: one for key, one in self._aside.items() if not key[0].startswith(f"{run}/")} | seen
        return found

    async def _chunk_owners(self, run: str, told: Callable[[], None]) -> set[CheckpointId]:
        """Checkpoints under whose name chunks lie. It only finds what a dead flush or prune left, so it is asked at the
        first look and seldom again."""
        now = time.monotonic()
        if now - self._listed.get(run, -_RELIST) >= _RELIST:
            names = await self._chunk_directories(chunks_prefix(run), told)
            self._owners[run] = {found for name in names if (found := CheckpointId.parse(run, name))}
            self._listed[run] = now
        return self._owners[run]

    async def _chunk_directories(self, prefix: str, told: Callable[[], None]) -> set[str]:
        """The names under `prefix`, going by the listing where they hold little and from name to name where much."""
        names, after = set[str](), ""
        while True:
            told()
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

    def forget(self, checkpoint: CheckpointId) -> None:
        """No chunks are left under a checkpoint's name but what others name."""
        self._owners.get(checkpoint.run, set()).discard(checkpoint)
