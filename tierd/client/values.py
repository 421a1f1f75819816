"""Single values of a state: which are known, how one names them, what JSON or plain tensor each becomes.

Law: a value without a safe encoding is refused by its path; a subclass is not its base.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, TypeGuard, runtime_checkable

import torch

from tierd.client import arrays
from tierd.client.tensorfile import DTYPE_NAMES
from tierd.client.tree import EXACT, KEYS, MAX_TREE, SCALARS, STORED_AS
from tierd.core.errors import StateRefused

Path = tuple[object, ...]
TensorForm = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...], bool, bool]

IMMUTABLE = frozenset(SCALARS) - {bytearray}
_STORABLE = frozenset((*DTYPE_NAMES, *STORED_AS))
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state and takes it back: modules, optimizers, schedulers, data loaders,
    `tierd.RngState`."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class Made(str):
    """JSON, ready to be put into its place."""

    __slots__ = ()


# ---- names


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether `value` gives its own state: callable `state_dict` and `load_state_dict`, and no class."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def show(path: Path) -> str:
    """A path as one would write it: ``state["optimizer"]["state"][0]``; safe to print, long parts cut."""
    return "state" + "".join(f"[{show_part(part)}]" for part in path)


def show_part(part: object) -> str:
    """One key of a path, quoted."""
    text = json.dumps(part, ensure_ascii=False) if type(part) is str else repr(part)
    text = text if len(text) <= 100 else f"{text[:97]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def type_name(value: object) -> str:
    """The type's name, with its module unless built in."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def refuse(path: Path, reason: str, cause: Exception | None = None) -> NoReturn:
    raise StateRefused(f"{show(path)}: {reason}") from cause


# ---- tensors


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether `why_refused` has nothing to say; quick."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in _STORABLE
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
    )


def why_refused(tensor: torch.Tensor) -> str | None:
    """Why the tensor cannot be stored, and the way out; None if it can."""
    if type(tensor) not in _PLAIN:
        if hasattr(tensor, "full_tensor"):
            kind = type_name(tensor)
            return f"{kind}, a sharded tensor; pass .full_tensor(), or save it through tierd.dcp.StorageWriter"
        return f"{type_name(tensor)}, a tensor subclass; pass a plain torch.Tensor"
    if tensor.is_nested:
        return "a nested tensor; pass the list that .unbind() gives"
    if tensor.layout != torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor; pass .to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor; pass .int_repr() with its scale and zero point"
    if tensor.is_meta:
        return "a meta tensor, which holds no data; materialize it first"
    if tensor.dtype not in _STORABLE:
        return f"a tensor of {tensor.dtype}, which no stored dtype holds"
    return None


def form_of(tensor: torch.Tensor) -> TensorForm:
    """All that, beside the address, says what a storable tensor shows: two of one form at one address are one."""
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without a graph, of a dtype that the tensor file holds; no copy unless they are lazily negated
    or conjugated."""
    found = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_neg() or tensor.is_conj():
        found = found.resolve_conj().resolve_neg()
    if tensor.dtype in STORED_AS:
        stored = STORED_AS[tensor.dtype]
        found = torch.view_as_real(found) if tensor.dtype.is_complex else found.view(stored)
    return found


# ---- values that hold no tensor


def made(value: Any, path: Path) -> Made:
    """The JSON of a value that training may change in place, or that says only by itself whether it can be stored."""
    if type(value) in (set, frozenset):
        members = sorted((key_tree(member, path) for member in list(value)), key=lambda member: json.dumps(member))
        return Made(dumps({f"${type(value).__name__}": members}))
    return Made(dumps(SCALARS[bytearray](value) if type(value) is bytearray else _numpy_scalar(value, path)))


def _numpy_scalar(value: Any, path: Path) -> object:
    if value.dtype.kind == "U":
        return {"$npstr": SCALARS[str](str(value))}
    if value.dtype.kind == "S":
        (encoded,) = SCALARS[bytes](bytes(value)).values()  # type: ignore[attr-defined]
        return {"$npbytes": encoded}
    if not arrays.describes(value.dtype):
        refuse(path, f"{type_name(value)} of dtype {value.dtype}")
    return {"$npscalar": arrays.scalar_json(value)}


def key_tree(key: object, path: Path) -> object:
    """A mapping's key, or a set's member, as it stands in a tree."""
    if type(key) is tuple:
        return {"$tuple": [key_tree(part, path) for part in key]}
    if type(key) not in KEYS:
        refuse(
            path, f"the key {show_part(key)} is {type_name(key)}; keys are str, int, float, bool, bytes, None or tuples"
        )
    return SCALARS[type(key)](key)


def is_name(key: object) -> bool:
    """Whether a mapping's key can be a JSON object's."""
    return type(key) is str and not key.startswith("$") and type(SCALARS[str](key)) is str


def parts_of(value: Any) -> tuple[object, ...]:
    """What a list, tuple, deque or slice holds now."""
    return (value.start, value.stop, value.step) if type(value) is slice else tuple(value)


def is_run(parts: tuple[object, ...]) -> bool:
    """Whether all the parts are immutable, so that the tuple is a snapshot."""
    return IMMUTABLE.issuperset(map(type, parts))


# ---- text


def encode(pieces: Sequence[str], holes: Sequence[object]) -> bytes:
    """Typed JSON in UTF-8: the pieces, and between them the JSON of what is in the holes: immutable values, tuples of
    them, and `Made`.

    Raises:
        StateRefused: it is larger than a reader takes.
    """
    parts = [""] * (len(pieces) + len(holes))
    parts[::2] = pieces
    parts[1::2] = map(_text, holes)
    text = "".join(parts).encode()
    if len(text) > MAX_TREE:
        raise StateRefused(f"state: {len(text)} bytes besides tensors; {MAX_TREE} at most, keep large data in tensors")
    return text


def _text(value: Any) -> str:
    kind = type(value)
    if kind is Made:
        return value  # type: ignore[no-any-return]
    if (kind is int and -EXACT <= value <= EXACT) or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is not tuple:
        return dumps(SCALARS[kind](value))
    if set(map(type, value)) == {int} and min(value) >= -EXACT and max(value) <= EXACT:
        return dumps(value)  # a sampler's permutation is a million of them
    return dumps([SCALARS[type(part)](part) for part in value])


# What stands around the parts of a sequence.
BRACKETS: dict[type, tuple[str, str]] = {
    list: ("", ""),
    tuple: ('{"$tuple":', "}"),
    deque: ('{"$deque":[', "]}"),
    slice: ('{"$slice":', "}"),
}
