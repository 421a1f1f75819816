"""Handle the single values of a state: which types are known, how a path names a value, and how a value is encoded.

Invariant: a value without a safe encoding is refused, with its path. A subclass is not accepted in place of its base.
Both are decided in this module, so that nothing is accepted that has no encoding.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch

from tierd.core.errors import StateRefused
from tierd.state import cuda, state_tree, value_kinds
from tierd.state.kinds import random_generators, stored_arrays, supported_values
from tierd.state.kinds.stored_arrays import OPAQUE_DTYPES, STORED_AS, PackedReference
from tierd.state.state_tree import EXACT, KEYS, MAX_DEPTH, MAX_TREE, SCALARS, Path
from tierd.state.tensor_file import DTYPE_NAMES, MAX_DIMS
from tierd.state.tree_parser import fullest_path, heaviest_path, hole_paths
from tierd.state.value_kinds import IMMUTABLE, PLAIN

TensorForm = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...], bool, bool]

MOST_REPEATED = 256 * 1024 * 1024  # bytes by which a tensor's size in the file may exceed its size in memory
_WINDOW = 1 << 11  # values encoded in one call, which takes about a millisecond
_STORABLE = frozenset((*DTYPE_NAMES, *STORED_AS))
# torch negates these integers, complex numbers, and floating-point numbers of more than 8 bits.
_NEGATED_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_TEXTS = frozenset((str, bytes))
dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode


class JsonText(str):
    """Text that is already JSON and is inserted into the tree unchanged."""

    __slots__ = ()


def path_text(path: Path) -> str:
    """Format a path as Python code: ``state["optimizer"]["state"][0]``. Safe to print; long parts are cut."""
    return "state" + "".join(f"[{path_part_text(part)}]" for part in path)


def path_part_text(part: object) -> str:
    """Quote one key of a path; at most 100 characters."""
    text = json.dumps(part, ensure_ascii=False) if type(part) is str else repr(part)
    text = text if len(text) <= 100 else f"{text[:97]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def type_name(value: object) -> str:
    """Return the type's name, with its module unless the type is built in."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def raise_refused(path: Path, reason: str, cause: Exception | None = None) -> NoReturn:
    raise StateRefused(f"{path_text(path)}: {reason}") from cause


def is_storable(tensor: torch.Tensor) -> bool:
    return why_refused(tensor) is None


def _is_unreadable(negated: torch.Tensor) -> bool:
    """Whether torch itself cannot read the values of a lazily negated tensor."""
    dtype = negated.dtype
    return dtype not in _NEGATED_INTEGERS and not (dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1))


def _memory_fault(tensor: torch.Tensor) -> str | None:
    """Return why a strided tensor's memory cannot be stored, or None."""
    nbytes, span = tensor.nbytes, span_of(tensor)
    if not nbytes and math.prod(n or 1 for n in tensor.shape) * tensor.itemsize >= 2**63:
        return f"an empty tensor of shape {tuple(tensor.shape)}, too large to be read again; pass .flatten()"
    storage_bytes = tensor.untyped_storage().nbytes()
    if nbytes and tensor.storage_offset() * tensor.element_size() + span > storage_bytes:
        return (
            f"a tensor of {nbytes} bytes in a storage of {storage_bytes}: its memory was freed "
            "(untyped_storage().resize_(), as FSDP does it); gather it first, and save what was gathered"
        )
    return None if nbytes - span <= MOST_REPEATED else _repeated("tensor", nbytes, span)


def span_of(tensor: torch.Tensor) -> int:
    """Return the bytes of memory from a strided tensor's first element to its last."""
    if not tensor.numel() or tensor.is_contiguous():
        return tensor.nbytes
    size = tensor.element_size()
    return _span(tensor.shape, [step * size for step in tensor.stride()], size)


def _span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes of memory from the first element to the last; `strides` are in bytes."""
    return sum((n - 1) * abs(step) for n, step in zip(shape, strides, strict=True)) + itemsize


def _repeated(kind: str, nbytes: int, span: int) -> str:
    return (
        f"a {kind} of {nbytes} bytes that repeats {span} bytes of memory; save what was expanded and expand it again "
        "after the restore, or save a contiguous copy to have all of it written"
    )


def why_refused(tensor: torch.Tensor) -> str | None:
    """Return why the tensor cannot be stored, with a remedy; None if it can be stored."""
    if type(tensor) not in PLAIN:
        if hasattr(tensor, "full_tensor"):
            kind = type_name(tensor)
            return f"{kind}, a sharded tensor; pass .full_tensor(), or save it through tierd.dcp.StorageWriter"
        if torch.nn.parameter.is_lazy(tensor):
            return f"{type_name(tensor)}, which has no shape yet; run a batch through the module before the first save"
        if hasattr(tensor, "__tensor_flatten__"):
            return f"{type_name(tensor)}, a tensor subclass; {supported_values.REMEDY_FOR_WRAPPERS}"
        return f"{type_name(tensor)}, a tensor subclass; pass .as_subclass(torch.Tensor)"
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
    if tensor.dim() + tensor.dtype.is_complex > MAX_DIMS:
        return f"a {tensor.dtype} tensor of {tensor.dim()} dimensions, too many to be read again; pass .flatten()"
    if tensor.is_neg() and _is_unreadable(tensor):
        return f"a lazily negated tensor of {tensor.dtype}, which torch cannot negate; negate it in another dtype"
    return _memory_fault(tensor)


def why_array_refused(array: Any) -> str | None:
    if not stored_arrays.describes(array.dtype):
        remedy = supported_values.remedy_for_dtype(array.dtype)
        return f"numpy.ndarray of dtype {array.dtype}, which has no encoding; {remedy}"
    if array.ndim + (array.dtype.kind == "c") > MAX_DIMS:
        return f"numpy.ndarray of {array.ndim} dimensions, too many to be read again; pass .ravel()"
    if array.nbytes > MOST_REPEATED and not array.flags.forc:
        span = _span(array.shape, array.strides, array.itemsize)
        return None if array.nbytes - span <= MOST_REPEATED else _repeated("numpy.ndarray", array.nbytes, span)
    return None


def form_of(tensor: torch.Tensor) -> TensorForm:
    """Return everything but the address that decides a storable tensor's values.

    Two tensors with one form at one address are the same tensor.
    """
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def fill_tensor(target: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy `saved` into `target`, in place. Torch need not be able to copy their dtype."""
    if target.dtype in OPAQUE_DTYPES:
        target, saved = target.view(torch.uint8), saved.view(torch.uint8)
    cuda.api.assign(target, saved)


def storable_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values without an autograd graph, in a dtype that the tensor file holds.

    Copies only if the tensor is lazily negated or conjugated.
    """
    detached = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_neg() or tensor.is_conj():
        detached = detached.resolve_conj().resolve_neg()
    if tensor.dtype in STORED_AS:
        stored = STORED_AS[tensor.dtype]
        detached = torch.view_as_real(detached) if tensor.dtype.is_complex else detached.view(stored)
    return detached


def encode_at_once(value: Any, path: Path) -> JsonText:
    """Return the JSON of a mutable value, or of one of which only encoding shows whether it can be stored."""
    if type(value) in (set, frozenset):
        check_alike(elements := list(value), path)
        members = sorted((key_tree(member, path) for member in elements), key=lambda member: json.dumps(member))
        return JsonText(dumps({f"${type(value).__name__}": members}))
    if type(value) is slice:
        return JsonText(dumps({"$slice": _slice(value, path)}))
    if type(value) is bytearray:
        return JsonText(dumps(SCALARS[bytearray](value)))
    if stored_arrays.is_scalar(value):
        return JsonText(dumps(_numpy_scalar(value, path)))
    try:
        return JsonText(dumps(value_kinds.ENCODERS.get(type(value), random_generators.tree_of)(value)))
    except ValueError as error:
        raise_refused(path, f"{type_name(value)} {error}", error)


def _slice(value: slice, path: Path) -> object:
    parts = {"start": value.start, "stop": value.stop, "step": value.step}
    for name, part in parts.items():
        if part is not None and type(part) is not int:
            raise_refused(path, f"a slice whose {name} is {type_name(part)}; only int and None can be stored there")
    return [SCALARS[type(part)](part) for part in parts.values()]


def _numpy_scalar(value: Any, path: Path) -> object:
    base = value.dtype.type
    if type(value) is not base:
        raise_refused(path, f"{type_name(value)}, a subclass of {type_name(base())}; pass a plain {base.__name__}")
    if value.dtype.kind == "U":
        return {"$npstr": SCALARS[str](str.__str__(value))}  # because `str(value)` drops trailing NULs
    if value.dtype.kind == "S":
        (encoded,) = SCALARS[bytes](bytes(value)).values()  # type: ignore[attr-defined]
        return {"$npbytes": encoded}
    if not stored_arrays.describes(value.dtype):
        raise_refused(path, f"{type_name(value)} of dtype {value.dtype}; pass .item(), and make it again of that")
    return {"$npscalar": stored_arrays.scalar_json(value)}


def key_tree(key: object, path: Path, inside: int = 0) -> object:
    """Return a mapping's key, or a set's member, in its typed JSON form."""
    if type(key) is tuple:
        if len(path) + inside > MAX_DEPTH:
            raise_refused(path, f"a key of tuples, nested deeper than {MAX_DEPTH}")
        return {"$tuple": [key_tree(part, path, inside + 1) for part in key]}
    if type(key) not in KEYS:
        raise_refused(
            path,
            f"the key {path_part_text(key)} is {type_name(key)}; keys are str, int, float, bool, bytes, None or tuples",
        )
    return SCALARS[type(key)](key)


def check_alike(keys: list[object], path: Path) -> None:
    """Refuse the keys of one dict, or the members of one set, if too many share a hash."""
    if largest := state_tree.count_equal_hashes(keys):
        raise_refused(
            path,
            f"{largest} of its keys have the same hash, {state_tree.MOST_ALIKE} at most, because each is compared "
            "with all others; use other keys, such as their str()",
        )


def is_name(key: object) -> bool:
    """Whether a mapping's key can be the key of a JSON object."""
    return type(key) is str and not key.startswith("$") and type(SCALARS[str](key)) is str


def is_run(parts: Collection[object]) -> bool:
    """Whether all parts are immutable, so that a copy is a snapshot, and no part is packed on its own."""
    kinds = set(map(type, parts))
    if bytes in kinds and any(type(part) is bytes and len(part) >= stored_arrays.FEWEST_BYTES for part in parts):
        return False
    return IMMUTABLE.issuperset(kinds)


def is_run_of_members(value: dict[Any, object]) -> bool:
    """Whether a dict is encoded in one call: names as keys, immutable values, and not too many of them."""
    if not 0 < len(value) <= _WINDOW or set(map(type, value)) != {str} or not is_run(value.values()):
        return False
    # Long texts are holes of their own, whose length says how long encoding will take.
    has_texts = not _TEXTS.isdisjoint(map(type, value.values()))
    if has_texts and sum(len(part) for part in value.values() if isinstance(part, str | bytes)) > _WINDOW:
        return False
    names = "".join(value)
    return (names.isascii() and "$" not in names) or all(map(is_name, value))


def are_runs_of_members(values: Sequence[dict[Any, object]]) -> bool:
    """Whether `is_run_of_members` holds for each of these dicts, of which a model has one a module."""
    kinds = set(map(type, chain.from_iterable(map(dict.values, values))))
    if kinds & _TEXTS or not all(map(len, values)) or max(map(len, values), default=0) > _WINDOW:
        return all(map(is_run_of_members, values))
    if not IMMUTABLE.issuperset(kinds) or not {str}.issuperset(map(type, chain.from_iterable(values))):
        return False
    names = "".join(chain.from_iterable(values))
    return (names.isascii() and "$" not in names) or all(map(is_name, chain.from_iterable(values)))


def encode(
    pieces: Sequence[str], holes: Sequence[object], pause: Callable[[], None] | None = None, window: int = _WINDOW
) -> bytes:
    """Return typed JSON in UTF-8: the pieces of text, with the JSON of the holes' values between them.

    Args:
        holes: immutable values, tuples of immutable values, dicts as `is_run_of_members` accepts them, `JsonText` and
            `PackedReference`.
        pause: called about every millisecond while a long tuple is encoded.
        window: values of a long tuple that are encoded at once.

    Raises:
        StateRefused: the text is larger than a reader accepts, or has more values.
    """
    parts = [""] * (len(pieces) + len(holes))
    parts[::2] = pieces
    counts = [hole.values if type(hole) is PackedReference else 0 for hole in holes]
    if reason := state_tree.exceeded_run_limit(sum(counts)):
        path, largest = heaviest_path(hole_paths(pieces), counts)
        raise StateRefused(
            f"{path_text(path)}: {largest} of the state's {reason}, because a restore takes no more; keep "
            "many numbers in a tensor (torch.tensor makes one of a list), or in a file that stage() takes"
        )
    parts[1::2] = (
        _encode_run(hole, pause, window) if type(hole) is tuple and len(hole) > window else _encode_hole(hole)
        for hole in holes
    )
    joined = "".join(parts)
    if reason := state_tree.exceeded_limit(joined):
        path, count = fullest_path(joined)
        raise StateRefused(
            f"{path_text(path)}: {count} of the state's {reason}, because a restore takes no more; keep "
            "many numbers in a tensor (torch.tensor makes one of a list), or in a file that stage() takes"
        )
    text = joined.encode()
    if len(text) > MAX_TREE:
        path, size = heaviest_path(hole_paths(pieces), [len(part) for part in parts[1::2]])
        raise StateRefused(
            f"{path_text(path)}: {size} of the {len(text)} bytes besides tensors, {MAX_TREE} at most; keep "
            "large data in a tensor (torch.frombuffer makes one of bytes), or in a file that stage() takes"
        )
    return text


def _encode_hole(value: Any) -> str:
    kind = type(value)
    if kind is JsonText or kind is PackedReference:
        return value  # type: ignore[no-any-return]
    if (kind is int and -EXACT <= value <= EXACT) or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is dict:
        if _is_as_json(value.values()):
            return dumps(value)
        return dumps({key: SCALARS[type(part)](part) for key, part in value.items()})
    if kind is not tuple:
        return dumps(SCALARS[kind](value))
    return dumps(value if _is_as_json(value) else [SCALARS[type(part)](part) for part in value])


def _is_as_json(values: Collection[Any]) -> bool:
    """Whether JSON represents these values as they are. Fast, because a sampler's permutation has a million."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return bool(min(values) >= -EXACT and max(values) <= EXACT)
    return kinds == {float} and all(map(math.isfinite, values))


def _encode_run(run: tuple[Any, ...], pause: Callable[[], None] | None, window: int) -> str:
    """Encode a long tuple as `_encode_hole` does, but in windows: the JSON encoder holds the GIL for a whole call."""
    windows = []
    for begin in range(0, len(run), window):
        windows.append(_encode_hole(run[begin : begin + window])[1:-1])
        if pause is not None:
            pause()
    return f"[{','.join(windows)}]"


# The text before and after the parts of a sequence of each type.
BRACKETS: dict[type, tuple[str, str]] = {list: ("", ""), tuple: ('{"$tuple":', "}"), deque: ('{"$deque":[', "]}")}
