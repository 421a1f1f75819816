"""Mutants of `tierd/cli/`."""

from __future__ import annotations

from faults.rounds import Mutant

_TABLES = "tierd/cli/tables.py"
_TEST_PLANTED_NAMES = "pytest tests/end_to_end/test_planted_names.py"

MUTANTS = (
    Mutant(
        "that there are no more threads is a traceback",
        "tierd/cli/__init__.py",
        "if not errors.is_exhausted(error):",
        "if True:",
        "pytest tests/end_to_end/test_surroundings.py -k one_line",
    ),
    Mutant(
        "a step that is unknown is answered with nothing",
        "tierd/cli/known.py",
        '    there = steps_there(step, steps) if step is not None else ""\n',
        '    there = ""\n',
        "pytest tests/cli/test_known.py -k unknown_step",
    ),
    Mutant(
        "layout: a line may be wider than the terminal",
        "tierd/cli/layout.py",
        "    if _width(cell) <= width:\n        return [cell]\n",
        "    return [cell]\n",
        "pytest tests/cli/test_layout.py -k too_wide_and_no_text",
    ),
    Mutant(
        "layout: each copy repeats its checkpoint",
        "tierd/cli/layout.py",
        "        found += name if name != before else []\n",
        "        found += name\n",
        "pytest tests/cli/test_layout.py -k name_their_thing_once",
    ),
    Mutant(
        "progress: nothing is shown where nothing is a terminal",
        "tierd/cli/progress.py",
        "                complain(self.line())\n",
        "                pass\n",
        "pytest tests/cli/test_progress.py -k elsewhere",
    ),
    Mutant(
        "tables show names as they are",
        _TABLES,
        "[[*map(printable, row)] for row in rows]",
        "[[*row] for row in rows]",
        f"{_TEST_PLANTED_NAMES} -k no_command",
    ),
    Mutant(
        "lines show names as they are",
        _TABLES,
        "[printable(one) if isinstance(one, str) else one for one in objects]",
        "objects",
        f"{_TEST_PLANTED_NAMES} -k no_command",
    ),
    Mutant(
        "names are markup",
        _TABLES,
        "markup=False, emoji=False",
        "emoji=False",
        f"{_TEST_PLANTED_NAMES} -k no_command",
    ),
    Mutant(
        "JSON shows names as they are",
        _TABLES,
        "printable_json(msgspec.json.format(data, indent=2).decode())",
        "msgspec.json.format(data, indent=2).decode()",
        f"{_TEST_PLANTED_NAMES} -k no_command",
    ),
)
