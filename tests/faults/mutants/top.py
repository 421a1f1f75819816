"""Mutants of the modules at the top of `tierd/`."""

from __future__ import annotations

from faults.rounds import Mutant

MUTANTS = (
    Mutant(
        "a lane of top takes the whole width of a pipe",
        "tierd/cli/reading/frame.py",
        "min(width - 2, _LINE_WIDTH)",
        "width - 2",
        "pytest tests/cli/test_top.py -k without_a_width",
    ),
    Mutant(
        "a lane of top ends at the newest checkpoint that retention left",
        "tierd/cli/reading/frame.py",
        'max(launch["last_step"], *left_at) if left_at',
        'launch["last_step"] if left_at',
        "pytest tests/cli/test_top.py -k lane_reaches",
    ),
    Mutant(
        "an error is not imported from the package",
        "tierd/__init__.py",
        '    "TornSnapshot": "tierd.core.errors",\n',
        "",
        "pytest tests/test_imports.py -k users_catch",
    ),
    Mutant(
        "what the locale cannot write ends a command",
        "tierd/__main__.py",
        'errors="backslashreplace"',
        'errors="strict"',
        "pytest tests/end_to_end/test_surroundings.py -k plain_c_locale",
    ),
    Mutant(
        "the log shows names as they are",
        "tierd/logs.py",
        "        logging.getLogger(name).addFilter(escape)",
        "        pass",
        "pytest tests/end_to_end/test_planted_names.py -k every_logger",
    ),
    Mutant(
        "a line of a message gives itself a priority",
        "tierd/logs.py",
        'return "\\n".join(f"<{priority(level)}>{line}" for line in text.split("\\n"))',
        'return f"<{priority(level)}>{text}"',
        "pytest tests/test_logs.py -k nothing_else",
    ),
)
