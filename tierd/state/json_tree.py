"""Typed JSON: an exact form of everything in a state that is not a tensor, which any JSON reader can parse.

Invariant: nothing in a tree is executable. Every tag builds one built-in type from checked parts. A reader refuses an
unknown tag, key or form, nesting beyond `MAX_DEPTH`, and trees beyond the limits of `tierd.state.tree_budget`.

null, true, false, strings, lists and finite floats are plain JSON. So are ints up to 2**53, and objects whose keys are
strings without a leading "$". Everything else is an object with one key, a tag:

    $int "-0x1f"        beyond 2**53            $complex [re, im]
    $float "nan" | "inf" | "-inf" | the 16 hex digits of any other NaN, big-endian
    $str base64         of UTF-8 that keeps lone surrogates (Python's "surrogatepass")
    $bytes base64       $bytearray base64
    $tuple [..]         $set [..]               $frozenset [..]                   $deque [maxlen, [..]]
    $dict [[key, value]..]                      any keys (str, bytes, int, bool, float, None, tuples of these), in order
    $odict [mapping] or [mapping, _metadata]    an OrderedDict; nn.Module.state_dict() sets _metadata on its result
    $counter mapping    $defaultdict [factory, mapping]
    $range [a, b, step] $slice [a, b, step]     $size [..]      $dtype "float32"  $device "cuda:0"
    $npscalar [dtype, base64]                   a NumPy scalar; dtype is NumPy's own string ("<f4", "<M8[ns]")
    $npstr str          $npbytes base64         NumPy's str_ and bytes_
    $tensor name        the tensor of that name in the tensor file
    $view [name, dtype] the same bytes viewed as a dtype that safetensors lacks (complex: the last dimension is re, im)
    $array [name, dtype, shape]                 a NumPy array
    $values [name, kind, size]                  a list of plain values, or bytes (`tierd.state.kinds.packed_tensors`)
    $map [keys, values]                         a dict, as two lists
    $generator [name, device]                   a torch.Generator; the tensor is the result of get_state()
    $dtensor [tensor, placement]                a DTensor's local shard, a $tensor or $view, and its place in the
                                                whole tensor (`tierd.core.shard_placement`)
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tierd.core.errors import StateMismatch
from tierd.core.shard_placement import parse_placement
from tierd.state import tree_budget
from tierd.state.kinds import numpy_arrays, packed_tensors
from tierd.state.kinds.dtensors import SavedDTensor
from tierd.state.kinds.generators import SavedGenerator

MAX_DEPTH = 100  # nested containers; deeper nesting would approach Python's recursion limit
MAX_TREE = 256 * 1024 * 1024  # bytes
EXACT = 2**53  # ints up to this are exact in every JSON reader

# Dtypes that safetensors 0.5 lacks -> the dtype in which their bytes are stored.
STORED_AS: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
for _name in (
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "bits8",
    "bits1x8",
    "bits2x4",
    "bits4x2",
):
    if hasattr(torch, _name):  # because torch 2.6 lacks the newest of them
        STORED_AS[getattr(torch, _name)] = torch.uint8
STORED_AS[torch.bits16] = torch.uint16
# int1 to int7 and uint1 to uint7: torch can view these dtypes as bytes, but cannot copy or clone them.
SHELLS = frozenset(
    getattr(torch, name)
    for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
    if hasattr(torch, name)
)
STORED_AS |= dict.fromkeys(SHELLS, torch.uint8)

FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set)
}

T = TypeVar("T")
Encoder = Callable[[Any], object]


def _int(value: int) -> object:
    return value if -EXACT <= value <= EXACT else {"$int": hex(value)}


_NAN = "7ff8000000000000"  # the bits of float("nan"), which the tree writes as "nan"


def _float(value: float) -> object:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value).hex()
    return {"$float": str(value) if math.isinf(value) or bits == _NAN else bits}


def _str(value: str) -> object:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def _b64(tag: str) -> Encoder:
    return lambda value: {tag: base64.b64encode(value).decode()}


def _same(value: object) -> object:
    return value


# Encoders of values that contain no other value, so they need no path. A subclass is not encoded as its base.
SCALARS: dict[type, Encoder] = {
    type(None): _same,
    bool: _same,
    int: _int,
    float: _float,
    str: _str,
    bytes: _b64("$bytes"),
    bytearray: _b64("$bytearray"),
    complex: lambda z: {"$complex": [_float(z.real), _float(z.imag)]},
    range: lambda r: {"$range": [_int(n) for n in (r.start, r.stop, r.step)]},
    torch.Size: lambda size: {"$size": list(map(int, size))},  # cast to int because torch.Size also keeps NumPy's ints
    torch.dtype: lambda dtype: {"$dtype": str(dtype).removeprefix("torch.")},
    torch.device: lambda device: {"$device": str(device)},
}
NAMING = ("$tensor", "$view", "$array", "$generator", "$values")  # tags whose payload begins with the name of a tensor
KEYS = (type(None), bool, int, float, str, bytes)


def tree_text(tree: bytes | bytearray | memoryview) -> str:
    """Decode a tree's bytes to text, before any of it is parsed.

    Raises:
        ValueError: the tree is larger than tierd writes, or is not UTF-8.
    """
    if len(tree) > MAX_TREE:
        raise ValueError(f"{len(tree)} bytes, more than the {MAX_TREE} that tierd writes")
    text = str(tree, "utf-8")
    if reason := tree_budget.excess(text):
        raise ValueError(reason)
    return text


class Copies:
    """Copies that a reader makes of stored tensors for one tree: arrays, and runs of plain values.

    Invariant: each stored tensor is copied at most once. Otherwise many arrays or runs that name one tensor could take
    any amount of memory.
    """

    def __init__(self) -> None:
        self._claimed: dict[int, object] = {}
        self._values = 0

    def claim(self, stored: object) -> None:
        """Record that this tensor, or the object that represents it, is copied.

        Raises:
            ValueError: it was claimed before.
        """
        if id(stored) in self._claimed:
            raise ValueError("one tensor is named by two arrays or runs of values, which tierd never writes")
        self._claimed[id(stored)] = stored

    def array(self, stored: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Any:
        self.claim(stored)
        return numpy_arrays.array_of(stored, dtype, shape)

    def values(self, stored: torch.Tensor, kind: str, size: int) -> Any:
        self.claim(stored)
        self._values += packed_tensors.count(stored, kind, size)
        if reason := tree_budget.excess_of_runs(self._values):
            raise ValueError(reason)
        return packed_tensors.unpack(stored, kind, size)


def parse_tree(
    tree: bytes | bytearray | memoryview, tensor: Callable[[str], torch.Tensor], *, is_read: bool = True
) -> Any:
    """Parse a tree.

    Args:
        tensor: returns the stored tensor of a name, the same object each time, or raises `KeyError`.
        is_read: whether the tensors' values have been read. Until then arrays are None and packed runs are empty.

    Raises:
        StateMismatch: tierd did not write this tree; the message names the defect.
    """
    copies = Copies()
    known = decoder(tensor, _logical, copies.array, copies.values)
    if not is_read:
        known = decoder(tensor, _logical, lambda *_: None, lambda *_: [])
    try:
        value = known.decode(tree_text(tree))
        check_depth(value)
    except DEFECTS as error:
        raise StateMismatch(f"the state tree: {str(error)[:300] or type(error).__name__}") from error
    return value


def parse_key(key: object) -> Any:
    """Build a mapping's key from plain JSON. Raises `StateMismatch`."""
    return parse_tree(json.dumps([key]).encode(), dict[str, Any]().__getitem__)[0]


DEFECTS = (ValueError, TypeError, OverflowError, RuntimeError, ImportError)  # raised by `decoder` for a bad tree


def decoder(
    tensor: Callable[[str], Any],
    view: Callable[[Any, torch.dtype], Any],
    array: Callable[[Any, str, Any], Any],
    values: Callable[[Any, str, int], Any],
) -> json.JSONDecoder:
    """Return a JSON decoder for typed JSON.

    Args:
        tensor: returns the stored tensor of a name, or raises `KeyError`.
        view: views a stored tensor as a dtype of `STORED_AS`.
        array: converts a stored tensor to an array of this dtype and shape.
        values: converts a stored tensor to a run of this kind and number of elements.
    """
    views: dict[tuple[str, torch.dtype], Any] = {}

    def stored(name: str) -> Any:
        try:
            return tensor(_is(name, str))
        except KeyError:
            raise ValueError(f"the tensor file has no {name[:100]!r}") from None

    def viewed(payload: Any) -> Any:
        name, dtype = _of(payload, str, str)
        key = name, _dtype(dtype)
        if key not in views:
            views[key] = view(stored(name), key[1])
        return views[key]

    def made(payload: Any) -> object:
        name, dtype, shape = _of(payload, str, str, list)
        return array(stored(name), dtype, tuple(_all(shape, int)))

    def generator(payload: Any) -> object:
        name, device = _of(payload, str, str)
        return SavedGenerator(stored(name), torch.device(device))

    def run(payload: Any) -> object:
        name, kind, size = _of(payload, str, str, int)
        return values(stored(name), kind, size)

    def dtensor(payload: Any) -> object:
        parts = _is(payload, list)
        if len(parts) != 2:
            raise ValueError(f"{len(parts)} parts in the place of 2")
        return SavedDTensor(parts[0], parse_placement(parts[1]))

    tags = {
        **_TAGS,
        "$tensor": stored,
        "$view": viewed,
        "$array": made,
        "$values": run,
        "$generator": generator,
        "$dtensor": dtensor,
    }

    def build(pairs: list[tuple[str, Any]]) -> object:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice in one object")
        if not any(key.startswith("$") for key in found):
            return found
        tag, payload = pairs[0]
        if len(pairs) != 1 or tag not in tags:
            raise ValueError(f"unknown tag {tag[:40]!r}: if a newer tierd wrote it, restore it with that one")
        return tags[tag](payload)

    return json.JSONDecoder(object_pairs_hook=build, parse_constant=_refuse)


_CONTAINERS = frozenset((dict, OrderedDict, Counter, defaultdict, list, tuple, deque, set, frozenset))


def check_depth(value: object) -> None:
    """Raise `ValueError` if containers are nested deeper than tierd writes them."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 2):
        inner: list[object] = []
        for node in level:
            if isinstance(node, dict):
                # Skipped for many plain numbers, because checking each of them would be slow.
                if not _CONTAINERS.isdisjoint(map(type, node.values())):
                    inner.extend(node.values())
                if tuple in set(map(type, node)):
                    inner.extend(key for key in node if type(key) is tuple)
                inner.append(getattr(node, "_metadata", None))
            elif not _CONTAINERS.isdisjoint(map(type, node)):
                inner.extend(node)
        level = [node for node in inner if type(node) in _CONTAINERS]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _is(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


def _all(values: object, kind: type[T]) -> list[T]:
    return [_is(value, kind) for value in _is(values, list)]


def _of(payload: object, *kinds: type) -> list[Any]:
    values = _is(payload, list)
    if len(values) != len(kinds):
        raise ValueError(f"{len(values)} parts in the place of {len(kinds)}")
    return [_is(value, kind) for value, kind in zip(values, kinds, strict=True)]


def _key(key: object) -> object:
    if type(key) is tuple:
        return tuple(_key(part) for part in key)
    if type(key) not in KEYS:
        raise ValueError(f"{type(key).__name__} as a key")
    return key


def _dict(pairs: object) -> dict[Any, Any]:
    items = [(_key(key), value) for key, value in (_is(pair, list) for pair in _is(pairs, list))]
    _check_alike([key for key, _ in items])
    found = dict(items)
    if len(found) != len(items):
        raise ValueError("a key occurs twice in one dict")
    return found


def _map(payload: object) -> dict[Any, Any]:
    keys, values = _of(payload, list, list)
    kinds = set(map(type, keys))
    if not kinds.issubset(KEYS) or len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys and {len(values)} values are no dict of plain keys")
    # str is exempt: nobody can choose colliding keys, because Python randomizes the hashes of str.
    if kinds != {str}:
        _check_alike(keys)
    found = dict(zip(keys, values, strict=True))
    if len(found) != len(keys):
        raise ValueError("a key occurs twice in one dict")
    return found


def _members(values: object) -> list[object]:
    found = [_key(value) for value in _is(values, list)]
    _check_alike(found)
    return found


def _check_alike(keys: list[Any]) -> None:
    if most := tree_budget.alike(keys):
        raise ValueError(f"{most} keys of one dict or set have the same hash, {tree_budget.MOST_ALIKE} at most")


def _odict(payload: object) -> OrderedDict[Any, Any]:
    mapping, *metadata = _is(payload, list)
    found = OrderedDict(_is(mapping, dict))
    if metadata:
        (found._metadata,) = metadata  # type: ignore[attr-defined]
    return found


def _defaultdict(payload: object) -> defaultdict[Any, Any]:
    factory, mapping = _is(payload, list)
    if factory is not None and factory not in FACTORIES:
        raise ValueError("unknown default factory")
    return defaultdict(None if factory is None else FACTORIES[factory], _is(mapping, dict))


def _deque(payload: object) -> deque[Any]:
    maxlen, values = _is(payload, list)
    return deque(_is(values, list), maxlen if maxlen is None else _is(maxlen, int))


def _nonfinite(text: object) -> float:
    if text in ("nan", "inf", "-inf"):
        return float(_is(text, str))
    bits = bytes.fromhex(_is(text, str))
    value: float = struct.unpack(">d", bits)[0] if len(bits) == 8 else 0.0
    if not math.isnan(value):
        raise ValueError("$float is nan, inf, -inf, or the 16 hex digits of a NaN")
    return value


def _dtype(name: object) -> torch.dtype:
    return _is(vars(torch).get(_is(name, str)), torch.dtype)


def check_view(stored: torch.dtype, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise `ValueError` if a stored tensor cannot be viewed as `dtype`."""
    if STORED_AS.get(dtype) != stored:
        raise ValueError(f"{stored} does not hold {dtype}")
    if dtype.is_complex and shape[-1:] != (2,):
        raise ValueError("a complex tensor's last dimension is 2")


def _logical(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    check_view(tensor.dtype, tuple(tensor.shape), dtype)
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)


def _decoded(text: object) -> bytes:
    return base64.b64decode(_is(text, str), validate=True)


def _npscalar(kind: str) -> Callable[[Any], object]:
    def build(value: object) -> object:
        import numpy

        scalar: object = getattr(numpy, kind)(value)
        return scalar

    return build


_TAGS: dict[str, Callable[[Any], object]] = {
    "$int": lambda text: int(_is(text, str), 16),
    "$float": _nonfinite,
    "$complex": lambda parts: complex(*_of(parts, float, float)),
    "$str": lambda text: _decoded(text).decode("utf-8", "surrogatepass"),
    "$bytes": _decoded,
    "$bytearray": lambda text: bytearray(_decoded(text)),
    "$tuple": lambda values: tuple(_is(values, list)),
    "$set": lambda values: set(_members(values)),
    "$frozenset": lambda values: frozenset(_members(values)),
    "$dict": _dict,
    "$map": _map,
    "$odict": _odict,
    "$counter": lambda mapping: Counter(_is(mapping, dict)),
    "$defaultdict": _defaultdict,
    "$deque": _deque,
    "$range": lambda parts: range(*_of(parts, int, int, int)),
    "$slice": lambda parts: slice(*(p if p is None else _is(p, int) for p in _is(parts, list))),
    "$size": lambda sizes: torch.Size(_all(sizes, int)),
    "$dtype": _dtype,
    "$device": lambda text: torch.device(_is(text, str)),
    "$npscalar": lambda parts: numpy_arrays.scalar_of(*_of(parts, str, str)),
    "$npstr": lambda text: _npscalar("str_")(_is(text, str)),
    "$npbytes": lambda text: _npscalar("bytes_")(_decoded(text)),
}
