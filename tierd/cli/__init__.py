"""The command line: typer for the grammar, rich for the tables, JSON for programs.

Law: every error ends in one line on stderr and an exit code that the README lists; a traceback is a bug.
"""

from __future__ import annotations

import logging
import sys

import typer

from tierd.cli import act, advise, bench, check, pause, read
from tierd.core import errors
from tierd.core.wire import EXIT_HELD

app = typer.Typer(
    name="tierd",
    help="Async tiered checkpoint storage: verified, retained, restored.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.callback()(lambda: None)  # or typer would drop the command's name while there is only one
act.register(app)
read.register(app)
pause.register(app)
advise.register(app)
bench.register(app)
check.register(app)

EXIT_CODES: dict[int, str] = {
    0: "done; what was asked about is sound",
    1: "an unexpected failure: a bug, or an error of the operating system",
    2: "the command line was not understood",
    3: "bad input: configuration, URL, name, step, a spool that cannot be used, a loop that fails by itself",
    4: "not found: no such checkpoint, or none that could be verified",
    5: "corruption was found",
    6: "a store or the daemon did not answer, or refused; nothing is known to be wrong",
    EXIT_HELD: "another daemon holds the spool",
    check.EXIT_NOT_EXACT: "`check-resume`: the run that was killed is not the one that nobody interrupted",
}
_CODES: dict[type[errors.TierdError], int] = {
    errors.CheckpointNotFound: 4,
    errors.ObjectNotFound: 4,
    errors.CorruptChunk: 5,
    errors.ManifestError: 5,
    errors.StoreUnavailable: 6,
    errors.StoreRefused: 6,
    errors.DaemonUnavailable: 6,
    errors.SpoolHeld: EXIT_HELD,
}


def run(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        app(arguments)
        return 0
    except SystemExit as end:  # typer ends so, with 2 for a command line that it did not understand
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except errors.TierdError as error:
        print(f"tierd: {error}", file=sys.stderr)
        return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 3)
    except (OSError, TimeoutError) as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 1
