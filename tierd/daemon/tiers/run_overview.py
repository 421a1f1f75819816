"""Each run of a tier: its newest verified checkpoint, what is newer and not complete, and how many bytes it occupies.

Invariant: for the overview nothing is read but the manifests of the newest verified checkpoint of each run. The usage
reads every manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound, StoreRefused, WrongKey
from tierd.core.ids import OWN_KEYS, CheckpointId, PartId, manifests_prefix, parse_summary
from tierd.core.manifest import Manifest
from tierd.core.planning.copies import ManifestFacts, complete_world_sizes, total_stored_size
from tierd.core.planning.place import SPOOL
from tierd.daemon.concurrency import for_each_limited, gather_limited
from tierd.daemon.tiers.manifest_listing import MAX_MANIFEST_READS
from tierd.daemon.tiers.run_removal import measure_in_spool, measure_on_tier
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.spool.spool import Spool
from tierd.stores.base import ObjectInfo, Store, list_children, list_names

_MAX_READS = 8  # runs, and of each run manifests
_MOST_TRIED = 16
_MOST_RANKS = 64  # whose manifests are read for the size; of a larger checkpoint only rank 0's


@dataclass(frozen=True, slots=True)
class RunOverview:
    """What one tier shows of one run.

    Attributes:
        run: the run.
        tier: the tier's name.
        checkpoints: the number of checkpoints of which it has any part.
        step: the step of the newest verified checkpoint, by launch, then by step; None: none is complete there.
        attempt: the launch that wrote it.
        world_size: the number of its ranks; without a verified checkpoint, of the newest one's.
        created: when it was made, RFC 3339 in UTC.
        age_s: seconds since then, by this node's clock.
        newest_step: the step of the newest checkpoint that any place named shows any part of.
        lag_steps: by how many steps that one is ahead of the verified one.
        missing_ranks: of the tier's newest checkpoint, the ranks whose parts are not there; empty: it is complete.
        size: bytes before compression, of the ranks in `read`.
        stored_size: bytes as stored, of the ranks in `read`.
        read: of how many ranks the manifests were read.
    """

    run: str
    tier: str
    checkpoints: int
    step: int | None
    attempt: str | None
    world_size: int
    created: str | None
    age_s: float | None
    newest_step: int
    lag_steps: int | None
    missing_ranks: tuple[int, ...]
    size: int
    stored_size: int
    read: int


@dataclass(frozen=True, slots=True)
class RunOnTier:
    checkpoints: tuple[CheckpointId, ...]  # every checkpoint that has a name there, newest first
    # The newest one that is complete and whose manifests are usable, with those that were read.
    verified: tuple[CheckpointId, tuple[Manifest, ...]] | None
    ranks: Mapping[int, frozenset[int]]  # of the newest one, the ranks that are there, by world size


async def observe_runs(store: Store) -> dict[str, RunOnTier]:
    """Observe every run of a tier that has a checkpoint there."""
    by_run: dict[str, RunOnTier] = {}

    async def observe(run: str) -> None:
        if observed := await _observe_run(store, run):
            by_run[run] = observed

    await for_each_limited(_MAX_READS, observe, sorted(await _names(store, "") - OWN_KEYS))
    return dict(sorted(by_run.items()))


async def _observe_run(store: Store, run: str) -> RunOnTier | None:
    names = await _names(store, manifests_prefix(run))
    newest = sorted((parsed for name in names if (parsed := CheckpointId.parse(run, name))), reverse=True)
    present: list[CheckpointId] = []
    first: Mapping[int, frozenset[int]] = {}
    for number, checkpoint in enumerate(newest):
        ranks = await _ranks(store, checkpoint)
        if not ranks:
            continue  # pruned a moment ago
        if not present:
            first = ranks
        present.append(checkpoint)
        if sizes := complete_world_sizes(ranks):
            manifests = await _manifests(store, checkpoint, min(sizes))
            if manifests:
                return RunOnTier((*present, *newest[number + 1 :]), (checkpoint, manifests), first)
    return RunOnTier(tuple(present), None, first) if present else None


async def check_encryption_key(store: Store, run: str) -> None:
    """Check by one manifest of another run, if there is one, that a run that is new on a tier gets the tier's key.

    Nothing is checked if the first `_MOST_TRIED` runs or manifests found are empty or unusable.

    Raises:
        StoreRefused: the manifest is encrypted with another key than this process has, or only one of both has a key.
    """
    tried = 0
    async for other_run in list_children(store, ""):
        if other_run in OWN_KEYS or other_run == run:
            continue
        async with aclosing(store.scan(manifests_prefix(other_run))) as listing:
            async for info in listing:
                if parse_summary(other_run, info.key):
                    continue
                if (tried := tried + 1) > _MOST_TRIED:
                    return
                try:
                    await read_manifest(store, None, info.key, info.size)
                except WrongKey as error:
                    raise StoreRefused(
                        f"run {run}: a tier has one key or none, and run {other_run} there: {error}"
                    ) from error
                except (ObjectNotFound, ManifestError, FormatTooNew):
                    continue
                return
        if (tried := tried + 1) > _MOST_TRIED:
            return


async def _names(store: Store, prefix: str) -> set[str]:
    names = await store.directories(prefix)
    return await list_names(store, prefix) if names is None else set(names)


async def _ranks(store: Store, checkpoint: CheckpointId) -> dict[int, frozenset[int]]:
    by_world: dict[int, set[int]] = {}
    async with aclosing(store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/")) as listing:
        async for info in listing:
            if part := PartId.parse_key(info.key):
                by_world.setdefault(part.world, set()).add(part.rank)
    return {world: frozenset(ranks) for world, ranks in by_world.items()}


async def _manifests(store: Store, checkpoint: CheckpointId, world: int) -> tuple[Manifest, ...]:
    """Read the manifests that tell a checkpoint's time and size; none if one of them is missing or not usable."""
    ranks = range(world if world <= _MOST_RANKS else 1)
    try:
        parts = [read_manifest(store, PartId(checkpoint, rank, world)) for rank in ranks]
        return tuple(await gather_limited(_MAX_READS, parts))
    except (ObjectNotFound, ManifestError, FormatTooNew):
        return ()


def compare_runs(
    tiers: Mapping[str, Mapping[str, RunOnTier]], local: Iterable[CheckpointId], now: datetime
) -> tuple[RunOverview, ...]:
    """Compare what each tier shows of each run.

    Args:
        tiers: by tier's name and run, what was observed.

    Returns:
        A line for each run and tier, by run and in the order of the tiers.
    """
    ahead: dict[str, CheckpointId] = {}
    for checkpoint in (*local, *(observed.checkpoints[0] for runs in tiers.values() for observed in runs.values())):
        ahead[checkpoint.run] = max(checkpoint, ahead.get(checkpoint.run, checkpoint))
    runs = sorted({run for by_run in tiers.values() for run in by_run})
    return tuple(
        _describe_run(tier, by_run[run], ahead[run], now)
        for run in runs
        for tier, by_run in tiers.items()
        if run in by_run
    )


def _describe_run(tier: str, observed: RunOnTier, ahead: CheckpointId, now: datetime) -> RunOverview:
    checkpoint, manifests = observed.verified or (None, ())
    worlds = complete_world_sizes(observed.ranks) or [max(observed.ranks)]
    missing = set(range(min(worlds))) - observed.ranks[min(worlds)]
    return RunOverview(
        run=ahead.run,
        tier=tier,
        checkpoints=len(observed.checkpoints),
        step=checkpoint.step if checkpoint else None,
        attempt=checkpoint.attempt if checkpoint else None,
        world_size=manifests[0].world_size if manifests else min(worlds),
        created=manifests[0].created if manifests else None,
        age_s=(now - manifests[0].created_at).total_seconds() if manifests else None,
        newest_step=ahead.step,
        lag_steps=max(0, ahead.step - checkpoint.step) if checkpoint else None,
        missing_ranks=tuple(sorted(missing)),
        size=sum(manifest.size for manifest in manifests),
        stored_size=total_stored_size({manifest.part: ManifestFacts.of(manifest) for manifest in manifests}),
        read=len(manifests),
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """The size of one run in one place.

    Attributes:
        stored_bytes: of all its objects; in the spool, of all its files.
        shared_bytes: of chunks that more than one checkpoint names, each counted once; 0 in the spool.
        unreadable: manifests that cannot be used, so that the chunks that they name are not counted as shared.
    """

    place: str
    run: str
    checkpoints: int
    stored_bytes: int
    shared_bytes: int
    unreadable: int


def usage_in_spool(spool: Spool, run: str) -> Usage:
    holding = measure_in_spool(spool, SPOOL, run)
    return Usage(SPOOL, run, holding.checkpoints, holding.stored_bytes, 0, 0)


async def usage_on_tier(store: Store, name: str, run: str) -> Usage:
    holding = await measure_on_tier(store, name, run)
    naming = _Naming(store)
    await for_each_limited(MAX_MANIFEST_READS, naming.read, [info async for info in store.scan(manifests_prefix(run))])
    return Usage(name, run, holding.checkpoints, holding.stored_bytes, sum(naming.shared.values()), naming.unreadable)


class _Naming:
    """The first checkpoint that names each chunk, and the sizes of chunks that a second one names."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._first: dict[str, str] = {}
        self.shared: dict[str, int] = {}
        self.unreadable = 0

    async def read(self, info: ObjectInfo) -> None:
        part = PartId.parse_key(info.key)
        if part is None:
            return
        try:
            manifest = await read_manifest(self._store, part, size=info.size)
        except ObjectNotFound:  # pruned since the listing
            return
        except (ManifestError, FormatTooNew):
            self.unreadable += 1
            return
        name = part.checkpoint.name
        for stored in manifest.objects():
            if self._first.setdefault(stored.key, name) != name:
                self.shared[stored.key] = stored.size
