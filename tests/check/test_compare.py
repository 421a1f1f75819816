"""What a killed run's history means, how it is compared, and what is named as the cause. Histories by hand."""

from __future__ import annotations

import msgspec
import pytest

from tierd.check.causes import find_causes
from tierd.check.launch_records import (
    CheckedRun,
    KillPoint,
    Observation,
    ProcessSettings,
    RankRecord,
    StateCapture,
    as_samples,
)
from tierd.check.observation_causes import find_missing_restore, find_restarted_rank, find_split_start
from tierd.check.sample_comparison import ComparisonTerms, compare_rank
from tierd.core.errors import ConfigError

STEPS = 12
SIZE = 4


def batch(step: int) -> tuple[int, ...]:
    """What is read uninterrupted: 0, 1, 2, 3 in step 1 and so on; for ever other samples."""
    return tuple(range((step - 1) * SIZE, step * SIZE))


def loss(step: int) -> float:
    return 1 / (step + 1)


def seen(first: int, last: int, samples=batch, losses=loss, generators=lambda step: {}, setting=None) -> RankRecord:
    one = RankRecord(setting=setting, saved_steps=[4])
    for step in range(first, last + 1):
        number = None if losses is None else losses(step).hex()
        one.observations[step] = Observation(step, tuple(samples(step)), number, generators(step))
    return one


def history(*launches: RankRecord) -> CheckedRun:
    return CheckedRun([[one] for one in launches])


WHOLE = history(seen(1, STEPS))


def judged(killed: CheckedRun, reference: CheckedRun = WHOLE, again: CheckedRun | None = None, **terms):
    wanted = ComparisonTerms(STEPS, **terms)
    result = compare_rank(reference, killed, 0, wanted)
    return result, [one.kind for one in find_causes(reference, killed, again, [result], wanted)]


def test_kill_points():
    assert [str(KillPoint.parse(one)) for one in (7, "7", " 7+save", "7+10ms", "7+0.5ms")] == [
        "7", "7", "7+save", "7+10ms", "7+0.5ms",
    ]  # fmt: skip
    for wrong in ("", "save", "-1", "7+", "7+10", "7save"):
        with pytest.raises(ConfigError, match="kill point"):
            KillPoint.parse(wrong)


def test_samples_of_every_kind_are_distinguished():
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    assert as_samples(torch.tensor([3, 1])) == as_samples(numpy.array([3, 1])) == (3, 1)
    assert as_samples([numpy.int64(5), torch.tensor(6), "a", True]) == (5, 6, "a", 1)
    assert as_samples(torch.tensor(4)) == (4,)
    assert as_samples([("shard", 1), b"x"]) == ("('shard', 1)", "b'x'")


def test_equal_is_exact():
    result, found = judged(history(seen(1, 7), seen(5, 9), seen(9, STEPS)))
    assert result.ok and result.exact and result.divergence is None and found == []
    assert (result.samples, result.again, result.skipped, result.resumes) == (STEPS * SIZE, 0, 0, 2)


def test_compare_ignores_steps_that_a_kill_took_back():
    """Launch 1 went wrong after the checkpoint; launch 2 begins before that, so it is as if it had not happened."""
    wrong = seen(1, 7, lambda step: batch(step) if step < 6 else (99,))
    killed = history(wrong, seen(6, STEPS))
    assert compare_rank(WHOLE, killed, 0, ComparisonTerms(STEPS)).exact
    assert [killed.effective_observations(0)[step].launch for step in (5, 6, STEPS)] == [1, 2, 2]
    # A launch that begins too late leaves a hole: the steps that launch 1 had made were lost.
    result, found = judged(history(seen(1, 7), seen(5, 6), seen(9, STEPS)))
    assert (result.divergence.step, result.divergence.what, result.divergence.launch) == (7, "missing", None)
    assert not result.ok and found == ["steps"]


def test_compare_detects_one_bit_of_a_loss_and_a_tolerance_allows_it():
    near = lambda step: loss(step) * (1 + (step == 9) * 1e-7)  # noqa: E731
    killed = history(seen(1, 7), seen(5, STEPS, losses=near))
    result, found = judged(killed)
    assert (result.divergence.step, result.divergence.what, found) == (9, "loss", ["summation"])
    assert judged(killed, loss_tolerance=1e-6)[0].ok
    assert not judged(killed, loss_tolerance=1e-8)[0].ok
    nan = history(seen(1, 7, losses=lambda step: float("nan")), seen(5, STEPS, losses=lambda step: float("nan")))
    assert judged(nan, reference=history(seen(1, STEPS, losses=lambda step: float("nan"))))[0].exact
    assert not judged(nan, loss_tolerance=0.5)[0].ok
    assert not judged(history(seen(1, 7), seen(5, STEPS, losses=None)), loss_tolerance=0.5)[0].ok


def resumed_with(samples, **more) -> CheckedRun:
    return history(seen(1, 7), seen(5, STEPS, samples, **more))


@pytest.mark.parametrize(
    ("samples", "kind", "says"),
    [
        (lambda step: batch(step - 4), "position", "from the very first sample at step 5, where sample 16 was next"),
        (lambda step: batch(step - 2), "position", "from sample 8 of the run"),
        (lambda step: batch(step - 1), "position", "or the step to go on from is one too high"),
        (lambda step: batch(step + 3), "prefetch", "skipped exactly 12 samples (3 batches)"),
        (lambda step: [one + 2 for one in batch(step)], "prefetch", "skipped exactly 2 samples at"),
        (lambda step: batch(step)[:3], "data", "at the right sample with a batch of 3 at step 5, where one of 4"),
        (lambda step: batch(step)[::-1], "order", "same samples in another order"),
        (lambda step: [one * 7 + 1000 for one in batch(step)], "shuffle", "nowhere in an uninterrupted run"),
    ],
)
def test_the_cause_of_other_samples(samples, kind, says):
    result, found = judged(resumed_with(samples))
    assert not result.ok and found == [kind]
    assert (result.divergence.step, result.divergence.launch) == (5, 2)
    [cause] = find_causes(WHOLE, resumed_with(samples), None, [result], ComparisonTerms(STEPS))
    assert says in cause.says


def test_samples_skipped_some_steps_after_the_resume_are_a_wrong_position():
    """As a number of batches to skip in the resumed epoch, which the loop does not reset."""
    killed = resumed_with(lambda step: batch(step if step < 7 else step + 1))
    result, found = judged(killed)
    [cause] = find_causes(WHOLE, killed, None, [result], ComparisonTerms(STEPS))
    assert found == ["position"] and "(1 batch) at step 7, after right samples since the resume" in cause.says


@pytest.mark.parametrize(
    ("losses", "generators", "kind"),
    [
        (lambda step: loss(step) + (step >= 5), lambda step: {"torch": "other", "python": f"{step}"}, "generator"),
        (lambda step: loss(step) + (step >= 5), lambda step: {"torch": f"{step}", "python": "any"}, "unknown"),
        (lambda step: loss(step) + (step >= 6), lambda step: {"torch": f"{step}", "python": "any"}, "unknown"),
    ],
)
def test_the_cause_of_another_loss(losses, generators, kind):
    """`python`, which nobody seeded, stands elsewhere in every launch and says nothing. Where no states were taken,
    no weights and no optimizer are blamed."""

    def steady(launch):
        return lambda step: {"torch": f"{step}", "python": f"{launch} {step}"}

    reference = history(seen(1, STEPS, generators=steady(0)))
    killed = history(seen(1, 7, generators=steady(1)), seen(5, STEPS, losses=losses, generators=generators))
    result, found = judged(killed, reference)
    assert result.divergence.what == "loss" and found == [kind]


@pytest.mark.parametrize(
    ("drawn", "kind"),
    [(lambda step: step, "generator"), (lambda step: 0, "summation")],
    ids=["drawn from", "never drawn from"],
)
def test_a_small_difference_is_of_the_generator_that_the_step_drew_from(drawn, kind):
    """Noise of a millionth is no order of summation; and a generator that nobody draws from changes no loss."""
    reference = history(seen(1, STEPS, generators=lambda step: {"torch": f"{drawn(step)}"}))
    killed = history(
        seen(1, 7, generators=lambda step: {"torch": f"{drawn(step)}"}),
        seen(5, STEPS, losses=lambda step: loss(step) * (1 + 1e-7), generators=lambda step: {"torch": "other"}),
    )
    assert judged(killed, reference)[1] == [kind]


def test_another_number_of_threads_is_named():
    four, two = ProcessSettings(torch_threads=4, cpus=8), ProcessSettings(torch_threads=2, cpus=8)
    reference = history(seen(1, STEPS, setting=four))
    killed = history(seen(1, 7, setting=four), seen(5, STEPS, losses=lambda step: loss(step) * (1 + 1e-8), setting=two))
    result, found = judged(killed, reference)
    assert found == ["summation", "setting"]
    assert "torch_threads 4 and 2" in find_causes(reference, killed, None, [result], ComparisonTerms(STEPS))[1].says


def test_a_loop_that_is_not_deterministic_is_not_blamed_on_its_resume():
    other = lambda step: [one + 1000 for one in batch(step)]  # noqa: E731
    assert judged(history(seen(1, 7, other), seen(5, STEPS, other)))[1] == ["not deterministic"]
    # The launch before the first kill was alike as far as it went; a second uninterrupted run is not.
    killed, again = resumed_with(other), history(seen(1, STEPS, lambda step: batch(step) if step < 5 else other(step)))
    assert judged(killed, again=again)[1] == ["not deterministic", "shuffle"]
    losses = history(seen(1, 7, losses=lambda step: 5.0), seen(5, STEPS, losses=lambda step: 5.0))
    assert judged(losses)[1] == ["not deterministic"]


def test_ranks_that_got_each_others_state():
    def shifted(by):
        return lambda step: [one + by for one in batch(step)]

    whole = CheckedRun([[seen(1, STEPS), seen(1, STEPS, shifted(500))]])
    killed = CheckedRun([[seen(1, 7), seen(1, 6, shifted(500))], [seen(5, STEPS, shifted(500)), seen(5, STEPS)]])
    results = [compare_rank(whole, killed, rank, ComparisonTerms(STEPS)) for rank in (0, 1)]
    assert [one.ok for one in results] == [False, False]
    assert [one.kind for one in find_causes(whole, killed, None, results, ComparisonTerms(STEPS))] == ["ranks"]


def test_nothing_restored_is_no_proof():
    killed = history(seen(1, 7), seen(1, STEPS))
    assert compare_rank(WHOLE, killed, 0, ComparisonTerms(STEPS)).exact
    assert find_missing_restore(killed, 1).kind == "never restored"
    assert find_missing_restore(history(seen(1, 7), seen(5, STEPS)), 1) is None


def test_rank_that_begins_anew_beside_a_resumed_rank_is_a_cause():
    """What it does is right, sample by sample; it does it a second time."""
    first, resumed = [seen(1, 7), seen(1, 7)], seen(5, STEPS)
    for one in first:
        one.saved_steps = [4, 6]
    found = find_restarted_rank(CheckedRun([first, [resumed, seen(1, STEPS)]]), 1)
    assert found.kind == "ranks" and "rank 1 began launch 2 at step 1, and rank 0 at step 5" in found.says
    restored = seen(1, STEPS)
    restored.captures.append(StateCapture(4, "loaded", {}, {}))
    assert "left out" in find_restarted_rank(CheckedRun([[seen(1, 7), seen(1, 7)], [resumed, restored]]), 1).says


def test_a_rank_whose_only_save_may_have_died_with_it_is_not_blamed():
    launches = [[seen(1, 7), seen(1, 5)], [seen(5, 7), seen(1, 5)], [seen(5, STEPS), seen(1, STEPS)]]
    assert find_restarted_rank(CheckedRun(launches), 1) is None
    assert find_restarted_rank(CheckedRun([launches[0], [seen(1, STEPS), seen(1, STEPS)]]), 1) is None


def test_ranks_that_begin_apart_on_an_empty_spool():
    found = find_split_start(WHOLE, CheckedRun([[seen(1, STEPS), seen(4, STEPS)]]))
    assert found.kind == "ranks" and "at step 4 on rank 1, and at step 1 on rank 0" in found.says
    assert find_split_start(WHOLE, CheckedRun([[seen(1, 7), seen(1, 6)], [seen(5, 9), seen(4, 9)]])) is None


# -- an allowance -----------------------------------------------------------------------------------------------------


def behind(count: int, first: int, last: int) -> RankRecord:
    """Reads `count` samples again after its resume and goes on from there."""
    return seen(first, last, lambda step: [one - count for one in batch(step)], losses=lambda step: 7.0)


def test_an_allowance_is_honoured_counted_and_bounded():
    reference = history(seen(1, STEPS + 4))
    result, _ = judged(history(seen(1, 7), behind(3, 5, STEPS + 4)), reference, allowance=3)
    assert result.ok and not result.exact
    assert (result.again, result.skipped, result.allowed, result.again_examples) == (3, 0, 3, (13, 14, 15))
    result, found = judged(history(seen(1, 7), behind(3, 5, STEPS + 4)), reference, allowance=2)
    assert not result.ok and found == ["position"]
    # Two resumes may use it twice.
    killed = history(seen(1, 7), behind(3, 5, 9), behind(6, 9, STEPS + 4))
    assert judged(killed, reference, allowance=3)[0].again == 6
    assert judged(killed, reference, allowance=3)[0].ok and not judged(killed, reference, allowance=2)[0].ok


def test_compare_counts_skipped_samples_against_the_allowance():
    reference = history(seen(1, STEPS + 4))
    killed = history(seen(1, 7), behind(-3, 5, STEPS + 4))
    result, _ = judged(killed, reference, allowance=3)
    assert result.ok and (result.again, result.skipped, result.skipped_examples) == (0, 3, (16, 17, 18))
    assert not judged(killed, reference, allowance=2)[0].ok


def test_a_loop_that_ends_at_its_last_step_is_behind_there_and_skips_nothing():
    result, _ = judged(history(seen(1, 7), behind(3, 5, STEPS)), allowance=3)
    assert result.ok and (result.again, result.skipped) == (3, 0)


def test_length_of_the_reference_decides_nothing():
    """One step late, and stopped at the last step, beside a reference that came to the next epoch meanwhile."""

    def epoch(step: int) -> tuple[int, ...]:
        return batch((step - 1) % (STEPS + 1) + 1)

    late = seen(6, STEPS, lambda step: epoch(step - 1))
    for reference_ends in (STEPS, STEPS + 1, STEPS + 6, 3 * STEPS):
        result, found = judged(history(seen(1, 5, epoch), late), history(seen(1, reference_ends, epoch)))
        assert not result.ok and found == ["position"]
        assert (result.again, result.skipped) == (SIZE, 0), reference_ends


def test_allowance_excuses_no_start_that_did_not_resume():
    reference = history(seen(1, STEPS + 4))
    early = history(seen(1, 7, lambda step: [one - 1 for one in batch(step)]), seen(5, STEPS + 4))
    assert not judged(early, reference, allowance=100)[0].ok
    # Other losses on the same samples are not what an allowance is for.
    losses = history(seen(1, 7), seen(5, STEPS + 4, losses=lambda step: 7.0))
    assert not judged(losses, reference, allowance=100)[0].ok


def test_histories_survive_their_record():
    line = msgspec.json.encode(seen(1, 1).observations[1])
    assert msgspec.json.decode(line, type=Observation) == seen(1, 1).observations[1]
