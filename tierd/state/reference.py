"""The kinds of values that a state may hold, with what a save stores and what a restore does; the docs show this table.

Invariant: each exact type that the encoder knows is in one row (`tests/state/test_reference.py`).
"""

from __future__ import annotations

import collections
import datetime
import decimal
import io
import pathlib
import random
import uuid
from typing import NamedTuple

import torch

from tierd.state.kinds.wrapper_tensors import CLASSES


class ValueKind(NamedTuple):
    """A row of the table.

    Attributes:
        types: the exact types, as far as they can be named without importing an optional library.
        value: what it is, for people.
        stored: how a save stores it.
        restored: what a restore does with the value in its place.
    """

    types: tuple[type, ...]
    value: str
    stored: str
    restored: str


_REPLACED = "is replaced"
_WRAPPERS = ", ".join(f"`{name.partition('.')[2]}`" for name in CLASSES if name.startswith("torchao."))

KINDS: tuple[ValueKind, ...] = (
    ValueKind(
        (),
        "anything with `state_dict()` and `load_state_dict()`",
        "the state that it returns",
        "receives it in `load_state_dict()`",
    ),
    ValueKind(
        (torch.Tensor, torch.nn.Parameter),
        "tensors of any dtype but the quantized ones (`qint8` and the like), on any device, with any strides; "
        "parameters",
        "as tensors. One tensor stays one tensor. A view is stored at full size, and refused if that is 256 MiB more "
        "than it has in memory",
        "is filled in place",
    ),
    ValueKind(
        (),
        "DTensors, such as the parameters and optimizer states of `fully_shard` and of tensor parallelism",
        "this rank's local shard and its position: see [sharded models](../howto/sharded.md)",
        "is filled in place, on the same mesh",
    ),
    ValueKind(
        (),
        f"wrapper subclasses of tensors that tierd knows, also inside DTensors. Of torchao: {_WRAPPERS}",
        "their inner tensors, and how the class makes them one tensor",
        "is filled in place if it was made in the same way; the library must be installed",
    ),
    ValueKind(
        (),
        "NumPy arrays and scalars of every dtype but objects and structures",
        "as tensors and JSON",
        "an array is filled in place",
    ),
    ValueKind(
        (torch.Generator, random.Random),
        "`torch.Generator`, `random.Random`, NumPy's `Generator` and `RandomState`",
        "its state, without what `spawn()` counts",
        "is set in place; None takes a new generator",
    ),
    ValueKind(
        (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice),
        "None, bool, int, float, complex, str, bytes, bytearray, range, slice of ints",
        "as JSON; NaNs keep sign and payload. At most 256 MiB, 16 million values and 2 million containers in all. Long "
        "lists, tuples and dicts of floats, ints, bools or strings alone, and long bytes, are stored as typed arrays "
        "beside the tensors: 16 million values more, bytes of any number. Larger data belongs in a tensor, or in a "
        "file of `stage()`",
        _REPLACED,
    ),
    ValueKind(
        (
            *(dict, list, tuple, set, frozenset, collections.deque),
            *(collections.OrderedDict, collections.Counter, collections.defaultdict),
        ),
        "dict, list, tuple, set, frozenset, deque, `OrderedDict`, `Counter`, `defaultdict` of a built-in type",
        "with keys of str, int, float, bool, bytes, None and tuples of these",
        "dicts, lists and deques keep their identity and receive the saved content",
    ),
    ValueKind(
        (torch.Size, torch.dtype, torch.device), "`torch.Size`, `torch.dtype`, `torch.device`", "as JSON", _REPLACED
    ),
    ValueKind(
        (
            *(io.BytesIO, uuid.UUID, decimal.Decimal),
            *(type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath),
            *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
        ),
        "`io.BytesIO`, `UUID`, `Decimal`, paths of `pathlib`, `datetime`, `date`, `time`, `timedelta`",
        "as JSON; a buffer with its position; a time zone is None or an offset without a name",
        _REPLACED,
    ),
)

# What is refused -> what to do, as the message says it (`tierd.state.kinds.ways_out`).
REFUSED: tuple[tuple[str, str], ...] = (
    (
        "an object with `get_state()` and `set_state()` or `load_state()`",
        "give its class `state_dict()` and `load_state_dict()`, which call them",
    ),
    ("an object with `to_dict()`, such as PyG's `Data`", "pass `.to_dict()`, and make it again of that dict"),
    ("a dataclass", "pass `dataclasses.asdict(…)`, or give it `state_dict()` and `load_state_dict()`"),
    ("an Enum", "pass its `.name`, and make it again as `Class[name]`"),
    ("a named tuple", "pass `._asdict()`"),
    ("any other subclass of a type above, `SystemRandom`", "pass a plain value; leave `SystemRandom` out"),
    (
        "a masked array of NumPy",
        "pass `numpy.ma.getdata(…)` and `numpy.ma.getmaskarray(…)`, and make it again of both",
    ),
    (
        "a `recarray`, an array of a structured dtype; its scalars",
        "pass an array for each field, `{name: numpy.asarray(a[name]) for name in a.dtype.names}`; `.item()`",
    ),
    ("an array of objects", "pass `.tolist()`"),
    ("any other subclass of `numpy.ndarray`, such as `memmap` and `matrix`", "pass `numpy.asarray(…)`"),
    ("a NumPy bit generator", "pass the `numpy.random.Generator` of it, or its `.state`"),
    ("a `datetime` with a zone of `zoneinfo`", "pass `.astimezone(datetime.timezone.utc)`"),
    (
        "any other tensor subclass",
        "pass its inner tensors (`__tensor_flatten__()`), `.dequantize()`, or `.as_subclass(torch.Tensor)`",
    ),
    ("functions, classes and modules", "leave them out, and make them again before the restore"),
    (
        "anything else, such as iterators, files and locks",
        "give it `state_dict()` and `load_state_dict()`, or pass what it holds",
    ),
)
