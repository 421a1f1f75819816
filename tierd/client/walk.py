"""The full walk over a state: its typed JSON, its tensors, and the structure that both of them have.

Law: what the walk keeps of a value that is not a tensor is a snapshot: nothing that training does afterwards changes
it. Every tensor gets one name.

JSON comes out in two parts, so that the next save need not write it anew (`tierd.client.capture`): pieces of text that
the structure alone decides, and between them holes, each with the value that was found there. `values.encode` puts the
two together, whenever and in whichever thread that is wanted.
"""

from __future__ import annotations

import enum
import gc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from json.encoder import encode_basestring as quoted
from typing import Any

import torch

from tierd.client import arrays, datastate
from tierd.client.tensorfile import METADATA
from tierd.client.tree import FACTORIES, MAX_DEPTH, STORED_AS
from tierd.client.values import (
    BRACKETS,
    IMMUTABLE,
    PLAIN,
    Path,
    check_alike,
    dumps,
    form_of,
    is_name,
    is_run,
    is_stateful,
    is_storable,
    key_tree,
    made,
    plain,
    refuse,
    show,
    type_name,
    why_array_refused,
    why_refused,
)
from tierd.core.errors import StateRefused

Answers = dict[int, list[tuple[object, Any, Exception | None]]]  # id of an object -> it, what state_dict() gave, raised


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for cyclic garbage meanwhile: a walk makes thousands of small objects at once and no cycle, and one
    search through all that torch has loaded takes longer than the walk."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Form(enum.Enum):
    """What a node is to somebody who walks the same structure again."""

    SCALAR = enum.auto()  # a hole with an immutable value
    RUN = enum.auto()  # a hole with a sequence of any number of immutable values
    MADE = enum.auto()  # a hole whose JSON is made at once
    TENSOR = enum.auto()
    ARRAY = enum.auto()  # what gives a tensor of its own whenever it is asked: an array, a generator
    MAPPING = enum.auto()
    SEQUENCE = enum.auto()
    STATEFUL = enum.auto()


class Node:
    """One value that the walk met.

    `index` counts the holes, or the names in `Walk.tensors`; `detail` is what, besides type and children, the JSON and
    the names rest on.
    """

    __slots__ = ("children", "detail", "form", "index", "kind")

    def __init__(
        self, form: Form, kind: type, index: int = -1, detail: Any = None, children: Sequence[Node] = ()
    ) -> None:
        self.form, self.kind, self.index, self.detail, self.children = form, kind, index, detail, children


class Walk:
    """One walk: collects text, holes and tensors, and knows which containers are open.

    Args:
        answers: what objects said a moment ago, when they were asked for their state; they are not asked again.
    """

    def __init__(self, answers: Answers | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.holes: list[object] = []
        self.nodes = 0
        self._text: list[str | None] = []  # None: a hole
        self._names: list[str] = []
        self._known: dict[tuple[object, ...], int] = {}  # memory and how it is seen -> index of its name
        self._alive: list[object] = []  # what `_known` and `_open` tell apart by address must not be freed
        self._open: dict[int, Path] = {}
        self._answers = answers or {}

    def begin(self, state: Mapping[str, object]) -> Node:
        """Walk a whole state.

        Raises:
            StateRefused: a value has no encoding (its path is named), or a `state_dict()` raised (chained).
        """
        if not isinstance(state, Mapping):
            raise StateRefused(f"state: {type_name(state)}; pass a mapping of names to values")
        for key in state:
            if type(key) is not str:
                raise StateRefused(f"state: the name {key!r} is {type_name(key)}, not str")
        try:
            return self.mapping(dict(state), ())
        except RecursionError as error:
            raise StateRefused("state: nested too deeply for the stack that is left") from error

    def pieces(self) -> list[str]:
        """The text before, between and behind the holes."""
        found: list[str] = []
        run: list[str] = []
        for text in self._text:
            if text is None:
                found.append("".join(run))
                run.clear()
            else:
                run.append(text)
        return [*found, "".join(run)]

    def node(self, value: Any, path: Path) -> Node:
        kind = type(value)
        self.nodes += 1
        if kind in IMMUTABLE:
            return self._hole(Form.SCALAR, kind, value)
        if kind is bytearray:
            return self._hole(Form.MADE, kind, made(value, path))
        if kind in PLAIN and len(self._open) < MAX_DEPTH:  # the most of a state, and no container
            return self.tensor(value, path)
        if id(value) in self._open:
            refuse(path, f"{type_name(value)}, a cycle back to {show(self._open[id(value)])}")
        if len(self._open) >= MAX_DEPTH:
            refuse(path, f"{type_name(value)}, nested deeper than {MAX_DEPTH}")
        self._open[id(value)] = path
        try:
            return _NODES.get(kind, Walk.other)(self, value, path)
        finally:
            del self._open[id(value)]

    def other(self, value: Any, path: Path) -> Node:
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if arrays.is_array(value):
            if reason := why_array_refused(value):
                refuse(path, reason)
            index = self._store(path, arrays.tensor_of(value))
            detail = value.dtype.str, value.shape
            self._text.append(dumps({"$array": [self._names[index], *detail]}))
            return Node(Form.ARRAY, type(value), index, detail)
        if arrays.is_scalar(value):
            return self.made(value, path)
        if is_stateful(value):
            try:
                own = self._ask(value)
            except Exception as error:
                refuse(path, f"state_dict() raised {type(error).__name__}: {error}", error)
            self._alive.append(own)
            return Node(Form.STATEFUL, type(value), children=(self.node(own, path),))
        for kind in (dict, list, tuple, set, str, int, float, bytes, torch.Generator):
            if isinstance(value, kind):
                refuse(path, f"{type_name(value)}, a subclass of {kind.__name__}; pass a plain {kind.__name__}")
        return refuse(path, type_name(value))

    def tensor(self, tensor: torch.Tensor, path: Path) -> Node:
        if not is_storable(tensor):
            refuse(path, why_refused(tensor) or type_name(tensor))
        form = form_of(tensor)
        key = (tensor.data_ptr(), form) if tensor.numel() else None
        index = self._known.get(key) if key else None
        if index is None:
            self._alive.append(tensor)
            index = self._store(path, plain(tensor))
            if key:
                self._known[key] = index
        name = quoted(self._names[index])
        if tensor.dtype in STORED_AS:
            self._text.append(f'{{"$view":[{name},"{str(tensor.dtype).removeprefix("torch.")}"]}}')
        else:
            self._text.append(f'{{"$tensor":{name}}}')
        return Node(Form.TENSOR, type(tensor), index, (tensor, form))

    def generator(self, value: torch.Generator, path: Path) -> Node:
        try:
            state = value.get_state()
        except Exception as error:
            refuse(path, f"get_state() raised {type(error).__name__}: {error}", error)
        index = self._store(path, state)
        detail = str(value.device), state.shape
        self._text.append(dumps({"$generator": [self._names[index], detail[0]]}))
        return Node(Form.ARRAY, type(value), index, detail)

    def made(self, value: Any, path: Path) -> Node:
        return self._hole(Form.MADE, type(value), made(value, path))

    def sequence(self, value: Any, path: Path) -> Node:
        parts, maxlen = tuple(value), getattr(value, "maxlen", None)
        before, after = BRACKETS[type(value)]
        self._text.append(f"{before}{dumps(maxlen)}," if type(value) is deque else before)
        if is_run(parts):
            node = self._hole(Form.RUN, type(value), parts, maxlen)
        else:
            node = Node(Form.SEQUENCE, type(value), detail=(len(parts), maxlen))
            opening, children = "[", []
            for index, part in enumerate(parts):
                self._text.append(opening)
                children.append(self.node(part, (*path, index)))
                opening = ","
            self._text.append("]")
            node.children = children
        self._text.append(after)
        return node

    def mapping(self, value: Mapping[Any, object], path: Path, extra: object = None) -> Node:
        pairs = list(value.items())  # at once: a thread of the owner's may still add to it
        children = []
        if all(is_name(key) for key, _ in pairs):
            opening, closing = "{", "}" if pairs else "{}"
            for key, inner in pairs:
                self._text.append(f"{opening}{quoted(key)}:")
                children.append(self.node(inner, (*path, key)))
                opening = ","
        else:
            check_alike([key for key, _ in pairs], path)
            opening, closing = '{"$dict":[[', "]]}"
            for key, inner in pairs:
                self._text.append(f"{opening}{dumps(key_tree(key, path))},")
                children.append(self.node(inner, (*path, key)))
                opening = "],["
        self._text.append(closing)
        return Node(Form.MAPPING, type(value), -1, (tuple(key for key, _ in pairs), extra), children)

    def ordered(self, value: OrderedDict[Any, object], path: Path) -> Node:
        attributes = dict(vars(value))
        if attributes.keys() - {"_metadata"}:
            refuse(path, f"collections.OrderedDict with the attribute {min(attributes.keys() - {'_metadata'})!r}")
        self._text.append('{"$odict":[')
        node = self.mapping(value, path, tuple(attributes))
        metadata = []
        for name, inner in attributes.items():
            self._text.append(",")
            metadata.append(self.node(inner, (*path, name)))
        self._text.append("]}")
        node.children = [*node.children, *metadata]
        return node

    def counter(self, value: Counter[Any], path: Path) -> Node:
        if attributes := vars(value):
            refuse(path, f"collections.Counter with the attribute {min(attributes)!r}")
        return self._around('{"$counter":', value, path, "}")

    def default(self, value: defaultdict[Any, object], path: Path) -> Node:
        factory = value.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and FACTORIES.get(name) is not factory:
            refuse(path, f"collections.defaultdict with the factory {name or type_name(factory)}; only built-in types")
        return self._around(f'{{"$defaultdict":[{dumps(name or None)},', value, path, "]}", factory)

    def _around(self, before: str, value: Mapping[Any, object], path: Path, after: str, extra: object = None) -> Node:
        self._text.append(before)
        node = self.mapping(value, path, extra)
        self._text.append(after)
        return node

    def _ask(self, value: Any) -> Any:
        said = self._answers.get(id(value))
        if not said:
            return datastate.ask(value)
        _, own, error = said.pop(0)
        if error is not None:
            raise error
        return own

    def _hole(self, form: Form, kind: type, value: object, detail: object = None) -> Node:
        self._text.append(None)
        self.holes.append(value)
        return Node(form, kind, len(self.holes) - 1, detail)

    def _store(self, path: Path, tensor: torch.Tensor) -> int:
        name = base = "/".join([part if type(part) is str else repr(part) for part in path])
        if not name.isascii():
            name = base = name.encode("utf-8", "backslashreplace").decode()
        count = 1
        while name in self.tensors or name == METADATA:
            count += 1
            name = f"{base}~{count}"
        self.tensors[name] = tensor
        self._names.append(name)
        return len(self._names) - 1


_NODES: dict[type, Callable[[Walk, Any, Path], Node]] = {
    dict: Walk.mapping,
    list: Walk.sequence,
    tuple: Walk.sequence,
    deque: Walk.sequence,
    slice: Walk.made,
    set: Walk.made,
    frozenset: Walk.made,
    OrderedDict: Walk.ordered,
    Counter: Walk.counter,
    defaultdict: Walk.default,
    torch.Generator: Walk.generator,
    torch.Tensor: Walk.tensor,
    torch.nn.Parameter: Walk.tensor,
}
