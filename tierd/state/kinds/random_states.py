"""Generators of NumPy and of Python's `random` as entries of the state: saved by their states, set in place by a load.

Invariant: as for `torch.Generator` (`tierd.state.kinds.generators`), no generator is made where the job has one. A
restore makes only the bit generators that NumPy itself has. NumPy is optional: a save finds its generators only among
imported modules, and a restore imports it only for a checkpoint that contains one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

from tierd.state.json_tree import SCALARS
from tierd.state.kinds.generators import SavedRng, type_label

PYTHON, NUMPY, LEGACY = "random.Random", "numpy.random.Generator", "numpy.random.RandomState"
_BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")  # NumPy's own bit generators


def kind_of(value: object) -> str | None:
    """Return which of these generators `value` is exactly; None if it is none."""
    if type(value) is random.Random:
        return PYTHON
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    return {numpy.Generator: NUMPY, numpy.RandomState: LEGACY}.get(type(value))


def tree_of(value: Any) -> object:
    """Return the typed JSON of a generator. Raises `ValueError` if its bit generator is not one of NumPy's own."""
    kind = kind_of(value)
    if kind is None:
        raise ValueError("no generator of NumPy or of Python's random")
    return {"$random": [kind, _typed_state(_state_of(value, kind))]}


def made(payload: object) -> SavedRandom:
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
    """The state of a generator of NumPy or of Python's `random` in a checkpoint.

    Attributes:
        kind: `PYTHON`, `NUMPY` or `LEGACY`.
        state: as parsed from JSON.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, state: Any) -> None:
        self.kind, self.state = kind, state

    @property
    def label(self) -> str:
        bits = "" if self.kind == PYTHON else f" with {self.state['bit_generator']}"
        return f"a {self.kind}{bits}"

    def made(self) -> Any:
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
        kind = kind_of(target)
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
