"""The names of checkpoints of watched runs: from steps and times alone, the same on every node."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tierd.core.ids import CheckpointId
from tierd.watching.checkpoint_names import KnownCheckpoints, checkpoint_time, name_unit

RUN = "r"


def at(second: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)


def taken(
    *units: tuple[int, int], known: KnownCheckpoints | None = None
) -> tuple[KnownCheckpoints, list[CheckpointId]]:
    """Take units, each a step and a time, in this order."""
    known, names = known or KnownCheckpoints(), []
    for step, second in units:
        named = name_unit(RUN, f"checkpoint-{step}", step, at(second), known)
        assert named.checkpoint not in known.created
        known = known.with_checkpoint(named.checkpoint, at(second), named.origin)
        names.append(named.checkpoint)
    return known, names


def test_program_that_continues_has_a_single_attempt() -> None:
    known, names = taken((100, 10), (200, 20), (300, 30))
    assert len({one.attempt for one in names}) == 1
    assert known.origins == {names[0].attempt: None}


def test_units_that_lay_there_before_are_of_the_same_attempt_in_any_order() -> None:
    _, names = taken((300, 30), (100, 10), (200, 20))
    assert len({one.attempt for one in names}) == 1


def test_program_that_rolled_back_begins_an_attempt_from_the_checkpoint_below() -> None:
    known, names = taken((100, 10), (200, 20), (300, 30), (300, 50), (400, 60))
    assert names[3].attempt == names[4].attempt > names[0].attempt
    assert known.origins[names[3].attempt] == names[1]
    assert max(names) == names[4]


def test_a_program_that_began_anew_has_no_origin() -> None:
    known, names = taken((200, 20), (300, 30), (100, 50))
    assert names[2].attempt > names[0].attempt and known.origins[names[2].attempt] is None


def test_going_back_twice_follows_the_timeline() -> None:
    known, names = taken((100, 10), (200, 20), (200, 30), (150, 40))
    assert known.origins[names[2].attempt] == names[0]
    assert known.origins[names[3].attempt] == names[0]
    assert sorted(names) == [names[0], names[1], names[2], names[3]]


def test_older_launch_that_is_listed_later_is_not_newer() -> None:
    known, names = taken((100, 100), (200, 200), (700, 50))
    assert names[2].attempt < names[0].attempt
    assert max(names) == names[1] and known.origins[names[2].attempt] is None


def test_unit_that_was_listed_later_is_newer_at_any_time() -> None:
    known, names = taken((10, 100), (20, 200))
    for step in (30, 20, 15):
        found = name_unit(RUN, f"checkpoint-{step}", step, at(50), known, after=names[1])
        assert found.checkpoint > names[1] and not found.sorts_below_taken
        assert (found.checkpoint.attempt == names[0].attempt) == (step == 30)


def test_units_that_were_listed_together_keep_the_order_of_their_times() -> None:
    known, names = taken((10, 1000), (20, 2000), (40, 50))
    assert max(names) != names[2]
    known, names = taken((10, 1000))
    first = name_unit(RUN, "checkpoint-40", 40, at(50), known, after=names[0])
    known = known.with_checkpoint(first.checkpoint, at(50), first.origin)
    found = name_unit(RUN, "checkpoint-30", 30, at(40), known, after=names[0])
    assert names[0] < found.checkpoint < first.checkpoint
    rolled_back = name_unit(RUN, "checkpoint-5", 5, at(40), known, after=names[0])
    assert rolled_back.sorts_below_taken and rolled_back.checkpoint < names[0]


def test_equal_times_are_of_one_attempt() -> None:
    _, names = taken((100, 10), (200, 10), (50, 10))
    assert len({one.attempt for one in names}) == 1


def test_two_nodes_give_the_same_names() -> None:
    assert taken((100, 10), (200, 20), (100, 30)) == taken((100, 10), (200, 20), (100, 30))


def test_a_name_of_which_nothing_is_read_is_not_given_again() -> None:
    known, names = taken((100, 10))
    unread = CheckpointId(RUN, names[0].attempt, 200)
    other = name_unit(
        RUN, "checkpoint-200", 200, at(20), KnownCheckpoints(known.created, known.origins, frozenset({unread}))
    )
    assert other.checkpoint != unread


def test_the_same_unit_is_known_by_its_step_and_time() -> None:
    known, _ = taken((100, 10))
    assert [len(known.find(*one)) for one in ((100, at(10)), (100, at(11)), (101, at(10)))] == [1, 0, 0]


def test_a_time_keeps_its_microseconds_and_one_out_of_range_is_1970() -> None:
    assert checkpoint_time(1_767_225_600_123_456_789).isoformat() == "2026-01-01T00:00:00.123456+00:00"
    assert (
        checkpoint_time((1 << 63) - 1).year
        == checkpoint_time(-1).year
        == checkpoint_time(3_155_760_000 * 10**9).year
        == 1970
    )
    assert checkpoint_time(3_155_760_000 * 10**9 - 1).year == 2069


def test_an_attempt_after_the_latest_time_sorts_last() -> None:
    latest = checkpoint_time(3_155_760_000 * 10**9 - 1)
    first = name_unit(RUN, "checkpoint-20", 20, latest, KnownCheckpoints())
    known = KnownCheckpoints().with_checkpoint(first.checkpoint, latest, None)
    assert name_unit(RUN, "checkpoint-10", 10, at(10), known, after=first.checkpoint).checkpoint > first.checkpoint
