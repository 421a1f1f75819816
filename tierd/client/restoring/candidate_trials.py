"""Walk down the candidates of a restore, and decide when it stops, the same for a trainer and for a reader.

Invariant: a copy that is proven corrupt makes all ranks try the next candidate. A place that cannot be asked never
does, on any rank.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from tierd.client.ranks.attempts import RankClock, make_rank_clock
from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.consensus import ConsensusResult, RestoreAgreement
from tierd.core.errors import CheckpointNotFound, DaemonUnavailable, StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.core.manifest import Manifest
from tierd.core.save_rules import MetricGoal
from tierd.core.timeline.launch_chain import check_origin
from tierd.core.timeline.restore_order import (
    DIFFERING,
    INCOMPLETE,
    QUARANTINED,
    UNKNOWN_METRIC,
    UNPROVEN,
    Candidate,
    RestoreOrder,
    describe_silent,
    not_found_error,
)
from tierd.core.timeline.run_view import RunView
from tierd.ipc.messages import MAX_REASON, MOST_REASONS, FallbackNotice, Request

log = logging.getLogger("tierd")

REASON_PRUNED = "pruned while it was read"
REASON_GONE = (
    "gone: it was whole once, as this node or a tier remembers, and no place has it any more, or its ranks divided "
    "different states (`tierd ls` says which)"
)
_LISTINGS = 3  # how often to list, if parts vanish between a listing and their reading
# How often to try one checkpoint, because another node's spool may hold a right copy of what was quarantined here.
_TRIES = 2


class RunViewSource(Protocol):
    """A process's view of a run's checkpoints: of all if `deep`, else of the newest, which suffice for most restores.

    `odd` has the checkpoints whose place in the spool holds no directory, with details.
    """

    deep: bool
    odd: Mapping[CheckpointId, str]

    def run_view(self) -> RunView: ...

    def flush(self, checkpoint: CheckpointId) -> None:
        """Make this node's parts of `checkpoint` reachable for other nodes. Best effort."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that a restore passed over, and the reason.

    Attributes:
        step, attempt: the checkpoint's.
        reason: why it was passed over, for people.
    """

    step: int
    attempt: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt}): {self.reason}"


class CandidateTrials:
    """Yield the checkpoints of a run in the order in which a restore tries them.

    `clock` returns this rank's contribution to the next attempt's name; `report` sends a request to the daemon.
    """

    def __init__(
        self,
        run: str,
        ranks: Ranks,
        source: RunViewSource,
        clock: Callable[[], RankClock] = lambda: make_rank_clock(()),
        report: Callable[[Request], None] = lambda request: None,
        *,
        can_exchange: bool = False,
    ) -> None:
        self._run, self._ranks, self._report, self.source = run, ranks, report, source
        self.agreement = RestoreAgreement(ranks, run, source.run_view, clock, can_exchange=can_exchange)
        self._passed: dict[CheckpointId, str] = {}
        self._corruptions: Counter[CheckpointId] = Counter()  # how often a copy of a part was proven corrupt
        # Checkpoints that other nodes were asked to flush, and that were not tried since.
        self._flush_requested: set[CheckpointId] = set()
        self._differing: set[CheckpointId] = set()  # those whose ranks hold different replicas, which are tried last
        self._has_vanished = False  # whether the last candidate's parts had vanished
        self._pruned: list[CheckpointId] = []  # candidates whose parts had vanished
        self.resume = RestoreOrder((), (), (), None, (), ())  # as of the last listing

    def settle(
        self,
        candidate: Candidate,
        error: Exception | None,
        *,
        unfit: bool = False,
        rest: bool = False,
        replicas: Mapping[str, str] = MappingProxyType({}),
    ) -> ConsensusResult:
        """Report this rank's result for `candidate` to all ranks. Raises as `RestoreAgreement.settle`.

        Args:
            replicas: the fingerprints in this rank's part, if a candidate whose ranks differ is to be tried last.
        """
        is_last_resort = candidate.checkpoint in self._differing
        settled = self.agreement.settle(error, unfit=unfit, rest=rest, replicas={} if is_last_resort else replicas)
        if settled.differ and not settled.corrupt:
            self._differing.add(candidate.checkpoint)
            self.source.deep = True  # because older ones come before it now
            self._passed[candidate.checkpoint] = f"{DIFFERING}: {settled.differ}"
        is_last = settled.should_load and not settled.has_rest
        if is_last and is_last_resort:
            log.warning("%s is restored although its replicas differ, because no other can be", candidate.checkpoint)
        self._has_vanished = settled.is_gone
        if settled.corrupt:
            self._corruptions[candidate.checkpoint] += 1
            log.error("restore skips %s: %s", candidate.checkpoint, settled.corrupt)
            self._passed[candidate.checkpoint] = settled.corrupt
        if is_last and self._ranks.rank == 0 and (skipped := self.skipped(candidate.checkpoint)):
            reasons = tuple(str(skip)[:MAX_REASON] for skip in skipped[:MOST_REASONS])
            self._report(FallbackNotice(checkpoint=candidate.checkpoint, skipped=reasons))
        return settled

    def skipped(self, until: CheckpointId | None = None) -> tuple[Skipped, ...]:
        """Return the checkpoints passed over so far, in the order in which they would have been tried.

        Quarantined ones count if they would have been tried before `until`.
        """
        resume, order = self.resume, self.resume.order
        unusable = dict.fromkeys(resume.quarantined, QUARANTINED)
        if resume.goal:
            unusable |= dict.fromkeys(resume.incomplete, INCOMPLETE)
        passed = {} if resume.goal else dict.fromkeys(resume.incomplete, INCOMPLETE)
        unusable |= dict.fromkeys(resume.missing, REASON_GONE)
        unusable |= dict.fromkeys(resume.unproven, UNPROVEN)
        passed |= {
            checkpoint: why for checkpoint, why in unusable.items() if until is None or order(checkpoint) > order(until)
        }
        passed |= dict.fromkeys(resume.corrupt, UNKNOWN_METRIC) | self._passed
        for checkpoint in passed.keys() & self.source.odd.keys():
            passed[checkpoint] += f"; {self.source.odd[checkpoint]}"
        newest = sorted(passed, key=order, reverse=True)
        return tuple(Skipped(checkpoint.step, checkpoint.attempt, passed[checkpoint]) for checkpoint in newest)

    def describe_silent(self) -> str:
        """Say where and why places did not answer the last listing, to follow their names in a message."""
        return describe_silent(
            self.resume, self._ranks.world, None if self._ranks.can_communicate else self._ranks.rank
        )

    def close(self) -> None:
        self.source.close()

    def candidates(
        self,
        step: int | None,
        attempt: str | None,
        best: MetricGoal | None = None,
        at_least: int | None = None,
        *,
        everything: bool = True,
        only: Collection[str] | None = None,
        other_launches: bool = False,
    ) -> Iterator[Candidate]:
        """Yield the checkpoints to try, in the order of a restore; they are the same on every rank.

        Parts that lie only in other nodes' spools are flushed first. After each candidate, every rank calls `settle`
        with its result. The next one follows only if all ranks have to try an older one; the iteration ends if the run
        has none. Raises as `Restorer.restore`.

        With `everything` each rank needs every rank's part, of any number of ranks; else only its own part, or of that
        part only the entries in `only`. With `other_launches`, of a step that is asked for, also what other launches
        have of it is tried. A trainer must not, because its next save would continue another history.
        """
        vanished = 0
        self.source.deep |= not (step is None and attempt is None and best is None)
        # Corruption may be proven and quarantined in all places that one rank can read, while the node that saved the
        # part still holds a right copy. That node flushes the copy again, by itself or on request.
        tries = _TRIES if self._ranks.world > 1 else 1
        while vanished < _LISTINGS:
            observe = functools.partial(
                self.agreement.observe,
                step,
                attempt,
                everything=everything,
                best=best,
                at_least=at_least,
                only=only,
                differing=self._differing,
            )
            self.resume = resume = observe()
            if not resume.goes_deep_enough:
                self.source.deep = True
                self.resume = resume = observe()
            if best is None:
                self._check_incomplete(step is None and attempt is None)
            else:
                self._check_metric(best)
            relist, old = False, None
            for candidate in (*resume.candidates, *(resume.same_step if other_launches else ())):
                checkpoint = candidate.checkpoint
                if relist := self._is_cut(checkpoint):
                    break
                if self._corruptions[checkpoint] >= tries:
                    continue
                if at_least is not None and checkpoint.step < at_least:
                    old = old or checkpoint
                    continue
                if relist := self._scattered(candidate):
                    break
                self._flush_requested.discard(checkpoint)
                self._passed.pop(checkpoint, None)
                before, differing = self._corruptions[checkpoint], len(self._differing)
                self._has_vanished = False
                yield candidate
                vanished += self._has_vanished
                if self._has_vanished and tries > 1:  # a rank may need parts that lie in other nodes' spools alone
                    self.source.flush(checkpoint)
                    self.agreement.settle(None)
                self._pruned += [checkpoint] if self._has_vanished else []
                is_put_last = differing < len(self._differing)
                if relist := self._has_vanished or is_put_last or before < self._corruptions[checkpoint] < tries:
                    break
            if not relist and not self._is_cut(None):
                if old is None:
                    self._check_nothing(step, attempt)
                if at_least is not None:
                    raise self._too_old(at_least, old)
                return
        raise StoreUnavailable(
            f"run {self._run!r}: what was to be restored vanished while it was read, {_LISTINGS} times; try again"
        )

    def _is_cut(self, checkpoint: CheckpointId | None) -> bool:
        """Whether to list again, this time everything: the last listing left out what is older than `checkpoint`, or no
        listed checkpoint is left.
        """
        end = self.resume.down_to
        cut = end is not None and (checkpoint is None or checkpoint < end)
        self.source.deep |= cut
        return cut

    def _too_old(self, min_step: int, oldest: CheckpointId | None) -> CheckpointNotFound:
        existing = f"what is left begins at {oldest}" if oldest else "there is none at all"
        skipped = "".join(f"\n  skipped {skip}" for skip in self.skipped(oldest))
        return CheckpointNotFound(f"run {self._run!r}: no checkpoint of step {min_step} or later: {existing}{skipped}")

    def _scattered(self, candidate: Candidate) -> bool:
        """Whether to list again: the checkpoint is complete, but not every rank can read its parts until they are
        flushed.
        """
        if not candidate.lacking:
            return False
        checkpoint = candidate.checkpoint
        if checkpoint in self._flush_requested:
            silent = ", ".join((*self.resume.unreached, *self.resume.alone))
            where = f", or where nobody answers: {silent}{self.describe_silent()}" if silent else ""
            raise StoreUnavailable(
                f"{checkpoint} is complete, but rank {candidate.lacking[0]} sees no copy of what it needs: it lies in "
                f"a node's spool alone{where}; restore again once it is flushed. Restoring an older "
                "step is your decision: restore(state, step=…)"
            )
        self._flush_requested.add(checkpoint)
        self.source.flush(checkpoint)
        self.agreement.settle(None)  # no rank may list before the others have flushed
        return True

    def _check_incomplete(self, newest: bool) -> None:
        resume = self.resume
        first = resume.candidates[0].checkpoint if resume.candidates else None
        unavailable = (
            checkpoint for checkpoint in (*resume.quarantined, *resume.missing) if first is None or checkpoint > first
        )
        unusable = (*resume.incomplete, *unavailable, *resume.unproven)
        newer = [checkpoint for checkpoint in unusable if checkpoint not in self._passed]
        silent = (*resume.unreached, *resume.alone)
        if newer and silent and newest:
            # It is known to exist, and may be complete: the missing or quarantined parts may lie in a place that did
            # not answer.
            raise StoreUnavailable(
                f"{max(newer)} lacks parts in the places that answered, and {', '.join(silent)} did "
                f"not{self.describe_silent()}; restoring an older step is your decision: restore(state, step=…)"
            )

    def _check_metric(self, best: MetricGoal) -> None:
        """Raise unless every place answered, because a silent place may hold a better checkpoint."""
        unreached, alone, unread = self.resume.unreached, self.resume.alone, self.resume.unread
        if unreached or alone or unread:
            manifest = f"rank 0's manifest of {unread[0]} cannot be read" if unread else ""
            why = f"{', '.join(unreached)} did not answer{self.describe_silent()}" if unreached else manifest
            why = f"the tiers cannot be asked: {'; '.join(alone)}" if alone else why
            raise StoreUnavailable(
                f"run {self._run!r}: which checkpoint is the best by {best.metric!r} cannot be told: {why}. Restoring "
                "a certain one is your decision: restore(state, step=…)"
            )

    def check_origin(self, manifest: Manifest) -> None:
        """Raise `ManifestError` if this manifest does not belong together with the other parts of its attempt."""
        check_origin(manifest, dict(self.resume.origins))

    def _check_nothing(self, step: int | None, attempt: str | None) -> None:
        """Return if a fresh start is right; raise if it would silently lose training."""
        resume = self.resume
        if resume.alone:
            raise DaemonUnavailable(
                f"run {self._run!r}: no checkpoint in the spool, and the tiers cannot be asked: "
                f"{'; '.join(resume.alone)}"
            )
        if resume.unreached:
            raise StoreUnavailable(
                f"run {self._run!r}: no checkpoint was found, but {', '.join(resume.unreached)} did not answer"
                f"{self.describe_silent()}"
            )
        skipped = self.skipped()
        skipped += tuple(Skipped(checkpoint.step, checkpoint.attempt, REASON_PRUNED) for checkpoint in self._pruned)
        is_specific = step is not None or attempt is not None or (resume.goal is not None and resume.complete)
        if (
            is_specific
            or resume.branches
            or resume.unknown_origin
            or any(skip.reason != INCOMPLETE for skip in skipped)
        ):
            raise not_found_error(resume, self._run, step, [str(skip) for skip in skipped], attempt)
