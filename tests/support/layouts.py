"""Checkpoints of the programs that `tierd inspect` knows, written after the layouts in their sources.

Tensors come from real writers (torch.save, safetensors, torch.distributed.checkpoint); the rest is as each program's
source names it. tests/watching/test_programs.py has the programs themselves, where they are installed.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.bundles import write_bundle
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from tierd.formats.tensorflow_files import slow_crc32c

version = 0.0  # of the weights that are written next, for those who write a checkpoint twice


def weight() -> torch.Tensor:
    return torch.arange(300.0) + version


def pt(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weight": weight(), "step": 7}, path)


def text(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def tensors(path: Path, name: str = "weight") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: weight()}, path)


def shards(directory: Path) -> None:
    names = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    for tensor, name in names.items():
        tensors(directory / name, tensor)
    text(directory / "model.safetensors.index.json", {"metadata": {"total_size": 1200}, "weight_map": names})


def distributed(directory: Path) -> None:
    state = {"model": {"weight": weight()}, "optimizer": {"steps": [1, 2], "lr": torch.ones(20)}}
    dcp.save(state, checkpoint_id=directory, no_dist=True)


def distributed_by_megatron(directory: Path) -> None:
    """Megatron's own writer adds the plans of the ranks to DCP's metadata."""
    distributed(directory)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    metadata.all_local_plans = [create_default_local_save_plan({"weight": weight(), "steps": [1, 2]}, True)]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    pt(directory / "common.pt")
    text(directory / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})


def trainer(root: Path) -> Path:
    here = root / "checkpoint-500"
    shards(here)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "training_args.bin"):
        pt(here / name)
    text(here / "config.json", {"model_type": "gpt2"})
    text(here / "merges.txt", "#version: 0.2")
    text(here / "trainer_state.json", '{"global_step": 500, "log_history": [{"loss": NaN}]}')
    return here


def trainer_on_deepspeed(root: Path) -> Path:
    here = trainer(root)
    for rank in (0, 1):
        pt(here / "global_step500" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    pt(here / "global_step500" / "mp_rank_00_model_states.pt")
    text(here / "latest", "global_step500")
    return here


def accelerate(root: Path) -> Path:
    here = root / "checkpoints" / "checkpoint_3"
    tensors(here / "model.safetensors")
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"):
        pt(here / name)
    return here


def lightning(root: Path) -> Path:
    pt(root / "epoch=1-step=20.ckpt")
    return root / "epoch=1-step=20.ckpt"


def lightning_sharded(root: Path) -> Path:
    here = root / "epoch=1-step=20.ckpt"
    distributed(here)
    pt(here / "meta.pt")
    return here


def plain_dcp(root: Path) -> Path:
    distributed(root / "save" / "100")
    return root / "save" / "100"


def torchtitan(root: Path) -> Path:
    distributed(root / "step-100")
    return root / "step-100"


def torch_checkpointing(root: Path) -> Path:
    here = root / "step_5"
    for rank in (0, 1):
        pt(here / f"model_{rank}.pt")
        pt(here / f"optimizer_{rank}.pt")
    (here / "metadata.pkl").write_bytes(b"\x80\x05}\x94\x8c\x07version\x94K\x01s.")
    return here


def deepspeed(root: Path) -> Path:
    here = root / "global_step20"
    for rank in (0, 1, 2):
        pt(here / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        pt(here / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    text(root / "latest", "global_step20")
    return here


def megatron(root: Path) -> Path:
    here = root / "iter_0000040"
    distributed_by_megatron(here)
    text(root / "latest_checkpointed_iteration.txt", "40")
    return here


def megatron_by_ranks(root: Path) -> Path:
    here = root / "iter_0000040"
    for tensor in (0, 1):
        for stage in (0, 1):
            pt(here / f"mp_rank_0{tensor}_00{stage}" / "model_optim_rng.pt")
    text(root / "latest_checkpointed_iteration.txt", "60\n")
    return here


def nemo(root: Path) -> Path:
    here = root / "model-step=30-last"
    distributed_by_megatron(here / "weights")
    text(here / "context" / "model.yaml", "_target_: nemo")
    return here


def manifest(body: bytes) -> bytes:
    """The envelope of an OCDBT manifest."""
    data = 0x0CDB3A2A.to_bytes(4, "big") + (len(body) + 16).to_bytes(8, "little") + body
    return data + slow_crc32c(data).to_bytes(4, "little")


def orbax(root: Path) -> Path:
    here = root / "400"
    text(here / "_CHECKPOINT_METADATA", {"item_handlers": {}, "init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2})
    text(here / "default" / "_METADATA", {"tree_metadata": {}})
    (here / "default" / "manifest.ocdbt").write_bytes(manifest(b"\0\1" + bytes(range(90))))
    text(here / "default" / "d" / ("a" * 32), "nodes and arrays")
    return here


def tensorflow(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    write_bundle(
        root / "ckpt-5", {"kernel": weight().numpy().tobytes(), "bias": b"b" * 80, "graph": [b"graph"]}, shards=2
    )
    text(root / "checkpoint", 'model_checkpoint_path: "ckpt-5"\n')
    return root / "ckpt-5.index"


def composer(root: Path) -> Path:
    for rank in (0, 1):
        pt(root / f"ep0-ba10-rank{rank}.pt")
        (root / f"latest-rank{rank}.pt").symlink_to(f"ep0-ba10-rank{rank}.pt")
    return root / "ep0-ba10-rank0.pt"


def hf_model(root: Path) -> Path:
    shards(root / "model")
    text(root / "model" / "config.json", {"model_type": "gpt2"})
    return root / "model"


def shards_alone(root: Path) -> Path:
    shards(root / "model")
    return root / "model"


def torch_save(root: Path) -> Path:
    pt(root / "model_step100.pt")
    return root / "model_step100.pt"


def safetensors(root: Path) -> Path:
    tensors(root / "model.safetensors")
    return root / "model.safetensors"


# Each writer, and the program and the step that are to be recognised.
WRITERS: dict[Callable[[Path], Path], tuple[str, int | None]] = {
    trainer: ("HF Trainer", 500),
    trainer_on_deepspeed: ("HF Trainer", 500),
    accelerate: ("Accelerate", 3),
    lightning: ("Lightning, Fabric", 20),
    lightning_sharded: ("Lightning, Fabric", 20),
    plain_dcp: ("DCP", 100),
    torchtitan: ("torchtitan", 100),
    torch_checkpointing: ("torch_checkpointing", 5),
    deepspeed: ("DeepSpeed", 20),
    megatron: ("Megatron-LM", 40),
    megatron_by_ranks: ("Megatron-LM", 40),
    nemo: ("NeMo", 30),
    orbax: ("Orbax", 400),
    tensorflow: ("TensorFlow", 5),
    composer: ("Composer", 10),
    hf_model: ("HF model", None),
    shards_alone: ("HF model", None),
    torch_save: ("torch.save, safetensors", 100),
    safetensors: ("torch.save, safetensors", None),
}
