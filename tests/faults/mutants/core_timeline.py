"""Mutants of `tierd/core/timeline/`."""

from __future__ import annotations

from faults.rounds import Mutant

_CANDIDATES = "tierd/core/timeline/candidates.py"
_HEAD = "tierd/core/timeline/head.py"
_LAUNCHES = "tierd/core/timeline/launches.py"
_RUN_VIEW = "tierd/core/timeline/run_view.py"
_TEST_CANDIDATES = "pytest tests/core/timeline/test_candidates.py"
_TEST_HEADS = "pytest tests/end_to_end/test_heads.py"
_TEST_LAUNCHES = "pytest tests/core/timeline/test_launches.py"

MUTANTS = (
    Mutant(
        "one attempt with two world sizes is one launch",
        _LAUNCHES,
        "(other.attempt, other.world) != (one.attempt, one.world)",
        "other.attempt != one.attempt",
        f"{_TEST_LAUNCHES} -k two_world_sizes",
    ),
    Mutant(
        "an encrypted head is of a newer tierd",
        _HEAD,
        "            if key_id := encrypted_with(data):\n",
        "            if key_id := None:\n",
        "pytest tests/cli/test_encrypted.py -k encrypted_not_newer",
    ),
    Mutant(
        "who hears no other rank is taken for rank 0",
        _CANDIDATES,
        "ranks = numbers if isolated is None else (isolated,)",
        "ranks = numbers",
        "pytest tests/client/restoring/test_missing_tier.py -k hears_no_other",
    ),
    Mutant(
        "a planted name in the place of a checkpoint that went hides that it went",
        _CANDIDATES,
        "        unusable &= hollow | set(timeline(",
        "        unusable &= set(timeline(",
        "corruption --only 32247",
        "is newer than",
    ),
    Mutant(
        "a look at the newest few is taken for one at everything",
        _CANDIDATES,
        "        if self.down_to is None:\n            return True\n",
        "        if self.down_to is None or True:\n            return True\n",
        "pytest tests/client/restoring/test_lazy_restore.py -k finds_what",
    ),
    Mutant(
        "names that cannot be read decide how many ranks there were",
        _CANDIDATES,
        "        hollow = {one for one in hollow if complete[one] != world}\n",
        "        hollow = set()\n",
        f"{_TEST_CANDIDATES} -k stop_nobody",
    ),
    Mutant(
        "a name of which nothing can be read decides what is newest",
        "tierd/core/timeline/chain.py",
        "    newest = max(origins or steps, default=None)\n",
        "    newest = max(steps, default=None)\n",
        f"{_TEST_HEADS} -k without_a_head",
    ),
    Mutant(
        "a head forgets what it said",
        _HEAD,
        "    steps = {attempt: one.newest for attempt, one in remembered.items()}\n",
        "    steps: dict[str, int | None] = {}\n",
        f"{_TEST_HEADS} -k never_goes_back",
    ),
    Mutant(
        "a rollback is followed and not told of",
        _HEAD,
        "    if seen is None or (there and there.counter >= seen.counter):\n",
        "    if seen is None or there:\n",
        f"{_TEST_HEADS} -k told_of_once",
    ),
    Mutant(
        "a head tells of a launch that nobody can have made",
        _HEAD,
        "    if any(int(one[:12], 16) >= LATEST_MS for one in head.launches):\n",
        "    if False:\n",
        f"{_TEST_HEADS} -k nobody_can_have_made",
    ),
    Mutant(
        "runs: a rollback loses nothing",
        "tierd/core/timeline/launch_steps.py",
        "max(0, max(before) - int(step)) if before else 0",
        "0",
        "pytest tests/cli/test_top.py -k one_answer_serves",
    ),
    Mutant(
        "runs: a rollback shrinks as retention deletes what it left behind",
        "tierd/core/timeline/launch_steps.py",
        "            before.append(known.newest)\n",
        "            pass\n",
        "pytest tests/core/timeline/test_launch_steps.py",
    ),
    Mutant(
        "another node's launch that goes on counts as ended",
        _LAUNCHES,
        "if newest.get(one, 0.0) > _launched(latest))",
        "if False)",
        f"{_TEST_LAUNCHES} -k spares_an_earlier_one",
    ),
    Mutant(
        "ranks of one launch that restored are taken for two launches",
        _LAUNCHES,
        "return any(other.rank == one.rank and (other.attempt",
        "return any((other.attempt",
        f"{_TEST_LAUNCHES} -k that_restored_are_not",
    ),
    Mutant(
        "the lease of a launch on another node never ends",
        _LAUNCHES,
        "return now_s - made[-1] > max(LEASE_S, _INTERVALS * between)",
        "return False",
        f"{_TEST_LAUNCHES} -k lease_of_a_launch",
    ),
    Mutant(
        "a launch that saves seldom counts as ended",
        _LAUNCHES,
        "max(LEASE_S, _INTERVALS * between)",
        "LEASE_S",
        f"{_TEST_LAUNCHES} -k lease_of_a_launch",
    ),
    Mutant(
        "two nodes that save one attempt are not told",
        _LAUNCHES,
        "if any(one.attempt == other and _is_foreign(inventory, one.rank, seen) for one in here):",
        "if False:",
        f"{_TEST_LAUNCHES} -k same_attempt_is_seen",
    ),
    Mutant(
        "what a node gave up is taken for another node's",
        _LAUNCHES,
        "return newest is not None and newest.created < theirs.created",
        "return True",
        f"{_TEST_LAUNCHES} -k gave_up",
    ),
    Mutant(
        "a launch that saves on another node is not told of",
        _LAUNCHES,
        "            found |= dict.fromkeys(rivals, SPOOL) | ({other: name} if rivals else {})\n",
        "",
        "pytest tests/spool/test_leases.py -k array_tasks_on",
    ),
    Mutant(
        "ranks of one launch that changed nodes count as rivals",
        _LAUNCHES,
        "            if other in local:\n                continue\n",
        "",
        "pytest tests/spool/test_leases.py -k 'exchanged or array_tasks_on'",
    ),
    Mutant(
        "what was whole and is left in part may be begun anew",
        _RUN_VIEW,
        "one not in some or (is_complete(ranks) and not inventory.has_whole(one))",
        "one not in some",
        f"{_TEST_CANDIDATES} -k left_in_part",
    ),
    Mutant(
        "what is older than the newest few is called gone",
        _RUN_VIEW,
        "named(run, view.gone) if one >= oldest)",
        "named(run, view.gone))",
        "pytest tests/client/restoring/test_lazy_restore.py -k is_not_gone",
    ),
    Mutant(
        "what vanished from every place is not missed",
        _RUN_VIEW,
        "    if lost := inventory.gone(run):\n",
        "    if (lost := inventory.gone(run)) and False:\n",
        f"{_TEST_HEADS} -k lost_everything_but_its_head",
    ),
    Mutant(
        "a name of another number of ranks hides the one that can be read",
        _RUN_VIEW,
        "            size = min([size for size in sizes if size not in bare] or sizes)\n",
        "            size = min(sizes)\n",
        f"{_TEST_CANDIDATES} -k stop_nobody",
    ),
    Mutant(
        "one number of ranks that cannot be read hides another",
        _RUN_VIEW,
        "_pairs(found) for size, found in sorted(ranks.items()) if size not in sizes}\n            parts",
        "_pairs(found) for size, found in sorted(ranks.items())}\n            parts",
        f"{_TEST_CANDIDATES} -k stop_nobody",
    ),
    Mutant(
        "every rank's metrics speak for a checkpoint",
        _RUN_VIEW,
        "            if part.rank == 0 and facts:\n",
        "            if facts:\n",
        "pytest tests/test_writers_on_nodes.py -k rank_metrics",
    ),
    Mutant(
        "the head that a tier shows is remembered before it is compared",
        "tierd/daemon/reconciling/records.py",
        "        for run in saved:  # before this node's own heads adopt the tier's state\n",
        "        await self._remember(tier, saved)\n        for run in saved:\n",
        f"{_TEST_HEADS} -k done_first",
    ),
    Mutant(
        "of two tiers that are done together one head is forgotten",
        "tierd/daemon/reconciling/records.py",
        "        async with self._remembering:\n",
        "        if True:\n",
        "pytest tests/daemon/reconciling/test_records.py",
    ),
)
