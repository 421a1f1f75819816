"""Other programs' checkpoints: only whole, sound and finished ones are taken, once. Their files are never changed."""

from __future__ import annotations

from faults.fences import Fence
from faults.fences.edits import Assume, LeaveOut, Returns

_TAKEN = "docs/explanation/watching.md#what-is-taken-and-when"
_NODES = "docs/explanation/watching.md#several-nodes"
_LAUNCH = "docs/explanation/prepare.md#what-prepare-does"

FENCES = (
    Fence(
        "a checkpoint is taken as soon as it looks complete",
        _TAKEN,
        "order",
        "SettlingTracker.observe",
        Assume(False, "_wait_s"),
        "pytest tests/watching/test_settle.py -k long_enough",
    ),
    Fence(
        "a checkpoint that a process has open for writing is taken",
        _TAKEN,
        "lock",
        "_check_closed",
        Assume(False, "is_open_for_writing"),
        "pytest tests/watching/test_unit_watch.py -k open_for_writing_is_not_read",
    ),
    Fence(
        "a checkpoint that changed while it was taken is committed",
        _TAKEN,
        "comparison",
        "UnitWatch._commit",
        Assume(True, "is_unchanged"),
        "pytest tests/watching/test_unit_watch.py -k 'changes_while and rewrite'",
    ),
    Fence(
        "a damaged checkpoint is taken",
        _TAKEN,
        "verification",
        "UnitWatch._consider",
        Assume(True, "status findings"),
        "pytest tests/watching/test_unit_watch.py -k damaged",
    ),
    Fence(
        "a directory that lacks a file of its series is taken",
        _TAKEN,
        "comparison",
        "watching.series_comparison:_absent",
        Returns("frozenset()"),
        "watched --trials 200",
        "a part for the whole",
    ),
    Fence(
        "a directory with a temporary name is taken",
        _TAKEN,
        "order",
        "is_temporary",
        Returns("False"),
        "watched --trials 200",
        "under its temporary name",
    ),
    Fence(
        "two nodes take one checkpoint",
        _NODES,
        "lock",
        "IngestClaim._others",
        Assume(False, "since_s"),
        "watched --trials 400",
        "read by both nodes",
    ),
    Fence(
        "prepare moves a checkpoint without proof that it is unfinished",
        _LAUNCH,
        "deletion",
        "daemon.intake.unit_verdict:judge_by_structure",
        Assume(True, "is_unfinished"),
        "watched --trials 200",
        "was moved without proof | good files moved",
    ),
    Fence(
        "prepare moves checkpoints while a tier does not answer",
        _LAUNCH,
        "error",
        "daemon.intake.directory_preparation:_observed",
        Assume(False, "silent"),
        "pytest tests/watching/test_in_place.py -k does_not_answer",
    ),
    Fence(
        "a repair writes to the program's own file",
        "docs/explanation/watching.md#how-it-is-taken",
        "deletion",
        "_Download._own",
        LeaveOut("unshare"),
        "pytest tests/watching/test_unit_watch.py -k repair_never_writes",
    ),
)
