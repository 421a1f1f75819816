"""DCP over several ranks, each with a node of its own and nothing in common but a tier: what any number of ranks loads
is bit for bit what another number saved."""

from __future__ import annotations

import contextlib
import inspect
import shutil

import pytest
import torch
from support import dcp_ranks
from support.chunk_keys import chunk_files
from support.world import Daemon, corrupt
from torch.distributed import checkpoint as dcp

from tierd.cli import run
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def cluster(tmp_path, quick):
    """Makes nodes, each with a daemon; runs ranks on them."""
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path, stack)


class Cluster:
    def __init__(self, base, stack) -> None:
        self.base, self._stack, self._count = base, stack, 0
        self.tier = base / "tier"
        self.tier.mkdir()
        self.daemons: list[Daemon] = []

    def nodes(self, count: int) -> list[str]:
        """The spools of so many fresh nodes."""
        made = []
        for _ in range(count):
            self._count += 1
            spool = Spool(self.base / f"node-{self._count}")
            self.daemons.append(self._stack.enter_context(Daemon(spool.root, {"tier": FileStore(self.tier)})))
            made.append(str(spool.root))
        return made

    def run(self, world, work, *args):
        self._count += 1
        found = dcp_ranks.run(world, self.base / f"meeting-{self._count}", work, *args)
        failed = [one for one in found if isinstance(one, RuntimeError)]
        assert not failed, failed[0]
        return found

    def parts(self):
        """Every part of every spool."""
        return sorted(one for daemon in self.daemons for one in daemon.spool.parts())

    def settle(self) -> None:
        for daemon in self.daemons:
            daemon.settle()


@pytest.mark.parametrize("how", ["sync", "save"])
def test_checkpoint_of_four_ranks_is_loaded_by_two_and_eight(cluster, how):
    expected = cluster.run(4, dcp_ranks.save_spread, cluster.nodes(4), [3, 5], how)
    assert all(state == expected[0] for state in expected)
    cluster.settle()
    if how == "sync":
        _torch_alone_reads(cluster, expected[0])
    for world in (2, 8):
        for found, state, later, origin in cluster.run(world, dcp_ranks.load_spread, cluster.nodes(world)):
            assert state == expected[0]
            assert (found.step, found.tier, found.metrics, found.skipped) == (5, "tier", {"loss": 2.5}, ())
            assert later and "step 5" in origin


def _torch_alone_reads(cluster, expected) -> None:
    """What `tierd restore --to` gives is a DCP checkpoint once the coordinator's `.metadata` lies on top of it."""
    target = cluster.base / "restored"
    assert run(["restore", f"file://{cluster.tier}", "--run", "run", "--to", str(target)]) == 0
    assert (target / "00003-of-00004" / "__3_0.distcp").is_file()
    shutil.copy(target / "00000-of-00004" / ".metadata", target)
    state = {"rows": torch.zeros(256, 1024), "square": torch.zeros(64, 48), "note": {"epoch": 0}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(target))
    assert dcp_ranks.gathered(state) == {
        "rows": expected["rows"],
        "square": expected["square"],
        "note": {"epoch": 5},
    }


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="this torch always uses collectives"
)
def test_ranks_that_save_without_collectives_read_their_own(cluster):
    nodes = cluster.nodes(1) * 2
    for rank, reported in enumerate(cluster.run(2, dcp_ranks.save_each_alone, nodes, [4])):
        assert reported == (4, [rank] * 50, [])
    assert [(one.rank, one.world) for one in cluster.parts()] == [(0, 2), (1, 2)]


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="this torch always uses collectives"
)
@pytest.mark.parametrize("name", ["__1_0.distcp", "__1.metadata"])
def test_ranks_that_read_their_own_step_back_together(cluster, name):
    """Where torch gathers no failures while it reads, one rank would raise and the other wait for it."""
    nodes = cluster.nodes(1) * 2
    cluster.run(2, dcp_ranks.save_each_alone, nodes, [4, 5])
    cluster.settle()
    [bad] = [one for one in cluster.parts() if (one.checkpoint.step, one.rank) == (5, 1)]
    for chunk in chunk_files(cluster.tier, "run", bad.checkpoint.step, rank=1):
        corrupt(chunk)
    corrupt(cluster.daemons[0].spool.path(bad) / name)
    loaded = cluster.run(2, dcp_ranks.load_each_alone, nodes)
    assert [(step, own) for step, own, _ in loaded] == [(4, [rank] * 50) for rank in range(2)]
    # A rank that lists after the daemon quarantined the part sees no step 5.
    reasons = [reason for _, _, found in loaded for reason in found]
    assert reasons and all(reason.startswith("rank 1: ") for reason in reasons)


def test_model_of_fsdp_and_its_adam_are_restored_on_fewer_ranks(cluster):
    expected = cluster.run(4, dcp_ranks.save_trained, cluster.nodes(4), 3)
    cluster.settle()
    for step, state in cluster.run(2, dcp_ranks.load_trained, cluster.nodes(2)):
        assert step == 3 and state == expected[0]


@pytest.mark.parametrize("how", ["sync", "save"])
def test_where_one_ranks_part_is_corrupt_all_step_back_and_say_whose(cluster, how):
    cluster.run(2, dcp_ranks.save_spread, cluster.nodes(2), [1, 2], how)
    cluster.settle()
    [bad] = [one for one in cluster.parts() if (one.checkpoint.step, one.rank) == (2, 1)]
    chunks = chunk_files(cluster.tier, "run", bad.checkpoint.step, rank=1)
    chunk = max(chunks, key=lambda one: one.stat().st_size)
    corrupt(chunk)
    reasons = set()
    for found, _, later, origin in cluster.run(2, dcp_ranks.load_spread, cluster.nodes(2)):
        assert found.step == 1 and later and "step 1" in origin
        [skipped] = found.skipped
        assert skipped.step == 2
        reasons.add(skipped.reason)
    [reason] = reasons
    assert chunk.name in reason and reason.startswith("rank ")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_that_fails_on_one_rank_is_never_offered(cluster, victim):
    nodes = cluster.nodes(2)
    for rank, (reported, by_close) in enumerate(cluster.run(2, dcp_ranks.save_failing, nodes, victim)):
        assert reported == {victim: "SpoolFull"}
        assert ("1 save (step 2) is in no place" in by_close) == (rank == victim)
    left = [(one.checkpoint.step, one.rank) for one in cluster.parts()]
    assert left == [(1, 0), (1, 1)] + ([(2, 1)] if victim == 0 else [])
    cluster.settle()
    for found, *_ in cluster.run(2, dcp_ranks.load_spread, nodes):
        assert found.step == 1


@pytest.mark.parametrize(("how", "world"), [("thread", 2), ("process", 1)])
def test_async_save(cluster, how, world):
    if how == "process" and not hasattr(dcp.state_dict_saver, "AsyncCheckpointerType"):
        pytest.skip("this torch saves in a thread only")
    nodes = cluster.nodes(world)
    expected = cluster.run(world, dcp_ranks.save_spread, nodes, [1, 2], how)
    assert [one.checkpoint.step for one in cluster.parts()] == [1] * world + [2] * world
    cluster.settle()
    for found, state, *_ in cluster.run(world, dcp_ranks.load_spread, nodes):
        assert found.step == 2 and state == expected[0]


def test_ranks_that_save_different_steps_get_an_error_and_so_does_a_retry(cluster):
    for rank, ((apart, again), by_close) in enumerate(cluster.run(2, dcp_ranks.save_apart, cluster.nodes(2))):
        [apart], [again] = apart, again
        assert ("1 save (step 5) is in no place" in by_close) == (rank == 0)
        assert "step 6" in apart and "step 5" in apart and "every rank of a launch saves the same step" in apart
        assert "rank 1 of 2 is already committed" in again


def test_ranks_without_a_process_group_step_back_together(cluster):
    """DCP has no gather there, and each would find out alone."""
    nodes = cluster.nodes(1) * 2
    cluster.run(2, dcp_ranks.save_two, nodes)
    cluster.settle()
    [bad] = [one for one in cluster.parts() if (one.checkpoint.step, one.rank) == (2, 1)]
    for chunk in chunk_files(cluster.tier, "run", bad.checkpoint.step, rank=1):
        corrupt(chunk)
    corrupt(cluster.daemons[0].spool.path(bad) / "__1_0.distcp")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = cluster.run(2, dcp_ranks.load_own, nodes, store.port)
    assert [one[:3] for one in found] == [(1, 1, 1)] * 2
    assert found[0][3] == found[1][3]
