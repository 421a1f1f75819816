"""Real checkpoints of any size: a transformer that was trained on real text, kept as a safetensors file.

`fp32` is what training saves: weights and Adam's two moments, all of a model whose state has the size that was asked
for (`tierd/bench/training.py`). `bf16` is what a model is handed on as: its weights cast to bfloat16, of a model six
times that state. Weights begin normal with a deviation of 0.02, as language models' do: nn.Linear's own uniform start
has fewer different exponents, and would compress better than real ones.

A worker's `load` gives the state as nested dictionaries of tensors; nobody's arm gets another one.
"""

from __future__ import annotations

import argparse
import json
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

KINDS = ("fp32", "bf16")
State = dict[str, dict[str, Tensor]]

_PER_STATE = {"fp32": 1.0, "bf16": 6.0}  # a model's whole state in units of what is kept of it
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_DEVIATION = 0.02


def file_of(directory: Path, kind: str, gigabytes: float) -> Path:
    return directory / f"{kind}-{gigabytes:g}GB.safetensors"


def about(path: Path) -> dict[str, str]:
    """How the file was made, as it says itself."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return dict(json.loads(file.read(size))["__metadata__"])


def load(path: Path, *, mapped: bool = False) -> State:
    """The state in memory of its own, or as a mapping of the file, which takes none but page cache."""
    state: State = {}
    for name, tensor in load_file(path).items():
        group, _, rest = name.partition("/")
        state.setdefault(group, {})[rest] = tensor if mapped else tensor.clone()
    return state


def blank(path: Path) -> State:
    """Tensors of the same shapes, in memory that was touched, with nothing in them."""
    return {
        group: {name: torch.empty_like(tensor).fill_(-1) for name, tensor in tensors.items()}
        for group, tensors in load(path, mapped=True).items()
    }


def fill(state: State, found: State) -> None:
    """Copy tensors into those of `state`, as `load_state_dict` does."""
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            tensor.copy_(found[group][name])


def same(state: State, path: Path) -> bool:
    """Whether every bit is what the file says."""
    return all(
        torch.equal(tensor.view(torch.uint8), state[group][name].view(torch.uint8))
        for group, tensors in load(path, mapped=True).items()
        for name, tensor in tensors.items()
    )


def make(kind: str, gigabytes: float, path: Path, steps: int, seconds: float) -> None:
    """Train until `steps` or `seconds` are over, whichever is first, and write the file."""
    from tierd.bench.training import Training

    training = Training(gigabytes * _PER_STATE[kind])
    torch.set_num_threads(2)
    training.model.apply(_begin)
    begun = time.monotonic()
    losses: list[float] = []
    while training.number < steps and (time.monotonic() - begun < seconds or not losses):
        losses.append(training.step())
    shape, last = training.shape, losses[-10:]
    reported = {
        "steps": str(training.number),
        "loss": f"{losses[0]:.2f} -> {sum(last) / len(last):.2f}",
        "model": f"{shape.depth} blocks of width {shape.width}",
        "parameters": str(sum(parameter.numel() for parameter in training.model.parameters())),
    }
    if kind == "bf16":
        kept = [(f"weights/{name}", tensor) for name, tensor in training.model.named_parameters()]
        _write(path, kept, torch.bfloat16, reported)
    else:
        _write(path, list(_all_of(training)), torch.float32, reported)


def _begin(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_DEVIATION)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _all_of(training: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in training.model.named_parameters():
        yield f"weights/{name}", parameter
        for moment in ("exp_avg", "exp_avg_sq"):
            yield f"{moment}/{name}", training.optimizer.state[parameter][moment]


def _write(path: Path, tensors: Sequence[tuple[str, Tensor]], dtype: torch.dtype, reported: dict[str, str]) -> None:
    """A safetensors file, one tensor in memory at a time; `save_file` would need all of them twice."""
    header: dict[str, Any] = {"__metadata__": reported}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in tensors:
            flat = tensor.detach().to(dtype).contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy().data)
    part.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("path", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("seconds", type=float)
    options = parser.parse_args()
    make(options.kind, options.gigabytes, options.path, options.steps, options.seconds)


if __name__ == "__main__":
    main()
