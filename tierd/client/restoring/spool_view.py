"""A run as this node's spool alone shows it, for a restore without a daemon."""

from __future__ import annotations

from dataclasses import replace

from tierd.core.errors import ObjectNotFound, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.place import Place
from tierd.spool.conditions import condition, translated
from tierd.spool.records import committed, heads
from tierd.spool.spool import Spool

_NEWEST = 4  # checkpoints in the first listing; nearly every restore takes one of them


def observe_spool(spool: Spool, run: str, *, deep: bool) -> tuple[Place, CheckpointId | None, dict[CheckpointId, str]]:
    """List the run in the spool. Also return the oldest checkpoint that was listed, if older ones exist, and what
    `Spool.odd_places` found.

    Args:
        spool: the spool.
        run: the run.
        deep: list every checkpoint, not only the newest few.

    Raises:
        SpoolUnusable: the spool cannot be listed, so it must not count as empty; or `check_way` refuses a link.
    """
    parts: dict[PartId, ManifestFacts | None] = {}
    defects: dict[PartId, TierdError] = {}
    with translated(f"spool {spool.root}", spool.root):
        before = committed(spool.control)
        newest = [] if deep else spool.newest(run, _NEWEST + 1)
        listed = newest[:_NEWEST] if len(newest) > _NEWEST else None
        spool.check_way(run)
        odd = spool.odd_places(run, listed)
        for part in (
            spool.parts(run)
            if listed is None
            else [part for checkpoint in listed for part in spool.parts_of(checkpoint)]
        ):
            try:
                parts[part] = ManifestFacts.of(spool.manifest(part))
            except ObjectNotFound:
                continue
            except (TierdError, OSError) as error:  # the error is found again, and reported, when the part is read
                defect = condition(error, f"manifest of {part}") if isinstance(error, OSError) else error
                parts[part], defects[part] = None, defect
        quarantined = {
            part: ManifestFacts.of(manifest) if manifest else None for part, manifest in spool.quarantined().items()
        }
        remembered = heads(spool.control)
    place = replace(Place.of(parts, defects, quarantined=quarantined), committed=before, heads=remembered)
    return place, listed[-1] if listed else None, odd
