"""The table at the end: every checkpoint that was ever made, from what trainer and daemon said of it.

Invariant: a row for each save that a trainer logged, whatever became of it; where it lies and why is the daemon's word
(`report` and its events), nothing is inferred from file names.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from examples.demo.compare import Saved
from tierd.core.planning.place import SPOOL

_STYLES = {"verified": "green", "committed": "green", "quarantined": "bold red", "corrupt": "bold red"}


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
            saved.attempt.split("-")[1][:4],
            *(_state(copies.get(place), place, own) for place in places),
            f"{saved.at:%H:%M:%S}",
            *_flushed(saved, own),
        )
    return table


def _empty(places: list[str]) -> Table:
    table = Table(
        title="every checkpoint of the interrupted run",
        title_justify="left",
        box=box.SIMPLE,
        header_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in ("step", "launch"):
        table.add_column(name, justify="right", no_wrap=True)
    for place in places:
        table.add_column("in the spool" if place == SPOOL else f"on the tier ({place})", no_wrap=True)
    table.add_column("made, UTC", no_wrap=True)
    for name in ("verified", "MB, stored"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _state(copy: dict[str, Any] | None, place: str, events: list[dict[str, Any]]) -> Text:
    """What a place holds of a checkpoint, and why; where it holds nothing, what became of it."""
    if copy is not None:
        return _said(copy["state"], f": {copy['reasons'][0]}" if copy["reasons"] else "")
    # A checkpoint that is beyond repair is quarantined in every place at once, and the daemon tells it once.
    if any(event["what"] == "quarantined" for event in events):
        return _said("quarantined", ", deleted")
    if place == SPOOL:
        return _said("saved", ", then pruned")
    if any(event["place"] == place and event["what"] in ("flushed", "durable", "pruned") for event in events):
        return _said("sent", ", then pruned")
    return _said("overtaken", " by a newer")


def _said(state: str, why: str) -> Text:
    return Text.assemble((state, _STYLES.get(state, "dim")), (why, "" if state in _STYLES else "dim"))


def _flushed(saved: Saved, events: list[dict[str, Any]]) -> tuple[str, str]:
    """How long after the save a tier's copy was verified, and the bytes it took."""
    for event in events:
        if event["what"] == "flushed":
            after = datetime.fromisoformat(event["at"]) - saved.at
            raw, stored = event["raw_bytes"] / 1e6, event["stored_bytes"] / 1e6
            return f"{after.total_seconds():.2f} s", f"{raw:.1f}, {stored:.1f}"
    return "never", ""
