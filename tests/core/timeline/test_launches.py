"""Two launches of a run at once: who is warned, and what each of them keeps."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from support.inventories import config, held, part, remade

from tierd.core.ids import CheckpointId
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Flush, Place, Prune, Trainer
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.run_report import make_report
from tierd.core.timeline.concurrent_launches import concurrency_warning, concurrent_launches, list_leases, live_launches

LAST2 = RetentionPolicy(keep_last=2)


def launch(minute: int) -> str:
    """The name of a launch of that minute of the day."""
    at = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
    return f"{int(at.timestamp() * 1000):012x}-{minute:08x}"


A, B = launch(0), launch(30)
FIRST, SECOND = ([CheckpointId("r", one, begun + step) for step in range(1, 6)] for one, begun in ((A, 0), (B, 30)))


def saved(place: Place, attempt: str, *minutes: int, rank: int = 0) -> Place:
    """`place` with a launch's checkpoints, each made in the minute that is its step."""
    made = {
        part(CheckpointId("r", attempt, minute), rank, rank + 1): ManifestFacts(
            datetime(2026, 1, 1, 0, minute, tzinfo=UTC), {}, None, 10, 8, frozenset()
        )
        for minute in minutes
    }
    return remade(place, {**held(place), **made}, alive=place.alive)


def one_node(*trainers: Trainer) -> Inventory:
    """Both launches saved five steps here, and the tier has all of them."""
    everything = saved(saved(Place(), A, *range(1, 6)), B, *range(31, 36))
    return Inventory(replace(everything, alive={"r": trainers} if trainers else {}), {"a": everything})


def pruned(world: Inventory, place: str) -> list[CheckpointId]:
    found = plan(world, config(LAST2, spool=LAST2), {}, 0.0)
    return [action.checkpoint for action in found if isinstance(action, Prune) and action.tier == place]


@pytest.mark.parametrize("place", [SPOOL, "a"])
def test_live_launch_keeps_the_same_checkpoints_as_it_would_alone(place):
    both = one_node(Trainer(A, 0, 11), Trainer(B, 0, 22))
    assert pruned(both, place) == [*FIRST[:3], *SECOND[:3]]
    assert pruned(one_node(Trainer(B, 0, 22)), place) == [*FIRST, *SECOND[:3]], "its trainer has ended"
    assert pruned(one_node(), place) == [*FIRST, *SECOND[:3]]


def test_report_names_a_live_launch_as_the_reason_to_keep():
    both = one_node(Trainer(A, 0, 11), Trainer(B, 0, 22))
    reasons = str(make_report(both, config(LAST2, spool=LAST2), "r"))
    assert f"launch {A} lives, beside a later one" in reasons


def test_unsent_checkpoint_of_a_live_launch_is_sent_though_newer_checkpoints_are_there():
    both = one_node(Trainer(A, 0, 11), Trainer(B, 0, 22))
    there = replace(both, tiers={"a": saved(Place(), B, *range(31, 36))})
    found = plan(there, config(LAST2, spool=LAST2), {}, 0.0)
    sent = {action.part.checkpoint for action in found if isinstance(action, Flush)}
    assert sent == set(FIRST[3:])
    assert not set(pruned(there, SPOOL)) & set(FIRST[3:])


def test_two_launches_of_a_rank_are_rivals_and_restored_ranks_of_a_launch_are_not():
    found = concurrent_launches(one_node(Trainer(A, 0, 11), Trainer(B, 0, 22)), "r")
    assert [(one.attempt, one.place, one.pids) for one in found] == [(A, SPOOL, (11,)), (B, SPOOL, (22,))]
    assert "2 launches of run r" in concurrency_warning(found) and "process 11" in concurrency_warning(found)
    alone = one_node(Trainer(A, 0, 11))
    assert (
        concurrent_launches(replace(alone, spool=replace(alone.spool, ended_launches={"r": frozenset({B})})), "r") == ()
    )
    assert concurrent_launches(one_node(Trainer(A, 1, 11), Trainer(B, 0, 22)), "r") == (), (
        "rank 1 has not saved since it restored"
    )


# -- two nodes and one tier -------------------------------------------------------------------------------------------


def test_node_of_the_later_launch_spares_an_earlier_launch_that_saved_after_the_later_began():
    spool = saved(Place(alive={"r": (Trainer(B, 0, 22),)}), B, 31, 32, 33)
    going_on = Inventory(spool, {"a": saved(saved(Place(), A, 10, 20, 32), B, 31, 32, 33)})
    assert [(one.attempt, one.place) for one in concurrent_launches(going_on, "r")] == [(A, "a"), (B, SPOOL)]
    assert "on another node" in concurrency_warning(concurrent_launches(going_on, "r"))
    assert [one.step for one in pruned(going_on, "a")] == [10, 31]
    ended = replace(going_on, tiers={"a": saved(saved(Place(), A, 10, 20), B, 31, 32, 33)})
    assert concurrent_launches(ended, "r") == (), "its last save was before the later launch began"
    assert [one.step for one in pruned(ended, "a")] == [10, 20, 31]
    here = replace(going_on, spool=replace(spool, ended_launches={"r": frozenset({A})}))
    assert concurrent_launches(here, "r") == (), "it was this node's, and has no trainer any more"
    assert [one.step for one in pruned(here, "a")] == [10, 20, 32, 31]


def test_the_node_of_the_earlier_launch_keeps_its_own_in_its_spool_and_is_warned():
    spool = saved(Place(alive={"r": (Trainer(A, 0, 11),)}), A, 10, 20, 25)
    world = Inventory(spool, {"a": saved(saved(Place(), A, 10, 20, 25), B, 31, 32, 33)})
    assert [(one.attempt, one.place) for one in concurrent_launches(world, "r")] == [(A, SPOOL), (B, "a")]
    assert [one.step for one in pruned(world, SPOOL)] == [10]
    assert live_launches(world, "r", "a") == frozenset(), (
        "the other node cannot tell yet, and would delete what is sent"
    )


def test_another_nodes_ranks_of_the_same_launch_are_no_rivals():
    spool = saved(Place(alive={"r": (Trainer(A, 1, 11),)}), A, 10, rank=1)
    world = Inventory(spool, {"a": saved(Place(), B, 31)})  # rank 0 restored, and saved first
    assert concurrent_launches(world, "r") == ()


# -- how long a launch on another node counts as living ---------------------------------------------------------------


def at(minute: int) -> float:
    return datetime(2026, 1, 1, 0, tzinfo=UTC).timestamp() + 60 * minute


@pytest.mark.parametrize(
    ("minutes", "ends"),
    [
        ((32,), 32 + 60),  # an hour after its last checkpoint
        ((32, 33), 33 + 60),
        ((10, 59), 59 + 3 * 49),  # or thrice what lay between its last two
    ],
)
def test_the_lease_of_a_launch_on_another_node_ends_without_new_checkpoints(minutes, ends):
    spool = saved(Place(alive={"r": (Trainer(B, 0, 22),)}), B, 31)
    world = Inventory(spool, {"a": saved(saved(Place(), A, *minutes), B, 31)})
    assert [one.attempt for one in concurrent_launches(world, "r", at(ends - 1))] == [A, B]
    assert concurrent_launches(world, "r", at(ends + 1)) == ()
    assert concurrent_launches(world, "r", at(-60)) != (), "a clock that was set back ends nothing"


def test_earlier_launch_is_warned_while_any_checkpoint_of_the_later_launch_is_there():
    """A resume goes on from the later one, whether it lives or not."""
    spool = saved(Place(alive={"r": (Trainer(A, 0, 11),)}), A, 10, 20)
    world = Inventory(spool, {"a": saved(saved(Place(), A, 10, 20), B, 31, 32)})
    assert [(one.attempt, one.place) for one in concurrent_launches(world, "r", at(10**6))] == [(A, SPOOL), (B, "a")]


# -- one attempt that two nodes save ----------------------------------------------------------------------------------


def test_other_node_that_saves_the_same_rank_of_the_same_attempt_is_detected():
    spool = replace(saved(Place(alive={"r": (Trainer(A, 0, 11),)}), A, 1, 2), committed=frozenset({part(FIRST[1])}))
    alone = Inventory(spool, {"a": saved(Place(), A, 1, 2)})
    assert concurrent_launches(alone, "r") == ()
    same_step = saved(Place(), A, 1)
    other = ManifestFacts(datetime(2026, 1, 1, 0, 9, tzinfo=UTC), {}, None, 10, 8, frozenset())
    same_step = remade(same_step, {**held(same_step), part(FIRST[1]): other})
    for there in (same_step, saved(Place(), A, 1, 2, 3)):
        found = concurrent_launches(replace(alone, tiers={"a": there}), "r")
        assert [(one.attempt, one.place, one.pids) for one in found] == [(A, SPOOL, (11,)), (A, "a", ())]
        assert f"{A} (process 11 on this node), {A} (on another node" in concurrency_warning(found)
        assert f"Two nodes save the same rank of attempt {A}" in concurrency_warning(found)


def test_a_rank_of_one_attempt_with_two_world_sizes_on_this_node_is_two_launches():
    twins = Trainer(A, 0, 11), Trainer(A, 0, 22, world=2), Trainer(A, 1, 23, world=2)
    spool = saved(Place(alive={"r": twins}), A, 1)
    found = concurrent_launches(Inventory(spool, {}), "r")
    assert [(one.attempt, one.place, one.pids) for one in found] == [(A, SPOOL, (11, 22, 23))]
    assert (
        f"two launches of run r save the same rank of one attempt at the same time: {A} (process"
        in concurrency_warning(found)
    )
    assert concurrent_launches(Inventory(replace(spool, alive={"r": twins[1:]}), {}), "r") == ()


def test_deleted_checkpoints_of_this_node_are_not_another_nodes():
    there = {"a": saved(Place(), A, 1, 2, 3)}
    spool = saved(Place(alive={"r": (Trainer(A, 0, 11),)}), A, 1)
    for committed in (frozenset(), frozenset({part(FIRST[2])})):
        assert concurrent_launches(Inventory(replace(spool, committed=committed), there), "r") == ()
    back = replace(saved(spool, A, 2), committed=frozenset({part(FIRST[1])}))  # step 3 was saved before step 2
    facts = ManifestFacts(datetime(2026, 1, 1, 0, 0, tzinfo=UTC), {}, None, 10, 8, frozenset())
    there = {"a": remade(there["a"], {**held(there["a"]), part(FIRST[2]): facts})}
    assert concurrent_launches(Inventory(back, there), "r") == ()


def test_leases_list_launches_and_ranks_in_a_line_each():
    trainers = (Trainer(A, 0, 11, at(1)), Trainer(A, 1, 12, at(2)))
    found = list_leases(Inventory(saved(Place(alive={"r": trainers, "q": (Trainer(B, 0, 0, at(30)),)}), A, 3), {}))
    assert [(one.run, one.rank, one.pid, one.renewed[11:16]) for one in found] == [
        ("q", 0, 0, ""),
        ("r", 0, 11, "00:03"),
        ("r", 1, 12, "00:03"),
    ]
