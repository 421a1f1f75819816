"""What did not change between two saves is chunks that did not, for any writer of the file, whatever lies beside it.

Measured as the bytes of chunks whose digest and size the manifest before did not have: what an upload has to send.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from support.chunk_keys import chunk_files
from support.state_files import plan_layout
from support.world import Daemon
from torch import nn

import tierd
from tierd.client.saving import slots
from tierd.core.chunk_boundaries import GRAIN, MOVING
from tierd.core.manifest import CHUNK_SIZE, TENSORS
from tierd.core.manifest_codec import decode
from tierd.state import tensor_file, tensor_header
from tierd.state.capturer import Capturer
from tierd.state.kinds.live_parameters import names_changed_by_step, optimizers_in
from tierd.stores.file_store import FileStore

MIB = 1 << 20
WIDTH, LAYERS = 1024, 6  # 4 MiB of frozen weights in each layer


class Lora(nn.Module):
    """A frozen matrix, its adapter, and small things that stand still, in every layer."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(1000, width, dtype=dtype)
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in range(layers))
        for layer in self.layers:
            layer["norm"] = nn.LayerNorm(width, dtype=dtype)
            layer["base"] = nn.Linear(width, width, bias=False, dtype=dtype)
            layer["lora_a"] = nn.Linear(width, 2, bias=False)
            layer["lora_b"] = nn.Linear(2, width, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora" in name)


def job(every: bool = False, **options) -> dict[str, object]:
    """A fine-tune; `every`: all parameters are given to the optimizer, the frozen ones too, as many scripts do."""
    model = Lora(**options)
    chosen = [p for p in model.parameters() if every or p.requires_grad]
    state = {"model": model, "optimizer": torch.optim.AdamW(chosen, lr=0.1), "rng": tierd.RngState(), "step": 0}
    train(state)
    return state


def train(state) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    state["optimizer"].step()
    state["step"] += 1


def manifest(spool, step):
    (part,) = [part for part in spool.parts() if part.checkpoint.step == step]
    return spool.manifest(part)


def sent(spool, before: int, after: int) -> float:
    """The share of a checkpoint's bytes that the one before does not have."""
    known = {(chunk.xxh3_128, chunk.size) for chunk in manifest(spool, before).chunks()}
    found = manifest(spool, after)
    assert found.size > 20 * MIB
    return sum(chunk.size for chunk in found.chunks() if (chunk.xxh3_128, chunk.size) not in known) / found.size


def tensor_chunks(spool, step):
    (file,) = [file for file in manifest(spool, step).files if file.path == TENSORS]
    return [chunk.size for chunk in file.chunks]


# -- what save() writes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [False, True], ids=["only the adapters", "the frozen ones too"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fine_tune_sends_only_its_trained_tensors(local, spool, every, dtype):
    state = job(every, dtype=dtype, width=WIDTH if dtype == torch.float32 else 2 * WIDTH)
    local.save(1, state)
    train(state)
    local.save(2, state).wait()
    assert 0 < sent(spool, 1, 2) < 0.06


def test_an_insertion_that_sorts_first_sends_itself(local, spool):
    state = job()
    local.save(1, state)
    local.save(2, {"a": torch.randn(100), "ab": torch.randn(300_000), **state}).wait()
    share = 300_000 * 4 / manifest(spool, 2).size
    assert share < sent(spool, 1, 2) < share + 0.06


def test_a_pretraining_state_is_full_chunks(local, spool):
    state = job()
    state["model"].requires_grad_(True)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    train(state)
    local.save(1, state).wait()
    sizes = tensor_chunks(spool, 1)
    assert len(sizes) <= sum(sizes) / CHUNK_SIZE + 3
    assert max(sizes) == min(CHUNK_SIZE, sum(sizes) - sizes[0] - sizes[-1])


@pytest.mark.parametrize("way", ["the daemon", "a stream"])
def test_trainer_and_daemon_cut_the_file_alike(local, spool, quick, monkeypatch, way):
    from support.doubles import Double
    from support.world import Daemon

    state = job()
    local.save(1, state).wait()
    if way == "the daemon":
        with (
            Daemon(spool.root, {"tier": Double()}, keep=100, keep_local=100),
            tierd.Checkpointer(spool.root, "run") as other,
        ):
            other.save(2, state).wait()
            assert other.stats.handed_over == 1
    else:
        monkeypatch.setattr(slots, "available", lambda: 0)
        with tierd.Checkpointer(spool.root, "run", to=[]) as other:
            other.save(2, state).wait()
    assert tensor_chunks(spool, 1) == tensor_chunks(spool, 2)
    assert sent(spool, 1, 2) == 0


def test_restored_tensors_of_a_fine_tune_equal_the_saved_tensors(local, spool):
    state = job()
    local.save(1, state).wait()
    fresh = job()
    with tierd.Checkpointer(spool.root, "run", to=[]) as other:
        other.restore(fresh)
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(tensor, fresh["model"].state_dict()[name])


# -- which tensors move -----------------------------------------------------------------------------------------------


def moves(state) -> set[str]:
    """The names in the stretch of the file that its header calls moving."""
    layout = Capturer().capture(state).layout
    header = tensor_file.json.loads(layout.header[8:])
    begin, end = map(int, header["__metadata__"].get(MOVING, "0:0").split(":"))
    start = len(layout.header)
    found = {name for name, e in layout.entries.items() if begin <= e.offset - start < end and e.nbytes}
    assert sum(layout.entries[name].nbytes for name in found) == end - begin
    return found


def test_moving_tensors_are_those_an_optimizer_trains_with_their_moments():
    state = job(every=True)
    names = {name for name, p in state["model"].named_parameters() if p.requires_grad}
    numbers = [number for number, p in enumerate(state["model"].parameters()) if p.requires_grad]
    expected = {f"model/{name}" for name in names}
    expected |= {f"optimizer/state/{number}/{kind}" for number in numbers for kind in ("exp_avg", "exp_avg_sq")}
    assert moves(state) == expected


class App:
    """As in torch.distributed.checkpoint's tutorial."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.mark.parametrize("place", ["entry", "list", "dict", "object", "scheduler", "objects of a list"])
def test_optimizer_is_detected_in_any_usual_place_of_a_state(place):
    state = job()
    optimizer = state.pop("optimizer")
    state["other"] = {
        "entry": lambda: optimizer,
        "list": lambda: [optimizer],
        "dict": lambda: {"g": optimizer},
        "object": lambda: App(state["model"], optimizer),
        "scheduler": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "objects of a list": lambda: [App(state["model"], optimizer)],
    }[place]()
    assert optimizers_in(state) == [optimizer]
    assert "model/layers.0.lora_a.weight" in moves(state)


class Hostile:
    """An object that does not like to be looked at."""

    def __getattribute__(self, name):
        if name == "__dict__":
            raise RuntimeError("no")
        return object.__getattribute__(self, name)

    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        raise NotImplementedError


class Odd(torch.optim.SGD):
    param_groups = property(lambda self: 1 / 0, lambda self, value: None)

    def __init__(self):
        pass

    def state_dict(self):
        return {"y": torch.zeros(16)}


@pytest.mark.parametrize("make", [Hostile, Odd])
def test_unreadable_object_does_not_stop_the_save(make):
    capture = Capturer().capture({"a": torch.zeros(16), "odd": make()})
    assert "a" in capture.tensors


def test_a_layer_that_is_frozen_or_freed_is_laid_out_anew():
    state = job(every=True)
    capturer = Capturer()
    first = capturer.capture(state).layout
    assert capturer.capture(state).layout is first
    state["model"].layers[0]["lora_a"].requires_grad_(False)
    second = capturer.capture(state).layout
    assert second.entries.keys() == first.entries.keys() and list(second.entries) != list(first.entries)
    assert second == Capturer().capture(state).layout
    assert capturer.capture(state).layout is second
    state["model"].layers[0]["lora_a"].requires_grad_(True)
    assert capturer.capture(state).layout == first


def test_a_copy_of_a_parameter_and_a_buffer_stand_still():
    model = nn.BatchNorm1d(64)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "ema": {k: v.clone() for k, v in model.state_dict().items()}}
    assert moves(state) == {"model/weight", "model/bias"}
    assert names_changed_by_step([], {"a": torch.zeros(1)}) == frozenset()


def test_large_still_tensors_lie_first_then_small_tensors_then_moving_tensors():
    tensors = {
        "small": torch.zeros(64),
        "moves": torch.zeros(2 * MIB),
        "large": torch.zeros(GRAIN // 2, dtype=torch.int16),
        "odd": torch.zeros(3),
        "odd moves": torch.zeros(5),
        "wide": torch.zeros(64, dtype=torch.float64),
    }
    layout = plan_layout(tensors, {"moves", "odd moves"})
    assert list(layout.entries) == ["large", "wide", "small", "moves", "odd", "odd moves"]
    assert tensor_header.parse_layout(bytes(layout.header) + bytes(layout.size - len(layout.header))) == layout
    assert b'"tierd.moving":"' in layout.header
    assert b"tierd" not in plan_layout(tensors).header


# -- what others write ------------------------------------------------------------------------------------------------


def stage(ckpt, step, write) -> None:
    with ckpt.stage(step) as directory:
        write(directory)


def contents(state, **more) -> dict[str, object]:
    model = OrderedDict(state["model"].state_dict())
    return more | {"model": model, "optimizer": state["optimizer"].state_dict(), "step": state["step"]}


@pytest.mark.parametrize("name", ["model.pt", "step-{}.ckpt"])
def test_fine_tune_through_torch_save_sends_only_its_trained_tensors(local, spool, name):
    """The second name is in every entry's header, and so are the entries' numbers."""
    state = job()
    stage(local, 1, lambda home: torch.save(contents(state), home / name.format(1)))
    train(state)
    stage(local, 20, lambda home: torch.save(contents(state), home / name.format(20)))
    assert 0 < sent(spool, 1, 20) < 0.06
    more = {"a": torch.randn(1000), "list": list(range(1000))}
    stage(local, 300, lambda home: torch.save(contents(state, **more), home / name.format(300)))
    assert 0 < sent(spool, 20, 300) < 0.06


def test_old_format_of_torch_save_is_cut_at_fixed_sizes(local, spool):
    state = job()
    stage(
        local,
        1,
        lambda home: torch.save(contents(state), home / "old.pt", _use_new_zipfile_serialization=False),
    )
    (file,) = manifest(spool, 1).files
    assert [chunk.size for chunk in file.chunks][:-1] == [CHUNK_SIZE] * (len(file.chunks) - 1)


def test_safetensors_with_interleaved_names(local, spool):
    state = job()

    def write(home, **more):
        save_file(
            {name: t.contiguous() for name, t in state["model"].state_dict().items()} | more, home / "model.safetensors"
        )

    stage(local, 1, write)
    train(state)
    stage(local, 2, write)
    assert 0 < sent(spool, 1, 2) < 0.06
    stage(local, 3, lambda home: write(home, a=torch.randn(1000), layers=torch.randn(1000)))
    assert 0 < sent(spool, 2, 3) < 0.06


def test_fine_tune_through_dcp_sends_only_its_trained_tensors(local, spool):
    """Archives of torch.save, one behind the other."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = job()
    for step in (1, 2):
        stage(local, step, lambda home: dcp.save(contents(state), checkpoint_id=home, no_dist=True))
        train(state)
    assert 0 < sent(spool, 1, 2) < 0.06


# -- what a daemon sends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 100], ids=["the lender is pruned behind it", "all stay"])
def test_fine_tune_sends_its_trained_tensors_and_its_shared_chunks_survive_retention(tmp_path, quick, keep):
    state = job()
    (tmp_path / "tier").mkdir()
    with Daemon(tmp_path / "spool", lambda: {"tier": FileStore(tmp_path / "tier")}, keep=keep) as daemon:
        counters, sends = daemon.reconciler.journal.counters, []
        with tierd.Checkpointer(tmp_path / "spool", "run") as ckpt:
            for step in range(1, 6):
                before = counters["flushed_sent_bytes"]
                wanted = {name: value.clone() for name, value in state["model"].state_dict().items()}
                ckpt.save(step, state).wait("tier")
                daemon.settle()
                sends.append(counters["flushed_sent_bytes"] - before)
                train(state)
        assert all(later <= 0.06 * sends[0] for later in sends[1:]), sends
    manifests = sorted((tmp_path / "tier" / "run" / "manifests").iterdir())
    assert len(manifests) == (1 if keep == 1 else 5)
    named = {stored.key for one in manifests for stored in decode(next(one.iterdir()).read_bytes()).objects()}
    there = {str(path.relative_to(tmp_path / "tier" / "run")) for path in chunk_files(tmp_path / "tier", "run")}
    assert named == there  # nothing is missing, and nothing that nobody names is left
    shutil.rmtree(tmp_path / "spool")
    other = job()
    with (
        Daemon(tmp_path / "spool", lambda: {"tier": FileStore(tmp_path / "tier")}),
        tierd.Checkpointer(tmp_path / "spool", "run") as ckpt,
    ):
        assert ckpt.restore(other).tier == "tier"
    assert all(torch.equal(value, wanted[name]) for name, value in other["model"].state_dict().items())
