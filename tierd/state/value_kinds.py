"""The kinds of values in a state: which are immutable or load what was saved, and the value that each tag builds.

`state/state_tree.py` describes the tags; those that name a tensor are in `state/tree_parser.py`. Objects of the
standard library that are plain data each become a tag, and are made anew by a restore.

Invariant: only the exact types of `ENCODERS` are stored so, and a restore calls only their own constructors, with text
and numbers that it has checked.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import enum
import io
import math
import pathlib
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch

from tierd.state import state_tree
from tierd.state.kinds import random_generators, stored_arrays
from tierd.state.state_tree import FACTORIES, KEYS, SCALARS, SEQUENCES

IMMUTABLE = frozenset(SCALARS) - {bytearray}
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


@runtime_checkable
class Stateful(Protocol):
    """An object that returns its state and loads it: module, optimizer, scheduler, data loader or `tierd.RngState`."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether `value` is an instance, not a class, with callable `state_dict` and `load_state_dict`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


class LoadKind(enum.Enum):
    """How a saved value is loaded into a live one."""

    TENSOR = enum.auto()  # filled in place; also a DTensor
    ARRAY = enum.auto()  # of NumPy, filled in place
    GENERATOR = enum.auto()  # set in place
    STATEFUL = enum.auto()  # loads by its own `load_state_dict`
    MAPPING = enum.auto()  # a dict, loaded key by key
    SEQUENCE = enum.auto()  # a list, tuple or deque, loaded value by value
    OTHER = enum.auto()  # replaced


_EXACT: dict[type, LoadKind] = {
    **dict.fromkeys(IMMUTABLE, LoadKind.OTHER),
    **dict.fromkeys(PLAIN, LoadKind.TENSOR),
    **dict.fromkeys(SEQUENCES, LoadKind.SEQUENCE),
    dict: LoadKind.MAPPING,
}


def load_kind_of(value: object) -> LoadKind:
    """Return the kind of a live value. A subclass has the kind of its base."""
    kind = _EXACT.get(type(value))
    if kind is not None:
        return kind
    if isinstance(value, torch.Tensor):
        return LoadKind.TENSOR
    if isinstance(value, torch.Generator) or random_generators.random_kind_of(value) is not None:
        return LoadKind.GENERATOR
    if stored_arrays.is_array(value):
        return LoadKind.ARRAY
    if is_stateful(value):
        return LoadKind.STATEFUL
    if isinstance(value, dict):
        return LoadKind.MAPPING
    return LoadKind.SEQUENCE if isinstance(value, SEQUENCES) else LoadKind.OTHER


_PATHS: dict[str, type[pathlib.PurePath]] = {
    "Path": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


def _bytes_io(value: io.BytesIO) -> object:
    return {"$bytesio": [base64.b64encode(value.getvalue()).decode(), value.tell()]}  # raises if it is closed


def _zoned(tag: str) -> Callable[[Any], object]:
    """Return an encoder of times, whose zone is None or a fixed offset without a name of its own."""

    def encode(value: Any) -> object:
        zone = value.tzinfo
        if zone is not None and (
            type(zone) is not datetime.timezone or zone != datetime.timezone(value.utcoffset()) or _is_named(zone)
        ):
            kind = type(zone)
            raise ValueError(
                f"with the zone {kind.__module__}.{kind.__qualname__}, which is no plain offset; pass "
                ".astimezone(datetime.timezone.utc)"
            )
        return {tag: [value.isoformat(), value.fold]}

    return encode


def _is_named(zone: datetime.timezone) -> bool:
    return len(zone.__getinitargs__()) > 1  # type: ignore[attr-defined]


def _path(value: pathlib.PurePath) -> object:
    kind = "Path" if isinstance(value, pathlib.Path) else type(value).__name__
    return {"$path": [kind, SCALARS[str](str(value))]}


# Exact type -> encoder, which raises `ValueError` for a value that has no encoding.
ENCODERS: dict[type, Callable[[Any], object]] = {
    io.BytesIO: _bytes_io,
    datetime.datetime: _zoned("$datetime"),
    datetime.time: _zoned("$time"),
    datetime.date: lambda value: {"$date": value.isoformat()},
    datetime.timedelta: lambda value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    type(pathlib.Path()): _path,
    pathlib.PurePosixPath: _path,
    pathlib.PureWindowsPath: _path,
    uuid.UUID: lambda value: {"$uuid": str(value)},
    decimal.Decimal: lambda value: {"$decimal": str(value)},
}


T = TypeVar("T")


def require_type(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


def require_types(values: object, kind: type[T]) -> list[T]:
    return [require_type(value, kind) for value in require_type(values, list)]


def parts_of(payload: object, *kinds: type) -> list[Any]:
    values = require_type(payload, list)
    if len(values) != len(kinds):
        raise ValueError(f"{len(values)} parts in the place of {len(kinds)}")
    return [require_type(value, kind) for value, kind in zip(values, kinds, strict=True)]


def _made_bytes_io(payload: object) -> io.BytesIO:
    data, position = parts_of(payload, str, int)
    stream = io.BytesIO(base64.b64decode(data, validate=True))
    stream.seek(position)
    return stream


def _made_time(kind: Any) -> Callable[[object], object]:
    def build(payload: object) -> object:
        text, fold = parts_of(payload, str, int)
        return kind.fromisoformat(text).replace(fold=fold)

    return build


def _made_path(payload: object) -> object:
    kind, text = parts_of(payload, str, str)
    if kind not in _PATHS:
        raise ValueError(f"{kind[:40]!r} is no kind of path")
    return _PATHS[kind](text)


def _made_decimal(payload: object) -> decimal.Decimal:
    try:
        return decimal.Decimal(require_type(payload, str))
    except decimal.DecimalException as error:  # an ArithmeticError
        raise ValueError("not the text of a Decimal") from error


def _key(key: object) -> object:
    if type(key) is tuple:
        return tuple(_key(part) for part in key)
    if type(key) not in KEYS:
        raise ValueError(f"{type(key).__name__} as a key")
    return key


def _dict(pairs: object) -> dict[Any, Any]:
    items = [(_key(key), value) for key, value in (require_type(pair, list) for pair in require_type(pairs, list))]
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
    members = [_key(value) for value in require_type(values, list)]
    _check_alike(members)
    return members


def _check_alike(keys: list[Any]) -> None:
    if largest := state_tree.count_equal_hashes(keys):
        raise ValueError(f"{largest} keys of one dict or set have the same hash, {state_tree.MOST_ALIKE} at most")


def _odict(payload: object) -> OrderedDict[Any, Any]:
    mapping, *metadata = require_type(payload, list)
    ordered = OrderedDict(require_type(mapping, dict))
    if metadata:
        (ordered._metadata,) = metadata  # type: ignore[attr-defined]
    return ordered


def _defaultdict(payload: object) -> defaultdict[Any, Any]:
    factory, mapping = require_type(payload, list)
    if factory is not None and factory not in FACTORIES:
        raise ValueError("unknown default factory")
    return defaultdict(None if factory is None else FACTORIES[factory], require_type(mapping, dict))


def _deque(payload: object) -> deque[Any]:
    maxlen, values = require_type(payload, list)
    return deque(require_type(values, list), maxlen if maxlen is None else require_type(maxlen, int))


def _nonfinite(text: object) -> float:
    if text in ("nan", "inf", "-inf"):
        return float(require_type(text, str))
    bits = bytes.fromhex(require_type(text, str))
    value: float = struct.unpack(">d", bits)[0] if len(bits) == 8 else 0.0
    if not math.isnan(value):
        raise ValueError("$float is nan, inf, -inf, or the 16 hex digits of a NaN")
    return value


def dtype_named(name: object) -> torch.dtype:
    return require_type(vars(torch).get(require_type(name, str)), torch.dtype)


def _decoded(text: object) -> bytes:
    return base64.b64decode(require_type(text, str), validate=True)


def _npscalar(kind: str) -> Callable[[Any], object]:
    def build(value: object) -> object:
        import numpy

        scalar: object = getattr(numpy, kind)(value)
        return scalar

    return build


VALUE_TAGS: dict[str, Callable[[Any], object]] = {
    "$int": lambda text: int(require_type(text, str), 16),
    "$float": _nonfinite,
    "$complex": lambda parts: complex(*parts_of(parts, float, float)),
    "$str": lambda text: _decoded(text).decode("utf-8", "surrogatepass"),
    "$bytes": _decoded,
    "$bytearray": lambda text: bytearray(_decoded(text)),
    "$tuple": lambda values: tuple(require_type(values, list)),
    "$set": lambda values: set(_members(values)),
    "$frozenset": lambda values: frozenset(_members(values)),
    "$dict": _dict,
    "$map": _map,
    "$odict": _odict,
    "$counter": lambda mapping: Counter(require_type(mapping, dict)),
    "$defaultdict": _defaultdict,
    "$deque": _deque,
    "$range": lambda parts: range(*parts_of(parts, int, int, int)),
    "$slice": lambda parts: slice(*(p if p is None else require_type(p, int) for p in require_type(parts, list))),
    "$size": lambda sizes: torch.Size(require_types(sizes, int)),
    "$dtype": dtype_named,
    "$device": lambda text: torch.device(require_type(text, str)),
    "$npscalar": lambda parts: stored_arrays.scalar_of(*parts_of(parts, str, str)),
    "$npstr": lambda text: _npscalar("str_")(require_type(text, str)),
    "$npbytes": lambda text: _npscalar("bytes_")(_decoded(text)),
    "$random": random_generators.parse_random,
    "$bytesio": _made_bytes_io,
    "$datetime": _made_time(datetime.datetime),
    "$time": _made_time(datetime.time),
    "$date": lambda text: datetime.date.fromisoformat(require_type(text, str)),
    "$timedelta": lambda parts: datetime.timedelta(*parts_of(parts, int, int, int)),
    "$path": _made_path,
    "$uuid": lambda text: uuid.UUID(require_type(text, str)),
    "$decimal": _made_decimal,
}
