"""Decide when failures become an alert: after the third failed try in a row, until a try works again.

Invariant: an alert is reported once when it begins, again at ever longer intervals while it lasts, and once when it
ends. A thing with several subjects works only while no subject fails three times in a row. For example, a tier that
accepts every part but one still has an alert.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

TRIES = 3
ANSWER = "answer"  # the subject of the alert that a tier gives no sign of life, and its kind of thing
READ = "read"  # the kind of thing of a place where reads of a copy differ from each other, and the action
REPLICAS = "compare"  # the kind of thing of a run whose replicas differ, and the action
BACKLOG = "backlog"  # the subject of the alert that work grows faster than it is done, and its kind of thing
_REPEAT_S, _MAX_REPEAT_S = 600.0, 86_400.0  # seconds until a lasting alert is reported again: at first, and at most

WorkKey = tuple[str, str]  # (kind of work, owner), for example ("notify", "notify[0]")
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Alert(Generic[S]):
    """A failure of `doing` something to a `subject` that lasts, in the spool, a tier or a receiver.

    Its first try failed at `began`, monotonic seconds, which is `since` in RFC 3339; `tries` failed in a row, the last
    by `why`.
    """

    place: str
    doing: str
    subject: S
    why: str
    began: float
    since: str
    tries: int


@dataclass(slots=True)
class _SubjectFailures:
    doing: str
    why: str
    began: float
    since: str
    count: int = 0


@dataclass(slots=True)
class _WorkFailures(Generic[S]):
    """A thing that fails.

    `row` counts failed tries since any subject worked, `by_subject` those since that subject worked. `reported` says
    whether the failure is an alert, which is reported next at `next_report_at`, monotonic seconds.
    """

    place: str
    last: S
    row: int = 0
    by_subject: dict[S, _SubjectFailures] = field(default_factory=dict)
    reported: bool = False
    next_report_at: float = 0.0
    alert_after: int = TRIES

    @property
    def tries(self) -> int:
        return max([self.row, *(tried.count for tried in self.by_subject.values())])

    def alert(self) -> Alert[S]:
        subject = (
            self.last
            if self.last in self.by_subject
            else max(self.by_subject, key=lambda candidate: self.by_subject[candidate].count)
        )
        worst, oldest = self.by_subject[subject], min(self.by_subject.values(), key=lambda tried: tried.began)
        return Alert(self.place, worst.doing, subject, worst.why, oldest.began, oldest.since, self.tries)


class Alerts(Generic[S]):
    """The failures of every thing: a tier worker, a writer's saves, a receiver. A thing has one or more subjects."""

    def __init__(self) -> None:
        self._failing: dict[WorkKey, _WorkFailures[S]] = {}

    def lasting_alerts(self) -> list[Alert[S]]:
        """Return the alerts that have not ended."""
        return [failing.alert() for failing in self._failing.values() if failing.reported]

    def last_failed_subjects(self, sort: str) -> list[tuple[WorkKey, S]]:
        """Return, for each failing thing of one kind, the subject that failed last, with or without an alert."""
        return [(work, failing.last) for work, failing in self._failing.items() if work[0] == sort]

    def failing_subjects(self, work: WorkKey) -> list[S]:
        """Return the subjects of a thing that fail, with or without an alert."""
        failing = self._failing.get(work)
        return list(failing.by_subject) if failing else []

    def record_failure(
        self,
        work: WorkKey,
        doing: str,
        place: str,
        subject: S,
        why: str,
        now: float,
        at: str,
        *,
        alert_after: int = TRIES,
    ) -> tuple[Alert[S], bool] | None:
        """Record a failed try, `now` in monotonic seconds and `at` in RFC 3339; `alert_after` tries in a row make an
        alert.

        Return the alert that is to be reported now, and whether it is new; None if there is nothing to report.
        """
        failing = self._failing.setdefault(work, _WorkFailures(place, subject, alert_after=alert_after))
        tried = failing.by_subject.setdefault(subject, _SubjectFailures(doing, why, now, at))
        tried.count, tried.doing, tried.why = tried.count + 1, doing, why
        failing.row, failing.last = failing.row + 1, subject
        if failing.tries < alert_after or (failing.reported and now < failing.next_report_at):
            return None
        fresh, failing.reported = not failing.reported, True
        alert = failing.alert()
        failing.next_report_at = now + min(max(_REPEAT_S, now - alert.began), _MAX_REPEAT_S)
        return alert, fresh

    def record_success(
        self, work: WorkKey, subject: S | None = None, *, clears_siblings: bool = True
    ) -> Alert[S] | None:
        """Record a try that worked, of one subject or of all, and return the alert that ended, if one did.

        Args:
            work: the kind of work and its owner.
            subject: the object of the action; None for all subjects of the thing.
            clears_siblings: whether this success is evidence that the thing's other subjects would work.

        Returns:
            The alert that ended; None if no alert ended.
        """
        failing = self._failing.get(work)
        if failing is None:
            return None
        alert = failing.alert()
        if clears_siblings or failing.last == subject:
            failing.row = 0
        if subject is None:
            failing.by_subject.clear()
        else:
            failing.by_subject.pop(subject, None)
        if not failing.by_subject:
            del self._failing[work]
        elif failing.tries >= failing.alert_after:
            return None
        over, failing.reported = failing.reported, False
        return alert if over else None
