"""Mutants of `tierd/cli/acting/`."""

from __future__ import annotations

from faults.rounds import Mutant

_ACT = "tierd/cli/acting/act.py"
_DISOWN = "tierd/cli/acting/disown.py"
_TEST_DISOWN = "pytest tests/cli/test_disown.py"

MUTANTS = (
    Mutant(
        "a prune takes what its first batch deleted for a loss",
        "tierd/cli/acting/prune.py",
        "others = all_going.difference(some)\n",
        "others = frozenset(going)\n",
        "pytest tests/cli/test_cli.py -k more_than_a_batch",
    ),
    Mutant(
        "a prune takes for a loss what the daemon deleted of a later batch",
        "tierd/cli/acting/prune.py",
        "others = all_going.difference(some)\n",
        "others = gone\n",
        "pytest tests/cli/test_cli.py -k deleted_first",
    ),
    Mutant(
        "a dry run says that what a flush protects would go",
        "tierd/cli/acting/prune.py",
        "await being_flushed(stores[name], one) if dry_run else {}",
        "{}",
        "pytest tests/cli/test_cli.py -k holds_it_back",
    ),
    Mutant(
        "a dry run takes an intent that is over for a flush",
        "tierd/daemon/tiers/intents.py",
        'if not (one and is_over(one[2], one[3], "", timings))]',
        "]",
        "pytest tests/cli/test_cli.py -k holds_it_back",
    ),
    Mutant(
        "a drain that left something counts as done",
        _ACT,
        "        raise typer.Exit(EXIT_UNFINISHED)  # the log says what is left",
        "        pass",
        "pytest tests/cli/test_ending.py -k sigterm_with_parts",
    ),
    Mutant(
        "a check does not read what a receiver refers to",
        _ACT,
        "        stores, _ = await open_all(config, stack, trial=True)",
        "        stores = await open_tiers(config, stack, trial=True)",
        "pytest tests/cli/test_config_check.py -k one_verdict",
    ),
    Mutant(
        "a tier that takes nothing passes the check",
        _ACT,
        'any(one.mode in (None, "read-only") for one in reached.values()):',
        "any(one.mode is None for one in reached.values()):",
        "pytest tests/daemon/tiers/test_reach.py -k command",
    ),
    Mutant(
        "disown takes a launch that lives on this node",
        _DISOWN,
        "    if leases := leases_here(run, attempt):\n",
        "    if leases := {}:\n",
        f"{_TEST_DISOWN} -k lives_here",
    ),
    Mutant(
        "a hasty yes deletes what can be read",
        _DISOWN,
        "    if readable:\n",
        "    if False:\n",
        f"{_TEST_DISOWN} -k might_read",
    ),
    Mutant(
        "a launch of this node is disowned, and sent again",
        _DISOWN,
        "if where.spool.saved_stamp(run, attempt) or any(_can_be_read(where.spool, part) for part in own):",
        "if False:",
        f"{_TEST_DISOWN} -k of_this_node",
    ),
    Mutant(
        "a person puts a mark that nobody can delete",
        "tierd/cli/acting/prune.py",
        'await guard.check(f"{pruning_prefix(one)}none")',
        "pass",
        "pytest tests/daemon/tiers/test_append_only.py -k leaves_no_mark",
    ),
    Mutant(
        "nobody removes what a killed import left",
        "tierd/cli/acting/import_spool.py",
        "                shutil.rmtree(left)\n",
        "                pass\n",
        "pytest tests/cli/test_import_spool.py -k killed_import",
    ),
    Mutant(
        "an import removes the spool of one that is at work",
        "tierd/cli/acting/import_spool.py",
        "            with spool.lock():  # refuses one that is in use\n",
        "            if True:\n",
        "pytest tests/cli/test_import_spool.py -k killed_import",
    ),
    Mutant(
        "an import removes what another account put into /tmp",
        "tierd/cli/acting/import_spool.py",
        "or not ours or",
        "or",
        "pytest tests/cli/test_import_spool.py -k another_accounts",
    ),
)
