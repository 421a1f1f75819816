"""The result of a check, as text and as JSON.

Invariant: the report first states the observations, and then their likely causes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tierd.check.cause import Cause
from tierd.check.compare import Divergence, RankResult
from tierd.check.final import StateDifference, summary
from tierd.check.history import Sample
from tierd.check.leakage import Leak, line

_SHOWN = 6  # samples of a batch that are printed


class LaunchResult(msgspec.Struct, frozen=True):
    """One launch of the killed run.

    Attributes:
        launch: the launch, from 1.
        killed_at: the kill point, as it was written; None for the last launch.
        began: the first step of any rank; None if no rank made a step.
        ended: the last step of any rank; None if no rank made a step.
        resumed: whether it resumed from a checkpoint.
    """

    launch: int
    killed_at: str | None
    began: int | None
    ended: int | None
    resumed: bool


class Report(msgspec.Struct, frozen=True):
    """Whether a loop resumes exactly.

    Attributes:
        ok: whether every rank is equal or within the allowance, the state at the end is equal, nothing leaked, and at
            least one launch resumed.
        exact: whether every rank is equal, and the state at the end as well.
        allowance: samples that each rank may read again or skip, for each resume.
        entries: the number of values, inside and outside of the state, that were compared after the last step.
        states: the values, inside and outside of the state, that differ after the last step, and the entries of the
            state that differed at an earlier step after a resume.
        leaks: samples that were read twice in an epoch, skipped, read on two ranks or taken from the validation split,
            beyond those of an uninterrupted run.
        kept: the directory in which records, output and spools were kept.
    """

    target: str
    steps: int
    ok: bool
    exact: bool
    allowance: int
    loss_tolerance: float
    launches: tuple[LaunchResult, ...]
    ranks: tuple[RankResult, ...]
    entries: int
    states: tuple[StateDifference, ...]
    leaks: tuple[Leak, ...]
    causes: tuple[Cause, ...]
    kept: str | None = None

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        return "\n".join(
            [
                self._verdict(),
                *map(_launch, self.launches),
                *self._ranks(),
                *self._states(),
                *self._leaks(),
                *self._causes(),
                *self._kept(),
            ]
        )

    def _verdict(self) -> str:
        kills = sum(one.killed_at is not None for one in self.launches)
        what = f"{self.target}: {self.steps} steps, {_many(kills, 'kill')}, {_many(len(self.ranks), 'rank')}"
        if self.exact and self.ok:
            tolerance = f" within {self.loss_tolerance:g}" if self.loss_tolerance else ", bit for bit"
            state = f"; {_many(self.entries, 'value')} of the state as well" if self.entries else ""
            return f"exact: {what}; every sample and every loss as uninterrupted{tolerance}{state}"
        if self.ok:
            return f"within the allowance: {what}"
        return f"NOT EXACT: {what}"

    def _ranks(self) -> list[str]:
        lines = []
        for one in self.ranks:
            lines.append(f"  rank {one.rank}: {_counts(one, self.allowance)}")
            if one.divergence is not None:
                lines += [f"    {line}" for line in _divergence(one.divergence)]
        return lines

    def _states(self) -> list[str]:
        return [f"  state: {line}" for line in summary(self.states)]

    def _leaks(self) -> list[str]:
        return [f"  leakage: {line(one)}" for one in self.leaks]

    def _causes(self) -> list[str]:
        return [f"  likely cause ({one.kind}): {one.says}" for one in self.causes]

    def _kept(self) -> list[str]:
        return [f"  left to look at: {self.kept}"] if self.kept else []


def _launch(one: LaunchResult) -> str:
    if one.began is None:
        made = "made no step"
    else:
        begun = f"resumed, steps {one.began}" if one.resumed else f"from the start, steps {one.began}"
        made = f"{begun} to {one.ended}"
    return f"  launch {one.launch}: {made}{f'; killed at {one.killed_at}' if one.killed_at else ''}"


def _counts(one: RankResult, allowance: int) -> str:
    text = f"{one.samples} samples, {one.again} read again, {one.skipped} skipped"
    for what, examples in (("again", one.again_examples), ("skipped", one.skipped_examples)):
        if examples:
            text += f"; {what}: {_list(examples)}"
    if allowance:
        text += (
            f"; {one.again + one.skipped} of {one.allowed} allowed were used "
            f"({allowance} for each of {one.resumes} resumes)"
        )
    return text


def _divergence(one: Divergence) -> list[str]:
    launch = f"launch {one.launch}" if one.launch else "no launch"
    lines = [f"first differs at step {one.step} ({launch}): {one.what}"]
    if one.what != "loss":
        lines += [f"  uninterrupted: {_list(one.expected)}", f"  killed run:    {_list(one.got)}"]
    if one.expected_loss != one.got_loss:
        lines.append(f"  loss {_number(one.expected_loss)}, and {_number(one.got_loss)} in the killed run")
    return lines


def _list(samples: Sequence[Sample]) -> str:
    more = f", … ({len(samples)} in all)" if len(samples) > _SHOWN else ""
    return ", ".join(map(str, samples[:_SHOWN])) + more if samples else "nothing"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _number(loss: str | None) -> str:
    return "none" if loss is None else f"{float.fromhex(loss):.9g}"
