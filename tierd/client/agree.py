"""How ranks agree on what to restore: by telling each other what each sees, and then how each fared.

Law: what follows from the same answers is the same on every rank, also what is raised. A rank that fails tells the
others first: they would wait for it. An error anywhere stops all; only proven corruption makes them step back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from tierd.client.launch import Clock
from tierd.client.ranks import Ranks
from tierd.core.choose import Goal, check_goal
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
from tierd.core.resume import Resume, agree
from tierd.core.sight import Sight


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank was asked for and sees. `error` says why it sees nothing."""

    step: int | None
    attempt: str | None
    everything: bool
    only: tuple[str, ...] | None = None
    best: Goal | None = None
    at_least: int | None = None
    clock: Clock
    sight: Sight = Sight()
    error: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """How a rank fared with its part: it is whole, proven corrupt everywhere, gone from everywhere, or does not fit
    what it should be loaded into; or that is not known."""

    what: Literal["whole", "corrupt", "gone", "unfit", "failed"]
    why: str = ""


class Loaded(msgspec.Struct, frozen=True):
    """Whether a rank has loaded what all settled on; why not, else."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """What all ranks do next: load what they have; or, `corrupt` saying whose part and why, try the next candidate; or,
    `gone`, look again."""

    corrupt: str = ""
    gone: bool = False

    @property
    def load(self) -> bool:
        return not self.corrupt and not self.gone


class Agreement:
    """What the ranks of a launch tell each other in one restore. Every rank makes the same calls in the same order.

    Ranks that cannot talk decide each by what the tiers show alone.

    Args:
        look: what this rank sees now.
        clock: what it gives to the naming of the next attempt.
    """

    def __init__(self, ranks: Ranks, run: str, look: Callable[[], Sight], clock: Callable[[], Clock]) -> None:
        self._ranks, self._run, self._look, self._clock = ranks, run, look, clock
        self.clocks: Sequence[Clock] = ()

    def look(
        self,
        step: int | None,
        attempt: str | None,
        *,
        everything: bool = False,
        best: Goal | None = None,
        at_least: int | None = None,
        only: Collection[str] | None = None,
    ) -> Resume:
        """Look on every rank, one gather; what there is to restore, by what all see together.

        Args:
            everything: every rank needs every rank's part, as a reader that reshards does; the number of ranks that
                saved may then be any.
            best: of all of them, by this.
            at_least: whoever asks knows that there was this step; all ranks are asked for the same.
            only: names of the entries that are wanted, of a state; None for all.

        Raises:
            StoreUnavailable: another rank cannot look; or what this one raised.
            ConfigError: the ranks were asked for different things; or for the best, and a step.
        """
        names = None if only is None else tuple(sorted(map(str, only)))
        own = Look(step=None, attempt=None, everything=everything, only=names, clock=self._clock())
        failure: Exception | None = None
        try:  # also what only this rank was asked wrongly: the others would wait for it
            step = step if step is None else check_step(step)
            attempt = attempt if attempt is None else check_attempt(attempt)
            if best is not None and step is not None:
                raise ConfigError(f"best={best.metric!r} and step={step}: one of the two")
            best = best if best is None else check_goal(best)
            at_least = at_least if at_least is None else check_step(at_least)
            own = msgspec.structs.replace(
                own, step=step, attempt=attempt, best=best, at_least=at_least, sight=self._look()
            )
        except Exception as error:
            failure, own = error, msgspec.structs.replace(own, error=_text(error))
        looks = self._ranks.gather(own)
        if failure is not None:
            raise failure
        for rank, other in enumerate(looks):
            if other.error:
                raise StoreUnavailable(f"rank {rank} could not restore: {other.error}")
            if _question(other) != _question(own):
                raise ConfigError(
                    f"rank {self._ranks.rank} was asked for {_asked(own)}, and rank {rank} for {_asked(other)}: every "
                    "rank of a launch restores the same"
                )
        self.clocks = [other.clock for other in looks]
        sights = [other.sight for other in looks]
        return agree(sights, self._run, step, attempt, world=self._ranks.world, everything=everything, best=best)

    def loaded(self, checkpoint: CheckpointId, error: Exception | None) -> None:
        """Tell whether this rank has loaded what all settled on, one gather: all go on from it, or none does.

        Raises:
            StateMismatch: another rank could not load it; or what this one was given.
        """
        outcomes = self._ranks.gather(Loaded("" if error is None else _text(error)))
        if error is not None:
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                raise StateMismatch(
                    f"rank {rank} could not load {checkpoint}, which this rank has loaded: {outcome.error}. No rank "
                    "goes on from it: restore again on all ranks, or end"
                )

    def settle(self, error: Exception | None, *, unfit: bool = False) -> Settled:
        """Tell how this rank fared with a candidate, one gather; what all ranks do next.

        Args:
            error: why it has not its part verified and fitting. `CorruptChunk` and `ManifestError` are proven
                corruption in every place, `ObjectNotFound` that no place has it any more.
            unfit: the part is right, and does not fit what it should be loaded into.

        Raises:
            StoreUnavailable: another rank could not tell whether its part is right; or what this one was given.
            StateMismatch: another rank's part does not fit.
        """
        outcomes = self._ranks.gather(_outcome(error, unfit=unfit))
        found = {outcome.what for outcome in outcomes}
        if error is not None and _outcome(error, unfit=unfit).what in ("unfit", "failed"):
            raise error
        for rank, outcome in enumerate(outcomes):
            if outcome.what == "failed":
                raise StoreUnavailable(f"rank {rank} could not restore: {outcome.why}")
            if outcome.what == "unfit":
                raise StateMismatch(f"rank {rank}: {outcome.why}; nothing was loaded")
        if "gone" in found and "corrupt" not in found:  # who came later finds gone what another set aside
            return Settled(gone=True)
        if "corrupt" in found and not self._ranks.talk:
            raise StoreUnavailable(
                f"rank {self._ranks.rank}: {error}. It is set aside, and the other ranks cannot be told without "
                "torch.distributed: launch again, and every rank finds the checkpoint before it"
            ) from error
        name = "rank {}: {}" if self._ranks.world > 1 else "{1}"
        corrupt = [name.format(rank, one.why) for rank, one in enumerate(outcomes) if one.what == "corrupt"]
        return Settled(corrupt="; ".join(corrupt))


def _outcome(error: Exception | None, *, unfit: bool) -> Outcome:
    if error is None:
        return Outcome("whole")
    if unfit and isinstance(error, TierdError):
        return Outcome("unfit", _text(error))
    if isinstance(error, CorruptChunk | ManifestError):
        return Outcome("corrupt", _text(error))
    return Outcome("gone" if isinstance(error, ObjectNotFound) else "failed", _text(error))


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _question(look: Look) -> tuple[object, ...]:
    return look.step, look.attempt, look.everything, look.only, look.best, look.at_least


def _asked(look: Look) -> str:
    newest = f"the best checkpoint ({look.best.mode} {look.best.metric})" if look.best else "the newest checkpoint"
    what = newest if look.step is None else f"step {look.step}"
    more = f" of attempt {look.attempt}" if look.attempt else ""
    more += f", step {look.at_least} or later" if look.at_least is not None else ""
    more += f", only {', '.join(look.only) or 'nothing'}" if look.only is not None else ""
    return f"{what}{more}{' (DCP)' if look.everything else ''}"
