"""Ages of checkpoints of launches whose clocks are wrong, judged by histories whose true times are known."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from tierd.core.retention.retention_verdicts import Ages, Order

DAY = 86_400.0
YEAR = 365 * DAY
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def history(starts: list[float], wrong_by: dict[int, float], minutes: int = 3) -> list[tuple[Order, datetime, float]]:
    """The checkpoints of launches that start at `starts` (seconds): name, time by its clock, and true time."""
    return [
        (("run", f"{launch:03}", 10 * launch + at), BEGIN + timedelta(seconds=true + wrong_by.get(launch, 0.0)), true)
        for launch, start in enumerate(starts)
        for at in range(minutes)
        for true in [start + 60.0 * at]
    ]


def ages_of(made: list[tuple[Order, datetime, float]]) -> list[tuple[float, float]]:
    """The age that counts and the true age of each."""
    ages = Ages((order, created) for order, created, _ in made)
    return [(ages.age_s(order, created), made[-1][2] - true) for order, created, true in made]


def test_age_never_exceeds_the_true_age_in_random_histories_with_two_wrong_clocks():
    for seed in range(3000):
        rng = random.Random(seed)
        count = rng.randint(2, 8)
        starts, at = [], 0.0
        for _ in range(count):
            starts.append(at)
            at += 600.0 + rng.choice([0.0, 60.0, DAY, 30 * DAY]) * rng.random()
        wrong = {launch: rng.uniform(-1, 1) * rng.choice([60.0, DAY, YEAR]) for launch in rng.sample(range(count), 2)}
        for age_s, true_s in ages_of(history(starts, wrong)):
            assert -1e-3 <= age_s <= true_s + 1e-3, f"seed {seed}: {age_s} s of {true_s} s"


def test_pause_counts_once_two_launches_before_and_two_after_confirm_it():
    """docs/explanation/deletion.md: two pauses do not count, so the rest of a right history ages as it is."""
    starts = [0.0, 600.0, 1200.0, 90 * DAY, 90 * DAY + 600.0, 90 * DAY + 1200.0]
    age_s, true_s = ages_of(history(starts, {}))[0]
    assert true_s - 3600 < age_s <= true_s


def test_all_pauses_but_two_count_in_a_right_history():
    days = [3, 1, 4, 1, 5, 9, 2, 6]
    starts = [sum(days[:at]) * DAY for at in range(len(days) + 1)]
    age_s, true_s = ages_of(history(starts, {}))[0]
    assert true_s - age_s == pytest.approx(max(3 + 1, 3 + 6, 2 + 6) * DAY, abs=600)


def test_time_within_launches_always_counts():
    made = history([0.0, 10 * DAY], {}, minutes=120)
    age_s, _ = ages_of(made)[0]
    assert age_s == pytest.approx(2 * 119 * 60)


def test_ages_never_grow_when_checkpoints_are_deleted():
    for seed in range(500):
        rng = random.Random(seed)
        starts = sorted(rng.uniform(0, 90 * DAY) for _ in range(rng.randint(2, 6)))
        wrong = {launch: rng.uniform(-YEAR, YEAR) for launch in rng.sample(range(len(starts)), 2)}
        made = history(starts, wrong)
        left = [one for one in made[:-1] if rng.random() < 0.6] + made[-1:]
        before = Ages((order, created) for order, created, _ in made)
        after = Ages((order, created) for order, created, _ in left)
        for order, created, _ in left:
            assert after.age_s(order, created) <= before.age_s(order, created) + 1e-3, f"seed {seed}"


def ages_by_files(made: list[tuple[Order, datetime, float]]) -> list[tuple[float, float]]:
    """The age that counts of a watched run's checkpoint, and the true age of each."""
    ages = Ages(((order, created) for order, created, _ in made), by_files=True)
    return [(ages.age_s(order, created), made[-1][2] - true) for order, created, true in made]


def watched_history(rng: random.Random, wrong_s: dict[int, float]) -> list[tuple[Order, datetime, float]]:
    """The checkpoints of one attempt, whose times are wrong by these seconds."""
    made, true = [], 0.0
    for step in range(max(wrong_s, default=0) + 1 + rng.randint(0, 4)):
        true += 600.0 * rng.uniform(0.5, 2.0)
        made.append((("run", "000", step), BEGIN + timedelta(seconds=true + wrong_s.get(step, 0.0)), true))
    return made


def test_age_in_watched_run_never_exceeds_the_true_age_beside_one_wrong_time() -> None:
    for seed in range(3000):
        rng = random.Random(seed)
        made = watched_history(rng, {rng.randint(0, 9): rng.uniform(-1, 1) * rng.choice([60.0, DAY, YEAR])})
        for age_s, true_s in ages_by_files(made):
            assert 0.0 <= age_s <= true_s + 1e-3, f"seed {seed}: {age_s} s of {true_s} s"


def test_age_in_watched_run_never_exceeds_the_true_age_after_its_clock_was_set() -> None:
    for seed in range(3000):
        rng = random.Random(seed)
        first, by_s = rng.randint(0, 9), rng.uniform(-1, 1) * rng.choice([60.0, DAY, YEAR])
        made = watched_history(rng, dict.fromkeys(range(first, 12), by_s))
        for age_s, true_s in ages_by_files(made):
            assert 0.0 <= age_s <= true_s + 1e-3, f"seed {seed}: {age_s} s of {true_s} s"


def test_age_in_watched_run_never_exceeds_the_true_age_of_wrong_times_apart_from_each_other() -> None:
    """A node whose clock is ahead writes every third checkpoint."""
    for seed in range(500):
        rng = random.Random(seed)
        made = watched_history(rng, dict.fromkeys(range(rng.randint(0, 2), 12, 3), rng.uniform(0, 2 * DAY)))
        for age_s, true_s in ages_by_files(made):
            assert 0.0 <= age_s <= true_s + 1e-3, f"seed {seed}: {age_s} s of {true_s} s"


def test_right_times_of_watched_run_count_but_for_the_longest_step() -> None:
    for seed in range(500):
        made = watched_history(random.Random(seed), {9: 0.0})
        true_times = [true for *_, true in made]
        for index, (age_s, true_s) in enumerate(ages_by_files(made)):
            steps = [after - before for before, after in pairwise(true_times[index:])]
            assert age_s == pytest.approx(true_s - max(steps, default=0.0)), f"seed {seed}"
