"""Random number generators as entries of the state: of torch, of NumPy, of `random`, and all those of the process.

Invariants:

- No generator is made where the job has one, because a data loader or a sampler holds that very object. A saved
  generator without a target is refused, unless the target is None, which requests a new one.
- NumPy is optional: a save finds its generators only among imported modules, and a restore imports it only for a
  checkpoint that contains one. A restore makes only the bit generators that NumPy itself has.
- A save does not import NumPy or initialise CUDA to read the states of the process's generators.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tierd.core.errors import StateMismatch
from tierd.state.state_tree import SCALARS


class SavedRng:
    """The state of a random generator in a checkpoint; `copy.deepcopy` of it returns a generator."""

    __slots__ = ()

    @property
    def label(self) -> str:
        raise NotImplementedError

    def rebuild(self) -> Any:
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
            self.rebuild()
        except Exception as error:
            return f"{self.label} that cannot be set: {error}"
        return None

    def __deepcopy__(self, memo: object) -> Any:
        return self.rebuild()


@dataclass(frozen=True, slots=True, eq=False)
class SavedGenerator(SavedRng):
    """The state of a `torch.Generator`, perhaps a view of the restored file. Its device need not exist here."""

    state: torch.Tensor
    device: torch.device

    def __post_init__(self) -> None:
        if self.state.dtype != torch.uint8 or len(self.state.shape) != 1:
            raise ValueError("a generator's state is a row of uint8")

    @property
    def label(self) -> str:
        return "a torch.Generator"

    def rebuild(self) -> torch.Generator:
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


def generator_misfit(target: Any, saved: object) -> str | None:
    """Return why `saved` cannot be loaded into the live generator `target`; None if it can."""
    if not isinstance(saved, SavedRng):
        return f"{type(saved).__name__} in the checkpoint, a {type_label(target)} here"
    return saved.misfit(target)


PYTHON, NUMPY, LEGACY = "random.Random", "numpy.random.Generator", "numpy.random.RandomState"
_BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")  # NumPy's own bit generators


def random_kind_of(value: object) -> str | None:
    """Return which of these generators `value` is exactly; None if it is none."""
    if type(value) is random.Random:
        return PYTHON
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    return {numpy.Generator: NUMPY, numpy.RandomState: LEGACY}.get(type(value))


def tree_of(value: Any) -> object:
    """Return the typed JSON of a generator. Raises `ValueError` if its bit generator is not one of NumPy's own."""
    kind = random_kind_of(value)
    if kind is None:
        raise ValueError("no generator of NumPy or of Python's random")
    return {"$random": [kind, _typed_state(_state_of(value, kind))]}


def parse_random(payload: object) -> SavedRandom:
    """Return the generator's state in parsed JSON. Raises `ValueError` if it is not as `tree_of` writes it."""
    if type(payload) is not list or len(payload) != 2 or payload[0] not in (PYTHON, NUMPY, LEGACY):
        raise ValueError("$random is [kind, state] of a known kind: a newer tierd may have written it")
    kind, state = payload
    if kind == PYTHON:
        if type(state) is not list or len(state) != 3 or type(state[1]) is not list:
            raise ValueError("the state of a random.Random is [version, [ints], float or null]")
    elif type(state) is not dict or state.get("bit_generator") not in _BITS:
        raise ValueError("the state of a NumPy generator names one of NumPy's own bit generators")
    return SavedRandom(kind, state)


class SavedRandom(SavedRng):
    """The state of a generator of NumPy or of Python's `random` in a checkpoint, as parsed from JSON."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, state: Any) -> None:
        self.kind, self.state = kind, state

    @property
    def label(self) -> str:
        bits = "" if self.kind == PYTHON else f" with {self.state['bit_generator']}"
        return f"a {self.kind}{bits}"

    def rebuild(self) -> Any:
        if self.kind == PYTHON:
            generator: Any = random.Random()  # noqa: S311
        else:
            from numpy import random as numpy

            maker: Callable[[Any], Any] = numpy.Generator if self.kind == NUMPY else numpy.RandomState
            generator = maker(getattr(numpy, self.state["bit_generator"])())
        self.set(generator)
        return generator

    def set(self, generator: Any) -> None:
        if self.kind == PYTHON:
            version, numbers, gauss = self.state
            generator.setstate((version, tuple(numbers), gauss))
        elif self.kind == NUMPY:
            generator.bit_generator.state = self.state
        else:
            generator.set_state(self.state)

    def misfit(self, target: Any) -> str | None:
        kind = random_kind_of(target)
        target_label = SavedRandom(kind, _state_of(target, kind)).label if kind else f"a {type_label(target)}"
        return self.unusable() if target_label == self.label else f"{self.label} in the checkpoint, {target_label} here"


def _state_of(value: Any, kind: str) -> Any:
    if kind == PYTHON:
        return value.getstate()
    state = value.bit_generator.state if kind == NUMPY else value.get_state(legacy=False)
    if not isinstance(state, dict) or state.get("bit_generator") not in _BITS:
        raise ValueError(
            "with a bit generator that is not one of NumPy's own; save its state, a dict, in the place of it"
        )
    return state


def _typed_state(value: Any) -> object:
    if isinstance(value, dict):
        return {key: _typed_state(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):  # an array, or a scalar of NumPy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_typed_state(inner) for inner in value]
    return SCALARS[type(value)](value)


log = logging.getLogger("tierd")


class RngState:
    """The process's global generators: Python, NumPy, torch CPU, and every CUDA device.

    NumPy is included if it is imported, CUDA if it is in use.
    Put ``tierd.RngState()`` into the state. It holds nothing itself; it reads and sets the process's generators.

    If a process sees as many CUDA devices as the process that saved, the generators of all are restored, by device
    number. In any case its current device receives the state of the device that was current at the save. The reason is
    that a rank's device may have another number, or may be the only one that the process sees. A process without CUDA
    restores no CUDA generator.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' current states."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
            state["cuda_device"] = torch.cuda.current_device()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every saved generator.

        Raises:
            StateMismatch: NumPy's state was saved, but NumPy is not installed. Or the checkpoint has several devices'
                states but no number of the current device, and this process sees only some devices. Nothing was set.
        """
        misfit = self.misfit(state_dict)
        if misfit:
            raise StateMismatch(f"random number generators: {misfit}")
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"])
        if "numpy" in state_dict:
            import numpy as np

            np.random.set_state(state_dict["numpy"])
        if "cuda" in state_dict:
            _set_cuda(state_dict["cuda"], state_dict.get("cuda_device"))

    def misfit(self, state_dict: object) -> str | None:
        """Return why `state_dict` cannot be loaded here; None if it can."""
        if not isinstance(state_dict, dict) or not {"python", "torch"} <= state_dict.keys():
            return "not the state of a RngState"
        if "cuda" in state_dict and (reason := _cuda_misfit(state_dict["cuda"], state_dict.get("cuda_device"))):
            return reason
        if "numpy" in state_dict:
            try:
                import numpy  # noqa: F401
            except ImportError:
                return "saved with NumPy, which is not installed here"
        return None


def _cuda_misfit(states: object, current: object) -> str | None:
    if not isinstance(states, list) or not (current is None or (type(current) is int and 0 <= current < len(states))):
        return "the CUDA devices' states are not what RngState gives"
    device_count = torch.cuda.device_count()
    if current is None and len(states) > 1 and device_count not in (0, len(states)):
        return (
            f"saved with {len(states)} CUDA devices, this process sees {device_count}, and the checkpoint does not say "
            "which was in use: show as many to this process (CUDA_VISIBLE_DEVICES), or leave RngState out"
        )
    return None


def _set_cuda(states: list[torch.Tensor], current: int | None) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == len(states):
        torch.cuda.set_rng_state_all(states)
    elif devices == 0:
        log.warning("generators of %d CUDA devices are left out: this process sees none", len(states))
    if devices and states and (devices != len(states) or (current is not None and torch.cuda.is_initialized())):  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states[current or 0])  # of the current device
