"""A real training loop of any size, and the interface of the ways to save its state, behind which all are measured.

The loop is a byte-level transformer, AdamW, and text that every Python has.

Invariant: the requested size is that of the saved state: weights and Adam's two moments, 12 bytes a parameter. Every
way to save gets the same model, bytes and number of threads, and is used as its own documentation recommends: it builds
its state's dictionaries inside the measured call, and awaits its previous save before the next one if it requires that.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

STATE_BYTES_PER_PARAMETER = 12  # a float32 weight and its two moments
Guard = Callable[[], AbstractContextManager[object]]

_BYTES = 256
_HEAD = 32  # width of one attention head
_CONTEXT = 32  # bytes a sample
_TEXT = 4_000_000  # bytes of text
_WORK = {"cpu": 4e9, "cuda": 1e12}  # parameters x tokens of a step: some 0.3 s on one core, 0.1 s on a large GPU
_TOKENS = {"cpu": 512.0, "cuda": 4096.0}  # of a step, at most, because their activations need memory
_SEED = 20_240_229


def training_thread_count() -> int:
    """Return the number of training's threads: all cores but one, which is left for copying, writing and serving."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's dimensions, and the number of tokens of a step."""

    width: int
    depth: int
    batch: int


def model_shape(gigabytes: float, device: str = "cpu") -> ModelShape:
    """Return the shape whose state is closest to `gigabytes` with whole heads and blocks; width is about 64 x depth."""
    parameters = gigabytes * 1e9 / STATE_BYTES_PER_PARAMETER
    about = max(1, round((parameters / (12 * 64**2)) ** (1 / 3)))
    depth, width = min(
        ((depth, _width(parameters, depth)) for depth in range(max(1, about - 3), about + 4)),
        key=lambda pair: abs(12 * pair[0] * pair[1] ** 2 - parameters),
    )
    tokens = min(_TOKENS[device], max(float(_CONTEXT), _WORK[device] / parameters))
    return ModelShape(width, depth, max(1, int(tokens / _CONTEXT)))


def _width(parameters: float, depth: int) -> int:
    return max(_HEAD, round(math.sqrt(parameters / (12 * depth)) / _HEAD) * _HEAD)


class _Block(nn.Module):
    """Causal self-attention, then a feed-forward layer; both on a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD
        self.before_mix, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, stream: Tensor) -> Tensor:
        heads = self.mix_in(self.before_mix(stream)).unflatten(-1, (3, self.heads, _HEAD))
        query, key, value = heads.movedim(2, 0).transpose(2, 3)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.mix_out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = stream + self.feed(self.before_feed(stream))
        return out


class _Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(_BYTES, shape.width), nn.Embedding(_CONTEXT, shape.width)
        self.blocks = nn.Sequential(*(_Block(shape.width) for _ in range(shape.depth)))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, _BYTES)

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.token(inputs) + self.place.weight[: inputs.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(stream)))
        return logits


def _text() -> Tensor:
    """Return the sources of Python's standard library as numbers."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)[:_TEXT]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class Training:
    """Model, optimizer and data; `step` is one step of training, `state` the content of a checkpoint.

    Args:
        gigabytes: size of the state.
        device: `"cpu"` or `"cuda"`. A step has ended on the device when it returns.
    """

    def __init__(self, gigabytes: float, device: str = "cpu") -> None:
        self.device = torch.device(device)
        torch.set_num_threads(training_thread_count())
        torch.manual_seed(_SEED)
        self.shape = model_shape(gigabytes, device)
        self.model = _Model(self.shape).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.number = 0
        self._text = _text().to(self.device)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.number}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain dictionaries, for libraries that need them."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.number = state["step"]

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the state."""
        moments = [
            value
            for parameter_state in self.optimizer.state.values()
            for value in parameter_state.values()
            if torch.is_tensor(value)
        ]
        return [*self.model.state_dict().values(), *moments]

    def finish(self) -> None:
        """Return when the device has done its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def step(self, guard: Guard = nullcontext) -> float:
        """Train one step and return the loss; `guard` is entered around the update of the weights."""
        places = torch.arange(_CONTEXT + 1, device=self.device) + (
            (torch.arange(self.shape.batch, device=self.device) + self.number * self.shape.batch)
            * _CONTEXT
            % (len(self._text) - 2 * _CONTEXT)
        ).unsqueeze(1)
        window = self._text[places]
        loss = functional.cross_entropy(self.model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with guard():
            self.optimizer.step()
        self.number += 1
        return loss.item()


Wait = Callable[[], None]


class LibraryUnavailable(Exception):
    """An arm cannot run on this machine; the message says why."""


class SaveMethodFacts(msgspec.Struct, frozen=True):
    """The description of an arm for readers of the page."""

    settings: str  # the settings with which it runs
    # `none`, `sync` (returns when written), `blocking` (returns when copied) or `overlapped` (returns at once)
    kind: str
    durable: str  # the guarantee that holds when the arm reports that a save is done
    copies: float  # memory that the arm needs in addition to model and gradients, in units of the state


_FSYNCED = "file fsynced"
_COMMITTED = "verified bytes, fsynced, committed by a rename"

SAVE_METHODS: dict[str, SaveMethodFacts] = {
    "none": SaveMethodFacts("no save", "none", "", 0),
    "torch.save": SaveMethodFacts("torch.save", "sync", "not durable: no fsync", 0),
    "torch.save+fsync": SaveMethodFacts("torch.save, fsync of file and directory", "sync", "fsynced", 0),
    "dcp.save": SaveMethodFacts("dcp.save to a FileSystemWriter", "sync", _FSYNCED, 0),
    "dcp.async": SaveMethodFacts("dcp.async_save in a thread, default stager", "blocking", _FSYNCED, 1),
    "dcp.async-reused": SaveMethodFacts(
        "dcp.async_save in a thread, one DefaultStager reused", "blocking", _FSYNCED, 1
    ),
    "dcp.process": SaveMethodFacts(
        "dcp.async_save in a process, one DefaultStager reused: shared memory, staged behind the step",
        "overlapped",
        _FSYNCED,
        2,
    ),
    "torch_checkpointing": SaveMethodFacts(
        "CheckpointManager with async save, buffered, staging prewarmed, lock() around the optimizer's step",
        "overlapped",
        "not durable: no fsync",
        2,
    ),
    "tierd": SaveMethodFacts("Checkpointer(to=[]): no daemon", "blocking", _COMMITTED, 1),
    "tierd+daemon": SaveMethodFacts(
        "Checkpointer(to=[file://...]): a daemon persists and flushes", "blocking", _COMMITTED, 1
    ),
    "tierd-overlapped": SaveMethodFacts("Checkpointer(to=[]) after attach(optimizer)", "overlapped", _COMMITTED, 1),
    "tierd-overlapped+daemon": SaveMethodFacts(
        "Checkpointer(to=[file://...]) after attach(optimizer)", "overlapped", _COMMITTED, 1
    ),
}


class SaveMethod:
    """The interface that the worker calls. The base class is the arm `none`, which saves nothing."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training, self.directory = training, directory
        directory.mkdir(parents=True, exist_ok=True)

    def save(self) -> Wait:
        """Save training's current state. Calling the result waits until the arm reports that the save is done."""
        return lambda: None

    def update_guard(self) -> AbstractContextManager[object]:
        """Return the context that is entered around each update of the weights."""
        return nullcontext()

    def flush_waiter(self) -> Wait | None:
        """Return a function that waits until the last save is on a tier; None for an arm without a tier."""
        return None

    def clean_up(self) -> None:
        """Delete all but the newest checkpoint, and leave nothing running. Never timed."""

    def close(self) -> None:
        """End what the arm started."""
