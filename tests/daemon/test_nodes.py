"""Several nodes on one run, which cannot harm each other: one janitor, zombie launches, lost and returning nodes."""

from __future__ import annotations

import contextlib
from unittest.mock import AsyncMock

import pytest
from support.node_states import deterministic  # noqa: F401
from support.nodes import TIER, Node, Nodes, pruned
from support.world import attempt, part

from tierd.core.errors import StoreUnavailable
from tierd.core.planning.place import Flush


@pytest.mark.parametrize(
    "placing", [("A", "B"), ("B", "A"), ("A", "A", "B", "B"), ("D", "C", "B", "A"), ("B", "A", "C", "A")], ids="".join
)
async def test_only_rank_0s_node_prunes_and_every_node_is_at_rest_in_the_end(home, placing):
    nodes = Nodes(home, *sorted(set(placing)), keep=2)
    for step in range(1, 6):
        nodes.save(step, 1, placing)
    done = await nodes.settle()
    for step in range(6, 9):
        nodes.save(step, 1, placing)
        done += await nodes.settle()
    assert {who for who, _, _ in pruned(done)} == {placing[0]}
    assert nodes.tier.steps() == [(1, 7, True), (1, 8, True)]
    assert all(node.steps() == [(1, 7), (1, 8)] for node in nodes.alive())
    assert all([not await node.planned() for node in nodes.alive()])


@pytest.mark.parametrize("fails", [False, True])
async def test_node_sends_parts_of_the_checkpoint_that_another_node_is_sending(home, fails):
    """The newest there is by then is of no use while nobody sends its other parts."""

    async def next_of(node: Node) -> int:
        action = await node.daemon._loop.agenda.next_action(node.daemon.workers[TIER])
        assert isinstance(action, Flush)
        return action.part.checkpoint.step

    nodes = Nodes(home, "A", "B", keep=9)
    nodes.save(1, 1, "AB")
    await nodes.settle()
    for step in (2, 3):
        nodes.save(step, 1, "AB")
    chosen = []

    async def meanwhile():
        if nodes["A"].line.doing == "put" and any("/sending." in key for key in nodes.tier.keys) and not chosen:
            nodes.save(4, 1, "AB")
            chosen.append(await next_of(nodes["B"]))
            if fails:
                raise StoreUnavailable("no route")

    assert await next_of(nodes["A"]) == 3
    nodes["A"].line.meanwhile = meanwhile
    with pytest.raises(StoreUnavailable) if fails else contextlib.nullcontext():
        await nodes["A"].turn()
    assert chosen == [3]
    assert not [key for key in nodes.tier.keys if "/flushing/" in key], "it is over with the flush"
    nodes["A"].line.meanwhile = None
    assert await next_of(nodes["B"]) == (4 if fails else 3)


async def test_where_there_is_no_choice_nothing_is_announced(home):
    nodes = Nodes(home, "A", "B", keep=9)
    keys = []
    nodes["A"].line.meanwhile = nodes["B"].line.meanwhile = seen = AsyncMock(
        side_effect=lambda: keys.extend(key for key in nodes.tier.keys if "/sending." in key)
    )
    for step in (1, 2):
        nodes.save(step, 1, "AB")
        await nodes.settle()
    for step in (3, 4, 5):
        nodes.save(step, 1, "A")  # all of its ranks are here
    await nodes.settle()
    assert seen.called and not keys


@pytest.mark.parametrize("behind", [1, 5])
async def test_node_that_returns_with_an_old_launch_touches_no_checkpoint_of_the_new_launch(home, behind):
    """B was cut off with rank 0's parts that nobody else has; the launch went on elsewhere. `behind` as many
    checkpoints are whole by the time that it is back."""
    nodes = Nodes(home, "A", "B", keep=2)
    nodes.save(1, 1, "BA")
    await nodes.settle()
    nodes["B"].line.down = True
    for step in (2, 3):
        nodes.save(step, 1, "BA")
    await nodes.settle("A")
    for step in range(2, 2 + behind):
        nodes.save(step, 2, "CA", origin=(1, 1))
        await nodes.settle("A", "C")
    before = {one: found for one, found in nodes.tier.manifests().items() if one.checkpoint.attempt == attempt(2)}
    taken = len(nodes.tier.pruned)
    nodes["B"].line.down = False
    done = await nodes.settle()
    after = nodes.tier.manifests()
    assert all(after[one] == found for one, found in before.items())
    assert "B" not in {who for who, _ in nodes.tier.pruned[taken:]}
    assert (await nodes.offered())[0] == (2, 1 + behind)
    sent = [action.part.checkpoint.step for who, action in done if isinstance(action, Flush) and who == "B"]
    if behind == 1:
        assert sent == [3]  # the last of the abandoned branch, now whole; 2 would be dropped at once
        assert (1, 3, True) in nodes.tier.steps()
    else:
        assert sent == [] and nodes["B"].steps() == [(1, 2), (1, 3)]
        assert nodes.tier.steps() == [(2, behind, True), (2, 1 + behind, True)]
    for step in (10, 11):  # what B's spool keeps goes when newer ones come there
        nodes.save(step, 3, "CB", origin=(2, 1 + behind))
    await nodes.settle()
    assert nodes["B"].steps() == [(3, 10), (3, 11)]
    assert nodes.tier.steps() == [(3, 10, True), (3, 11, True)]


async def test_same_part_in_two_spools_is_sent_once_and_leaves_both(home):
    nodes = Nodes(home, "A", "B", "C", keep=1)
    nodes.save(1, 1, "AB")
    await nodes.settle()
    await nodes["C"].daemon.repairs.fetch(part(1, 1, 0, 2))
    nodes.save(2, 2, "CB", origin=(1, 1))
    done = await nodes.settle()
    assert sum(isinstance(action, Flush) for _, action in done) == 2
    assert nodes.tier.steps() == [(2, 2, True)]
    assert nodes["C"].steps() == nodes["B"].steps() == [(2, 2)]
    assert nodes["A"].steps() == [(1, 1)]  # its own policy keeps one: it knows of no newer one in its spool


@pytest.mark.parametrize("worlds", [("AB", "AB"), ("AB", "CDE"), ("ABC", "CA"), ("A", "BA")], ids="-".join)
async def test_flush_names_chunks_of_the_newest_complete_checkpoint_of_any_writer(home, worlds):
    before, after = worlds
    nodes = Nodes(home, *sorted({*before, *after}), keep=3)
    nodes.save(1, 1, before)
    await nodes.settle()
    # Newer, and half unless there is one rank: its chunks are shared only where it is whole.
    nodes.save(2, 1, before, ranks=[0])
    await nodes.settle()
    nodes.save(3, 2, after, origin=(1, 1))
    await nodes.settle()
    base = 2 if len(before) == 1 else 1
    for which, manifest in nodes.tier.manifests().items():
        if which.checkpoint.step == 3:
            shared = {(owner.attempt, owner.step) for owner in manifest.owners - {which.checkpoint}}
            assert shared <= {(attempt(1), 1), (attempt(1), base)}
            assert bool(shared) == (which.rank < len(before))
