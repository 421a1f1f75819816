"""The content of `tierd top`: the page's sections as lines for a terminal, from the answers that the page gets.

Invariant: no line is wider than asked for. Names are shown as `printable` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from tierd.cli.commands.status_lines import FAILURE_KINDS, event_table, hanging_lines, problem_lines, tier_table
from tierd.cli.output import age_of, attempt_names, format_metrics
from tierd.cli.tables import Table, cut_text
from tierd.core.errors import printable
from tierd.core.planning.place import SPOOL
from tierd.core.units import format_size

Members = Mapping[str, Any]

_CHECKPOINTS, _EVENTS, _LAUNCHES = 12, 30, 8  # of each run the newest; the last; of each run the last
_LINE_WIDTH = 160  # columns of a drawn launch at most, because a file or a pipe has lines of any width
_MINUTES = 20  # whose throughput is drawn
_MIN_DRAWING = 10  # columns for a drawn launch
_STYLES = {"alert": "bold red", "warning": "yellow", "right": "green", "command": "bold"}
_LAG_STYLES = {"current": "green", "sending": "", "local": ""}  # every other state is yellow
_BARS = " ▁▂▃▄▅▆▇█"


def top_lines(status: Members, runs: Members | None, width: int | None) -> list[Text]:
    """Lay out all sections. A member that a daemon of another version lacks leaves out its section.

    `status` is as `tierd status --json` prints it, `runs` as `/runs` has it over HTTP, if it is known. Without a
    `width`, a line may have any.
    """
    texts: list[Text] = []
    sections: list[tuple[str, Callable[[], Iterator[Text]]]] = [
        ("PROBLEMS", lambda: _problems(status, width)),
        ("TIERS", lambda: _tiers(status, runs, width)),
        ("RUNS", lambda: _runs(status, runs, width) if runs is not None else _wrap_lines("not known", width)),
        ("EVENTS", lambda: _events(status, width)),
    ]
    for name, lines in sections:
        try:
            section_lines = list(lines())
        except (KeyError, TypeError, ValueError) as error:
            section_lines = [*_wrap_lines(f"not shown, because the daemon is of another version: {error}", width)]
        texts += [Text(name[:width], style="bold reverse"), *section_lines, Text()]
    return texts[:-1]


def headline(status: Members) -> str:
    """Describe the daemon and its node."""
    count = status.get("trainers", "?")
    free = f"{status['spool_free']:.0%} of the spool's disk free" if "spool_free" in status else ""
    facts = [
        f"tierd {status.get('version', '?')}",
        f"pid {status['pid']}" if status.get("pid") else "not running",
        f"{count} trainer{'' if count == 1 else 's'}",
        free,
        f"{str(status.get('at'))[11:19]} UTC",
        str(status.get("spool", "")),  # last, because it may be too long
    ]
    return printable(", ".join(fact for fact in facts if fact))


def _problems(status: Members, width: int | None) -> Iterator[Text]:
    for line, style in problem_lines(status, width):
        fits = width is None or cell_len(line) <= width
        for shown in [line] if fits else hanging_lines(line, width):
            yield Text(shown, style=_STYLES.get(style, ""))


def _wrap_lines(text: str, width: int | None, style: str = "") -> Iterator[Text]:
    yield from (Text(line, style=style) for line in hanging_lines(text, width))


def _tiers(status: Members, runs: Members | None, width: int | None) -> Iterator[Text]:
    sent_bytes: Mapping[str, Sequence[int]] = (runs or {}).get("sent_bytes", {})

    def sent(tier: Members) -> Sequence[int]:
        return sent_bytes.get(tier["name"], ())

    throughput: dict[str, Callable[[Members], str]] = {
        "SENT": lambda tier: _bars(sent(tier)),
        "AT MOST": lambda tier: f"{format_size(max(sent(tier)) / 60)}/s" if any(sent(tier)) else "",
    }
    yield from map(Text, tier_table(status, throughput).lines(width))


def _bars(sent: Sequence[int]) -> str:
    """Draw the bytes of each minute; the most has the tallest bar. Without any, draw nothing."""
    peak = max(sent, default=0)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // peak)] for count in sent[-_MINUTES:]) if peak else ""


def _runs(status: Members, runs: Members, width: int | None) -> Iterator[Text]:
    by_run: dict[str, list[Members]] = {}
    for members in runs["checkpoints"]:
        by_run.setdefault(members["run"], []).append(members)
    if not by_run:
        yield Text("none in the spool")
    if runs["unreached"]:
        words = f"tiers that do not answer, so their copies are not known: {', '.join(runs['unreached'])}"
        yield from _wrap_lines(words, width, "yellow")
    lags = {lag["run"]: lag for lag in runs.get("lags", ())}
    for name, checkpoints in by_run.items():
        lag = lags.get(name)
        style = _LAG_STYLES.get(lag["state"], "yellow") if lag else ""
        yield from _wrap_lines(f"{name}: {lag['text']}" if lag else name, width, f"bold {style}".strip())
        names = attempt_names(
            [checkpoint["attempt"] for checkpoint in checkpoints]
            + [launch["attempt"] for launch in runs["launches"] if launch["run"] == name]
        )
        launches = [launch for launch in runs["launches"] if launch["run"] == name]
        yield from _timeline(launches, checkpoints, names, width)
        yield from map(Text, _checkpoint_table(status, runs, checkpoints[:_CHECKPOINTS], names).lines(width))
        if len(checkpoints) > _CHECKPOINTS:
            yield from _wrap_lines(f"and {len(checkpoints) - _CHECKPOINTS} older checkpoints: tierd ls", width, "dim")


def _is_on_a_tier(checkpoint: Members) -> bool:
    return any(copy["state"] == "verified" for copy in checkpoint["copies"])


def _timeline(
    launches: Sequence[Members], checkpoints: Sequence[Members], names: Mapping[str, str], width: int | None
) -> Iterator[Text]:
    """Draw a line for each launch, on one scale of steps: ● is on a tier, ○ is not, ✗ is damaged."""
    latest_launches = launches[-_LAUNCHES:]
    steps = [checkpoint["step"] for checkpoint in checkpoints]
    steps += [branch["from_step"] for branch in launches if branch["from_step"] is not None]
    low, high = min(steps), max(steps)
    words = [printable(_describe_launch(launch, names)) for launch in latest_launches]
    begin = max(map(cell_len, words), default=0) + 2
    room = min((width or _LINE_WIDTH) - begin, _LINE_WIDTH)
    for launch, text in zip(latest_launches, words, strict=True):
        drawn = ""
        if high > low and room >= _MIN_DRAWING:
            launch_checkpoints = [
                checkpoint for checkpoint in checkpoints if checkpoint["attempt"] == launch["attempt"]
            ]
            # To where a later launch left it, also if retention has deleted that checkpoint since.
            branch_steps = [branch["from_step"] for branch in launches if branch["from_attempt"] == launch["attempt"]]
            last = max(launch["last_step"], *branch_steps) if branch_steps else launch["last_step"]
            drawn = _launch_line(launch, last, launch_checkpoints, (low, high), room)
        line = f"{text}{' ' * (begin - cell_len(text))}{drawn}".rstrip()
        style = "yellow" if launch["lost_steps"] else "dim" if launch is not latest_launches[-1] else ""
        yield Text(line if width is None else cut_text(line, width), style=style)


def _describe_launch(launch: Members, names: Mapping[str, str]) -> str:
    origin = "" if launch["from_step"] is None else f" from step {launch['from_step']}"
    rollback = f", rolled back by {launch['lost_steps']}" if launch["lost_steps"] else ""
    return f"launch {names[launch['attempt']]}{origin} to step {launch['last_step']}{rollback}"


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


def _checkpoint_table(
    status: Members, runs: Members, checkpoints: Sequence[Members], names: Mapping[str, str]
) -> Table:
    """Return one line for each checkpoint, with a column for each place."""
    copy_places = [copy["place"] for checkpoint in checkpoints for copy in checkpoint["copies"]]
    tier_names = [tier["name"] for tier in status.get("tiers", ())]
    places = list(dict.fromkeys([SPOOL, *tier_names, *copy_places]))
    show_attempts = len({checkpoint["attempt"] for checkpoint in checkpoints}) > 1
    now = datetime.now(UTC)
    rows = []
    for checkpoint in checkpoints:
        copies = {copy["place"]: copy for copy in checkpoint["copies"]}
        reasons = dict.fromkeys(reason for copy in copies.values() if copy["keep"] for reason in copy["reasons"])
        rows.append(
            (
                str(checkpoint["step"]),
                names[checkpoint["attempt"]] if show_attempts else "",
                age_of(checkpoint["created"], now),
                *(_copy_text(copies[place], checkpoint) if place in copies else "-" for place in places),
                "; ".join(_notes(checkpoint, runs)),
                format_metrics(checkpoint["metrics"]),
                "; ".join(reasons),
            )
        )
    return Table(("STEP", "ATTEMPT", "AGE", *places, "NOW", "METRICS", "KEPT BECAUSE"), rows)


def _copy_text(copy: Members, checkpoint: Members) -> str:
    """Say how far a copy is: its state, and the share of its ranks if one is missing."""
    ranks, world_size = len(copy["ranks"]), checkpoint["world_size"]
    return str(copy["state"]) if ranks == world_size else f"{copy['state']} {ranks}/{world_size}"


def _notes(checkpoint: Members, runs: Members) -> Iterator[str]:
    name = f"{checkpoint['run']}/{checkpoint['step']:012}.{checkpoint['attempt']}"
    for transfer in runs["in_flight"]:
        if f"{transfer['run']}/{transfer['step']:012}.{transfer['attempt']}" == name:
            yield _describe_transfer(transfer)
    if checkpoint["resumes"]:
        yield "resumes next"
    if checkpoint["pinned"]:
        yield "pinned"
    if name in runs["held"]:
        yield "held by a restore"
    if defects := [defect for copy in checkpoint["copies"] for defect in copy["defects"]]:
        yield str(defects[0])
    if going := [copy["place"] for copy in checkpoint["copies"] if not copy["keep"]]:
        yield f"to be pruned: {', '.join(going)}"


def _describe_transfer(transfer: Members) -> str:
    share = f" {transfer['done'] / transfer['total']:.0%}" if transfer["total"] else ""
    to = f" to {transfer['tier']}" if transfer.get("tier") else ""
    return f"{transfer['doing']} of rank {transfer['rank']}{to}{share}"


def _events(status: Members, width: int | None) -> Iterator[Text]:
    events = status["events"][-_EVENTS:][::-1]
    if not events:
        yield Text("none yet")
        return
    head, *lines = event_table(events).lines(width)
    yield Text(head)
    for event, line in zip(events, lines, strict=True):
        yield Text(line, style="red" if event["what"] in FAILURE_KINDS else "")
