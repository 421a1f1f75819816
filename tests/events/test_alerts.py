"""When failures are an alert, what waits to be told, and what is news: pure, by a clock of ours."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from support.inventories import checkpoint, facts, part

from tierd.core.event_kinds import EVENT_KINDS, MORE_EVENTS, SELECTABLE_KINDS, USUAL_KINDS, Event
from tierd.core.planning.place import Place
from tierd.events.alerts import Alerts
from tierd.events.notifier import Outbox
from tierd.events.save_events import NewCheckpoints

WORKER = ("worker", "s3")


class Reported:
    """Alerts of strings, with a clock: `fail` and `work` give what is told."""

    def __init__(self) -> None:
        self.alerts: Alerts[str] = Alerts()
        self.now = 1000.0

    def fail(self, subject: str = "a", thing: tuple[str, str] = WORKER, after: float = 1.0) -> str:
        self.now += after
        reported = self.alerts.record_failure(
            thing, "flush", "s3", subject, f"no {subject}", self.now, f"at {self.now:.0f}"
        )
        return f"{reported[0].tries} tries of {reported[0].subject}{', new' * reported[1]}" if reported else ""

    def work(self, subject: str | None = None, *, others: bool = True) -> str:
        over = self.alerts.record_success(WORKER, subject, clears_siblings=others)
        return f"{over.subject} after {over.tries}" if over else ""


def test_third_failure_in_a_row_raises_an_alert_once_and_its_end_is_reported() -> None:
    one = Reported()
    assert [one.fail(), one.fail()] == ["", ""] and one.alerts.lasting_alerts() == []
    assert one.work("a") == ""  # two are none, and it begins anew
    assert [one.fail() for _ in range(5)] == ["", "", "3 tries of a, new", "", ""]
    (alert,) = one.alerts.lasting_alerts()
    assert (alert.tries, alert.why, alert.since, alert.began) == (5, "no a", "at 1003", 1003.0)
    assert one.work("a") == "a after 5" and one.alerts.lasting_alerts() == [] and one.work("a") == ""


def test_lasting_alert_is_repeated_ever_more_seldom() -> None:
    one = Reported()
    reported = [one.now for _ in range(30_000) if one.fail(after=60.0)]
    waits = [after - before for before, after in pairwise(reported)]
    assert waits[:4] == [600, 720, 1440, 2880] and waits[-1] == max(waits) == 86_400


def test_tier_that_takes_all_parts_but_a_single_bad_part_still_fails() -> None:
    one = Reported()
    for _ in range(2):
        assert one.fail("bad") == "" and one.work("good") == ""
    assert one.fail("bad") == "3 tries of bad, new"
    assert one.work("good") == "" and one.work("good") == ""
    assert one.work("bad") == "bad after 3"


def test_a_tier_that_takes_nothing_fails_whichever_part_it_is() -> None:
    one = Reported()
    assert [one.fail("a"), one.fail("b"), one.fail("c")] == ["", "", "3 tries of c, new"]
    assert one.work("looking", others=False) == ""  # that it can be looked at says nothing of that
    assert one.fail("a") == "" and one.work("b") == "a after 4"
    assert one.fail("a") == "3 tries of a, new"  # of its own
    assert one.work() == "a after 3"  # nothing is left that failed


def test_a_place_that_can_be_looked_at_again_works() -> None:
    one = Reported()
    assert [one.fail("looking") for _ in range(3)][-1] == "3 tries of looking, new"
    assert one.work("looking", others=False) == "looking after 3"
    assert [one.fail("a"), one.fail("a", ("worker", "nfs")), one.fail("a"), one.fail("a", ("worker", "nfs"))] == [
        ""
    ] * 4


# -- what waits -------------------------------------------------------------------------------------------------------


def event(what: str = "durable", number: int = 0) -> Event:
    return Event(at="", what=what, place="s3", subject=str(number), why="")


def taken(box: Outbox, now: float) -> list[object]:
    found = []
    while (one := box.take(now)) is not None:
        found.append(int(one.subject) if isinstance(one, Event) else dict(one))
    return found


def test_events_beyond_the_rate_are_held_back_counted_and_sent_as_a_summary() -> None:
    box = Outbox(USUAL_KINDS, per_minute=3)
    for number in range(10):
        box.offer(event("corrupt" if number == 7 else "durable", number), 100.0 + number)
    assert taken(box, 110.0) == [0, 1, 2] and box.held_back == 7
    assert box.wait_s(110.0) == 50.0 and taken(box, 159.0) == []
    assert taken(box, 160.0) == [{"durable": 6, "corrupt": 1}] and box.wait_s(160.0) is None
    for number in range(3):  # that was one of this minute's
        box.offer(event(number=number), 161.0)
    assert taken(box, 161.0) == [0, 1] and box.held_back == 8 and box.wait_s(161.0) == 59.0


def test_alerts_are_never_held_back_and_make_room() -> None:
    box = Outbox(USUAL_KINDS, per_minute=1000, room=3)
    for number in range(4):
        box.offer(event(number=number), 0.0)
    box.offer(event("failing", 9), 0.0)
    assert len(box) == 3 and box.overflowed == 2 and box.unreported_drops == Counter(durable=2)
    assert taken(box, 0.0) == [1, 2, 9]
    tight = Outbox(USUAL_KINDS, per_minute=1)
    for number, what in enumerate(["durable", "durable", "failing", "works again"]):
        tight.offer(event(what, number), 0.0)
    assert taken(tight, 0.0) == [0, 2, 3] and tight.held_back == 1


def test_only_chosen_events_are_sent_and_others_are_not_counted() -> None:
    box = Outbox(["failing"], per_minute=1)
    assert not box.offer(event(), 0.0) and box.offer(event("failing", 1), 0.0)
    assert (
        taken(box, 0.0) == [1]
        and not box.unreported_drops
        and MORE_EVENTS not in SELECTABLE_KINDS
        and "flushed" not in USUAL_KINDS
    )
    assert {"alert", "error", "info"} == {kind.level for kind in EVENT_KINDS.values()}


def test_queued_events_are_sent_at_once_at_the_end() -> None:
    box = Outbox(USUAL_KINDS, per_minute=1)
    for number in range(3):
        box.offer(event(number=number), 0.0)
    assert isinstance(box.take(0.0, last=True), Event) and box.take(0.0, last=True) == Counter(durable=2)
    assert box.take(0.0, last=True) is None


# -- what is new ------------------------------------------------------------------------------------------------------


def place(*parts) -> Place:
    return Place.of({one: facts() for one in parts})


def test_a_part_is_news_once_and_not_at_the_first_look_nor_when_it_was_fetched() -> None:
    first_seen, old, own, given, fetched = NewCheckpoints(), *(part(checkpoint(1, step), 0, 1) for step in range(4))
    assert first_seen.new_parts(place(old)) == []
    assert first_seen.claim_new(given) and first_seen.claim_new(fetched)  # told when it was given; being fetched
    assert first_seen.new_parts(place(old)) == []  # a look that began before
    assert first_seen.new_parts(place(old, own, given, fetched)) == [own] and not first_seen.claim_new(own)
    assert first_seen.new_parts(place(own, given)) == [] and first_seen.new_parts(place(old, own, given)) == [old]


def test_a_part_that_is_observed_while_it_is_persisted_is_left_to_its_hand_off() -> None:
    first_seen, given = NewCheckpoints(), part(checkpoint(1, 1), 0, 1)
    assert first_seen.new_parts(place()) == []
    first_seen.set_persisting(given, True)
    assert first_seen.new_parts(place(given)) == [] and first_seen.claim_new(given)
    first_seen.set_persisting(given, False)
    assert first_seen.new_parts(place(given)) == [] and not first_seen.claim_new(given)


def test_a_part_whose_hand_off_failed_after_it_was_there_is_news_once() -> None:
    first_seen, kept, withdrawn = NewCheckpoints(), *(part(checkpoint(1, step), 0, 1) for step in (1, 2))
    assert first_seen.new_parts(place()) == []
    for one in (kept, kept, withdrawn):  # a trainer that connected again may hand a part over twice
        first_seen.set_persisting(one, True)
    assert first_seen.new_parts(place(kept, withdrawn)) == []
    first_seen.set_persisting(kept, False)
    assert first_seen.new_parts(place(kept, withdrawn)) == []
    first_seen.set_persisting(kept, False)
    first_seen.set_persisting(withdrawn, False)
    assert first_seen.new_parts(place(kept)) == [kept]  # the other one was taken back
    assert first_seen.new_parts(place(kept)) == [] and not first_seen.claim_new(kept)
    assert not (first_seen._persisting or first_seen._withheld)


def test_a_part_that_is_persisted_during_the_first_look_is_news() -> None:
    first_seen, given = NewCheckpoints(), part(checkpoint(1, 1), 0, 1)
    first_seen.set_persisting(given, True)
    assert first_seen.new_parts(place(given)) == [] and first_seen.claim_new(given)


def test_a_checkpoint_is_whole_once_where_its_rank_0_is() -> None:
    one, two = checkpoint(1, 100), checkpoint(1, 200)
    here, there = place(part(one, 0, 2)), place(part(two, 1, 2))
    first_seen = NewCheckpoints()
    assert (
        first_seen.newly_complete("s3", here, place(), 1.0)
        == []
        == first_seen.newly_complete("s3", here, place(part(one, 0, 2)), 2.0)
    )
    assert first_seen.newly_complete("s3", place(), place(part(one, 0, 2), part(one, 1, 2)), 4.0) == [
        (one, 3.0)
    ]  # pruned here by then
    assert first_seen.newly_complete("s3", here, place(part(one, 0, 2)), 5.0) == []  # quarantined,
    assert first_seen.newly_complete("s3", here, place(part(one, 0, 2), part(one, 1, 2)), 6.0) == []  # and repaired
    assert (
        first_seen.newly_complete("nfs", here, place(part(one, 0, 2), part(one, 1, 2)), 6.0) == []
    )  # was so when it was first seen
    assert first_seen.newly_complete("s3", there, place(), 7.0) == []
    assert (
        first_seen.newly_complete("s3", there, place(part(two, 0, 2), part(two, 1, 2)), 8.0) == []
    )  # another node tells
