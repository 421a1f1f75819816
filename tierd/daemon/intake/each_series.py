"""Put the newest checkpoint of each series of a watched run back.

A program may keep several series in one directory, as `_actor/step_30` and `_critic/step_30`, or `best-30.pt` and
`last-40.pt`. The checkpoints of a series have paths that differ only in numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from tierd.core.errors import CheckpointNotFound, CorruptChunk, ManifestError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.timeline.candidates import restore_candidates
from tierd.daemon.intake.in_place import KeptPaths, Pointing, PutBack, put_back
from tierd.daemon.intake.manifests import first_manifest
from tierd.daemon.tiers.observe import observe_places
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.replicas import Replicas
from tierd.stores.base import Store
from tierd.watching.naming import NEVER, history, series_of
from tierd.watching.unit_file import MAX_SIZE, UNIT_NAME, UnitFile, decode_unit

Wanted: TypeAlias = Callable[[CheckpointId, str, Set[str]], bool]


def everything(checkpoint: CheckpointId, series: str, paths: Set[str]) -> bool:
    """Want each series."""
    return True


async def put_back_each(
    stores: Mapping[str, Store],
    run: str,
    directory: Path,
    progress: Progress,
    selects: Wanted = everything,
    placed: Sequence[PutBack] = (),
    *,
    spares_newer: bool = False,
    newest: datetime = NEVER,
) -> list[PutBack]:
    """Put the newest verified checkpoint of each series back, as `put_back` does; a file is put back once.

    Args:
        stores: the tiers.
        run: the run.
        directory: the program's directory. The caller holds it by `alone_in`.
        progress: updated during each restore.
        selects: called with the newest checkpoint of a series, the series, and the checkpoint's files; if it returns
            False, nothing of the series is put back.
        placed: what was put back already.
        spares_newer: whether files are left that were written after all of a checkpoint's.
        newest: when the newest checkpoint of other runs in the directory was made. The pointers of a newer one are
            written; those of any other only where they are lost.

    Raises:
        ConfigError, StoreUnavailable, SpoolFull, ManifestError: as `put_back`.
    """
    inventory = await observe_places(None, stores, run, chunks=False)
    placed_series = {series_of(restored_unit.files) for restored_unit in placed}
    paths = {path for restored_unit in placed for path in restored_unit.files}
    restored, created = list[PutBack](), history(inventory, run).made
    for checkpoint in sorted(restore_candidates(inventory, run).whole, reverse=True):
        manifest = await first_manifest(PartId(checkpoint, 0, 1), None, stores)
        own_files = _files(manifest) if manifest else set()
        if not own_files or (series := series_of(own_files)) in placed_series or not paths.isdisjoint(own_files):
            continue
        if selects(checkpoint, series, own_files):
            try:
                is_newest = created.get(checkpoint, NEVER) > newest and all(
                    restored_unit.run != run for restored_unit in (*placed, *restored)
                )
                pointing: Pointing = "always" if is_newest else "if lost"
                spared, step, attempt = KeptPaths(newer=spares_newer), checkpoint.step, checkpoint.attempt
                restored.append(
                    await put_back(stores, run, directory, step, attempt, progress, pointing=pointing, spared=spared)
                )
            except CheckpointNotFound:
                continue  # proven corrupt, so an older one of the series is next
        placed_series.add(series)
        paths |= own_files
    return restored


def _files(manifest: Manifest) -> set[str]:
    """Return the paths of a unit's files; none if no watch took the checkpoint."""
    paths = {file.path for file in manifest.files}
    return paths - {UNIT_NAME} if UNIT_NAME in paths else set()


async def recorded_unit(stores: Mapping[str, Store], checkpoint: CheckpointId) -> UnitFile | None:
    """Return the description of a watched checkpoint; None if no tier has its `unit.json`."""
    copies = Replicas(PartId(checkpoint, 0, 1), stores)
    await copies.ask()
    for manifest in copies.contents()[:1]:
        copies.trust(manifest)
        sizes = {file.path: (number, file.size) for number, file in enumerate(manifest.files)}
        number, size = sizes.get(UNIT_NAME, (0, MAX_SIZE + 1))
        if size > MAX_SIZE:
            return None
        chunks = manifest.files[number].chunks
        try:
            data = b"".join([bytes(await copies.chunk(number, index, UNIT_NAME)) for index, _ in enumerate(chunks)])
            return decode_unit(data, f"{checkpoint}: {UNIT_NAME}")
        except (CorruptChunk, ManifestError):
            return None
    return None
