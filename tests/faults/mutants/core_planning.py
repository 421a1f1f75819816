"""Mutants of `tierd/core/planning/`."""

from __future__ import annotations

from faults.rounds import Mutant

_DEMAND = "tierd/core/planning/demand.py"
_EVICTION = "tierd/core/planning/eviction.py"
_JANITOR = "tierd/core/planning/janitor.py"
_ORDER = "tierd/core/planning/order.py"
_PLAN = "tierd/core/planning/plan.py"
_PRUNING = "tierd/core/planning/pruning.py"
_VERDICTS = "tierd/core/planning/verdicts.py"
_TEST_DEMAND = "pytest tests/core/planning/test_demand.py"
_TEST_EVICTION = "pytest tests/core/planning/test_eviction.py"
_TEST_BACKFILL = "pytest tests/daemon/transfer/test_backfill.py"

MUTANTS = (
    Mutant(
        "each incomplete checkpoint is looked for among all others",
        "tierd/core/planning/demand.py",
        "        hopes = frozenset(hoped)\n",
        "        hopes = list(hoped)\n",
        "pytest tests/core/planning/test_plan.py -k grow_no_faster",
    ),
    Mutant(
        "what only this node has complete counts where others have ranks",
        "tierd/core/planning/copies.py",
        "        return self.complete and not self.defects and all(",
        "        return not self.defects and all(",
        "pytest tests/core/planning/test_plan.py -k no_tier_wants_it_any_more",
    ),
    Mutant(
        "a part that is pending by an earlier plan stays pending after it arrived",
        _DEMAND,
        "            found.pop(one, None)\n",
        "",
        "pytest tests/core/planning/test_planner.py -k pending_no_more",
    ),
    Mutant(
        "a tier that does not answer lacks nothing",
        _DEMAND,
        "        if seen is None:\n            return True",
        "        if seen is None:\n            return place is not None",
        f"{_TEST_DEMAND} -k until_it_is_silent",
    ),
    Mutant(
        "a tier lacks what a launch that lives has saved beside a later one",
        _DEMAND,
        "self._live[place] = live_launches(self.inventory, self.run, place)",
        "self._live[place] = live_launches(self.inventory, self.run, place) if place == 'local' else frozenset()",
        "pytest tests/core/timeline/test_launches.py -k sent_there",
    ),
    Mutant(
        "a tier that is slower than the saves fills the spool",
        _EVICTION,
        "    return frozenset.intersection(*found) - inventory.needed\n",
        "    return frozenset()\n",
        "pytest tests/daemon/transfer/test_slow_tier.py -k does_not_fill",
    ),
    Mutant(
        "a full disk takes the newest copy of a run that trains as soon as any other",
        _EVICTION,
        "spared = trained and (one == newest[one.run] or one in inventory.pins)",
        "spared = False",
        f"{_TEST_EVICTION} -k go_first",
    ),
    Mutant(
        "a full disk takes what no tier has",
        _EVICTION,
        "verified = [seen.id for seen in inventory.spool.checkpoints.values() if inventory.on_a_tier(seen)]",
        "verified = list(inventory.spool.checkpoints)",
        f"{_TEST_EVICTION} -k never_taken",
    ),
    Mutant(
        "a finished run leaves although a tier does not answer",
        _EVICTION,
        "all(place or name in inventory.silent for name, place in inventory.tiers.items())",
        "True",
        f"{_TEST_EVICTION} -k stays_while",
    ),
    Mutant(
        "nodes do not heed what others say that they send",
        "tierd/core/planning/flush_candidates.py",
        "    for one, nodes in tier.announced.items():\n",
        "    for one, nodes in {}.items():\n",
        "pytest tests/core/planning/test_several_links.py",
    ),
    Mutant(
        "an hour's flush for an hour's interval",
        "tierd/core/planning/flush_window.py",
        "    return min(max(saved_at[-1] + _SHARE * interval - now, 0.0), LONGEST_S)\n",
        "    return max(saved_at[-1] + _SHARE * interval - now, 0.0)\n",
        "pytest tests/core/planning/test_flush_window.py -k lost_node",
    ),
    Mutant(
        "a daemon at rest looks at every rescan",
        "tierd/core/planning/idle.py",
        "return max(rescan_s, requests * tiers * 3600 / REQUESTS_AN_HOUR)",
        "return rescan_s",
        "pytest tests/daemon/test_idle.py -k tiers0",
        "requests an hour",
    ),
    Mutant(
        "a name of which nothing can be read hides what went",
        "tierd/core/planning/inventory.py",
        "if any(seen.sound.values())}",
        "}",
        "pytest tests/core/timeline/test_candidates.py -k does_not_hide_what_went",
    ),
    Mutant(
        "where a launch came from is told by manifests alone",
        "tierd/core/planning/inventory.py",
        "        for attempt, known in self.remembered(run).items():\n",
        "        for attempt, known in ():\n",
        "pytest tests/end_to_end/test_heads.py -k not_all_that_tells",
    ),
    Mutant(
        "whoever restored a run prunes it",
        _JANITOR,
        "max(known) in mine and run not in inventory.spool.restored",
        "max(known) in mine",
        "pytest tests/daemon/tiers/test_run_policies.py -k beside_a_reader",
    ),
    Mutant(
        "who saved a run deletes nothing of it once its last copy went",
        _JANITOR,
        "    if known and _saved_first(inventory, run) >= max(known):\n",
        "    if False:\n",
        f"{_TEST_EVICTION} -k every_copy",
    ),
    Mutant(
        "a filled tier takes runs that others keep there",
        _JANITOR,
        "    return not by or inventory.who in by\n",
        "    return True\n",
        f"{_TEST_BACKFILL} -k left_to_that_node",
    ),
    Mutant(
        "a run is copied on after its tiers are no longer observed for it",
        _JANITOR,
        "    if run not in inventory.filling:\n        return False\n",
        "",
        f"{_TEST_BACKFILL} -k takes_long",
    ),
    Mutant(
        "what is wanted for good and is sent one after the other passes for the newest",
        _ORDER,
        "    return checkpoint in tier.checkpoints or newest is None or newest <= checkpoint",
        "    return True",
        "pytest tests/daemon/transfer/test_slow_tier.py -k holds_up_no_newest",
    ),
    Mutant(
        "a slow tier is sent nothing but the newest",
        _ORDER,
        "    if sent is not None and sent.others**2 < len(good):",
        "    if False:",
        f"{_TEST_DEMAND} -k for_ever",
    ),
    Mutant(
        "preemption: the usual order of flushes stays",
        _ORDER,
        "    if newest_first:\n",
        "    if False:\n",
        "pytest tests/core/planning/test_order.py",
    ),
    Mutant(
        "a run's plan is kept whatever changes of it",
        _PLAN,
        "known[1] is config and known[0] == own",
        "known[1] is config and known[0].tiers == own.tiers",
        "pytest tests/core/planning/test_planner.py -k planning_anew",
    ),
    Mutant(
        "a full tier is sent more before anything is deleted there",
        _PLAN,
        "    return (*urgent, *actions)",
        "    return (*actions, *urgent)",
        f"{_TEST_DEMAND} -k full_tier",
    ),
    Mutant(
        "other runs are sent before what this node saves",
        _PLAN,
        "for candidates in (own, filled):",
        "for candidates in (filled, own):",
        f"{_TEST_BACKFILL} -k before_other_runs",
    ),
    Mutant(
        "a finished run leaves before a tier is sent it",
        _PLAN,
        "leaving = leaving and not self._is_owed()",
        "leaving = leaving",
        f"{_TEST_EVICTION} -k stays_while",
    ),
    Mutant(
        "what comes while a last copy is deleted hides that a tier wanted it",
        _PRUNING,
        "    return replace(inventory, spool=rid(inventory.spool), tiers=tiers) if came else inventory\n",
        "    return inventory\n",
        f"{_TEST_DEMAND} -k what_came",
    ),
    Mutant(
        "what goes along with a last copy hides that a tier wanted it",
        _PRUNING,
        "for one in (Demand(before, config, run), demand)]",
        "for one in (demand,)]",
        f"{_TEST_DEMAND} -k what_went",
    ),
    Mutant(
        "a tier deletes before the spool what another tier may still want",
        _PRUNING,
        "    if None in inventory.tiers.values():\n",
        "    if False:\n",
        "pytest tests/core/planning/test_plan.py -k frees_a_copy_before",
    ),
    Mutant(
        "what cannot be deleted is pruned again and again",
        _PRUNING,
        "if tier is None or name in inventory.append_only or not is_janitor(inventory, tier, run):",
        "if tier is None or not is_janitor(inventory, tier, run):",
        "pytest tests/daemon/tiers/test_append_only.py -k nobody_asks",
    ),
    Mutant(
        "small chunks are shared",
        "tierd/core/planning/sharing.py",
        "chunk.size >= SMALLEST_SHARED_BYTES",
        "chunk.size >= 1",
        "pytest tests/core/planning/test_sharing.py tests/daemon/transfer/test_sharing.py -k large_chunks",
        "1 MiB is the smallest",
    ),
    Mutant(
        "a chunk is shared without end",
        "tierd/core/planning/sharing.py",
        "if count >= MOST_SHARERS",
        "if count < 0",
        "pytest tests/daemon/transfer/test_sharing.py -k bound",
        "a chunk is named by",
    ),
    Mutant(
        "little space never takes the newest copy of a run without a trainer",
        "tierd/core/planning/spool_prunes.py",
        "trained = demand.run not in inventory.trainerless",
        "trained = True",
        f"{_TEST_EVICTION} -k little_free",
    ),
    Mutant(
        "what one tier has counts as on none",
        "tierd/core/planning/unflushed.py",
        "    nowhere = [one for one in left if not one.on]",
        "    nowhere = list(left)",
        "pytest tests/daemon/test_ending.py -k unfinished",
    ),
    Mutant(
        "a part lacks on no tier that does not answer",
        "tierd/core/planning/unflushed.py",
        "if (part, name) in wanted or (place is None and inventory.spool.lists(part))",
        "if (part, name) in wanted",
        "pytest tests/core/planning/test_unflushed.py -k did_not_answer",
    ),
    Mutant(
        "a chain of keep_every is cut while a tier does not answer where it may begin",
        _VERDICTS,
        "    if demand.policy(name).every and (one in demand.whole or hoped):\n",
        "    if demand.policy(name).every and not (one in demand.whole or hoped):\n",
        f"{_TEST_DEMAND} -k may_begin",
    ),
    Mutant(
        "a tier deletes what another wants and lacks",
        _VERDICTS,
        "    names = demand.waiting(name, one, seen, hoped=hoped) if seen else ()",
        "    names = ()",
        f"{_TEST_DEMAND} -k holds_what",
    ),
    Mutant(
        "rules that keep for good count from the oldest verified",
        _VERDICTS,
        "        reasons = again.reasons if again.keep else demand.reasons(SPOOL, verdict.id)",
        "        reasons = ()",
        f"{_TEST_DEMAND} -k starts_at_the_oldest",
    ),
)
