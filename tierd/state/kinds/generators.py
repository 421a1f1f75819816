"""`torch.Generator` as an entry of the state: saved by its `get_state()`, loaded in place by `set_state()`.

Invariant: no generator is made where the job has one, because a data loader or a sampler holds that very object. A
saved generator without a target is refused, unless the target is None, which requests a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class SavedRng:
    """The state of a random generator in a checkpoint; `copy.deepcopy` of it returns a generator."""

    __slots__ = ()

    @property
    def label(self) -> str:
        """What it is, for messages."""
        raise NotImplementedError

    def made(self) -> Any:
        """Return a new generator. Raises if it cannot be made here, or the state is invalid."""
        raise NotImplementedError

    def set(self, generator: Any) -> None:
        """Load this state into the generator. Raises if the state is not one of the generator's kind."""
        raise NotImplementedError

    def misfit(self, target: Any) -> str | None:
        """Return why this state cannot be loaded into `target`; None if it can."""
        raise NotImplementedError

    def unusable(self) -> str | None:
        """Return why no generator can be made of this state; None if one can."""
        try:
            self.made()
        except Exception as error:
            return f"{self.label} that cannot be set: {error}"
        return None

    def __deepcopy__(self, memo: object) -> Any:
        return self.made()


@dataclass(frozen=True, slots=True, eq=False)
class SavedGenerator(SavedRng):
    """The state of a `torch.Generator`.

    Attributes:
        state: uint8, one-dimensional; may be a view of the restored file.
        device: of the generator; such a device need not exist here.
    """

    state: torch.Tensor
    device: torch.device

    def __post_init__(self) -> None:
        if self.state.dtype != torch.uint8 or len(self.state.shape) != 1:
            raise ValueError("a generator's state is a row of uint8")

    @property
    def label(self) -> str:
        return "a torch.Generator"

    def made(self) -> torch.Generator:
        return self._generator_on(self.device)

    def set(self, generator: Any) -> None:
        generator.set_state(self.state.clone())  # cloned to be aligned, and independent of the file's memory

    def misfit(self, target: Any) -> str | None:
        if not isinstance(target, torch.Generator):
            return f"{self.label} in the checkpoint, a {type_label(target)} here"
        if self.device.type != target.device.type:
            return f"{self.label} on {self.device} in the checkpoint, on {target.device} here"
        return self._unusable(target.device)

    def unusable(self) -> str | None:
        return self._unusable(self.device)

    def _unusable(self, device: torch.device) -> str | None:
        try:
            self._generator_on(device)
        except Exception as error:
            return f"{self.label} that cannot be set on {device}: {error}"
        return None

    def _generator_on(self, device: torch.device) -> torch.Generator:
        generator = torch.Generator(device)
        self.set(generator)
        return generator


def type_label(value: object) -> str:
    """Return the name of a generator's type, with its package but without private modules."""
    kind = type(value)
    package = kind.__module__.split("._")[0]
    return f"{package}.{kind.__qualname__}"


def misfit(target: Any, saved: object) -> str | None:
    """Return why `saved` cannot be loaded into the live generator `target`; None if it can."""
    if not isinstance(saved, SavedRng):
        return f"{type(saved).__name__} in the checkpoint, a {type_label(target)} here"
    return saved.misfit(target)
