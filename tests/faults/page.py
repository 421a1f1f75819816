"""The gate's table in the README, from the last full round of each kind (`gate.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from faults.rounds import bound

RESULTS = Path(__file__).parent / "gate.json"
README = Path(__file__).resolve().parents[2] / "README.md"
MARKS = "<!-- gate: made by `python -m faults page` -->\n", "<!-- gate: end -->\n"


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row a kind: units, seeds, losses, and what a loss's probability is below, with 95 % confidence."""
    rows = ["| kind | trials | seeds | lost | bound | minutes |", "| --- | --- | --- | --- | --- | --- |"]
    for kind, result in results.items():
        first, last = result["seeds"]
        lost = len(result["losses"])
        below = f"{bound(result['trials']):.1e}" if not lost and kind != "sabotage" else "none"
        trials = f"{result['trials']:,} {result['unit']}"
        rows.append(f"| {kind} | {trials} | {first}..{last} | {lost} | {below} | {result['seconds'] / 60:.0f} |")
    return "\n".join(rows) + "\n"


def put(page: str, rows: str) -> str:
    """The page with this table between its marks."""
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + rows + MARKS[1] + rest.split(MARKS[1])[1]


def write() -> None:
    README.write_text(put(README.read_text(), table(json.loads(RESULTS.read_text()))))
