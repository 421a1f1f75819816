"""Mutants of `tierd/reading/`."""

from __future__ import annotations

from faults.rounds import Mutant

_COMMANDS = "tierd/reading/commands.py"
_FOLLOW = "tierd/reading/follow.py"
_TEST_FOLLOW = "pytest tests/reading/test_follow.py"
_TEST_READER = "pytest tests/reading/test_reader.py"

MUTANTS = (
    Mutant(
        "a follower keeps the partial download of a checkpoint that is gone",
        _COMMANDS,
        "not (hidden and (one in due or self.tiers.unreached))",
        "not hidden",
        f"{_TEST_FOLLOW} -k 'may_be_due and False'",
    ),
    Mutant(
        "a follower removes what a silent tier may have",
        _COMMANDS,
        "(one in due or self.tiers.unreached)",
        "one in due",
        f"{_TEST_FOLLOW} -k 'may_be_due and True'",
    ),
    Mutant(
        "a full disk ends a follower",
        _COMMANDS,
        "except (*UNFIT, SpoolFull) as error:",
        "except UNFIT as error:",
        f"{_TEST_FOLLOW} -k full_disk",
    ),
    Mutant(
        "a follower delivers parts of two histories",
        _FOLLOW,
        "        check_origin(copies.contents()[0], origins)\n",
        "        pass\n",
        f"{_TEST_FOLLOW} -k 'two_histories and step'",
    ),
    Mutant(
        "a reader reads parts of two histories",
        "tierd/reading/tiers.py",
        "        check_origin(found, self._origins)",
        "        pass",
        f"{_TEST_READER} -k histor",
    ),
    Mutant(
        "a command's status is not recorded",
        _COMMANDS,
        '        if status == "0":',
        "        if not status:",
        f"{_TEST_FOLLOW} -k gets_each",
    ),
    Mutant(
        "any status of a command counts as delivered",
        _COMMANDS,
        '        if status == "0":',
        "        if status:",
        f"{_TEST_FOLLOW} -k that_fails",
    ),
    Mutant(
        "a command that outlives its follower does not hold the lock",
        _COMMANDS,
        "            pass_fds=[delivered.lock],",
        "            pass_fds=[],",
        "pytest tests/reading/test_follow_killed.py -k outlived",
    ),
    Mutant(
        "Ctrl-C kills the keeper of a command",
        _COMMANDS,
        "        process.wait()\n",
        "        try:\n            process.wait()\n"
        "        except KeyboardInterrupt:\n            process.kill()\n            raise\n",
        "pytest tests/reading/test_follow_killed.py -k outlived",
    ),
    Mutant(
        "a delivery in a loop is not recorded",
        _FOLLOW,
        "            delivered.add(name_of(tiers.run, listed))",
        "            pass",
        f"{_TEST_FOLLOW} -k over_restarts",
    ),
    Mutant(
        "a follower lists the tiers without a pause",
        _FOLLOW,
        "        time.sleep(max(0.0, begun + period_s - time.monotonic()))",
        "        time.sleep(0)",
        f"{_TEST_FOLLOW} -k once_in_a_period",
    ),
    Mutant(
        "a late checkpoint passes for the latest",
        _FOLLOW,
        "        whole = [one for one in whole[-1:] if newest is None or name_of(run, one) > newest]",
        "        whole = [one for one in whole if name_of(run, one) not in delivered][-1:]",
        f"{_TEST_FOLLOW} -k only_the_latest",
    ),
    Mutant(
        "a reader calls corrupt what was pruned",
        "tierd/reading/gone.py",
        "        there = tiers.has(candidate.checkpoint, candidate.world)",
        "        there = True",
        f"{_TEST_READER} -k pruned_while",
        "Skipped(step=4",
    ),
    Mutant(
        "a reader ignores ignore_prefixes",
        "tierd/reading/restoring.py",
        "        tree = with_names_of(into, tree) if ignore_prefixes else tree\n",
        "",
        "pytest tests/state/kinds/test_wrapped_names.py -k names_the_argument",
    ),
    Mutant(
        "entries that differ between ranks pass for the same",
        "tierd/reading/shared.py",
        "    if name not in one.entries or one.entries[name] != other.entries.get(name):",
        "    if name not in one.entries:",
        f"{_TEST_READER} -k every_bit",
        "DID NOT RAISE",
    ),
    Mutant(
        "a reader steps back where a tier did not answer",
        "tierd/reading/tiers.py",
        "raise copies.lost(",
        "raise ObjectNotFound(",
        f"{_TEST_READER} -k never_a_reason",
        "vanished",
    ),
)
