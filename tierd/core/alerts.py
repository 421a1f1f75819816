"""When a failure is an alert: the third failed try in a row of the same thing, until it works again.

Law: an alert is told once, again while it lasts at ever longer intervals, and once when it is over. A thing that works
for others (a tier that takes every part but one) works only when nothing of it fails three times in a row.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

TRIES = 3
BACKLOG = "backlog"  # the subject where what is to be done becomes ever more, and a sort of work
_AGAIN, _LONGEST = 600.0, 86_400.0  # seconds until a lasting alert is told again: at first, and at most

Thing = tuple[str, str]  # a sort of work, and whose
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Alert(Generic[S]):
    """What keeps failing: `doing` what, to which `subject`, and why at last. `began` is in monotonic seconds, `since`
    the same in RFC 3339; `tries` failed in a row."""

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
    """A thing that fails. `row`: failed tries since one worked; `each`: those of each subject since that one worked;
    `told`: whether it is an alert, told `again` then."""

    place: str
    last: S
    row: int = 0
    each: dict[S, _Tried] = field(default_factory=dict)
    told: bool = False
    again: float = 0.0

    @property
    def tries(self) -> int:
        return max([self.row, *(one.count for one in self.each.values())])

    def alert(self) -> Alert[S]:
        subject = self.last if self.last in self.each else max(self.each, key=lambda one: self.each[one].count)
        worst, oldest = self.each[subject], min(self.each.values(), key=lambda one: one.began)
        return Alert(self.place, worst.doing, subject, worst.why, oldest.began, oldest.since, self.tries)


class Alerts(Generic[S]):
    """What fails, by thing: a tier's lane, a writer's saves, a channel. A thing's subjects are what is tried there."""

    def __init__(self) -> None:
        self._failing: dict[Thing, _Failing[S]] = {}

    def lasting(self) -> list[Alert[S]]:
        """The alerts that are not over."""
        return [one.alert() for one in self._failing.values() if one.told]

    def subjects(self, sort: str) -> list[tuple[Thing, S]]:
        """What failed last of each thing of a sort, alert or not."""
        return [(thing, one.last) for thing, one in self._failing.items() if thing[0] == sort]

    def failed(
        self, thing: Thing, doing: str, place: str, subject: S, why: str, now: float, at: str, *, enough: int = TRIES
    ) -> tuple[Alert[S], bool] | None:
        """A try failed: the alert that is to be told by that, if any, and whether it is a new one.

        Args:
            now: monotonic seconds.
            at: the same moment, RFC 3339.
            enough: failed tries in a row that make an alert.
        """
        one = self._failing.setdefault(thing, _Failing(place, subject))
        tried = one.each.setdefault(subject, _Tried(doing, why, now, at))
        tried.count, tried.doing, tried.why = tried.count + 1, doing, why
        one.row, one.last = one.row + 1, subject
        if one.tries < enough or (one.told and now < one.again):
            return None
        fresh, one.told = not one.told, True
        alert = one.alert()
        one.again = now + min(max(_AGAIN, now - alert.began), _LONGEST)
        return alert, fresh

    def worked(self, thing: Thing, subject: S | None = None, *, others: bool = True) -> Alert[S] | None:
        """A try worked, of one subject or, without, of all there is; the alert that is over by that, if any.

        Args:
            others: that this one worked says something of the others.
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
        elif one.tries >= TRIES:
            return None
        over, one.told = one.told, False
        return alert if over else None
