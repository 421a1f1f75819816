"""Nothing is deleted that a reader or a restore needs, by any clock, listing or process; the rest is deleted."""

from __future__ import annotations

from faults.fences import Fence
from faults.fences.edits import Answer, Assume, LeaveOut, Rename, Replace, Returns

_FACTS = "ARCHITECTURE.md#invariants-2"
_CLOCK = "ARCHITECTURE.md#invariants-8"
_WHOLE = "docs/explanation/deletion.md"
_README = "README.md#what-is-deleted-when-and-by-whom"
_PROOF = "docs/explanation/attackers.md#what-proves-corruption"

FENCES = (
    Fence(
        "a prune deletes chunks that other manifests name",
        "tierd/FORMAT.md#a-tier",
        "deletion",
        "Deletions.is_deleted",
        Returns("True"),
        "simulation --seed 1 --trials 8000",
        "which is not right there",
    ),
    Fence(
        "a tier deletes a checkpoint that another tier wants and lacks",
        _README,
        "deletion",
        "_over_all_places",
        Assume(False, "tier_name silent"),
        "pytest tests/core/planning/test_demand.py -k wants_and_lacks_and_says_so",
    ),
    Fence(
        "a node that only restored a run prunes it on a tier",
        _README,
        "deletion",
        "is_janitor",
        Assume(True, "restored"),
        "pytest tests/daemon/tiers/test_run_policies.py -k beside_a_reader",
    ),
    Fence(
        "a finished run leaves the spool before a tier has all that it wants",
        _README,
        "deletion",
        "RunPlan.spool_deletions",
        Assume(False, "_is_owed"),
        "pytest tests/core/planning/test_eviction.py -k finished_run_is_kept",
    ),
    Fence(
        "a full disk deletes a copy that no tier has",
        _README,
        "deletion",
        "eviction_order",
        Assume(True, "is_on_a_tier"),
        "pytest tests/core/planning/test_eviction.py -k evict_spares_checkpoints",
    ),
    Fence(
        "a stored policy is not obeyed",
        f"{_WHOLE}#a-run-owns-its-policy",
        "deletion",
        "known_policy",
        Answer("_standing", "()"),
        "pytest tests/daemon/tiers/test_run_policies.py -k obeys_the_policy_on_the_tier",
    ),
    Fence(
        "a policy that cannot be read is taken for none",
        f"{_WHOLE}#a-run-owns-its-policy",
        "error",
        "core.planning.inventory:unknown_policy_reason",
        Assume(False, "retention"),
        "pytest tests/daemon/tiers/test_run_policies.py -k cannot_be_read",
    ),
    Fence(
        "keep_last keeps one checkpoint less",
        f"{_WHOLE}#a-tier",
        "deletion",
        "Ranking._reasons",
        Rename("count", "(count - 1)", times=2),
        "pytest tests/core/retention/test_policy.py -k golden",
    ),
    Fence(
        "a pin that another node puts beside the marks does not count",
        f"{_WHOLE}#the-last-copy",
        "deletion",
        "PrunePass._spared",
        Assume(False, "intersection"),
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k pin_by_another_node",
    ),
    Fence(
        "a prune does not decide again after it put its marks",
        _FACTS,
        "order",
        "PrunePass._spared",
        Assume(True, "confirm"),
        "pytest tests/daemon/tiers/test_prune_confirmed.py",
    ),
    Fence(
        "a prune lists a tier before it puts its marks",
        "tierd/FORMAT.md#a-tier",
        "order",
        "PrunePass.settle",
        Replace("put_marks to_delete", "await self.marks.put(set())"),
        "pytest tests/daemon/tiers/test_pending_prunes.py -k marks_all",
    ),
    Fence(
        "an only copy is deleted by an old observation of a tier",
        _FACTS,
        "deletion",
        "Pruner._are_aged",
        Assume(False, "aged_s"),
        "pytest tests/daemon/test_finished.py -k old_listing_of_a_tier",
    ),
    Fence(
        "a tier's copy is deleted for the sake of another that is not read again",
        _FACTS,
        "deletion",
        "Pruner._held_elsewhere",
        Assume(True, "_holds"),
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k 'asked_before and gone'",
    ),
    Fence(
        "a spool's copy is deleted for a tier's copy of other content",
        "docs/explanation/attackers.md#a-rank-of-the-same-job-that-lies",
        "comparison",
        "daemon.tiers.tier_probes:is_part_held",
        Assume(True, "same_content"),
        "pytest tests/test_writers_on_nodes.py -k another_node",
    ),
    Fence(
        "a quarantined copy is deleted without reading it again",
        _PROOF,
        "verification",
        "Pruner._prune_together",
        Answer("proven_corrupt", "prune_batch(first, other_prunes, place)"),
        "pytest tests/daemon/tiers/test_release.py -k used_again",
    ),
    Fence(
        "a quarantine deletes a manifest that was put meanwhile",
        _PROOF,
        "comparison",
        "daemon.tiers.tier_prune:quarantine",
        Assume(False, "manifest_bytes data"),
        "pytest tests/daemon/scrub/test_old_proofs.py -k while_it_was_quarantined",
    ),
    Fence(
        "a process that was stopped for long goes on with its deletion",
        _CLOCK,
        "clock",
        "daemon.tiers.tier_prune:quarantine",
        Assume(False, "monotonic ends_s"),
        "pytest tests/daemon/scrub/test_old_proofs.py -k was_stopped",
    ),
    Fence(
        "one launch's wrong clock makes checkpoints old",
        _CLOCK,
        "clock",
        "Ages.age_s",
        Answer("min", "largest[0] - smallest[0]"),
        "pytest tests/core/retention/test_ages.py -k two_wrong_clocks",
    ),
    Fence(
        "the wall clock alone says that a run is finished",
        _CLOCK,
        "clock",
        "TrainerActivity._quiet_s",
        Answer("min", "part_s"),
        "pytest tests/daemon/test_presence.py -k both_its_trainer",
    ),
    Fence(
        "tierd rm deletes a run that a trainer saves without a daemon",
        f"{_WHOLE}#two-launches-of-one-run-at-once",
        "lock",
        "remove_from_spool",
        Assume(False, "living_trainers"),
        "pytest tests/cli/test_space.py -k trainer_saves_the_run",
    ),
    Fence(
        "the loss of a last copy that a tier wanted is not reported",
        f"{_WHOLE}#the-last-copy",
        "report",
        "Pruner._record_pruned",
        LeaveOut("record why"),
        "pytest tests/daemon/transfer/test_relay.py -k save_during_the_deletion",
    ),
)
