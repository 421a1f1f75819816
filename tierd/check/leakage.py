"""Find misplaced samples: read twice in an epoch, skipped in an epoch, read on two ranks, or of the validation split.

Invariant: pure. A repetition that also occurs in the uninterrupted run (sampling with replacement, a sampler that pads
its ranks) is the loop's own behaviour and no leak. Training on the validation split always is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import msgspec

from tierd.check.history import History, Sample

_SHOWN = 5

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


def leaks(reference: History, killed: History, ranks: int, steps: int) -> list[Leak]:
    """Return the leaks of the killed run that the uninterrupted run does not have, up to step `steps`."""
    whole, pieces = _epochs(reference, ranks, steps), _epochs(killed, ranks, steps)
    found = [*_counted(whole, pieces), *_shared(whole, pieces)]
    for rank in range(ranks):
        kept = _validation(reference, ranks) | _validation(killed, ranks)
        for epoch, by_rank in pieces.items():
            inside = [one for one in by_rank.get(rank, ()) if one in kept]
            if inside:
                found.append(_leak("validation", epoch, rank, inside))
    return found


def _counted(whole: Epochs, pieces: Epochs) -> Iterator[Leak]:
    last = max((one for one in pieces if one is not None), default=None)
    for epoch, by_rank in pieces.items():
        for rank, counts in by_rank.items():
            expected = whole.get(epoch, {}).get(rank, Counter())
            twice = [one for one, count in counts.items() if count > max(expected[one], 1)]
            if twice:
                yield _leak("twice", epoch, rank, twice)
            if epoch is not None and epoch != last:  # the last epoch may only be behind
                skipped = [one for one in expected if one not in counts]
                if skipped:
                    yield _leak("skipped", epoch, rank, skipped)


def _shared(whole: Epochs, pieces: Epochs) -> Iterator[Leak]:
    for epoch, by_rank in pieces.items():
        before = _on_several(whole.get(epoch, {}))
        several = [one for one in _on_several(by_rank) if one not in before]
        if several:
            yield _leak("two ranks", epoch, None, several)


def _on_several(by_rank: Mapping[int, Counter[Sample]]) -> dict[Sample, None]:
    seen = Counter(one for counts in by_rank.values() for one in counts)
    return {one: None for one, count in seen.items() if count > 1}


def _epochs(history: History, ranks: int, steps: int) -> Epochs:
    found: defaultdict[int | None, defaultdict[int, Counter[Sample]]] = defaultdict(lambda: defaultdict(Counter))
    for rank in range(ranks):
        for step, one in history.effective(rank).items():
            if step <= steps:
                found[one.observation.epoch][rank].update(one.observation.samples)
    return found


def _validation(history: History, ranks: int) -> set[Sample]:
    return {
        one
        for rank in range(ranks)
        for counted in history.effective(rank).values()
        for one in counted.observation.validation
    }


def _leak(kind: str, epoch: int | None, rank: int | None, samples: list[Sample]) -> Leak:
    return Leak(kind, epoch, rank, len(samples), tuple(samples[:_SHOWN]))


def line(one: Leak) -> str:
    """Describe one leak for a reader."""
    where = "" if one.epoch is None else f"epoch {one.epoch}: "
    who = "" if one.rank is None else f"rank {one.rank} "
    what = {
        "twice": f"{who}trained on {one.count} samples more than once",
        "skipped": f"{who}skipped {one.count} samples",
        "two ranks": f"{one.count} samples were trained on by more than one rank",
        "validation": f"{who}trained on {one.count} samples of the validation split",
    }[one.kind]
    return f"{where}{what}: {', '.join(map(str, one.examples))}{', …' if one.count > len(one.examples) else ''}"
