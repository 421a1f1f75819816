"""The command `check-resume`, the command line of `tierd.check`.

Invariant: `tierd.check` alone judges.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from tierd.cli.exit_codes import EXIT_NOT_EXACT
from tierd.cli.options import JsonOption
from tierd.cli.tables import print_lines
from tierd.core.printable import printable_json


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("check-resume")(check)


def check(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="A training loop that takes a spool's path.")
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="The last step that is compared.")],
    kill_at: Annotated[
        str, typer.Option("--kill-at", metavar="POINT,…", help="7: after step 7; 7+save: in its save; 7+10ms.")
    ],
    ranks: Annotated[int, typer.Option("--ranks", min=1, metavar="R", help="Processes, as torchrun starts them.")] = 1,
    allowance: Annotated[
        int,
        typer.Option("--allowance", min=0, metavar="K", help="Samples that a rank may read again or skip a resume."),
    ] = 0,
    loss_tolerance: Annotated[
        float, typer.Option("--loss-tolerance", min=0.0, metavar="X", help="Relative; 0 compares every bit.")
    ] = 0.0,
    patience: Annotated[
        float, typer.Option("--patience", min=0.0, metavar="S", help="Seconds without a new step: a launch hangs.")
    ] = 120.0,
    every_save: Annotated[
        bool, typer.Option("--every-save", help="Compare the state at each save, too: where it began.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="PATH",
            help="A path in the state, or a pattern of paths, whose values may differ; repeatable.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave spools, records and output behind.")] = False,
    json: JsonOption = False,
) -> None:
    """Run a training loop once through, and once killed and started again, and compare samples and losses."""
    from tierd.check import check_resume  # no other command needs its imports

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the check cleans up
    report = check_resume(
        target,
        steps=steps,
        kill_at=kill_at.split(","),
        ranks=ranks,
        allowance=allowance,
        loss_tolerance=loss_tolerance,
        patience=patience,
        keep=keep,
        every_save=every_save,
        ignore=ignore or (),
        on_line=lambda line: print_lines(line, error=True),
    )
    if json:
        print(printable_json(report.to_json()))
    else:
        print_lines(report)
    if not report.ok:
        raise typer.Exit(EXIT_NOT_EXACT)
