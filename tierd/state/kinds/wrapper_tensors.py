"""Wrapper subclasses of `torch.Tensor`, such as torchao's quantized tensors, stored by their inner tensors.

torch calls such a subclass traceable: `__tensor_flatten__` gives the names of its inner tensors and a context, and
`__tensor_unflatten__` makes the tensor again. A context is numbers, shapes and dtypes, and enums and records of the
same library.

Invariant: only the classes in `CLASSES` and `CONTEXTS` are stored, and a restore looks up no other class. Nothing is
unpickled. A class is looked up when a tensor is made, so that a checkpoint can be read without its library.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tierd.state.state_tree import SCALARS
from tierd.state.tensor_header import is_list_of_sizes

_QUANTIZED = "torchao.quantization"
_FLOAT8 = f"{_QUANTIZED}.quantize_.workflows.float8"
# Name of a class, its library and its own name -> the modules in which it is looked up.
CLASSES: dict[str, tuple[str, ...]] = {
    **{
        f"torchao.OptimState{kind}": (
            f"torchao.optim.subclass_{kind.lower()}",
            f"torchao.prototype.low_bit_optim.subclass_{kind.lower()}",
        )
        for kind in ("8bit", "4bit", "Fp8")
    },
    **{
        f"torchao.{name}": (_QUANTIZED,)
        for name in (
            *("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"),
            *("Int4Tensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4TilePackedTo4dTensor"),
        )
    },
    "torch.TwoTensor": ("torch.testing._internal.two_tensor",),
}
# The same of the enums and records in their contexts.
CONTEXTS: dict[str, tuple[str, ...]] = {
    **{
        f"torchao.{name}": (f"{_QUANTIZED}.granularity",)
        for name in ("PerTensor", "PerAxis", "PerGroup", "PerRow", "PerToken", "PerBlock")
    },
    "torchao.MappingType": (f"{_QUANTIZED}.quant_primitives",),
    "torchao.KernelPreference": (f"{_QUANTIZED}.quantize_.common.kernel_preference",),
    "torchao.Float8MMConfig": ("torchao.float8.inference",),
    "torchao.QuantizeTensorToFloat8Kwargs": (f"{_FLOAT8}.float8_tensor",),
    "torchao.QuantizeTensorToInt8Kwargs": (f"{_QUANTIZED}.quantize_.workflows.int8.int8_tensor",),
    "torchao.IntxUnpackedToInt8TensorActivationQuantization": (
        f"{_QUANTIZED}.quantize_.workflows.intx.intx_unpacked_to_int8_tensor",
    ),
}
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.Size, torch.device))


def wrapper_name_of(value: object, classes: dict[str, tuple[str, ...]] = CLASSES) -> str | None:
    """Return the name under which the exact type of `value` is known; None if it is not."""
    kind = type(value)
    name = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    modules = map(sys.modules.get, classes.get(name, ()))
    return name if any(getattr(module, kind.__qualname__, None) is kind for module in modules) else None


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a tensor's values: those inside a known wrapper, or the tensor itself."""
    if type(tensor) is torch.Tensor or wrapper_name_of(tensor) is None:
        yield tensor
    else:
        for inner in inner_tensors(tensor).values():
            yield from parts_of(inner)


def context_of(tensor: Any) -> list[object]:
    """Return everything but the inner tensors as typed JSON: the context, the shape, the stride and the dtype.

    Raises `ValueError`, which names the type, if the context holds a value that is not plain.
    """
    sizes = list(map(int, tensor.shape)), list(map(int, tensor.stride()))
    return [_encoded(tensor.__tensor_flatten__()[1]), *sizes, SCALARS[torch.dtype](tensor.dtype)]


def _encoded(value: Any) -> object:
    if type(value) in _PLAIN:
        return SCALARS[type(value)](value)
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(_encoded, value)]
    if type(value) is dict and all(type(key) is str for key in value):
        return ["dict", *([key, _encoded(inner)] for key, inner in value.items())]
    name = wrapper_name_of(value, CONTEXTS)
    if name is not None and isinstance(value, enum.Enum):
        return ["enum", name, value.name]
    if name is not None:
        return ["record", name, *([key, _encoded(getattr(value, key))] for key in _fields(type(value)))]
    raise ValueError(f"its context holds {type(value).__module__}.{type(value).__qualname__}")


def _fields(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(kind._fields)


class SavedWrapper:
    """A wrapper subclass in a checkpoint; `copy.deepcopy` of it returns the tensor.

    Attributes:
        inner: its inner tensors by name, which may be views of the restored file, or further wrappers.
        context: as `context_of` returns it, parsed.
    """

    __slots__ = ("context", "inner", "name")

    def __init__(self, name: str, inner: dict[str, Any], context: list[Any]) -> None:
        self.name, self.inner, self.context = name, inner, context

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.context[1])

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.context[3]
        return dtype

    def __str__(self) -> str:
        return f"a {self.name} {self.shape}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.rebuild(lambda tensor: copy.deepcopy(tensor, memo))
        return memo[id(self)]

    def rebuild(self, convert: Callable[[Any], Any] = lambda tensor: tensor) -> Any:
        """Return a tensor of inner tensors as `convert` returns them.

        Raises `ValueError` if this class, or one in its context, is not installed here, and any other error if it does
        not take these inner tensors or this context.
        """
        context, shape, stride, _ = self.context
        inner = {
            name: tensor.rebuild(convert) if isinstance(tensor, SavedWrapper) else convert(tensor)
            for name, tensor in self.inner.items()
        }
        kind: Any = _class_of(self.name, CLASSES)
        return kind.__tensor_unflatten__(inner, _decoded(context), torch.Size(shape), tuple(stride))

    def unusable(self) -> str | None:
        """Return why no tensor can be made of it here; None if one can."""
        try:
            self.rebuild()
        except Exception as error:
            return f"{self} that cannot be made here: {error}"
        return None

    def tensors(self) -> Iterator[Any]:
        for tensor in self.inner.values():
            if isinstance(tensor, SavedWrapper):
                yield from tensor.tensors()
            else:
                yield tensor

    def nested(self) -> dict[str, Any]:
        return {
            name: tensor.nested() if isinstance(tensor, SavedWrapper) else tensor for name, tensor in self.inner.items()
        }

    def misfit(self, target: Any) -> str | None:
        """Return why it cannot be filled into the live tensor `target`; None if it can."""
        target_name = wrapper_name_of(target) or f"{type(target).__module__}.{type(target).__qualname__}"
        if target_name != self.name:
            shape = tuple(target.shape)
            return f"{self} in the checkpoint, a {target_name} {shape} here; make it of that kind before the restore"
        try:
            is_same = context_of(target) == _typed(self.context)
        except ValueError as error:
            return f"{self} in the checkpoint; of the one here, {error}"
        if not is_same:
            return f"{self} in the checkpoint, made in another way than the one {tuple(target.shape)} here"
        target_tensors = inner_tensors(target)
        if target_tensors.keys() != self.inner.keys():
            return f"{self} of {', '.join(self.inner)} in the checkpoint, of {', '.join(target_tensors)} here"
        for name, saved in self.inner.items():
            if isinstance(saved, SavedWrapper):
                reason = saved.misfit(target_tensors[name])
            else:
                forms = [
                    (tensor.shape, tensor.dtype, wrapper_name_of(tensor)) for tensor in (saved, target_tensors[name])
                ]
                reason = (
                    None if forms[0] == forms[1] else f"{self} in the checkpoint, whose {name!r} is another tensor here"
                )
            if reason:
                return reason
        return None

    def pairs(self, target: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor inside `target`, which fits, with the stored one."""
        target_tensors = inner_tensors(target)
        for name, saved in self.inner.items():
            if isinstance(saved, SavedWrapper):
                yield from saved.pairs(target_tensors[name])
            else:
                yield target_tensors[name], saved


def parse_wrapper(payload: object) -> SavedWrapper:
    """Return the tensor that parsed JSON describes. Raises `ValueError` if it is not as `save` writes it."""
    if type(payload) is not list or len(payload) != 3 or payload[0] not in CLASSES:
        raise ValueError("$wrapper is [class, inner tensors, context] of a known class: a newer tierd may know it")
    name, inner, context = payload
    if type(inner) is not dict or not inner or not all(_is_stored(tensor) for tensor in inner.values()):
        raise ValueError("the inner tensors of a $wrapper are tensors by name")
    is_context = type(context) is list and len(context) == 4 and type(context[3]) is torch.dtype
    if not is_context or not all(map(is_list_of_sizes, context[1:3])):
        raise ValueError("the context of a $wrapper is [context, shape, stride, dtype]")
    _check_encoded(context[0])
    return SavedWrapper(name, inner, context)


def _is_stored(value: Any) -> bool:
    return isinstance(value, SavedWrapper) or isinstance(getattr(value, "dtype", None), torch.dtype)


def _check_encoded(value: Any) -> None:
    if type(value) is not list:
        if type(value) not in _PLAIN:
            raise ValueError(f"{type(value).__name__} in the context of a $wrapper")
        return
    form, *parts = value or [None]
    if form in ("enum", "record"):
        if not parts or parts[0] not in CONTEXTS:
            raise ValueError("an unknown class in the context of a $wrapper: a newer tierd may know it")
        if form == "enum" and (len(parts) != 2 or type(parts[1]) is not str):
            raise ValueError("an enum in the context of a $wrapper is a class and a name")
        parts = [] if form == "enum" else parts[1:]
    elif form not in ("list", "tuple", "dict"):
        raise ValueError("an unknown form in the context of a $wrapper")
    for part in parts:
        if form in ("dict", "record"):
            if type(part) is not list or len(part) != 2 or type(part[0]) is not str:
                raise ValueError("a member in the context of a $wrapper is a name and a value")
            part = part[1]
        _check_encoded(part)


def _decoded(value: Any) -> Any:
    if type(value) is not list:
        return value
    form, *parts = value
    if form == "enum":
        return _class_of(parts[0], CONTEXTS)[parts[1]]
    if form == "record":
        return _class_of(parts[0], CONTEXTS)(**{key: _decoded(inner) for key, inner in parts[1:]})
    if form == "dict":
        return {key: _decoded(inner) for key, inner in parts}
    return (list if form == "list" else tuple)(map(_decoded, parts))


def _typed(value: Any) -> object:
    """Return parsed JSON as it was before it was parsed."""
    if type(value) is list:
        return [_typed(inner) for inner in value]
    return SCALARS[type(value)](value)


def _class_of(name: str, classes: dict[str, tuple[str, ...]]) -> Any:
    library, _, class_name = name.partition(".")
    for module in classes[name]:
        try:
            return getattr(importlib.import_module(module), class_name)
        except (ImportError, AttributeError):
            continue
    raise ValueError(f"{library} has no {class_name} here; install the {library} with which it was saved")
