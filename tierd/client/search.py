"""Which checkpoints a restore tries, in which order, and when it stops: the same for a trainer and for a reader.

Law: a proven-bad copy steps all ranks back to the next candidate; a place that cannot be asked never does, on any rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from tierd.client.agree import Agreement, Settled
from tierd.client.launch import Clock, clock
from tierd.client.ranks import Ranks
from tierd.core.choose import Goal
from tierd.core.errors import CheckpointNotFound, DaemonUnavailable, ManifestError, StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.core.manifest import Manifest
from tierd.core.resume import UNTOLD, Candidate, Resume, because, not_found
from tierd.core.sight import Sight
from tierd.core.wire import MAX_TOLD, MOST_TOLD, FellBack, Request

log = logging.getLogger("tierd")

INCOMPLETE = "incomplete: not every rank's part is there"
GONE = "gone: it was whole once, as this node or a tier remembers, and no place has it any more"
UNVOUCHED = (
    "unreadable: no manifest of its launch, or of so many ranks, can be read, so that its name alone says that it is "
    "newer (it is damaged, of a newer tierd, of another key, or not tierd's; if it is nobody's, "
    "`tierd disown RUN ATTEMPT URL`)"
)
_ASIDE = "set aside before: some of it was proven corrupt, and no place had it right"
_LOOKS = 3  # at what there is, when parts vanish between a look and the reading
_TRIES = 2  # of one checkpoint, when what was proven corrupt is set aside and another node's spool may have it right


class Seeing(Protocol):
    """What shows a run's checkpoints to one process."""

    def sight(self) -> Sight: ...

    def flush(self, checkpoint: CheckpointId) -> None:
        """Make what only this node holds of `checkpoint` reachable for other nodes. Best effort."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that a restore passed over, and why."""

    step: int
    attempt: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt}): {self.reason}"


class Search:
    """Yields the checkpoints of a run in the order in which a restore tries them.

    Args:
        clock: what this rank gives to the naming of the next attempt.
        tell: has the daemon know of something.
    """

    def __init__(
        self,
        run: str,
        ranks: Ranks,
        source: Seeing,
        clock: Callable[[], Clock] = lambda: clock(()),
        tell: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._run, self._ranks, self._tell, self.source = run, ranks, tell, source
        self.agreement = Agreement(ranks, run, source.sight, clock)
        self._passed: dict[CheckpointId, str] = {}
        self._bad: Counter[CheckpointId] = Counter()  # how often some of it was proven corrupt
        self._asked_for: set[CheckpointId] = set()  # other nodes' flush, and not tried since
        self._gone = False  # whether the last candidate's parts had vanished
        self.resume = Resume((), (), (), None, (), ())  # as last looked at

    def whole(
        self, step: int | None, attempt: str | None, best: Goal | None = None, at_least: int | None = None
    ) -> Iterator[Candidate]:
        """As `restore` finds them: the checkpoints to try, the same on every rank, where each needs every rank's part.

        Their number of ranks may be any. What lies only in other nodes' spools is flushed first. After each, every rank
        calls `settle` with how it fared; the next one comes only if all have to step back, and the end means that the
        run has none. `source` gives parts; `close` ends it. Raises as `restore`.
        """
        return self.candidates(step, attempt, everything=True, best=best, at_least=at_least)

    def settle(self, candidate: Candidate, error: Exception | None, *, unfit: bool = False) -> Settled:
        """Tell all ranks how this one fared with `candidate`; raises as `Agreement.settle`."""
        settled = self.agreement.settle(error, unfit=unfit)
        self._gone = settled.gone
        if settled.corrupt:
            self._bad[candidate.checkpoint] += 1
            log.error("restore skips %s: %s", candidate.checkpoint, settled.corrupt)
            self._passed[candidate.checkpoint] = settled.corrupt
        if settled.load and self._ranks.rank == 0 and (skipped := self.skipped(candidate.checkpoint)):
            told = tuple(str(one)[:MAX_TOLD] for one in skipped[:MOST_TOLD])
            self._tell(FellBack(checkpoint=candidate.checkpoint, skipped=told))
        return settled

    def skipped(self, until: CheckpointId | None = None) -> tuple[Skipped, ...]:
        """What was passed over so far, in the order in which it would have been tried; of what was set aside before,
        what would have come before `until`."""
        resume, order = self.resume, self.resume.order
        doubtful = dict.fromkeys(resume.quarantined, _ASIDE)
        if resume.goal:
            doubtful |= dict.fromkeys(resume.incomplete, INCOMPLETE)
        passed = {} if resume.goal else dict.fromkeys(resume.incomplete, INCOMPLETE)
        doubtful |= dict.fromkeys(resume.gone, GONE)
        doubtful |= dict.fromkeys(resume.unvouched, UNVOUCHED)
        passed |= {one: why for one, why in doubtful.items() if until is None or order(one) > order(until)}
        passed |= dict.fromkeys(resume.corrupt, UNTOLD) | self._passed
        newest = sorted(passed, key=order, reverse=True)
        return tuple(Skipped(one.step, one.attempt, passed[one]) for one in newest)

    def because(self) -> str:
        """Where and why places did not answer the last look, to follow their names in a message."""
        return because(self.resume, self._ranks.world, None if self._ranks.talk else self._ranks.rank)

    def close(self) -> None:
        self.source.close()

    def candidates(
        self,
        step: int | None,
        attempt: str | None,
        *,
        everything: bool,
        best: Goal | None = None,
        at_least: int | None = None,
        only: Collection[str] | None = None,
    ) -> Iterator[Candidate]:
        """As `whole`; without `everything`, each rank needs its own part alone, or of that what `only` names."""
        vanished = 0
        # Proven corrupt where one rank can look, and set aside there: the node that saved it may have it right, and
        # flush it again, on its own or when asked.
        tries = _TRIES if self._ranks.world > 1 else 1
        while vanished < _LOOKS:
            self.resume = resume = self.agreement.look(
                step, attempt, everything=everything, best=best, at_least=at_least, only=only
            )
            if best is None:
                self._check_incomplete(step is None and attempt is None)
            else:
                self._check_told(best)
            again, old = False, None
            for candidate in resume.candidates:
                one = candidate.checkpoint
                if self._bad[one] >= tries:
                    continue
                if at_least is not None and one.step < at_least:
                    old = old or one
                    continue
                if again := self._scattered(candidate):
                    break
                self._asked_for.discard(one)
                self._passed.pop(one, None)
                before = self._bad[one]
                self._gone = False
                yield candidate
                vanished += self._gone
                if again := self._gone or before < self._bad[one] < tries:
                    break
            if not again:
                if old is None:
                    self._check_nothing(step, attempt)
                if at_least is not None:
                    raise self._too_old(at_least, old)
                return
        raise StoreUnavailable(
            f"run {self._run!r}: what was to be restored vanished while it was read, {_LOOKS} times; try again"
        )

    def _too_old(self, at_least: int, found: CheckpointId | None) -> CheckpointNotFound:
        what = f"what is left begins at {found}" if found else "there is none at all"
        skipped = "".join(f"\n  skipped {one}" for one in self.skipped(found))
        return CheckpointNotFound(f"run {self._run!r}: no checkpoint of step {at_least} or later: {what}{skipped}")

    def _scattered(self, candidate: Candidate) -> bool:
        """Whether to look again: it is complete, but lies where not every rank can get at it, until it is flushed."""
        if not candidate.lacking:
            return False
        checkpoint = candidate.checkpoint
        if checkpoint in self._asked_for:
            silent = ", ".join((*self.resume.unreached, *self.resume.alone))
            where = f", or where nobody answers: {silent}{self.because()}" if silent else ""
            raise StoreUnavailable(
                f"{checkpoint} is complete, but rank {candidate.lacking[0]} sees no copy of what it needs: it lies in "
                f"a node's spool alone{where}; restore again once it is flushed. Restoring an older "
                "step is your decision: restore(state, step=…)"
            )
        self._asked_for.add(checkpoint)
        self.source.flush(checkpoint)
        self.agreement.settle(None)  # nobody looks before the others have flushed
        return True

    def _check_incomplete(self, newest: bool) -> None:
        resume = self.resume
        first = resume.candidates[0].checkpoint if resume.candidates else None
        aside = (one for one in (*resume.quarantined, *resume.gone) if first is None or one > first)
        doubtful = (*resume.incomplete, *aside, *resume.unvouched)
        newer = [one for one in doubtful if one not in self._passed]
        silent = (*resume.unreached, *resume.alone)
        if newer and silent and newest:
            # Known to be there, and perhaps whole: what lacks, or was set aside here, may lie where nobody answers.
            raise StoreUnavailable(
                f"{max(newer)} lacks parts in the places that answered, and {', '.join(silent)} did "
                f"not{self.because()}; restoring an older step is your decision: restore(state, step=…)"
            )

    def _check_told(self, best: Goal) -> None:
        """What is best rests on every place's answer: one that is silent may have a better one."""
        unreached, alone, unread = self.resume.unreached, self.resume.alone, self.resume.unread
        if unreached or alone or unread:
            manifest = f"rank 0's manifest of {unread[0]} cannot be read" if unread else ""
            why = f"{', '.join(unreached)} did not answer{self.because()}" if unreached else manifest
            why = f"the tiers cannot be asked: {'; '.join(alone)}" if alone else why
            raise StoreUnavailable(
                f"run {self._run!r}: which checkpoint is the best by {best.metric!r} cannot be told: {why}. Restoring "
                "a certain one is your decision: restore(state, step=…)"
            )

    def check_origin(self, manifest: Manifest) -> None:
        """That it belongs to the other ranks' parts, as far as one can see: ranks that cannot talk may have resumed
        from different checkpoints, and gone on under one attempt that they were given."""
        others = self.resume.origins.get(manifest.attempt, manifest.origin)
        if others != manifest.origin:
            raise ManifestError(
                f"{manifest.part} goes on from {manifest.origin}, and other parts of its attempt from {others}: they "
                "do not belong together"
            )

    def _check_nothing(self, step: int | None, attempt: str | None) -> None:
        """Return when starting anew is right; raise when it would be a silent loss."""
        resume = self.resume
        if resume.alone:
            raise DaemonUnavailable(
                f"run {self._run!r}: no checkpoint in the spool, and the tiers cannot be asked: "
                f"{'; '.join(resume.alone)}"
            )
        if resume.unreached:
            raise StoreUnavailable(
                f"run {self._run!r}: no checkpoint was found, but {', '.join(resume.unreached)} did not answer"
                f"{self.because()}"
            )
        skipped = self.skipped()
        asked = step is not None or attempt is not None or (resume.goal is not None and resume.whole)
        if asked or resume.branches or resume.lost or any(one.reason != INCOMPLETE for one in skipped):
            raise not_found(resume, self._run, step, [str(one) for one in skipped], attempt)
