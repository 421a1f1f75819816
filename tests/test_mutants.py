"""The mutants fit the code as it is, because otherwise only a round of sabotage notices one that no longer does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from faults import mutants
from faults.sabotage import KITS, ROOT, collect, misfit, stride


def test_no_two_mutants_have_one_name():
    assert [name for name, number in Counter(mutant.name for mutant in collect()).items() if number > 1] == []


def test_each_mutant_fits_one_place_and_changes_it():
    assert [why for mutant in collect() if (why := misfit(mutant, (ROOT / mutant.path).read_text()))] == []


def test_a_mutant_that_fits_no_place_or_two_or_changes_nothing_is_a_misfit():
    one = mutants.PLAIN[0]
    assert misfit(one, one.old) is None
    assert misfit(one, "") and misfit(one, one.old * 2)
    assert misfit(replace(one, new=one.old), one.old)


def test_a_full_round_plays_each_mutant_once_and_a_short_one_starts_all_over_the_list():
    for number in (1, 2, 7, 846, 847):
        assert {seed * stride(number) % number for seed in range(number)} == set(range(number))
    assert len({seed * stride(847) % 847 * 4 // 847 for seed in range(6)}) == 4


def test_what_is_to_find_a_mutant_exists():
    for mutant in collect():
        what, *arguments = mutant.by.split()
        named = [word.split("::")[0] for word in arguments if word.startswith("tests/")]
        assert named if what == "pytest" else what in KITS, mutant
        assert [path for path in named if not (ROOT / path).exists()] == [], mutant
