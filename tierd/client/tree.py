"""Typed JSON: everything in a state that is not a tensor, exactly, in a form that any JSON reader can follow.

Law: nothing in a tree is executable. Every tag builds one built-in type from checked parts; an unknown tag, key or
form is refused, and so is nesting beyond `MAX_DEPTH`, and what is beyond `tierd.client.budget`.

null, true, false, strings, lists and finite floats are JSON's own; so are ints up to 2**53 and objects whose keys are
strings without a leading "$". Everything else is an object with one key, a tag:

    $int "-0x1f"        beyond 2**53            $complex [re, im]
    $float "nan" | "inf" | "-inf" | the 16 hex digits of any other NaN, big-endian
    $str base64         of UTF-8 with lone surrogates passed
    $bytes base64       $bytearray base64
    $tuple [..]         $set [..]               $frozenset [..]                   $deque [maxlen, [..]]
    $dict [[key, value]..]                      any keys (str, bytes, int, bool, float, None, tuples of these), in order
    $odict [mapping] or [mapping, _metadata]    an OrderedDict; nn.Module.state_dict() hangs _metadata on its own
    $counter mapping    $defaultdict [factory, mapping]
    $range [a, b, step] $slice [a, b, step]     $size [..]      $dtype "float32"  $device "cuda:0"
    $npscalar [dtype, base64]                   a NumPy scalar; dtype is NumPy's own string ("<f4", "<M8[ns]")
    $npstr str          $npbytes base64         NumPy's str_ and bytes_
    $tensor name        the tensor of that name in the tensor file
    $view [name, dtype] the same bytes seen as a dtype that safetensors lacks (complex: the last dimension is re, im)
    $array [name, dtype, shape]                 a NumPy array
    $generator [name, device]                   a torch.Generator; the tensor is what get_state() gave
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

from tierd.client import arrays, budget
from tierd.client.generators import SavedGenerator
from tierd.core.errors import StateMismatch

MAX_DEPTH = 100  # containers inside containers; beyond it Python's own recursion limit would come near
MAX_TREE = 256 * 1024 * 1024  # bytes
EXACT = 2**53  # ints that every JSON reader keeps exact

# Dtypes that safetensors 0.5 lacks -> the dtype that their bytes are stored as.
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
    if hasattr(torch, _name):  # torch 2.6 lacks the newest
        STORED_AS[getattr(torch, _name)] = torch.uint8
STORED_AS[torch.bits16] = torch.uint16
# int1 to int7 and uint1 to uint7: dtypes that torch views as bytes, but neither copies nor clones.
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


_NAN = "7ff8000000000000"  # the bits of float("nan"), which the tree calls "nan"


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


# Values that hold no other value: encoded without a path. Exact types; a subclass is not its base.
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
    torch.Size: lambda size: {"$size": list(map(int, size))},  # it takes and keeps NumPy's ints, too
    torch.dtype: lambda dtype: {"$dtype": str(dtype).removeprefix("torch.")},
    torch.device: lambda device: {"$device": str(device)},
}
NAMING = ("$tensor", "$view", "$array", "$generator")  # tags that name a tensor, before anything else
KEYS = (type(None), bool, int, float, str, bytes)


def parse_tree(tree: bytes | bytearray | memoryview, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Read a tree; `tensor` gives the stored tensor of a name, or raises `KeyError`. A name gives the same object
    each time.

    Raises:
        StateMismatch: the tree is not one that tierd writes; names the defect.
    """
    if len(tree) > MAX_TREE:
        raise StateMismatch(f"the state tree: {len(tree)} bytes, more than the {MAX_TREE} that tierd writes")
    copied: dict[int, torch.Tensor] = {}

    def array(stored: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Any:
        # An array is a copy, so one tensor that many of them named would take any amount of memory.
        if id(stored) in copied:
            raise ValueError("one tensor is named by two arrays, which tierd never writes")
        copied[id(stored)] = stored
        return arrays.array_of(stored, dtype, shape)

    try:
        text = str(tree, "utf-8")
        if reason := budget.excess(text):
            raise ValueError(reason)
        value = decoder(tensor, _logical, array).decode(text)
        check_depth(value)
    except DEFECTS as error:
        raise StateMismatch(f"the state tree: {str(error)[:300] or type(error).__name__}") from error
    return value


def parse_key(key: object) -> Any:
    """A mapping's key, as plain JSON has it. Raises `StateMismatch`."""
    return parse_tree(json.dumps([key]).encode(), dict[str, Any]().__getitem__)[0]


DEFECTS = (ValueError, TypeError, OverflowError, RuntimeError, ImportError)  # what `decoder` raises for a bad tree


def decoder(
    tensor: Callable[[str], Any], view: Callable[[Any, torch.dtype], Any], array: Callable[[Any, str, Any], Any]
) -> json.JSONDecoder:
    """What reads typed JSON.

    Args:
        tensor: gives the stored tensor of a name, or raises `KeyError`.
        view: a stored tensor seen as a dtype of `STORED_AS`.
        array: a stored tensor as an array of this dtype and shape.
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

    tags = {**_TAGS, "$tensor": stored, "$view": viewed, "$array": made, "$generator": generator}

    def build(pairs: list[tuple[str, Any]]) -> object:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice in one object")
        if not any(key.startswith("$") for key in found):
            return found
        tag, payload = pairs[0]
        if len(pairs) != 1 or tag not in tags:
            raise ValueError(f"unknown tag {tag[:40]!r}")
        return tags[tag](payload)

    return json.JSONDecoder(object_pairs_hook=build, parse_constant=_refuse)


def check_depth(value: object) -> None:
    """Raises `ValueError` where containers are nested deeper than tierd writes them."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 2):
        inner: list[object] = []
        for node in level:
            if isinstance(node, dict):
                inner.extend(node.values())
                inner.extend(key for key in node if type(key) is tuple)
                inner.append(getattr(node, "_metadata", None))
            elif isinstance(node, (list, tuple, deque, set, frozenset)):
                inner.extend(node)
        level = [node for node in inner if isinstance(node, (dict, list, tuple, deque, set, frozenset))]
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


def _members(values: object) -> list[object]:
    found = [_key(value) for value in _is(values, list)]
    _check_alike(found)
    return found


def _check_alike(keys: list[object]) -> None:
    if most := budget.alike(keys):
        raise ValueError(f"{most} keys of one dict or set have the same hash, {budget.MOST_ALIKE} at most")


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
    """Raises `ValueError` where a stored tensor cannot be seen as `dtype`."""
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
    "$odict": _odict,
    "$counter": lambda mapping: Counter(_is(mapping, dict)),
    "$defaultdict": _defaultdict,
    "$deque": _deque,
    "$range": lambda parts: range(*_of(parts, int, int, int)),
    "$slice": lambda parts: slice(*(p if p is None else _is(p, int) for p in _is(parts, list))),
    "$size": lambda sizes: torch.Size(_all(sizes, int)),
    "$dtype": _dtype,
    "$device": lambda text: torch.device(_is(text, str)),
    "$npscalar": lambda parts: arrays.scalar_of(*_of(parts, str, str)),
    "$npstr": lambda text: _npscalar("str_")(_is(text, str)),
    "$npbytes": lambda text: _npscalar("bytes_")(_decoded(text)),
}
