"""What all pages and result files of the benchmarks share: tables, figures, verdicts, and how a result is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from tierd.bench.process_counters import Machine

SIGNS = {"<=": "≤", "<": "<", ">=": "≥"}
MET = {True: "met", False: "**not met**", None: "not measured"}


def is_met(relation: str, measured: float | None, limit: float | None) -> bool | None:
    """Whether a target is met; None without a measurement."""
    if limit is None or measured is None:
        return None
    return {"<=": measured <= limit, "<": measured < limit, ">=": measured >= limit}[relation]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def machine_text(machine: Machine) -> str:
    """Describe the machine of the figures in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in sorted(machine.packages.items()))
    return (
        f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, {machine.filesystem}, "
        f"Linux {machine.kernel}, Python {machine.python}, {packages}"
    )


def median_or_none(values: Sequence[float]) -> float | None:
    """The median of the samples; None if there are none."""
    return median(values) if values else None


def number_text(value: float | None, form: str = ".4g") -> str:
    """A figure; empty if it was not measured."""
    return "" if value is None else f"{value:{form}}"


def write_result(out: Path, stem: str, result: object, page: str = "") -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stem}.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if page:
        (out / f"{stem}.md").write_text(page, encoding="utf-8")
