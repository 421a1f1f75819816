"""Whether a killed run is the run that nobody interrupted, rank by rank and step by step.

Law: pure. Samples are equal in their order and losses to the last bit, unless a tolerance or an allowance was declared;
what an allowance was used for is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tierd.check.history import Counted, History, Observation, Sample

_SHOWN = 5  # samples that a report names


@dataclass(frozen=True, slots=True)
class Terms:
    """What was asked for.

    Attributes:
        steps: the last step that is compared.
        allowance: samples that each rank may read again or skip, for each resume.
        loss_tolerance: relative; 0 means every bit.
    """

    steps: int
    allowance: int = 0
    loss_tolerance: float = 0.0


class Divergence(msgspec.Struct, frozen=True):
    """Where a rank first went another way.

    Attributes:
        launch: that made the step, from 1; None where none did.
        what: `samples`, `order` (the same samples in another order), `loss` or `missing` (no launch made the step).
        expected, got: the step's samples, uninterrupted and as it was.
        expected_loss, got_loss: as `float.hex` writes them.
    """

    step: int
    launch: int | None
    what: str
    expected: tuple[Sample, ...] = ()
    got: tuple[Sample, ...] = ()
    expected_loss: str | None = None
    got_loss: str | None = None


class RankResult(msgspec.Struct, frozen=True):
    """One rank, compared.

    Attributes:
        samples: how many it should have trained on.
        again, skipped: how many it trained on more often, or less often, than uninterrupted; the first few by name.
        resumes: launches that began where a checkpoint ended.
        allowed: how many may be read again or skipped in all.
        divergence: None where everything is equal.
        exact: whether it is.
        ok: whether it is, or what differs is within the allowance.
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


def compare(reference: History, killed: History, rank: int, terms: Terms) -> RankResult:
    """Hold one rank of a killed run against the reference."""
    expected, got = reference.effective(rank), killed.effective(rank)
    start = min(expected, default=0)
    resumes = killed.resumes(rank, start)
    divergence = first_difference(expected, got, terms)
    again, skipped = _counts(expected, got, terms.steps)
    allowed = terms.allowance * len(resumes)
    used = again.total() + skipped.total()
    return RankResult(
        rank=rank,
        samples=sum(len(one.observation.samples) for step, one in expected.items() if step <= terms.steps),
        again=again.total(),
        skipped=skipped.total(),
        again_examples=tuple(again)[:_SHOWN],
        skipped_examples=tuple(skipped)[:_SHOWN],
        resumes=len(resumes),
        allowed=allowed,
        divergence=divergence,
        exact=divergence is None,
        ok=divergence is None or _is_allowed(divergence, used, allowed, resumes),
    )


def first_difference(expected: Mapping[int, Counted], got: Mapping[int, Counted], terms: Terms) -> Divergence | None:
    """The first step that is not the same in both."""
    for step in sorted(step for step in expected.keys() | got.keys() if step <= terms.steps):
        if step not in got or step not in expected:
            launch = got[step].launch if step in got else None
            mine = expected[step].observation.samples if step in expected else ()
            theirs = got[step].observation.samples if step in got else ()
            return Divergence(step, launch, "missing", mine, theirs)
        a, b = expected[step].observation, got[step].observation
        if what := _differs(a, b, terms.loss_tolerance):
            return Divergence(step, got[step].launch, what, a.samples, b.samples, a.loss, b.loss)
    return None


def _differs(a: Observation, b: Observation, tolerance: float) -> str | None:
    if a.samples != b.samples:
        return "order" if Counter(a.samples) == Counter(b.samples) else "samples"
    if a.loss == b.loss:
        return None
    distance = relative(a.loss, b.loss)
    return None if distance is not None and distance <= tolerance else "loss"


def relative(a: str | None, b: str | None) -> float | None:
    """How far apart two losses are, relative to the larger; None where one is missing or no finite number."""
    if a is None or b is None:
        return None
    x, y = float.fromhex(a), float.fromhex(b)
    if not (math.isfinite(x) and math.isfinite(y)):
        return None
    largest = max(abs(x), abs(y))
    return abs(x - y) / largest if largest else 0.0


def _is_allowed(divergence: Divergence, used: int, allowed: int, resumes: Mapping[int, int]) -> bool:
    """Before the first resume nothing may differ; after it, samples may be read again or skipped, and losses follow."""
    begun = min(resumes.values(), default=divergence.step + 1)
    return divergence.what != "missing" and divergence.step >= begun and 0 < used <= allowed


def samples(steps: Mapping[int, Counted], last: float = math.inf) -> list[Sample]:
    """Everything up to a step, in order."""
    return [one for step in sorted(steps) if step <= last for one in steps[step].observation.samples]


def _counts(
    expected: Mapping[int, Counted], got: Mapping[int, Counted], last: int
) -> tuple[Counter[Sample], Counter[Sample]]:
    """What was read again (more often than uninterrupted, and not for the first time), and what was skipped.

    Both runs may have gone on past the last step, so that one that is only behind, or ahead, shows it. Where a run did
    not go on, what it lacks at its end is no more than that it is behind, as far as it read as much again. How far the
    reference happened to go on decides nothing: it may have come to the next epoch, which reads every sample again.
    """
    due = samples(expected)
    ours, theirs = Counter(samples(got, last)), Counter(samples(expected, last))
    skipped = theirs - Counter(samples(got))
    if skipped:  # it may be ahead, by as much as it skipped
        theirs = Counter(due[: ours.total() + skipped.total()])
    again = Counter({one: count - max(theirs[one], 1) for one, count in ours.items() if count > max(theirs[one], 1)})
    if max(got, default=0) <= last:
        for sample in list(skipped)[::-1][: again.total()]:
            del skipped[sample]
    return again, skipped
