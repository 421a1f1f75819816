"""Let all ranks find a checkpoint due at the same step after a notice that any of them got.

    notice/<turn>/first     by any rank that has a notice: the notice (`Notice`)
    notice/<turn>/<rank>    the last step at which the rank has asked whether a checkpoint is due (`_Position`); empty
                            once the rank no longer waits for the word
    notice/<turn>/all       by rank 0: the step after which the checkpoint is due, or why there is none (`_Decision`)

A rank that reads `first` stops answering: its next question waits. Then it writes the last step at which it has asked.
When rank 0 has read this note of every rank, it publishes the latest of these steps. The checkpoint is due at the first
step after it at which a rank asks, which is the same step on every rank because all ask at the same steps. Training may
be far into another step meanwhile: only notes are waited for, which another thread writes, and never a rank's training.
So ranks that wait for each other in a collective do not wait for ever.

Invariant: between a rank's note and rank 0's word, the rank answers no question. So no rank has passed the step that
follows the latest note. A rank that waits in vain takes its note back, and waits once more for a word before it gives
the turn up and says so. Rank 0 publishes a step only soon after it has read the notes, and none if a note was taken
back. So all ranks go by the step or none does, unless a rank cannot read or write notes then, or rank 0 is stopped in
the moment between its last look at the clock and the word. A rank never waits longer than `NOTES_PATIENCE_S` three
times, without the time in which its process was stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

import msgspec

from tierd.client.ranks.boards import Board

log = logging.getLogger("tierd")

NOTES_PATIENCE_S = 15.0  # how long rank 0 waits for the notes of all ranks, unless there are more than `_QUICK_RANKS`
_QUICK_RANKS = 450  # ranks; of more, rank 0 reads the notes longer, so that all ranks wait longer
_WAITS = 30  # in which training waits for a word


class Notice(msgspec.Struct, frozen=True):
    """Word that this node or job ends. Each `key` counts once in a launch; `at_s` is monotonic."""

    key: str
    why: str
    at_s: float


class AskedAt(NamedTuple):
    """When a rank asked: after which restore (see `StepAgreement.restored`), and the step."""

    restores: int = 0
    step: int = -1


class _AgreedNotice(NamedTuple):
    """A notice on whose step the ranks agreed: a checkpoint is due at the first question after the moment."""

    after: AskedAt
    why: str
    since_s: float


class _FirstNotice(msgspec.Struct, frozen=True):
    why: str
    age_s: float


class _Position(msgspec.Struct, frozen=True):
    restores: int
    step: int
    keys: tuple[str, ...]


class _Decision(msgspec.Struct, frozen=True):
    restores: int = 0
    step: int = -1
    keys: tuple[str, ...] = ()
    why: str = ""
    error: str = ""


class StepAgreement:
    """One rank's side. With several ranks one thread calls `offer` and `advance`, and the one that trains the rest.
    With one rank there is only the one that trains.

    Args:
        name: what the keys of all notes begin with, the same on every rank and different for each launch.
        seen_s: how old a note may be when this rank first reads it, in seconds.

    Attributes:
        why: the notice by which a checkpoint was last due; None before.
        since_s: when it was given, monotonic seconds, rather too early than too late.
        frozen_s: since when this rank answers no question; None while it answers.
    """

    def __init__(self, rank: int, world: int, name: str = "", seen_s: float = 0.0) -> None:
        self._rank, self._world, self._name, self._seen_s = rank, world, name, seen_s
        self._changed = threading.Condition()  # protects what both threads use: `frozen_s`, `_position`, `_agreed`
        self._question = 0
        self._own_notices: dict[str, Notice] = {}
        self._handled: set[str] = set()
        self._position = AskedAt()
        self._agreed: list[_AgreedNotice] = []  # that no question met yet
        self._due_position: AskedAt | None = None
        self._next: tuple[str, float] = "", 0.0
        self._waited_s = 0.0  # how long this rank has waited in this turn
        self._polled_s = 0.0  # when that was last counted
        self._end_s = 0.0  # how long it waits
        self._taken_back = False  # its note
        self._note: bytes | None = None  # this rank's note, until it is written
        self._owed: str | None = None  # the key of a note that is to be taken back, of a turn that training ended
        self._unsaved = False
        self.why: str | None = None
        self.since_s = 0.0
        self.frozen_s: float | None = None

    @property
    def _late_s(self) -> float:
        return NOTES_PATIENCE_S * max(1.0, self._world / _QUICK_RANKS)

    # -- the thread that trains ---------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due by a notice; waits while this rank answers no question.

        With one rank it stays due until a save counts, with several at the step at which it was first found due.
        """
        with self._changed:
            if not self._answers():
                self._owed = self._key(self._question, str(self._rank))
                self._end(self._question, _Decision(error="the thread that talks to the other ranks hangs"))
            self._position = max(self._position, AskedAt(self._position.restores, step))
            return self._decide_due(step)

    def _decide_due(self, step: int) -> bool:
        if self._world == 1 and self._own_notices:
            first = min(self._own_notices.values(), key=lambda notice: notice.at_s)
            self.why, self.since_s, self._unsaved = first.why, first.at_s, True
            self._handled |= self._own_notices.keys()
            self._own_notices.clear()
        # Another rank may have met one of these before the next notice, so a later one does not replace it.
        met = [entry for entry in self._agreed if self._position > entry.after]
        if met:
            self._agreed = [entry for entry in self._agreed if entry not in met]
            self._due_position = self._position
            _, self.why, self.since_s = min(met, key=lambda entry: entry.since_s)
        return self.is_due_at(step)

    def is_due_at(self, step: int) -> bool:
        """Return whether `due` said so at `step`, and no save has counted since if there is one rank."""
        return self._unsaved if self._world == 1 else self._due_position == (self._position.restores, step)

    def saved(self) -> None:
        self._unsaved = False

    def restored(self, turn: int) -> None:
        """Record that all ranks restored, and ask at earlier steps again.

        `turn` is the same on every rank, and greater than at any earlier restore. It is no count of this rank's
        restores, because one may succeed on other ranks only.
        """
        with self._changed:
            self._answers()
            self._position = AskedAt(turn, -1)

    def _answers(self) -> bool:
        """Wait until this rank answers questions, at most `NOTES_PATIENCE_S` three times; return whether it does.

        In short waits, because a process that was stopped continues in one of them. The thread that reads notes was
        stopped as well, and has the other waits to read the word in.
        """
        return any(
            self._changed.wait_for(lambda: self.frozen_s is None, 3 * self._late_s / _WAITS) for _ in range(_WAITS)
        )

    # -- the thread that reads and writes notes -----------------------------------------------------------------------

    def offer(self, notice: Notice) -> None:
        if notice.key not in self._handled:
            self._own_notices.setdefault(notice.key, notice)

    @property
    def is_idle(self) -> bool:
        return self.frozen_s is None and not self._own_notices

    def advance(self, notes: Board, now_s: float) -> None:
        """Do the next part of a turn; call it again after a pause.

        Raises `RuntimeError` or `OSError` if notes cannot be read or written. The turn ends without a checkpoint if
        that lasts.
        """
        with self._changed:
            question, frozen_s, owed = self._question, self.frozen_s, self._owed
        if owed is not None:
            notes.put(owed, b"")
            self._owed = None
        if frozen_s is None and not self._begin(notes, question, now_s):
            return
        # Time in which this process was stopped counts as one long poll: the other ranks may have been stopped as well.
        self._waited_s += min(now_s - self._polled_s, self._late_s / 5 + self._seen_s)
        self._polled_s = now_s
        word = None
        try:
            word = self._talk(notes, question)
        finally:
            if word is None and self._waited_s > self._end_s:
                word = _Decision(error=f"rank {self._rank} got no word from rank 0")
            if word is not None:
                self._end(question, word)

    def _talk(self, notes: Board, question: int) -> _Decision | None:
        """Write this rank's note, or take it back if it has waited for long. Return the word if there is one."""
        if not self._taken_back and self._waited_s > 1.5 * self._late_s:
            notes.put(self._key(question, str(self._rank)), b"")
            self._taken_back, self._note = True, None
            self._end_s = self._waited_s + self._late_s / 2  # rank 0 may have read the note before
        if self._note is not None:
            notes.put(self._key(question, str(self._rank)), self._note)
            self._note = None
        return self._decide(notes, question) if self._rank == 0 else self._answer(notes, question)

    def _begin(self, notes: Board, question: int, now_s: float) -> bool:
        """Answer no question any more, if some rank has a notice."""
        key = self._key(question, "first")
        data = notes.read([key]).get(key)
        if data is None and not self._own_notices:
            return False
        if self._own_notices:
            first = min(self._own_notices.values(), key=lambda notice: notice.at_s)
            self._next = first.why, first.at_s
            if data is None:
                notes.put(key, msgspec.json.encode(_FirstNotice(first.why, now_s - first.at_s)))
        else:
            assert data is not None
            first_note = msgspec.json.decode(data, type=_FirstNotice)
            self._next = first_note.why, now_s - self._seen_s - max(0.0, first_note.age_s)
        self._waited_s, self._polled_s, self._end_s, self._taken_back = 0.0, now_s, 2 * self._late_s, False
        with self._changed:
            self.frozen_s, moment = now_s, self._position
            self._note = msgspec.json.encode(_Position(moment.restores, moment.step, tuple(self._own_notices)))
        return True

    def _decide(self, notes: Board, question: int) -> _Decision | None:
        keys = {self._key(question, str(rank)): rank for rank in range(self._world)}
        read_s = time.monotonic()
        answers = notes.read(keys.keys())
        absent = [str(rank) for key, rank in keys.items() if key not in answers]
        if withdrawn := [str(keys[key]) for key, answer in answers.items() if not answer]:
            word = _Decision(
                error=f"rank {', '.join(withdrawn[:10])} of {self._world} got no word from rank 0 for long"
            )
        elif not absent:
            positions = [msgspec.json.decode(answer, type=_Position) for answer in answers.values()]
            latest = max(AskedAt(position.restores, position.step) for position in positions)
            notice_keys = tuple(sorted({key for position in positions for key in position.keys}))
            word = _Decision(latest.restores, latest.step, notice_keys, self._next[0])
        elif self._waited_s > self._late_s:
            word = _Decision(error=f"rank {', '.join(absent[:10])} of {self._world} did not say where it is")
        else:
            return None
        if self._question != question:
            word = _Decision(error="rank 0 has given up")
        elif not word.error and time.monotonic() - read_s > self._late_s / 4:
            return None  # a rank may have taken its note back, and waits twice that long
        notes.put(self._key(question, "all"), msgspec.json.encode(word))
        return word

    def _answer(self, notes: Board, question: int) -> _Decision | None:
        key = self._key(question, "all")
        data = notes.read([key]).get(key)
        return None if data is None else msgspec.json.decode(data, type=_Decision)

    def _end(self, question: int, word: _Decision) -> None:
        with self._changed:
            if self._question != question or self.frozen_s is None:  # the other thread has ended it
                return
            self._handled.update(word.keys or self._own_notices)
            self._own_notices = {key: notice for key, notice in self._own_notices.items() if key not in self._handled}
            self._question += 1
            why, since_s = self._next
            if word.error:
                log.error("notice: %s; no checkpoint is due by it, because %s", why, word.error)
            else:
                self._agreed.append(_AgreedNotice(AskedAt(word.restores, word.step), word.why, since_s))
            self.frozen_s = None
            self._changed.notify_all()

    def _key(self, question: int, last: str) -> str:
        return f"{self._name}notice/{question}/{last}"
