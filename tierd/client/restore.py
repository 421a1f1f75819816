"""The way back: candidates newest first, one that every rank has verified, or a reason that every rank is told.

Law: a proven-bad copy steps all ranks back to the next candidate; a place that cannot be asked never does, on any rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tierd.arena import Arena
from tierd.client.agree import Agreement, Settled
from tierd.client.entries import read_entries
from tierd.client.files import Files
from tierd.client.handoff import HandOff
from tierd.client.launch import Clock, clock
from tierd.client.ranks import Ranks
from tierd.client.source import Part, Source
from tierd.core.choose import Goal
from tierd.core.errors import DaemonUnavailable, ManifestError, StateMismatch, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.resume import UNTOLD, Candidate, Resume, not_found, own_part
from tierd.core.wire import MAX_TOLD, MOST_TOLD, FellBack, Request
from tierd.core.world import SPOOL
from tierd.link import Link
from tierd.spool import Spool

log = logging.getLogger("tierd")

_INCOMPLETE = "incomplete: not every rank's part is there"
_ASIDE = "set aside before: some of it was proven corrupt, and no place had it right"
_LOOKS = 3  # at what there is, when parts vanish between a look and the reading
_TRIES = 2  # of one checkpoint, when what was proven corrupt is set aside and another node's spool may have it right


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that a restore passed over, and why."""

    step: int
    attempt: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore gave.

    Attributes:
        step: the checkpoint's step; training goes on at `step + 1`.
        attempt: the launch that wrote it.
        tier: where its bytes came from: `"local"`, or the tier that healed or supplied them; `"memory"` when a trainer
            that was killed had left them in the daemon's hands.
        metrics: as given to `save`.
        skipped: newer checkpoints (or better ones) that were passed over, each with its reason.
        unreached: tiers that did not answer; a newer checkpoint could lie there.
        directory: the verified files; with `only`, where they are if the spool has them, and not all of them verified.
    """

    step: int
    attempt: str
    tier: str
    metrics: dict[str, float]
    skipped: tuple[Skipped, ...]
    unreached: tuple[str, ...]
    directory: Path


@dataclass(frozen=True, slots=True)
class Found:
    """A part whose every byte was verified just now, or every one of some entries.

    `tier` is where bytes came from: as `Restored.tier`. `arena`: the memory that `files` lie in when a predecessor left
    them there; it will be used for saves.
    """

    part: PartId
    manifest: Manifest
    files: Mapping[str, memoryview]
    tier: str
    skipped: tuple[Skipped, ...]
    directory: Path
    attempts: tuple[str, ...]
    unreached: tuple[str, ...]
    arena: Arena | None
    clocks: Sequence[Clock]  # every rank's, to name what goes on from here
    tree: dict[str, Any] = field(default_factory=dict)
    hold: Link | None = None  # to be closed by whoever is done with `directory`


class Restorer:
    """Finds the newest checkpoint that every rank can have verified, and this rank's part of it.

    Args:
        tiers, line, keep, metrics: as `Source` has them.
        clock: what this rank gives to the naming of the next attempt.
        tell: has the daemon know of something.
        only: these entries of a state, and no byte of others.
    """

    def __init__(
        self,
        spool: Spool,
        run: str,
        ranks: Ranks,
        *,
        tiers: bool,
        line: HandOff | None = None,
        keep: bool = True,
        clock: Callable[[], Clock] = lambda: clock(()),
        tell: Callable[[Request], None] = lambda request: None,
        metrics: tuple[str, ...] = (),
        only: Collection[str] | None = None,
    ) -> None:
        self._spool, self._run, self._ranks, self._keep, self._only = spool, run, ranks, keep, only
        self._tell = tell
        self.source = Source(spool, run, tiers=tiers, line=line, keep=keep, metrics=metrics)
        self.agreement = Agreement(ranks, run, self.source.sight, clock)
        self._passed: dict[CheckpointId, str] = {}
        self._bad: Counter[CheckpointId] = Counter()  # how often some of it was proven corrupt
        self._asked_for: set[CheckpointId] = set()  # other nodes' flush, and not tried since
        self._gone = False  # whether the last candidate's parts had vanished
        self.resume = Resume((), (), (), None, (), ())  # as last looked at

    def restore(
        self,
        step: int | None,
        attempt: str | None,
        fits: Callable[[Found], dict[str, Any]] = lambda found: {},
        best: Goal | None = None,
    ) -> Found | None:
        """Read the checkpoint to resume from, the same on every rank; None when the run has none at all.

        Two gathers, where nothing is wrong. Ranks that cannot talk each find their own by what the tiers show.

        Args:
            fits: makes `Found.tree`, and raises where that does not fit what it is wanted for; then no rank gets it.
            best: the best comes first, by rank 0's manifests, whose `metrics` have to be looked at.

        Raises:
            CheckpointNotFound: there are some, and none could be verified, or not the one asked for.
            StoreUnavailable, DaemonUnavailable: stepping back, or starting anew, would rest on a place that did not
                answer, or another rank could not restore; says which and why.
            StateMismatch: it was written by another number of ranks, or does not fit another rank's state.
            FormatTooNew: the newest was written by a newer tierd.
        """
        try:
            for candidate in self._candidates(step, attempt, everything=False, best=best):
                self._check_world(candidate)
                found, error, unfit = self._try(candidate, fits)
                if self.settle(candidate, error, unfit=unfit).load:
                    assert found is not None
                    return found if self._keep else replace(found, hold=self.source.hand_over())
                del found, error  # memory, before the next one is read
            return None
        finally:
            self.source.close()

    def whole(self, step: int | None, attempt: str | None, best: Goal | None = None) -> Iterator[Candidate]:
        """As `restore` finds them: the checkpoints to try, the same on every rank, where each needs every rank's part.

        Their number of ranks may be any. What lies only in other nodes' spools is flushed first. After each, every rank
        calls `settle` with how it fared; the next one comes only if all have to step back, and the end means that the
        run has none. `source` gives parts; `close` ends it. Raises as `restore`.
        """
        return self._candidates(step, attempt, everything=True, best=best)

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
            doubtful |= dict.fromkeys(resume.incomplete, _INCOMPLETE)
        passed = {} if resume.goal else dict.fromkeys(resume.incomplete, _INCOMPLETE)
        passed |= {one: why for one, why in doubtful.items() if until is None or order(one) > order(until)}
        passed |= dict.fromkeys(resume.corrupt, UNTOLD) | self._passed
        newest = sorted(passed, key=order, reverse=True)
        return tuple(Skipped(one.step, one.attempt, passed[one]) for one in newest)

    def close(self) -> None:
        self.source.close()

    def _candidates(
        self, step: int | None, attempt: str | None, *, everything: bool, best: Goal | None = None
    ) -> Iterator[Candidate]:
        vanished = 0
        # Proven corrupt where one rank can look, and set aside there: the node that saved it may have it right, and
        # flush it again, on its own or when asked.
        tries = _TRIES if self._ranks.world > 1 else 1
        while vanished < _LOOKS:
            self.resume = resume = self.agreement.look(step, attempt, everything=everything, best=best)
            if best is None:
                self._check_incomplete(step is None and attempt is None)
            else:
                self._check_told(best)
            again = False
            for candidate in resume.candidates:
                one = candidate.checkpoint
                if self._bad[one] >= tries:
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
                self._nothing(step, attempt)
                return
        raise StoreUnavailable(
            f"run {self._run!r}: what was to be restored vanished while it was read, {_LOOKS} times; try again"
        )

    def _scattered(self, candidate: Candidate) -> bool:
        """Whether to look again: it is complete, but lies where not every rank can get at it, until it is flushed."""
        if not candidate.lacking:
            return False
        checkpoint = candidate.checkpoint
        if checkpoint in self._asked_for:
            silent = ", ".join((*self.resume.unreached, *self.resume.alone))
            raise StoreUnavailable(
                f"{checkpoint} is complete, but rank {candidate.lacking[0]} sees no copy of what it needs: it lies in "
                f"a node's spool alone{f', or where nobody answers ({silent})' if silent else ''}; restore again once "
                "it is flushed. Restoring an older step is your decision: restore(state, step=…)"
            )
        self._asked_for.add(checkpoint)
        self.source.flush(checkpoint)
        self.agreement.settle(None)  # nobody looks before the others have flushed
        return True

    def _check_incomplete(self, newest: bool) -> None:
        resume = self.resume
        first = resume.candidates[0].checkpoint if resume.candidates else None
        doubtful = (*resume.incomplete, *(one for one in resume.quarantined if first is None or one > first))
        newer = [one for one in doubtful if one not in self._passed]
        silent = (*resume.unreached, *resume.alone)
        if newer and silent and newest:
            # Known to be there, and perhaps whole: what lacks, or was set aside here, may lie where nobody answers.
            raise StoreUnavailable(
                f"{max(newer)} lacks parts in the places that answered, and {', '.join(silent)} did not; restoring an "
                "older step is your decision: restore(state, step=…)"
            )

    def _check_told(self, best: Goal) -> None:
        """What is best rests on every place's answer: one that is silent may have a better one."""
        silent, unread = (*self.resume.unreached, *self.resume.alone), self.resume.unread
        if silent or unread:
            manifest = f"rank 0's manifest of {unread[0]} cannot be read" if unread else ""
            why = f"{', '.join(silent)} did not answer" if silent else manifest
            raise StoreUnavailable(
                f"run {self._run!r}: which checkpoint is the best by {best.metric!r} cannot be told: {why}. Restoring "
                "a certain one is your decision: restore(state, step=…)"
            )

    def _check_world(self, candidate: Candidate) -> None:
        if candidate.world != self._ranks.world:
            raise StateMismatch(
                f"{candidate.checkpoint} was saved by {candidate.world} ranks, and this launch has "
                f"{self._ranks.world}: launch {candidate.world} ranks; or, if its state was saved through "
                "torch.distributed.checkpoint, load it by tierd.dcp, which reshards"
            )

    def _try(
        self, candidate: Candidate, fits: Callable[[Found], dict[str, Any]]
    ) -> tuple[Found | None, Exception | None, bool]:
        part = own_part(candidate, self._ranks.rank)
        try:
            manifest, files, tier = self.source.obtain(part) if self._only is None else self._some(part, self._only)
            self._check_origin(manifest)
            found = Found(
                part,
                manifest,
                files,
                tier,
                self.skipped(candidate.checkpoint),
                self._spool.path(part),
                self.resume.attempts,
                (*self.resume.unreached, *self.resume.alone),
                self.source.arena,
                self.agreement.clocks,
            )
        except Exception as error:  # the others are told before it is raised
            return None, error, isinstance(error, StateMismatch)
        try:
            return replace(found, tree=fits(found)), None, False
        except Exception as error:
            return None, error, True

    def _some(self, part: PartId, names: Collection[str]) -> Part:
        files = Files(self._spool, part.checkpoint, part.world, self.source.link, self.source.alone)
        try:
            manifest, found = read_entries(files, part, names)
        finally:
            files.close()
        return manifest, found, next(iter(files.tiers), SPOOL)

    def _check_origin(self, manifest: Manifest) -> None:
        """That it belongs to the other ranks' parts, as far as one can see: ranks that cannot talk may have resumed
        from different checkpoints, and gone on under one attempt that they were given."""
        others = self.resume.origins.get(manifest.attempt, manifest.origin)
        if others != manifest.origin:
            raise ManifestError(
                f"{manifest.part} goes on from {manifest.origin}, and other parts of its attempt from {others}: they "
                "do not belong together"
            )

    def _nothing(self, step: int | None, attempt: str | None) -> None:
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
            )
        skipped = self.skipped()
        asked = step is not None or attempt is not None or (resume.goal is not None and resume.whole)
        if asked or resume.branches or resume.lost or any(one.reason != _INCOMPLETE for one in skipped):
            raise not_found(resume, self._run, step, [str(one) for one in skipped], attempt)
        for one in skipped:
            log.warning("run %s: starting anew, past %s", self._run, one)
