"""Prunes in one pass, and when their backlog is one that grows."""

from __future__ import annotations

import itertools

import pytest
from support.inventories import attempt, facts
from support.world import part

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.place import SPOOL, Discard, Flush, Place, Prune
from tierd.core.planning.prune_batches import MAX_BATCH_CHECKPOINTS, MAX_BATCH_PARTS, PruneBacklog, prune_batch


def prune(step: int, tier: str = "a", run: str = "r") -> Prune:
    return Prune(CheckpointId(run, attempt(1), step), tier, ("not wanted",))


def test_a_pass_takes_all_of_one_tier_and_run_and_nothing_else():
    first = prune(1)
    others = [Flush(part(9), "a"), prune(1), prune(2, SPOOL), prune(3), prune(4, "b"), prune(5, run="q"), prune(6)]
    assert prune_batch(first, [*others, Discard("stage")], Place()) == [first, prune(3), prune(6)]


def test_a_pass_is_bounded():
    many = [prune(step) for step in range(1000)]
    assert prune_batch(many[0], many, Place()) == many[:MAX_BATCH_CHECKPOINTS]
    ranks = MAX_BATCH_PARTS // 2 + 1
    place = Place.of({PartId(one.checkpoint, rank, ranks): facts() for one in many[:5] for rank in range(ranks)})
    assert prune_batch(many[0], many[:5], place) == many[:1], "two would be more parts than a pass takes"
    assert prune_batch(many[7], many, place)[:2] == [many[7], many[0]]


def alarms(waiting: list[float], every: float = 10.0) -> list[float]:
    """When a backlog that is counted every few seconds begins, or ceases, to be one that grows, in minutes."""
    backlog = PruneBacklog()
    found = [(number * every / 60, backlog.record(int(count), number * every)) for number, count in enumerate(waiting)]
    return [at for (_, before), (at, grows) in itertools.pairwise(found) if before != grows]


def test_backlog_that_grows_for_ten_minutes_raises_an_alert():
    (begun,) = alarms([number / 2 for number in range(200)])
    assert 10 <= begun <= 12


@pytest.mark.parametrize(
    "waiting",
    [
        [0] * 400,
        [7] * 400,  # cannot be deleted: what keeps failing is told of by itself
        [number % 6 for number in range(400)],  # each pass takes what came
        [0] * 50 + [10_000 - 10 * number for number in range(400)],  # a policy was changed
        [number / 2 for number in range(55)] + [0] * 100,  # for nine minutes
    ],
    ids=["none", "the same", "saw", "shrinks", "nine minutes"],
)
def test_any_other_backlog_is_not(waiting):
    assert alarms(waiting) == []


def test_backlog_that_grows_between_passes_keeps_its_alert_until_it_is_empty():
    sawtooth = [number * 2 - number % 6 for number in range(150)]
    falling = [300 - 10 * number for number in range(31)]
    begun, over = alarms([*sawtooth, *falling])
    assert 10 <= begun <= 12 and over > 25
