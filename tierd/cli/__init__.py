"""The command line: typer for the grammar, rich for the tables, JSON for programs.

Invariant: every error ends in one line on stderr and an exit code that `EXIT_CODES` lists; a traceback is a bug.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from tierd import __version__
from tierd.cli.acting import act, disown, ending, move, pause, prepare, prune, space, watch
from tierd.cli.measuring import advise, bench, check
from tierd.cli.reading import doctor, export, follow, inspect, read, restore, runs, status, top
from tierd.cli.tables import complain, print_json
from tierd.core import errors, manifest
from tierd.ipc.messages import EXIT_HELD
from tierd.ipc.protocol import PROTOCOL
from tierd.logs import formatter

app = typer.Typer(
    name="tierd",
    help="Async tiered checkpoint storage: verified, retained, restored.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
act.register(app)
prune.register(app)
read.register(app)
runs.register(app)
status.register(app)
top.register(app)
doctor.register(app)
pause.register(app)
space.register(app)
ending.register(app)
disown.register(app)
advise.register(app)
bench.register(app)
check.register(app)
inspect.register(app)
follow.register(app)
export.register(app)
watch.register(app)
restore.register(app)
prepare.register(app)
move.register(app)

EXIT_CODES: dict[int, str] = {
    0: "done; nothing wrong was found",
    1: "an unexpected failure: a bug, or an error of the operating system",
    2: "the command line was not understood",
    3: "bad input: configuration, URL, name, step, a spool that cannot be used, a loop that fails by itself",
    4: "not found: no such checkpoint, or none verified; `inspect`, `import`: a checkpoint is incomplete or unknown",
    5: "corruption was found",
    6: "a store or the daemon did not answer, or refused; this proves nothing wrong",
    EXIT_HELD: "another daemon holds the spool",
    check.EXIT_NOT_EXACT: "`check-resume`: the killed run differs from the uninterrupted one",
    ending.EXIT_UNFINISHED: "`run` after SIGTERM, `drain`: some tier still lacks a part that it wants; "
    "`--until-idle`: a checkpoint in a watched directory was not taken",
    status.EXIT_WARNING: "`status --check`: a warning, and no alert; `doctor`: it works, at a cost or a risk; "
    "`advise --notice`: the state is not in time",
    status.EXIT_ALERT: "`status --check`: an alert: somebody has to act, or checkpoints may be lost; "
    "`doctor`: something that is needed will fail",
    follow.EXIT_UNDELIVERED: "`follow --once`: a checkpoint could not be delivered, or its command failed",
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


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --version: print JSON.")] = False,
) -> None:
    if version:
        if json:
            print_json({"version": __version__, "protocol": str(PROTOCOL), "format": manifest.VERSION})
        else:
            print(f"tierd {__version__}, protocol {PROTOCOL}, format {manifest.VERSION}")
        raise typer.Exit()
    if json:
        raise typer.BadParameter("before a command, it is for --version alone; give it after the command", context)
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        app(arguments)
        return 0
    except SystemExit as end:  # typer's own end; 2 if it did not understand the command line
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except errors.TierdError as error:
        complain(error)
        return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 3)
    except (OSError, TimeoutError) as error:
        complain(error)
        return 1
    except (MemoryError, RuntimeError, ExceptionGroup) as error:
        if not errors.is_exhausted(error):
            raise
        complain(errors.EXHAUSTED)
        return 1
