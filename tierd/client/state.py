"""Training state <-> typed JSON and tensors.

Law: what `flatten` returns is a snapshot of every value that is not a tensor (nothing that training does afterwards
changes it) and names every tensor once; a value without a safe encoding is refused by its path before anything is
written. No pickle.

The encoding is described in `tierd.client.tree`, the tensor file in `tierd.client.tensorfile`. Tensors that are the
same memory seen the same way (tied weights) are stored once and come back as one tensor; tensors that merely overlap
come back independent. Containers are stored where they stand: a list referred to twice comes back as two lists.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeGuard, runtime_checkable

import torch

from tierd.client import arrays
from tierd.client.tensorfile import DTYPE_NAMES, METADATA, Buffer, parse_layout, view
from tierd.client.tree import EXACT, FACTORIES, KEYS, MAX_DEPTH, MAX_TREE, SCALARS, STORED_AS, parse_tree
from tierd.core.errors import StateMismatch, StateRefused

Path = tuple[object, ...]


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state and takes it back: modules, optimizers, schedulers, data loaders,
    `tierd.RngState`."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class Flattened:
    """A state in two parts: `tree`, typed JSON in UTF-8, and the tensors that it names.

    The tensors are the live ones: detached, of a dtype that the tensor file holds, on any device, perhaps not
    contiguous, not copied (NumPy arrays are). Whoever wants a snapshot copies them before training changes them.
    """

    tree: bytes
    tensors: dict[str, torch.Tensor]


def flatten(state: Mapping[str, object]) -> Flattened:
    """Take a state apart. Calls every `state_dict()`; has no other effect.

    Raises:
        StateRefused: a value has no encoding (its path is named), a `state_dict()` raised (chained), or the tree is
            too large.
    """
    if not isinstance(state, Mapping):
        raise StateRefused(f"state: {type_name(state)}; pass a mapping of names to values")
    for key in state:
        if type(key) is not str:
            raise StateRefused(f"state: the name {key!r} is {type_name(key)}, not str")
    writer = _Writer()
    try:
        tree = writer.mapping(dict(state), ())
        text = json.dumps(
            tree, ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
        ).encode()
    except RecursionError as error:
        raise StateRefused("state: nested too deeply for the stack that is left") from error
    if len(text) > MAX_TREE:
        raise StateRefused(f"state: {len(text)} bytes besides tensors; {MAX_TREE} at most, keep large data in tensors")
    return Flattened(text, writer.tensors)


def unflatten(tree: bytes | bytearray | memoryview, file: Buffer) -> dict[str, Any]:
    """Put a state together again; its tensors are views into `file` (writable, or torch warns), which has to outlive
    them.

    NumPy arrays own their memory. One stored tensor is one tensor object, wherever the tree names it.

    Raises:
        StateMismatch: tree or file is not what tierd writes; names the defect.
    """
    entries = parse_layout(file).entries
    views: dict[str, torch.Tensor] = {}

    def stored(name: str) -> torch.Tensor:
        if name not in views:
            views[name] = view(file, entries[name])
        return views[name]

    value = parse_tree(tree, stored)
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise StateMismatch("the state tree: its root is no mapping of names")
    return value


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


def why_refused(tensor: torch.Tensor) -> str | None:
    """Why the tensor cannot be stored, and the way out; None if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if hasattr(tensor, "full_tensor"):
            return f"{type_name(tensor)}, a sharded tensor; pass .full_tensor(), or use torch.distributed.checkpoint"
        return f"{type_name(tensor)}, a tensor subclass; pass a plain torch.Tensor"
    if tensor.is_nested:
        return "a nested tensor; pass the list that .unbind() gives"
    if tensor.layout != torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor; pass .to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor; pass .int_repr() with its scale and zero point"
    if tensor.is_meta:
        return "a meta tensor, which holds no data; materialize it first"
    if tensor.dtype not in DTYPE_NAMES and tensor.dtype not in STORED_AS:
        return f"a tensor of {tensor.dtype}, which no stored dtype holds"
    return None


class _Writer:
    """One walk over a state: collects tensors by name, knows which containers are open."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[Hashable, str] = {}  # memory and how it is seen -> name
        self._alive: list[object] = []  # what `_known` and `_open` tell apart by address must not be freed
        self._open: dict[int, Path] = {}

    def node(self, value: object, path: Path) -> object:
        scalar = SCALARS.get(type(value))
        if scalar is not None:
            return scalar(value)
        if id(value) in self._open:
            _refuse(path, f"{type_name(value)}, a cycle back to {show(self._open[id(value)])}")
        if len(self._open) >= MAX_DEPTH:
            _refuse(path, f"{type_name(value)}, nested deeper than {MAX_DEPTH}")
        self._open[id(value)] = path
        try:
            return _NODES.get(type(value), _Writer.other)(self, value, path)
        finally:
            del self._open[id(value)]

    def other(self, value: object, path: Path) -> object:
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if arrays.is_array(value):
            if not arrays.describes(value.dtype):
                _refuse(path, f"numpy.ndarray of dtype {value.dtype}; object and structured dtypes have no encoding")
            name = self._store(path, arrays.tensor_of(value))
            return {"$array": [name, value.dtype.str, list(value.shape)]}
        if arrays.is_scalar(value):
            return self.numpy_scalar(value, path)
        if is_stateful(value):
            try:
                own = value.state_dict()
            except Exception as error:
                raise StateRefused(f"{show(path)}: state_dict() raised {type(error).__name__}: {error}") from error
            return self.node(own, path)
        for kind in (dict, list, tuple, set, str, int, float, bytes):
            if isinstance(value, kind):
                _refuse(path, f"{type_name(value)}, a subclass of {kind.__name__}; pass a plain {kind.__name__}")
        return _refuse(path, type_name(value))

    def numpy_scalar(self, value: Any, path: Path) -> object:
        if value.dtype.kind == "U":
            return {"$npstr": self.node(str(value), path)}
        if value.dtype.kind == "S":
            (encoded,) = SCALARS[bytes](bytes(value)).values()  # type: ignore[attr-defined]
            return {"$npbytes": encoded}
        if not arrays.describes(value.dtype):
            _refuse(path, f"{type_name(value)} of dtype {value.dtype}")
        return {"$npscalar": arrays.scalar_json(value)}

    def tensor(self, tensor: torch.Tensor, path: Path) -> object:
        reason = why_refused(tensor)
        if reason is not None:
            _refuse(path, reason)
        key: Hashable = None
        if tensor.numel():
            seen = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
            key = tensor.device, tensor.data_ptr(), *seen
        name = self._known.get(key) if key else None
        if name is None:
            self._alive.append(tensor)
            plain = tensor.detach().resolve_conj().resolve_neg()
            if tensor.dtype.is_complex:
                plain = torch.view_as_real(plain)
            elif tensor.dtype in STORED_AS:
                plain = plain.view(STORED_AS[tensor.dtype])
            name = self._store(path, plain)
            if key:
                self._known[key] = name
        if tensor.dtype in STORED_AS:
            return {"$view": [name, str(tensor.dtype).removeprefix("torch.")]}
        return {"$tensor": name}

    def _store(self, path: Path, tensor: torch.Tensor) -> str:
        parts = [part if type(part) is str else repr(part) for part in path]
        name = base = "/".join(parts).encode("utf-8", "backslashreplace").decode()
        count = 1
        while name in self.tensors or name == METADATA:
            count += 1
            name = f"{base}~{count}"
        self.tensors[name] = tensor
        return name

    def values(self, values: Iterable[object], path: Path) -> list[object]:
        listed: list[Any] = list(values)
        if set(map(type, listed)) == {int} and min(listed) >= -EXACT and max(listed) <= EXACT:
            return listed  # a sampler's permutation is a million of them
        return [self.node(value, (*path, index)) for index, value in enumerate(listed)]

    def mapping(self, value: Mapping[Any, object], path: Path) -> object:
        pairs = list(value.items())  # at once: a thread of the owner's may still add to it
        if all(type(key) is str and not key.startswith("$") and _encodes(key) for key, _ in pairs):
            return {key: self.node(inner, (*path, key)) for key, inner in pairs}
        return {"$dict": [[self.key(key, path), self.node(inner, (*path, key))] for key, inner in pairs]}

    def key(self, key: object, path: Path) -> object:
        if type(key) is tuple:
            return {"$tuple": [self.key(part, path) for part in key]}
        if type(key) not in KEYS:
            _refuse(
                path,
                f"the key {show_part(key)} is {type_name(key)}; keys are str, int, float, bool, bytes, None or tuples",
            )
        return SCALARS[type(key)](key)

    def ordered(self, value: OrderedDict[Any, object], path: Path) -> object:
        attributes = vars(value)
        if attributes.keys() - {"_metadata"}:
            _refuse(path, f"collections.OrderedDict with the attribute {min(attributes.keys() - {'_metadata'})!r}")
        metadata = [self.node(inner, (*path, name)) for name, inner in attributes.items()]
        return {"$odict": [self.mapping(value, path), *metadata]}

    def default(self, value: defaultdict[Any, object], path: Path) -> object:
        factory = value.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and FACTORIES.get(name) is not factory:
            _refuse(path, f"collections.defaultdict with the factory {name or type_name(factory)}; only built-in types")
        return {"$defaultdict": [name or None, self.mapping(value, path)]}

    def members(self, values: Iterable[object], path: Path) -> list[object]:
        return sorted((self.key(value, path) for value in list(values)), key=lambda value: json.dumps(value))


def _refuse(path: Path, reason: str) -> NoReturn:
    raise StateRefused(f"{show(path)}: {reason}")


def _encodes(text: str) -> bool:
    return type(SCALARS[str](text)) is str


_NODES: dict[type, Callable[[_Writer, Any, Path], object]] = {
    dict: _Writer.mapping,
    list: _Writer.values,
    tuple: lambda writer, value, path: {"$tuple": writer.values(value, path)},
    set: lambda writer, value, path: {"$set": writer.members(value, path)},
    frozenset: lambda writer, value, path: {"$frozenset": writer.members(value, path)},
    OrderedDict: _Writer.ordered,
    Counter: lambda writer, value, path: {"$counter": writer.mapping(value, path)},
    defaultdict: _Writer.default,
    deque: lambda writer, value, path: {"$deque": [value.maxlen, writer.values(value, path)]},
    slice: lambda writer, value, path: {"$slice": writer.values((value.start, value.stop, value.step), path)},
    torch.Tensor: _Writer.tensor,
    torch.nn.Parameter: _Writer.tensor,
}
