"""Several nodes: checkpoints of which some ranks' parts are missing, and quarantined parts."""

from __future__ import annotations

import asyncio

import pytest
from support.doubles import contents, flip, is_chunk
from support.node_states import deterministic  # noqa: F401
from support.nodes import TIER, Nodes
from support.world import RUN, corrupt, part, read

from tierd.core.errors import CorruptChunk
from tierd.core.ids import PartId, pin_key
from tierd.core.planning.place import Flush, Prune
from tierd.core.retention.policy import Best
from tierd.core.run_report import make_report


async def test_incomplete_checkpoint_of_a_lost_node_is_never_offered_and_pruned_later(home):
    """Clocks are set wildly apart, and decide nothing."""
    nodes = Nodes(home, "A", "B", keep=2)
    nodes.clock = {"A": "2093-01-01T00:00:00+00:00", "B": "1971-01-01T00:00:00+00:00"}
    for step in (1, 2):
        nodes.save(step, 1, "AB")
    await nodes.settle()
    nodes["B"].line.down = True
    for step in (3, 4):
        nodes.save(step, 1, "AB")
    await nodes.settle("A")
    nodes.lose("B")
    await nodes.settle()
    assert nodes.tier.steps() == [(1, 1, True), (1, 2, True), (1, 3, False), (1, 4, False)]
    assert nodes["A"].steps() == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert await nodes.offered() == await nodes.offered("A") == [(1, 2), (1, 1)]
    nodes.clock = {"A": "1970-01-02T00:00:00+00:00", "C": "2150-01-01T00:00:00+00:00"}
    nodes.save(3, 2, "AC", origin=(1, 2))  # one is not enough: what is half may yet come
    await nodes.settle()
    assert nodes.tier.steps() == [(1, 2, True), (1, 3, False), (1, 4, False), (2, 3, True)]
    assert await nodes.offered() == [(2, 3), (1, 2)]
    nodes.save(4, 2, "AC", origin=(1, 2))
    await nodes.settle()
    assert nodes.tier.steps() == [(2, 3, True), (2, 4, True)]
    assert nodes["A"].steps() == nodes["C"].steps() == [(2, 3), (2, 4)]


async def test_incomplete_checkpoint_between_saves_blocks_nothing_and_is_pruned_within_its_launch(home):
    """Every third save of rank 1 fails."""
    nodes = Nodes(home, "A", "B", keep=2)
    for step in range(1, 16):
        nodes.save(step, 1, "AB", ranks=[0] if step % 3 == 0 else None)
        await nodes.settle()
        assert len(nodes["A"].steps()) <= 4 and len(nodes["B"].steps()) <= 3
        assert len(nodes.tier.steps()) <= 4
    assert nodes.tier.steps() == [(1, 13, True), (1, 14, True), (1, 15, False)]


def test_a_rank_that_never_saves_again_fills_its_own_node_only_until_something_is_whole_again(home):
    """Halves stay, since their rest may come: all on the tier, the last few in the spool, one where room is short."""

    async def work(**options):
        nodes = Nodes(home / str(options), "A", "B", keep=2, **options)
        for step in (1, 2, 3):
            nodes.save(step, 1, "AB")
        await nodes.settle()
        for step in range(4, 20):
            nodes.save(step, 1, "AB", ranks=[0])
            await nodes.settle()
        assert await nodes.offered() == [(1, 3), (1, 2)]
        assert nodes.tier.steps() == [(1, 2, True), (1, 3, True), *((1, step, False) for step in range(4, 20))]
        left = nodes["A"].steps()
        for step in (20, 21):
            nodes.save(step, 1, "AB")
        await nodes.settle()
        assert nodes.tier.steps() == [(1, 20, True), (1, 21, True)]
        return left

    assert asyncio.run(work(min_free_percent=100.0)) == [(1, 19)]
    assert asyncio.run(work()) == [(1, 2), (1, 3), (1, 18), (1, 19)]


@pytest.mark.parametrize("low", [True, False])
async def test_halves_that_were_never_sent_do_not_stop_a_spool_with_little_room(home, low):
    """The tier was down while rank 1 had gone for good. Not all of them are worth sending; with little room they are
    sent, one after the other, so that they can go."""
    nodes = Nodes(home, "A", "B", keep=2, min_free_percent=100.0 if low else 0.0)
    for step in (1, 2, 3):
        nodes.save(step, 1, "AB")
    await nodes.settle()
    for step in range(4, 20):
        nodes.save(step, 1, "AB", ranks=[0])
    await nodes.settle()
    sent = [step for _, step, whole in nodes.tier.steps() if not whole]
    assert sent == (list(range(4, 20)) if low else [18, 19])
    assert nodes["A"].steps() == ([(1, 19)] if low else [(1, step) for step in (2, 3, *range(4, 20))])
    for step in (20, 21):
        nodes.save(step, 2, "AC", origin=(1, 3))
    await nodes.settle()
    assert nodes["A"].steps()[-1:] == [(2, 21)] and len(nodes["A"].steps()) <= 2
    assert nodes.tier.steps() == [(2, 20, True), (2, 21, True)]


@pytest.mark.parametrize("rules", [{"keep_every_steps": 10}, {"keep_best": Best(metric="loss")}], ids=["every", "best"])
async def test_incomplete_checkpoint_of_an_old_launch_is_pruned_though_a_rule_would_keep_it_complete(home, rules):
    nodes = Nodes(home, "A", "B", keep=2, rules=rules)
    nodes.save(9, 1, "AB", metrics={"loss": 2.0})
    await nodes.settle()
    nodes.save(10, 1, "AB", ranks=[0], metrics={"loss": 1.0})
    await nodes.settle()
    nodes.lose("B")
    for launch in (2, 3):
        for step in range(11, 16):
            nodes.save(step, launch, "AC", origin=(launch - 1, 9 if launch == 2 else 15), metrics={"loss": 3.0})
            await nodes.settle()
    assert (1, 10, False) not in nodes.tier.steps()


async def rot(nodes: Nodes, which: PartId, holder: str) -> None:
    """Every copy of a part is corrupt, and the holder's daemon finds out."""
    for key in [key for key in await contents(nodes.tier) if is_chunk(key) and f"/{which.rank:05}/" in key]:
        if which.checkpoint.name in key:
            await flip(nodes.tier, key)
    corrupt(nodes[holder].spool.path(which) / "news")
    with pytest.raises(CorruptChunk):
        await nodes[holder].daemon.repairs.fetch(which)


async def test_quarantined_part_makes_its_checkpoint_incomplete_for_every_node(home):
    nodes = Nodes(home, "A", "B", keep=2)
    for step in (1, 2, 3):
        nodes.save(step, 1, "AB")
        await nodes.settle()
    assert nodes.tier.steps() == [(1, 2, True), (1, 3, True)]
    await rot(nodes, part(3, 1, 1, 2), "B")
    done = await nodes.settle()
    assert not [action for _, action in done if isinstance(action, Flush | Prune)]
    assert nodes.tier.steps() == [(1, 2, True), (1, 3, False)]
    for name in (None, "A", "B"):
        assert await nodes.offered(name) == [(1, 2)]
        assert [one.step for one in (await nodes.resume(name)).quarantined] == [3]
    for node in nodes.alive():
        await node.daemon.observe(TIER)
        reported = {one.step: one for one in make_report(node.daemon.inventory(), node.daemon.config, RUN).checkpoints}
        assert (reported[3].complete, reported[3].resumes) == (False, False)
        assert (reported[2].complete, reported[2].resumes) == (True, True)
    nodes.save(4, 1, "AB")  # 2 is one of the last two that are whole
    await nodes.settle()
    assert nodes.tier.steps() == [(1, 2, True), (1, 3, False), (1, 4, True)]
    nodes.save(5, 1, "AB")
    await nodes.settle()
    assert nodes.tier.steps() == [(1, 4, True), (1, 5, True)]
    assert not nodes.tier.manifests("quarantine") and not nodes["B"].spool.quarantined()


async def test_last_complete_checkpoint_is_kept_however_much_rots(home):
    nodes = Nodes(home, "A", "B", keep=1)
    nodes.save(1, 1, "AB")
    await nodes.settle()
    for step in range(2, 6):
        nodes.save(step, 1, "AB", ranks=[1])
        await nodes["B"].turn()
        await rot(nodes, part(step, 1, 1, 2), "B")
        nodes.save(step, 1, "AB", ranks=[0])
        await nodes.settle()
        assert await nodes.offered() == await nodes.offered("A") == [(1, 1)]
    nodes.save(6, 1, "AB")
    await nodes.settle()
    assert nodes.tier.steps() == [(1, 6, True)]


async def test_part_that_a_node_quarantined_is_sent_again_by_the_node_that_has_it_right(home):
    """Rank 1 moved from B to C and its old part lies in both spools; B's copy and the tier's rot."""
    nodes = Nodes(home, "A", "B", "C", keep=2)
    nodes.save(1, 1, "AB")
    await nodes.settle()
    await nodes["C"].daemon.repairs.fetch(part(1, 1, 1, 2))
    await rot(nodes, part(1, 1, 1, 2), "B")
    assert await nodes.offered("A") == []
    assert await nodes.settle("C") == [("C", Flush(part(1, 1, 1, 2), TIER))]
    assert await nodes.offered("A") == [(1, 1)]
    assert not nodes.tier.manifests("quarantine")
    assert (await nodes["B"].daemon.repairs.fetch(part(1, 1, 1, 2))).tiers == (TIER,)
    assert "news" in read(nodes["B"].spool, part(1, 1, 1, 2))


async def test_incomplete_checkpoints_of_an_abandoned_launch_are_pruned_and_pinned_checkpoints_kept(home):
    nodes = Nodes(home, "A", "B", keep=2)
    nodes.save(10, 1, "AB")
    await nodes.settle()
    nodes.save(20, 1, "AB", ranks=[0])
    pinned = nodes.save(30, 1, "AB", ranks=[0])
    await nodes.tier.put(pin_key(pinned), b"")
    nodes.save(40, 1, "AB")
    await nodes.settle()
    for step in (11, 12, 13):
        nodes.save(step, 2, "AB", origin=(1, 10))
        await nodes.settle()
        assert (await nodes.offered())[0] == (2, step)
    assert nodes.tier.steps() == [(1, 30, False), (2, 12, True), (2, 13, True)]
    assert nodes["A"].steps() == [(1, 30), (2, 12), (2, 13)]
    assert nodes["B"].steps() == [(2, 12), (2, 13)]
    assert (await nodes.resume()).branches == ()
    await nodes.tier.delete([pin_key(pinned)])
    await nodes.settle()
    assert nodes.tier.steps() == [(2, 12, True), (2, 13, True)]
    assert nodes["A"].steps() == [(2, 12), (2, 13)]
