"""`tierd.dcp.load` of checkpoints whose ranks divided replicated tensors among them, on other numbers of ranks."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support import dcp_ranks
from support.divided import (
    DECLARED,
    comparable,
    divided,
    divided_state,
    elsewhere_of,
    emptied,
    load_entries,
    load_sharded,
    put_divided,
    save_sharded,
    with_elsewhere,
    write_divided,
)
from support.world import Daemon

import tierd
import tierd.dcp
from tierd.core.errors import StateMismatch
from tierd.core.manifest import TENSORS
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATES = [divided_state(rank) for rank in range(4)]
SHARED = {name: STATES[0][name] for name in DECLARED}


def ran(world, meeting, work, *args):
    results = dcp_ranks.run(world, meeting, work, *args)
    failed = [result for result in results if isinstance(result, RuntimeError)]
    assert not failed, failed[0]
    return results


@pytest.fixture
def fetching(tmp_path, quick):
    """Makes an empty node with a daemon over a tier that has the checkpoint."""
    (tmp_path / "tier").mkdir()
    written = Spool(tmp_path / "written")
    asyncio.run(put_divided(written, 1, divided(STATES), FileStore(tmp_path / "tier")))
    with Daemon(Spool(tmp_path / "empty").root, {"tier": FileStore(tmp_path / "tier")}):
        yield tmp_path / "empty"


@pytest.mark.parametrize("nodes", [[(0, 1, 2, 3)], [(0, 2), (1, 3)], [(0,), (1, 2, 3)]])
def test_process_loads_tensors_that_four_ranks_divided(spool, nodes):
    write_divided(spool, 1, divided(STATES, nodes=nodes))
    state = emptied(SHARED)
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        assert tierd.dcp.load(state, ckpt).step == 1
    assert comparable(state) == comparable(SHARED)


def test_one_process_loads_from_a_tier(fetching):
    state = emptied(SHARED)
    with tierd.Checkpointer(fetching, "run") as ckpt:
        assert tierd.dcp.load(state, ckpt).tier == "tier"
    assert comparable(state) == comparable(SHARED)


def test_entry_that_differs_from_rank_to_rank_is_refused_by_its_name(spool):
    write_divided(spool, 1, divided(STATES))
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt, pytest.raises(StateMismatch, match="'own': it differs"):
        tierd.dcp.load({"own": torch.zeros(5000, dtype=torch.int64)}, ckpt)


def test_two_ranks_load_from_a_spool_and_a_tier(spool, fetching, tmp_path):
    write_divided(spool, 1, divided(STATES))
    expected = comparable({name: SHARED[name] for name in ("model", "optimizer", "list")})
    names = list(expected)
    local = ran(2, tmp_path / "meeting", load_entries, [str(spool.root)] * 2, names)
    remote = ran(2, tmp_path / "another", load_entries, [str(fetching)] * 2, names)
    assert local == remote == [expected] * 2


def test_four_ranks_get_their_own_and_the_shared_entries(spool, tmp_path):
    write_divided(spool, 1, divided(STATES))
    names = ["model", "optimizer", "list", "own", "rank"]
    expected = [comparable({name: state[name] for name in names}) for state in STATES]
    assert ran(4, tmp_path / "meeting", load_entries, [str(spool.root)] * 4, names) == expected


def test_dtensors_beside_divided_tensors_are_resharded(tmp_path, quick):
    """Also DTensors that lie in another rank's file: each rank has the same shard, and one of them stored it."""
    spool = str(tmp_path / "spool")
    saved = ran(4, tmp_path / "meeting", save_sharded, spool, 3)
    elsewhere = {name for _, names in saved for name in names}
    assert {"weights/copied1", "weights/layer0", "runs/list"} <= elsewhere and "rows" not in elsewhere
    for world in (1, 2, 4):
        for step, tier, state in ran(world, tmp_path / f"meeting-{world}", load_sharded, [spool] * world):
            assert (step, tier, state) == (3, "local", saved[0][0])


def test_load_steps_back_if_a_header_puts_a_tensor_where_it_is_not(spool):
    write_divided(spool, 1, divided(STATES))
    newer = divided([divided_state(rank, 2) for rank in range(4)])
    by_rank = elsewhere_of(newer[2].files[TENSORS])
    by_rank["3"] += by_rank.pop("0")
    write_divided(spool, 2, [*newer[:2], with_elsewhere(newer[2], by_rank), newer[3]])
    state = emptied(SHARED)
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        loaded = tierd.dcp.load(state, ckpt)
    assert loaded.step == 1 and "not in the part of rank 3" in loaded.skipped[0].reason
    assert comparable(state) == comparable(SHARED)


def test_load_refuses_a_tree_whose_tensors_no_header_names(spool):
    parts = divided(STATES)
    write_divided(spool, 1, [*parts[:2], with_elsewhere(parts[2], {"0": ["model/large"]}), parts[3]])
    missing = "rank 2 of 4: the state tree: the tensor file has no"
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt, pytest.raises(StateMismatch, match=missing):
        tierd.dcp.load(emptied(SHARED), ckpt)
