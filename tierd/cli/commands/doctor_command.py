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

import typer

from tierd.cli import command_runtime
from tierd.cli.command_runtime import EXIT_ALERT, EXIT_WARNING
from tierd.cli.options import ConfigOption, JsonOption, KeyFileOption, SpoolOption, UrlArgument
from tierd.cli.output import console, print_json
from tierd.cli.places import default_places, load_config, make_config
from tierd.cli.tables import Table
from tierd.core.config import Config, TierConfig
from tierd.core.diagnosis.findings import Finding, Severity, finding, worst_severity
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
    return Table(("WHERE", "CHECK", "", "FOUND, WHY IT MATTERS, WHAT TO DO"), rows)


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
