"""The gate's table in the README, from the last full round of each kind (`gate.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from faults.rounds import bound

RESULTS = Path(__file__).parent / "gate.json"
README = Path(__file__).resolve().parents[2] / "README.md"
MARKS = "<!-- gate: made by `python -m faults page` -->\n", "<!-- gate: end -->\n"


def refused(results: dict[str, dict[str, Any]], gates: dict[str, int]) -> list[str]:
    """Why these results are no gate: a full round of each kind, with nothing left out, all of one tierd."""
    reasons = [f"{kind}: no full round was kept" for kind in gates if kind not in results]
    for kind, result in results.items():
        if min(result["asked"], result["trials"]) < gates[kind]:
            reasons.append(f"{kind}: {result['trials']:,} {result['unit']} of {gates[kind]:,}")
        reasons += [f"{kind}: skipped {why}" for why in result["skipped"]]
    if None in (trees := {result["tierd"] for result in results.values()}) or len(trees) > 1:
        reasons.append("not all of one committed tierd/: " + ", ".join(f"{k} {r['tierd']}" for k, r in results.items()))
    return reasons


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row a kind: units, seeds, losses, and what a loss's probability by a seed is below, with 95 % confidence."""
    rows = ["| kind | trials | seeds | lost | bound | minutes |", "| --- | --- | --- | --- | --- | --- |"]
    for kind, result in results.items():
        first, last = result["seeds"]
        lost = len(result["losses"])
        below = f"{bound(last - first + 1):.1e}" if not lost and kind != "sabotage" else "none"
        trials = f"{result['trials']:,} {result['unit']}"
        rows.append(f"| {kind} | {trials} | {first}..{last} | {lost} | {below} | {result['seconds'] / 60:.0f} |")
    return "\n".join(rows) + "\n"


def put(page: str, rows: str) -> str:
    """The page with this table between its marks."""
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + rows + MARKS[1] + rest.split(MARKS[1])[1]


def write(gates: dict[str, int]) -> None:
    """The results into the README.

    Args:
        gates: how many trials a full round of each kind has.
    """
    results = json.loads(RESULTS.read_text())
    if reasons := refused(results, gates):
        raise SystemExit("no gate to publish:\n" + "\n".join(reasons))
    README.write_text(put(README.read_text(), table(results)))
