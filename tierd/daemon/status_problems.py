"""What is wrong by a daemon's status, by its journal, and by what tiers lack: each problem with its next step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tierd.core.diagnosis.problems import Problem, problem
from tierd.core.event_kinds import Event
from tierd.core.planning.flush_lag import FlushLag
from tierd.core.planning.place import SPOOL
from tierd.core.planning.plan import ForeignRunBacklog
from tierd.core.units import format_age, pause_text
from tierd.events.alerts import ANSWER, READ, REPLICAS
from tierd.events.journal import AlertStatus, Journal

if TYPE_CHECKING:
    from tierd.daemon.daemon_status import Status

_SCARCE, _LOW = 0.02, 0.05  # free shares of the spool's disk: saves fail soon; local copies are deleted early
_NAMED_RUNS = 5  # runs behind that a problem names beside the worst


def status_problems(status: Status) -> tuple[Problem, ...]:
    """Return what is wrong by a status, alerts first."""
    spool = status.spool
    alerts = [_alert(status, alert) for alert in status.alerts]
    for run in sorted({launch.run for launch in status.launches}):
        why = f"several launches of run {run} save at the same time"
        alerts.append(problem("alert", SPOOL, why, "launches", spool=spool))
    free = f"{status.spool_free:.0%} of the spool's disk is free"
    warnings = []
    if status.spool_free < _SCARCE:
        alerts.append(problem("alert", SPOOL, f"{free}: saves fail soon", "low disk", spool=spool))
    elif status.spool_free < _LOW:
        warnings.append(problem("warning", SPOOL, free, "low disk", spool=spool))
    alerted = {alert.place for alert in status.alerts if alert.doing != REPLICAS}
    for tier in status.tiers:
        if tier.name not in alerted and (tier.failures or not tier.reached or tier.unanswered):
            why = tier.unanswered or _without_url(tier.last_error, tier.url) or "it has not answered a listing yet"
            warnings.append(problem("warning", tier.name, why, "tier", spool=spool, url=tier.url))
    for policy in status.policies:
        if policy.disagrees:
            why = f"the policies of run {policy.run} disagree, or one cannot be read: {policy.key}"
            warnings.append(problem("warning", policy.tier, why, "policies", spool=spool))
    if status.paused:
        warnings.append(problem("warning", SPOOL, pause_text(status.paused), "paused", spool=spool))
    if status.scrub.due:
        overdue = "1 copy is" if status.scrub.due == 1 else f"{status.scrub.due} copies are"
        warnings.append(problem("warning", SPOOL, f"{overdue} overdue to be verified again", "scrub"))
    warnings += [
        problem("warning", notifier.name, notifier.last_error, "receiver")
        for notifier in status.notify
        if notifier.last_error and notifier.name not in alerted
    ]
    return (*alerts, *warnings)


def all_problems(
    status: Status, journal: Journal, lags: Iterable[FlushLag] = (), unsent: Iterable[ForeignRunBacklog] = ()
) -> tuple[Problem, ...]:
    """Return what is wrong by a status, by the journal, which also remembers what ended, and by what tiers lack."""
    stayed = [_lasting_problem(status, event, count) for event, count in journal.staying_events.values()]
    lasting = [_warning(status, *warning) for warning in journal.warnings.items()]
    if quarantined := +journal.quarantined:  # in one problem, because a checkpoint may be corrupt in every place
        copies, (first, *others) = quarantined.total(), sorted(quarantined)
        count = "1 copy was" if copies == 1 else f"{copies} copies were"
        where = f", also on {', '.join(others)}" if others else ""
        url = "" if others else _url(status, first)
        why = f"{count} quarantined since the daemon's start{where}"
        lasting.append(problem("warning", first, why, "quarantined", spool=status.spool, url=url))
    lasting += [
        problem("warning", entry.tier, str(entry), "other node", url=_url(status, entry.tier)) for entry in unsent
    ]
    return (*stayed, *status_problems(status), *_lag_problems(status, lags), *lasting)


def _url(status: Status, place: str) -> str:
    return next((tier.url for tier in status.tiers if tier.name == place), "")


def _without_url(error: str | None, url: str) -> str:
    """An error without the URL of its tier, which a problem names; the command below it has the URL."""
    return (error or "").removeprefix(f"{url}: " if url else "")


def _alert(status: Status, alert: AlertStatus) -> Problem:
    url = _url(status, alert.place)
    by_action = {REPLICAS: "replicas", READ: "reads differ"}
    step = by_action.get(alert.doing) or ("tier" if url else "spool" if alert.place == SPOOL else "receiver")
    why = f"{_describe_failure(alert)}{_without_url(alert.why, url)}"
    return problem("alert", alert.place, why, step, spool=status.spool, url=url)


def _lag_problems(status: Status, lags: Iterable[FlushLag]) -> Iterator[Problem]:
    """Yield one problem for each first tier that lacks something, because one cause may hold up every run."""
    by_tier: dict[str, list[FlushLag]] = {}
    for lag in sorted(lags, key=lambda lag: lag.waited_s, reverse=True):
        if lag.state == "late":
            by_tier.setdefault(lag.lacking[0], []).append(lag)
    for tier, (worst, *others) in by_tier.items():
        counted = f"{worst.unsent} checkpoints are" if worst.unsent > 1 else "1 checkpoint is"
        waits = f"waiting for {format_age(worst.waited_s)}, and {format_age(worst.allowed_s)} are allowed"
        why = f"run {worst.run}: {counted} on no tier, {waits}"
        if others:
            names = ", ".join(lag.run for lag in others[:_NAMED_RUNS])
            more = f" and {len(others) - _NAMED_RUNS} more" if len(others) > _NAMED_RUNS else ""
            why += f"; also behind: {names}{more}"
        step = "paused" if status.paused else "behind"
        yield problem("warning", tier, why, step, spool=status.spool, url=_url(status, tier))


def _warning(status: Status, work: tuple[str, str], why: str) -> Problem:
    watch = next((watch for watch in status.watches if work == ("watch", watch.run)), None)
    if watch:
        return problem("warning", SPOOL, why, "watch", directory=watch.directory)
    return problem("warning", SPOOL, why, "spool", spool=status.spool)


def _lasting_problem(status: Status, event: Event, count: int) -> Problem:
    times = "" if count == 1 else f" ({count} times since the daemon's start, this is the last)"
    why = f"{event.what}{times}: {event.subject}: {event.why}; shown until the daemon starts again"
    return problem("alert", event.place, why, "lost", spool=status.spool, url=_url(status, event.place))


def _describe_failure(alert: AlertStatus) -> str:
    if alert.doing == REPLICAS:
        return f"replicas of run {alert.subject} differ: "
    if alert.subject == ANSWER or alert.doing == READ:
        return ""
    doing = "observing" if alert.doing == "observe" else f"{alert.doing} {alert.subject}"
    return f"{doing} failed {alert.tries} times in a row: "
