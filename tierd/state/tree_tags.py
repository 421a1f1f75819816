"""The value that each tag of typed JSON builds, from checked parts; `state/json_tree.py` describes the tags.

Tags that name a tensor are in `state/tree_parser.py`.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tierd.state import tree_budget
from tierd.state.json_tree import FACTORIES, KEYS
from tierd.state.kinds import numpy_arrays, plain_objects, random_states

T = TypeVar("T")


def checked(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


def all_of(values: object, kind: type[T]) -> list[T]:
    return [checked(value, kind) for value in checked(values, list)]


def parts_of(payload: object, *kinds: type) -> list[Any]:
    values = checked(payload, list)
    if len(values) != len(kinds):
        raise ValueError(f"{len(values)} parts in the place of {len(kinds)}")
    return [checked(value, kind) for value, kind in zip(values, kinds, strict=True)]


def _key(key: object) -> object:
    if type(key) is tuple:
        return tuple(_key(part) for part in key)
    if type(key) not in KEYS:
        raise ValueError(f"{type(key).__name__} as a key")
    return key


def _dict(pairs: object) -> dict[Any, Any]:
    items = [(_key(key), value) for key, value in (checked(pair, list) for pair in checked(pairs, list))]
    _check_alike([key for key, _ in items])
    mapping = dict(items)
    if len(mapping) != len(items):
        raise ValueError("a key occurs twice in one dict")
    return mapping


def _map(payload: object) -> dict[Any, Any]:
    keys, values = parts_of(payload, list, list)
    kinds = set(map(type, keys))
    if not kinds.issubset(KEYS) or len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys and {len(values)} values are no dict of plain keys")
    # str is exempt: nobody can choose colliding keys, because Python randomizes the hashes of str.
    if kinds != {str}:
        _check_alike(keys)
    mapping = dict(zip(keys, values, strict=True))
    if len(mapping) != len(keys):
        raise ValueError("a key occurs twice in one dict")
    return mapping


def _members(values: object) -> list[object]:
    members = [_key(value) for value in checked(values, list)]
    _check_alike(members)
    return members


def _check_alike(keys: list[Any]) -> None:
    if largest := tree_budget.alike(keys):
        raise ValueError(f"{largest} keys of one dict or set have the same hash, {tree_budget.MOST_ALIKE} at most")


def _odict(payload: object) -> OrderedDict[Any, Any]:
    mapping, *metadata = checked(payload, list)
    ordered = OrderedDict(checked(mapping, dict))
    if metadata:
        (ordered._metadata,) = metadata  # type: ignore[attr-defined]
    return ordered


def _defaultdict(payload: object) -> defaultdict[Any, Any]:
    factory, mapping = checked(payload, list)
    if factory is not None and factory not in FACTORIES:
        raise ValueError("unknown default factory")
    return defaultdict(None if factory is None else FACTORIES[factory], checked(mapping, dict))


def _deque(payload: object) -> deque[Any]:
    maxlen, values = checked(payload, list)
    return deque(checked(values, list), maxlen if maxlen is None else checked(maxlen, int))


def _nonfinite(text: object) -> float:
    if text in ("nan", "inf", "-inf"):
        return float(checked(text, str))
    bits = bytes.fromhex(checked(text, str))
    value: float = struct.unpack(">d", bits)[0] if len(bits) == 8 else 0.0
    if not math.isnan(value):
        raise ValueError("$float is nan, inf, -inf, or the 16 hex digits of a NaN")
    return value


def dtype_named(name: object) -> torch.dtype:
    return checked(vars(torch).get(checked(name, str)), torch.dtype)


def _decoded(text: object) -> bytes:
    return base64.b64decode(checked(text, str), validate=True)


def _npscalar(kind: str) -> Callable[[Any], object]:
    def build(value: object) -> object:
        import numpy

        scalar: object = getattr(numpy, kind)(value)
        return scalar

    return build


TAGS: dict[str, Callable[[Any], object]] = {
    "$int": lambda text: int(checked(text, str), 16),
    "$float": _nonfinite,
    "$complex": lambda parts: complex(*parts_of(parts, float, float)),
    "$str": lambda text: _decoded(text).decode("utf-8", "surrogatepass"),
    "$bytes": _decoded,
    "$bytearray": lambda text: bytearray(_decoded(text)),
    "$tuple": lambda values: tuple(checked(values, list)),
    "$set": lambda values: set(_members(values)),
    "$frozenset": lambda values: frozenset(_members(values)),
    "$dict": _dict,
    "$map": _map,
    "$odict": _odict,
    "$counter": lambda mapping: Counter(checked(mapping, dict)),
    "$defaultdict": _defaultdict,
    "$deque": _deque,
    "$range": lambda parts: range(*parts_of(parts, int, int, int)),
    "$slice": lambda parts: slice(*(p if p is None else checked(p, int) for p in checked(parts, list))),
    "$size": lambda sizes: torch.Size(all_of(sizes, int)),
    "$dtype": dtype_named,
    "$device": lambda text: torch.device(checked(text, str)),
    "$npscalar": lambda parts: numpy_arrays.scalar_of(*parts_of(parts, str, str)),
    "$npstr": lambda text: _npscalar("str_")(checked(text, str)),
    "$npbytes": lambda text: _npscalar("bytes_")(_decoded(text)),
    "$random": random_states.made,
    **plain_objects.TAGS,
}
