"""The table of checkpoints and their copies that `ls` and `show` print."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from tierd.cli.output import attempt_names, format_metrics, print_table
from tierd.cli.tables import Table
from tierd.core.run_report import Checkpoint, Copy, Report
from tierd.core.units import format_size
from tierd.watching.checkpoint_names import is_order_of_time

_COLUMNS = (
    *("RUN", "STEP", "ATTEMPT", "CREATED", "METRICS"),
    *("WHERE", "STATE", "RANKS", "BYTES", "STORED", "KEPT BECAUSE"),
)
_ID_COLUMNS = 5  # of these columns say which checkpoint it is, and the others are about one copy


def checkpoint_table(report: Report) -> Table:
    """Return one line for each copy of each checkpoint."""
    return Table(_COLUMNS, _rows(report), _ID_COLUMNS)


def print_checkpoints(report: Report) -> None:
    """Print the lines of `checkpoint_table`."""
    print_table(checkpoint_table(report))


def step_text(number: int, created: str | None) -> str:
    """Format a checkpoint's step; of a watched file that has none, say that its number is an order."""
    return f"order {number}" if created and is_order_of_time(number, datetime.fromisoformat(created)) else str(number)


def _rows(report: Report) -> list[list[str]]:
    names = attempt_names(checkpoint.attempt for checkpoint in report.checkpoints)
    return [_row(checkpoint, copy, names) for checkpoint in report.checkpoints for copy in checkpoint.copies]


def _row(checkpoint: Checkpoint, copy: Copy, names: Mapping[str, str]) -> list[str]:
    marks = ("→" if checkpoint.resumes else "") + ("*" if checkpoint.pinned else "")
    verdict = "; ".join(copy.reasons) if copy.keep else f"to be pruned: {'; '.join(copy.reasons)}"
    bound_mark = "≥ " if copy.read < len(copy.ranks) - len(copy.defects) else ""  # not every rank's manifest was read
    return [
        checkpoint.run,
        f"{step_text(checkpoint.step, checkpoint.created)}{marks}",
        names[checkpoint.attempt],
        (checkpoint.created or "")[:19].replace("T", " "),
        format_metrics(checkpoint.metrics),
        copy.place,
        copy.state,
        f"{len(copy.ranks)}/{checkpoint.world_size}",
        bound_mark + format_size(copy.size),
        bound_mark + format_size(copy.stored_size) if copy.stored_size else "",
        verdict,
    ]
