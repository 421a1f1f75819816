"""Find the likely causes of a difference between a killed run and an uninterrupted one.

Invariant: pure, and based on evidence. Each cause states the observation behind it; without evidence no cause is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

import msgspec

from tierd.check.compare import Divergence, RankResult, Terms, first_difference, relative, samples
from tierd.check.evidence import evidence, kinds_of, of_states
from tierd.check.final import StateDifference
from tierd.check.history import GLOBAL, Counted, History, RankHistory, Sample, Setting

_CAUSES = 3  # causes that a report names, at most
_TINY = 1e-5  # relative; how much another order of summation changes a float32 loss within few steps


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


def never_restored(killed: History, start: int) -> Cause | None:
    """Return a cause if every launch began at the first step, because nothing was checked then."""
    if any(killed.resumes(rank, start) for rank in range(len(killed.launches[0]))):
        return None
    saves = sorted({step for launch in killed.launches for seen in launch for step in seen.saves})
    if not saves:
        return Cause(
            "never restored", f"every launch began at step {start}: none had saved through tierd when it ended"
        )
    return Cause(
        "never restored",
        f"every launch began at step {start}, though saves of steps {', '.join(map(str, saves[:5]))} were made: "
        "nothing is restored, or each kill came before the first save was complete",
    )


def causes(
    reference: History, killed: History, again: History | None, results: Sequence[RankResult], terms: Terms
) -> tuple[Cause, ...]:
    """Return the likely causes of the first divergence, the best supported first.

    Args:
        again: a second uninterrupted run, if one was made.
    """
    failing = [one for one in results if one.divergence is not None and not one.ok]
    if not failing:
        return ()
    worst = min(failing, key=lambda one: one.divergence.step if one.divergence else 0)
    assert worst.divergence is not None
    found = list(_not_deterministic(reference, killed, again, worst, terms))
    found += _from_states(reference, killed, again if not found else None, worst) or _resume(
        reference, killed, worst.rank, worst.divergence, terms
    )
    if worst.divergence.what == "loss" or not found:
        found += _settings(reference, killed, worst.rank, worst.divergence)
    return tuple(found)


def from_final_states(killed: History, states: Sequence[StateDifference]) -> tuple[Cause, ...]:
    """Return the causes of differences in the final state that neither samples nor losses show."""
    return tuple(
        Cause(one.kind, one.says)
        for rank in sorted({one.rank for one in states})
        for one in list(of_states([one for one in states if one.rank == rank], kinds_of(killed, rank)))[:_CAUSES]
    )


def _from_states(reference: History, killed: History, again: History | None, worst: RankResult) -> list[Cause]:
    """Derive causes from the states at the save, at the load, and before the first step after the load."""
    divergence, rank = worst.divergence, worst.rank
    if again is None or divergence is None or divergence.launch is None or divergence.what == "missing":
        return []
    begun = killed.resumes(rank, reference.launches[0][rank].first or 0)
    launch = divergence.launch if divergence.launch in begun else min(begun, default=None)
    if launch is None or _whose(reference, rank, divergence) is not None:
        return []
    what = "samples"
    if divergence.what == "loss":
        what = "first loss" if divergence.step == begun[launch] else "later loss"
    found = evidence(again, killed, rank, launch, what)
    distance = relative(divergence.expected_loss, divergence.got_loss)
    # A generator would change the loss by more than this.
    if what != "samples" and distance is not None and distance <= _TINY:
        found = [one for one in found if one.kind != "generator" or one.path not in GLOBAL]
    return [Cause(one.kind, one.says) for one in found[:_CAUSES]]


def _whose(reference: History, rank: int, divergence: Divergence) -> int | None:
    """Return the other rank that should have got these samples."""
    for other in range(len(reference.launches[0])):
        theirs = reference.effective(other).get(divergence.step)
        if other != rank and theirs and theirs.observation.samples == divergence.got != ():
            return other
    return None


def _not_deterministic(
    reference: History, killed: History, again: History | None, worst: RankResult, terms: Terms
) -> Iterator[Cause]:
    """Report two uninterrupted launches that differ, because the loop itself is not deterministic then."""
    expected = reference.effective(worst.rank)
    others = [History(killed.launches[:1]), *([again] if again is not None else [])]
    for other in others:
        seen = other.effective(worst.rank)
        last = min(terms.steps, max(seen, default=0))
        found = first_difference(expected, seen, Terms(last, 0, terms.loss_tolerance))
        if found is None:
            continue
        if found.what in ("samples", "order"):
            why = "unseeded shuffling or workers: seed them (a generator= or worker_init_fn=, from a fixed seed)"
        elif (distance := relative(found.expected_loss, found.got_loss)) is not None and distance <= _TINY:
            why = (
                "sums taken in another order, by threads or by kernels: torch.set_num_threads, "
                "torch.use_deterministic_algorithms(True), or a --loss-tolerance"
            )
        else:
            why = "weights, dropout or augmentation drawn without a seed: torch.manual_seed before the model is made"
        yield Cause(
            "not deterministic",
            f"two launches from the very start differ as well, first in the {found.what} of step {found.step}: {why}",
        )
        return


def _resume(reference: History, killed: History, rank: int, divergence: Divergence, terms: Terms) -> Iterator[Cause]:
    expected, got = reference.effective(rank), killed.effective(rank)
    begun = killed.resumes(rank, min(expected, default=0))
    launch = divergence.launch
    if divergence.what == "missing":
        yield Cause(
            "steps",
            f"step {divergence.step} was made by {'no launch' if launch is None else f'launch {launch} alone'}: the "
            "step to go on from is not the one after the checkpoint's",
        )
    elif launch not in begun:  # nothing had been resumed yet; a later resume may explain more
        for later in begun:
            if again := _repeated(expected, got, later, terms.steps):
                yield _repeats(later, again)
                return
    elif divergence.what == "order":
        yield Cause(
            "order",
            f"step {divergence.step} holds the same samples in another order: the order in which workers deliver, or "
            "a shuffle within the batch, is not in the checkpoint",
        )
    elif divergence.what == "samples":
        yield from _samples(reference, expected, got, rank, divergence, terms)
    else:
        a, b = reference.launches[0][rank], killed.launches[0][rank]
        yield _loss(expected, got, begun[launch], divergence, _steady(a, b))


def _samples(
    reference: History,
    expected: Mapping[int, Counted],
    got: Mapping[int, Counted],
    rank: int,
    divergence: Divergence,
    terms: Terms,
) -> Iterator[Cause]:
    step, launch = divergence.step, divergence.launch
    if (other := _whose(reference, rank, divergence)) is not None:
        yield Cause("ranks", f"rank {rank} got the samples of rank {other} at step {step}: each needs its own state")
        return
    whole = samples(expected)
    before = len(samples(expected, step - 1))
    place = _find(whole, divergence.got, before)
    if place is not None and place < before:
        where = "from the very first sample" if place == 0 else f"from sample {place} of the run"
        yield Cause(
            "position",
            f"launch {launch} went back and read {where} at step {step}, where sample {before} was next: the position "
            "in the data set is not in the checkpoint, or not restored (save the loader's or sampler's state_dict())"
            + (", or the step to go on from is one too high" if before - place == len(divergence.expected) else ""),
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
    else:
        yield Cause(
            "shuffle",
            f"launch {launch} went on at step {step} in an order that is nowhere in an uninterrupted run: the "
            "shuffle's seed, epoch or generator is not in the checkpoint, or not restored",
        )


def _repeats(launch: int, again: int) -> Cause:
    return Cause(
        "position",
        f"launch {launch} read {again} samples again that had been trained on, in an order of its own: the position in "
        "the data set is not in the checkpoint, or not restored (save the loader's or sampler's state_dict())",
    )


def _find(whole: Sequence[Sample], batch: Sequence[Sample], near: int) -> int | None:
    """Return the index of `batch` in `whole` that is nearest to `near`; None if it does not occur."""
    if not batch:
        return None
    places = [
        start
        for start in range(len(whole) - len(batch) + 1)
        if whole[start] == batch[0] and tuple(whole[start : start + len(batch)]) == tuple(batch)
    ]
    return min(places, key=lambda place: abs(place - near), default=None)


def _repeated(expected: Mapping[int, Counted], got: Mapping[int, Counted], launch: int, last: int) -> int:
    """Count the samples that this launch or a later one read again.

    Only reads beyond the highest count of any sample in an uninterrupted run are counted.
    """
    most = max(Counter(samples(expected, last)).values(), default=0)
    earlier = {one for step in got if got[step].launch < launch for one in got[step].observation.samples}
    counts = Counter(samples(got, last))
    return sum(count - most for one, count in counts.items() if one in earlier and count > most)


def _steady(reference: RankHistory, first: RankHistory) -> set[str]:
    """Return the generators with equal states in two launches from the start.

    All others were never seeded, or not used.
    """
    a, b = reference.observed.get(first.first or 0), first.observed.get(first.first or 0)
    return {name for name, state in a.generators.items() if b.generators.get(name) == state} if a and b else set()


def _loss(
    expected: Mapping[int, Counted],
    got: Mapping[int, Counted],
    begun: int,
    divergence: Divergence,
    steady: Set[str],
) -> Cause:
    step, launch = divergence.step, divergence.launch
    distance = relative(divergence.expected_loss, divergence.got_loss)
    if distance is not None and distance <= _TINY:
        return Cause(
            "summation",
            f"the losses of step {step} are {distance:.1e} apart: sums were taken in another order (threads, kernels), "
            "or something small was stored rounded; --loss-tolerance allows it",
        )
    a, b = expected[begun].observation.generators, got[begun].observation.generators
    differing = sorted(name for name in steady & a.keys() & b.keys() if a[name] != b[name])
    if differing:
        return Cause(
            "generator",
            f"same samples, other loss at step {step}; at launch {launch}'s first step, {begun}, the random number "
            f"generator of {', '.join(differing)} stood elsewhere than uninterrupted (dropout and augmentation draw "
            'from them): put tierd.RngState() into the state, as "rng"',
        )
    seen = f"launch {launch} began with step {begun}; its samples are right, and so are the process's generators"
    if step == begun:
        return Cause(
            "unknown",
            f"{seen}, but already its first loss is not: weights, buffers, a generator of the loop's own or what else "
            "goes into the forward pass are not those of the checkpoint",
        )
    return Cause(
        "unknown",
        f"{seen}, and its first loss, but that of step {step} is not: updates go another way; the optimizer's, the "
        "scheduler's or the scaler's state may not be in the checkpoint",
    )


def _settings(reference: History, killed: History, rank: int, divergence: Divergence) -> Iterator[Cause]:
    """Report the process settings that differ."""
    ours = reference.launches[0][rank].setting
    theirs = killed.launches[divergence.launch - 1][rank].setting if divergence.launch else None
    if ours is None or theirs is None or ours == theirs:
        return
    pairs = (f"{name} {getattr(ours, name)} and {getattr(theirs, name)}" for name in _changed(ours, theirs))
    yield Cause(
        "setting",
        f"uninterrupted and in launch {divergence.launch} the processes differ in {', '.join(pairs)}: sums are taken "
        "in another order with another number of threads",
    )


def _changed(ours: Setting, theirs: Setting) -> list[str]:
    return [name for name in Setting.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)]
