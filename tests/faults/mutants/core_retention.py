"""Mutants of `tierd/core/retention/`."""

from __future__ import annotations

from faults.rounds import Mutant

_POLICIES = "tierd/core/retention/policies.py"
_POLICY = "tierd/core/retention/policy.py"
_TEST_RUN_POLICIES = "pytest tests/daemon/tiers/test_run_policies.py"

MUTANTS = (
    Mutant(
        "two launches with wrong clocks make a checkpoint a year old",
        "tierd/core/retention/ages.py",
        "_WRONG = 2  #",
        "_WRONG = 1  #",
        "pytest tests/core/retention/test_ages.py -k two_wrong_clocks",
    ),
    Mutant(
        "a recorded default wins over what was given",
        _POLICIES,
        'if one.given != "default" and one.retention)]',
        "if one.retention)]",
        f"{_TEST_RUN_POLICIES} -k default_is_recorded",
    ),
    Mutant(
        "a policy that cannot be read is none",
        _POLICIES,
        "if one.retention is None]\n    return lost",
        "if False]\n    return lost",
        f"{_TEST_RUN_POLICIES} -k cannot_be_read",
    ),
    Mutant(
        "a daemon without a configuration goes by its default",
        _POLICIES,
        "    return merged(given) or merged(",
        "    return merged(own) or DEFAULT or merged(",
        f"{_TEST_RUN_POLICIES} -k obeys_what_lies_there",
    ),
    Mutant(
        "what the timeline alone keeps is judged as what goes",
        "tierd/core/retention/ranking.py",
        "(*self._counted[-count:], *self._on_path[-count:])}",
        "self._counted[-count:]}",
        "pytest tests/core/planning/test_planner.py -k timeline_alone",
    ),
    Mutant(
        "merged policies keep the least",
        _POLICY,
        "keep_last=max(one.keep_last for one in found)",
        "keep_last=min(one.keep_last for one in found)",
        "pytest tests/core/retention/test_policy.py -k merg",
    ),
    Mutant(
        "rules are sorted before anybody looks what they are",
        _POLICY,
        "        for best in map(_best, _several(self.keep_best)):\n",
        "        for best in _several(self.keep_best):\n",
        "pytest tests/end_to_end/test_run_policies.py -k each_argument",
    ),
    Mutant(
        "a later launch retires what an earlier one that lives has saved",
        "tierd/core/retention/ranking.py",
        "            if alone.keep:",
        "            if False:",
        "pytest tests/core/timeline/test_launches.py -k says_why_it_stays",
    ),
    Mutant(
        "the quick answer forgets the launches that live beside a later one",
        "tierd/core/retention/ranking.py",
        "return frozenset(found).union(*(alone.kept for alone in self._alone.values()))",
        "return frozenset(found)",
        "pytest tests/core/planning/test_planner.py -k what_each_verdict_keeps",
    ),
    Mutant(
        "an encrypted policy is damage where there is no key",
        "tierd/core/retention/stored.py",
        "if key_id := encrypted_with(data):",
        'if key_id := "":',
        f"{_TEST_RUN_POLICIES} -k another_key_left",
    ),
)
