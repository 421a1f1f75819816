"""The content of `tierd top`: the page's sections as lines for a terminal, from the answers that the page gets.

Invariant: no line is wider than asked for. Names are shown as `printable` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.text import Text

from tierd.cli.layout import lay_out, wrapped
from tierd.cli.reading.status import doing
from tierd.cli.tables import metrics, size
from tierd.cli.units import span
from tierd.core.printable import printable

Members = Mapping[str, Any]

_CHECKPOINTS, _EVENTS, _LAUNCHES = 12, 30, 8  # of each run the newest; the last; of each run the last
_LINE_WIDTH = 160  # columns of a drawn launch at most, because a file or a pipe has lines of any width
_BARS = " ▁▂▃▄▅▆▇█"
_BAD = ("failing", "persist failed", "corrupt", "quarantined", "given up", "two launches", "rolled back")


def frame(status: Members, runs: Members | None, width: int) -> list[Text]:
    """Lay out all sections. A member that a daemon of another version lacks leaves out its section.

    Args:
        status: as `tierd status --json` prints it.
        runs: as `/runs` has it over HTTP; None: not known.
        width: of the lines.
    """
    found: list[Text] = []
    sections: list[tuple[str, Callable[[], Iterator[Text]]]] = [
        ("PROBLEMS", lambda: _problems(status, width)),
        ("TIERS", lambda: _tiers(status, runs, width)),
        ("RUNS", lambda: _runs(status, runs, width) if runs is not None else _plain(["not known"], width)),
        ("EVENTS", lambda: _events(status, width)),
    ]
    for name, lines in sections:
        try:
            shown = list(lines())
        except (KeyError, TypeError, ValueError) as error:
            shown = list(_plain([f"not shown, because the daemon is of another version of tierd: {error}"], width))
        found += [Text(name[:width], style="bold reverse"), *shown, Text()]
    return found[:-1]


def headline(status: Members) -> str:
    """Describe the daemon and its node."""
    count = status.get("trainers", "?")
    free = f"{status['spool_free']:.0%} of the spool's disk free" if "spool_free" in status else ""
    shown = [
        f"tierd {status.get('version', '?')}",
        f"pid {status.get('pid', '?')}",
        f"{count} trainer{'' if count == 1 else 's'}",
        free,
        f"{str(status.get('at'))[11:19]} UTC",
        str(status.get("spool", "")),  # last, because it may be too long
    ]
    return printable(", ".join(one for one in shown if one))


def _plain(lines: Sequence[str], width: int, style: str = "") -> Iterator[Text]:
    for line in lines:
        yield from (Text(one, style=style) for one in wrapped(printable(line), width))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, key: int = 0) -> Iterator[Text]:
    yield from map(Text, lay_out(columns, [[*map(printable, row)] for row in rows], width, key))


def _problems(status: Members, width: int) -> Iterator[Text]:
    found = status["problems"]
    if not found:
        yield Text("none", style="green")
    for one in found:
        style = "bold red" if one["severity"] == "alert" else "yellow"
        yield from _plain([f"{one['severity'].upper()} {one['place']}: {one['why']}"], width, style)


def _tiers(status: Members, runs: Members | None, width: int) -> Iterator[Text]:
    rows = []
    for tier in status["tiers"]:
        sent = (runs or {}).get("sent_bytes", {}).get(tier["name"], ())
        pending = f"{tier['pending_parts']} parts, {size(tier['pending_bytes'])}"
        prune = "append-only" if tier["append_only"] else str(tier["pending_prunes"])
        answers = "yes" if tier["reached"] and not tier.get("waiting_since") else "no"
        rows.append(
            (tier["name"], answers, pending, prune, _bars(sent), f"{size(max(sent, default=0) / 60)}/s", doing(tier))
        )
    yield from _table(("TIER", "ANSWERS", "PENDING", "TO PRUNE", "SENT", "AT MOST", "DOING"), rows, width)
    for tier in status["tiers"]:
        if tier["last_error"]:
            yield from _plain([f"{tier['name']}: {tier['last_error']}"], width, "red")


def _bars(sent: Sequence[int]) -> str:
    """Draw the bytes of each minute; the most has the tallest bar."""
    most = max(sent, default=0)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most) if most else 0] for count in sent)


def _runs(status: Members, runs: Members, width: int) -> Iterator[Text]:
    by_run: dict[str, list[Members]] = {}
    for one in runs["checkpoints"]:
        by_run.setdefault(one["run"], []).append(one)
    if not by_run:
        yield Text("none in the spool")
    if runs["unreached"]:
        words = f"tiers that do not answer, so their copies are not known: {', '.join(runs['unreached'])}"
        yield from _plain([words], width, "yellow")
    for name, found in by_run.items():
        newest = next((one["step"] for one in found if _is_on_a_tier(one)), None)
        safe = "on no tier" if newest is None else f"step {newest} is on a tier"
        yield from _plain([f"{name}: {safe}"], width, "bold yellow" if newest is None else "bold green")
        yield from _timeline([one for one in runs["launches"] if one["run"] == name], found, width)
        rows = [row for one in found[:_CHECKPOINTS] for row in _copies(one, runs, str(status["at"]))]
        columns = ("STEP", "ATTEMPT", "AGE", "METRICS", "NOW", "WHERE", "STATE", "RANKS", "STORED", "VERDICT")
        yield from _table(columns, rows, width, key=5)
        if len(found) > _CHECKPOINTS:
            yield from _plain([f"and {len(found) - _CHECKPOINTS} older checkpoints: tierd ls"], width, "dim")


def _is_on_a_tier(checkpoint: Members) -> bool:
    return any(copy["state"] == "verified" for copy in checkpoint["copies"])


def _timeline(launches: Sequence[Members], checkpoints: Sequence[Members], width: int) -> Iterator[Text]:
    """Draw a line for each launch, on one scale of steps: ● is on a tier, ○ is not, ✗ is damaged."""
    shown = launches[-_LAUNCHES:]
    steps = [one["step"] for one in checkpoints]
    steps += [one["from_step"] for one in launches if one["from_step"] is not None]
    low, high = min(steps), max(steps)
    room = max(10, min(width - 2, _LINE_WIDTH))
    for launch in shown:
        how = "from the beginning" if launch["from_step"] is None else f"from step {launch['from_step']}"
        lost = f", rolled back by {launch['lost_steps']} steps" if launch["lost_steps"] else ""
        words = f"launch {launch['attempt']}: {how} to step {launch['last_step']}{lost}"
        yield from _plain([words], width, "yellow" if lost else "")
        if high > low:
            own = [one for one in checkpoints if one["attempt"] == launch["attempt"]]
            # To where a later launch left it, also if retention has deleted that checkpoint since.
            left_at = [one["from_step"] for one in launches if one["from_attempt"] == launch["attempt"]]
            last = max(launch["last_step"], *left_at) if left_at else launch["last_step"]
            yield Text(
                _launch_line(launch, last, own, (low, high), room), style="dim" if launch is not shown[-1] else ""
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
    for one in sorted(checkpoints, key=_is_on_a_tier):
        bad = any(copy["state"] in ("corrupt", "quarantined") for copy in one["copies"])
        drawn[at(one["step"])] = "✗" if bad else "●" if _is_on_a_tier(one) else "○"
    return "".join(drawn).rstrip()


def _copies(one: Members, runs: Members, at: str) -> Iterator[tuple[str, ...]]:
    name = f"{one['run']}/{one['step']:012}.{one['attempt']}"
    notes = ["a restore tries this first"] if one["resumes"] else []
    notes += ["pinned"] if one["pinned"] else []
    notes += ["held by a restore"] if name in runs["held"] else []
    notes += [] if one["complete"] else [f"incomplete: not all of {one['world_size']} ranks"]
    notes += [_moving(it) for it in runs["in_flight"] if f"{it['run']}/{it['step']:012}.{it['attempt']}" == name]
    age = _age(one["created"], at)
    naming = (str(one["step"]), one["attempt"], age, metrics(one["metrics"]), "; ".join(notes))
    for copy in one["copies"]:
        why = "; ".join([*copy["reasons"], *copy["defects"]]) or "no rule was given"
        verdict = f"kept: {why}" if copy["keep"] else f"to be pruned: {why}"
        ranks, stored = f"{len(copy['ranks'])}/{one['world_size']}", size(copy["stored_size"] or copy["size"])
        yield (*naming, copy["place"], copy["state"], ranks, stored, verdict)


def _moving(one: Members) -> str:
    share = f" {one['done'] / one['total']:.0%}" if one["total"] else ""
    to = f" to {one['tier']}" if one.get("tier") else ""
    return f"{one['doing']} of rank {one['rank']}{to}{share}"


def _age(created: str | None, at: str) -> str:
    if created is None:
        return "unknown"
    seconds = (datetime.fromisoformat(at) - datetime.fromisoformat(created)).total_seconds()
    return span(float(max(0, round(seconds))))


def _events(status: Members, width: int) -> Iterator[Text]:
    found = status["events"][-_EVENTS:]
    if not found:
        yield Text("none yet")
    for one in reversed(found):
        why = f": {one['why']}" if one["why"] else ""
        words = f"{str(one['at'])[11:19]} {one['what']} {one['place']} {one['subject']}{why}"
        yield from _plain([words], width, "red" if one["what"] in _BAD else "")
