"""Mutants of `tierd/check/`."""

from __future__ import annotations

from faults.rounds import Mutant

_FINAL = "tierd/check/final.py"
_TEST_CHECK_RESUME = "pytest tests/check/test_check_resume.py"
_TEST_STATES = "pytest tests/check/test_states.py"

MUTANTS = (
    Mutant(
        "gradients that a loop clears are a cause",
        "tierd/check/evidence.py",
        'one.kind != "gradients" or one.path in added_to]',
        "True]",
        "pytest tests/check/test_evidence.py -k clears_before",
    ),
    Mutant(
        "an entry that training changes is called lost where another one explains it",
        "tierd/check/finding.py",
        "return self.lost or not (self.moved or self.late)",
        "return True",
        "pytest tests/check/test_evidence.py -k training_changes",
    ),
    Mutant(
        "a generator that nobody draws from explains a loss",
        "tierd/check/evidence.py",
        " and one.path not in idle and ",
        " and ",
        "pytest tests/check/test_evidence.py -k idle",
    ),
    Mutant(
        "a state on which uninterrupted runs do not agree is put down to the resume",
        "tierd/check/causes.py",
        "            if one.path in shaky:\n",
        "            if False:\n",
        "pytest tests/check/test_evidence.py -k do_not_agree",
    ),
    Mutant(
        "a buffer that is filled again is only in another order",
        "tierd/check/buffers.py",
        " and 2 * got < left",
        " and False",
        "pytest tests/check/test_evidence.py -k filled_again",
    ),
    Mutant(
        "a rate that is set before the first step is no cause",
        "tierd/check/evidence.py",
        '(what == "later loss" and one.kind in _SET_BY_STEPS)',
        "False",
        "pytest tests/check/test_evidence.py -k set_before",
    ),
    Mutant(
        "a variable of a stream that has not begun is a cause",
        "tierd/check/evidence.py",
        'if now is None and kind == "data" and path in saved_evidence:',
        "if False:",
        "pytest tests/check/test_evidence.py -k not_begun",
    ),
    Mutant(
        "a generator in a closure is not looked at",
        "tierd/check/insides.py",
        "        return [cell.cell_contents]\n",
        "        return []\n",
        "pytest tests/check/test_evidence.py -k closures",
    ),
    Mutant(
        "a rank that saved once is blamed for beginning anew",
        "tierd/check/beginnings.py",
        "saved[rank] > 1",
        "saved[rank] > 0",
        "pytest tests/check/test_compare.py -k may_have_died",
    ),
    Mutant(
        "a small difference is never of the generator that was drawn from",
        "tierd/check/causes.py",
        "used = steady & _drawn(expected, begun, step)",
        "used: set[str] = set()",
        "pytest tests/check/test_compare.py -k small_difference",
    ),
    Mutant(
        "a state past the last step is taken for its own",
        "tierd/check/child.py",
        '_capture(number, "end")',
        '_capture(self._steps, "end")',
        f"{_TEST_CHECK_RESUME} -k past_the_last",
    ),
    Mutant(
        "an earlier moment stands in for the last",
        _FINAL,
        ' if key[1] == "end"), default=None)',
        "), default=None)",
        f"{_TEST_STATES} -k stands_in",
    ),
    Mutant(
        "values of saves of other steps are compared",
        _FINAL,
        " and step != other_step)",
        " and False)",
        f"{_TEST_STATES} -k same_form",
    ),
    Mutant(
        "an entry of the state that only one run has is no difference",
        _FINAL,
        "sorted(ours.keys() ^ theirs.keys())",
        "()",
        f"{_TEST_STATES} -k only_one_run",
    ),
    Mutant(
        "what two launches from the start do not agree on is a finding",
        _FINAL,
        "path not in shaky and not any(",
        "not any(",
        f"{_TEST_STATES} -k do_not_agree",
    ),
    Mutant(
        "an entry that is right again at the end was never wrong",
        _FINAL,
        'at not in ("step", "save")',
        "True",
        f"{_TEST_STATES} -k right_at_the_end",
    ),
    Mutant(
        "a launch is stopped before its last state is there",
        "tierd/check/launches.py",
        "        if not rank.seen.ended:",
        "        if (rank.seen.last or 0) < self.steps:",
        f"{_TEST_CHECK_RESUME} -k however_long",
    ),
    Mutant(
        "what an uninterrupted run does to its samples as well is a leak",
        "tierd/check/leakage.py",
        "count > max(expected[one], 1)",
        "count > 1",
        "pytest tests/check/test_leakage.py -k uninterrupted_run_does",
    ),
    Mutant(
        "what was restored is taken for what is trained with",
        "tierd/check/states.py",
        'form if key in kept else f"other {form}"',
        "form",
        f"{_TEST_CHECK_RESUME} -k restores_into",
    ),
)
