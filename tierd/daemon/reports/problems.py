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


def problems(status: Status) -> tuple[Problem, ...]:
    """Return what is wrong by a status, alerts first."""
    alerts = [Problem("alert", alert.place, f"{_describe_failure(alert)}{alert.why}") for alert in status.alerts]
    runs = sorted({launch.run for launch in status.launches})
    alerts += [Problem("alert", SPOOL, f"several launches of run {run} save at the same time") for run in runs]
    free = f"{status.spool_free:.0%} of the spool's disk is free"
    if status.spool_free < _SCARCE:
        alerts.append(Problem("alert", SPOOL, f"{free}: saves fail soon"))
    warnings = [Problem("warning", SPOOL, free)] if _SCARCE <= status.spool_free < _LOW else []
    alerted = {alert.place for alert in alerts}
    for tier in status.tiers:
        if tier.name not in alerted and (tier.failures or not tier.reached or tier.unanswered):
            why = tier.unanswered or tier.last_error or "it has not answered a listing yet"
            warnings.append(Problem("warning", tier.name, why))
    warnings += [
        Problem(
            "warning", policy.tier, f"the policies of run {policy.run} disagree, or one cannot be read: {policy.key}"
        )
        for policy in status.policies
        if policy.disagrees
    ]
    if status.paused:
        warnings.append(Problem("warning", SPOOL, f"paused: {status.paused}"))
    if status.scrub.due:
        overdue = "1 copy is" if status.scrub.due == 1 else f"{status.scrub.due} copies are"
        warnings.append(Problem("warning", SPOOL, f"{overdue} overdue to be verified again"))
    warnings += [
        Problem("warning", notifier.name, notifier.last_error) for notifier in status.notify if notifier.last_error
    ]
    return (*alerts, *warnings)


def all_problems(status: Status, journal: Journal) -> tuple[Problem, ...]:
    """Return what is wrong by a status and by the journal, which also remembers what ended."""
    stayed = [_lasting_problem(event, count) for event, count in journal.stayed.values()]
    lasting = [Problem("warning", SPOOL, why) for why in journal.warnings.values()]
    lasting += [_quarantine_problem(*place_copies) for place_copies in sorted(journal.quarantined.items())]
    return (*stayed, *problems(status), *lasting)


def _lasting_problem(event: Event, count: int) -> Problem:
    times = "" if count == 1 else f" ({count} times since the daemon's start, this is the last)"
    return Problem(
        "alert", event.place, f"{event.what}{times}: {event.subject}: {event.why}; shown until the daemon starts again"
    )


def _quarantine_problem(place: str, copies: int) -> Problem:
    subject = "1 copy was" if copies == 1 else f"{copies} copies were"
    return Problem("warning", place, f"{subject} quarantined since the daemon's start")


def _describe_failure(alert: AlertStatus) -> str:
    if alert.subject == ANSWER or alert.doing == READ:
        return ""
    doing = "observing" if alert.doing == "observe" else f"{alert.doing} {alert.subject}"
    return f"{doing} failed {alert.tries} times in a row: "
