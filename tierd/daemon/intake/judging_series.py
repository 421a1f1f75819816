"""Judge the newest unit that no place has by the files of the checkpoint that was taken before it.

What lies beside a unit may have lost files, and is repaired only later. The record has lost none. Nothing is changed
here, and no file is read: a unit that lacks a file may be unfinished, which is not proven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierd.core.ids import PartId
from tierd.daemon.intake.judging import Judged
from tierd.daemon.intake.manifests import first_manifest
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.naming import History
from tierd.watching.series import UNCERTAIN, is_of_series, lacking
from tierd.watching.unit import WITHOUT_STEP
from tierd.watching.unit_file import UNIT_NAME

_MOST_READ = 8  # newest checkpoints, of which one is of the unit's series; each is a read of a tier


async def judge_series(
    judged: Sequence[Judged], known: History, spool: Spool | None, stores: Mapping[str, Store]
) -> None:
    """Judge as unknown what is newer than each checkpoint of its series, and lacks a file that the newest of them has.

    A second such unit in a row is whole, because its program writes fewer files now.
    """
    fresh = [one for one in judged if one.verdict == "sound" and one.checkpoint is None]
    named = [one for one in fresh if one.unit.path.rpartition("/")[2] != WITHOUT_STEP]  # else not of one save
    reasons = {}
    for one in named:
        if one.unit.layout not in UNCERTAIN:
            continue
        paths = await _newest_of_series(one, known, spool, stores)
        absent = lacking(one.unit.files, paths, one.unit.layout)
        if absent is not None and not any(_is_before(other, one) for other in fresh):
            reasons[one.unit.path] = f"the checkpoint that was taken before it has {absent}; it may be unfinished"
    for one in fresh:
        if one.unit.path in reasons:
            one.verdict, one.why = "unknown", reasons[one.unit.path]


async def _newest_of_series(
    one: Judged, known: History, spool: Spool | None, stores: Mapping[str, Store]
) -> Sequence[str]:
    """Return the files of the newest checkpoint of a unit's series; none if that is not older than the unit."""
    made = {checkpoint: at for checkpoint, at in known.made.items() if checkpoint.run == one.run}
    for checkpoint in sorted(made, reverse=True)[:_MOST_READ]:
        manifest = await first_manifest(PartId(checkpoint, 0, 1), spool, stores)
        paths = [file.path for file in manifest.files if file.path != UNIT_NAME] if manifest else []
        if is_of_series(one.unit.files, paths):
            return paths if made[checkpoint] < one.made else []
    return []


def _is_before(other: Judged, one: Judged) -> bool:
    """Whether a unit is an earlier one of the same series that has no other files."""
    files, own = other.unit.files, one.unit.files
    return other.made < one.made and is_of_series(own, files) and lacking(own, files, one.unit.layout) is None
