"""Find misplaced samples: read twice in an epoch, skipped in an epoch, read on two ranks, or of the validation split.

Invariant: pure. A repetition that also occurs in the uninterrupted run (sampling with replacement, a sampler that pads
its ranks) is the loop's own behaviour and no leak. Training on the validation split always is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import msgspec

from tierd.check.history import CheckedRun, Sample

_MAX_EXAMPLES = 5

Epochs = Mapping[int | None, Mapping[int, Counter[Sample]]]  # epoch -> rank -> how often each sample was trained on


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


def leaks(reference: CheckedRun, killed: CheckedRun, ranks: int, steps: int) -> list[Leak]:
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


def _repeated_and_skipped(uninterrupted: Epochs, pieces: Epochs) -> Iterator[Leak]:
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


def _shared_samples(uninterrupted: Epochs, pieces: Epochs) -> Iterator[Leak]:
    for epoch, by_rank in pieces.items():
        before = _samples_on_several_ranks(uninterrupted.get(epoch, {}))
        several = [sample for sample in _samples_on_several_ranks(by_rank) if sample not in before]
        if several:
            yield _make_leak("two ranks", epoch, None, several)


def _samples_on_several_ranks(by_rank: Mapping[int, Counter[Sample]]) -> dict[Sample, None]:
    rank_counts = Counter(sample for counts in by_rank.values() for sample in counts)
    return {sample: None for sample, count in rank_counts.items() if count > 1}


def _samples_by_epoch(history: CheckedRun, ranks: int, steps: int) -> Epochs:
    epochs: defaultdict[int | None, defaultdict[int, Counter[Sample]]] = defaultdict(lambda: defaultdict(Counter))
    for rank in range(ranks):
        for step, counted in history.effective(rank).items():
            if step <= steps:
                epochs[counted.observation.epoch][rank].update(counted.observation.samples)
    return epochs


def _validation_samples(history: CheckedRun, ranks: int) -> set[Sample]:
    return {
        sample
        for rank in range(ranks)
        for counted in history.effective(rank).values()
        for sample in counted.observation.validation
    }


def _make_leak(kind: str, epoch: int | None, rank: int | None, samples: list[Sample]) -> Leak:
    return Leak(kind, epoch, rank, len(samples), tuple(samples[:_MAX_EXAMPLES]))


def line(leak: Leak) -> str:
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
