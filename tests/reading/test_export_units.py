"""Checkpoints that other programs wrote, and a watch took, are exported as those of tierd are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import layouts
from support.watched_run import RUN, tier_of
from torch.distributed import checkpoint as dcp

import tierd
from tierd.core.errors import StateMismatch, StateRefused

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def first_version() -> Iterator[None]:
    yield
    layouts.version = 0.0


def exported(tier: Path, format: str, **options: str) -> Path:
    target = tier.parent / format
    with tierd.open(f"file://{tier}", RUN) as reader:
        reader.export(target, format, **options)
    return target


def test_a_trainers_shards_become_one_model(tmp_path: Path) -> None:
    tier = tier_of(layouts.trainer, tmp_path)
    weights = load_file(exported(tier, "hf", dtype="bf16") / "model.safetensors")
    assert weights.keys() == {"a.weight", "b.weight"}
    assert all(torch.equal(one, layouts.weight().bfloat16()) for one in weights.values())
    state = torch.load(exported(tier, "torch") / "state.pt", weights_only=True)
    assert torch.equal(state["model"]["b.weight"], layouts.weight())


@pytest.mark.parametrize(
    "write", [layouts.plain_dcp, layouts.torchtitan, layouts.lightning_sharded, layouts.megatron, layouts.nemo]
)
def test_directories_of_dcp_are_read_where_they_lie(write: Callable[[Path], Path], tmp_path: Path) -> None:
    tier = tier_of(write, tmp_path)
    weights = load_file(exported(tier, "safetensors", only="model") / "model.safetensors")
    assert weights.keys() == {"weight"} and torch.equal(weights["weight"], layouts.weight())
    state = {"model": {"weight": torch.zeros(300)}, "optimizer": {"lr": torch.zeros(20)}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(exported(tier, "dcp")), no_dist=True)
    assert torch.equal(state["model"]["weight"], layouts.weight()) and state["optimizer"]["lr"].min() == 1


def write_ckpt(root: Path) -> None:
    """What Lightning saves of a model with tied, viewed and empty tensors."""
    weight = torch.arange(12.0).view(3, 4)
    state = {"net.a": weight, "net.tied": weight, "net.row": weight[1], "net.none": torch.empty(0, 2)}
    loops = {"fit_loop": {"state_dict": {}, "epoch": 1}}
    optimizer = {"state": {0: {"exp_avg": torch.full((3, 4), 0.5)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    saved = {"epoch": 1, "global_step": 20, "state_dict": state, "optimizer_states": [optimizer], "loops": loops}
    torch.save(saved, root / "epoch=1-step=20.ckpt")


def test_an_archive_has_the_entries_of_its_mapping(tmp_path: Path) -> None:
    tier = tier_of(write_ckpt, tmp_path)
    saved = torch.load(tmp_path / "out" / "epoch=1-step=20.ckpt", weights_only=True)
    weights = load_file(exported(tier, "safetensors", only="state_dict", strip="net.") / "model.safetensors")
    assert weights.keys() == {"a", "tied", "row", "none"}
    assert all(torch.equal(one, saved["state_dict"][f"net.{name}"]) for name, one in weights.items())
    found = torch.load(exported(tier, "torch") / "state.pt", weights_only=True)
    assert found["epoch"] == 1 and found["loops"]["fit_loop"]["epoch"] == 1
    moments = found["optimizer_states"][0]["state"][0]["exp_avg"]
    assert torch.equal(moments, saved["optimizer_states"][0]["state"][0]["exp_avg"])
    assert torch.equal(found["state_dict"]["net.row"], saved["state_dict"]["net.row"])


def test_a_file_of_torch_save_and_one_of_safetensors(tmp_path: Path) -> None:
    for name in ("torch_save", "safetensors"):
        (tmp_path / name).mkdir()
        tier = tier_of(getattr(layouts, name), tmp_path / name)
        weights = load_file(exported(tier, "hf") / "model.safetensors")
        assert weights.keys() == {"weight"} and torch.equal(weights["weight"], layouts.weight())


LAZY = {
    "conjugated": torch.tensor([1 + 2j, 3 + 4j]).conj(),
    "negated": torch.view_as_complex(torch.arange(4.0).view(2, 2)).conj().imag.as_strided((1,), (1,)),
}


@pytest.mark.parametrize("how", LAZY)
def test_a_tensor_that_is_lazily_conjugated_or_negated_is_refused(how: str, tmp_path: Path) -> None:
    """torch stores the bytes as they were before, and computes when they are read."""

    def write(root: Path) -> None:
        torch.save({"weight": LAZY[how]}, root / "model_step1.pt")

    tier = tier_of(write, tmp_path)
    with pytest.raises(StateRefused, match=r"'weight': .*lazily conjugated or negated"):
        exported(tier, "torch")


def test_export_names_the_reason_of_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    with pytest.raises(StateMismatch, match="2 files of another program, and none in a form that is exported"):
        exported(tier_of(layouts.composer, tmp_path / "ranks"), "torch")

    def columns(root: Path) -> None:
        torch.save({"weight": torch.arange(6.0).view(2, 3).t()}, root / "model_step1.pt")

    (tmp_path / "columns").mkdir()
    with pytest.raises(StateRefused, match="the tensor is not row-major"):
        exported(tier_of(columns, tmp_path / "columns"), "torch")

    def twice(root: Path) -> None:
        home = root / "checkpoints" / "checkpoint_1"
        layouts.accelerate(root).rename(home)
        save_file({"weight": torch.zeros(1)}, home / "model_1.safetensors")

    (tmp_path / "twice").mkdir()
    with pytest.raises(StateMismatch, match="'weight' is in two files"):
        exported(tier_of(twice, tmp_path / "twice"), "hf")
    with pytest.raises(StateMismatch, match="'optimizer' not in the checkpoint; it has model"):
        tier = tier_of(layouts.hf_model, tmp_path)
        exported(tier, "torch", only="optimizer")
