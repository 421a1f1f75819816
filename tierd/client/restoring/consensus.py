"""Agreement between ranks on the checkpoint to restore: they exchange their views, then their results.

Invariant: ranks decide by the same answers, so every rank gets the same result, or raises the same error. A rank that
fails notifies the others before it raises, because they wait for it. Any error stops all ranks; only proven corruption
makes them try an older checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from tierd.client.ranks.attempts import RankClock
from tierd.client.ranks.ranks import Ranks
from tierd.core.errors import (
    ConfigError,
    CorruptChunk,
    ManifestError,
    ObjectNotFound,
    StateMismatch,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import CheckpointId, check_attempt, check_step
from tierd.core.replicas.replica_comparison import compare_replicas, summarize_replicas
from tierd.core.save_rules import MetricGoal, check_goal
from tierd.core.timeline.restore_order import RestoreOrder, restore_order
from tierd.core.timeline.run_view import RunView


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's request and its view of the run.

    `can_exchange` says whether it can send other ranks bytes, and gains by it; `error` why it has no view.
    """

    step: int | None
    attempt: str | None
    everything: bool
    only: tuple[str, ...] | None = None
    best: MetricGoal | None = None
    at_least: int | None = None
    clock: RankClock
    sight: RunView = RunView()
    can_exchange: bool = False
    error: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """A rank's result for its part: whole, proven corrupt in every place, gone from every place, or unfit for its
    target.

    `failed` means that the rank could not find out. `replicas` summarizes the fingerprints of replicated tensors, if
    the ranks compare them. `rest` says that some chunks of a whole part will still be read, into live tensors.
    """

    what: Literal["whole", "corrupt", "gone", "unfit", "failed"]
    why: str = ""
    replicas: dict[str, str] = {}
    rest: bool = False


class LoadOutcome(msgspec.Struct, frozen=True):
    """Whether a rank has loaded the agreed checkpoint; `error` says why not."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class ConsensusResult:
    """What all ranks do next: load; try the next candidate if parts are `corrupt` or their replicas `differ`; or list
    again if one `is_gone`.

    If some rank `has_rest`, all settle once more, after the rest was read and before they load.
    """

    corrupt: str = ""
    is_gone: bool = False
    differ: str = ""
    has_rest: bool = False

    @property
    def should_load(self) -> bool:
        return not self.corrupt and not self.is_gone and not self.differ


class RestoreAgreement:
    """The exchanges between a launch's ranks in one restore. Every rank makes the same calls in the same order.

    Ranks that cannot talk each decide by the listings of the tiers alone.
    """

    def __init__(
        self,
        ranks: Ranks,
        run: str,
        view: Callable[[], RunView],
        clock: Callable[[], RankClock],
        *,
        can_exchange: bool = False,
    ) -> None:
        self._ranks, self._run, self._run_view, self._clock = ranks, run, view, clock
        self.can_exchange = can_exchange  # after `observe`: whether all ranks can
        self.clocks: Sequence[RankClock] = ()

    def observe(
        self,
        step: int | None,
        attempt: str | None,
        *,
        everything: bool = False,
        best: MetricGoal | None = None,
        at_least: int | None = None,
        only: Collection[str] | None = None,
        differing: Collection[CheckpointId] = (),
    ) -> RestoreOrder:
        """Observe on every rank, exchange the views in one gather, and order the checkpoints by what all ranks see.

        With `everything` each rank needs every rank's part, as a reader that reshards does, and any number of ranks may
        have saved.

        Raises:
            StoreUnavailable: another rank cannot observe; or this rank's own error.
            ConfigError: the ranks were asked for different checkpoints, or for the best and a step.
        """
        names = None if only is None else tuple(sorted(map(str, only)))
        own_view = RankView(
            step=None,
            attempt=None,
            everything=everything,
            only=names,
            clock=self._clock(),
            can_exchange=self.can_exchange,
        )
        failure: Exception | None = None
        try:  # also covers this rank's wrong arguments, because the others would wait for this rank
            step = step if step is None else check_step(step)
            attempt = attempt if attempt is None else check_attempt(attempt)
            if best is not None and step is not None:
                raise ConfigError(f"best={best.metric!r} and step={step}: one of the two")
            best = best if best is None else check_goal(best)
            at_least = at_least if at_least is None else check_step(at_least)
            own_view = msgspec.structs.replace(
                own_view, step=step, attempt=attempt, best=best, at_least=at_least, sight=self._run_view()
            )
        except Exception as error:
            failure, own_view = error, msgspec.structs.replace(own_view, error=text_of(error))
        rank_views = self._ranks.gather(own_view)
        if failure is not None:
            raise failure
        for rank, rank_view in enumerate(rank_views):
            if rank_view.error:
                raise StoreUnavailable(f"rank {rank} could not restore: {rank_view.error}")
            if _question(rank_view) != _question(own_view):
                raise ConfigError(
                    f"rank {self._ranks.rank} was asked for {_describe_question(own_view)}, and rank {rank} for "
                    f"{_describe_question(rank_view)}: every "
                    "rank of a launch restores the same"
                )
        self.can_exchange = all(view.can_exchange for view in rank_views)
        self.clocks = [view.clock for view in rank_views]
        views = [view.sight for view in rank_views]
        return restore_order(
            views,
            self._run,
            step,
            attempt,
            world=self._ranks.world,
            everything=everything,
            best=best,
            differing=differing,
        )

    def exchange_load_result(self, checkpoint: CheckpointId, error: Exception | None) -> None:
        """Exchange in one gather whether each rank has loaded the checkpoint: all ranks continue from it, or none does.

        Raises `error`, or `StateMismatch` if another rank could not load it.
        """
        outcomes = self._ranks.gather(LoadOutcome("" if error is None else text_of(error)))
        if error is not None:
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                raise StateMismatch(
                    f"rank {rank} could not load {checkpoint}, which this rank has loaded: {outcome.error}. No rank "
                    "goes on from it: restore again on all ranks, or end"
                )

    def settle(
        self,
        error: Exception | None,
        *,
        unfit: bool = False,
        rest: bool = False,
        replicas: Mapping[str, str] = MappingProxyType({}),
    ) -> ConsensusResult:
        """Exchange each rank's result for a candidate in one gather, and return what all ranks do next.

        Args:
            error: why this rank's part is not verified and fitting. `CorruptChunk` and `ManifestError` mean proven
                corruption in every place, `ObjectNotFound` that no place has the part any more.
            unfit: the part is right, but does not fit its target state.
            rest: some of the part will be read into live tensors once all ranks agree.
            replicas: the fingerprints in this rank's part, if ranks compare them.

        Raises:
            StoreUnavailable: another rank could not find out whether its part is right; or this rank's own error.
            StateMismatch: another rank's part does not fit.
        """
        own_outcome = msgspec.structs.replace(
            _outcome(error, unfit=unfit), replicas=summarize_replicas(replicas), rest=rest
        )
        outcomes = self._ranks.gather(own_outcome)
        outcome_kinds = {outcome.what for outcome in outcomes}
        if error is not None and own_outcome.what in ("unfit", "failed"):
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome.what == "failed":
                raise StoreUnavailable(f"rank {rank} could not restore: {outcome.why}")
            if outcome.what == "unfit":
                raise StateMismatch(f"rank {rank}: {outcome.why}; nothing was loaded")
        # A rank that reads later finds a part gone that another rank has quarantined.
        if "gone" in outcome_kinds and "corrupt" not in outcome_kinds:
            return ConsensusResult(is_gone=True)
        if "corrupt" in outcome_kinds and not self._ranks.can_communicate:
            raise StoreUnavailable(
                f"rank {self._ranks.rank}: {error}. It is quarantined, and the other ranks cannot be told without "
                "torch.distributed: launch again, and every rank finds the checkpoint before it"
            ) from error
        name = "rank {}: {}" if self._ranks.world > 1 else "{1}"
        corrupt = [name.format(rank, outcome.why) for rank, outcome in enumerate(outcomes) if outcome.what == "corrupt"]
        differences = compare_replicas({rank: outcome.replicas for rank, outcome in enumerate(outcomes)})
        has_rest = any(outcome.rest for outcome in outcomes)
        return ConsensusResult(corrupt="; ".join(corrupt), differ=str(differences), has_rest=has_rest)


def _outcome(error: Exception | None, *, unfit: bool) -> Outcome:
    if error is None:
        return Outcome("whole")
    if unfit and isinstance(error, TierdError):
        return Outcome("unfit", text_of(error))
    if isinstance(error, CorruptChunk | ManifestError):
        return Outcome("corrupt", text_of(error))
    return Outcome("gone" if isinstance(error, ObjectNotFound) else "failed", text_of(error))


def text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def _question(view: RankView) -> tuple[object, ...]:
    return view.step, view.attempt, view.everything, view.only, view.best, view.at_least


def _describe_question(view: RankView) -> str:
    newest = f"the best checkpoint ({view.best.mode} {view.best.metric})" if view.best else "the newest checkpoint"
    subject = newest if view.step is None else f"step {view.step}"
    suffix = f" of attempt {view.attempt}" if view.attempt else ""
    suffix += f", step {view.at_least} or later" if view.at_least is not None else ""
    suffix += f", only {', '.join(view.only) or 'nothing'}" if view.only is not None else ""
    return f"{subject}{suffix}{' (DCP)' if view.everything else ''}"
