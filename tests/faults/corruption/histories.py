"""Trials in which names, heads and whole histories are planted, replaced and taken away (`faults.corruption.planted`),
and a launch resumes: for `faults.corruption`.

Required: no resume is stopped, or led to an older checkpoint, while a sound one of the timeline is in a place that
answers; and whatever went back is an error, or in `skipped`, where a spool, a tier or the caller remembers more. A
place that does not answer may have more; and what lies there intact and of another key is neither taken nor passed
over.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from faults.corruption.launch import launch
from faults.corruption.places import RUN, TIERS, WORLD, Places
from faults.corruption.planted import History
from faults.corruption.remembered import HEAD, Known, is_foreign, observe_all
from faults.corruption.streams import Streams
from faults.corruption.trials import _REASON, _skipped, restored_together
from faults.rounds import Lost
from support.doubles import Double

from tierd.client.restoring.restorer import VerifiedPart
from tierd.core.errors import CheckpointNotFound, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.tiers import tier_observer
from tierd.events.journal import Journal
from tierd.stores.memory_store import MemoryStore
from tierd.threads import mark_foreground

ANSWERS = ("the newest", "an older one", "refused", "nothing", "anew", "of another key", "a place is silent")
REPORTED = ("gone", "unvouched", "passed over")


def _silent() -> Double:
    """A tier that does not answer."""
    tier = Double()
    tier.error = StoreUnavailable("no answer")
    return tier


@dataclass(frozen=True)
class Due:
    """What must come, by what lies there before anybody asks.

    Attributes:
        known: what all places that answer show.
        line: the candidates in order; `sound` are those of which every part is right, or can be made so, and `foreign`
            those of which a manifest is intact and of another key, so that nobody can tell.
        silent: whether a place does not answer.
        at_least: the step that the caller knows of.
    """

    known: Known
    line: list[CheckpointId]
    sound: set[CheckpointId]
    foreign: set[CheckpointId]
    silent: bool
    at_least: int | None

    def is_enough(self, one: CheckpointId) -> bool:
        return self.at_least is None or one.step >= self.at_least

    @property
    def wanted(self) -> CheckpointId | None:
        return next((one for one in self.line if one in self.sound and self.is_enough(one)), None)

    @property
    def above(self) -> list[CheckpointId]:
        """The candidates that have to be passed over."""
        line = self.line[: self.line.index(self.wanted)] if self.wanted else self.line
        return [one for one in line if self.is_enough(one)]

    @property
    def unusable(self) -> bool:
        """Whether anything that is no candidate may be newer, and lie whole where nobody answers."""
        newer = [*self.known.checkpoints, *self.known.remembered()]
        return not self.wanted or any(one > self.wanted for one in newer)

    @property
    def may_begin_anew(self) -> bool:
        known = self.known
        whole = any(known.complete(world) for world in (1, 2, 3))
        return not (self.silent or known.remembered() or known.unvouched() or whole or self.at_least is not None)


@dataclass(frozen=True)
class Came:
    """What came: a checkpoint, an error, or nothing at all, which is to begin anew. `reported`: those passed over."""

    got: CheckpointId | None
    error: TierdError | None
    reported: dict[CheckpointId, str]
    text: str

    @property
    def anew(self) -> bool:
        return self.got is None and self.error is None


class Histories(Streams):
    """The trials of one process, on its own world."""

    def __init__(self, places: Places, root: Path) -> None:
        super().__init__(places, root)
        home = places.spool.control / "saved" / RUN
        self._marks = {path: path.read_bytes() for path in home.iterdir()}

    async def resume(self, noise: random.Random) -> list[str]:
        """Harm, let a launch resume, compare, put back; notes of what was done and what came."""
        mark_foreground()
        try:
            history = History(self.places, noise)
            history.make()
            history.inflict()
            if silent := noise.random() < 0.1:  # what it holds counts for nothing: nobody can ask
                self.places.memory["far"], self.places.stores["far"] = MemoryStore(), _silent()
                history.done.append("silent")
            due = self._due(silent=silent, at_least=noise.choice([None, None, None, 2, 4, 5]))
            before, journal = self._whole(), Journal()
            # A reader of few manifests reads all of them; a daemon, one a checkpoint, and of its own ranks.
            with mock.patch.object(tier_observer, "_FEW", noise.choice([0, 1000])):
                came = await self._ask(
                    Repairer(self.places.spool, self.places.stores, journal, MemoryBudget()), due.at_least
                )
            try:
                answer = judged(due, came)
                self._nothing_got_worse(before, journal)
            except Lost as lost:
                raise Lost(
                    f"{lost}; at least {due.at_least}, of {due.line}, after {history.done}: {came.text}"
                ) from lost
            return [*dict.fromkeys(f"harm: {one}" for one in history.done), *answer]
        finally:
            self._put_back()

    def _due(self, *, silent: bool, at_least: int | None) -> Due:
        known = observe_all(self.places, self.judge)
        line = known.candidates()
        sound = {one for one in line if all(self._is_right(part) for part in _parts(one))}
        foreign = {
            one for one in line if any(is_foreign(self.places, tier, part) for tier in TIERS for part in _parts(one))
        }
        return Due(known, line, sound, foreign, silent, at_least)

    def _is_right(self, part: PartId) -> bool:
        return part in self.judge.truth and self.judge.can_be_had(part)

    async def _ask(self, repairer: Repairer, at_least: int | None) -> Came:
        try:
            found = await launch(self.places, repairer, WORLD, self._read, at_least)
        except TierdError as error:
            return Came(None, error, {}, f"{type(error).__name__}: {error}")
        one = found[0]
        if isinstance(one, VerifiedPart):
            got, reported = restored_together(found)
            return Came(got, None, reported, f"{got}, past {reported}")
        if one is None:
            return Came(None, None, {}, "a launch began anew")
        return Came(None, CheckpointNotFound(one), _skipped(one.splitlines()), one)

    def _put_back(self) -> None:
        self.places.write(HEAD, None)
        for path, data in self._marks.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        self.places.reset()


def _parts(one: CheckpointId) -> list[PartId]:
    return [PartId(one, rank, WORLD) for rank in range(WORLD)]


def judged(due: Due, came: Came) -> list[str]:
    """Compare; notes of what came."""
    wanted, above = due.wanted, due.above
    if came.error is not None and not isinstance(came.error, CheckpointNotFound):
        if due.silent and (above or due.unusable):
            return ["resumed: a place is silent"]
        if isinstance(came.error, StoreUnavailable) and due.foreign.intersection(above):
            return ["resumed: of another key"]
        raise Lost(f"{wanted or 'an answer'} can be had, and the resume was stopped")
    if due.silent and (above or not wanted) and not (due.at_least is not None and came.error):
        raise Lost("what was passed over may lie where nobody answers")
    if came.got != wanted:
        raise Lost(f"{wanted or 'nothing'} can be had, and {came.got or 'nothing'} came")
    if came.anew:
        if not due.may_begin_anew:
            raise Lost(f"more is remembered, {due.known.remembered()}, and a launch began anew")
        return ["resumed: anew"]
    if came.error and due.may_begin_anew and not due.known.checkpoints:
        raise Lost("nothing is there, nor was, and a launch was stopped")
    notes = _all_reported(due, came)
    if came.got is None:
        return [f"resumed: {'refused' if due.sound else 'nothing'}", *notes]
    went_back = above or any(one > came.got for one in due.known.remembered())
    return [f"resumed: {'an older one' if went_back else 'the newest'}", *notes]


def _all_reported(due: Due, came: Came) -> list[str]:
    """That everything that is newer, and was or may have been complete, is named, each with a reason."""
    known, notes = due.known, Counter[str]()
    left = next((one for one in due.line if not due.is_enough(one)), None) if came.got is None else came.got
    which = {
        "passed over": set(due.above),
        "unvouched": known.unvouched(),
        "gone": {one for one in known.remembered() if one not in known.checkpoints},
        "incomplete": {one for one in known.remembered() if one in known.checkpoints - known.complete(WORLD)},
    }
    for why, one in [(why, one) for why, some in which.items() for one in some]:
        if left is None or one > left:
            if len(came.reported.get(one, "")) < _REASON:
                raise Lost(f"{one} ({why}) is newer than {left}, and this was said: {came.reported}")
            notes[f"told: {why}"] += 1
    if came.got in came.reported:
        raise Lost(f"{came.got} was given, and is among what was skipped: {came.reported}")
    return list(notes)
