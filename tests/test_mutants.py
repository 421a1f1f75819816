"""The mutants fit the code as it is, because otherwise only a round of sabotage notices one that no longer does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

from _pytest.mark.expression import Expression
from faults import mutants
from faults.sabotage import KITS, ROOT, collect, misfit, stride


def test_no_two_mutants_have_one_name():
    assert [name for name, number in Counter(mutant.name for mutant in collect()).items() if number > 1] == []


def test_each_mutant_fits_one_place_and_changes_it():
    assert [why for mutant in collect() if (why := misfit(mutant, (ROOT / mutant.path).read_text()))] == []


def test_no_mutant_is_red_only_because_it_is_no_program(tmp_path):
    """A name that is defined nowhere, or a line that cannot be parsed, makes any test red, whatever that looks for."""
    for number, mutant in enumerate(collect()):
        if mutant.path.endswith(".py"):
            wrong = (ROOT / mutant.path).read_text().replace(mutant.old, mutant.new)
            (tmp_path / f"{number}_{Path(mutant.path).name}").write_text(wrong)
    rules = ["--isolated", "--no-cache", "--target-version=py311", "--select=F821,F822,F823", "--output-format=concise"]
    done = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, tmp_path], capture_output=True, text=True)
    names = [mutant.name for mutant in collect()]
    found = re.findall(r"(\d+)_\w+\.py:\d+:\d+: (.+)", done.stdout)
    assert [(names[int(number)], why) for number, why in found] == []
    assert done.returncode == 0, done.stderr


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


def test_what_is_to_find_a_mutant_selects_a_test():
    """A test whose name or parameters changed is not selected any more, which only a round of sabotage would notice."""
    named = {mutant.by: selection(mutant.by) for mutant in collect() if mutant.by.startswith("pytest ")}
    files = sorted({path.split("::")[0] for paths, _ in named.values() for path in paths})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert len(listed) > len(files), listed[-10:]
    tests: dict[str, list[str]] = defaultdict(list)
    for line in listed:
        tests[line.split("::")[0]].append(line)

    def selects(paths: list[str], words: str) -> bool:
        ids = [one for path in paths for one in tests[path.split("::")[0]] if one.startswith(path)]
        chosen = Expression.compile(words)
        names = [[Path(one.split("::")[0]).name, *one.split("::")[1:]] for one in ids]
        return any(
            chosen.evaluate(lambda word, own=own: any(word.lower() in name.lower() for name in own)) for own in names
        )

    assert [by for by, (paths, words) in named.items() if not selects(paths, words)] == []


def selection(by: str) -> tuple[list[str], str]:
    """The files or tests that a command line of pytest names, and its expression of `-k`."""
    arguments = shlex.split(by)[1:]
    words = arguments[arguments.index("-k") + 1] if "-k" in arguments else "test"
    return [word for word in arguments if word.startswith("tests/")], words
