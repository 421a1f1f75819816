"""The tables of docs/evidence/gate.md and fences.md, from the last full round of each kind (`gate.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from faults.fences import KINDS, Fence, collect
from faults.rounds import bound
from faults.sabotage import stride

RESULTS = Path(__file__).parent / "gate.json"
_EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
PAGE, FENCES_PAGE = _EVIDENCE / "gate.md", _EVIDENCE / "fences.md"
MARKS = "<!-- gate: made by `python -m faults page` -->\n", "<!-- gate: end -->\n"
_HURTS = {  # the columns of the launchers' table: notes of the kind `launchers`
    "rank killed": ("kill", "stop-kill"),
    "rank stopped": ("stop",),
    "rank raises": ("raise",),
    "daemon killed or stopped": ("daemon-kill", "daemon-stop"),
    "both": ("daemon-kill+kill", "daemon-stop+kill"),
    "nodes lost": ("node-lost", "1 of 4 nodes lost", "2 of 4 nodes lost", "3 of 4 nodes lost"),
}


def refused(results: dict[str, dict[str, Any]]) -> list[str]:
    """Why some of these results must not be published: something was left out, or tierd/ was never committed."""
    reasons = []
    for kind, result in results.items():
        reasons += [f"{kind}: skipped {why}" for why in result["skipped"]]
        if result["tierd"] is None:
            reasons.append(f"{kind}: tierd/ was not what was committed")
    return reasons


def is_full(result: dict[str, Any], gate: int) -> bool:
    """Whether a round has all of its trials. A long one is played in pieces, and kept between them.

    Fences that came later are of a later tierd/. So the number counts that was full then, or else `gate`, today's.
    """
    return bool(min(result["asked"], result["trials"]) >= result.get("of", gate))


def table(results: dict[str, dict[str, Any]], gates: dict[str, int]) -> str:
    """A row for each full round: units, seeds, losses, what a loss's probability by a seed is below, with 95 %
    confidence, and git's name of the tierd/ that it was. Below, what was not played in full, and how far it is."""
    rows = [
        "| kind | trials | seeds | lost | bound | minutes | tierd/ |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lacking = []
    for kind, gate in gates.items():
        result = results.get(kind)
        if result is None or not is_full(result, gate):
            lacking.append(kind if result is None else f"{kind} ({result['trials']:,} of {gate:,} so far)")
            continue
        first, last = result["seeds"]
        lost = len(result["losses"])
        below = f"{bound(last - first + 1):.1e}" if not lost and kind != "sabotage" else "none"
        trials, minutes = f"{result['trials']:,} {result['unit']}", result["seconds"] / 60
        rows.append(
            f"| {kind} | {trials} | {first}..{last} | {lost} | {below} | {minutes:.0f} | {result['tierd'][:9]} |"
        )
    if lacking:
        rows += ["", f"Not played in full yet: {', '.join(lacking)}."]
    return "\n".join(rows) + "\n"


def launchers(result: dict[str, Any]) -> str:
    """A row for each launcher: how often what was done to it."""
    notes = result["notes"]
    rows = [
        f"| launcher | cycles | {' | '.join(_HURTS)} |",
        f"| --- | --- | {' | '.join('---' for _ in _HURTS)} |",
    ]
    for name in (note.removesuffix(": cycles") for note in notes if note.endswith(": cycles")):
        counts = [sum(notes.get(f"{name}: {what}", 0) for what in kinds) for kinds in _HURTS.values()]
        rows.append(f"| {name} | {notes[f'{name}: cycles']} | {' | '.join(str(one or '') for one in counts)} |")
    longest = [int(note.split()[-2]) for note in notes if note.startswith("the longest wait is at most")]
    rows += ["", f"No call of tierd took longer than {max(longest)} s."]
    return "\n".join(rows) + "\n"


def tables(results: dict[str, dict[str, Any]], gates: dict[str, int]) -> str:
    """All that stands between the page's marks."""
    rows = table(results, gates)
    if "launchers" in results and is_full(results["launchers"], gates["launchers"]):
        rows += f"\nUnder each launcher:\n\n{launchers(results['launchers'])}"
    return rows


def fences_table(result: dict[str, Any]) -> str:
    """Each kind of fault with its fences: the promise, the function, and the run that found it.

    Args:
        result: of the last round of sabotage.
    """
    fences = collect()
    seeds = {seed * stride(len(fences)) % len(fences): seed for seed in range(len(fences))}
    played = sum(f"found: {fence.name}" in result["notes"] for fence in fences)
    missed = f"{len(result['losses'])} were missed" if result["losses"] else "none was missed"
    rows = [
        f"{len(fences)} fences. The last round found {played} of them, on `tierd/` {result['tierd'][:9]}; {missed}.",
        "",
        "| kind of fault | it means that | fences |",
        "| --- | --- | --- |",
        *(f"| {kind} | {KINDS[kind]} | {sum(fence.kind == kind for fence in fences)} |" for kind in KINDS),
    ]
    for kind in KINDS:
        rows += ["", f"## {kind}", "", "| fault | promise | function | found by | seed |"]
        rows += ["| --- | --- | --- | --- | --- |"]
        rows += [_row(fence, result, seeds[number]) for number, fence in enumerate(fences) if fence.kind == kind]
    return "\n".join(rows) + "\n"


def _row(fence: Fence, result: dict[str, Any], seed: int) -> str:
    name, _, anchor = fence.promise.partition("#")
    section, _, number = anchor.partition("-")
    invariant = section == "invariants"
    text, link = (f"invariant {number}", section) if invariant else (f"{name}, {anchor.replace('-', ' ')}", anchor)
    found = f"`{fence.by}`" + ("" if f"found: {fence.name}" in result["notes"] else ", not yet played")
    place = Path(name).relative_to("docs") if name.startswith("docs/") else Path("..") / name
    return f"| {fence.name} | [{text}](../{place}#{link}) | `{fence.function}` | {found} | {seed} |"


def put(page: str, rows: str) -> str:
    """The page with this table between its marks."""
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + rows + MARKS[1] + rest.split(MARKS[1])[1]


def write(gates: dict[str, int]) -> None:
    """The results into the page.

    Args:
        gates: how many trials a full round of each kind has.
    """
    results = json.loads(RESULTS.read_text())
    if reasons := refused(results):
        raise SystemExit("not to be published:\n" + "\n".join(reasons))
    PAGE.write_text(put(PAGE.read_text(), tables(results, gates)))
    FENCES_PAGE.write_text(put(FENCES_PAGE.read_text(), fences_table(results["sabotage"])))
