"""Commands that try out and measure: `doctor`, `check-resume`, `bench overhead` and `bench growth`.

Invariant: `doctor` ends within a minute or so, leaves nothing behind, and shows no secret. `tierd.check` alone judges a
resume. torch and the measuring modules are imported only when such a command runs.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli import command_runtime
from tierd.cli.command_runtime import EXIT_ALERT, EXIT_NOT_EXACT, EXIT_WARNING
from tierd.cli.options import ConfigOption, JsonOption, KeyFileOption, SpoolOption, UrlArgument, load_config
from tierd.cli.output import Table, console, make_table, print_json, print_lines
from tierd.core.config import Config, TierConfig, from_urls
from tierd.core.diagnosis.findings import Finding, Severity, finding, worst_severity
from tierd.core.errors import ConfigError, printable_json
from tierd.core.retention.policy import RetentionPolicy, parse_duration
from tierd.core.urls import parse_url
from tierd.doctor.examination import ExaminationScope, examine
from tierd.doctor.tier_checks import ExaminedTier
from tierd.stores.encryption_keys import EncryptionKey, read_key
from tierd.stores.open import open_store

_EXIT_CODES: dict[Severity, int] = {"warning": EXIT_WARNING, "error": EXIT_ALERT}
_DEFAULT_DRAIN = Config(spool="/", tier=(TierConfig(name="t", url="/t"),)).drain  # the default
_ATTEMPTS = 2  # of each request, because a single failure proves little and somebody waits
_SEVERITY_WORDS: dict[Severity, str] = {
    "ok": "ok",
    "note": "note",
    "unknown": "not tried",
    "warning": "WARNING",
    "error": "ERROR",
}


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(doctor)
    app.command("check-resume")(check)
    bench = typer.Typer(help="Measure what saving costs training.", no_args_is_help=True)
    bench.callback()(lambda: None)
    bench.command("overhead")(overhead)
    bench.command("growth")(growth)
    app.add_typer(bench, name="bench")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `doctor` found.

    Attributes:
        severity: the worst finding's: `error`, `warning`, else `ok`.
        findings: one or more for each check, by place.
    """

    severity: Severity
    findings: tuple[Finding, ...]


def doctor(
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Try what a daemon and its trainers will need: the spool, the machine, every tier, and the time to end.

    Run it as the account that trains. Exit code 10: there are warnings; 11: something will fail."""
    findings = asyncio.run(_examine(url, spool, config, key_file))
    answer = Diagnosis(worst_severity(findings), tuple(findings))
    if json:
        print_json(answer)
    else:
        out = console()
        out.print(_findings_table(findings))
        out.print(_count_severities(findings))
    if answer.severity != "ok":
        raise typer.Exit(_EXIT_CODES[answer.severity])


def _findings_table(findings: Sequence[Finding]) -> Table:
    rows: list[tuple[str, str, str, str]] = []
    for each_finding in findings:
        rows.append(
            (each_finding.place, each_finding.check, _SEVERITY_WORDS[each_finding.severity], each_finding.found)
        )
        rows.append(("", "", "", each_finding.why))
        if each_finding.do:
            rows.append(("", "", "", f"-> {each_finding.do}"))
    return make_table(None, ("WHERE", "CHECK", "", "FOUND, WHY IT MATTERS, WHAT TO DO"), rows)


def _count_severities(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counts[severity]} {word}" for severity, word in _SEVERITY_WORDS.items() if counts[severity])


async def _examine(
    urls: list[str] | None, spool: Path | None, file: Path | None, key_file: Path | None
) -> list[Finding]:
    config, root = _resolve_places(urls, spool, file, key_file)
    findings, subjects = [], list[ExaminedTier]()
    async with AsyncExitStack() as stack:
        for tier in config.tier if config else ():
            key, judged = _read_key(tier)
            findings += judged
            url = parse_url(tier.url)
            store = open_store(url, key=key, attempts=_ATTEMPTS, trial=True)
            stack.push_async_callback(store.aclose)
            subjects.append(ExaminedTier(tier.name, url, store, root))
        retention = (config.retention if config else None) or RetentionPolicy()
        drain_s = parse_duration(config.drain if config else _DEFAULT_DRAIN)
        group_s = command_runtime.current_timings().check_group_s
        examined = await examine(ExaminationScope(root, retention.keep_last, drain_s, subjects, group_s))
    return [*examined, *findings]


def _resolve_places(
    urls: list[str] | None, spool: Path | None, file: Path | None, key_file: Path | None
) -> tuple[Config | None, Path | None]:
    """Return the configuration and the spool's path, which may be absent as yet. Raises `ConfigError`."""
    if file is not None:
        if spool or urls or key_file:
            raise ConfigError("--config names the spool, the tiers and their keys itself; leave the others out")
        config = load_config(file)
        return config, Path(config.spool)
    if spool is None and not urls:
        raise ConfigError("nothing to try: give --config FILE, --spool DIR, or a tier's URL")
    if key_file and not urls:
        raise ConfigError("--key-file is for tiers that are named by their URLs; name one")
    root = spool.absolute() if spool else None
    key = str(key_file.absolute()) if key_file else None
    return (from_urls(str(root or "/"), urls, key_file=key, where="URL") if urls else None), root


def _read_key(tier: TierConfig) -> tuple[EncryptionKey | None, list[Finding]]:
    """Return a tier's key, and the finding about it, if it is to have one."""
    if tier.key_file is None:
        return None, []
    try:
        key = read_key(Path(tier.key_file))
    except ConfigError as error:
        return None, [finding(tier.name, "key unusable", str(error))]
    return key, [finding(tier.name, "key read", f"{tier.key_file}, key {key.id}")]


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
        from tierd.bench import overhead as page
        from tierd.bench import overhead_result
        from tierd.bench.overhead import overhead as run
        from tierd.bench.training import SAVE_METHODS
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'tierd[bench]'") from error

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
        print_lines(page.overhead_page(result))


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
        from tierd.bench.growth import growth_result, growth_run
        from tierd.bench.growth.growth_run import growth as run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'tierd[bench]'") from error

    parts = [name.strip() for name in only.split(",")] if only is not None else list(growth_run.TITLES)
    outcome = run(parts, scale, s3, directory, out, lambda text: print_lines(text, error=True))
    if json:
        print_json({"result": outcome, "verdicts": growth_result.goal_verdicts(outcome)})
    else:
        print_lines(growth_run.growth_page(outcome))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text}: numbers with commas between them") from error
