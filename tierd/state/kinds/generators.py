"""`torch.Generator` as an entry of the state: saved by its `get_state()`, loaded in place by `set_state()`.

Invariant: no generator is made where the job has one, because a data loader or a sampler holds that very object. A
saved generator without a target is refused, unless the target is None, which requests a new one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class SavedGenerator:
    """A generator's state in a checkpoint; `copy.deepcopy` of it returns a `torch.Generator`.

    Attributes:
        state: uint8, one-dimensional; may be a view of the restored file.
        device: of the generator; such a device need not exist here.
    """

    state: torch.Tensor
    device: torch.device

    def __post_init__(self) -> None:
        if self.state.dtype != torch.uint8 or len(self.state.shape) != 1:
            raise ValueError("a generator's state is a row of uint8")

    def __deepcopy__(self, memo: object) -> torch.Generator:
        return self.made(self.device)

    def made(self, device: torch.device) -> torch.Generator:
        """Return a new generator on `device`.

        Raises `RuntimeError` if the device does not exist or the state is invalid.
        """
        made = torch.Generator(device)
        self.set(made)
        return made

    def set(self, generator: torch.Generator) -> None:
        """Load this state into the generator. Raises `RuntimeError` if the state is not one of the generator's kind."""
        generator.set_state(self.state.clone())  # cloned to be aligned, and independent of the file's memory


def misfit(target: torch.Generator, saved: object) -> str | None:
    """Return why `saved` cannot be loaded into `target`; None if it can."""
    if not isinstance(saved, SavedGenerator):
        return f"{type(saved).__name__} in the checkpoint, a torch.Generator here"
    if saved.device.type != target.device.type:
        return f"a torch.Generator on {saved.device} in the checkpoint, on {target.device} here"
    return unusable(saved, target.device)


def unusable(saved: SavedGenerator, device: torch.device) -> str | None:
    """Return why no generator on `device` can be made of `saved`; None if one can."""
    try:
        saved.made(device)
    except Exception as error:
        return f"a torch.Generator that cannot be set on {device}: {error}"
    return None
