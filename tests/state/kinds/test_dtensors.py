"""DTensors in a state: each rank's local shard is saved with its placement, and comes back bit for bit."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import dcp_ranks, sharded
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from tierd.core.errors import StateMismatch
from tierd.core.shard_placement import MAX_BOXES, Placement, parse_placement
from tierd.state.kinds.dtensors import SavedDTensor, is_placed_alike, placement_of
from tierd.state.tree_parser import parse_tree

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path):
    """Runs four ranks, each with a spool of its own."""
    count = itertools.count()

    def ranks(work, *args, world=4):
        found = dcp_ranks.run(world, tmp_path / f"meeting-{next(count)}", work, *args)
        failed = [one for one in found if isinstance(one, RuntimeError)]
        assert not failed, failed[0]
        return found

    return ranks


@pytest.fixture
def spools(tmp_path):
    return [str(tmp_path / "spool")] * 4


# -- where a shard lies ---------------------------------------------------------------------------------------------


def test_a_shard_has_the_elements_that_torch_gives_its_rank():
    """Held against torch's own splitting of a tensor that holds its elements' numbers."""
    dice = random.Random(2024)
    for _ in range(200):
        dims = dice.randint(1, 3)
        shape = tuple(dice.randint(0 if dice.random() < 0.1 else 1, 13) for _ in range(dims))
        mesh = tuple(dice.randint(1, 4) for _ in range(dice.randint(1, 3)))
        placements = [
            dice.choice(
                [
                    Replicate(),
                    Shard(dice.randrange(dims)),
                    _StridedShard(dice.randrange(dims), split_factor=dice.randint(1, 4)),
                ]
            )
            for _ in mesh
        ]
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for coordinate in itertools.product(*map(range, mesh)):
            expected = whole
            for placement, count, at in zip(placements, mesh, coordinate, strict=True):
                if not isinstance(placement, Replicate):
                    parts, _ = placement._split_tensor(expected, count, with_padding=False, contiguous=False)
                    expected = parts[at]
            found = _placement(shape, mesh, placements, coordinate)
            assert found.local_shape == tuple(expected.shape)
            local = torch.full(found.local_shape, -1)
            for box in found.boxes():
                local[_slices(box.local, box.size)] = whole[_slices(box.offset, box.size)]
            assert torch.equal(local, expected)
            assert parse_placement(found.as_plain()) == found


def stand_in(placements, *orders):
    """A DTensor of 8 rows on the first rank of a mesh of 2 by 2, whose spec holds orders beside its placements."""
    mesh = SimpleNamespace(shape=(2, 2), mesh_dim_names=None, get_coordinate=lambda: [0, 0])
    order = tuple(SimpleNamespace(tensor_dim=dim, mesh_dims=dims) for dim, dims in orders)
    spec = SimpleNamespace(mesh=mesh, placements=placements, shape=(8, 4), stride=(4, 1), shard_order=order)
    return SimpleNamespace(_spec=spec, _local_tensor=torch.zeros(2, 4))


def test_an_order_that_other_versions_derive_from_strided_placements_is_no_order_of_its_own():
    """Some versions of torch keep the order of splitting beside the placements, and some derive it from them."""
    strided, plain = [_StridedShard(0, split_factor=2), Shard(0)], [Shard(0), Shard(0)]
    assert placement_of(stand_in(strided, (0, (1, 0)))).rules == (("strided_shard", 0, 2), ("shard", 0))
    assert placement_of(stand_in(plain, (0, (0, 1)))).rules == (("shard", 0), ("shard", 0))
    assert placement_of(stand_in(plain)).rules == (("shard", 0), ("shard", 0))
    for placements, order in ((plain, (0, (1, 0))), ([_StridedShard(1, split_factor=1), Shard(0)], (0, (1, 0)))):
        with pytest.raises(ValueError, match="in an order of its own"):
            placement_of(stand_in(placements, order))


def test_placements_that_older_versions_call_equal_are_distinguished():
    """Up to torch 2.8 a strided placement equals a plain one of its dimension."""

    class Spec(SimpleNamespace):
        def __eq__(self, other):
            return self.shape == other.shape

    first, same = Spec(placements=[Shard(0), Shard(0)], shape=(8,)), Spec(placements=(Shard(0), Shard(0)), shape=(8,))
    strided, longer = Spec(placements=[_StridedShard(0, split_factor=2), Shard(0)], shape=(8,)), Spec(**vars(first))
    longer.shape = (9,)
    assert is_placed_alike(first, same)
    assert not is_placed_alike(first, strided)
    assert not is_placed_alike(first, longer)


def _placement(shape, mesh, placements, coordinate) -> Placement:
    rules = []
    for one in placements:
        strided = isinstance(one, _StridedShard)
        rules.append(
            ("replicate",)
            if isinstance(one, Replicate)
            else ("strided_shard", one.dim, one.split_factor)
            if strided
            else ("shard", one.dim)
        )
    return Placement(shape, (1,) * len(shape), mesh, None, tuple(rules), coordinate)


def _slices(begins, sizes):
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


GOOD = {
    "shape": [8, 3],
    "stride": [3, 1],
    "mesh": [2, 2],
    "names": ["dp", "tp"],
    "placements": [["strided_shard", 0, 2], ["shard", 0]],
    "coordinate": [1, 0],
}


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [8, -3]},
        {"shape": [8, True]},
        {"shape": [8, 1 << 63]},
        {"shape": [8]},
        {"stride": "31"},
        {"mesh": [2, 0]},
        {"mesh": [2]},
        {"mesh": [1] * 33, "names": None, "placements": [["replicate"]] * 33, "coordinate": [0] * 33},
        {"names": ["dp"]},
        {"names": ["dp", 1]},
        {"names": ["dp", "\ud800"]},
        {"placements": [["shard", 0]]},
        {"placements": [["shard", 2], ["replicate"]]},
        {"placements": [["shard"], ["replicate"]]},
        {"placements": [["replicate", 0], ["replicate"]]},
        {"placements": [["partial"], ["replicate"]]},
        {"placements": [[], ["replicate"]]},
        {"placements": [[["shard"], 0], ["replicate"]]},
        {"placements": [["strided_shard", 0, 0], ["replicate"]]},
        {"placements": [["strided_shard", 0, 1 << 20], ["replicate"]]},
        {"coordinate": [2, 0]},
        {"coordinate": [0]},
        {"coordinate": {"0": 0}},
        {"more": 1},
    ],
)
def test_a_placement_that_is_none_is_refused(change):
    assert parse_placement(GOOD).local_shape == (2, 3)
    with pytest.raises(ValueError):
        parse_placement({**GOOD, **change})


def test_no_placement_takes_forever():
    """Each strided placement could multiply the blocks of the one before."""
    rules = (("strided_shard", 0, 1 << 16),) * 4
    bad = Placement((1 << 40,), (1,), (3,) * 4, None, rules, (0,) * 4)
    assert bad.local_shape[0] > 1 << 30
    with pytest.raises(ValueError, match=f"more than {MAX_BOXES}"):
        Placement((1 << 20,), (1,), (2,), None, (("strided_shard", 0, 4 * MAX_BOXES),), (0,)).runs()
    square = Placement((1 << 20,) * 2, (1, 1), (2, 2), None, _many_by_many(MAX_BOXES // 2), (0, 0))
    assert len(square.runs()[0]) == MAX_BOXES // 2
    with pytest.raises(ValueError, match=f"more than {MAX_BOXES}"):
        square.boxes()


def _many_by_many(split):
    return tuple(("strided_shard", dim, split) for dim in range(2))


@pytest.mark.parametrize(
    "text",
    [
        '{"$dtensor":[1,{}]}',
        '{"$dtensor":[{"$tensor":"x"}]}',
        '{"$dtensor":[{"$tensor":"x"},[]]}',
        '{"$dtensor":{"$tensor":"x"}}',
        '{"$dtensor":[{"$tensor":"x"},{"shape":[3]}]}',
    ],
)
def test_a_tree_with_a_shard_that_is_none_is_refused(text):
    with pytest.raises(StateMismatch, match="the state tree"):
        parse_tree(f'{{"a":{text}}}'.encode(), {"x": torch.ones(3)}.__getitem__)


def test_a_shard_is_parsed_without_a_process_group():
    where = '{"shape":[6],"stride":[1],"mesh":[2],"names":null,"placements":[["shard",0]],"coordinate":[1]}'
    text = f'{{"$dtensor":[{{"$tensor":"x"}},{where}]}}'
    local = torch.ones(3)
    found = parse_tree(f'{{"a":{text}}}'.encode(), {"x": local}.__getitem__)["a"]
    assert isinstance(found, SavedDTensor) and found.local is local
    assert found.placement == Placement((6,), (1,), (2,), None, (("shard", 0),), (1,))


# -- on four ranks --------------------------------------------------------------------------------------------------


def test_every_rank_gets_its_shard_back_in_place(run, spools):
    """FSDP2 over tensor parallelism, HSDP, and DTensors in many placements; blocking and behind training."""
    found = run(sharded.save_and_restore, spools)
    strided = [where for where, *_ in found[0].values() if where and "_StridedShard" in where[0]]
    assert strided, "the model has no strided shard: this test proves less than it says"
    assert any(shape[:1] == (0,) for _, _, shape in found[1].values()), "no rank has an empty shard"
    described = run(sharded.restore_otherwise, spools)
    for one_rank in described:
        other_mesh, other_names, other_rules, plain, nothing = one_rank
        assert "on a mesh of (dp=2, tp=2)" in other_mesh and "on a mesh of (dp=4, tp=1)" in other_mesh
        assert "on a mesh of (replicate=2, shard=2)" in other_names
        assert "placed (shard 0, replicate)" in other_rules and "placed (replicate, shard 0)" in other_rules
        assert "no DTensor, here" in plain
        assert "no DTensor on such a mesh here" in nothing
        assert all(text.count("tierd.dcp.load(state, checkpointer)") == 1 for text in one_rank)


def test_tensor_that_is_no_whole_shard_is_refused_by_its_path(run, spools):
    for rank, (partial, misshapen, meta) in enumerate(run(sharded.refused, spools)):
        assert partial.startswith('state["x"]["y"]: a DTensor with a sum that is still pending')
        assert "redistribute" in partial
        assert ("whose local shard should be (4,)" in misshapen) == (rank != 1), misshapen
        assert meta.startswith('state["x"]["y"]: a meta tensor')


def test_a_state_of_shards_is_walked_once(run):
    for described in run(sharded.captures):
        assert described == [0, 1, 0, 1, 0]


def test_a_state_of_shards_and_packed_values_grows_without_a_walk(run):
    """Plain tensors and entries of packed lists do; a DTensor, and a list that has no more room, take one."""
    for described in run(sharded.grows):
        assert described == [0, 0, 0, 1, 0, 1, 0, 1, 1]


@pytest.mark.parametrize("world", [1, 2])
def test_packed_values_beside_shards_are_restored_in_place_and_through_dcp(run, spools, world):
    run(sharded.save_values, spools, world=2)
    for expected, found in run(sharded.load_values, spools, world=world):
        assert found == expected


def test_a_write_to_a_dtensor_behind_a_save_is_noticed(run, spools):
    """torch counts a write to a DTensor on the DTensor, not on its local shard."""
    for described in run(sharded.torn, spools):
        assert ["mixture" in one for one in described] == [True] * 3, described


def test_a_model_that_fsdp_has_gathered_is_saved_and_restored_as_shards(run, spools):
    """Right after an evaluation, say: the model's own parameters are whole tensors, and its state has shards."""
    for described in run(sharded.gathered_at_the_save, spools, world=2):
        assert described == ["DTensor Parameter"] * 8


def test_the_how_to_s_example_resumes_on_other_ranks(run, tmp_path):
    shown = (ROOT / "examples" / "sharded.py").read_text().split("# -- the docs show from here\n")[1]
    shown = "\n".join(line.removeprefix("    ") for line in shown.split("    # -- to here\n")[0].rstrip().splitlines())
    assert f"```python\n{shown}\n```" in (ROOT / "docs" / "howto" / "sharded.md").read_text()
    losses = [run(sharded.example, str(tmp_path / "spool"), steps, world=2) for steps in (7, 12)]
    assert losses[1] == run(sharded.example, str(tmp_path / "other"), 12, world=2)  # as if nobody had ended it
    assert len(run(sharded.example, str(tmp_path / "spool"), 16)) == 4


# -- resharded ------------------------------------------------------------------------------------------------------

SHARED = ["hybrid", "its optimizer", "model", "note", "optimizer", "plain", "tensors"]  # the same on all ranks


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (1, 1), (1, 4)])
def test_checkpoint_of_four_ranks_is_loaded_by_other_meshes(run, spools, shape):
    """FSDP2 over tensor parallelism and HSDP, and their optimizers, onto other meshes; every tensor whole and right."""
    expected = run(sharded.save_whole, spools, 3)
    world = shape[0] * shape[1]
    alone = expected[0].keys() - {"/own", "/mine"}
    for rank, found in enumerate(run(sharded.load_whole, spools, shape, SHARED if world != 4 else None, world=world)):
        step, tier, state = found
        assert (step, tier) == (3, "local")
        assert {name: state[name] for name in alone} == {name: expected[0][name] for name in alone}
        if world == 4:
            assert state == expected[rank]


def test_one_process_loads_the_whole_model(run, spools):
    [expected, *_], [found] = run(sharded.save_whole, spools, 3), run(sharded.load_alone, spools, world=1)
    assert "/model/0.weight" in found and found == {name: expected[name] for name in found}


def test_entry_that_differs_between_ranks_is_not_resharded(run, spools):
    run(sharded.save_whole, spools, 3)
    for name in ("own", "mine"):
        for described in run(sharded.load_whole, spools, (2, 1), [name], world=2):
            assert f"'{name}': it differs between the 4 ranks that saved it, and 2 load" in described


def test_stages_that_number_their_parameters_alike_are_not_mixed_up(run, spools):
    run(sharded.save_stages, spools)
    for by_name, numbered in run(sharded.load_stages, spools, world=2):
        assert by_name == [[0.0] * 8, [1.0] * 8]
        assert "'optimizer.state.0': ranks " in numbered and " saved different shards of one coordinate" in numbered
        assert "get_state_dict" in numbered
