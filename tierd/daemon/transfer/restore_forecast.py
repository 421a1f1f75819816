"""What a restore from tiers would do, by listings and manifests alone: nothing is written, and no chunk is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierd.core.errors import StoreUnavailable
from tierd.core.ids import PartId
from tierd.core.planning.place import Place
from tierd.core.save_rules import MetricGoal
from tierd.core.timeline.restore_order import not_found_error, restore_candidates
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.stores.base import Store


@dataclass(frozen=True, slots=True)
class RestoreForecast:
    """What a restore would do, by the manifests; it verifies no byte, and a restore may find that one is corrupt.

    Attributes:
        size: bytes of the files.
        files: how many files.
        objects: how many chunks would be read.
        tiers: the tiers that have parts of it.
        target: the directory.
    """

    run: str
    step: int
    attempt: str
    world_size: int
    size: int
    files: int
    objects: int
    tiers: tuple[str, ...]
    target: str


async def forecast_restore(
    stores: Mapping[str, Store], run: str, target: Path, step: int | None, attempt: str | None, best: MetricGoal | None
) -> RestoreForecast:
    """Return what `restore_to_directory` would do if the checkpoint that it tries first is right.

    Raises:
        CheckpointNotFound: the tiers have no such checkpoint.
        StoreUnavailable: a tier did not answer.
        ObjectNotFound, ManifestError: a manifest was deleted meanwhile, or cannot be used.
    """
    inventory = await observe_places(None, stores, run)
    order = restore_candidates(inventory, run, step, attempt, best)
    if order.unreached:
        raise StoreUnavailable(f"not every tier could be asked: {', '.join(order.unreached)}")
    if not order.candidates:
        raise not_found_error(order, run, step, [], attempt)
    candidate = order.candidates[0]
    parts = [PartId(candidate.checkpoint, rank, candidate.world) for rank in range(candidate.world)]
    tiers = {name: place for name, place in inventory.tiers.items() if place is not None}
    manifests = [await read_manifest(stores[_holder(tiers, part)], part) for part in parts]
    files = [file for manifest in manifests for file in manifest.files]
    chunks = {chunk.xxh3_128 for file in files for chunk in file.chunks}
    return RestoreForecast(
        run=run,
        step=candidate.checkpoint.step,
        attempt=candidate.checkpoint.attempt,
        world_size=candidate.world,
        size=sum(file.size for file in files),
        files=len(files),
        objects=len(chunks),
        tiers=tuple(name for name, place in tiers.items() if candidate.checkpoint in place.checkpoints),
        target=str(target),
    )


def _holder(tiers: Mapping[str, Place], part: PartId) -> str:
    return next(name for name, place in tiers.items() if place.has(part))
