"""A daemon's status as lines and tables: the parts that `status` and `top` share.

Invariant: problems are whole, because people act on them; each other row is one line on a terminal. A member that a
daemon of another version does not send raises `KeyError`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tierd.cli.output import age_of, attempt_names
from tierd.cli.tables import Table, wrap_text
from tierd.core.errors import printable
from tierd.core.units import format_size

Members = Mapping[str, Any]

FAILURE_KINDS = (
    "failing",
    "persist failed",
    "corrupt",
    "quarantined",
    "given up",
    "two launches",
    "rolled back",
    "replicas differ",
)

_ATTEMPT = re.compile(r" \(attempt [^)]*\)( rank 0 of 1\b)?")


def problem_texts(status: Members) -> Iterator[tuple[str, str]]:
    """Yield each problem in words, with its style, the worst first."""
    since = {alert["place"]: f", for {age_of(alert['since'])}" for alert in status.get("alerts", ())}
    for problem in status.get("problems", ()):
        place, why = problem["place"], str(problem["why"])
        is_alert = problem["severity"] == "alert"
        lasting = since.get(place, "") if is_alert else ""
        words = why.removeprefix(f"{place}: ")  # an error of a tier may begin with the tier's name
        yield problem["severity"], f"{problem['severity'].upper()} {place}{lasting}: {words}"


def problem_lines(status: Members, width: int | None) -> Iterator[tuple[str, str]]:
    """Lay out the problems, each with its next step below, and yield each line with its style.

    A command is one line of any width, to be copied.
    """
    texts = list(problem_texts(status))
    if "problems" not in status:
        yield "problems are not known: the daemon is of an older version", ""
    elif not texts:
        yield "nothing is wrong", "right"
    for (style, text), problem in zip(texts, status.get("problems", ()), strict=True):
        yield from ((line, style) for line in hanging_lines(text, width))
        if do := problem.get("do"):
            yield from ((f"  {line}", "") for line in hanging_lines(f"-> {do}", width and width - 2))
        if command := problem.get("command"):
            yield f"  $ {printable(command)}", "command"


def hanging_lines(text: str, width: int | None) -> list[str]:
    """Wrap text, with all lines but the first indented."""
    line = printable(text)
    if width is None:
        return [line]
    first, *others = wrap_text(line, width)
    if not others:
        return [first]
    rest = line[len(first) :].lstrip()
    return [first, *(f"  {other}" for other in wrap_text(rest, max(1, width - 2)))]


def lease_lines(status: Members) -> Iterator[str]:
    """Yield a line for each launch that saves on this node."""
    leases = list(status.get("leases", ()))
    names = attempt_names(lease["attempt"] for lease in leases)
    for (run, attempt), group in itertools.groupby(leases, key=lambda lease: (lease["run"], lease["attempt"])):
        ranks = list(group)
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(str(lease['rank']) for lease in ranks)}"
        pids = ", ".join(dict.fromkeys(str(lease["pid"]) for lease in ranks))
        newest = max((lease["renewed"] for lease in ranks), default="")
        last = f", last {age_of(newest)} ago" if newest else ""
        since = age_of(min(lease["since"] for lease in ranks))
        yield f"run {run}: attempt {names[attempt]} saves {who} (pid {pids}) for {since}{last}"


def does_answer(tier: Members) -> bool:
    """Whether a tier answered the last listing and does not wait for an answer now."""
    return bool(tier["reached"]) and not tier.get("waiting_since")


def activity_text(tier: Members) -> str:
    """Say what the daemon does for a tier, and since when it waits for an answer. An attempt has no room in a table."""
    doing = _ATTEMPT.sub("", tier["doing"] or "")
    asked = f"; waits until {tier['asked_until'][11:19]} UTC, as the server asked" if tier.get("asked_until") else ""
    if since := tier.get("waiting_since"):
        waits = f"no answer for {age_of(since)}"
        return f"{doing}; {waits}{asked}" if doing else f"{waits}{asked}"
    if not doing and tier["retry_in_s"]:
        return f"tries again in {tier['retry_in_s']:.0f} s{asked}"
    return f"{doing or 'idle'}{asked}"


def pending_text(tier: Members) -> str:
    """Say what the tier still lacks; `-` for nothing."""
    parts = tier["pending_parts"]
    return f"{parts} part{'s' * (parts != 1)}, {format_size(tier['pending_bytes'])}" if parts else "-"


def prunes_text(tier: Members) -> str:
    """Say how many copies retention has still to delete; `-` for none."""
    return "append-only" if tier.get("append_only") else str(tier["pending_prunes"] or "-")


def tier_table(status: Members, more: Mapping[str, Callable[[Members], str]] | None = None) -> Table:
    """Return one line for each tier, with the columns `more` before its URL; `unknown` is what the daemon does not
    send."""
    columns: dict[str, Callable[[Members], str]] = {
        "TIER": lambda tier: tier["name"],
        "ANSWERS": lambda tier: "yes" if does_answer(tier) else "no",
        "PENDING": pending_text,
        "TO PRUNE": prunes_text,
        "DOING": activity_text,
        **(more or {}),
        "URL": lambda tier: tier["url"],
        "COMPRESSION": lambda tier: tier["compression"],
    }
    rows = [[_cell(text, tier) for text in columns.values()] for tier in status["tiers"]]
    return Table(tuple(columns), rows)


def _cell(text: Callable[[Members], str], tier: Members) -> str:
    try:
        return str(text(tier))
    except KeyError:
        return "unknown"


def event_table(events: Sequence[Members]) -> Table:
    """Return one line for each event. A run and an attempt are named only where the events are of several."""
    names = attempt_names(event["attempt"] for event in events if event.get("attempt"))
    runs = {event.get("run") for event in events if event.get("run")}
    now = datetime.now(UTC)
    rows = []
    for event in events:
        step = event.get("step")
        subject = "" if step is not None else event["subject"]
        run = event.get("run") or "" if len(runs) > 1 else ""
        rank = f"rank {event['rank']}" if (event.get("world_size") or 1) > 1 and event.get("rank") is not None else ""
        attempt = names.get(event.get("attempt") or "", "") if len(names) > 1 else ""
        text = "; ".join(filter(None, (rank, subject, event["why"])))
        row = (age_of(event["at"], now), event["place"], event["what"], run, "" if step is None else str(step), attempt)
        rows.append((*row, text))
    return Table(("AGE", "PLACE", "EVENT", "RUN", "STEP", "ATTEMPT", "WHY"), rows)
