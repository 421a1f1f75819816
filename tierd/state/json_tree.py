"""Typed JSON: an exact form of everything in a state that is not a tensor, which any JSON reader can parse.

Invariant: nothing in a tree is executable. Every tag builds one built-in type from checked parts. A reader refuses an
unknown tag, key or form, nesting beyond `MAX_DEPTH`, and trees beyond the limits of `tierd.state.tree_budget`.
`tierd.state.tree_parser` is the reader; this module encodes values that contain no other value.

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
    $bytesio $datetime $time $date $timedelta $path $uuid $decimal   `tierd.state.kinds.plain_objects`
    $random [kind, state]                       a generator of NumPy or of random (`tierd.state.kinds.random_states`)
    $generator [name, device]                   a torch.Generator; the tensor is the result of get_state()
    $wrapper [class, tensors, context]          a wrapper subclass of a tensor (`tierd.state.kinds.wrapper_tensors`)
    $dtensor [tensor, placement]                a DTensor's local shard, a $tensor or $view, and its place in the
                                                whole tensor (`tierd.core.shard_placement`)
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from typing import Any

import torch

MAX_DEPTH = 100  # nested containers; deeper nesting would approach Python's recursion limit
MAX_TREE = 256 * 1024 * 1024  # bytes
EXACT = 2**53  # ints up to this are exact in every JSON reader

FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set)
}

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
