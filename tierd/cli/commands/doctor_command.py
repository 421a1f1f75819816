"""`tierd doctor`: try out what a daemon and its trainers will need.

Invariant: it ends within a minute or so, leaves nothing behind, and shows no secret.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli import command_runtime
from tierd.cli.command_runtime import EXIT_ALERT, EXIT_WARNING
from tierd.cli.commands.status_lines import hanging_lines
from tierd.cli.options import ConfigOption, JsonOption, KeyFileOption, SpoolOption, UrlArgument
from tierd.cli.output import print_answer, print_json, print_lines, terminal_width
from tierd.cli.places import default_places, load_config, make_config
from tierd.cli.tables import Table
from tierd.core.config import Config, TierConfig
from tierd.core.diagnosis.findings import Finding, Severity, finding, main_problems, worst_severity
from tierd.core.errors import ConfigError
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
    """Add this module's command."""
    app.command()(doctor)


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
    all_findings: Annotated[
        bool, typer.Option("--all", help="Also list what is right, worth knowing, or was not tried.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Try what a daemon and its trainers will need: the spool, the machine, every tier, the receivers of events, and
    the time to end. Print what is wrong, the worst first, with what to do.

    Run it as the account that trains. Exit code 10: there are warnings; 11: something will fail."""
    findings = asyncio.run(_examine(url, spool, config, key_file))
    answer = Diagnosis(worst_severity(findings), tuple(findings))
    if json:
        print_json(answer)
    else:
        _show(findings, others=all_findings)
    if answer.severity != "ok":
        raise typer.Exit(_EXIT_CODES[answer.severity])


def _show(findings: Sequence[Finding], *, others: bool) -> None:
    """Print each problem with its remedy; with `others` also all other findings, one line each."""
    width = terminal_width()
    for problem, places in main_problems(findings).items():
        print_lines("\n".join(hanging_lines(_describe_problem(problem, places), width)))
        if problem.do:
            print_lines("\n".join(f"  {line}" for line in hanging_lines(f"-> {problem.do}", width and width - 2)))
    if others:
        rows = [
            (entry.place, entry.check, _SEVERITY_WORDS[entry.severity], f"{entry.found}. {entry.do}".removesuffix(". "))
            for entry in findings
            if entry.severity not in ("error", "warning")
        ]
        print_lines("")
        print_answer(Table(("WHERE", "CHECK", "", "FOUND"), rows))
    print_lines(_count_severities(findings) + ("" if others else "; --all lists every check"))


def _describe_problem(problem: Finding, places: Sequence[str]) -> str:
    return f"{_SEVERITY_WORDS[problem.severity]} {', '.join(places)}, {problem.check}: {problem.found}"


def _count_severities(findings: Sequence[Finding]) -> str:
    others = [entry for entry in findings if entry.severity not in ("error", "warning")]
    counts = Counter(entry.severity for entry in (*main_problems(findings), *others))
    words: dict[Severity, str] = {
        "error": "error",
        "warning": "warning",
        "ok": "ok",
        "note": "note",
        "unknown": "not tried",
    }
    plural = {"error", "warning", "note"}
    texts = [
        f"{counts[severity]} {word}{'s' * (severity in plural and counts[severity] != 1)}"
        for severity, word in words.items()
        if counts[severity]
    ]
    is_fine = not counts["error"] and not counts["warning"]
    return f"{'nothing is wrong: ' * is_fine}{', '.join(texts)}"


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
        examined = await examine(
            ExaminationScope(
                root,
                retention.keep_last,
                drain_s,
                subjects,
                group_s,
                config.notify if config else (),
                config.http if config else None,
            )
        )
    return [*examined, *findings]


def _resolve_places(
    urls: list[str] | None, spool: Path | None, file: Path | None, key_file: Path | None
) -> tuple[Config | None, Path | None]:
    """Return the configuration and the spool's path, which may be absent as yet. Raises `ConfigError`."""
    if not (spool or urls or file):
        spool, file = default_places()
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
    return (make_config(str(root or "/"), urls, None, key_file, where="URL") if urls else None), root


def _read_key(tier: TierConfig) -> tuple[EncryptionKey | None, list[Finding]]:
    """Return a tier's key, and the finding about it, if it is to have one."""
    if tier.key_file is None:
        return None, []
    try:
        key = read_key(Path(tier.key_file))
    except ConfigError as error:
        return None, [finding(tier.name, "key unusable", str(error))]
    return key, [finding(tier.name, "key read", f"{tier.key_file}, key {key.id}")]
