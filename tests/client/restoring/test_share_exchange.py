"""Ranks of several nodes read what all of them hold from a tier once, and send it to each other."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from support import dcp_ranks
from support.divided import comparable, divided, divided_state, put_divided, restore_divided, write_divided
from support.doubles import Double, damage, is_chunk
from support.waiting import wait_until
from support.world import Daemon

from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

STATES = [divided_state(rank) for rank in range(4)]
NODES = {"pairs": [(0, 1), (2, 3)], "alone": [(0,), (1,), (2,), (3,)], "uneven": [(0, 2, 3), (1,)]}


class Cluster:
    """Nodes with a spool and a daemon each, and one tier that has a checkpoint of four ranks."""

    def __init__(self, path, saved_nodes, nodes, stack, second_tier=False) -> None:
        self.tier, self.second = path / "tier", path / "second"
        self.tier.mkdir()
        self.second.mkdir()
        self.meeting = path / "meeting"
        self.saved = Spool(path / "saved")
        self.contents = divided(STATES, nodes=saved_nodes)
        tiers = [FileStore(self.tier), *([FileStore(self.second)] if second_tier else ())]
        self.parts = asyncio.run(put_divided(self.saved, 1, self.contents, *tiers))
        self.spools = [Spool(path / f"node{number}") for number in range(len(nodes))]
        self.stores = [Double(FileStore(self.tier)) for _ in nodes]
        self.node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        for spool, store in zip(self.spools, self.stores, strict=True):
            stores = {"tier": store} | ({"second": FileStore(self.second)} if second_tier else {})
            stack.enter_context(Daemon(spool.root, stores))

    def restore(self, harm="") -> list:
        spools = [str(self.spools[self.node_of[rank]].root) for rank in range(4)]
        return dcp_ranks.run(4, self.meeting, restore_divided, spools, harm, silent={2} if harm == "stopped" else ())

    def chunk_gets(self) -> list[str]:
        return [key for store in self.stores for operation, key in store.calls if operation == "get" and is_chunk(key)]


@pytest.fixture
def cluster(tmp_path, quick):
    with ExitStack() as stack:
        yield lambda saved, nodes: Cluster(tmp_path, NODES[saved], NODES[nodes], stack)


def check_states(results) -> None:
    assert [state for _, _, _, state in results] == [comparable(state) for state in STATES]


@pytest.mark.parametrize("saved", NODES)
@pytest.mark.parametrize("nodes", ["pairs", "alone"])
def test_nodes_read_each_chunk_of_the_tier_once(cluster, saved, nodes):
    world = cluster(saved, nodes)
    results = world.restore()
    check_states(results)
    assert any("exchanged" in messages for _, _, messages, _ in results)
    gets = world.chunk_gets()
    if saved != "uneven":  # there two nodes cut the same bytes into other chunks
        assert len(gets) == len(set(gets))
    for spool in world.spools:
        assert not any(spool.has(part) or spool.fetch_directory(part).exists() for part in world.parts)


def test_ranks_of_one_node_read_each_replicated_chunk_once_and_write_no_file(tmp_path, quick):
    with ExitStack() as stack:
        ranks = [tuple(range(4))]
        world = Cluster(tmp_path, ranks, ranks, stack)
        results = world.restore()
        check_states(results)
        assert not any("exchanged" in messages for _, _, messages, _ in results)
        replicated = {chunk.xxh3_128 for part in world.parts for chunk in homed(world.saved, part)}
        gets = [key for key in world.chunk_gets() if key.split("/")[-1][:32] in replicated]
        assert len(gets) == len(set(gets)) == len(replicated)
        (spool,) = world.spools
        assert not any(spool.has(part) or spool.fetch_directory(part).exists() for part in world.parts)


def homed(spool, part) -> list:
    return [chunk for chunk in spool.manifest(part).chunks() if chunk.home is not None]


def test_ranks_beyond_the_largest_group_get_the_chunks_from_a_leader(cluster):
    world = cluster("alone", "alone")
    check_states(world.restore("groups of two"))
    gets = world.chunk_gets()
    assert len(gets) == len(set(gets))


def test_rank_whose_node_has_its_part_reads_there_and_sends(cluster):
    world = cluster("alone", "alone")
    write_divided(world.spools[2], 1, [None, None, world.contents[2], None])
    check_states(world.restore())
    replicated = {chunk.xxh3_128 for chunk in world.saved.manifest(world.parts[2]).chunks() if chunk.home is not None}
    assert replicated and not replicated & {key.split("/")[-1][:32] for key in world.chunk_gets()}


def test_ranks_that_have_their_parts_send_nothing(cluster):
    world = cluster("pairs", "pairs")
    for number, spool in enumerate(world.spools):
        write_divided(
            spool, 1, [one if world.node_of[rank] == number else None for rank, one in enumerate(world.contents)]
        )
    results = world.restore()
    check_states(results)
    assert not world.chunk_gets()
    assert not any("exchanged" in messages for _, _, messages, _ in results)


def test_wrong_bytes_from_a_rank_are_read_from_the_tier(cluster):
    results = cluster("pairs", "pairs").restore("sends wrong bytes")
    check_states(results)
    said = [message for _, _, messages, _ in results for message in messages if "rank 2 sent wrong bytes" in message]
    assert said


@pytest.mark.parametrize("harm", ["killed", "stopped"])
def test_rank_that_is_gone_in_the_exchange_ends_the_restore_of_all(cluster, harm):
    world = cluster("pairs", "pairs")
    results = world.restore(harm)
    assert all("StoreUnavailable" in str(results[rank]) and "rank 2" in str(results[rank]) for rank in (0, 1, 3))


def test_chunk_that_is_wrong_on_one_tier_is_read_from_the_other_reported_and_repaired(tmp_path, quick):
    with ExitStack() as stack:
        world = Cluster(tmp_path, NODES["alone"], NODES["alone"], stack, second_tier=True)
        digests = {chunk.xxh3_128: chunk.size for chunk in homed(world.saved, world.parts[0])}
        chunks = [path for path in (world.tier / "run" / "chunks").rglob("*") if path.name.partition(".")[0] in digests]
        victim = max(chunks, key=lambda path: path.stat().st_size)
        right = victim.read_bytes()
        damage(victim, "flip")
        results = world.restore()
        check_states(results)
        assert any("exchanged" in messages for _, _, messages, _ in results)
        assert any("a copy is corrupt" in message for _, _, messages, _ in results for message in messages)
        wait_until(lambda: victim.read_bytes() == right)


def test_chunk_that_is_wrong_on_every_tier_makes_all_ranks_take_the_older_checkpoint(cluster):
    world = cluster("pairs", "pairs")
    newer = divided([divided_state(rank, step=2) for rank in range(4)], nodes=NODES["pairs"])
    parts = asyncio.run(put_divided(world.saved, 2, newer, FileStore(world.tier)))
    chunks = (world.tier / "run" / "chunks").rglob(f"{parts[0].checkpoint.step:012}.*/*/*")
    damage(max(chunks, key=lambda path: path.stat().st_size), "flip")
    results = world.restore()
    check_states(results)
    assert [step for step, _, _, _ in results] == [1] * 4
