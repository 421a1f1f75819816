"""The values of a state as torch's weights-only reader takes them, which `torch.load` uses unless it is told otherwise.

Invariant: a value that changes its type and one that is left out are both named.

Source: torch 2.13, `torch/_weights_only_unpickler.py` (`_get_allowed_globals`, and the opcodes of `Unpickler.load`).
"""

from __future__ import annotations

import codecs
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tierd.core.errors import StateMismatch
from tierd.core.printable import printable
from tierd.state.kinds import numpy_arrays

_MAX_INT_BITS = 8 * 255 - 1  # the reader has no opcode for longer integers
_UNCHANGED_TYPES = frozenset((type(None), bool, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device))
_ABSENT = object()


class LoadableState:
    """A state in which each value is of a type that the weights-only reader takes.

    Arrays become tensors of the same dtype; NumPy scalars become numbers or texts, deques lists, a `defaultdict` a
    dict, a frozenset a set. Other values are left out: without their key in a mapping, as None in a sequence.

    Args:
        state: the state; its lists and mappings are changed in place.
        names: by `id`, the name of each tensor whose bytes lie in the checkpoint.

    Attributes:
        value: the state.
        in_memory: by `id`, the tensors whose bytes are in memory.
        converted: the changed values with their types before, as `rng.numpy.state.key (numpy.ndarray)`.
        left_out: the names of the others.

    Raises:
        StateMismatch: nothing is left.
    """

    def __init__(self, state: Any, names: Mapping[int, str]) -> None:
        self._names = names
        self._entered: dict[int, object] = {}
        self.in_memory: dict[int, torch.Tensor] = {}
        self.converted: list[str] = []
        self.left_out: list[str] = []
        self.value = self._loadable(state, ())
        if self.value is _ABSENT:
            raise StateMismatch(f"torch.load takes no {type(state).__name__} with weights_only=True, its default")

    def _loadable(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in _UNCHANGED_TYPES or _is_short_int(value):
            return value
        if kind is bytes:
            return value or _EmptyBytes()
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is list:
            return self._fill_list(value, path)
        if kind is tuple:
            return tuple(self._fill_list(list(value), path))
        if kind is deque:
            return self._converted(self._fill_list(list(value), path), value, path)
        if isinstance(value, dict):
            is_same = kind in (dict, OrderedDict, Counter)
            mapping = self._mapping(value if is_same else dict(value), path)
            return mapping if is_same else self._converted(mapping, value, path)
        if kind in (set, frozenset) and all(map(_is_key, value)):
            return value if kind is set else self._converted(set(value), value, path)
        if numpy_arrays.is_array(value) or numpy_arrays.is_scalar(value):
            return self._of_numpy(value, path)
        return self._absent(path)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) in self._names:
            return value
        tensor = value.detach().contiguous()
        self.in_memory[id(tensor)] = tensor
        return tensor

    def _fill_list(self, items: list[Any], path: tuple[Any, ...]) -> list[Any]:
        if self._is_entered(items):
            return items
        for index, item in enumerate(items):
            new = self._loadable(item, (*path, index))
            items[index] = None if new is _ABSENT else new
        return items

    def _mapping(self, mapping: dict[Any, Any], path: tuple[Any, ...]) -> dict[Any, Any]:
        if self._is_entered(mapping):
            return mapping
        for key, item in tuple(mapping.items()):
            new = self._loadable(item, (*path, key)) if _is_key(key) else self._absent((*path, key))
            if new is _ABSENT:
                del mapping[key]
            elif new is not item:
                mapping[key] = new
        return mapping

    def _of_numpy(self, value: Any, path: tuple[Any, ...]) -> Any:
        new: Any = None
        if numpy_arrays.is_array(value):
            try:
                native = value.astype(value.dtype.newbyteorder("="), order="C", copy=False)
                new = self._tensor(torch.from_numpy(native))
            except TypeError:  # torch lacks the dtype
                return self._absent(path)
        elif value.dtype.kind in "biufcSU":  # `item` of a moment in time is a number without its unit
            new = value.item()
        if not isinstance(new, torch.Tensor | bool | int | float | complex | str | bytes):
            return self._absent(path)
        return self._converted(_EmptyBytes() if new == b"" else new, value, path)

    def _converted(self, new: Any, value: object, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        self.converted.append(f"{_name(path)} ({module}{kind.__name__})")
        return new

    def _absent(self, path: tuple[Any, ...]) -> object:
        self.left_out.append(_name(path))
        return _ABSENT

    def _is_entered(self, container: object) -> bool:
        """Return whether this very container was met before, as in an archive that another program wrote."""
        if id(container) in self._entered:
            return True
        self._entered[id(container)] = container
        return False


class _EmptyBytes:
    """`b""`, whose own pickle names a function that the reader refuses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key != b"" and (type(key) in (str, bytes, bool, float, complex, type(None)) or _is_short_int(key))


def _is_short_int(value: object) -> bool:
    return type(value) is int and value.bit_length() <= _MAX_INT_BITS


def _name(path: Iterable[object]) -> str:
    return printable(".".join(map(str, path))) or "the entry"
