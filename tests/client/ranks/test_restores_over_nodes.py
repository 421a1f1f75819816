"""Ranks on nodes with a spool each: where a restore finds the parts that only other nodes' spools hold."""

from __future__ import annotations

import pytest
from support.doubles import Double, contents, flip, is_chunk
from support.rank_states import harm, no_puts, value
from support.ranks import Group
from support.timed import timed_client
from support.training import same, tensors
from support.world import Daemon

import tierd
from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.part_source import NodeSource
from tierd.client.restoring.restorer import Restorer
from tierd.core.errors import DaemonUnavailable, StoreUnavailable
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore


class Nodes:
    """Two nodes, a daemon and a rank on each, and one tier. Which rank is on which node may change between launches."""

    def __init__(self, tmp_path, monkeypatch) -> None:
        self.spools = [Spool(tmp_path / name) for name in ("a", "b")]
        self.inner = MemoryStore()
        self.stores = [Double(self.inner) for _ in self.spools]
        self.group = Group(2)
        self.order = [0, 1]  # rank -> node
        self.group.install(monkeypatch)

    def __enter__(self):
        self.daemons = [
            Daemon(spool.root, {"tier": store}).__enter__()
            for spool, store in zip(self.spools, self.stores, strict=True)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self.daemons:
            daemon.stop()

    def checkpointer(self, number: int) -> tierd.Checkpointer:
        return tierd.Checkpointer(self.spools[self.order[number]].root, "run")

    def save(self, *steps: int, ranks=(0, 1), after: int | None = None) -> None:
        def work(number: int) -> None:
            with self.checkpointer(number) as checkpointer:
                if after is not None:
                    checkpointer.restore(tensors(0), step=after)
                for step in steps:
                    if number in ranks:
                        checkpointer.save(step, tensors(value(step, number))).wait()

        assert self.group.run(work) == [None, None]

    def settle(self) -> None:
        for daemon in self.daemons:
            daemon.settle()

    def take(self, *, puts: bool) -> None:
        for store in self.stores:
            store.before = None if puts else no_puts

    def restore(self, **asked) -> list:
        def work(number: int):
            state = tensors(0)
            with self.checkpointer(number) as checkpointer:
                found = checkpointer.restore(state, **asked)
                assert found is None or same(state, value(found.step, number))
                return found

        return self.group.run(work)


@pytest.fixture
def nodes(tmp_path, monkeypatch, quick):
    with Nodes(tmp_path, monkeypatch) as nodes:
        yield nodes


def test_parts_that_lie_only_in_the_nodes_own_spools_are_restored(nodes):
    """No tier has either part of step 2, no node sees both: together they are whole."""
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2)
    assert [(one.step, one.tier, one.skipped) for one in nodes.restore()] == [(2, "local", ())] * 2


def test_a_fresh_node_restores_its_rank_from_the_tier(nodes):
    nodes.save(1)
    nodes.settle()
    nodes.spools[1].remove([nodes.spools[1].parts()[0]])
    assert [(one.step, one.tier) for one in nodes.restore()] == [(1, "local"), (1, "tier")]


def test_daemon_flushes_first_the_parts_that_ranks_on_changed_nodes_need(nodes):
    """Elastic launches number nodes as they come. Stepping back would throw work away that lies one node further."""
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2)
    nodes.order = [1, 0]
    nodes.take(puts=True)
    found = nodes.restore()
    assert [getattr(one, "step", one) for one in found] == [2, 2], found
    assert all(one.skipped == () for one in found)


def test_when_it_cannot_be_flushed_no_rank_steps_back(nodes, monkeypatch):
    timed_client(monkeypatch, flushed_s=0.3)
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2)
    nodes.order = [1, 0]
    for error in nodes.restore():
        assert isinstance(error, StoreUnavailable)
        assert "step 2" in str(error) and "a node's spool alone" in str(error) and "step=…" in str(error)
    assert [one.step for one in nodes.restore(step=1)] == [1, 1]


def test_a_part_of_a_lost_node_that_was_not_flushed_is_passed_over(nodes):
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2, after=1)
    nodes.spools[1].remove([nodes.spools[1].parts()[-1]])
    found = nodes.restore()
    assert [one.step for one in found] == [1, 1]
    assert all([(s.step, s.reason.split(":")[0]) for s in one.skipped] == [(2, "incomplete")] for one in found)


def test_no_rank_steps_past_a_checkpoint_that_may_be_complete_while_a_tier_is_away(nodes):
    nodes.save(1)
    nodes.settle()
    nodes.save(2, ranks=(0,), after=1)
    nodes.stores[1].error = StoreUnavailable("down")
    for error in nodes.restore():
        assert isinstance(error, StoreUnavailable) and "step 2" in str(error) and "tier did not" in str(error)
    nodes.stores[1].error = None
    assert [one.step for one in nodes.restore()] == [1, 1]


def test_while_one_ranks_tier_is_away_its_missing_part_stops_all(nodes):
    nodes.save(1, 2)
    nodes.settle()
    nodes.spools[1].remove([nodes.spools[1].parts()[-1]])
    nodes.stores[1].error = StoreUnavailable("down")
    for error in nodes.restore():
        assert isinstance(error, StoreUnavailable) and "step 2" in str(error)
    nodes.stores[1].error = None
    assert [(one.step, one.tier) for one in nodes.restore()] == [(2, "local"), (2, "tier")]


def test_one_rank_without_a_daemon_and_without_its_part_stops_all(nodes):
    nodes.save(1, 2)
    nodes.settle()
    nodes.spools[1].remove([nodes.spools[1].parts()[-1]])
    nodes.daemons[1].stop()
    for error in nodes.restore():
        assert isinstance(error, StoreUnavailable | DaemonUnavailable) and "step 2" in str(error)


def test_a_copy_that_is_corrupt_everywhere_steps_all_back_and_each_says_whose(nodes):
    nodes.save(1, 2)
    nodes.settle()
    harm(nodes.spools[1], 2, 1, 2)
    daemon = nodes.daemons[1]
    for key in daemon.call(contents(nodes.inner)):
        if is_chunk(key) and "/000000000002." in key and "/00001/" in key:
            daemon.call(flip(nodes.inner, key))
    found = nodes.restore()
    assert [one.step for one in found] == [1, 1]
    for one in found:
        (skipped,) = one.skipped
        assert skipped.step == 2 and skipped.reason.startswith("rank 1:")
        assert "local" in skipped.reason and "tier" in skipped.reason


def restored_past_a_corrupt_copy(nodes) -> list:
    """Ranks have come to each other's nodes; rank 1's newest part is corrupt on the tier, and right in one spool."""
    nodes.save(1, 2)
    nodes.settle()
    nodes.order = [1, 0]
    daemon = nodes.daemons[0]
    for key in daemon.call(contents(nodes.inner)):
        if is_chunk(key) and "/000000000002." in key and "/00001/" in key:
            daemon.call(flip(nodes.inner, key))
    return nodes.restore()


def test_part_that_is_corrupt_on_the_tier_and_right_in_another_nodes_spool_is_flushed_again_and_restored(nodes):
    """Seeds 200120 and 200195 of the simulation: ranks came to other nodes, and all stepped back."""
    found = restored_past_a_corrupt_copy(nodes)
    assert [(one.step, one.skipped) for one in found] == [(2, ())] * 2 and found[1].tier == "tier"


def test_part_that_the_other_node_flushed_again_before_the_next_look_is_restored(nodes, monkeypatch):
    """Its daemon saw by itself that the copy was gone, and no rank lacked anything at the next look."""
    settle = Restorer.settle

    def slowly(self, candidate, error, **reported):
        settled = settle(self, candidate, error, **reported)
        if settled.corrupt:
            nodes.settle()
        return settled

    monkeypatch.setattr(Restorer, "settle", slowly)
    found = restored_past_a_corrupt_copy(nodes)
    assert [(one.step, one.skipped) for one in found] == [(2, ())] * 2 and found[1].tier == "tier"


def test_a_node_that_did_not_see_the_newest_attempt_resumes_from_no_abandoned_branch(nodes):
    """Restored at 200, went on at 210; 210 lies in one spool only. The other node still has the whole of 300."""
    nodes.save(100, 200, 300)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(210, ranks=(0,), after=200)
    found = nodes.restore()
    assert [one.step for one in found] == [200, 200]
    assert all([one.step for one in restored.skipped] == [210] for restored in found)
    nodes.save(210, after=200)
    assert [one.step for one in nodes.restore()] == [210, 210]


def test_a_reader_of_every_ranks_part_has_them_flushed_and_finds_the_newest(nodes):
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2)
    nodes.take(puts=True)

    def work(number: int):
        restorer = Restorer(NodeSource(nodes.spools[number], "run", tiers=True), Ranks())
        tried = []
        for candidate in restorer.candidates(None, None):
            tried.append((candidate.checkpoint.step, candidate.world, candidate.lacking))
            if restorer.settle(candidate, None).should_load:
                break
        restorer.close()
        return tried, restorer.resume.attempts, len(restorer.agreement.clocks)

    found = nodes.group.run(work)
    assert found[0] == found[1] and found[0][0] == [(2, 2, ())] and found[0][2] == 2
