"""The result of a check and the causes that it names, as text and as JSON.

Invariant: the report first states the observations, and then their likely causes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tierd.check.launch_records import Sample
from tierd.check.sample_comparison import Divergence, Leak, RankResult, leak_line
from tierd.check.state_comparison import StateDifference, difference_lines


class Cause(msgspec.Struct, frozen=True):
    """One likely cause.

    Attributes:
        kind: `not deterministic`, `never restored`, `ranks`, `steps`, `save before the step`; for data: `position`,
            `epoch`, `shuffle`, `buffer`, `prefetch`, `order`, `data`; for the rest: `weights`, `buffers`, `optimizer`,
            `scheduler`, `scaler`, `generator`, `gradients`, `mode`, `state`, `not in the checkpoint`, `summation`,
            `setting`; or `unknown`.
        says: the observation, and the remedy.
    """

    kind: str
    says: str


_MAX_SAMPLES = 6  # samples of a batch that are printed


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
        missing: the number of values outside of the state that were not compared, because the killed run does not have
            them after the last step.
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
    missing: int = 0

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        return "\n".join(
            [
                self._verdict(),
                *map(_launch_line, self.launches),
                *self._rank_lines(),
                *self._state_lines(),
                *[f"  leakage: {leak_line(leak)}" for leak in self.leaks],
                *[f"  likely cause ({cause.kind}): {cause.says}" for cause in self.causes],
                *([f"  left to look at: {self.kept}"] if self.kept else []),
            ]
        )

    def _verdict(self) -> str:
        kills = sum(launch.killed_at is not None for launch in self.launches)
        subject = f"{self.target}: {self.steps} steps, {_plural(kills, 'kill')}, {_plural(len(self.ranks), 'rank')}"
        if self.exact and self.ok:
            tolerance = f" within {self.loss_tolerance:g}" if self.loss_tolerance else ", bit for bit"
            state = f"; {_plural(self.entries, 'value')} of the state as well" if self.entries else ""
            return f"exact: {subject}; every sample and every loss as uninterrupted{tolerance}{state}"
        if self.ok:
            return f"within the allowance: {subject}"
        return f"NOT EXACT: {subject}"

    def _rank_lines(self) -> list[str]:
        lines = []
        for result in self.ranks:
            lines.append(f"  rank {result.rank}: {_counts_text(result, self.allowance)}")
            if result.divergence is not None:
                lines += [f"    {line}" for line in _divergence_lines(result.divergence)]
        return lines

    def _state_lines(self) -> list[str]:
        lines = difference_lines(self.states)
        if self.missing:
            lines.append(f"{_plural(self.missing, 'value')} not compared: the killed run has none of these names")
        return [f"  state: {line}" for line in lines]


def _launch_line(launch: LaunchResult) -> str:
    if launch.began is None:
        steps = "made no step"
    else:
        start = f"resumed, steps {launch.began}" if launch.resumed else f"from the start, steps {launch.began}"
        steps = f"{start} to {launch.ended}"
    return f"  launch {launch.launch}: {steps}{f'; killed at {launch.killed_at}' if launch.killed_at else ''}"


def _counts_text(result: RankResult, allowance: int) -> str:
    text = f"{result.samples} samples, {result.again} read again, {result.skipped} skipped"
    for label, examples in (("again", result.again_examples), ("skipped", result.skipped_examples)):
        if examples:
            text += f"; {label}: {_list_samples(examples)}"
    if allowance:
        text += (
            f"; {result.again + result.skipped} of {result.allowed} allowed were used "
            f"({allowance} for each of {result.resumes} resumes)"
        )
    return text


def _divergence_lines(divergence: Divergence) -> list[str]:
    launch = f"launch {divergence.launch}" if divergence.launch else "no launch"
    lines = [f"first differs at step {divergence.step} ({launch}): {divergence.what}"]
    if divergence.what != "loss":
        lines += [
            f"  uninterrupted: {_list_samples(divergence.expected)}",
            f"  killed run:    {_list_samples(divergence.got)}",
        ]
    if divergence.expected_loss != divergence.got_loss:
        lines.append(
            f"  loss {_loss_text(divergence.expected_loss)}, and {_loss_text(divergence.got_loss)} in the killed run"
        )
    return lines


def _list_samples(samples: Sequence[Sample]) -> str:
    suffix = f", … ({len(samples)} in all)" if len(samples) > _MAX_SAMPLES else ""
    return ", ".join(map(str, samples[:_MAX_SAMPLES])) + suffix if samples else "nothing"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _loss_text(loss: str | None) -> str:
    return "none" if loss is None else f"{float.fromhex(loss):.9g}"
