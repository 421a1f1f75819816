"""The tree of a state: its containers and the one walk over them, its nodes, and the typed JSON that stores it.

Typed JSON is an exact form of everything in a state that is not a tensor, which any JSON reader can parse.

Invariant: nothing in a tree is executable. Every tag builds one built-in type from checked parts. A reader
(`tierd.state.tree_parser`) refuses an unknown tag, key or form, nesting beyond `MAX_DEPTH`, and trees beyond the limits
below: anyone who can write to an unencrypted tier can write any tree. `save` and a restore pass the same text to the
same check, so a saved tree is never refused. In a walk a run of plain values counts as a container without members,
because a look at each of a million numbers takes seconds. A container is entered once, so a cycle ends the walk.

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
    $values [name, kind, size]                  a list of plain values, or bytes (`tierd.state.kinds.stored_arrays`)
    $map [keys, values]                         a dict, as two lists
    $bytesio $datetime $time $date $timedelta $path $uuid $decimal   `tierd.state.value_kinds`
    $random [kind, state]                       a generator of NumPy or random (`tierd.state.kinds.random_generators`)
    $generator [name, device]                   a torch.Generator; the tensor is the result of get_state()
    $wrapper [class, tensors, context]          a wrapper subclass of a tensor (`tierd.state.kinds.wrapper_tensors`)
    $dtensor [tensor, placement]                a DTensor's local shard, a $tensor or $view, and its place in the
                                                whole tensor (`tierd.core.shard_placement`)
"""

from __future__ import annotations

import base64
import enum
import gc
import math
import operator
import struct
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tierd.state.kinds.stored_arrays import is_plain

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


# Arrays, objects and members of objects. 50,000 parameters with Adam's state need 700,000.
# No kind of node costs more memory per count than a set of five: three nodes and 730 bytes. So all nodes together need
# at most 500 MiB.
MAX_NODES = 1 << 21
# Commas outside strings, which count the items in lists of numbers and strings, at most 70 bytes each.
# Also limits the number of values in all packed runs together, at 32 to 90 bytes each.
MAX_VALUES = 1 << 24
# Keys of one dict, or members of one set, that share a hash; limited because each is compared with all others.
MOST_ALIKE = 64


def exceeded_limit(text: str) -> str:
    """Describe which limit typed JSON exceeds; empty if it is within the limits."""
    if len(text) <= MAX_NODES:
        return ""
    nodes, values = _count(text)
    if nodes > MAX_NODES or values > MAX_VALUES:  # an upper bound, because those inside strings are counted too
        nodes, values = count_nodes(text)
    if nodes > MAX_NODES:
        return f"{nodes} containers, members and tensors, {MAX_NODES} at most"
    return f"{values} values, {MAX_VALUES} at most" if values > MAX_VALUES else ""


def exceeded_run_limit(values: int) -> str:
    return f"{values} values in packed runs, {MAX_VALUES} at most" if values > MAX_VALUES else ""


def count_nodes(text: str, step: int = 1 << 16) -> tuple[int, int]:
    """Count the nodes and the commas of JSON that lie outside strings, in the memory of `step` characters."""
    nodes = values = at = inside = 0
    while at < len(text):
        window = text[at : at + step]
        if (len(window) - len(window.rstrip("\\"))) % 2:  # so that the window does not end inside an escape
            window += text[at + len(window) : at + len(window) + 1]
        at += len(window)
        pieces = window.replace("\\\\", "").replace('\\"', "").split('"')
        window_nodes, window_values = _count("".join(pieces[inside::2]))
        nodes, values = nodes + window_nodes, values + window_values
        inside ^= (len(pieces) - 1) % 2
    return nodes, values


def _count(text: str) -> tuple[int, int]:
    return sum(map(text.count, "[{:")), text.count(",")


def count_equal_hashes(keys: Collection[object]) -> int:
    """Return how many keys share one hash, if they are more than `MOST_ALIKE`; else 0."""
    if len(keys) <= MOST_ALIKE or len(set(map(hash, keys))) > len(keys) - MOST_ALIKE:
        return 0
    largest = max(Counter(map(hash, keys)).values())
    return largest if largest > MOST_ALIKE else 0


Path = tuple[object, ...]
T = TypeVar("T")

SEQUENCES = (list, tuple, deque)
_EXACT = frozenset(SEQUENCES)


def members(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and values in a container; None if `value` is none.

    They are those of now: the container may be changed meanwhile, also by another thread. No pair is kept, because
    thousands of new tuples cause collections of garbage, which take longer than a walk.
    """
    kind = type(value)  # asked first, because `isinstance` of an abstract class is slow
    if kind is dict or (kind not in _EXACT and isinstance(value, Mapping)):
        return () if is_plain(value.values()) else zip(tuple(value), tuple(value.values()), strict=False)
    if kind in _EXACT or isinstance(value, SEQUENCES):
        return () if is_plain(value) else enumerate(tuple(value))
    return None


def walk(value: object, path: Path = ()) -> Iterator[tuple[Path, Any, bool]]:
    """Yield `value` and all values in it: the path, the value, and whether it is a container."""
    entered: dict[int, object] = {}  # by id; kept, because an id is used again once its object is freed
    todo: list[tuple[Path, Iterator[tuple[Any, Any]]]] = []
    at, inner = path, value
    while True:
        inside = members(inner)
        if inside is None:
            yield at, inner, False
        elif id(inner) not in entered:
            entered[id(inner)] = inner
            todo.append((at, iter(inside)))
            yield at, inner, True
        while todo:
            above, remaining = todo[-1]
            if (pair := next(remaining, None)) is not None:
                at, inner = (*above, pair[0]), pair[1]
                break
            todo.pop()
        else:
            return


def leaves(value: object) -> Iterator[Any]:
    """Yield the values inside nested containers, without runs of plain values; `value` itself if it is no container."""
    return (inner for _, inner, is_container in walk(value) if not is_container)


def instances(value: object, kind: type[T], path: Path = ()) -> Iterator[tuple[Path, T]]:
    """Yield each instance of `kind` among the leaves, with its path."""
    return ((at, inner) for at, inner, _ in walk(value, path) if isinstance(inner, kind))


def pair_values(target: Any, saved: Any) -> Iterator[tuple[object, Any, Any]]:
    """Yield the key of each value in `saved`, what `target` has in its place (None if nothing), and the value."""
    if isinstance(saved, dict):
        yield from ((key, target.get(key), value) for key, value in saved.items())
        return
    olds = list(target)
    for index, value in enumerate(saved):
        yield index, olds[index] if index < len(olds) else None, value


def replace_values(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Replace each instance of `kind` in `value` by the result of `by`. Returns the new value.

    Lists, deques and dicts are changed in place; tuples are made anew.
    """
    if isinstance(value, kind):
        return by(value)
    if type(value) is tuple:
        parts = value if is_plain(value) else tuple(replace_values(inner, kind, by) for inner in value)
        return value if all(map(operator.is_, parts, value)) else parts
    if isinstance(value, dict | list | deque):
        for key, inner in members(value) or ():
            if (new := replace_values(inner, kind, by)) is not inner:
                value[key] = new
    return value


class NodeForm(enum.Enum):
    """How a node is captured when the same structure is walked again."""

    SCALAR = enum.auto()  # a hole with an immutable value
    RUN = enum.auto()  # a hole with a sequence of immutable values, of any length, or with a dict of them
    ENCODED = enum.auto()  # a hole whose JSON is made during the walk
    TENSOR = enum.auto()
    ARRAY = enum.auto()  # an object that makes a new tensor for each capture: an array, a generator, a packed run
    MAPPING = enum.auto()
    SEQUENCE = enum.auto()
    PACKED = enum.auto()  # runs of plain values: each a hole with its `PackedReference`, and a tensor of its own
    STATEFUL = enum.auto()
    WRAPPER = enum.auto()  # a wrapper subclass; its children are its inner tensors
    SHARD = enum.auto()  # a DTensor; its only child is its local shard


class Node:
    """One value that the walk met.

    Attributes:
        index: of the node's hole, or of its name in `Encoder.tensors`; for a DTensor, of its local shard's name.
        detail: further properties on which the JSON and the names depend, besides the type and the children.
        end: for a mapping whose keys are all names, the index in `Encoder.text` at which text for another member
            belongs; else -1.
        path: of that mapping; empty otherwise.
    """

    __slots__ = ("children", "detail", "end", "form", "index", "kind", "path")

    def __init__(
        self, form: NodeForm, kind: type, index: int = -1, detail: Any = None, children: Sequence[Node] = ()
    ) -> None:
        self.form, self.kind, self.index, self.detail, self.children = form, kind, index, detail, children
        self.end = -1
        self.path: Path = ()


def text_pieces(texts: list[str | None]) -> list[str]:
    """Return the text before, between and after the holes of `Encoder.text`."""
    joined: list[str] = []
    run: list[str] = []
    for text in texts:
        if text is None:
            joined.append("".join(run))
            run.clear()
        else:
            run.append(text)
    return [*joined, "".join(run)]


def tensor_name_of(path: Path) -> str:
    """Return the name of the tensor at `path`, before `Encoder` makes it unique."""
    name = "/".join([part if type(part) is str else repr(part) for part in path])
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


@contextmanager
def pause_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collection during a walk.

    A walk makes thousands of small objects but no cycle. One collection traverses every object that torch has loaded,
    which takes longer than the walk.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
