"""Commands that measure: `check-resume`, `bench overhead` and `bench growth`.

Invariant: `tierd.check` alone judges a resume. torch and the measuring modules are imported only when such a command
runs.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.command_runtime import EXIT_NOT_EXACT
from tierd.cli.options import JsonOption
from tierd.cli.output import print_json, print_lines, print_page
from tierd.core.errors import ConfigError, printable_json
from tierd.core.installation import install_command


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("check-resume")(check)
    bench = typer.Typer(help="Measure what saving costs training.", no_args_is_help=True)
    bench.callback()(lambda: None)
    bench.command("overhead")(overhead)
    bench.command("growth")(growth)
    app.add_typer(bench, name="bench")


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
    """Prove that a training loop resumes exactly: run it once through, and once killed and started again, and compare
    samples and losses."""
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


_DirectoryOption = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="A directory on the disk to measure.", show_default="a temporary one"),
]


def overhead(
    sizes: Annotated[str, typer.Option("--sizes", metavar="GB,…", help="Sizes of the state.")] = "0.25,1,4",
    rounds: Annotated[
        str, typer.Option("--rounds", metavar="N[,…]", help="Rounds of every arm; one number, or one for each size.")
    ] = "15",
    arms: Annotated[
        str | None, typer.Option("--arms", metavar="ARM,…", help="Only these arms.", show_default="all")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", metavar="N", min=1, help="Steps from a save to the next.", show_default="4 to 10"),
    ] = None,
    directory: _DirectoryOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write overhead.json, .md and .png there.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Train on it: cpu or cuda.")] = "cpu",
    json: JsonOption = False,
) -> None:
    """Measure what saves take from training, of tierd and its peers. Blocking, added and durable time, CPU and memory,
    in one interleaved run."""
    try:
        from tierd.bench import overhead_result
        from tierd.bench.overhead import overhead as run
        from tierd.bench.overhead import overhead_page
        from tierd.bench.training import SAVE_METHODS
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; {install_command('bench')}") from error

    result = run(
        _numbers("--sizes", sizes),
        [int(number) for number in _numbers("--rounds", rounds)],
        [name.strip() for name in arms.split(",")] if arms is not None else list(SAVE_METHODS),
        every,
        directory,
        out,
        lambda text: print_lines(text, error=True),
        device,
    )
    if json:
        print_json({"result": result, "verdicts": overhead_result.target_verdicts(result)})
    else:
        print_page(overhead_page(result))


def growth(
    only: Annotated[
        str | None, typer.Option("--only", metavar="PART,…", help="Only these parts.", show_default="all")
    ] = None,
    scale: Annotated[
        float, typer.Option("--scale", metavar="SHARE", help="So many times as many checkpoints and runs.")
    ] = 1.0,
    s3: Annotated[
        str, typer.Option("--s3", metavar="URL", help="An empty place in a bucket, for restores.", show_default=False)
    ] = "",
    directory: _DirectoryOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write growth.json and .md there.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure costs that must not grow with a state, a run or a node. Beside them: torch.save and its peers, and each
    goal."""
    try:
        from tierd.bench.growth import growth_result
        from tierd.bench.growth.growth_run import TITLES, growth_page
        from tierd.bench.growth.growth_run import growth as run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; {install_command('bench')}") from error

    parts = [name.strip() for name in only.split(",")] if only is not None else list(TITLES)
    outcome = run(parts, scale, s3, directory, out, lambda text: print_lines(text, error=True))
    if json:
        print_json({"result": outcome, "verdicts": growth_result.goal_verdicts(outcome)})
    else:
        print_page(growth_page(outcome))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text}: numbers with commas between them") from error
