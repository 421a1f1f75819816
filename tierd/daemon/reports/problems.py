"""What is wrong with a daemon, in words, by its status and its journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tierd.core.event_kinds import Event
from tierd.core.planning.place import SPOOL
from tierd.events.alerts import ANSWER, READ
from tierd.events.journal import AlertStatus, Journal

if TYPE_CHECKING:  # a status holds its problems
    from tierd.daemon.status import Status


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong now.

    Attributes:
        severity: `alert`: somebody has to act, or checkpoints may be lost; `warning`: look at it in working hours.
        place: `local`, a tier, or a receiver of events.
        why: for people.
    """

    severity: Literal["alert", "warning"]
    place: str
    why: str


_SCARCE, _LOW = 0.02, 0.05  # free shares of the spool's disk: saves fail soon; local copies are deleted early


def problems(found: Status) -> tuple[Problem, ...]:
    """Return what is wrong by a status, alerts first."""
    alerts = [Problem("alert", one.place, f"{_failing(one)}{one.why}") for one in found.alerts]
    runs = sorted({one.run for one in found.launches})
    alerts += [Problem("alert", SPOOL, f"several launches of run {run} save at the same time") for run in runs]
    free = f"{found.spool_free:.0%} of the spool's disk is free"
    if found.spool_free < _SCARCE:
        alerts.append(Problem("alert", SPOOL, f"{free}: saves fail soon"))
    warnings = [Problem("warning", SPOOL, free)] if _SCARCE <= found.spool_free < _LOW else []
    alerted = {one.place for one in alerts}
    for tier in found.tiers:
        if tier.name not in alerted and (tier.failures or not tier.reached or tier.unanswered):
            why = tier.unanswered or tier.last_error or "it has not answered a listing yet"
            warnings.append(Problem("warning", tier.name, why))
    warnings += [
        Problem("warning", one.tier, f"the policies of run {one.run} disagree, or one cannot be read: {one.key}")
        for one in found.policies
        if one.disagrees
    ]
    if found.paused:
        warnings.append(Problem("warning", SPOOL, f"paused: {found.paused}"))
    if found.scrub.due:
        overdue = "1 copy is" if found.scrub.due == 1 else f"{found.scrub.due} copies are"
        warnings.append(Problem("warning", SPOOL, f"{overdue} overdue to be verified again"))
    warnings += [Problem("warning", one.name, one.last_error) for one in found.notify if one.last_error]
    return (*alerts, *warnings)


def all_problems(found: Status, journal: Journal) -> tuple[Problem, ...]:
    """Return what is wrong by a status and by the journal, which also remembers what ended."""
    stayed = [_stayed(event, count) for event, count in journal.stayed.values()]
    lasting = [Problem("warning", SPOOL, why) for why in journal.warnings.values()]
    lasting += [_quarantined(*one) for one in sorted(journal.quarantined.items())]
    return (*stayed, *problems(found), *lasting)


def _stayed(event: Event, count: int) -> Problem:
    times = "" if count == 1 else f" ({count} times since the daemon's start, this is the last)"
    return Problem(
        "alert", event.place, f"{event.what}{times}: {event.subject}: {event.why}; shown until the daemon starts again"
    )


def _quarantined(place: str, copies: int) -> Problem:
    what = "1 copy was" if copies == 1 else f"{copies} copies were"
    return Problem("warning", place, f"{what} quarantined since the daemon's start")


def _failing(one: AlertStatus) -> str:
    if one.subject == ANSWER or one.doing == READ:
        return ""
    doing = "observing" if one.doing == "observe" else f"{one.doing} {one.subject}"
    return f"{doing} failed {one.tries} times in a row: "
