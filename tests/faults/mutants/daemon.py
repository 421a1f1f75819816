"""Mutants of `tierd/daemon/`."""

from __future__ import annotations

from faults.rounds import Mutant

_RECONCILE = "tierd/daemon/reconcile.py"
_SERVICE = "tierd/daemon/service.py"
_SPOOL_OBSERVER = "tierd/daemon/spool_observer.py"
_TEST_RELOAD = "pytest tests/daemon/test_reload.py"
_TEST_SPOOL_OBSERVER = "pytest tests/daemon/test_spool_observer.py"

MUTANTS = (
    Mutant(
        "notes of launches that live are swept",
        "tierd/daemon/rank_notes.py",
        "            alive.add(launch)\n",
        "            pass\n",
        "pytest tests/client/ranks/test_ranks_on_nodes.py -k were_killed_are_swept",
    ),
    Mutant(
        "notes of ranks that were killed stay for ever",
        "tierd/daemon/rank_notes.py",
        "        if since and abs(now_ms - int(since[1], 16)) < _STALE_MS:\n",
        "        if since:\n",
        "pytest tests/client/ranks/test_ranks_on_nodes.py -k were_killed_are_swept",
    ),
    Mutant(
        "a deletion that fails has its turn again before a flush",
        "tierd/daemon/reconciling/worker_loop.py",
        "                    worker.sent = isinstance(action, Flush)  # first, so a failing prune blocks no flush\n"
        "                    await self.act(action)\n",
        "                    await self.act(action)\n                    worker.sent = isinstance(action, Flush)\n",
        "pytest tests/daemon/transfer/test_slow_tier.py -k holds_up_no_flush",
    ),
    Mutant(
        "what a tier is seen to hold frees the spool only at the next rescan",
        _RECONCILE,
        "self.workers[SPOOL].wake.set()",
        "pass",
        "pytest tests/daemon/test_pause.py -k paused_a_tier_is_not_pruned",
    ),
    Mutant(
        "a tier to be filled waits although another one has shown what it has",
        _RECONCILE,
        "                if backfill.runs:\n                    self.wake()",
        "                if False:\n                    self.wake()",
        "pytest tests/daemon/transfer/test_backfill.py -k another_one_has_answered",
    ),
    Mutant(
        "a reload changes the spool",
        "tierd/daemon/reload.py",
        "        if config.spool != reconciler.config.spool:",
        "        if False:",
        f"{_TEST_RELOAD} -k cannot_be_used",
    ),
    Mutant(
        "a restore is cut off from its stores by a reload",
        "tierd/daemon/reload.py",
        "        if working:\n",
        "        if False:\n",
        f"{_TEST_RELOAD} -k under_way",
    ),
    Mutant(
        "rm deletes chunks before the manifests that name them",
        "tierd/daemon/remove.py",
        'for prefix in (*(name(run) for name in names), f"{run}/"):',
        'for prefix in (f"{run}/",):',
        "pytest tests/cli/test_space.py -k manifests_go",
    ),
    Mutant(
        "a reload may nest tiers",
        _SERVICE,
        "    await check_apart(config)\n    notifier",
        "    notifier",
        f"{_TEST_RELOAD} -k cannot_be_used_changes",
    ),
    Mutant(
        "an idle daemon waits for a trainer that nobody announced",
        _SERVICE,
        "    while await_trainer and not control.seen",
        "    while not control.seen",
        "pytest tests/daemon/test_fs_events.py -k no_trainer_started",
    ),
    Mutant(
        "a daemon's threads take all of a limited address space",
        _SERVICE,
        "    spare_address_space()\n",
        "",
        "pytest tests/end_to_end/test_surroundings.py -k 700_mb",
    ),
    Mutant(
        "what is not taken does not show in the exit code",
        _SERVICE,
        "                failure, left = intake.failure, intake.refused\n",
        "                failure = intake.failure\n",
        "pytest tests/watching/test_watch_ends.py -k everything",
    ),
    Mutant(
        "log: a daemon's log grows for ever",
        _SERVICE,
        "        stack.enter_context(bounded(spool.control))\n",
        "",
        "pytest tests/daemon/test_own_log.py -k the_daemon_bounds",
    ),
    Mutant(
        "the record of a commit is not read again when it changes",
        "tierd/spool/records.py",
        "before is None or before[0] != changed_ns",
        "before is None",
        f"{_TEST_SPOOL_OBSERVER} -k 'many_ranks or whatever'",
    ),
    Mutant(
        "the records of all ranks are read at each observation",
        "tierd/spool/records.py",
        "before is None or before[0] != changed_ns",
        "True",
        f"{_TEST_SPOOL_OBSERVER} -k many_ranks",
    ),
    Mutant(
        "the heads of all finished runs are read at each observation",
        "tierd/spool/records.py",
        "if before is None or before[0] != stamp or",
        "if True or",
        f"{_TEST_SPOOL_OBSERVER} -k heads_of_finished",
    ),
    Mutant(
        "a head is read once, whatever becomes of it",
        "tierd/spool/records.py",
        "before[0] != stamp or",
        "False or",
        f"{_TEST_SPOOL_OBSERVER} -k heads_of_finished",
    ),
    Mutant(
        "a directory that has just changed is not read again",
        _SPOOL_OBSERVER,
        "settled = now_ns - stamp_ns > NEAR_NS and not defects",
        "settled = True",
        f"{_TEST_SPOOL_OBSERVER} -k same_tick",
    ),
    Mutant(
        "what changed in a checkpoint's directory is not seen",
        _SPOOL_OBSERVER,
        "            if stamp_ns and stamp_ns == known.stamp_ns and not full and",
        "            if stamp_ns and known.stamp_ns and not full and",
        f"{_TEST_SPOOL_OBSERVER} -k whatever",
    ),
    Mutant(
        "a run's newest part is remembered after it was removed",
        _SPOOL_OBSERVER,
        "        if gone:  # perhaps",
        "        if False:  # perhaps",
        f"{_TEST_SPOOL_OBSERVER} -k whatever",
    ),
    Mutant(
        "a checkpoint that lost a part is passed over by sparing looks",
        _SPOOL_OBSERVER,
        "again.union(is_open)",
        "is_open",
        f"{_TEST_SPOOL_OBSERVER} -k lost_a_part",
    ),
    Mutant(
        "a sparing look passes over what this process took away",
        _SPOOL_OBSERVER,
        " and removals == self._removals",
        "",
        f"{_TEST_SPOOL_OBSERVER} -k whatever_tierd_does",
    ),
    Mutant(
        "a restore counts as a save",
        _SPOOL_OBSERVER,
        "if attempt not in marks.get(run, ()))",
        "if run in marks and attempt not in marks[run])",
        "pytest tests/daemon/tiers/test_run_policies.py -k beside_a_reader",
    ),
    Mutant(
        "a full disk that takes a run's last copy ends what its node had to do of it",
        _SPOOL_OBSERVER,
        "            launches=own,\n",
        "",
        "pytest tests/daemon/test_spool_space.py -k last_copy_went",
    ),
    Mutant(
        "a spool that nothing else is left in remembers nothing",
        _SPOOL_OBSERVER,
        "            heads=heads(control, self._heads),\n",
        "            heads={run: one for run, one in heads(control).items() if run in newest | own},\n",
        "pytest tests/end_to_end/test_heads.py -k whatever_else",
    ),
    Mutant(
        "what is not taken does not show in the status",
        "tierd/daemon/reports/problems.py",
        "return (*stayed, *problems(found), *lasting)",
        "return problems(found)",
        "pytest tests/watching/test_watch_ends.py -k status",
    ),
    Mutant(
        "status: a quarantined copy is said to be in the spool, wherever it was",
        "tierd/daemon/reports/problems.py",
        'Problem("warning", place, f"{what} quarantined',
        'Problem("warning", SPOOL, f"{what} quarantined',
        "pytest tests/cli/test_status.py -k exits_by_severity",
    ),
    Mutant(
        "a supervisor that does not read holds the daemon",
        "tierd/daemon/systemd.py",
        'connection.settimeout(_PATIENCE if state.startswith("READY=1") else 0.0)',
        "pass",
        "pytest tests/daemon/test_fs_events.py -k supervisor_that_does_not_read",
    ),
    Mutant(
        "the word that the daemon is ready is dropped while systemd is busy",
        "tierd/daemon/systemd.py",
        '_PATIENCE if state.startswith("READY=1") else 0.0',
        "0.0",
        "pytest tests/daemon/test_fs_events.py -k ready_waits",
    ),
    Mutant(
        "a line feed in a status is another message to systemd",
        "tierd/daemon/systemd.py",
        "printable(state).encode()",
        "state.encode()",
        "pytest tests/end_to_end/test_planted_names.py -k systemd",
    ),
    Mutant(
        "a short outage is waited out like a long one",
        "tierd/daemon/tier_worker.py",
        "longest = min(max(_SOON, (self.now() - self._since) / 4), self._timings.backoff_s)",
        "longest = self._timings.backoff_s",
        "pytest tests/daemon/test_tier_worker.py -k after_an_outage",
    ),
    Mutant(
        "what a refusal of the place met rests like what is refused for itself",
        "tierd/daemon/tier_worker.py",
        "stuck_s if what in self._off else min(stuck_s, _FIRST)",
        "stuck_s",
        "pytest tests/daemon/test_tier_worker.py -k failed_once",
    ),
)
