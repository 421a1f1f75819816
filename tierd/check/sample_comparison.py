"""Compare the samples and losses of a killed run with those of an uninterrupted one: by step, and for leaks by epoch.

Invariant: pure. Samples must be equal in their order, and losses to the last bit, unless a tolerance or an allowance
was declared. Every use of an allowance is counted. A repetition that also occurs in the uninterrupted run (sampling
with replacement, a sampler that pads its ranks) is the loop's own behaviour and no leak. Training on the validation
split always is one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from tierd.check.launch_records import CheckedRun, CountedObservation, Observation, Sample

_MAX_EXAMPLES = 5  # samples that a report names, at most


@dataclass(frozen=True, slots=True)
class ComparisonTerms:
    steps: int  # the last step that is compared
    allowance: int = 0  # samples that each rank may read again or skip, for each resume
    loss_tolerance: float = 0.0  # relative; 0 compares every bit
    ignore: tuple[str, ...] = ()  # paths of the state that may differ


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


def compare_rank(reference: CheckedRun, killed: CheckedRun, rank: int, terms: ComparisonTerms) -> RankResult:
    expected, actual = reference.effective_observations(rank), killed.effective_observations(rank)
    start = min(expected, default=0)
    resumes = killed.first_steps_of_resumes(rank, start)
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
    expected: Mapping[int, CountedObservation], actual: Mapping[int, CountedObservation], terms: ComparisonTerms
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
    distance = relative_distance(a.loss, b.loss)
    return None if distance is not None and distance <= tolerance else "loss"


def relative_distance(a: str | None, b: str | None) -> float | None:
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


def samples_until(steps: Mapping[int, CountedObservation], last: float = math.inf) -> list[Sample]:
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
    expected_samples = samples_until(expected)
    actual_counts, expected_counts = Counter(samples_until(actual, last)), Counter(samples_until(expected, last))
    skipped = expected_counts - Counter(samples_until(actual))
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


SamplesByEpoch = Mapping[
    int | None, Mapping[int, Counter[Sample]]
]  # epoch -> rank -> how often each sample was trained on


class Leak(msgspec.Struct, frozen=True):
    """Misplaced samples.

    Attributes:
        kind: `twice` in an epoch of one rank, `skipped` in a finished epoch, on `two ranks` in an epoch, or of the
            `validation` split.
        epoch: as passed to `tierd.observe`; None if it was not.
        rank: None for `two ranks`.
        count: the number of samples.
        examples: the first few of them.
    """

    kind: str
    epoch: int | None
    rank: int | None
    count: int
    examples: tuple[Sample, ...]


def find_leaks(reference: CheckedRun, killed: CheckedRun, ranks: int, steps: int) -> list[Leak]:
    """Return the leaks of the killed run that the uninterrupted run does not have, up to step `steps`."""
    uninterrupted, pieces = _samples_by_epoch(reference, ranks, steps), _samples_by_epoch(killed, ranks, steps)
    leaked = [*_repeated_and_skipped(uninterrupted, pieces), *_shared_samples(uninterrupted, pieces)]
    for rank in range(ranks):
        validation = _validation_samples(reference, ranks) | _validation_samples(killed, ranks)
        for epoch, by_rank in pieces.items():
            inside = [sample for sample in by_rank.get(rank, ()) if sample in validation]
            if inside:
                leaked.append(_make_leak("validation", epoch, rank, inside))
    return leaked


def _repeated_and_skipped(uninterrupted: SamplesByEpoch, pieces: SamplesByEpoch) -> Iterator[Leak]:
    last = max((epoch for epoch in pieces if epoch is not None), default=None)
    for epoch, by_rank in pieces.items():
        for rank, counts in by_rank.items():
            expected = uninterrupted.get(epoch, {}).get(rank, Counter())
            twice = [sample for sample, count in counts.items() if count > max(expected[sample], 1)]
            if twice:
                yield _make_leak("twice", epoch, rank, twice)
            if epoch is not None and epoch != last:  # the last epoch may only be behind
                skipped = [sample for sample in expected if sample not in counts]
                if skipped:
                    yield _make_leak("skipped", epoch, rank, skipped)


def _shared_samples(uninterrupted: SamplesByEpoch, pieces: SamplesByEpoch) -> Iterator[Leak]:
    for epoch, by_rank in pieces.items():
        before = _samples_on_several_ranks(uninterrupted.get(epoch, {}))
        several = [sample for sample in _samples_on_several_ranks(by_rank) if sample not in before]
        if several:
            yield _make_leak("two ranks", epoch, None, several)


def _samples_on_several_ranks(by_rank: Mapping[int, Counter[Sample]]) -> dict[Sample, None]:
    rank_counts = Counter(sample for counts in by_rank.values() for sample in counts)
    return {sample: None for sample, count in rank_counts.items() if count > 1}


def _samples_by_epoch(history: CheckedRun, ranks: int, steps: int) -> SamplesByEpoch:
    epochs: defaultdict[int | None, defaultdict[int, Counter[Sample]]] = defaultdict(lambda: defaultdict(Counter))
    for rank in range(ranks):
        for step, counted in history.effective_observations(rank).items():
            if step <= steps:
                epochs[counted.observation.epoch][rank].update(counted.observation.samples)
    return epochs


def _validation_samples(history: CheckedRun, ranks: int) -> set[Sample]:
    return {
        sample
        for rank in range(ranks)
        for counted in history.effective_observations(rank).values()
        for sample in counted.observation.validation
    }


def _make_leak(kind: str, epoch: int | None, rank: int | None, samples: list[Sample]) -> Leak:
    return Leak(kind, epoch, rank, len(samples), tuple(samples[:_MAX_EXAMPLES]))


def leak_line(leak: Leak) -> str:
    """Describe one leak for a reader."""
    where = "" if leak.epoch is None else f"epoch {leak.epoch}: "
    who = "" if leak.rank is None else f"rank {leak.rank} "
    description = {
        "twice": f"{who}trained on {leak.count} samples more than once",
        "skipped": f"{who}skipped {leak.count} samples",
        "two ranks": f"{leak.count} samples were trained on by more than one rank",
        "validation": f"{who}trained on {leak.count} samples of the validation split",
    }[leak.kind]
    return (
        f"{where}{description}: {', '.join(map(str, leak.examples))}{', …' if leak.count > len(leak.examples) else ''}"
    )
