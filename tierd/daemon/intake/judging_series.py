"""Judge the newest unit that no place has by the files of the checkpoint that was taken before it.

What lies beside a unit may have lost files, and is repaired only later. The record has lost none. Nothing is changed
here, and no file is read: a unit that lacks a file may be unfinished, which is not proven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierd.core.ids import PartId
from tierd.daemon.intake.judging import JudgedUnit
from tierd.daemon.intake.manifests import first_manifest
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.naming import KnownCheckpoints
from tierd.watching.series import UNCERTAIN, is_of_series, lacking
from tierd.watching.unit import WITHOUT_STEP
from tierd.watching.unit_file import UNIT_NAME

_MOST_READ = 8  # newest checkpoints, of which one is of the unit's series; each is a read of a tier


async def judge_series(
    judged: Sequence[JudgedUnit], history: KnownCheckpoints, spool: Spool | None, stores: Mapping[str, Store]
) -> None:
    """Judge as unknown what is newer than each checkpoint of its series, and lacks a file that the newest of them has.

    A second such unit in a row is whole, because its program writes fewer files now.
    """
    fresh = [judged_unit for judged_unit in judged if judged_unit.verdict == "sound" and judged_unit.checkpoint is None]
    of_one_save = [
        judged_unit for judged_unit in fresh if judged_unit.unit.path.rpartition("/")[2] != WITHOUT_STEP
    ]  # else not of one save
    reasons = {}
    for judged_unit in of_one_save:
        if judged_unit.unit.layout not in UNCERTAIN:
            continue
        paths = await _newest_of_series(judged_unit, history, spool, stores)
        absent = lacking(judged_unit.unit.files, paths, judged_unit.unit.layout)
        if absent is not None and not any(_is_before(sibling, judged_unit) for sibling in fresh):
            reasons[judged_unit.unit.path] = (
                f"the checkpoint that was taken before it has {absent}; it may be unfinished"
            )
    for judged_unit in fresh:
        if judged_unit.unit.path in reasons:
            judged_unit.verdict, judged_unit.why = "unknown", reasons[judged_unit.unit.path]


async def _newest_of_series(
    judged: JudgedUnit, history: KnownCheckpoints, spool: Spool | None, stores: Mapping[str, Store]
) -> Sequence[str]:
    """Return the files of the newest checkpoint of a unit's series; none if that is not older than the unit."""
    times = {checkpoint: at for checkpoint, at in history.made.items() if checkpoint.run == judged.run}
    for checkpoint in sorted(times, reverse=True)[:_MOST_READ]:
        manifest = await first_manifest(PartId(checkpoint, 0, 1), spool, stores)
        paths = [file.path for file in manifest.files if file.path != UNIT_NAME] if manifest else []
        if is_of_series(judged.unit.files, paths):
            return paths if times[checkpoint] < judged.made else []
    return []


def _is_before(earlier: JudgedUnit, judged: JudgedUnit) -> bool:
    """Whether a unit is an earlier one of the same series that has no other files."""
    files, own_files = earlier.unit.files, judged.unit.files
    return (
        earlier.made < judged.made
        and is_of_series(own_files, files)
        and lacking(own_files, files, judged.unit.layout) is None
    )
