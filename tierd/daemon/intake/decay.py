"""Find files that decayed in a unit without a step that its program has written more of since it was taken.

Such a unit is none of the run's checkpoints as it is now. But a file that has the size and the time of a verified copy
was not written since, so that other bytes are damage. The best of a run is not written in each save, so its last
verified copy goes with newer files beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.daemon.intake.comparing import differences
from tierd.daemon.intake.each_series import recorded_unit
from tierd.daemon.intake.judging import CHANGING, JudgedUnit, is_of
from tierd.daemon.intake.manifests import first_manifest
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.stores.base import Store
from tierd.watching.files import Tree
from tierd.watching.inspect import ChangedFile
from tierd.watching.listing import Listing
from tierd.watching.naming import KnownCheckpoints
from tierd.watching.step_in_name import is_best

_LOOKED_AT = 8  # of so many newest checkpoints, one is of the unit; each is a read of a tier


async def judge_decay(
    tree: Tree, judged: JudgedUnit, history: KnownCheckpoints, listing: Listing, stores: Mapping[str, Store]
) -> None:
    """Judge a unit, of which no checkpoint has all that is there now, as damaged if files of an earlier one decayed."""
    if (
        judged.unit.step is not None
        or judged.checkpoint is not None
        or judged.verdict == "unfinished"
        or judged.unreadable
    ):
        return
    earlier = [
        checkpoint
        for checkpoint, created in history.made.items()
        if checkpoint.run == judged.run and created < judged.made
    ]
    for checkpoint in sorted(earlier, reverse=True)[:_LOOKED_AT]:
        manifest = await first_manifest(PartId(checkpoint, 0, 1), None, stores)
        if manifest is not None and is_of(judged.unit, manifest):
            await _compare(tree, judged, listing, stores, checkpoint, manifest)
            return


async def _compare(
    tree: Tree,
    judged: JudgedUnit,
    listing: Listing,
    stores: Mapping[str, Store],
    checkpoint: CheckpointId,
    manifest: Manifest,
) -> None:
    about = await recorded_unit(stores, checkpoint)
    modified_ns = about.modified_ns if about else {}
    unchanged = [
        file
        for file in manifest.files
        if (entry := listing.entries.get(file.path)) is not None
        and (entry.size, entry.mtime_ns) == (file.size, modified_ns.get(file.path))
    ]

    def decayed() -> dict[str, str]:
        alone = {file.path: msgspec.structs.replace(manifest, files=(file,)) for file in unchanged}
        first_differences = ((path, next(differences(tree, listing, only), None)) for path, only in alone.items())
        return {path: difference.why for path, difference in first_differences if difference is not None}

    try:
        reasons = await to_the_end(decayed)
    except (ChangedFile, OSError) as error:
        judged.unreadable, judged.verdict = not isinstance(error, ChangedFile), "unknown"
        judged.why = f"it cannot be read: {error}" if judged.unreadable else CHANGING
        return
    cut = [file.path for file in manifest.files if file.path in judged.damaged and is_best(file.path)]
    reasons |= dict.fromkeys(cut, judged.why)
    if reasons:
        judged.verdict, judged.why = "damaged", "; ".join([*dict.fromkeys(reasons.values())][:2])
        judged.outgrown, judged.decayed = checkpoint, tuple(reasons)
        judged.damaged = tuple(sorted({*judged.damaged, *reasons}))
