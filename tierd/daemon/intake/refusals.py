"""The units of a watched directory that are not taken as they are: why, and when each is tried again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from tierd.daemon.intake.taking import Busy
from tierd.watching.settle import Settling

log = logging.getLogger("tierd.daemon")

_AGAIN_S = 60.0  # seconds until a unit that could not be read or written is tried again
_OPEN_S = 5.0  # seconds until a unit that a process has open for writing is tried again
_RESTLESS_S = 3600.0  # seconds for which a unit may change without a rest, until that is reported
_BAD_NAME = "its name is not UTF-8; rename it"


class Refusals:
    """The refused units of one directory.

    Args:
        settling: the units of the last listing.
        settle_s: as for `Settling`.
        report: called with a unit's path and the reason when it is refused, or for another reason than before.

    Attributes:
        reasons: the units of the last listing that are not taken as they are, by path, and why.
        unread: those that could not be read when they were last tried.
        unnamed: what the last listing refused for its name.
    """

    def __init__(self, settling: Settling, settle_s: float, report: Callable[[str, str], None]) -> None:
        self._settling, self._settle_s, self._report = settling, settle_s, report
        self.reasons: dict[str, str] = {}
        self.unread: set[str] = set()
        self.unnamed: frozenset[str] = frozenset()
        self._restless: frozenset[str] = frozenset()  # units that were reported because they never rest
        self._incomplete: frozenset[str] = frozenset()  # units that were reported because they lack a file
        self._unstored: set[str] = set()  # units that the spool did not take when they were last tried
        self._off: dict[str, float] = {}  # by unit, until when it is not tried
        self._open: dict[str, float] = {}  # by unit, since when a process has it open for writing
        self._now_s = 0.0

    def look(self, unnamed: Collection[str], now_s: float) -> None:
        """Process a listing: forget what is gone, and refuse what its names and its rest tell.

        Args:
            unnamed: the paths whose names are not UTF-8, which no manifest can have.
            now_s: any monotonic clock, in seconds.
        """
        self._now_s = now_s
        self._forget()
        self._refuse_all(unnamed, self.unnamed, _BAD_NAME)
        self.unnamed = frozenset(unnamed)
        self._refuse_restless()
        self._refuse_incomplete()

    def is_off(self, path: str) -> bool:
        """Whether a unit is not to be tried yet."""
        return self._now_s < self._off.get(path, self._now_s)

    def refuse(self, path: str, why: str) -> None:
        """Refuse a unit until it changes, and report that."""
        self.reasons[path] = why
        self._report(path, why)

    def wait_for_room(self, path: str, why: str) -> None:
        """Try a unit again in a minute that the spool did not take. It has not been refused, so it is waited for."""
        self._put_off(path)
        self._unstored.add(path)
        self.reasons[path] = why

    def taken(self, path: str) -> None:
        """Record that a unit was taken; it may have been refused until it was tried again."""
        self._unstored.discard(path)
        self.reasons.pop(path, None)

    def _put_off(self, path: str) -> None:
        """Try a unit again in a minute."""
        self._off[path] = self._now_s + _AGAIN_S

    def try_again(self, path: str, why: str) -> None:
        """Refuse a unit until it is tried again; report that if it was not refused for the same reason before."""
        self._put_off(path)
        self.unread.add(path)
        if self.reasons.get(path) != why:
            self.refuse(path, why)

    def wait_for_close(self, path: str, error: Busy) -> None:
        """Wait for a process to close a unit; report that after an hour."""
        since_s = self._open.setdefault(path, self._now_s)
        if self._now_s - since_s >= _RESTLESS_S:
            self.try_again(path, f"{error} for an hour, and it is taken when that ends")
        else:
            self._off[path] = self._now_s + _OPEN_S
            log.info("%s", error)

    def closed(self, path: str) -> None:
        """Record that no process has a unit open for writing."""
        self._open.pop(path, None)

    def _forget(self) -> None:
        """Forget the refused units that are gone, or that changed, and all else of those that are gone."""
        self._off = {path: until_s for path, until_s in self._off.items() if self._settling.is_seen(path)}
        self._open = {path: since_s for path, since_s in self._open.items() if self._settling.is_seen(path)}
        self.unread = {path for path in self.unread if self._settling.is_seen(path)}
        self._unstored = {path for path in self._unstored if self._settling.is_seen(path)}
        retried = self.unread | self._unstored
        remaining = {path for path in self.reasons if path in retried or self._settling.is_judged(path)}
        self.reasons = {path: why for path, why in self.reasons.items() if path in remaining}

    def _refuse_restless(self) -> None:
        """Report the units that a program never leaves alone for long enough to be taken."""
        paths = self._settling.restless(self._now_s, _RESTLESS_S)
        why = f"it has changed for an hour without a rest of {self._settle_s:g} s, and is taken when it rests"
        self._refuse_all(paths, self._restless, why)
        self._restless = frozenset(paths)

    def _refuse_incomplete(self) -> None:
        """Report the units that seem incomplete although no program's own file says so."""
        incomplete = self._settling.incomplete
        for path, why in incomplete.items():
            self._refuse_all([path], self._incomplete, why)
        self._incomplete = frozenset(incomplete)

    def _refuse_all(self, paths: Collection[str], before: Collection[str], why: str) -> None:
        """Refuse these paths in this listing, and report those that the listing before did not refuse for that."""
        for path in paths:
            if path in before:
                self.reasons[path] = why
            else:
                self.refuse(path, why)
