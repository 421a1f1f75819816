"""Walk a whole state: collect its typed JSON, its tensors, and the structure that both share.

Invariant: the walk keeps a snapshot of each value that is not a tensor, so later training steps cannot change it. Every
tensor gets exactly one name.

The JSON has two parts, so that the next save can reuse the first (`tierd.state.capturer`). The structure alone decides
the first part, the pieces of text. The second part is the holes between them, each with the value found there.
`single_values.encode` joins both parts, at any later time and in any thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring as quoted
from typing import Any

import torch

from tierd.core.errors import StateRefused
from tierd.state import value_kinds
from tierd.state.kinds import loader_fingerprint, random_generators, stored_arrays, supported_values, wrapper_tensors
from tierd.state.kinds.dtensors import is_dtensor, placement_of
from tierd.state.kinds.stored_arrays import STORED_AS, PackedReference, PackedRun, layout_form, pack, pack_run
from tierd.state.single_values import (
    BRACKETS,
    check_alike,
    dumps,
    encode_at_once,
    form_of,
    is_name,
    is_run,
    is_run_of_members,
    is_storable,
    key_tree,
    path_text,
    raise_refused,
    storable_tensor,
    type_name,
    why_array_refused,
    why_refused,
)
from tierd.state.state_tree import FACTORIES, MAX_DEPTH, Node, NodeForm, Path, tensor_name_of
from tierd.state.tensor_file import METADATA
from tierd.state.value_kinds import IMMUTABLE, PLAIN, is_stateful

# Id of an object -> the object, the result of its state_dict(), the exception raised.
Answers = dict[int, list[tuple[object, Any, Exception | None]]]


class Encoder:
    """One walk: collects text, holes and tensors, and detects cycles among containers.

    Args:
        answers: states that objects returned a moment ago in an abandoned walk, used instead of calling `state_dict()`
            again.

    Attributes:
        tensors: by name; for a DTensor its local shard.
        dtensors: each DTensor with the name of its local shard.
        holes: values that `single_values.encode` inserts between the pieces of text.
        nodes: number of values met so far.
    """

    def __init__(self, answers: Answers | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.dtensors: list[tuple[str, torch.Tensor]] = []
        self.holes: list[object] = []
        self.nodes = 0
        self.text: list[str | None] = []  # in the order of the walk; None marks a hole
        self._names: list[str] = []
        self._name_indices: dict[tuple[object, ...], int] = {}  # address and form -> index of the name
        # Kept because `_name_indices` and `_open` identify these objects by address, which is reused once an object is
        # freed.
        self._alive: list[object] = []
        self._open: dict[int, Path] = {}
        self._answers = answers or {}

    def begin(self, state: Mapping[str, object]) -> Node:
        """Walk a state. Raises `StateRefused` if a value has no encoding, or a `state_dict()` raised (chained)."""
        if not isinstance(state, Mapping):
            raise StateRefused(f"state: {type_name(state)}; pass a mapping of names to values")
        for key in state:
            if type(key) is not str:
                raise StateRefused(f"state: the name {key!r} is {type_name(key)}, not str")
        try:
            return self.members(dict(state), ())
        except RecursionError as error:
            raise StateRefused("state: nested too deeply for the stack that is left") from error

    def node(self, value: Any, path: Path) -> Node:
        kind = type(value)
        self.nodes += 1
        if kind in _BYTES and (runs := pack(value)):
            return self._packed(value, runs, path, None)
        if kind in IMMUTABLE:
            return self._hole(NodeForm.SCALAR, kind, value)
        if kind is bytearray:
            return self._hole(NodeForm.ENCODED, kind, encode_at_once(value, path))
        # Checked early because most values are tensors, which contain nothing.
        if kind in PLAIN and len(self._open) < MAX_DEPTH:
            return self.tensor(value, path)
        if id(value) in self._open:
            raise_refused(path, f"{type_name(value)}, a cycle back to {path_text(self._open[id(value)])}")
        if len(self._open) >= MAX_DEPTH:
            raise_refused(path, f"{type_name(value)}, nested deeper than {MAX_DEPTH}")
        self._open[id(value)] = path
        try:
            return NODES.get(kind, Encoder.other)(self, value, path)
        finally:
            del self._open[id(value)]

    def other(self, value: Any, path: Path) -> Node:
        if is_dtensor(value):
            return self.dtensor(value, path)
        if isinstance(value, torch.Tensor):
            wrapper = wrapper_tensors.wrapper_name_of(value)
            return self.tensor(value, path) if wrapper is None else self.wrapper(value, wrapper, path)
        if stored_arrays.is_array(value):
            if reason := why_array_refused(value):
                raise_refused(path, reason)
            index = self._store(path, stored_arrays.tensor_of(value))
            detail = value.dtype.str, value.shape
            self.text.append(dumps({"$array": [self._names[index], *detail]}))
            return Node(NodeForm.ARRAY, type(value), index, detail)
        if stored_arrays.is_scalar(value) or random_generators.random_kind_of(value) is not None:
            return self.made(value, path)
        if is_stateful(value):
            try:
                object_state = self._ask(value)
            except Exception as error:
                remedy = supported_values.remedy_for_failure(value)
                raise_refused(path, f"state_dict() raised {type(error).__name__}: {error}{remedy}", error)
            self._alive.append(object_state)
            return Node(NodeForm.STATEFUL, type(value), children=(self.node(object_state, path),))
        return raise_refused(path, f"{type_name(value)}{supported_values.remedy_for(value)}")

    def tensor(self, tensor: torch.Tensor, path: Path) -> Node:
        if not is_storable(tensor):
            raise_refused(path, why_refused(tensor) or type_name(tensor))
        form = form_of(tensor)
        key = (tensor.data_ptr(), form) if tensor.numel() else None
        index = self._name_indices.get(key) if key else None
        if index is None:
            self._alive.append(tensor)
            index = self._store(path, storable_tensor(tensor))
            if key:
                self._name_indices[key] = index
        name = quoted(self._names[index])
        if tensor.dtype in STORED_AS:
            self.text.append(f'{{"$view":[{name},"{str(tensor.dtype).removeprefix("torch.")}"]}}')
        else:
            self.text.append(f'{{"$tensor":{name}}}')
        return Node(NodeForm.TENSOR, type(tensor), index, (tensor, form))

    def dtensor(self, value: Any, path: Path) -> Node:
        try:
            placement = placement_of(value)
        except ValueError as error:
            raise_refused(path, str(error))
        self.text.append('{"$dtensor":[')
        wrapper = wrapper_tensors.wrapper_name_of(value._local_tensor)
        if wrapper is None:
            local = self.tensor(value._local_tensor, path)
            self.dtensors.append((self._names[local.index], value))
        else:
            local = self.wrapper(value._local_tensor, wrapper, path)
        self.text.append(f",{dumps(placement.as_plain())}]}}")
        return Node(NodeForm.SHARD, type(value), local.index, value._spec, (local,))

    def wrapper(self, value: torch.Tensor, name: str, path: Path) -> Node:
        try:
            context = wrapper_tensors.context_of(value)
        except ValueError as error:
            raise_refused(path, f"{name}: {error}; {supported_values.REMEDY_FOR_WRAPPERS}", error)
        inner = wrapper_tensors.inner_tensors(value)
        self._alive.append(inner)
        opening, children = f'{{"$wrapper":[{dumps(name)},{{', []
        for key, tensor in inner.items():
            self.text.append(f"{opening}{quoted(key)}:")
            children.append(self.node(tensor, (*path, key)))
            opening = ","
        self.text.append(f"}},{dumps(context)}]}}")
        return Node(NodeForm.WRAPPER, type(value), detail=(list(inner), context), children=children)

    def generator(self, value: torch.Generator, path: Path) -> Node:
        try:
            state = value.get_state()
        except Exception as error:
            raise_refused(path, f"get_state() raised {type(error).__name__}: {error}", error)
        index = self._store(path, state)
        detail = str(value.device), state.shape
        self.text.append(dumps({"$generator": [self._names[index], detail[0]]}))
        return Node(NodeForm.ARRAY, type(value), index, detail)

    def made(self, value: Any, path: Path) -> Node:
        return self._hole(NodeForm.ENCODED, type(value), encode_at_once(value, path))

    def sequence(self, value: Any, path: Path) -> Node:
        parts, maxlen = tuple(value), getattr(value, "maxlen", None)
        before, after = BRACKETS[type(value)]
        self.text.append(f"{before}{dumps(maxlen)}," if type(value) is deque else before)
        if run := pack_run(parts):
            node = self._packed(value, [run], path, maxlen)
        elif is_run(parts):
            node = self._hole(NodeForm.RUN, type(value), parts, maxlen)
        else:
            node = Node(NodeForm.SEQUENCE, type(value), detail=(len(parts), maxlen))
            opening, children = "[", []
            for index, part in enumerate(parts):
                self.text.append(opening)
                children.append(self.node(part, (*path, index)))
                opening = ","
            self.text.append("]")
            node.children = children
        self.text.append(after)
        return node

    def mapping(self, value: Mapping[Any, object], path: Path, extra: object = None) -> Node:
        runs = pack(value)
        if runs is None and type(value) is dict and is_run_of_members(copied := value.copy()):
            return self._hole(NodeForm.RUN, dict, copied)
        if runs is None or extra == _METADATA:
            return self.members(value, path, extra)
        keys, _ = runs
        if keys.kind != "str":
            check_alike(list(value), path)
        self.text.append('{"$map":[')
        node = self._packed(value, runs, path, extra)
        self.text.append("]}")
        return node

    def members(self, value: Mapping[Any, object], path: Path, extra: object = None) -> Node:
        """Encode a mapping member by member, without packing its keys and values."""
        pairs = list(value.items())  # in one call, because another thread of the owner may add members during the walk
        children = []
        has_names = all(is_name(key) for key, _ in pairs)
        if has_names:
            opening, closing = "{", "}" if pairs else "{}"
            for key, inner in pairs:
                self.text.append(f"{opening}{quoted(key)}:")
                children.append(self.node(inner, (*path, key)))
                opening = ","
        else:
            check_alike([key for key, _ in pairs], path)
            opening, closing = '{"$dict":[[', "]]}"
            for key, inner in pairs:
                self.text.append(f"{opening}{dumps(key_tree(key, path))},")
                children.append(self.node(inner, (*path, key)))
                opening = "],["
        node = Node(NodeForm.MAPPING, type(value), -1, (tuple(key for key, _ in pairs), extra), children)
        if has_names and pairs:
            node.end, node.path = len(self.text), path
        self.text.append(closing)
        return node

    def ordered_dict(self, value: OrderedDict[Any, object], path: Path) -> Node:
        attributes = dict(vars(value))
        if attributes.keys() - {"_metadata"}:
            raise_refused(
                path, f"collections.OrderedDict with the attribute {min(attributes.keys() - {'_metadata'})!r}"
            )
        self.text.append('{"$odict":[')
        node = self.mapping(value, path, tuple(attributes))
        metadata = []
        for name, inner in attributes.items():
            self.text.append(",")
            metadata.append(self.node(inner, (*path, name)))
        self.text.append("]}")
        node.children = [*node.children, *metadata]
        return node

    def counter(self, value: Counter[Any], path: Path) -> Node:
        if attributes := vars(value):
            raise_refused(path, f"collections.Counter with the attribute {min(attributes)!r}")
        return self._around('{"$counter":', value, path, "}")

    def default_dict(self, value: defaultdict[Any, object], path: Path) -> Node:
        factory = value.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and FACTORIES.get(name) is not factory:
            raise_refused(
                path, f"collections.defaultdict with the factory {name or type_name(factory)}; only built-in types"
            )
        return self._around(f'{{"$defaultdict":[{dumps(name or None)},', value, path, "]}", factory)

    def _around(self, before: str, value: Mapping[Any, object], path: Path, after: str, extra: object = None) -> Node:
        self.text.append(before)
        node = self.mapping(value, path, extra)
        self.text.append(after)
        return node

    def _packed(self, value: object, runs: list[PackedRun], path: Path, extra: object) -> Node:
        children, names = [], []
        for number, run in enumerate(runs):
            if number:
                self.text.append(",")
            index = self._store(path if len(runs) == 1 else (*path, ("keys", "values")[number]), run.tensor)
            names.append(self._names[index])
            children.append(self._hole(NodeForm.SCALAR, PackedReference, run.json_reference(names[-1])))
            children.append(Node(NodeForm.ARRAY, torch.Tensor, index, layout_form(run.tensor)))
        return Node(NodeForm.PACKED, type(value), detail=(tuple(names), extra), children=children)

    def _ask(self, value: Any) -> Any:
        answers = self._answers.get(id(value))
        if not answers:
            return loader_fingerprint.state_dict_with_arguments(value)
        _, object_state, error = answers.pop(0)
        if error is not None:
            raise error
        return object_state

    def _hole(self, form: NodeForm, kind: type, value: object, detail: object = None) -> Node:
        self.text.append(None)
        self.holes.append(value)
        return Node(form, kind, len(self.holes) - 1, detail)

    def _store(self, path: Path, tensor: torch.Tensor) -> int:
        name = base = tensor_name_of(path)
        count = 1
        while name in self.tensors or name == METADATA:
            count += 1
            name = f"{base}~{count}"
        self.tensors[name] = tensor
        self._names.append(name)
        return len(self._names) - 1


_BYTES = frozenset((bytes, bytearray))
_METADATA = ("_metadata",)  # the attributes that `ordered_dict` passes as `extra` for an OrderedDict's metadata

NODES: dict[type, Callable[[Encoder, Any, Path], Node]] = {
    dict: Encoder.mapping,
    list: Encoder.sequence,
    tuple: Encoder.sequence,
    deque: Encoder.sequence,
    slice: Encoder.made,
    set: Encoder.made,
    frozenset: Encoder.made,
    **dict.fromkeys(value_kinds.ENCODERS, Encoder.made),
    OrderedDict: Encoder.ordered_dict,
    Counter: Encoder.counter,
    defaultdict: Encoder.default_dict,
    torch.Generator: Encoder.generator,
    torch.Tensor: Encoder.tensor,
    torch.nn.Parameter: Encoder.tensor,
}
