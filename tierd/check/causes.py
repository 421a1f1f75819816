"""Find the likely causes of a difference between a killed run and an uninterrupted one.

Invariant: pure, and based on evidence. Each cause states the observation behind it; without evidence no cause is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from tierd.check.check_report import Cause
from tierd.check.launch_records import GLOBAL_GENERATORS, CheckedRun, CountedObservation, ProcessSettings, RankRecord
from tierd.check.observation_causes import causes_in_samples, count_reread_samples, rank_of_samples, reread_cause
from tierd.check.resume_comparison import StateFinding
from tierd.check.resume_findings import differences_before, first_resume_findings, launch_findings, paths_overlap
from tierd.check.sample_comparison import ComparisonTerms, Divergence, RankResult, first_difference, relative_distance
from tierd.check.state_comparison import StateDifference, nondeterministic_paths

_MAX_CAUSES = 3  # causes that a report names, at most
_SUMMATION_DISTANCE = 1e-5  # relative; how much another order of summation changes a float32 loss within few steps


def find_causes(
    reference: CheckedRun,
    killed: CheckedRun,
    rerun: CheckedRun | None,
    results: Sequence[RankResult],
    terms: ComparisonTerms,
) -> tuple[Cause, ...]:
    """Return the likely causes of the first divergence, the best supported first.

    Args:
        rerun: a second uninterrupted run, if one was made.
    """
    failing = [result for result in results if result.divergence is not None and not result.ok]
    if not failing:
        return ()
    worst = min(failing, key=lambda result: result.divergence.step if result.divergence else 0)
    assert worst.divergence is not None
    candidates = list(_nondeterminism_causes(reference, killed, rerun, worst, terms))
    state_causes = _causes_from_states(reference, killed, rerun if not candidates else None, worst)
    sample_causes = list(_resume_causes(reference, killed, rerun, worst.rank, worst.divergence, terms))
    if _follow_from_samples(state_causes, killed, worst):
        candidates += [*sample_causes, *state_causes]
    else:
        candidates += [_add_place(state_causes[0], sample_causes), *state_causes[1:]] if state_causes else sample_causes
    if worst.divergence.what == "loss" or not candidates:
        candidates += _setting_causes(reference, killed, worst.rank, worst.divergence)
    return tuple(candidates)


def state_difference_causes(
    reference: CheckedRun, killed: CheckedRun, rerun: CheckedRun | None, states: Sequence[StateDifference]
) -> tuple[Cause, ...]:
    """Return the causes of differences in the final state that neither samples nor losses show.

    Args:
        rerun: a second uninterrupted run, whose states were captured where the killed run resumed.
    """
    candidates: list[Cause] = []
    for rank in sorted({state.rank for state in states}):
        candidates += _causes_of_rank(
            reference, killed, rerun, rank, [state for state in states if state.rank == rank]
        )[:_MAX_CAUSES]
    return tuple(candidates)


def _causes_of_rank(
    reference: CheckedRun, killed: CheckedRun, rerun: CheckedRun | None, rank: int, states: Sequence[StateDifference]
) -> list[Cause]:
    findings: list[StateFinding] = []
    if rerun is not None:
        shaky = nondeterministic_paths([run.launches[0][rank] for run in (reference, rerun)])
        for difference in states:
            if difference.path in shaky:
                return [
                    Cause(
                        "not deterministic",
                        f"two launches from the very start end with another {difference.path} as well, though their "
                        "losses are equal: sums taken in another order, or values drawn without a seed",
                    )
                ]
        first_step = min(
            killed.first_steps_of_resumes(rank, reference.launches[0][rank].first_step or 0).values(), default=0
        )
        used = _drawn_generators(
            reference.effective_observations(rank), first_step, max(state.step for state in states)
        )
        findings = [
            finding
            for finding in first_resume_findings(rerun, killed, rank)
            if finding.path not in GLOBAL_GENERATORS or finding.path in used
        ]
    itself = {finding.path for finding in findings if any(paths_overlap(finding.path, state.path) for state in states)}
    if any(finding.is_sure and finding.path in itself for finding in findings):
        findings = [finding for finding in findings if finding.path in itself]
    return [Cause(finding.kind, finding.says) for finding in findings] or [_unexplained_cause(states)]


def _unexplained_cause(states: Sequence[StateDifference]) -> Cause:
    state = states[0]
    return Cause(
        "unknown",
        f"samples and losses are right, but not {state.path}: {state.expected} uninterrupted and {state.got} in launch "
        f"{state.launch} after step {state.step}"
        + ("; some steps later it is equal again" if state.passing else "")
        + ". Its cause was not seen: the load may lose it, code may set it after the load, or it may follow from a "
        "generator, or from sums in another order",
    )


def _add_place(cause: Cause, sample_causes: Sequence[Cause]) -> Cause:
    """Add to a position the place in the uninterrupted run from which the launch read, if its samples show it."""
    if cause.kind == "position" and sample_causes and sample_causes[0].kind in ("position", "prefetch"):
        return Cause(cause.kind, f"{sample_causes[0].says.split(': ')[0]}; {cause.says}")
    return cause


def _follow_from_samples(causes: Sequence[Cause], killed: CheckedRun, worst: RankResult) -> bool:
    """Return whether the causes are generators that may only have drawn other samples.

    After a load that was not seen, nothing tells them from generators that were lost.
    """
    divergence = worst.divergence
    if divergence is None or divergence.launch is None or divergence.what == "loss":
        return False
    is_load_seen = any(
        capture.moment == "loaded" for capture in killed.launches[divergence.launch - 1][worst.rank].captures
    )
    return not is_load_seen and all(cause.kind == "generator" for cause in causes)


def _causes_from_states(
    reference: CheckedRun, killed: CheckedRun, rerun: CheckedRun | None, worst: RankResult
) -> list[Cause]:
    """Derive causes from the states at the save, at the load, and before the first step after the load."""
    divergence, rank = worst.divergence, worst.rank
    if rerun is None or divergence is None or divergence.launch is None or divergence.what == "missing":
        return []
    first_steps = killed.first_steps_of_resumes(rank, reference.launches[0][rank].first_step or 0)
    launch = divergence.launch if divergence.launch in first_steps else min(first_steps, default=None)
    if launch is None or rank_of_samples(reference, rank, divergence) is not None:
        return []
    symptom = "samples"
    if divergence.what == "loss":
        symptom = "first loss" if divergence.step == first_steps[launch] else "later loss"
    # A generator that nobody seeded has another state in each launch.
    shaky = nondeterministic_paths([run.launches[0][rank] for run in (reference, rerun)])
    findings = [
        finding for finding in launch_findings(rerun, killed, rank, launch, symptom) if finding.path not in shaky
    ]
    if symptom != "samples":  # what nobody drew from changed no loss
        used = _drawn_generators(reference.effective_observations(rank), first_steps[launch], divergence.step)
        findings = [finding for finding in findings if finding.path not in GLOBAL_GENERATORS or finding.path in used]
    return [Cause(finding.kind, finding.says) for finding in findings[:_MAX_CAUSES]]


def _drawn_generators(expected: Mapping[int, CountedObservation], first_step: int, last: int) -> set[str]:
    """Return the process's generators that an uninterrupted run drew from in the steps `first_step` to `last`.

    Where the step before is unknown, every generator may have been drawn from.
    """
    steps = [expected[step].observation.generators for step in range(first_step - 1, last + 1) if step in expected]
    if len(steps) < last - first_step + 2:
        return set(steps[-1]) if steps else set(GLOBAL_GENERATORS)
    return {name for name, state in steps[-1].items() if any(generators.get(name) != state for generators in steps)}


def _nondeterminism_causes(
    reference: CheckedRun, killed: CheckedRun, rerun: CheckedRun | None, worst: RankResult, terms: ComparisonTerms
) -> Iterator[Cause]:
    """Report two uninterrupted launches that differ, because the loop itself is not deterministic then."""
    expected = reference.effective_observations(worst.rank)
    runs = [CheckedRun(killed.launches[:1]), *([rerun] if rerun is not None else [])]
    for run in runs:
        actual = run.effective_observations(worst.rank)
        last = min(terms.steps, max(actual, default=0))
        difference = first_difference(expected, actual, ComparisonTerms(last, 0, terms.loss_tolerance))
        if difference is None:
            continue
        if difference.what in ("samples", "order"):
            why = "unseeded shuffling or workers: seed them (a generator= or worker_init_fn=, from a fixed seed)"
        elif (
            distance := relative_distance(difference.expected_loss, difference.got_loss)
        ) is not None and distance <= _SUMMATION_DISTANCE:
            why = (
                "sums taken in another order, by threads or by kernels: torch.set_num_threads, "
                "torch.use_deterministic_algorithms(True), or a --loss-tolerance"
            )
        else:
            why = "weights, dropout or augmentation drawn without a seed: torch.manual_seed before the model is made"
        yield Cause(
            "not deterministic",
            f"two launches from the very start differ as well, first in the {difference.what} of step "
            f"{difference.step}: {why}",
        )
        return


def _resume_causes(
    reference: CheckedRun,
    killed: CheckedRun,
    rerun: CheckedRun | None,
    rank: int,
    divergence: Divergence,
    terms: ComparisonTerms,
) -> Iterator[Cause]:
    expected, actual = reference.effective_observations(rank), killed.effective_observations(rank)
    first_steps = killed.first_steps_of_resumes(rank, min(expected, default=0))
    launch = divergence.launch
    if divergence.what == "missing":
        yield Cause(
            "steps",
            f"step {divergence.step} was made by {'no launch' if launch is None else f'launch {launch} alone'}: the "
            "step to go on from is not the one after the checkpoint's",
        )
    elif launch not in first_steps:  # nothing had been resumed yet; a later resume may explain more
        for later in first_steps:
            if reread := count_reread_samples(expected, actual, later, terms.steps):
                yield reread_cause(later, reread)
                return
    elif divergence.what == "order":
        yield Cause(
            "order",
            f"step {divergence.step} holds the same samples in another order: the order in which workers deliver, or "
            "a shuffle within the batch, is not in the checkpoint",
        )
    elif divergence.what == "samples":
        yield from causes_in_samples(reference, expected, actual, rank, divergence, terms)
    else:
        a, b = reference.launches[0][rank], killed.launches[0][rank]
        differing = None if rerun is None else differences_before(rerun, killed, rank, launch)
        yield _loss_cause(expected, actual, first_steps[launch], divergence, _seeded_generators(a, b), differing)


def _seeded_generators(reference: RankRecord, first: RankRecord) -> set[str]:
    """Return the generators with equal states in two launches from the start.

    All others were never seeded, or not used.
    """
    a, b = reference.observations.get(first.first_step or 0), first.observations.get(first.first_step or 0)
    return {name for name, state in a.generators.items() if b.generators.get(name) == state} if a and b else set()


def _loss_cause(
    expected: Mapping[int, CountedObservation],
    actual: Mapping[int, CountedObservation],
    first_step: int,
    divergence: Divergence,
    steady: Set[str],
    before: Mapping[str, str] | None,
) -> Cause:
    """Return the cause of a wrong loss of right samples that no state explains.

    Args:
        steady: the generators that two launches from the start agree on.
        before: the values that differ before the launch's first forward pass; None if that was not captured.
    """
    step, launch = divergence.step, divergence.launch
    a, b = expected[first_step].observation.generators, actual[first_step].observation.generators
    used = steady & _drawn_generators(expected, first_step, step)
    differing = sorted(
        name for name in used & a.keys() & b.keys() if a[name] != b[name] and (before is None or name in before)
    )
    if differing:
        return Cause(
            "generator",
            f"same samples, other loss at step {step}; at launch {launch}'s first step, {first_step}, the random "
            f"number generator of {', '.join(differing)} stood elsewhere than uninterrupted (dropout and augmentation "
            'draw from them): put tierd.RngState() into the state, as "rng"',
        )
    distance = relative_distance(divergence.expected_loss, divergence.got_loss)
    if before:
        examples = "; ".join(list(before.values())[:_MAX_CAUSES])
        return Cause(
            "unknown",
            f"same samples, other loss at step {step}; whether it follows from what differs in launch {launch} was not "
            f"seen: {examples}" + (f"; and {len(before) - _MAX_CAUSES} more" if len(before) > _MAX_CAUSES else ""),
        )
    if distance is not None and distance <= _SUMMATION_DISTANCE:
        return Cause(
            "summation",
            f"the losses of step {step} are {distance:.1e} apart: sums were taken in another order (threads, kernels), "
            "or something small was stored rounded; --loss-tolerance allows it",
        )
    opening = (
        f"launch {launch} began with step {first_step}; its samples are right, and so are the process's generators"
    )
    if step == first_step:
        return Cause(
            "unknown",
            f"{opening}, but already its first loss is not: weights, buffers, a generator of the loop's own or what "
            "else goes into the forward pass are not those of the checkpoint",
        )
    return Cause(
        "unknown",
        f"{opening}, and its first loss, but that of step {step} is not: updates go another way; the optimizer's, the "
        "scheduler's or the scaler's state may not be in the checkpoint",
    )


def _setting_causes(reference: CheckedRun, killed: CheckedRun, rank: int, divergence: Divergence) -> Iterator[Cause]:
    """Report the process settings that differ."""
    expected = reference.launches[0][rank].setting
    actual = killed.launches[divergence.launch - 1][rank].setting if divergence.launch else None
    if expected is None or actual is None or expected == actual:
        return
    pairs = (
        f"{name} {getattr(expected, name)} and {getattr(actual, name)}" for name in _changed_settings(expected, actual)
    )
    yield Cause(
        "setting",
        f"uninterrupted and in launch {divergence.launch} the processes differ in {', '.join(pairs)}: sums are taken "
        "in another order with another number of threads",
    )


def _changed_settings(expected: ProcessSettings, actual: ProcessSettings) -> list[str]:
    return [name for name in ProcessSettings.__struct_fields__ if getattr(expected, name) != getattr(actual, name)]
