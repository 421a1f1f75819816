"""Several nodes on one run, which cannot harm each other: one janitor, zombie launches, lost and returning nodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from support.doubles import contents, flip, is_chunk
from support.nodes import TIER, Line, Node, Nodes, launch_of, one_thread, pruned
from support.world import RUN, attempt, corrupt, part, read, running, settle

from tierd.core.errors import CorruptChunk, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId, chunk_owner, pin_key
from tierd.core.planning.actions import Flush, Prune
from tierd.core.report import report
from tierd.core.retention.policy import Best
from tierd.daemon.tiers import intents

SEEDS = int(os.environ.get("TIERD_SEEDS", "8"))  # `make gate` takes a hundred


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    one_thread(monkeypatch)


@pytest.fixture
def home(tmp_path):
    """In memory where that can be: thousands of small files come and go, and no power is cut."""
    room = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=room if os.access(room, os.W_OK) else tmp_path) as found:
        yield Path(found)


# -- one janitor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placing", [("A", "B"), ("B", "A"), ("A", "A", "B", "B"), ("D", "C", "B", "A"), ("B", "A", "C", "A")], ids="".join
)
def test_only_rank_0s_node_prunes_and_all_come_to_rest(home, placing):
    async def work():
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

    asyncio.run(work())


def test_the_office_moves_with_rank_0(home):
    async def work():
        nodes = Nodes(home, "A", "B", "C", keep=1)
        seen = []
        for launch, placing in enumerate((("A", "B"), ("B", "A"), ("C", "A"), ("A", "C")), start=1):
            for step in (1, 2, 3):
                nodes.save(
                    10 * launch + step, launch, placing, origin=(launch - 1, 10 * launch - 7) if launch > 1 else None
                )
                for who, _, _ in pruned(await nodes.settle()):
                    seen += [who] if [who] != seen[-1:] else []
        assert seen == ["A", "B", "C", "A"]
        assert nodes.tier.steps() == [(4, 43, True)]

    asyncio.run(work())


def test_when_the_janitors_node_is_lost_the_next_launchs_rank_0_takes_over(home):
    async def work():
        nodes = Nodes(home, "A", "B", keep=1)
        nodes.save(1, 1, "AB")
        await nodes.settle()
        nodes.save(2, 1, "AB")
        await nodes["A"].turn(), await nodes["B"].turn()  # both have flushed: now A would prune
        nodes.lose("A")
        assert pruned(await nodes.settle()) == []
        assert nodes.tier.steps() == [(1, 1, True), (1, 2, True)]
        nodes.save(3, 2, "CB", origin=(1, 2))
        assert pruned(await nodes.settle()) == [("C", 1, 1)]  # and, in the same pass, step 2
        assert nodes.tier.steps() == [(2, 3, True)]

    asyncio.run(work())


def test_all_daemons_at_work_come_to_rest_too(home):
    """Their own loops, not turns."""

    async def work():
        nodes = Nodes(home, "A", "B", "C", keep=2)
        async with running(nodes["A"].daemon), running(nodes["B"].daemon), running(nodes["C"].daemon):
            for step in range(1, 7):
                nodes.save(step, 1, "ABC")
                for node in nodes.alive():
                    node.daemon.wake()
                await asyncio.sleep(0.01)
            nodes.save(7, 2, "BCA", origin=(1, 6))
            for node in nodes.alive() * 3:
                await settle(node.daemon)
        assert nodes.tier.steps() == [(1, 6, True), (2, 7, True)]
        assert {who for who, _ in nodes.tier.pruned} <= {"A", "B"}
        assert all(node.steps() == [(1, 6), (2, 7)] for node in nodes.alive())

    asyncio.run(work())


# -- saves that outrun flushes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_node_sends_parts_of_the_checkpoint_that_another_one_is_sending(home, fails):
    """The newest there is by then is of no use while nobody sends its other parts."""

    async def next_of(node: Node) -> int:
        action = await node.daemon._agenda.next_action(node.daemon.workers[TIER])
        assert isinstance(action, Flush)
        return action.part.checkpoint.step

    async def work():
        nodes = Nodes(home, "A", "B", keep=9)
        nodes.save(1, 1, "AB")
        await nodes.settle()
        for step in (2, 3):
            nodes.save(step, 1, "AB")
        chosen = []

        async def meanwhile():
            if nodes["A"].line.doing == "put" and any("/sending." in key for key in nodes.tier._keys) and not chosen:
                nodes.save(4, 1, "AB")
                chosen.append(await next_of(nodes["B"]))
                if fails:
                    raise StoreUnavailable("no route")

        assert await next_of(nodes["A"]) == 3
        nodes["A"].line.meanwhile = meanwhile
        with pytest.raises(StoreUnavailable) if fails else contextlib.nullcontext():
            await nodes["A"].turn()
        assert chosen == [3]
        assert not [key for key in nodes.tier._keys if "/flushing/" in key], "it is over with the flush"
        nodes["A"].line.meanwhile = None
        assert await next_of(nodes["B"]) == (4 if fails else 3)

    asyncio.run(work())


def test_where_there_is_no_choice_nothing_is_announced(home):
    async def work():
        nodes = Nodes(home, "A", "B", keep=9)
        keys = []
        nodes["A"].line.meanwhile = nodes["B"].line.meanwhile = seen = AsyncMock(
            side_effect=lambda: keys.extend(key for key in nodes.tier._keys if "/sending." in key)
        )
        for step in (1, 2):
            nodes.save(step, 1, "AB")
            await nodes.settle()
        for step in (3, 4, 5):
            nodes.save(step, 1, "A")  # all of its ranks are here
        await nodes.settle()
        assert seen.called and not keys

    asyncio.run(work())


# -- a zombie launch --------------------------------------------------------------------------------------------------


async def first_launch(home, *steps, keep) -> Nodes:
    """Nodes A to D. Launch 1 has saved these on A and B, and the tier has them."""
    nodes = Nodes(home, "A", "B", "C", "D", keep=keep)
    for step in steps:
        nodes.save(step, 1, "AB")
    await nodes.settle()
    return nodes


def test_a_zombie_that_goes_on_harms_nobody(home):
    """Launch 1 lives on A and B while launch 2, resumed from its step 20, lives on C and D."""

    async def work():
        nodes = await first_launch(home, 10, 20, keep=2)
        for step in range(21, 25):
            nodes.save(2 * step, 1, "AB")
            nodes.save(step, 2, "CD", origin=(1, 20))
            await nodes.settle()
            assert (await nodes.offered())[0] == (2, step)
            assert not [one for one in await nodes.offered() if one[0] == 1 and one[1] > 20]
        assert nodes.tier.steps() == [(2, 23, True), (2, 24, True)]
        assert {who for who, _ in nodes.tier.pruned} == {"C"}

    asyncio.run(work())


def test_what_the_live_launch_resumed_from_stays_until_it_has_a_whole_one_of_its_own(home):
    """The zombie goes on, the live launch has only rank 0's part of its first checkpoint so far."""

    async def work():
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

    asyncio.run(work())


def test_attempts_never_mix(home):
    """Rank 0's part of the zombie's step 30 and rank 1's of the live launch's step 30 are no checkpoint."""

    async def work():
        nodes = await first_launch(home, 20, keep=1)
        nodes.save(30, 1, "AB", ranks=[0])
        nodes.save(30, 2, "CD", origin=(1, 20), ranks=[1])
        await nodes.settle()
        for name in (None, "A", "B", "C", "D"):
            assert await nodes.offered(name) == [(1, 20)]

    asyncio.run(work())


def test_a_zombies_later_steps_are_asked_for_by_name_or_not_at_all(home):
    async def work():
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

    asyncio.run(work())


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


def test_while_the_live_launch_has_committed_nothing_the_zombies_word_is_all_there_is(home):
    """What happens, not what one would wish: no place tells that step 20 is needed."""

    async def work():
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

    asyncio.run(work())


def test_what_the_live_launch_resumed_from_comes_back_from_its_own_spools(home):
    async def work():
        nodes = await resumed_from_what_went(home)
        nodes.save(21, 2, "CD", origin=(1, 20), ranks=[0])
        await nodes.settle()
        assert await nodes.offered() == [(1, 20)]

    asyncio.run(work())


@pytest.mark.parametrize("how", ["held", "pinned here"])
def test_what_one_node_holds_is_not_sent_and_pruned_in_turn(home, how):
    async def work():
        nodes, origin = await first_launch(home, 20, keep=1), part(20).checkpoint
        await nodes["D"].daemon.repairs.fetch(part(20, 1, 1, 2))
        if how == "held":  # as the control socket does while a trainer reads, or uses the directory
            nodes["D"].daemon.requests.held[origin] += 1
        else:  # the tier was down when it was pinned
            nodes["D"].spool.pin(origin, pinned=True)
        nodes.save(30, 1, "AB")
        await nodes.settle(limit=40)
        assert nodes["D"].steps() == [(1, 20)]

    asyncio.run(work())


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


def test_a_prune_in_the_middle_of_a_fetch_costs_that_fetch_at_most(home):
    """It gives every byte right, or raises and leaves nothing."""

    async def work():
        outcomes = Counter()
        for moment in range(1, 12):
            node, raised, in_time = await pruned_in_the_middle(home / str(moment), moment)
            outcomes[in_time, raised is None] += 1
            assert node.steps() == ([] if raised else [(1, 20)])
            assert not node.spool.quarantined() and not node.tier.manifests("quarantine")
            if not raised:
                assert "news" in read(node.spool, part(20, 1, 0, 2))
        assert all(outcomes[key] for key in ((True, True), (True, False), (False, True))), outcomes
        assert not outcomes[False, False]

    asyncio.run(work())


def test_what_is_pruned_in_the_middle_of_a_fetch_is_not_called_corrupt(home):
    async def work():
        for moment in (1, 4):
            node, raised, _ = await pruned_in_the_middle(home / str(moment), moment)
            assert raised and not isinstance(raised, CorruptChunk)
            assert not node.daemon.journal.counters["corruptions"] + node.daemon.journal.counters["quarantined"]

    asyncio.run(work())


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


def test_chunks_that_the_live_launch_is_about_to_name_stay_or_it_looks_again(home):
    """At every call of C's flush, A and B send step 30 and A prunes step 21."""

    async def work():
        borrowed = set()
        for moment in range(1, 60):
            nodes = await borrowing(home / str(moment))
            go_on = await met(nodes, moment, nodes["C"].line, partial(nodes.settle, "A", "B"), "C")
            borrowed |= {one.step for one in nodes.tier.manifests()[part(22, 2, 0, 2)].owners}
            if not go_on:
                break
        assert 20 < moment < 59 and borrowed == {21, 22}

    asyncio.run(work())


def test_a_flush_in_the_middle_of_a_prune_names_nothing_that_goes(home):
    """At every call of A's prune of step 21, C, which looked before, sends step 22."""

    async def work():
        for moment in range(1, 60):
            nodes = await borrowing(home / str(moment))
            await nodes["C"].daemon.look(TIER)
            await nodes["A"].turn(), await nodes["B"].turn()
            assert [type(one) for one in await nodes["A"].planned()][:1] == [Prune]
            late = partial(nodes["C"].daemon.tiers.flush, part(22, 2, 0, 2), TIER)
            if not await met(nodes, moment, nodes["A"].line, late, "A"):
                break
        assert 10 < moment < 59

    asyncio.run(work())


def test_a_flush_that_read_before_a_prune_names_nothing_after_it(home):
    """C's flush stops at each of its calls until A's prune is about to delete the chunks of step 21, and then goes on:
    it gives way, or the prune does."""

    async def work():
        refused = 0
        for moment in range(1, 60):
            nodes = await borrowing(home / str(moment))
            await nodes["C"].daemon.look(TIER)
            await nodes["A"].turn(), await nodes["B"].turn()
            calls, stopped, go_on = itertools.count(1), asyncio.Event(), asyncio.Event()

            async def stop(calls=calls, moment=moment, stopped=stopped, go_on=go_on) -> None:
                if next(calls) == moment:
                    stopped.set()
                    await go_on.wait()

            nodes["C"].line.meanwhile = stop
            late = asyncio.ensure_future(nodes["C"].daemon.tiers.flush(part(22, 2, 0, 2), TIER))
            waiting = asyncio.ensure_future(stopped.wait())
            await asyncio.wait([late, waiting], return_when=asyncio.FIRST_COMPLETED)
            if late.done():
                break

            async def let_on(line=nodes["A"].line, go_on=go_on, late=late) -> None:
                nonlocal refused
                if line.doing == "delete" and not [one for one in line.tier.checkpoints() if one.step == 21]:
                    go_on.set()
                    (result,) = await asyncio.gather(late, return_exceptions=True)
                    refused += isinstance(result, StoreUnavailable)

            nodes["A"].line.meanwhile = let_on
            await nodes["A"].daemon.tiers.prune([part(21).checkpoint], TIER)
            go_on.set()
            await asyncio.gather(late, return_exceptions=True)
            nodes["A"].line.meanwhile = nodes["C"].line.meanwhile = None
            await nodes.settle()
            assert await nodes.offered() == [(2, 22)]
        waiting.cancel()
        assert 10 < moment < 59 and refused

    asyncio.run(work())


# -- a lost node ------------------------------------------------------------------------------------------------------


def test_what_a_lost_node_left_half_is_never_offered_waits_and_goes(home):
    """Clocks are set wildly apart, and decide nothing."""

    async def work():
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

    asyncio.run(work())


def test_what_is_half_in_between_blocks_nothing_and_goes_within_its_own_launch(home):
    """Every third save of rank 1 fails."""

    async def work():
        nodes = Nodes(home, "A", "B", keep=2)
        for step in range(1, 16):
            nodes.save(step, 1, "AB", ranks=[0] if step % 3 == 0 else None)
            await nodes.settle()
            assert len(nodes["A"].steps()) <= 4 and len(nodes["B"].steps()) <= 3
            assert len(nodes.tier.steps()) <= 4
        assert nodes.tier.steps() == [(1, 13, True), (1, 14, True), (1, 15, False)]

    asyncio.run(work())


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


def test_a_rank_that_never_saves_again_does_not_fill_the_other_nodes_spool(home):
    async def work():
        nodes = Nodes(home, "A", "B", keep=2)
        for step in range(1, 20):
            nodes.save(step, 1, "AB", ranks=[0] if step > 3 else None)
            await nodes.settle()
        assert nodes["A"].steps()[-2:] == [(1, 18), (1, 19)]
        assert len(nodes["A"].steps()) <= 4

    asyncio.run(work())


@pytest.mark.parametrize("low", [True, False])
def test_halves_that_were_never_sent_do_not_stop_a_spool_with_little_room(home, low):
    """The tier was down while rank 1 had gone for good. Not all of them are worth sending; with little room they are
    sent, one after the other, so that they can go."""

    async def work():
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

    asyncio.run(work())


@pytest.mark.parametrize("rules", [{"keep_every_steps": 10}, {"keep_best": Best(metric="loss")}], ids=["every", "best"])
def test_a_half_that_a_rule_would_keep_whole_goes_too_when_its_launch_is_long_over(home, rules):
    async def work():
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

    asyncio.run(work())


# -- proven corrupt ---------------------------------------------------------------------------------------------------


async def rot(nodes: Nodes, which: PartId, holder: str) -> None:
    """Every copy of a part is corrupt, and the holder's daemon finds out."""
    for key in [key for key in await contents(nodes.tier) if is_chunk(key) and f"/{which.rank:05}/" in key]:
        if which.checkpoint.name in key:
            await flip(nodes.tier, key)
    corrupt(nodes[holder].spool.path(which) / "news")
    with pytest.raises(CorruptChunk):
        await nodes[holder].daemon.repairs.fetch(which)


def test_a_part_that_is_set_aside_makes_its_checkpoint_half_for_every_node(home):
    async def work():
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
            await node.daemon.look(TIER)
            told = {one.step: one for one in report(node.daemon.inventory(), node.daemon.config, RUN).checkpoints}
            assert (told[3].complete, told[3].resumes) == (False, False)
            assert (told[2].complete, told[2].resumes) == (True, True)
        nodes.save(4, 1, "AB")  # 2 is one of the last two that are whole
        await nodes.settle()
        assert nodes.tier.steps() == [(1, 2, True), (1, 3, False), (1, 4, True)]
        nodes.save(5, 1, "AB")
        await nodes.settle()
        assert nodes.tier.steps() == [(1, 4, True), (1, 5, True)]
        assert not nodes.tier.manifests("quarantine") and not nodes["B"].spool.quarantined()

    asyncio.run(work())


def test_the_last_whole_one_stays_however_much_rots(home):
    async def work():
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

    asyncio.run(work())


def test_what_was_set_aside_by_one_node_is_sent_anew_by_the_node_that_has_it_right(home):
    """Rank 1 moved from B to C and its old part lies in both spools; B's copy and the tier's rot."""

    async def work():
        nodes = Nodes(home, "A", "B", "C", keep=2)
        nodes.save(1, 1, "AB")
        await nodes.settle()
        await nodes["C"].daemon.repairs.fetch(part(1, 1, 1, 2))
        await rot(nodes, part(1, 1, 1, 2), "B")
        assert await nodes.offered("A") == []
        assert await nodes.settle("C") == [("C", Flush(part(1, 1, 1, 2), TIER))]
        assert await nodes.offered("A") == [(1, 1)]
        assert not nodes.tier.manifests("quarantine")
        assert await nodes["B"].daemon.repairs.fetch(part(1, 1, 1, 2)) == (TIER,)
        assert "news" in read(nodes["B"].spool, part(1, 1, 1, 2))

    asyncio.run(work())


# -- old spools come back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [1, 5])
def test_a_node_that_comes_back_with_an_old_launch_touches_nothing_of_the_new_one(home, behind):
    """B was cut off with rank 0's parts that nobody else has; the launch went on elsewhere. `behind` as many
    checkpoints are whole by the time that it is back."""

    async def work():
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

    asyncio.run(work())


def test_the_same_part_in_two_spools_is_sent_once_and_goes_from_both(home):
    async def work():
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

    asyncio.run(work())


# -- what a flush may name --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worlds", [("AB", "AB"), ("AB", "CDE"), ("ABC", "CA"), ("A", "BA")], ids="-".join)
def test_a_flush_names_chunks_of_the_newest_whole_checkpoint_whoever_wrote_it(home, worlds):
    before, after = worlds

    async def work():
        nodes = Nodes(home, *sorted({*before, *after}), keep=3)
        nodes.save(1, 1, before)
        await nodes.settle()
        # Newer, and half unless there is one rank: its chunks are shared only where it is whole.
        nodes.save(2, 1, before, ranks=[0])
        await nodes.settle()
        nodes.save(3, 2, after, origin=(1, 1))
        await nodes.settle()
        lender = 2 if len(before) == 1 else 1
        for which, manifest in nodes.tier.manifests().items():
            if which.checkpoint.step == 3:
                lent = {(owner.attempt, owner.step) for owner in manifest.owners - {which.checkpoint}}
                assert lent <= {(attempt(1), 1), (attempt(1), lender)}
                assert bool(lent) == (which.rank < len(before))

    asyncio.run(work())


# -- abandoned launches -----------------------------------------------------------------------------------------------


def test_halves_of_an_abandoned_launch_go_and_pinned_ones_stay(home):
    async def work():
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

    asyncio.run(work())


# -- all of it at once ------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    number: int
    placing: str
    origin: tuple[int, int] | None
    step: int


class Story:
    """Launches that follow each other, not all of which end; nodes that go and come back; saves that fail for some.

    `saved` is what really happened, which no place is asked for: (launch, step) -> the ranks that saved.
    """

    def __init__(self, home: Path, seed: int, *, lag: bool) -> None:
        self.rng = random.Random(seed)
        self.keep = self.rng.choice((1, 1, 2, 3))
        self.nodes = Nodes(home, *"ABC", keep=self.keep, rng=self.rng, lag=lag)
        self.launches: list[Launch] = []
        self.saved: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.pins: set[CheckpointId] = set()
        self.at_work: dict[Node, asyncio.Task] = {}

    async def launch(self, names: str = "ABCDE") -> None:
        """A launch resumes from what a node of its own sees first, or is told another one."""
        placing = "".join(self.rng.choice(names) for _ in range(self.rng.choice((1, 2, 2, 3))))
        for name in placing:
            self.nodes[name]  # comes up
        found = await self.nodes.resume(placing[0])
        known = [one.checkpoint for one in found.candidates]
        start = (known[:1] if self.rng.random() < 0.8 else known) or list(found.branches)
        origin = self.rng.choice(start) if start else None
        told = (launch_of(origin), origin.step) if origin else None
        number = len(self.launches) + 1
        self.launches.append(Launch(number, placing, told, origin.step if origin else 0))

    def save(self, launch: Launch, ranks: Collection[int] | None = None) -> None:
        launch.step += self.rng.choice((1, 1, 5))
        there = [rank for rank, name in enumerate(launch.placing) if name in self.nodes.names()]
        ranks = [rank for rank in there if ranks is None or rank in ranks]
        self.nodes.save(launch.step, launch.number, launch.placing, origin=launch.origin, ranks=ranks)
        self.saved[launch.number, launch.step] |= set(ranks)

    async def lose(self) -> None:
        if len(self.nodes.names()) > 1:
            name = self.rng.choice(self.nodes.names())
            await self.stop(self.nodes[name])
            self.nodes.lose(name, spool=self.rng.random() < 0.6)

    async def stop(self, node: Node) -> None:
        """Kill a daemon, wherever it is."""
        task = self.at_work.pop(node, None)
        if task:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def pin(self) -> None:
        if self.nodes.tier.whole():
            self.pins.add(self.rng.choice(sorted(self.nodes.tier.whole())))
            for pinned in self.pins:
                await self.nodes.tier.put(pin_key(pinned), b"")

    async def event(self) -> None:
        """Something that is no daemon's doing."""
        live = self.launches[-1]
        match self.rng.choices(("save", "some", "zombie", "launch", "lose", "pin", "line", "restart"), _WEIGHTS)[0]:
            case "save":
                self.save(live)
            case "some":
                self.save(live, [rank for rank in range(len(live.placing)) if self.rng.random() < 0.5])
            case "zombie":
                self.save(self.rng.choice(self.launches))
            case "launch":
                await self.launch()
            case "lose":
                await self.lose()
            case "pin":
                await self.pin()
            case "line":
                node = self.rng.choice(self.nodes.alive())
                node.line.down = not node.line.down
            case "restart":
                node = self.rng.choice(self.nodes.alive())
                await self.stop(node)
                node.start()

    async def look(self) -> None:
        """What a fresh node is offered was saved by every rank of one launch, and lies on the newest timeline."""
        found = await self.nodes.resume()
        newest = line = int(max(found.attempts, default="0")[-8:], 16)
        limit = math.inf
        for one in found.candidates:
            launch, step = launch_of(one.checkpoint), one.checkpoint.step
            assert self.saved[launch, step] == set(range(len(self.launches[launch - 1].placing)))
            while line != launch:
                origin = self.launches[line - 1].origin
                assert origin, f"launch {launch} step {step} is no ancestor of launch {newest}"
                line, limit = origin
            assert step <= limit

    async def end(self) -> None:
        """The last launch goes on where nothing fails any more: the tier comes to hold what retention wants."""
        self.pins &= set(self.nodes.tier.checkpoints())  # a prune that had begun before it was pinned went on
        for node in self.nodes.alive():
            node.line.down, node.line.rng = False, None
            node.start()
        await self.nodes.settle()
        await self.launch("".join(self.nodes.names()))
        for _ in range(self.keep + 1):
            self.save(self.launches[-1])
            await self.nodes.settle()
            await self.look()
        last = [one for one in sorted(self.nodes.tier.whole()) if one.attempt == attempt(len(self.launches))]
        assert len(last) >= self.keep
        assert set(self.nodes.tier.checkpoints()) == {*last[-self.keep :], *self.pins}
        for node in self.nodes.alive():
            assert not await node.planned()
            if node.name in self.launches[-1].placing:
                kept = {which.checkpoint for which in node.spool.parts()} - self.pins
                assert kept == set(last[-self.keep :])
        manifests = self.nodes.tier.manifests().values()
        named = {f"{RUN}/{one.stored.key}" for found in manifests for one in found.chunks()}
        lent = {owner for found in manifests for owner in found.owners}
        there = [key for key in await contents(self.nodes.tier) if key.startswith(f"{RUN}/")]
        # What was cut off under a name whose chunks others share still goes with those.
        assert not {key for key in there if is_chunk(key) and chunk_owner(*key.split("/", 1)) not in lent} - named
        assert not [key for key in there if "/flushing/" in key or "/pruning/" in key]


_WEIGHTS = (40, 12, 15, 8, 5, 1, 6, 3)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_in_whatever_order_nobody_is_harmed(home, seed):
    """Daemons take turns; each acts on what it just saw."""

    async def work():
        story = Story(home, seed, lag=False)
        await story.launch()
        for _ in range(60):
            if story.rng.random() < 0.4:
                await story.event()
            else:
                with contextlib.suppress(StoreUnavailable):
                    await story.rng.choice(story.nodes.alive()).turn(story.rng)
            await story.look()
        await story.end()
        assert story.nodes.tier.checks > 20

    asyncio.run(work())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_at_once_nobody_is_harmed(home, seed, monkeypatch):
    """Daemons work at the same time over slow lines, and act on what they saw a while ago."""

    async def work():
        story = Story(home, seed, lag=True)
        story.nodes.tier.aware = False  # nobody can know of what came after the look
        await story.launch()

        async def daemon(node: Node) -> None:
            while True:
                with contextlib.suppress(TierdError):
                    await node.turn(story.rng)
                await asyncio.sleep(0)

        for _ in range(30):
            await story.event()
            for node in story.nodes.alive():
                if node not in story.at_work:
                    story.at_work[node] = asyncio.ensure_future(daemon(node))
            for _ in range(story.rng.choice((0, 20, 100))):
                await asyncio.sleep(0)
            await story.look()
        for node in story.nodes.alive():
            await story.stop(node)
        monkeypatch.setattr(intents, "_age", lambda stamp: 10**12)  # what was cut off is left over now
        await story.end()

    asyncio.run(work())
