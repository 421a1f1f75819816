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
BACKLOG = "backlog"  # the subject of the alert that work grows faster than it is done, and its kind of thing
_AGAIN, _LONGEST = 600.0, 86_400.0  # seconds until a lasting alert is reported again: at first, and at most

Thing = tuple[str, str]  # (kind of work, owner), for example ("notify", "notify[0]")
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Alert(Generic[S]):
    """A failure that lasts.

    Attributes:
        place: the spool, a tier or a receiver.
        doing: the action that fails.
        subject: the object of the action, for example a part.
        why: the last error.
        began: when the first try failed, monotonic seconds.
        since: the same moment, RFC 3339.
        tries: failed tries in a row.
    """

    place: str
    doing: str
    subject: S
    why: str
    began: float
    since: str
    tries: int


@dataclass(slots=True)
class _Tried:
    doing: str
    why: str
    began: float
    since: str
    count: int = 0


@dataclass(slots=True)
class _Failing(Generic[S]):
    """A thing that fails.

    Attributes:
        place: the spool, a tier or a receiver.
        last: the subject that failed last.
        row: failed tries since any subject worked.
        each: by subject, the failed tries since that subject worked.
        reported: whether the failure is an alert.
        again: when the alert is reported next, monotonic seconds.
        enough: the number of failed tries in a row that make an alert.
    """

    place: str
    last: S
    row: int = 0
    each: dict[S, _Tried] = field(default_factory=dict)
    reported: bool = False
    again: float = 0.0
    enough: int = TRIES

    @property
    def tries(self) -> int:
        return max([self.row, *(one.count for one in self.each.values())])

    def alert(self) -> Alert[S]:
        subject = self.last if self.last in self.each else max(self.each, key=lambda one: self.each[one].count)
        worst, oldest = self.each[subject], min(self.each.values(), key=lambda one: one.began)
        return Alert(self.place, worst.doing, subject, worst.why, oldest.began, oldest.since, self.tries)


class Alerts(Generic[S]):
    """The failures of every thing: a tier worker, a writer's saves, a receiver. A thing has one or more subjects."""

    def __init__(self) -> None:
        self._failing: dict[Thing, _Failing[S]] = {}

    def lasting(self) -> list[Alert[S]]:
        """Return the alerts that have not ended."""
        return [one.alert() for one in self._failing.values() if one.reported]

    def subjects(self, sort: str) -> list[tuple[Thing, S]]:
        """Return, for each failing thing of one kind, the subject that failed last, with or without an alert."""
        return [(thing, one.last) for thing, one in self._failing.items() if thing[0] == sort]

    def failing(self, thing: Thing) -> list[S]:
        """Return the subjects of a thing that fail, with or without an alert."""
        one = self._failing.get(thing)
        return list(one.each) if one else []

    def failed(
        self, thing: Thing, doing: str, place: str, subject: S, why: str, now: float, at: str, *, enough: int = TRIES
    ) -> tuple[Alert[S], bool] | None:
        """Record a failed try.

        Args:
            thing: the kind of work and its owner.
            doing: the action that failed.
            place: the spool, a tier or a receiver.
            subject: the object of the action.
            why: the error.
            now: monotonic seconds.
            at: the same moment, RFC 3339.
            enough: the number of failed tries in a row that make an alert.

        Returns:
            The alert that is to be reported now, and whether it is new; None if there is nothing to report.
        """
        one = self._failing.setdefault(thing, _Failing(place, subject, enough=enough))
        tried = one.each.setdefault(subject, _Tried(doing, why, now, at))
        tried.count, tried.doing, tried.why = tried.count + 1, doing, why
        one.row, one.last = one.row + 1, subject
        if one.tries < enough or (one.reported and now < one.again):
            return None
        fresh, one.reported = not one.reported, True
        alert = one.alert()
        one.again = now + min(max(_AGAIN, now - alert.began), _LONGEST)
        return alert, fresh

    def worked(self, thing: Thing, subject: S | None = None, *, others: bool = True) -> Alert[S] | None:
        """Record a try that worked.

        Args:
            thing: the kind of work and its owner.
            subject: the object of the action; None for all subjects of the thing.
            others: whether this success is evidence that the thing's other subjects would work.

        Returns:
            The alert that ended; None if no alert ended.
        """
        one = self._failing.get(thing)
        if one is None:
            return None
        alert = one.alert()
        if others or one.last == subject:
            one.row = 0
        if subject is None:
            one.each.clear()
        else:
            one.each.pop(subject, None)
        if not one.each:
            del self._failing[thing]
        elif one.tries >= one.enough:
            return None
        over, one.reported = one.reported, False
        return alert if over else None
