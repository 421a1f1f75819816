"""Commands that measure: `bench overhead` and `bench growth`.

Invariant: torch and the measuring modules are imported only when such a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.options import JsonOption
from tierd.cli.tables import print_json, print_lines
from tierd.core.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    bench = typer.Typer(help="Measure what saving costs training.", no_args_is_help=True)
    bench.callback()(lambda: None)
    bench.command("overhead")(overhead)
    bench.command("growth")(growth)
    app.add_typer(bench, name="bench")


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
        int | None, typer.Option("--every", min=1, help="Steps from a save to the next.", show_default="4 to 10")
    ] = None,
    directory: _DirectoryOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write overhead.json, .md and .png there.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Train on it: cpu or cuda.")] = "cpu",
    json: JsonOption = False,
) -> None:
    """Blocking, added and durable time, CPU and memory of tierd's saves and of its peers', in one interleaved run."""
    try:
        from tierd.bench import page, targets
        from tierd.bench.arms import ARMS
        from tierd.bench.overhead import overhead as run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'tierd[bench]'") from error

    result = run(
        _numbers("--sizes", sizes),
        [int(number) for number in _numbers("--rounds", rounds)],
        [name.strip() for name in arms.split(",")] if arms is not None else list(ARMS),
        every,
        directory,
        out,
        lambda text: print_lines(text, error=True),
        device,
    )
    if json:
        print_json({"result": result, "verdicts": targets.verdicts(result)})
    else:
        print_lines(page.page(result))


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
    """Costs that must not grow with a state, a run or a node, beside torch.save and its peers, and each goal."""
    try:
        from tierd.bench.growth import page, result
        from tierd.bench.growth.run import growth as run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'tierd[bench]'") from error

    parts = [name.strip() for name in only.split(",")] if only is not None else list(page.TITLES)
    outcome = run(parts, scale, s3, directory, out, lambda text: print_lines(text, error=True))
    if json:
        print_json({"result": outcome, "verdicts": result.verdicts(outcome)})
    else:
        print_lines(page.page(outcome))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text}: numbers with commas between them") from error
