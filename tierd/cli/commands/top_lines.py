"""The content of `tierd top`: the page's sections as lines for a terminal, from the answers that the page gets.

Invariant: no line is wider than asked for. Names are shown as `printable` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.text import Text

from tierd.cli.commands.status_commands import activity_text
from tierd.cli.options import format_duration
from tierd.cli.output import format_metrics, format_size, lay_out_table, wrap_text
from tierd.core.errors import printable

Members = Mapping[str, Any]

_CHECKPOINTS, _EVENTS, _LAUNCHES = 12, 30, 8  # of each run the newest; the last; of each run the last
_LINE_WIDTH = 160  # columns of a drawn launch at most, because a file or a pipe has lines of any width
_BARS = " ▁▂▃▄▅▆▇█"
_FAILURE_KINDS = (
    "failing",
    "persist failed",
    "corrupt",
    "quarantined",
    "given up",
    "two launches",
    "rolled back",
    "replicas differ",
)


def top_lines(status: Members, runs: Members | None, width: int) -> list[Text]:
    """Lay out all sections. A member that a daemon of another version lacks leaves out its section.

    `status` is as `tierd status --json` prints it, `runs` as `/runs` has it over HTTP, if it is known.
    """
    texts: list[Text] = []
    sections: list[tuple[str, Callable[[], Iterator[Text]]]] = [
        ("PROBLEMS", lambda: _problems(status, width)),
        ("TIERS", lambda: _tiers(status, runs, width)),
        ("RUNS", lambda: _runs(status, runs, width) if runs is not None else _wrap_lines(["not known"], width)),
        ("EVENTS", lambda: _events(status, width)),
    ]
    for name, lines in sections:
        try:
            section_lines = list(lines())
        except (KeyError, TypeError, ValueError) as error:
            section_lines = list(
                _wrap_lines([f"not shown, because the daemon is of another version of tierd: {error}"], width)
            )
        texts += [Text(name[:width], style="bold reverse"), *section_lines, Text()]
    return texts[:-1]


def headline(status: Members) -> str:
    """Describe the daemon and its node."""
    count = status.get("trainers", "?")
    free = f"{status['spool_free']:.0%} of the spool's disk free" if "spool_free" in status else ""
    facts = [
        f"tierd {status.get('version', '?')}",
        f"pid {status.get('pid', '?')}",
        f"{count} trainer{'' if count == 1 else 's'}",
        free,
        f"{str(status.get('at'))[11:19]} UTC",
        str(status.get("spool", "")),  # last, because it may be too long
    ]
    return printable(", ".join(fact for fact in facts if fact))


def _wrap_lines(lines: Sequence[str], width: int, style: str = "") -> Iterator[Text]:
    for line in lines:
        yield from (Text(piece, style=style) for piece in wrap_text(printable(line), width))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, key: int = 0) -> Iterator[Text]:
    yield from map(Text, lay_out_table(columns, [[*map(printable, row)] for row in rows], width, key))


def _problems(status: Members, width: int) -> Iterator[Text]:
    problems = status["problems"]
    if not problems:
        yield Text("none", style="green")
    for problem in problems:
        style = "bold red" if problem["severity"] == "alert" else "yellow"
        yield from _wrap_lines([f"{problem['severity'].upper()} {problem['place']}: {problem['why']}"], width, style)


def _tiers(status: Members, runs: Members | None, width: int) -> Iterator[Text]:
    rows = []
    for tier in status["tiers"]:
        sent = (runs or {}).get("sent_bytes", {}).get(tier["name"], ())
        pending = f"{tier['pending_parts']} parts, {format_size(tier['pending_bytes'])}"
        prune = "append-only" if tier["append_only"] else str(tier["pending_prunes"])
        answers = "yes" if tier["reached"] and not tier.get("waiting_since") else "no"
        rows.append(
            (
                tier["name"],
                answers,
                pending,
                prune,
                _bars(sent),
                f"{format_size(max(sent, default=0) / 60)}/s",
                activity_text(tier),
            )
        )
    yield from _table(("TIER", "ANSWERS", "PENDING", "TO PRUNE", "SENT", "AT MOST", "DOING"), rows, width)
    for tier in status["tiers"]:
        if tier["last_error"]:
            yield from _wrap_lines([f"{tier['name']}: {tier['last_error']}"], width, "red")


def _bars(sent: Sequence[int]) -> str:
    """Draw the bytes of each minute; the most has the tallest bar."""
    peak = max(sent, default=0)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // peak) if peak else 0] for count in sent)


def _runs(status: Members, runs: Members, width: int) -> Iterator[Text]:
    by_run: dict[str, list[Members]] = {}
    for members in runs["checkpoints"]:
        by_run.setdefault(members["run"], []).append(members)
    if not by_run:
        yield Text("none in the spool")
    if runs["unreached"]:
        words = f"tiers that do not answer, so their copies are not known: {', '.join(runs['unreached'])}"
        yield from _wrap_lines([words], width, "yellow")
    for name, checkpoints in by_run.items():
        newest = next((checkpoint["step"] for checkpoint in checkpoints if _is_on_a_tier(checkpoint)), None)
        safe = "on no tier" if newest is None else f"step {newest} is on a tier"
        yield from _wrap_lines([f"{name}: {safe}"], width, "bold yellow" if newest is None else "bold green")
        yield from _timeline([launch for launch in runs["launches"] if launch["run"] == name], checkpoints, width)
        rows = [
            row for checkpoint in checkpoints[:_CHECKPOINTS] for row in _copy_rows(checkpoint, runs, str(status["at"]))
        ]
        columns = ("STEP", "ATTEMPT", "AGE", "METRICS", "NOW", "WHERE", "STATE", "RANKS", "STORED", "VERDICT")
        yield from _table(columns, rows, width, key=5)
        if len(checkpoints) > _CHECKPOINTS:
            yield from _wrap_lines([f"and {len(checkpoints) - _CHECKPOINTS} older checkpoints: tierd ls"], width, "dim")


def _is_on_a_tier(checkpoint: Members) -> bool:
    return any(copy["state"] == "verified" for copy in checkpoint["copies"])


def _timeline(launches: Sequence[Members], checkpoints: Sequence[Members], width: int) -> Iterator[Text]:
    """Draw a line for each launch, on one scale of steps: ● is on a tier, ○ is not, ✗ is damaged."""
    latest_launches = launches[-_LAUNCHES:]
    steps = [checkpoint["step"] for checkpoint in checkpoints]
    steps += [branch["from_step"] for branch in launches if branch["from_step"] is not None]
    low, high = min(steps), max(steps)
    room = max(10, min(width - 2, _LINE_WIDTH))
    for launch in latest_launches:
        how = "from the beginning" if launch["from_step"] is None else f"from step {launch['from_step']}"
        rollback = f", rolled back by {launch['lost_steps']} steps" if launch["lost_steps"] else ""
        words = f"launch {launch['attempt']}: {how} to step {launch['last_step']}{rollback}"
        yield from _wrap_lines([words], width, "yellow" if rollback else "")
        if high > low:
            launch_checkpoints = [
                checkpoint for checkpoint in checkpoints if checkpoint["attempt"] == launch["attempt"]
            ]
            # To where a later launch left it, also if retention has deleted that checkpoint since.
            branch_steps = [branch["from_step"] for branch in launches if branch["from_attempt"] == launch["attempt"]]
            last = max(launch["last_step"], *branch_steps) if branch_steps else launch["last_step"]
            yield Text(
                _launch_line(launch, last, launch_checkpoints, (low, high), room),
                style="dim" if launch is not latest_launches[-1] else "",
            )


def _launch_line(launch: Members, last: int, checkpoints: Sequence[Members], steps: tuple[int, int], room: int) -> str:
    low, high = steps

    def at(step: int) -> int:
        return (step - low) * (room - 1) // (high - low)

    drawn = [" "] * room
    first = launch["first_step"] if launch["from_step"] is None else launch["from_step"]
    for column in range(at(first), at(last) + 1):
        drawn[column] = "─"
    if launch["from_step"] is not None:
        drawn[at(first)] = "└"
    for checkpoint in sorted(checkpoints, key=_is_on_a_tier):
        is_damaged = any(copy["state"] in ("corrupt", "quarantined") for copy in checkpoint["copies"])
        drawn[at(checkpoint["step"])] = "✗" if is_damaged else "●" if _is_on_a_tier(checkpoint) else "○"
    return "".join(drawn).rstrip()


def _copy_rows(checkpoint: Members, runs: Members, at: str) -> Iterator[tuple[str, ...]]:
    name = f"{checkpoint['run']}/{checkpoint['step']:012}.{checkpoint['attempt']}"
    notes = ["a restore tries this first"] if checkpoint["resumes"] else []
    notes += ["pinned"] if checkpoint["pinned"] else []
    notes += ["held by a restore"] if name in runs["held"] else []
    notes += [] if checkpoint["complete"] else [f"incomplete: not all of {checkpoint['world_size']} ranks"]
    notes += [
        _describe_transfer(transfer)
        for transfer in runs["in_flight"]
        if f"{transfer['run']}/{transfer['step']:012}.{transfer['attempt']}" == name
    ]
    age = _age(checkpoint["created"], at)
    naming = (
        str(checkpoint["step"]),
        checkpoint["attempt"],
        age,
        format_metrics(checkpoint["metrics"]),
        "; ".join(notes),
    )
    for copy in checkpoint["copies"]:
        why = "; ".join([*copy["reasons"], *copy["defects"]]) or "no rule was given"
        verdict = f"kept: {why}" if copy["keep"] else f"to be pruned: {why}"
        ranks, stored = (
            f"{len(copy['ranks'])}/{checkpoint['world_size']}",
            format_size(copy["stored_size"] or copy["size"]),
        )
        yield (*naming, copy["place"], copy["state"], ranks, stored, verdict)


def _describe_transfer(transfer: Members) -> str:
    share = f" {transfer['done'] / transfer['total']:.0%}" if transfer["total"] else ""
    to = f" to {transfer['tier']}" if transfer.get("tier") else ""
    return f"{transfer['doing']} of rank {transfer['rank']}{to}{share}"


def _age(created: str | None, at: str) -> str:
    if created is None:
        return "unknown"
    seconds = (datetime.fromisoformat(at) - datetime.fromisoformat(created)).total_seconds()
    return format_duration(float(max(0, round(seconds))))


def _events(status: Members, width: int) -> Iterator[Text]:
    events = status["events"][-_EVENTS:]
    if not events:
        yield Text("none yet")
    for event in reversed(events):
        why = f": {event['why']}" if event["why"] else ""
        words = f"{str(event['at'])[11:19]} {event['what']} {event['place']} {event['subject']}{why}"
        yield from _wrap_lines([words], width, "red" if event["what"] in _FAILURE_KINDS else "")
