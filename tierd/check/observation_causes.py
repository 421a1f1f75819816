"""Find causes in what launches observed: the steps at which they began, and the samples that they read.

Invariant: pure. Samples and losses cannot show every mistake of a beginning, because a rank that does everything anew
does it right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tierd.check.check_report import Cause
from tierd.check.launch_records import CheckedRun, CountedObservation, Sample
from tierd.check.sample_comparison import ComparisonTerms, Divergence, samples_until


def find_missing_restore(killed: CheckedRun, start: int) -> Cause | None:
    """Return a cause if every launch began at the first step, because nothing was checked then."""
    if any(killed.first_steps_of_resumes(rank, start) for rank in range(len(killed.launches[0]))):
        return None
    saves = sorted({step for launch in killed.launches for record in launch for step in record.saved_steps})
    if not saves:
        return Cause(
            "never restored", f"every launch began at step {start}: none had saved through tierd when it ended"
        )
    return Cause(
        "never restored",
        f"every launch began at step {start}, though saves of steps {', '.join(map(str, saves[:5]))} were made: "
        "nothing is restored, or each kill came before the first save was complete",
    )


def find_restarted_rank(killed: CheckedRun, start: int) -> Cause | None:
    """Return a cause if a rank began anew in a launch in which another one resumed, though it had a checkpoint.

    It had one if it restored one, or if an earlier launch saved twice: only the last save may have died with a launch.
    """
    saved: Counter[int] = Counter()  # the most saves of one launch
    for number, launch in enumerate(killed.launches, start=1):
        resumed = [
            rank
            for rank, rank_history in enumerate(launch)
            if number > 1 and (rank_history.first_step or start) > start
        ]
        for rank, record in enumerate(launch):
            restored = any(capture.moment == "loaded" and capture.step >= start for capture in record.captures)
            if resumed and record.first_step == start and (restored or saved[rank] > 1):
                return Cause(
                    "ranks",
                    f"rank {rank} began launch {number} at step {start}, and rank {resumed[0]} at step "
                    f"{launch[resumed[0]].first_step}: rank {rank} "
                    + ("left out what it had restored" if restored else "did not restore what it had saved"),
                )
            saved[rank] = max(saved[rank], len(set(record.saved_steps)))
    return None


def find_split_start(*histories: CheckedRun) -> Cause | None:
    """Return a cause if ranks of a launch on an empty spool began at different steps."""
    for launch in (history.launches[0] for history in histories):
        first = [record.first_step for record in launch if record.first_step is not None]
        if len(set(first)) > 1:
            ahead = first.index(max(first))
            return Cause(
                "ranks",
                f"a launch on an empty spool began at step {first[ahead]} on rank {ahead}, and at step {min(first)} on "
                f"rank {first.index(min(first))}: rank {ahead} restored what the other had saved meanwhile; each needs "
                "its own state",
            )
    return None


_FOLLOWED_STEPS = 3  # steps from the first wrong one


def rank_of_samples(reference: CheckedRun, rank: int, divergence: Divergence) -> int | None:
    """Return the other rank that should have got these samples."""
    for other_rank in range(len(reference.launches[0])):
        expected = reference.effective_observations(other_rank).get(divergence.step)
        if other_rank != rank and expected and expected.observation.samples == divergence.got != ():
            return other_rank
    return None


def causes_in_samples(
    reference: CheckedRun,
    expected: Mapping[int, CountedObservation],
    actual: Mapping[int, CountedObservation],
    rank: int,
    divergence: Divergence,
    terms: ComparisonTerms,
) -> Iterator[Cause]:
    step, launch = divergence.step, divergence.launch
    if (owner := rank_of_samples(reference, rank, divergence)) is not None:
        yield Cause("ranks", f"rank {rank} got the samples of rank {owner} at step {step}: each needs its own state")
        return
    uninterrupted = samples_until(expected)
    before = len(samples_until(expected, step - 1))
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
        batches = f" ({ahead // size} batch{'es' if ahead > size else ''})" if ahead % size == 0 else ""
        skipped = f"launch {launch} skipped exactly {ahead} samples{batches} at step {step}"
        if (launch, step - 1) in {(counted.launch, number) for number, counted in actual.items()}:
            yield Cause(
                "position",
                f"{skipped}, after right samples since the resume: what was prefetched was restored and counted as "
                "read, or what skips the first samples of the resumed epoch skips some of the next one as well",
            )
        else:
            yield Cause(
                "prefetch",
                f"{skipped}: the position that was saved counts what was prefetched, not what was trained on",
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
            "shuffle's seed, epoch or generator is not in the checkpoint, or not restored; give the loader a generator "
            "of its own (generator=torch.Generator().manual_seed(0)), and save the loader: docs/howto/data-loaders.md",
        )


def _continues_uninterrupted(
    expected: Sequence[Sample], actual: Mapping[int, CountedObservation], divergence: Divergence
) -> bool:
    """Return whether the next few steps have the samples in `expected` as well, as far as both runs were observed."""
    steps = range(divergence.step, divergence.step + _FOLLOWED_STEPS)
    read = [sample for step in steps if step in actual for sample in actual[step].observation.samples]
    return all(sample == read_sample for sample, read_sample in zip(expected, read, strict=False))


def reread_cause(launch: int, count: int) -> Cause:
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


def count_reread_samples(
    expected: Mapping[int, CountedObservation], actual: Mapping[int, CountedObservation], launch: int, last: int
) -> int:
    """Count the samples that this launch or a later one read again.

    Only reads beyond the highest count of any sample in an uninterrupted run are counted.
    """
    max_reads = max(Counter(samples_until(expected, last)).values(), default=0)
    earlier = {sample for step in actual if actual[step].launch < launch for sample in actual[step].observation.samples}
    counts = Counter(samples_until(actual, last))
    return sum(count - max_reads for sample, count in counts.items() if sample in earlier and count > max_reads)
