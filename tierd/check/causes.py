"""Find the likely causes of a difference between a killed run and an uninterrupted one.

Invariant: pure, and based on evidence. Each cause states the observation behind it; without evidence no cause is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from tierd.check.cause import Cause
from tierd.check.compare import Divergence, RankResult, Terms, first_difference, relative
from tierd.check.evidence import evidence, first_evidence, overlap
from tierd.check.final import StateDifference, unsteady
from tierd.check.finding import StateFinding
from tierd.check.history import GLOBAL, Counted, History, RankHistory, Setting
from tierd.check.reads import from_samples, repeated, repeats, whose

_CAUSES = 3  # causes that a report names, at most
_TINY = 1e-5  # relative; how much another order of summation changes a float32 loss within few steps


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
    known = _from_states(reference, killed, again if not found else None, worst)
    shown = list(_resume(reference, killed, worst.rank, worst.divergence, terms))
    found += [_with_place(known[0], shown), *known[1:]] if known else shown
    if worst.divergence.what == "loss" or not found:
        found += _settings(reference, killed, worst.rank, worst.divergence)
    return tuple(found)


def from_final_states(
    reference: History, killed: History, again: History | None, states: Sequence[StateDifference]
) -> tuple[Cause, ...]:
    """Return the causes of differences in the final state that neither samples nor losses show.

    Args:
        again: a second uninterrupted run, whose states were captured where the killed run resumed.
    """
    found: list[Cause] = []
    for rank in sorted({one.rank for one in states}):
        found += _of_rank(reference, killed, again, rank, [one for one in states if one.rank == rank])[:_CAUSES]
    return tuple(found)


def _of_rank(
    reference: History, killed: History, again: History | None, rank: int, states: Sequence[StateDifference]
) -> list[Cause]:
    seen: list[StateFinding] = []
    if again is not None:
        shaky = unsteady([one.launches[0][rank] for one in (reference, again)])
        for one in states:
            if one.path in shaky:
                return [
                    Cause(
                        "not deterministic",
                        f"two launches from the very start end with another {one.path} as well, though their losses "
                        "are equal: sums taken in another order, or values drawn without a seed",
                    )
                ]
        begun = min(killed.resumes(rank, reference.launches[0][rank].first or 0).values(), default=0)
        used = _drawn(reference.effective(rank), begun, max(one.step for one in states))
        seen = [one for one in first_evidence(again, killed, rank) if one.path not in GLOBAL or one.path in used]
    itself = {one.path for one in seen if any(overlap(one.path, other.path) for other in states)}
    if any(one.is_sure and one.path in itself for one in seen):
        seen = [one for one in seen if one.path in itself]
    return [Cause(one.kind, one.says) for one in seen] or [_follows(states)]


def _follows(states: Sequence[StateDifference]) -> Cause:
    one = states[0]
    return Cause(
        "unknown",
        f"samples and losses are right, but not {one.path}: {one.expected} uninterrupted and {one.got} in launch "
        f"{one.launch} after step {one.step}"
        + ("; some steps later it is equal again" if one.passing else "")
        + ". No value is seen to be lost by the load or set after it: it may follow from a generator or an order of "
        "sums that was not seen",
    )


def _with_place(cause: Cause, shown: Sequence[Cause]) -> Cause:
    """Add to a position the place in the uninterrupted run from which the launch read, if its samples show it."""
    if cause.kind == "position" and shown and shown[0].kind in ("position", "prefetch"):
        return Cause(cause.kind, f"{shown[0].says.split(': ')[0]}; {cause.says}")
    return cause


def _from_states(reference: History, killed: History, again: History | None, worst: RankResult) -> list[Cause]:
    """Derive causes from the states at the save, at the load, and before the first step after the load."""
    divergence, rank = worst.divergence, worst.rank
    if again is None or divergence is None or divergence.launch is None or divergence.what == "missing":
        return []
    begun = killed.resumes(rank, reference.launches[0][rank].first or 0)
    launch = divergence.launch if divergence.launch in begun else min(begun, default=None)
    if launch is None or whose(reference, rank, divergence) is not None:
        return []
    what = "samples"
    if divergence.what == "loss":
        what = "first loss" if divergence.step == begun[launch] else "later loss"
    # A generator that nobody seeded has another state in each launch.
    shaky = unsteady([one.launches[0][rank] for one in (reference, again)])
    found = [one for one in evidence(again, killed, rank, launch, what) if one.path not in shaky]
    if what != "samples":  # what nobody drew from changed no loss
        used = _drawn(reference.effective(rank), begun[launch], divergence.step)
        found = [one for one in found if one.path not in GLOBAL or one.path in used]
    return [Cause(one.kind, one.says) for one in found[:_CAUSES]]


def _drawn(expected: Mapping[int, Counted], begun: int, last: int) -> set[str]:
    """Return the process's generators that an uninterrupted run drew from in the steps `begun` to `last`.

    Where the step before is unknown, every generator may have been drawn from.
    """
    steps = [expected[step].observation.generators for step in range(begun - 1, last + 1) if step in expected]
    if len(steps) < last - begun + 2:
        return set(steps[-1]) if steps else set(GLOBAL)
    return {name for name, state in steps[-1].items() if any(one.get(name) != state for one in steps)}


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
            if again := repeated(expected, got, later, terms.steps):
                yield repeats(later, again)
                return
    elif divergence.what == "order":
        yield Cause(
            "order",
            f"step {divergence.step} holds the same samples in another order: the order in which workers deliver, or "
            "a shuffle within the batch, is not in the checkpoint",
        )
    elif divergence.what == "samples":
        yield from from_samples(reference, expected, got, rank, divergence, terms)
    else:
        a, b = reference.launches[0][rank], killed.launches[0][rank]
        yield _loss(expected, got, begun[launch], divergence, _steady(a, b))


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
    a, b = expected[begun].observation.generators, got[begun].observation.generators
    used = steady & _drawn(expected, begun, step)
    differing = sorted(name for name in used & a.keys() & b.keys() if a[name] != b[name])
    if differing:
        return Cause(
            "generator",
            f"same samples, other loss at step {step}; at launch {launch}'s first step, {begun}, the random number "
            f"generator of {', '.join(differing)} stood elsewhere than uninterrupted (dropout and augmentation draw "
            'from them): put tierd.RngState() into the state, as "rng"',
        )
    distance = relative(divergence.expected_loss, divergence.got_loss)
    if distance is not None and distance <= _TINY:
        return Cause(
            "summation",
            f"the losses of step {step} are {distance:.1e} apart: sums were taken in another order (threads, kernels), "
            "or something small was stored rounded; --loss-tolerance allows it",
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
