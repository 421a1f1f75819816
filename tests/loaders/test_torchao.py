"""torchao's optimizers of few bits and its quantized tensors: saved by their inner tensors, and restored exactly."""

from __future__ import annotations

import enum
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import tierd
import tierd.dcp
from tierd.core.errors import StateMismatch, StateRefused
from tierd.state.kinds.wrapper_tensors import CLASSES, CONTEXTS

optim = pytest.importorskip("torchao.optim", reason="torchao is not installed: make loaders")
quantization = pytest.importorskip("torchao.quantization")

pytestmark = [pytest.mark.loaders, pytest.mark.filterwarnings("ignore")]


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 64))


def trained(state: dict[str, Any], steps: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = state["model"](torch.randn(8, 256)).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizer_of_few_bits_continues_exactly(tmp_path, kind, steps_before):
    def made(seed: int) -> dict[str, Any]:
        model = network(seed)
        return {"model": model, "optimizer": getattr(optim, kind)(model.parameters(), lr=0.01)}

    job = made(0)
    trained(job, 3, seed=1)
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as checkpointer:
        checkpointer.attach(job["optimizer"])
        checkpointer.save(3, job).wait()
        expected = trained(job, 4, seed=2)
    other = made(9)
    trained(other, steps_before, seed=5)
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as checkpointer:
        assert checkpointer.restore(other).step == 3
    assert trained(other, 4, seed=2) == expected


QUANTIZED = [
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
]


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_model_is_restored_exactly(tmp_path, name):
    def made(seed: int) -> dict[str, Any]:
        model = network(seed).bfloat16()
        quantization.quantize_(model, getattr(quantization, name)())
        return {"model": model}

    x = torch.randn(3, 256, dtype=torch.bfloat16)
    saved = made(0)
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as checkpointer:
        checkpointer.save(1, saved).wait()
        restored = made(1)
        weight = restored["model"][0].weight
        assert not torch.equal(restored["model"](x), saved["model"](x))
        checkpointer.restore(restored)
        assert torch.equal(restored["model"](x), saved["model"](x))
        assert restored["model"][0].weight is weight
        plain = {"model": network(1).bfloat16()}
        before = plain["model"][0].weight.clone()
        with pytest.raises(StateMismatch, match=r'"0.weight" \(a torchao\..* make it of that kind before the restore'):
            checkpointer.restore(plain)
        assert torch.equal(plain["model"][0].weight, before)


def test_shards_of_an_optimizer_of_few_bits_continue_exactly(tmp_path, monkeypatch):
    """As `fully_shard` makes them: a DTensor around each of the optimizer's tensors."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:

        def made(seed: int) -> dict[str, Any]:
            model = network(seed)
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            return {"model": model, "optimizer": optim.AdamW8bit(model.parameters(), lr=0.01)}

        job = made(0)
        trained(job, 3, seed=1)
        with tierd.Checkpointer(tmp_path / "spool", "run", to=[], rank=0, world_size=1) as checkpointer:
            checkpointer.save(3, job).wait()
            expected = trained(job, 3, seed=2)
        other = made(9)
        with tierd.Checkpointer(tmp_path / "spool", "run", to=[], rank=0, world_size=1) as checkpointer:
            checkpointer.restore(other)
        assert trained(other, 3, seed=2) == expected
    finally:
        distributed.destroy_process_group()


def test_dcp_refuses_a_state_that_it_cannot_load_into_an_optimizer_before_its_first_step(tmp_path):
    model = network(0)
    job = {"model": model, "optimizer": optim.AdamW8bit(model.parameters())}
    trained(job, 1, seed=1)
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as checkpointer:
        checkpointer.save(1, job).wait()
        with pytest.raises(StateMismatch, match=r"'exp_avg' of parameter 0 holds several tensors"):
            tierd.dcp.load({"optimizer": optim.AdamW8bit(model.parameters())}, checkpointer)


def test_tensor_of_four_bits_is_restored_exactly(tmp_path):
    inner = [torch.randint(0, 255, (64, 128), dtype=torch.uint8), torch.rand(2, 64), torch.rand(2, 64)]
    saved = quantization.Int4Tensor(*inner, block_size=[1, 128], shape=torch.Size([64, 256]))
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as checkpointer:
        checkpointer.save(1, {"weight": saved}).wait()
        state: dict[str, Any] = {"weight": None}
        checkpointer.restore(state)
    restored = state["weight"]
    assert type(restored) is quantization.Int4Tensor
    names, context = saved.__tensor_flatten__()
    assert restored.__tensor_flatten__() == (names, context)
    assert all(torch.equal(getattr(restored, name), getattr(saved, name)) for name in names)


def test_unknown_quantized_tensor_is_refused_with_a_remedy(tmp_path):
    class Preference(enum.Enum):
        MINE = 1

    model = network(0)
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig())
    model[0].weight.kernel_preference = Preference.MINE
    with (
        tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as checkpointer,
        pytest.raises(StateRefused, match=r"its context holds .*Preference; .* pass this one's inner tensors"),
    ):
        checkpointer.save(1, {"model": model})


@pytest.mark.parametrize("name", [name for name in (*CLASSES, *CONTEXTS) if name.startswith("torchao.")])
def test_each_class_that_the_format_names_is_where_it_is_looked_up(name):
    def has(module: str) -> bool:
        try:
            return hasattr(importlib.import_module(module), name.partition(".")[2])
        except ImportError:
            return False

    assert any(map(has, {**CLASSES, **CONTEXTS}[name]))
