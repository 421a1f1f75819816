"""What is acknowledged survives a loss of power: each fsync of a save and of a flush, and the order of the steps."""

from __future__ import annotations

from faults.fences import Fence
from faults.fences.edits import Both, LeaveOut, Replace

_SAVE = "docs/explanation/internals.md#how-a-save-runs"
_CUTS = "simulation --seed 15 --trials 4000"

FENCES = (
    Fence(
        "a stage's directories are not synced before the rename",
        _SAVE,
        "fsync",
        "Stage.commit",
        LeaveOut("sync_directory"),
        _CUTS,
        "lost in a power cut",
    ),
    Fence(
        "a part's entry is not synced after the rename",
        _SAVE,
        "fsync",
        "Stage._settle",
        LeaveOut("fsync shelf"),
        _CUTS,
        "lost in a power cut",
    ),
    Fence(
        "a file of the spool is not synced",
        _SAVE,
        "fsync",
        "FileWriter.finish",
        LeaveOut("fsync"),
        "power --only 30",
        "visible and not whole",
    ),
    Fence(
        "a put is not durable before it is shown",
        "docs/explanation/decisions.md#stores",
        "fsync",
        "FileTree._put_once",
        # With the hint, because the kernel begins to write at it: on a quick disk nothing would show.
        Both(LeaveOut("fsync"), LeaveOut("posix_fadvise")),
        "power --seed 100 --trials 40",
        "visible and not whole",
    ),
    Fence(
        "a put is acknowledged before it is durable",
        "docs/explanation/decisions.md#stores",
        "fsync",
        "FileTree._put_once",
        LeaveOut("sync_directory"),
        "power --only 42",
        "though it was said to be there",
    ),
    Fence(
        "a fetched file is not durable before it is shown",
        "docs/explanation/internals.md#how-a-restore-runs",
        "fsync",
        "TargetFile.sync",
        LeaveOut("fsync"),
        "power --only 46",
        "visible and not whole",
    ),
    Fence(
        "a quarantine is acknowledged before it is durable",
        "docs/howto/recovery.md#a-quarantined-copy",
        "fsync",
        "Spool.quarantine",
        Both(LeaveOut("sync_directory"), LeaveOut("sync_removal")),
        "power --only 54",
        "set aside in the spool",
    ),
    Fence(
        "a pin is acknowledged before it is durable",
        "docs/howto/recovery.md#keep-a-checkpoint-for-good",
        "fsync",
        "Leftovers.pin",
        LeaveOut("sync_directory"),
        "power --only 56",
        "pinned in the spool",
    ),
    Fence(
        "a removed part's files are written over before its removal is durable",
        _SAVE,
        "fsync",
        "move_to_trash",
        LeaveOut("sync_removal"),
        "power --trials 60",
        "said to be gone",
    ),
    Fence(
        "a hand-off is acknowledged before it is durable",
        _SAVE,
        "order",
        "HandoffServer._answer",
        Replace(
            "_reply _persist",
            "self._reply(line, {'ok': True, 'direct': False, 'recycled': False})\nself._persist(line, message, box)",
        ),
        "power --only 40",
        "though it was said to be there",
    ),
    Fence(
        "a part is renamed into place before its manifest is written",
        "ARCHITECTURE.md#invariants-1",
        "order",
        "Stage.commit",
        Replace(
            "write_file",
            "self._target.parent.mkdir(parents=True, exist_ok=True)\nself.path = self.path.rename(self._target)\n...",
        ),
        "power --trials 60",
        "visible and not whole",
    ),
    Fence(
        "a prune deletes chunks before the manifests that name them",
        "ARCHITECTURE.md#invariants-1",
        "order",
        "daemon.tiers.tier_prune:prune",
        Replace("delete manifests", "await store.delete([info.key async for info in _chunks(store, run, going)])\n..."),
        "simulation --seed 1 --trials 8000",
        "which is not right there",
    ),
    Fence(
        "a copy on a tier is quarantined after its manifest was deleted",
        "docs/howto/recovery.md#a-quarantined-copy",
        "order",
        "daemon.tiers.tier_prune:quarantine",
        Both(
            LeaveOut("put_manifest"),
            Replace("delete manifest_key", "...\nawait put_manifest(store, part.quarantine_key, data)"),
        ),
        "power --only 54",
        "none is left of",
    ),
    Fence(
        "no head is written on a tier",
        "tierd/FORMAT.md#a-runs-head",
        "order",
        "daemon.tiers.tier_run_records:due_head",
        Replace("launches", "return None"),
        _CUTS,
        "0 heads can be read",
    ),
)
