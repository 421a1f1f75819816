"""The table at the end: every checkpoint that was ever made, from what trainer and daemon said of it.

Invariant: a row for each save that a trainer logged, whatever became of it; where it lies and why is the daemon's word
(`report` and its events), nothing is inferred from file names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from examples.demo.compare import Saved

_SIZES = re.compile(r"(\d+) bytes as (\d+)")
_STYLES = {"verified": "green", "committed": "green", "quarantined": "bold red", "corrupt": "bold red", "pruned": "dim"}


def checkpoints(
    run: str, saves: Iterable[Saved], report: dict[str, Any], events: list[dict[str, Any]], places: list[str]
) -> Table:
    """Build the table; `report` and `events` as the daemon answers them, `places` in column order."""
    known = {(entry["step"], entry["attempt"]): entry for entry in report["checkpoints"]}
    table = _empty(places)
    attempt = ""
    for saved in saves:
        if attempt and attempt != saved.attempt:
            table.add_section()
        attempt = saved.attempt
        subject = f"{run} step {saved.step} (attempt {saved.attempt})"
        own = [event for event in events if event["subject"].startswith(subject)]
        copies = {copy["place"]: copy for copy in known.get((saved.step, saved.attempt), {}).get("copies", [])}
        table.add_row(
            str(saved.step),
            saved.attempt.split("-")[1],
            *(_state(copies.get(place), place, own) for place in places),
            f"{saved.at:%H:%M:%S}",
            *_flushed(saved, own),
        )
    return table


def _empty(places: list[str]) -> Table:
    table = Table(
        title="every checkpoint of the interrupted run", title_justify="left", box=box.SIMPLE, header_style="bold"
    )
    for name in ("step", "attempt"):
        table.add_column(name, justify="right", no_wrap=True)
    for place in places:
        table.add_column("in the spool" if place == "local" else f"on the tier ({place})", ratio=1)
    table.add_column("made, UTC", no_wrap=True)
    for name in ("verified", "MB, stored"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _state(copy: dict[str, Any] | None, place: str, events: list[dict[str, Any]]) -> Text:
    """What a place holds of a checkpoint, and why; where it holds nothing, what became of it."""
    if copy is not None:
        verb = "kept" if copy["keep"] else "to be pruned"
        return _said(copy["state"], f", {verb}: {'; '.join(copy['reasons'])}" if copy["reasons"] else "")
    # A checkpoint that is beyond repair is quarantined in every place at once, and the daemon tells it once.
    corrupt = next((event for event in events if event["what"] == "quarantined"), None)
    if corrupt is not None:
        return _said("quarantined", f", later deleted: {_brief(corrupt['why'], place)}")
    gone = next((event for event in events if event["what"] == "pruned" and event["place"] == place), None)
    return _said("pruned", f": {gone['why']}") if gone else _said("never there", "")


def _brief(why: str, place: str) -> str:
    """The last words of what was found at `place`; paths and digests stand in the daemon's log."""
    _, _, found = why.partition(f"{place}: ")
    return found.partition(";")[0].rpartition(": ")[2]


def _said(state: str, why: str) -> Text:
    return Text.assemble((state, _STYLES.get(state, "")), (why, "dim" if state == "pruned" else ""))


def _flushed(saved: Saved, events: list[dict[str, Any]]) -> tuple[str, str]:
    """How long after the save a tier's copy was verified, and the bytes it took."""
    for event in events:
        sizes = _SIZES.search(event["why"])
        if event["what"] == "flushed" and sizes:
            after = datetime.fromisoformat(event["at"]) - saved.at
            raw, stored = (int(size) / 1e6 for size in sizes.groups())
            return f"in {after.total_seconds():.2f} s", f"{raw:.1f}, {stored:.1f}"
    return "never", ""
