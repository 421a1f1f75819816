"""Several nodes, two launches of one run at work at once: the older one harms nobody."""

from __future__ import annotations

from pathlib import Path

from support.node_states import deterministic, first_launch  # noqa: F401
from support.nodes import Nodes
from support.world import part


async def test_origin_of_the_live_launch_is_kept_until_the_launch_has_a_complete_checkpoint(home):
    """The zombie goes on, the live launch has only rank 0's part of its first checkpoint so far."""
    nodes = await first_launch(home, 20, keep=1)
    nodes.save(21, 2, "CD", origin=(1, 20), ranks=[0])
    await nodes.settle("C")
    for step in (30, 40):
        nodes.save(step, 1, "AB")
        await nodes.settle("A", "B")
    assert (1, 20, True) in nodes.tier.steps()
    await nodes.settle()
    assert await nodes.offered() == [(1, 20)]
    nodes.save(21, 2, "CD", origin=(1, 20), ranks=[1])
    await nodes.settle()
    assert await nodes.offered() == [(2, 21)]
    assert nodes.tier.steps() == [(2, 21, True)]


async def test_attempts_never_mix(home):
    """Rank 0's part of the zombie's step 30 and rank 1's of the live launch's step 30 are no checkpoint."""
    nodes = await first_launch(home, 20, keep=1)
    nodes.save(30, 1, "AB", ranks=[0])
    nodes.save(30, 2, "CD", origin=(1, 20), ranks=[1])
    await nodes.settle()
    for name in (None, "A", "B", "C", "D"):
        assert await nodes.offered(name) == [(1, 20)]


async def test_a_zombies_later_steps_are_asked_for_by_name_or_not_at_all(home):
    nodes = Nodes(home, "A", "B", "C", "D", keep=9)
    for step in (10, 20):
        nodes.save(step, 1, "AB")
    nodes.save(21, 2, "CD", origin=(1, 20))
    for step in (30, 40):
        nodes.save(step, 1, "AB")
    await nodes.settle()
    for name in (None, "A", "C"):
        assert await nodes.offered(name) == [(2, 21), (1, 20), (1, 10)]
        assert [one.step for one in (await nodes.resume(name)).branches] == [40, 30]


async def resumed_from_what_went(home: Path) -> Nodes:
    """Launch 2, on C and D, has restored step 20 and committed nothing yet; the zombie's step 30 retires that."""
    nodes, origin = await first_launch(home, 20, keep=1), part(20).checkpoint
    for rank, name in enumerate("CD"):
        await nodes[name].daemon.repairs.fetch(part(20, 1, rank, 2))
    nodes.save(30, 1, "AB")
    await nodes["A"].turn(), await nodes["B"].turn()
    await nodes.settle("C")
    assert nodes.tier.pruned == []  # C holds rank 0 of the newest attempt that shows, and has only restored it
    await nodes.settle("A")
    assert nodes.tier.pruned == [("A", origin)]
    await nodes.settle()
    return nodes


async def test_while_the_live_launch_has_committed_nothing_the_zombies_word_is_all_there_is(home):
    """What happens, not what one would wish: no place tells that step 20 is needed."""
    nodes = await resumed_from_what_went(home)
    assert await nodes.offered() == [(1, 30)]
    # The copies in the spools of C and D stay all the same, and are not sent again.
    assert nodes["C"].steps() == nodes["D"].steps() == [(1, 20)]
    nodes.save(21, 2, "CD", origin=(1, 20), ranks=[0])
    await nodes.settle()
    found = await nodes.resume()
    assert 30 not in [one.checkpoint.step for one in found.candidates]
    assert [one.step for one in found.branches] == [30]  # named by the restore that finds nothing else
    nodes.save(21, 2, "CD", origin=(1, 20), ranks=[1])
    await nodes.settle()
    assert await nodes.offered() == [(2, 21)]
    assert nodes.tier.steps() == [(2, 21, True)]


async def test_origin_of_the_live_launch_is_flushed_again_from_its_own_spools(home):
    nodes = await resumed_from_what_went(home)
    nodes.save(21, 2, "CD", origin=(1, 20), ranks=[0])
    await nodes.settle()
    assert await nodes.offered() == [(1, 20)]
