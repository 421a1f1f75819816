"""Sizes, times, ages and pauses as people read them: one form of each, for the log, problems, every
command and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tierd.core.errors import printable

_MAX_RANGES = 4


def format_size(count: float) -> str:
    """Format bytes: 1.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(time_s: float) -> str:
    """Format a time: three digits and the unit that suits it."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if time_s >= length:
            digits = f"{time_s / length:#.3g}" if time_s < 1000 * length else f"{time_s / length:.0f}"
            return f"{digits.rstrip('.')} {unit}"
    return f"{1000 * time_s:.3g} ms" if 0 < time_s < 0.1 else f"{time_s:.3g} s"


def format_age(time_s: float) -> str:
    """Format the time since something happened, in whole units: 40 s, 3 min, 7 h, 2 d."""
    unit, length = next(
        ((unit, length) for unit, length in (("d", 86400), ("h", 3600), ("min", 60)) if time_s >= length), ("s", 1)
    )
    return f"{max(0.0, time_s) // length:.0f} {unit}"


def format_ranges(ranks: Iterable[int]) -> str:
    """Write sorted ranks as ranges, `0-3, 7`; only the first few."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MAX_RANGES]]
    return ", ".join(texts) + (", ..." if len(ranges) > _MAX_RANGES else "")


def pause_text(until: str) -> str:
    """Say until when a daemon is paused: until a moment in RFC 3339, or `until resumed`."""
    if until == "until resumed":
        return f"paused {until}"
    return f"paused until {until[:19].replace('T', ' ')} UTC"


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table for a notebook, with all text escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(printable(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(printable(title))}</caption><tr>{head}</tr>{body}</table>"


def list_few(items: Iterable[object], most: int = 3) -> str:
    """List the first items, and say how many more there are."""
    texts = list(map(str, items))
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
