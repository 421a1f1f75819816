"""Mutants of `tierd/events/`."""

from __future__ import annotations

from faults.rounds import Mutant

_NOTICES = "tierd/events/save_events.py"

MUTANTS = (
    Mutant(
        "a part that is observed before its hand-off is reported has no times",
        "tierd/events/first_seen.py",
        "        self._withheld = {part for part in came if part in self._persisting}\n",
        "        self._withheld = set()\n",
        "pytest tests/events/test_alerts.py -k left_to_its_hand_off",
    ),
    Mutant(
        "a part that the first observation shows while it is persisted is no event",
        "tierd/events/first_seen.py",
        "(part in self._persisting or not listed)",
        "not listed",
        "pytest tests/events/test_alerts.py -k during_the_first_look",
    ),
    Mutant(
        "receivers are told names as they are",
        "tierd/events/journal.py",
        "        why = printable(why)  # here,",
        "        why = why  # here,",
        "pytest tests/end_to_end/test_planted_names.py -k systemd",
    ),
    Mutant(
        "nobody tells of two launches",
        _NOTICES,
        "if not reported[run] <= self._beside.get(run, frozenset()):",
        "if False:",
        "pytest tests/end_to_end/test_two_launches.py -k both_are_warned",
    ),
    Mutant(
        "a rollback is told of at every look",
        _NOTICES,
        "        if why and self._rolled_back.get((tier, run)) != why:\n",
        "        if why:\n",
        "pytest tests/end_to_end/test_heads.py -k while_it_stays",
    ),
    Mutant(
        "a rollback that was told of is no problem for the check",
        "tierd/events/journal.py",
        "        if KINDS[what].stays:\n",
        "        if False:\n",
        "pytest tests/cli/test_status.py -k alert_is_one",
    ),
    Mutant(
        "nobody says whose names end pruning",
        _NOTICES,
        "for attempt in unvouched(inventory, tier, run):",
        "for attempt in ():",
        "pytest tests/cli/test_disown.py -k planted_name",
    ),
)
