"""The command `export`, the command line of `Reader.export`.

Invariant: torch and the reading modules are imported only when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.known import answering
from tierd.cli.options import (
    AttemptOption,
    BestOption,
    JsonOption,
    KeyFileOption,
    ModeOption,
    StepOption,
    UrlArgument,
    best_goal,
    places,
)
from tierd.cli.progress import progress
from tierd.cli.tables import complain, console, print_json, size
from tierd.cli.uncollected import uncollected
from tierd.core.errors import ConfigError

_REFUSES = {"torch": "torch.load refuses them by default", "dcp": "only a restore loads them"}


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(export)


def export(
    url: UrlArgument = None,
    name: Annotated[str, typer.Option("--run", metavar="RUN", help="The run.")] = "",
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="An empty or absent directory.")] = None,
    format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, hf, torch or dcp.")
    ] = "safetensors",
    only: Annotated[
        str | None, typer.Option("--only", metavar="ENTRY", help="One entry of the state, say model.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="fp32, fp16 or bf16, for floating-point tensors.")
    ] = None,
    strip: Annotated[
        str, typer.Option("--strip", metavar="PREFIX", help="Remove this from names, say module.", show_default=False)
    ] = "",
    step: StepOption = None,
    attempt: AttemptOption = None,
    best: BestOption = None,
    mode: ModeOption = "min",
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Write the newest verified checkpoint, or the best, in another format, streamed. Needs no daemon."""
    if not url or not name or to is None:
        raise ConfigError("export needs a tier's URL, --run RUN and --to DIR")
    best_goal(best, mode, step)
    try:
        with uncollected():
            from tierd.reading import exports as _exports  # noqa: F401  loaded here, because `Reader.export` needs it
            from tierd.reading import open as open_run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'tierd[torch,daemon]'") from error

    where = places(None, list(url), None, key_file=key_file)
    with answering(where, name), open_run(list(url), name, key_file) as reader, progress("exporting") as meter:
        exported = reader.export(
            to,
            format,
            step,
            attempt=attempt,
            best=best,
            mode=mode,
            only=only,
            dtype=dtype,
            strip=strip,
            on_progress=meter.update,
        )
    if json:
        print_json(exported)
        return
    out = console()
    out.print(f"step {exported.step} (attempt {exported.attempt}): {exported.tensors} tensors in {exported.directory}")
    for file, length in exported.files.items():
        out.print(f"  {file}  {size(length)}")
    for names, reason in (
        (exported.converted, "converted, because torch.load refuses these types by default"),
        (exported.left_out, f"left out, because {_REFUSES.get(format, 'they are not tensors')}"),
    ):
        if names:
            ellipsis = f", … ({len(names)} in all, which --json names)" if len(names) > 5 else ""
            out.print(f"{reason}: {', '.join(names[:5])}{ellipsis}")
    if strip and not exported.stripped:
        complain(f"--strip {strip}: no name begins with it; --only leaves an entry's name out of the others")
    if exported.overflowed:
        ellipsis = ", …" if len(exported.overflowed) > 5 else ""
        complain(f"--dtype {dtype} made finite values infinite in {', '.join(exported.overflowed[:5])}{ellipsis}")
    for text in exported.skipped:
        out.print(f"skipped {text}")
