"""Output for people: tables and lines, on a terminal or through a pipe.

Invariant: answers are written to stdout, everything else to stderr. All text passes through `printable`, and none of it
is markup, because anybody may choose names in a bucket.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from tierd.cli.tables import Table, wrap_text
from tierd.core.errors import printable, printable_json
from tierd.core.units import format_age
from tierd.logs import format_exit_error

_STYLES = {"alert": "1;31", "warning": "33", "right": "32", "command": "1"}  # codes of ECMA-48


def print_answer(answer: Table | str, *, style: str = "", wrap: bool = True) -> None:
    """Print a table or a line to stdout.

    Args:
        style: a name of `_STYLES`, for a terminal; empty: none.
        wrap: whether a line is wrapped between words at the terminal's width.
    """
    if isinstance(answer, Table):
        print_table(answer)
        return
    text, width = printable(answer), terminal_width()
    lines = "\n".join(wrap_text(text, width)) if wrap and width else text
    is_styled = style and width and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"\x1b[{_STYLES[style]}m{lines}\x1b[0m" if is_styled else lines)


def complain(text: object) -> None:
    """Print a line to stderr: an error, or a note on the answer."""
    print(format_exit_error(str(text)), file=sys.stderr)


def print_lines(text: object, *, error: bool = False) -> None:
    """Print text of several lines unchanged."""
    lines = map(printable, str(text).split("\n"))
    print("\n".join(lines), file=sys.stderr if error else sys.stdout, flush=True)


def print_page(page: str) -> None:
    """Print a page in Markdown: as it is through a pipe; on a terminal without pictures, its tables as tables."""
    if terminal_width() is None:
        print_lines(page)
        return
    lines = [line for line in page.replace("**", "").split("\n") if not line.startswith("![")]
    for is_table, block in itertools.groupby(lines, lambda line: line.startswith("| ")):
        if is_table:
            head, _, *rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in block]
            print_answer(Table(head, rows))
        else:
            for line in block:
                print_answer(line)


def print_json(answer: Any) -> None:
    """Print an answer as one JSON object. In names of files, bytes that are not UTF-8 are escaped."""
    try:
        data = msgspec.json.encode(answer)
    except UnicodeEncodeError:
        data = json.dumps(_printable_values(msgspec.to_builtins(answer)), ensure_ascii=False).encode()
    sys.stdout.write(printable_json(msgspec.json.format(data, indent=2).decode()) + "\n")


def _printable_values(value: Any) -> Any:
    """Return an answer with every unpaired surrogate escaped."""
    if isinstance(value, dict):
        return {_printable_values(key): _printable_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_printable_values(inner) for inner in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def age_of(moment: object, now: datetime | None = None) -> str:
    """Format the age of a moment in RFC 3339; `unknown` if it is none."""
    try:
        return format_age(((now or datetime.now(UTC)) - datetime.fromisoformat(str(moment))).total_seconds())
    except (ValueError, TypeError):
        return "unknown"


def policy_conflict_lines(policies: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Return a line with the remedy for each policy that is unreadable or differs from another of its run and tier."""
    conflicts = [policy for policy in policies if policy["disagrees"]]
    for conflict in conflicts:
        rules = {name: value for name, value in (conflict["retention"] or {}).items() if value is not None}
        says = (
            f"keeps {rules}" if conflict["retention"] else f"cannot be read, so nothing is deleted: {conflict['why']}"
        )
        origin = f"{conflict['given']} on {conflict['host'] or '?'}"
        yield f"{conflict['tier']}: run {conflict['run']}: {conflict['key']} ({origin}) {says}"
    if conflicts:
        yield "Whatever any of these keeps is kept. Make them agree, or delete the object of a node that is gone."


_MOST_METRICS = 3
_SHORT_ID = 4  # digits of an attempt's id, or more


def print_table(content: Table) -> None:
    """Print a table of any length. rich takes longer for many lines than it takes to observe what they show."""
    sys.stdout.write("".join(f"{line}\n" for line in content.lines(terminal_width())))


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if the output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def attempt_names(attempts: Iterable[str]) -> dict[str, str]:
    """Return how to show each attempt: whole through a pipe, else the first digits of its random part that are unique.

    Options take these digits, too: see `full_attempt`.
    """
    ids = set(attempts)
    if not sys.stdout.isatty():
        return {attempt: attempt for attempt in ids}
    return {attempt: _short_attempt(attempt, ids) for attempt in ids}


def _short_attempt(attempt: str, ids: Collection[str]) -> str:
    digits = attempt.rpartition("-")[2]
    for length in range(_SHORT_ID, len(digits) + 1):
        if sum(other.rpartition("-")[2].startswith(digits[:length]) for other in ids) == 1:
            return digits[:length]
    return attempt


def format_metrics(values: Mapping[str, float | None]) -> str:
    """Format metrics for people, the first few by name: losses first, because frameworks log many others."""
    ordered = sorted(values.items(), key=lambda metric: ("loss" not in metric[0], metric[0]))
    texts = [f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in ordered]
    remainder = f", {len(texts) - _MOST_METRICS} more" if len(texts) > _MOST_METRICS else ""
    return ", ".join(texts[:_MOST_METRICS]) + remainder
