"""When each copy is read again, and by whom: within the period, evenly, whatever is forgotten or restarted."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.inventories import EPOCH, checkpoint, facts, held, part, remade, solo
from support.seeds import examples

from tierd.core.planning.background_schedule import ScrubbedCopy, base_copies, count_overdue, scrub_agenda
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Place

DAY = 86_400.0
PERIOD = 30 * DAY
NOW = EPOCH.timestamp() + 1000 * DAY
MADE = EPOCH.timestamp()


def spool(*steps: int, rank: int = 0, ranks: int = 1) -> Place:
    return Place.of({part(checkpoint(1, step), rank, ranks): facts(step) for step in steps})


@given(st.floats(0, 400 * DAY), st.floats(60, 400 * DAY), st.integers(0, 10**6))
def test_every_copy_is_due_after_it_was_verified_and_well_within_the_period(age, period, step):
    where = spool(step)
    copy = ScrubbedCopy(SPOOL, next(where.parts()))
    (due,) = scrub_agenda(Inventory(where, {}), {copy: NOW - age}, period, NOW)
    assert due.verified_at == NOW - age < due.due_at <= NOW - age + 0.91 * period


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=60), st.integers(1, 30))
def test_working_off_the_agenda_keeps_every_gap_within_the_period(pauses, steps):
    """A daemon that is up now and then, never away for more than a day, reads what is due each time."""
    where = spool(*range(steps))
    now, remembered = NOW, {ScrubbedCopy(SPOOL, one): NOW for one in where.parts()}
    for pause in pauses:
        now += min(pause, 1.0) * DAY
        for due in scrub_agenda(Inventory(where, {}), remembered, PERIOD, now):
            assert due.verified_at + PERIOD >= now
            if due.due_at <= now:
                remembered[due.copy] = now
    assert not count_overdue(scrub_agenda(Inventory(where, {}), remembered, PERIOD, now), PERIOD, now)


def test_a_year_reads_every_copy_thirteen_times_and_no_day_stands_out():
    where = spool(*range(300))
    remembered = {ScrubbedCopy(SPOOL, one): NOW for one in where.parts()}
    read, days = Counter(), Counter()
    for day in range(365):
        for due in scrub_agenda(Inventory(where, {}), remembered, PERIOD, NOW + day * DAY):
            if due.due_at <= NOW + day * DAY:
                remembered[due.copy] = NOW + day * DAY
                read[due.copy] += 1
                days[day] += 1
    assert len(read) == 300 and set(read.values()) <= {13, 14}
    assert max(days.values()) <= 3 * 300 / 27


def test_copy_without_a_record_counts_as_verified_when_made_and_a_future_record_is_ignored():
    where = spool(0)
    copy = ScrubbedCopy(SPOOL, next(where.parts()))
    world = Inventory(where, {})
    assert scrub_agenda(world, {}, PERIOD, MADE + DAY)[0].verified_at == MADE
    assert scrub_agenda(world, {copy: MADE + 2 * DAY}, PERIOD, MADE + DAY)[0].verified_at == MADE
    assert scrub_agenda(world, {copy: float("inf")}, PERIOD, MADE + DAY)[0].verified_at == MADE
    assert scrub_agenda(world, {copy: -1e18}, PERIOD, MADE + DAY)[0].verified_at == MADE
    (ahead,) = scrub_agenda(world, {}, PERIOD, MADE - DAY)  # by a clock that was wrong: soon, and not never
    assert ahead.verified_at == MADE - DAY - PERIOD and ahead.due_at <= MADE - DAY


def test_most_overdue_copy_is_first_and_the_agenda_of_a_single_place_can_be_asked_for():
    first, last = part(checkpoint(1, 1)), part(checkpoint(1, 2))
    world = Inventory(spool(1, 2), {"a": spool(1, 2)})
    remembered = {ScrubbedCopy(name, one): NOW - 100 * DAY for name in (SPOOL, "a") for one in (first, last)}
    remembered[ScrubbedCopy("a", last)] = NOW - 300 * DAY
    scrubs = scrub_agenda(world, remembered, PERIOD, NOW)
    assert scrubs[0].copy == ScrubbedCopy("a", last) and len(scrubs) == 4 == count_overdue(scrubs, PERIOD, NOW)
    assert {due.copy.place for due in scrub_agenda(world, remembered, PERIOD, NOW, SPOOL)} == {SPOOL}


def test_a_tier_that_does_not_answer_or_a_manifest_that_cannot_be_read_is_on_no_agenda():
    bad = part(checkpoint(1, 3))
    world = Inventory(remade(spool(1), {**held(spool(1)), bad: None}), {"a": None})
    assert [due.copy for due in scrub_agenda(world, {}, PERIOD, NOW)] == [ScrubbedCopy(SPOOL, part(checkpoint(1, 1)))]


def test_a_tier_that_was_added_is_on_the_agenda_at_once():
    copies = {due.copy for due in scrub_agenda(Inventory(spool(1), {"a": spool(1), "b": spool(1, 2)}), {}, PERIOD, NOW)}
    assert {copy.place for copy in copies} == {SPOOL, "a", "b"} and len(copies) == 4


def test_ranks_share_the_work_on_a_tier_and_leave_none_over():
    """Four ranks of an old attempt, two of the new: two nodes between them read each part of the tier once."""
    old = {part(checkpoint(1, step), rank, 4): facts(step) for step in (1, 2) for rank in range(4)}
    new = {part(checkpoint(2, 3), rank, 2): facts(3) for rank in range(2)}
    tier = Place.of({**old, **new})
    nodes = [Place.of({one: found for one, found in new.items() if one.rank == rank}) for rank in range(2)]
    read = [
        Counter(due.copy.part for due in scrub_agenda(Inventory(node, {"a": tier}), {}, PERIOD, NOW, "a"))
        for node in nodes
    ]
    assert read[0] + read[1] == Counter(list(tier.parts()))
    assert {one.rank for one in read[1]} == {1} and {one.rank for one in read[0]} == {0, 2, 3}


def test_another_runs_ranks_are_not_this_spools():
    other = solo(Place(), checkpoint(1, 1, run="other"))
    assert not scrub_agenda(Inventory(spool(1), {"a": other}), {}, PERIOD, NOW, "a")


@settings(max_examples=examples(40))
@given(st.integers(1, 12), st.integers(0, 10**6), st.sampled_from([0.25, 1.0, 5.0]))
def test_shared_chunk_that_outlives_its_copies_is_read_within_the_period_and_not_all_the_time(keep, first, interval):
    """Frozen weights: put once, named by each checkpoint from then on, of which only the newest few are kept."""
    frozen = checkpoint(1, first)
    remembered, steps, gaps, last = {ScrubbedCopy("a", part(frozen)): NOW}, [], [], NOW
    for number in range(1, int(200 / interval)):
        now = NOW + number * interval * DAY
        fresh = part(checkpoint(1, first + number))
        steps = [*steps, fresh][-keep:]
        place = Place.of({one: facts(0, bases=[frozen]) for one in steps})
        world = Inventory(place, {"a": place})
        remembered[ScrubbedCopy("a", fresh)] = now  # as it was flushed
        while scrubs := [due for due in scrub_agenda(world, remembered, PERIOD, now, "a") if due.due_at <= now]:
            copy = scrubs[0].copy
            remembered |= dict.fromkeys([copy, *base_copies(world, copy)], now)
            if now > last:
                gaps.append(now - last)
            last = now
    assert max(gaps) <= PERIOD + interval * DAY
    assert len(gaps) <= 25 + keep * 12  # 7.4 periods: one for each copy, and one for the frozen weights
