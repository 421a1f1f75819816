"""Observation of a spool and of tiers: it lists them and reads manifests into the `Place`s on which planning works.

Invariant: an observation changes nothing. Either a tier answered every request, or the whole observation fails. Half a
listing is never returned, because deletions are decided from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TypeAlias

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import (
    OWN_KEYS,
    CheckpointId,
    PartId,
    chunk_group,
    chunks_prefix,
    group_owner,
    manifests_prefix,
    parse_pin,
    pruning_prefix,
    quarantine_prefix,
)
from tierd.core.manifest import Manifest
from tierd.core.planning.copies import CheckpointCopy, ManifestFacts
from tierd.core.planning.flush_order import base_part, overshared
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.retention.policy import StoredRetention
from tierd.core.timeline.launch_chain import Head
from tierd.daemon.concurrency import for_each_limited
from tierd.daemon.spool_observer import SpoolObserver
from tierd.daemon.tiers.announcements import STAMP
from tierd.daemon.tiers.manifest_index import ManifestIndex
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.daemon.tiers.tier_run_records import HeadReader, RunPolicyReader
from tierd.spool.spool import Spool
from tierd.spool.spool_directory import node_id
from tierd.stores.base import ObjectInfo, Store, list_children, list_groups

log = logging.getLogger("tierd.daemon")

_RELIST = 600.0  # seconds between listings of a run's chunks
_FEW = 1000  # manifests in all runs, up to which `observe_places` reads them all
_MAX_RUNS_AT_A_TIME = 8  # runs observed at a time by `observe_places`

MarkOwnPolicies: TypeAlias = Callable[[str, tuple[StoredRetention, ...]], tuple[StoredRetention, ...]]


async def observe_places(
    spool: Spool | None, stores: Mapping[str, Store], run: str | None, *, chunks: bool = True
) -> Inventory:
    """Observe a spool and tiers once, for one run or for all; a tier that did not answer is None in the inventory.

    Where runs have few manifests on a tier, all are read, because the caller wants to see sizes and is not a daemon.

    Args:
        chunks: list every manifest, and also find the names under which chunks are stored, for callers that delete or
            verify by the result.
    """
    place = SpoolObserver(spool).observe() if spool else Place()
    own_ranks = place.ranks
    tiers: dict[str, Place | None] = {}
    for name, store in stores.items():
        eye = TierObserver(store)
        try:
            runs = {run} if run else await eye.runs()
            spare_limit = _FEW // max(1, len(runs))
            tiers[name] = await eye.observe(
                runs,
                own_ranks,
                spare_reads=spare_limit,
                chunks=chunks,
                concurrency=_MAX_RUNS_AT_A_TIME,
                all_names=chunks,
            )
        except (StoreUnavailable, StoreRefused) as error:
            log.warning("%s: cannot be asked: %s", name, error)
            tiers[name] = None
    return Inventory(place, tiers, node_id=node_id(spool.root) if spool else "")


async def list_chunks(
    store: Store, run: str, directories: Iterable[str], on_answer: Callable[[], None] = lambda: None
) -> dict[str, int]:
    """List every chunk in these directories (`Manifest.directories`) of a run: key -> stored size in bytes."""
    sizes: dict[str, int] = {}
    for directory in sorted(directories):
        async for info in store.scan(f"{run}/{directory}"):
            sizes[info.key] = info.size
            on_answer()
        on_answer()
    return sizes


async def missing_chunks(store: Store, manifest: Manifest, on_answer: Callable[[], None] = lambda: None) -> set[str]:
    """Return the keys of chunks that a manifest names and its tier lacks or has in another size."""
    sizes = await list_chunks(store, manifest.run, manifest.directories, on_answer)
    expected = {f"{manifest.run}/{stored.key}": stored.size for stored in manifest.objects()}
    return {key for key, size in expected.items() if sizes.get(key) != size}


async def list_chunk_owners(store: Store, run: str, on_answer: Callable[[], None] = lambda: None) -> set[CheckpointId]:
    """List the checkpoints under whose names chunks are stored.

    Where chunks are many, and the store can, only the names of their prefixes are listed.
    """
    prefix = chunks_prefix(run)

    async def list_prefixes() -> set[str] | None:
        names = await store.directories(prefix)
        if names is None:
            return None
        prefixes = {f"{prefix}{name}/" for name in names}
        for fan in [name for name in names if len(name) == 1]:
            on_answer()
            prefixes |= {f"{prefix}{fan}/{name}/" for name in await store.directories(f"{prefix}{fan}/") or ()}
        return prefixes

    groups = await list_groups(store, prefix, partial(chunk_group, run), on_answer, list_prefixes)
    return {owner for group in groups if (owner := group_owner(run, group))}


async def find_base(store: Store, place: Place, part: PartId) -> tuple[Manifest | None, frozenset[CheckpointId]]:
    """Find the base checkpoint of a flush of `part` to a tier.

    Returns:
        The manifest whose equal chunks need not be sent again, and the checkpoints whose chunks must be sent again
        because enough others depend on them. None and no checkpoints if there is no base or it cannot be read: a base
        only saves bytes.
    """
    whose = base_part(place, part)
    if whose is None:
        return None, frozenset()
    try:
        return await read_manifest(store, whose), overshared(place, part)
    except (ObjectNotFound, ManifestError):
        return None, frozenset()  # pruned or damaged since the observation
    except (StoreUnavailable, StoreRefused) as error:  # perhaps this object alone; a tier that is down fails the puts
        log.warning("%s: nothing of it is shared with %s, because its manifest cannot be read: %s", whose, part, error)
        return None, frozenset()


class TierObserver:
    """Observe a tier. `manifests` caches what was read there.

    Args:
        prunes: whether the caller deletes copies by retention: a daemon does, a reader does not.
        own: called with a run and its policies, returns them as this node is to understand them.
    """

    def __init__(
        self, store: Store, *, prunes: bool = False, own: MarkOwnPolicies = lambda run, stored: stored
    ) -> None:
        self.store, self._mark_own_policies = store, own
        self.manifests = ManifestIndex(store, strict=not prunes)
        self._policies = RunPolicyReader(store, prunes=prunes)
        self._heads = HeadReader(store)
        self._quarantined_facts: dict[tuple[str, str], ManifestFacts | None] = {}
        self._owners: dict[str, set[CheckpointId]] = {}
        self._listed: dict[str, float] = {}  # run -> when its chunks were listed, monotonic seconds

    async def runs(self) -> set[str]:
        """List every run on the tier, at about one listing request for each."""
        return {name async for name in list_children(self.store, "") if name not in OWN_KEYS}

    async def observe(
        self,
        runs: set[str],
        own_ranks: Mapping[str, Collection[int]] | None = None,
        *,
        spare_reads: int = 0,
        on_answer: Callable[[], None] = lambda: None,
        chunks: bool = True,
        concurrency: int = 1,
        all_names: bool = False,
    ) -> Place:
        """Observe the tier's copies of `runs`.

        Args:
            own_ranks: run -> the ranks whose manifests are all read.
            spare_reads: also read all other manifests of a run if they are at most this many.
            chunks: also find the owners of chunks.
            all_names: list every manifest, also those for which a summary stands.

        Raises:
            StoreUnavailable, StoreRefused: the tier failed to answer a request. Or, for a reader, checkpoints were
                pruned again and again while they were listed.
        """
        checkpoints: dict[CheckpointId, CheckpointCopy] = {}
        quarantined: dict[PartId, ManifestFacts | None] = {}
        pins: set[CheckpointId] = set()
        policies: dict[str, tuple[StoredRetention, ...]] = {}
        heads: dict[str, tuple[Head, ...]] = {}
        owners: set[CheckpointId] = set()

        async def observe(run: str) -> None:
            ranks = (own_ranks or {}).get(run, ())
            if all_names:
                self.manifests.list_all(run)
            copies = await self.manifests.observe(run, ranks, spare_reads=spare_reads, on_answer=on_answer)
            infos = await self._beside_manifests(run)
            on_answer()
            doubted = copies.keys() & {checkpoint for info in infos if (checkpoint := _changing_checkpoint(run, info))}
            for checkpoint, copy in (await self.manifests.observe_listed(doubted, ranks, on_answer)).items():
                if copy:
                    copies[checkpoint] = copy
                else:
                    del copies[checkpoint]
            checkpoints.update(copies)
            quarantined.update(await self._read_quarantined(run, infos))
            on_answer()
            stored = [policy for info in infos if (policy := await self._policies.read(run, info))]
            policies[run] = self._mark_own_policies(run, tuple(stored))
            heads[run] = tuple([head for info in infos if (head := await self._heads.read(run, info))])
            if chunks:
                owners.update(await self._chunk_owners(run, on_answer))
            pins.update(pin for info in infos if (pin := parse_pin(run, info.key)))

        await for_each_limited(concurrency, observe, sorted(runs))
        bases = self.manifests.bases(checkpoints.keys())
        cut = frozenset[CheckpointId]().union(*(self.manifests.cut.get(run, ()) for run in runs))
        return Place(
            checkpoints,
            frozenset(pins),
            frozenset(owners),
            quarantined,
            bases,
            cut,
            {run: stored for run, stored in policies.items() if stored},
            heads={run: stored for run, stored in heads.items() if stored},
        )

    async def _beside_manifests(self, run: str) -> list[ObjectInfo]:
        """List the keys behind the manifests: pins, marks, quarantined manifests, policies, heads; in one listing."""
        behind = f"{manifests_prefix(run)}\x7f"  # '\x7f' sorts after every character of a key
        return [info async for info in self.store.scan(f"{run}/", behind)]

    async def _read_quarantined(self, run: str, infos: Iterable[ObjectInfo]) -> dict[PartId, ManifestFacts | None]:
        """Return the quarantined parts with their manifests; None for a manifest that cannot be read."""
        quarantined: dict[PartId, ManifestFacts | None] = {}
        fresh: dict[tuple[str, str], ManifestFacts | None] = {}
        for info in infos:
            part, key = PartId.parse_key(info.key), (info.key, info.token)
            if part is None or not info.key.startswith(quarantine_prefix(run)):
                continue
            try:
                if key not in self._quarantined_facts:
                    self._quarantined_facts[key] = ManifestFacts.of(
                        await read_manifest(self.store, part, info.key, info.size)
                    )
            except ObjectNotFound:
                continue  # pruned between the listing and now
            except (ManifestError, FormatTooNew):
                self._quarantined_facts[key] = None
            quarantined[part] = fresh[key] = self._quarantined_facts[key]
        self._quarantined_facts = {
            key: facts for key, facts in self._quarantined_facts.items() if not key[0].startswith(f"{run}/")
        } | fresh
        return quarantined

    async def _chunk_owners(self, run: str, on_answer: Callable[[], None]) -> set[CheckpointId]:
        """Return the checkpoints under whose names chunks are stored.

        Only leftovers of an interrupted flush or prune need this, so chunks are listed at the first observation and
        then at most every `_RELIST` seconds.
        """
        now = time.monotonic()
        if now - self._listed.get(run, -_RELIST) >= _RELIST:
            self._owners[run] = await list_chunk_owners(self.store, run, on_answer)
            self._listed[run] = now
        return self._owners[run]

    def list_all(self) -> None:
        """List every manifest at the next observation, because the last one proved wrong."""
        self.manifests.list_all()

    def forget(self, checkpoint: CheckpointId) -> None:
        """Record that only shared chunks are left under a checkpoint's name."""
        self._owners.get(checkpoint.run, set()).discard(checkpoint)


def _changing_checkpoint(run: str, info: ObjectInfo) -> CheckpointId | None:
    """Return the checkpoint of a quarantined manifest or of a mark, whose other manifests are perhaps being deleted."""
    if part := PartId.parse_key(info.key):
        return part.checkpoint
    prefix = pruning_prefix(run)
    stamp = STAMP.fullmatch(info.key[len(prefix) :]) if info.key.startswith(prefix) else None
    return CheckpointId.parse(run, stamp[1]) if stamp else None
