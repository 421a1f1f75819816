"""Several nodes: a prune by one of them in the middle of another one's flush or fetch."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from support.node_states import deterministic, first_launch  # noqa: F401
from support.nodes import TIER, Line, Node, Nodes
from support.world import part, read

from tierd.core.errors import CorruptChunk, StoreUnavailable, TierdError
from tierd.core.planning.place import Prune


@pytest.mark.parametrize("how", ["held", "pinned here"])
async def test_part_that_a_node_holds_is_not_sent_and_pruned_in_turn(home, how):
    nodes, origin = await first_launch(home, 20, keep=1), part(20).checkpoint
    await nodes["D"].daemon.repairs.fetch(part(20, 1, 1, 2))
    if how == "held":  # as the control socket does while a trainer reads, or uses the directory
        nodes["D"].daemon.requests.held_checkpoints[origin] += 1
    else:  # the tier was down when it was pinned
        nodes["D"].spool.pin(origin, pinned=True)
    nodes.save(30, 1, "AB")
    await nodes.settle(limit=40)
    assert nodes["D"].steps() == [(1, 20)]


async def pruned_in_the_middle(home: Path, moment: int) -> tuple[Node, TierdError | None, bool]:
    """C fetches step 20, and at the `moment`-th call A's janitor prunes it: C, what the fetch raised, whether the prune
    came in time."""
    nodes = Nodes(home, "A", "B", "C", keep=1)
    nodes.save(20, 1, "AB")
    await nodes.settle()
    nodes.save(30, 1, "AB")
    await nodes["A"].turn(), await nodes["B"].turn()
    calls = itertools.count(1)

    async def meanwhile():
        if next(calls) == moment:
            await nodes.settle("A")

    nodes["C"].line.meanwhile, raised = meanwhile, None
    try:
        await nodes["C"].daemon.repairs.fetch(part(20, 1, 0, 2))
    except TierdError as error:
        raised = error
    return nodes["C"], raised, nodes.tier.steps() == [(1, 30, True)]


async def test_a_prune_in_the_middle_of_a_fetch_costs_that_fetch_at_most(home):
    """It gives every byte right, or raises and leaves nothing."""
    outcomes = Counter()
    for moment in range(1, 12):
        node, raised, in_time = await pruned_in_the_middle(home / str(moment), moment)
        outcomes[in_time, raised is None] += 1
        assert node.steps() == ([] if raised else [(1, 20)])
        assert not node.spool.quarantined() and not node.tier.manifests("quarantine")
        assert not isinstance(raised, CorruptChunk) and not node.daemon.journal.counters["corruptions"]
        if not raised:
            assert "news" in read(node.spool, part(20, 1, 0, 2))
    assert all(outcomes[key] for key in ((True, True), (True, False), (False, True))), outcomes
    assert not outcomes[False, False]


async def borrowing(home: Path) -> Nodes:
    """C is about to send step 22, which has chunks in common with the zombie's step 21 alone; A and B are about to send
    30 and to prune 21."""
    nodes = await first_launch(home, 21, keep=1)
    nodes.save(22, 2, "CD", origin=(1, 21))
    nodes.save(30, 1, "AB")
    nodes.tier.aware = False  # A cannot know of what it did not see
    return nodes


async def met(nodes: Nodes, moment: int, at: Line, meanwhile: Callable[[], Awaitable[object]], then: str) -> bool:
    """One node's turn, with something else done at the `moment`-th call over its line; whether it came to that. After
    it, all is well."""
    calls = itertools.count(1)

    async def once() -> None:
        if next(calls) == moment:
            with contextlib.suppress(StoreUnavailable):
                await meanwhile()

    at.meanwhile = once
    with contextlib.suppress(StoreUnavailable):
        await nodes[then].turn()
    at.meanwhile = None
    await nodes.settle()
    assert await nodes.offered() == [(2, 22)]
    return next(calls) > moment


async def test_chunks_that_the_live_launch_is_about_to_name_are_kept_or_it_observes_again(home):
    """At every call of C's flush, A and B send step 30 and A prunes step 21."""
    shared = set()
    for moment in range(1, 60):
        nodes = await borrowing(home / str(moment))
        go_on = await met(nodes, moment, nodes["C"].line, partial(nodes.settle, "A", "B"), "C")
        shared |= {one.step for one in nodes.tier.manifests()[part(22, 2, 0, 2)].owners}
        if not go_on:
            break
    assert 20 < moment < 59 and shared == {21, 22}


async def test_flush_in_the_middle_of_a_prune_names_no_chunk_that_is_deleted(home):
    """At every call of A's prune of step 21, C, which looked before, sends step 22."""
    for moment in range(1, 60):
        nodes = await borrowing(home / str(moment))
        await nodes["C"].daemon.observe(TIER)
        await nodes["A"].turn(), await nodes["B"].turn()
        assert [type(one) for one in await nodes["A"].planned()][:1] == [Prune]
        late = partial(nodes["C"].daemon.flushes.flush, part(22, 2, 0, 2), TIER)
        if not await met(nodes, moment, nodes["A"].line, late, "A"):
            break
    assert 10 < moment < 59
