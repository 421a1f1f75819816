"""A restore takes the newest checkpoint along its timeline, says what it skips, and never mixes two histories."""

from __future__ import annotations

from faults.fences import Fence
from faults.fences.edits import Answer, Assume, Rename, Replace, Returns

_TIMELINE = "docs/explanation/restore.md#the-timeline"
_ORDER = "docs/explanation/internals.md#how-a-restore-runs"
_CAME = "run step 3 (attempt 001800000001-00000001) came"

FENCES = (
    Fence(
        "an optimizer's state is assigned by the positions of parameters, whatever their names",
        "docs/reference/state.md#what-a-restore-changes",
        "comparison",
        "state.kinds.training_objects:_order",
        Returns("None"),
        "pytest tests/state/kinds/test_optimizer_states.py -k 'assigned_by_name'",
    ),
    Fence(
        "a restore takes an older attempt's checkpoint first",
        _TIMELINE,
        "order",
        "restore_order",
        Replace("RestoreOrder", "order = sorted(order, key=lambda checkpoint: checkpoint.attempt)\n..."),
        "kills --trials 50 --seed 0",
        "was due, and",
    ),
    Fence(
        "parts that go on from different checkpoints are restored together",
        "ARCHITECTURE.md#invariants-5",
        "comparison",
        "check_origin",
        Assume(False, "attempt_origin origin"),
        "pytest tests/test_writers_on_nodes.py -k rank_origin",
    ),
    Fence(
        "a resume reads no heads",
        "tierd/FORMAT.md#a-runs-head",
        "comparison",
        "Inventory.origins",
        Answer("remembered", "{}"),
        "corruption --only 18",
        _CAME,
    ),
    Fence(
        "a name without a manifest decides which launch is the newest",
        "docs/explanation/attackers.md#a-bucket-writer-without-the-key",
        "comparison",
        "core.timeline.launch_chain:order_by_timeline",
        Answer("max", "max({*origins, *steps}, default=None)"),
        "corruption --only 7",
        "can be had, and nothing came",
    ),
    Fence(
        "a launch begins anew where only a head remembers one",
        "docs/explanation/attackers.md#a-bucket-writer-without-the-key",
        "error",
        "CandidateTrials._check_nothing",
        Assume(False, "reason INCOMPLETE"),
        "corruption --only 86",
        "and a launch began anew",
    ),
    Fence(
        "a head is taken for that of another run or node",
        "tierd/FORMAT.md#a-runs-head",
        "comparison",
        "core.timeline.launch_chain:decode_head",
        Assume(False, "run by"),
        "hostile --only 52",
        "it is not the head that belongs there",
    ),
    Fence(
        "a launch is named by the wall clock alone",
        "tierd/FORMAT.md#names",
        "clock",
        "next_attempt",
        Rename("latest", "-1"),
        "host --only 9",
        "not an earlier attempt | restored",
    ),
    Fence(
        "a tier that could not be asked has no copy",
        "ARCHITECTURE.md#invariants-3",
        "error",
        "Replicas.lost_error",
        Assume(False, "unavailable"),
        "s3 --only 31",
        "takes what passes for corrupt or gone",
    ),
    Fence(
        "a reader steps back where a tier did not answer",
        "ARCHITECTURE.md#invariants-3",
        "error",
        "TierFiles._read_manifests",
        Replace("lost_error unavailable", "raise ObjectNotFound('vanished')"),
        "pytest tests/reading/test_reader.py -k never_a_reason",
        "vanished",
    ),
    Fence(
        "a rank's restore ends before every rank has loaded",
        "docs/explanation/ranks.md#what-is-restored",
        "order",
        "StateRestorer._load",
        Replace("agreement exchange_load_result", "if failure:\n    raise failure"),
        "pytest tests/client/ranks/test_ranks.py -k where_a_rank_cannot_load",
    ),
    Fence(
        "a restore does not say why it skips a checkpoint",
        "README.md#why",
        "report",
        "CandidateTrials.settle",
        Replace("_passed corrupt", "self._passed[candidate.checkpoint] = ''"),
        "corruption --only 83",
        "and this was said of it",
    ),
    Fence(
        "a history that was put back is not reported",
        "docs/howto/recovery.md#history-that-was-turned-back",
        "report",
        "run_view_of",
        Answer("missing_newest", "None"),
        "corruption --only 27",
        "(gone) is newer than",
    ),
    Fence(
        "a head that was put back is followed unreported",
        "docs/howto/recovery.md#history-that-was-turned-back",
        "report",
        "core.timeline.launch_chain:rollback_reason",
        Assume(True, "latest counter"),
        "pytest tests/end_to_end/test_heads.py -k reported_once",
    ),
)
