"""`torch.Generator` as an entry of the state: saved by its `get_state()`, set in place by `set_state()`.

Law: a generator is never made where the job has one, because a data loader or a sampler holds that very object. What
was saved without a generator to set is refused, unless None in its place asks for a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class SavedGenerator:
    """A generator's state as a checkpoint has it; a deep copy of it is a `torch.Generator`.

    Attributes:
        state: uint8, one-dimensional; may be a view of the restored file.
        device: of the generator; a device of this kind need not be there.
    """

    state: torch.Tensor
    device: torch.device

    def __post_init__(self) -> None:
        if self.state.dtype != torch.uint8 or len(self.state.shape) != 1:
            raise ValueError("a generator's state is a row of uint8")

    def __deepcopy__(self, memo: object) -> torch.Generator:
        return self.made(self.device)

    def made(self, device: torch.device) -> torch.Generator:
        """A new generator on `device`. Raises `RuntimeError` where there is no such device, or the state is none."""
        made = torch.Generator(device)
        self.set(made)
        return made

    def set(self, generator: torch.Generator) -> None:
        """Have the generator go on from here. Raises `RuntimeError` where the state is none of its kind's."""
        generator.set_state(self.state.clone())  # memory of its own: aligned, and not the file's


def misfit(target: torch.Generator, saved: object) -> str | None:
    """Why `saved` cannot be set in `target`; None if it can."""
    if not isinstance(saved, SavedGenerator):
        return f"{type(saved).__name__} in the checkpoint, a torch.Generator here"
    if saved.device.type != target.device.type:
        return f"a torch.Generator on {saved.device} in the checkpoint, on {target.device} here"
    return unusable(saved, target.device)


def unusable(saved: SavedGenerator, device: torch.device) -> str | None:
    """Why no generator on `device` can be made of `saved`; None if one can."""
    try:
        saved.made(device)
    except Exception as error:
        return f"a torch.Generator that cannot be set on {device}: {error}"
    return None


def generators_in(value: Any, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], SavedGenerator]]:
    """Every generator in a saved value, with its path."""
    if isinstance(value, SavedGenerator):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from generators_in(inner, (*path, key))
    elif isinstance(value, (list, tuple, deque)) and not {int, float, str}.issuperset(map(type, value)):
        for index, inner in enumerate(value):
            yield from generators_in(inner, (*path, index))
