"""The format of sharded tensors: what two ranks left is read by nothing but FORMAT.md, restored and resharded by code
of today, and still written the same. The fixture in tests/format/v1-dtensor/ is never edited; see make_v1_dtensor.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from support import dcp_ranks, sharded  # noqa: E402

HERE = Path(__file__).parent / "format"
FIXTURE = HERE / "v1-dtensor"
FORMAT = (Path(__file__).parent.parent / "tierd" / "FORMAT.md").read_text()


@pytest.fixture
def maker(monkeypatch):
    """The module that wrote the fixture; ranks import it as well."""
    monkeypatch.syspath_prepend(str(HERE))
    import make_v1_dtensor

    return make_v1_dtensor


def part(maker, rank):
    """A part's tree, and its tensors by the name in their file."""
    load = pytest.importorskip("safetensors.torch").load
    home = FIXTURE / "spool" / maker.PARTS[rank].path
    return json.loads((home / "state.json").read_bytes()), load((home / "tensors.safetensors").read_bytes())


def sharded_entries(tree):
    """By name: the tensor's node and the placement."""
    (members, *_) = tree["model"]["$odict"]
    return {name: node["$dtensor"] for name, node in members.items()}


def stored(node, tensors):
    if "$view" in node:
        name, dtype = node["$view"]
        assert dtype == "complex64"
        return torch.view_as_complex(tensors[name])
    return tensors[node["$tensor"]]


def pieces(elements, count):
    """FORMAT.md: pieces of ⌈size / n⌉ elements, of which the last are shorter or empty."""
    size = -(-len(elements) // count)
    return [elements[at * size : (at + 1) * size] for at in range(count)]


def elements(placement):
    """FORMAT.md: for each dimension of the tensor, the elements that a rank has of it."""
    found = [list(range(size)) for size in placement["shape"]]
    for (kind, *numbers), count, at in zip(
        placement["placements"], placement["mesh"], placement["coordinate"], strict=True
    ):
        if kind == "shard":
            found[numbers[0]] = pieces(found[numbers[0]], count)[at]
        elif kind == "strided_shard":
            dim, split = numbers
            found[dim] = [one for piece in pieces(found[dim], split) for one in pieces(piece, count)[at]]
    return found


def test_fixture_has_every_placement_of_the_format(maker):
    """Every rule, a mesh with names and one without, uneven and empty shards, none of any dimension, a tensor at two
    places, a view: else the rest proves less."""
    placements = [placement for _, placement in sharded_entries(part(maker, 1)[0]).values()]
    assert {rule[0] for one in placements for rule in one["placements"]} == {"replicate", "shard", "strided_shard"}
    assert {one["names"] is None for one in placements} == {True, False}
    assert {0, 1, 2} <= {len(one["shape"]) for one in placements}
    rows = [elements(sharded_entries(part(maker, rank)[0])["rows"][1])[0] for rank in (0, 1)]
    assert list(map(len, rows)) == [3, 2]
    assert elements(sharded_entries(part(maker, 1)[0])["few"][1])[0] == []
    entries = sharded_entries(part(maker, 0)[0])
    assert entries["tied"] == entries["rows"] and "$view" in entries["complex"][0]


def test_shards_lie_where_the_format_says(maker):
    for name in maker.TENSORS:
        whole, seen = maker.whole(name), torch.zeros_like(maker.whole(name), dtype=torch.bool)
        for rank in (0, 1):
            tree, tensors = part(maker, rank)
            node, placement = sharded_entries(tree)[name]
            assert (tuple(placement["shape"]), tuple(placement["stride"])) == (tuple(whole.shape), whole.stride())
            own, local = elements(placement), stored(node, tensors)
            index = torch.meshgrid(*(torch.tensor(one, dtype=torch.int64) for one in own), indexing="ij") if own else ()
            assert torch.equal(local, whole[index]), (name, rank)
            seen[index] = True
            assert tuple(local.shape) == tuple(map(len, own)) and local.dtype == whole.dtype
        assert bool(seen.all()), name


def test_ranks_of_today_write_the_same_and_read_it(maker, tmp_path):
    spool = tmp_path / "spool"
    shutil.copytree(FIXTURE / "spool", spool)
    found = dcp_ranks.run(2, tmp_path / "meeting", sharded.restore_fixture, str(spool))
    for one in found:
        assert not isinstance(one, RuntimeError), one
    for rank, (tree, was, now) in enumerate(found):
        assert tree == (FIXTURE / "spool" / maker.PARTS[rank].path / "state.json").read_bytes()
        assert was == now


def test_one_process_of_today_loads_the_whole_tensors(maker, tmp_path):
    spool = tmp_path / "spool"
    shutil.copytree(FIXTURE / "spool", spool)
    [found] = dcp_ranks.run(1, tmp_path / "meeting", sharded.load_fixture, str(spool))
    assert not isinstance(found, RuntimeError), found
    assert found == {name: sharded.bits(maker.whole(name)) for name in maker.TENSORS}


def test_the_documented_program_restores_both_parts_from_the_tier(maker, tmp_path):
    program, *_ = re.findall(r"```python\n(.*?)```", FORMAT, re.DOTALL)
    (tmp_path / "restore.py").write_text(program)
    command = [sys.executable, "-I", tmp_path / "restore.py", FIXTURE / "tier", "demo", tmp_path / "target"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for one in maker.PARTS:
        for name in ("state.json", "tensors.safetensors"):
            restored = tmp_path / "target" / Path(one.path).name / name
            assert restored.read_bytes() == (FIXTURE / "spool" / one.path / name).read_bytes()
