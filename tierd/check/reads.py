"""Find the cause of a step that read other samples than an uninterrupted run, in the samples themselves.

Invariant: pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tierd.check.cause import Cause
from tierd.check.compare import Divergence, Terms, samples
from tierd.check.history import CheckedRun, CountedObservation, Sample

_FOLLOWED_STEPS = 3  # steps from the first wrong one


def whose(reference: CheckedRun, rank: int, divergence: Divergence) -> int | None:
    """Return the other rank that should have got these samples."""
    for other_rank in range(len(reference.launches[0])):
        expected = reference.effective(other_rank).get(divergence.step)
        if other_rank != rank and expected and expected.observation.samples == divergence.got != ():
            return other_rank
    return None


def from_samples(
    reference: CheckedRun,
    expected: Mapping[int, CountedObservation],
    actual: Mapping[int, CountedObservation],
    rank: int,
    divergence: Divergence,
    terms: Terms,
) -> Iterator[Cause]:
    step, launch = divergence.step, divergence.launch
    if (owner := whose(reference, rank, divergence)) is not None:
        yield Cause("ranks", f"rank {rank} got the samples of rank {owner} at step {step}: each needs its own state")
        return
    uninterrupted = samples(expected)
    before = len(samples(expected, step - 1))
    place = _find_batch(uninterrupted, divergence.got, before)
    if place is not None and place < before:
        where = "from the very first sample" if place == 0 else f"from sample {place} of the run"
        yield Cause(
            "position",
            f"launch {launch} went back and read {where} at step {step}, where sample {before} was next: the position "
            "in the data set is not in the checkpoint, or not restored (save the loader's or sampler's state_dict())"
            + (", or the step to go on from is one too high" if before - place == len(divergence.expected) else ""),
        )
    elif (
        place is not None and place > before and not _continues_uninterrupted(uninterrupted[place:], actual, divergence)
    ):
        yield Cause(
            "unknown",
            f"launch {launch} read samples at step {step} that an uninterrupted run reads later, and went on with "
            "others: what chooses the samples is not in the checkpoint, or not restored",
        )
    elif place is not None and place > before:
        ahead = place - before
        size = len(divergence.expected) or 1
        batches = f" ({ahead // size} batches)" if ahead % size == 0 else ""
        yield Cause(
            "prefetch",
            f"launch {launch} skipped exactly {ahead} samples{batches} at step {step}: the position that was saved "
            "counts what was prefetched, not what was trained on",
        )
    elif place is not None:
        yield Cause(
            "data",
            f"launch {launch} went on at the right sample with a batch of {len(divergence.got)} at step {step}, where "
            f"one of {len(divergence.expected)} was next: what decides a batch's size is not in the checkpoint, or not "
            "restored",
        )
    else:
        yield Cause(
            "shuffle",
            f"launch {launch} went on at step {step} in an order that is nowhere in an uninterrupted run: the "
            "shuffle's seed, epoch or generator is not in the checkpoint, or not restored",
        )


def _continues_uninterrupted(
    expected: Sequence[Sample], actual: Mapping[int, CountedObservation], divergence: Divergence
) -> bool:
    """Return whether the next few steps have the samples in `expected` as well, as far as both runs were observed."""
    steps = range(divergence.step, divergence.step + _FOLLOWED_STEPS)
    read = [sample for step in steps if step in actual for sample in actual[step].observation.samples]
    return all(sample == read_sample for sample, read_sample in zip(expected, read, strict=False))


def repeats(launch: int, count: int) -> Cause:
    return Cause(
        "position",
        f"launch {launch} read {count} samples again that had been trained on, in an order of its own: the position in "
        "the data set is not in the checkpoint, or not restored (save the loader's or sampler's state_dict())",
    )


def _find_batch(uninterrupted: Sequence[Sample], batch: Sequence[Sample], near: int) -> int | None:
    """Return the index of `batch` in `uninterrupted` that is nearest to `near`; None if it does not occur."""
    if not batch:
        return None
    places = [
        start
        for start in range(len(uninterrupted) - len(batch) + 1)
        if uninterrupted[start] == batch[0] and tuple(uninterrupted[start : start + len(batch)]) == tuple(batch)
    ]
    return min(places, key=lambda place: abs(place - near), default=None)


def repeated(
    expected: Mapping[int, CountedObservation], actual: Mapping[int, CountedObservation], launch: int, last: int
) -> int:
    """Count the samples that this launch or a later one read again.

    Only reads beyond the highest count of any sample in an uninterrupted run are counted.
    """
    max_reads = max(Counter(samples(expected, last)).values(), default=0)
    earlier = {sample for step in actual if actual[step].launch < launch for sample in actual[step].observation.samples}
    counts = Counter(samples(actual, last))
    return sum(count - max_reads for sample, count in counts.items() if sample in earlier and count > max_reads)
