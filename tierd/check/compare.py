"""Compare a killed run with an uninterrupted one, rank by rank and step by step.

Invariant: pure. Samples must be equal in their order, and losses to the last bit, unless a tolerance or an allowance
was declared. Every use of an allowance is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tierd.check.history import CheckedRun, CountedObservation, Observation, Sample

_MAX_EXAMPLES = 5  # samples that a report names, at most


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a comparison.

    Attributes:
        steps: the last step that is compared.
        allowance: samples that each rank may read again or skip, for each resume.
        loss_tolerance: relative; 0 compares every bit.
        ignore: paths of the state that may differ.
    """

    steps: int
    allowance: int = 0
    loss_tolerance: float = 0.0
    ignore: tuple[str, ...] = ()


class Divergence(msgspec.Struct, frozen=True):
    """The first difference between the two runs on a rank.

    Attributes:
        step: the step of the difference.
        launch: the launch that made the step, from 1; None if none did.
        what: `samples`, `order` (the same samples in another order), `loss` or `missing` (no launch made the step).
        expected: the step's samples in the uninterrupted run.
        got: the step's samples in the killed run.
        expected_loss: the uninterrupted run's loss, in the format of `float.hex`.
        got_loss: the killed run's loss, in the same format.
    """

    step: int
    launch: int | None
    what: str
    expected: tuple[Sample, ...] = ()
    got: tuple[Sample, ...] = ()
    expected_loss: str | None = None
    got_loss: str | None = None


class RankResult(msgspec.Struct, frozen=True):
    """The comparison of one rank.

    Attributes:
        samples: the number of samples in the uninterrupted run.
        again: how many samples it trained on more often than uninterrupted.
        skipped: how many samples it trained on less often than uninterrupted.
        again_examples: the first few samples that were read again.
        skipped_examples: the first few samples that were skipped.
        resumes: the number of launches that resumed from a checkpoint.
        allowed: how many samples may be read again or skipped in all.
        divergence: None if everything is equal.
        exact: whether everything is equal.
        ok: whether everything is equal, or every difference is within the allowance.
    """

    rank: int
    samples: int
    again: int
    skipped: int
    again_examples: tuple[Sample, ...]
    skipped_examples: tuple[Sample, ...]
    resumes: int
    allowed: int
    divergence: Divergence | None
    exact: bool
    ok: bool


def compare(reference: CheckedRun, killed: CheckedRun, rank: int, terms: Terms) -> RankResult:
    """Compare one rank of a killed run with the reference."""
    expected, actual = reference.effective(rank), killed.effective(rank)
    start = min(expected, default=0)
    resumes = killed.resumes(rank, start)
    divergence = first_difference(expected, actual, terms)
    repeated, skipped = _count_repeats(expected, actual, terms.steps)
    allowed = terms.allowance * len(resumes)
    used = repeated.total() + skipped.total()
    return RankResult(
        rank=rank,
        samples=sum(len(counted.observation.samples) for step, counted in expected.items() if step <= terms.steps),
        again=repeated.total(),
        skipped=skipped.total(),
        again_examples=tuple(repeated)[:_MAX_EXAMPLES],
        skipped_examples=tuple(skipped)[:_MAX_EXAMPLES],
        resumes=len(resumes),
        allowed=allowed,
        divergence=divergence,
        exact=divergence is None,
        ok=divergence is None or _is_allowed(divergence, used, allowed, resumes),
    )


def first_difference(
    expected: Mapping[int, CountedObservation], actual: Mapping[int, CountedObservation], terms: Terms
) -> Divergence | None:
    """Return the first step that differs."""
    for step in sorted(step for step in expected.keys() | actual.keys() if step <= terms.steps):
        if step not in actual or step not in expected:
            launch = actual[step].launch if step in actual else None
            expected_samples = expected[step].observation.samples if step in expected else ()
            actual_samples = actual[step].observation.samples if step in actual else ()
            return Divergence(step, launch, "missing", expected_samples, actual_samples)
        a, b = expected[step].observation, actual[step].observation
        if kind := _difference_kind(a, b, terms.loss_tolerance):
            return Divergence(step, actual[step].launch, kind, a.samples, b.samples, a.loss, b.loss)
    return None


def _difference_kind(a: Observation, b: Observation, tolerance: float) -> str | None:
    if a.samples != b.samples:
        return "order" if Counter(a.samples) == Counter(b.samples) else "samples"
    if a.loss == b.loss:
        return None
    distance = relative(a.loss, b.loss)
    return None if distance is not None and distance <= tolerance else "loss"


def relative(a: str | None, b: str | None) -> float | None:
    """Return the distance of two losses, relative to the larger; None if one is missing or not finite."""
    if a is None or b is None:
        return None
    x, y = float.fromhex(a), float.fromhex(b)
    if not (math.isfinite(x) and math.isfinite(y)):
        return None
    largest = max(abs(x), abs(y))
    return abs(x - y) / largest if largest else 0.0


def _is_allowed(divergence: Divergence, used: int, allowed: int, resumes: Mapping[int, int]) -> bool:
    """Return whether an allowance covers the divergence.

    Before the first resume nothing may differ. After it, samples may be read again or skipped, and losses may follow.
    """
    first_resume = min(resumes.values(), default=divergence.step + 1)
    return divergence.what != "missing" and divergence.step >= first_resume and 0 < used <= allowed


def samples(steps: Mapping[int, CountedObservation], last: float = math.inf) -> list[Sample]:
    """Return all samples up to step `last`, in order."""
    return [sample for step in sorted(steps) if step <= last for sample in steps[step].observation.samples]


def _count_repeats(
    expected: Mapping[int, CountedObservation], actual: Mapping[int, CountedObservation], last: int
) -> tuple[Counter[Sample], Counter[Sample]]:
    """Count the samples that were read again, and those that were skipped.

    A read counts as repeated if it is not the sample's first one, and exceeds the count of the uninterrupted run.

    Both runs may continue past the last step, so that a run that is only behind or ahead can be recognized. If a run
    did not continue, the samples missing at its end only show that it is behind, up to the number that it read again.
    The end of the reference decides nothing, because the reference may have reached the next epoch, which reads every
    sample again.
    """
    expected_samples = samples(expected)
    actual_counts, expected_counts = Counter(samples(actual, last)), Counter(samples(expected, last))
    skipped = expected_counts - Counter(samples(actual))
    if skipped:  # the run may be ahead, by the number of samples that it skipped
        expected_counts = Counter(expected_samples[: actual_counts.total() + skipped.total()])
    repeated = Counter(
        {
            sample: count - max(expected_counts[sample], 1)
            for sample, count in actual_counts.items()
            if count > max(expected_counts[sample], 1)
        }
    )
    if max(actual, default=0) <= last:
        for sample in list(skipped)[::-1][: repeated.total()]:
            del skipped[sample]
    return repeated, skipped
