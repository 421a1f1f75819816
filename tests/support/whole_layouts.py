"""Checkpoints of programs that tierd does not know, or knows by one file only: the files of one save, by path.

Each is written after the layout in its program's source, which its docstring names. Sizes and bytes differ by step.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save

Files = dict[str, bytes]
APPLE_DOUBLE = b"\0\5\26\7\0\2\0\0Mac OS X        " + bytes(200)


def pt(step: int, extra: int = 0) -> bytes:
    """A file of torch.save."""
    file = io.BytesIO()
    torch.save({"weight": torch.full((20 + extra,), float(step)), "step": step}, file)
    return file.getvalue()


def tensors(step: int) -> bytes:
    """A file of safetensors."""
    return save({"weight": torch.full((20,), float(step))})


def text(content: object) -> bytes:
    return json.dumps(content).encode()


def accelerate_state(step: int) -> Files:
    """diffusers, examples/dreambooth/train_dreambooth_lora.py: `accelerator.save_state` in fp16."""
    files = {"pytorch_lora_weights.safetensors": tensors(step), "scaler.pt": pt(step)}
    files |= dict.fromkeys(("optimizer.bin", "scheduler.bin", "random_states_0.pkl"), pt(step))
    return {f"checkpoint-{step}/{name}": data for name, data in files.items()}


def accelerate_state_and_embeds(step: int) -> Files:
    """diffusers, examples/textual_inversion/textual_inversion.py: the embeds lie beside the state."""
    return accelerate_state(step) | {f"learned_embeds-steps-{step}.safetensors": tensors(step + 1)}


def own_loop_with_adapter(step: int) -> Files:
    """A loop with PEFT's `save_pretrained`, and torch.save of the optimizer and the GradScaler beside it."""
    here = f"checkpoint-{step}"
    files = {"adapter_config.json": text({}), "adapter_model.safetensors": tensors(step)}
    return {
        f"{here}/{name}": data for name, data in (files | {"optimizer.pt": pt(step), "scaler.pt": pt(step)}).items()
    }


def downloaded_trainer(step: int) -> Files:
    """huggingface_hub, _local_folder.py: `.cache/huggingface/download/*.metadata` beside what was downloaded."""
    files = {"model.safetensors": tensors(step), "config.json": text({}), "training_args.bin": pt(step)}
    files |= {"optimizer.pt": pt(step), "rng_state.pth": pt(step), "trainer_state.json": text({"global_step": step})}
    cache = {f".cache/huggingface/download/{name}.metadata": b"0123abcd\netag\n1700000000.0\n" for name in files}
    return {f"checkpoint-{step}/{name}": data for name, data in (files | cache).items()}


def copied_by_macos(step: int) -> Files:
    """macOS keeps attributes in `._NAME` on another file system."""
    files = {name: data for name, data in downloaded_trainer(step).items() if ".cache" not in name}
    return files | {f"checkpoint-{step}/._{name.rpartition('/')[2]}": APPLE_DOUBLE for name in files}


def ranks_in_directories(step: int) -> Files:
    """verl, utils/checkpoint/fsdp_checkpoint_manager.py: two ranks, three files each."""
    names = [f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)]
    files = {f"actor/{name}": pt(step, number) for number, name in enumerate(names)}
    files |= {"actor/huggingface/config.json": text({}), "data.pt": pt(step)}
    return {f"global_step_{step}/{name}": data for name, data in files.items()}


def ranks_beside_each_other(step: int) -> Files:
    """A loop that writes one file for each rank."""
    return {f"ckpt_{step}_rank_{rank}.pt": pt(step, rank) for rank in (0, 1, 2)}


def ranks_without_a_word(step: int) -> Files:
    """llm.c: the model, a state for each rank, and an empty file when all is written."""
    number = f"{step:08d}"
    states = {f"state_{number}_{rank:05d}.pt": pt(step, rank + 1) for rank in (0, 1)}
    return {f"model_{number}.pt": pt(step)} | states | {f"DONE_{number}": b""}


def directory_of_states(step: int) -> Files:
    """A loop that writes a directory for each step."""
    return {
        f"step_{step}/{name}.pt": pt(step, number) for number, name in enumerate(("model", "optimizer", "scheduler"))
    }


def number_as_directory(step: int) -> Files:
    """lerobot, utils/train_utils.py: the directory's name is the step, and the optimizer's groups are JSON."""
    files = {"pretrained_model/config.json": text({}), "pretrained_model/model.safetensors": tensors(step)}
    files |= {"training_state/optimizer_state.safetensors": tensors(step)}
    files |= {"training_state/optimizer_param_groups.json": text([{"lr": step}])}
    return {f"checkpoints/{step:06}/{name}": data for name, data in files.items()}


def weights_and_state(step: int) -> Files:
    """sd-scripts, library/train_util.py: the weights are a file, and the state is a directory beside it."""
    names = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
    files = {f"-state/{name}": tensors(step) if name.endswith("tensors") else pt(step) for name in names}
    return {f"lora-{step:06}{name}": data for name, data in (files | {".safetensors": tensors(step)}).items()}


def archive(step: int) -> Files:
    """pytorch-image-models, timm/utils/checkpoint_saver.py."""
    return {f"checkpoint-{step}.pth.tar": pt(step)}


def generator_and_discriminator(step: int) -> Files:
    """VITS, utils.py `save_checkpoint`."""
    return {f"G_{step}.pth": pt(step), f"D_{step}.pth": pt(step, 5)}


def numbered_first(step: int) -> Files:
    """pytorch-CycleGAN-and-pix2pix, models/base_model.py `save_networks`."""
    return {f"{step}_net_G_A.pth": pt(step), f"{step}_net_G_B.pth": pt(step, 5)}


def word_after_the_number(step: int) -> Files:
    """stable-baselines3, common/callbacks.py `CheckpointCallback`."""
    return {f"rl_model_{step}_steps.zip": pt(step), f"rl_model_replay_buffer_{step}_steps.pkl": pt(step, 5)}


def epoch_with_a_loss(step: int) -> Files:
    """keras, `ModelCheckpoint("ckpt-{epoch:02d}-{loss:.4f}.pt")`; the loss is no step."""
    return {f"ckpt-{step:02}-1.0{step}.pt": pt(step)}


def unknown_formats(step: int) -> Files:
    """A directory with files of formats that nothing can check."""
    return {f"step-{step}/params.msgpack": bytes(range(100)) * step, f"step-{step}/state.json": b'{"a": 1}\n{"a": 2}\n'}


def epochs_with_steps(step: int) -> Files:
    """A directory for each epoch, and one for each step in it."""
    return {f"epoch_{step // 20}/step_{step}/model.pt": pt(step)}


SERIES: tuple[Callable[[int], Files], ...] = (
    *(accelerate_state, accelerate_state_and_embeds, own_loop_with_adapter, downloaded_trainer, copied_by_macos),
    *(ranks_in_directories, ranks_beside_each_other, ranks_without_a_word, directory_of_states, number_as_directory),
    weights_and_state,
    *(archive, generator_and_discriminator, numbered_first, word_after_the_number, epoch_with_a_loss),
    *(unknown_formats, epochs_with_steps),
)


def write(root: Path, files: Files, second: int) -> None:
    """Write the files of a save that ended at a second."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (second, second))
