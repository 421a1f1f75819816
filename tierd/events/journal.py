"""The journal: events for people and programs, alerts for lasting failures, counters for metrics, and log lines.

Invariant: an event is reported once, when it happens, with the place where it happened. An error in reporting cannot
fail the work that the event describes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from tierd.core.errors import printable
from tierd.core.event_kinds import EVENT_KINDS, Event
from tierd.core.ids import CheckpointId, PartId
from tierd.core.replicas.replica_comparison import ReplicaDifferences
from tierd.events.alerts import ANSWER, BACKLOG, READ, REPLICAS, TRIES, Alert, Alerts, WorkKey
from tierd.events.save_history import SaveHistory

log = logging.getLogger("tierd.daemon")

_MAX_EVENTS = 256  # events
SAVES = "save"  # the kind of thing for alerts about a writer's saves
_REPEATED = frozenset({"flushed"})  # kinds that another event repeats for the whole checkpoint: logged at DEBUG
_LEVELS = {"info": logging.INFO, "error": logging.ERROR, "alert": logging.CRITICAL}

Subject = PartId | CheckpointId | str


class AlertStatus(msgspec.Struct, frozen=True):
    """A failure that lasts.

    Attributes:
        place: `local`, a tier, or a receiver of events.
        doing: the action that fails.
        subject: the part or checkpoint for which it fails, or the action in words.
        since: when the first try failed, RFC 3339.
        tries: failed tries in a row.
        why: the last error.
    """

    place: str
    doing: str
    subject: str
    since: str
    tries: int
    why: str


class Journal:
    """The daemon's memory of its events. `on_event` is called with every event as it happens.

    Attributes:
        saves: the last saves of each run, for charts.
        warnings: what lasts and is no failure, by the thing that it concerns.
        quarantined: copies that were quarantined, by place.
        staying_events: by kind and place, the last event that stays until the daemon starts again, and how many there
            were.
    """

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self.saves = SaveHistory()
        self.warnings: dict[WorkKey, str] = {}
        self.quarantined: Counter[str] = Counter()
        self.staying_events: dict[tuple[str, str], tuple[Event, int]] = {}
        self._alerts: Alerts[Subject] = Alerts()
        self._on_event = on_event or (lambda event: None)

    def record(self, kind: str, place: str, subject: Subject, why: str, **members: Any) -> None:
        """Report an event. `members` are those of `Event` that do not follow from `subject`."""
        why = printable(why)  # here, because receivers show it to people by means of their own
        event = Event(
            at=utc_timestamp(),
            what=kind,
            place=place,
            subject=printable(subject),
            why=why,
            **_subject_members(subject),
            **members,
        )
        self.events.append(event)
        self.saves.add(event)
        if EVENT_KINDS[kind].persists:
            _, count = self.staying_events.get((kind, place), (event, 0))
            self.staying_events[kind, place] = event, count + 1
        level = logging.DEBUG if kind in _REPEATED else _LEVELS[event.level]
        log.log(level, "%s: %s %s: %s", place, kind, subject, why)
        self._on_event(event)

    def record_release(self, place: str, part: PartId) -> None:
        """Record that a quarantined copy proved right and is used again."""
        self.quarantined[place] = max(self.quarantined[place] - 1, 0)  # it may have been quarantined before the start
        if not self.quarantined[place]:
            del self.quarantined[place]
        self.record("released", place, part, "every byte was right when it was read again before its deletion")

    # -- tries ------------------------------------------------------------------------------------------------------

    def record_failure(
        self, work: WorkKey, doing: str, place: str, subject: Subject, why: str, *, at_once: bool = False
    ) -> None:
        """Record a failed try. The third failure in a row of the same thing is an alert, or the first one `at_once`."""
        why, now_s = printable(why), time.monotonic()
        failing = self._alerts.record_failure(
            work, doing, place, subject, why, now_s, utc_timestamp(), alert_after=1 if at_once else TRIES
        )
        if failing:
            alert, fresh = failing
            self.counters["alerts"] += fresh
            text = why if at_once else f"{alert.tries} tries in a row failed; the last: {why}"
            self._record_alert("failing", alert, text)

    def record_success(self, work: WorkKey, subject: Subject | None = None, *, clears_siblings: bool = True) -> None:
        """Record a try that worked, as `Alerts.record_success` does."""
        if over := self._alerts.record_success(work, subject, clears_siblings=clears_siblings):
            self._record_alert("works again", over, f"{over.tries} tries in a row had failed; the last: {over.why}")

    def record_backlog(self, tier: str, copies: int, grows: bool) -> None:
        """Record how many copies wait to be deleted from a tier. A growing number is an alert at once."""
        why = f"{copies} copies that retention gave up are still there"
        if grows:
            self.record_failure(
                (BACKLOG, tier), "prune", tier, BACKLOG, f"{why}, ever more for ten minutes", at_once=True
            )
        elif over := self._alerts.record_success((BACKLOG, tier)):
            self._record_alert("works again", over, why)

    def record_silence(self, tier: str, why: str) -> None:
        """Record that requests to a tier wait for an answer, which is an alert at once."""
        self.record_failure((ANSWER, tier), "wait", tier, ANSWER, why, at_once=True)

    def record_answer(self, tier: str) -> None:
        """Record a sign of life of a tier."""
        if over := self._alerts.record_success((ANSWER, tier)):
            self._record_alert("works again", over, f"it answers again; before: {over.why}")

    def record_unstable_read(self, place: str, part: PartId, why: str) -> None:
        """Record that reads of a copy differ from each other, which is an alert at once."""
        self.record_failure((READ, place), READ, place, part, why, at_once=True)

    def record_stable_read(self, place: str, part: PartId) -> None:
        """Record that a copy could be read, or is gone. The alert ends with the last copy of its place."""
        if over := self._alerts.record_success((READ, place), part, clears_siblings=False):
            why = f"reads agree with each other again, or the copy is gone; before: {over.why}"
            self._record_alert("works again", over, why)

    def record_differences(
        self,
        place: str,
        checkpoint: CheckpointId,
        world: int,
        differences: ReplicaDifferences,
        why: str,
        *,
        alert_why: str,
    ) -> None:
        """Record that replicas of a checkpoint differ, which is an alert of its run at once, with `alert_why`.

        The alert is repeated with each such checkpoint, and not at intervals.
        """
        work, now_s, at = (REPLICAS, checkpoint.run), time.monotonic(), utc_timestamp()
        due = self._alerts.record_failure(
            work, REPLICAS, place, checkpoint.run, printable(alert_why), now_s, at, alert_after=1
        )
        self.counters["alerts"] += bool(due and due[1])
        self.counters["replicas_differ"] += 1
        self.record(
            "replicas differ",
            place,
            checkpoint,
            why,
            world_size=world,
            tensors=len(differences.tensors),
            differences=differences.described,
        )

    def record_equal_replicas(self, run: str, why: str) -> None:
        """Record that the alert about a run's replicas ends."""
        if over := self._alerts.record_success((REPLICAS, run)):
            self._record_alert("works again", over, why, run=run)

    def unstable_parts(self, place: str) -> list[PartId]:
        """Return the copies of a place whose reads differ from each other."""
        return [part for part in self._alerts.failing_subjects((READ, place)) if isinstance(part, PartId)]

    def record_save(self, part: PartId) -> None:
        """Record that a save worked. It ends the failures of its writer and of the run's earlier launches."""
        run, attempt = part.checkpoint.run, part.checkpoint.attempt
        for work, subject in self._alerts.last_failed_subjects(SAVES):
            failed_checkpoint = subject.checkpoint if isinstance(subject, PartId) else None
            if work[1] == part.writer or (
                failed_checkpoint and failed_checkpoint.run == run and failed_checkpoint.attempt < attempt
            ):
                self.record_success(work)

    def alerts(self) -> tuple[AlertStatus, ...]:
        """Return the failures that last now."""
        return tuple(
            AlertStatus(alert.place, alert.doing, str(alert.subject), alert.since, alert.tries, alert.why)
            for alert in self._alerts.lasting_alerts()
        )

    def _record_alert(self, kind: str, alert: Alert[Subject], why: str, **members: Any) -> None:
        members |= {"doing": alert.doing, "tries": alert.tries, "seconds": round(time.monotonic() - alert.began, 3)}
        self.record(kind, alert.place, alert.subject, why, **members)


def utc_timestamp() -> str:
    """Return the current time, RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _subject_members(subject: Subject) -> dict[str, Any]:
    if isinstance(subject, str):
        return {}
    checkpoint = subject.checkpoint if isinstance(subject, PartId) else subject
    rank = {"rank": subject.rank, "world_size": subject.world} if isinstance(subject, PartId) else {}
    return {"run": checkpoint.run, "step": checkpoint.step, "attempt": checkpoint.attempt, **rank}
