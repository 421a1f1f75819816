"""The last saves of each run: what each cost and when each tier had it, bounded."""

from __future__ import annotations

from datetime import datetime

from support.world import part

from tierd.events.journal import Journal
from tierd.events.save_history import SavePoint


def save(journal: Journal, step: int, run: str = "run", rank: int = 0, **members: object) -> None:
    journal.record("persisted", "local", part(step, run=run, rank=rank, world=2), "", **members)


def test_save_has_its_slowest_rank_s_times_and_each_tier_s() -> None:
    journal = Journal()
    save(journal, 10, rank=1, blocked_s=0.5, seconds=2.0, metrics={"loss": 1.0, "bad": None})
    save(journal, 10, rank=0, blocked_s=0.75, seconds=1.0, metrics={"loss": 1.0})
    journal.record("flushed", "s3", part(10), "", seconds=1.0)
    journal.record("durable", "s3", part(10).checkpoint, "", seconds=4.0)
    journal.record("durable", "nas", part(10).checkpoint, "", seconds=9.0)
    ((point),) = journal.saves.points()
    at, metrics = journal.events[0].at, {"loss": 1.0, "bad": None}
    expected = SavePoint("run", part(10).checkpoint.attempt, 10, at, 0.75, 2.0, {"s3": 4.0, "nas": 9.0}, metrics)
    assert point == expected
    ((checkpoint, saved_s),) = journal.saves.times_of("run")
    assert checkpoint == part(10).checkpoint and saved_s == datetime.fromisoformat(at).timestamp()


def test_save_without_a_trainer_s_report_has_no_times() -> None:
    journal = Journal()
    save(journal, 10)
    (point,) = journal.saves.points()
    assert (point.blocked_s, point.durable_s, point.tier_s) == (None, None, {})


def test_history_is_bounded() -> None:
    journal = Journal()
    for number in range(250):
        save(journal, number, metrics={f"m{index:02}": 0.0 for index in range(20)})
        save(journal, 1, run=f"run{number:03}")
    points = journal.saves.points()
    steps = [point.step for point in points if point.run == "run"]
    assert steps == list(range(50, 250)) and {len(point.metrics) for point in points} == {0, 8}
    assert len({point.run for point in points}) == 32
