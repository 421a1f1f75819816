"""Check level by level, in few calls, whether a state has a known structure.

Invariant: any difference that the JSON or the names could show raises `StructureInDoubt`; `capture` has those of
the layout. Values are compared in lists, by calls that loop in C, because a Python loop would take longer than copying
a small model.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, count
from typing import Any

import torch

from tierd.state.encoder import Answers
from tierd.state.kinds import loader_fingerprint, stored_arrays, wrapper_tensors
from tierd.state.kinds.dtensors import is_placed_alike
from tierd.state.kinds.stored_arrays import layout_form, pack, pack_run
from tierd.state.single_values import (
    are_runs_of_members,
    check_alike,
    dumps,
    encode_at_once,
    is_run,
    key_tree,
    why_array_refused,
)
from tierd.state.state_tree import Node, NodeForm
from tierd.state.value_kinds import IMMUTABLE, is_stateful

Pick = Callable[[Any], Sequence[Any]]
MOST_ADDED = 8  # tensors in one dict at once; for more, a full walk takes no longer
# Types of keys that are the same if their type and value are equal.
_COMPARABLE = frozenset((str, int, bool, bytes, type(None)))


_first, _second = operator.itemgetter(0), operator.itemgetter(1)


class StructureInDoubt(Exception):
    """The state may not have the structure that it had."""


class StructureLevel:
    """All values at one depth of the state, in one list, which a few calls in C compare."""

    def __init__(self, nodes: list[Node], depth: int) -> None:
        at: dict[NodeForm, list[int]] = {form: [] for form in NodeForm}
        for index, node in enumerate(nodes):
            at[node.form].append(index)
        self._kinds = [node.kind for node in nodes]
        self._loose = frozenset(at[NodeForm.SCALAR])
        self._bytes_at = [index for index in at[NodeForm.SCALAR] if self._kinds[index] is bytes]
        self._scalars = picker(at[NodeForm.SCALAR])
        self.tensors_at, self.tensors = at[NodeForm.TENSOR], picker(at[NodeForm.TENSOR])
        self.shards_at = [index for index in at[NodeForm.SHARD] if nodes[index].children[0].form is NodeForm.TENSOR]
        self.dtensors = picker(self.shards_at)
        self.arrays_at, self._arrays = (
            at[NodeForm.ARRAY],
            [(index, nodes[index].detail) for index in at[NodeForm.ARRAY]],
        )
        members_at = [index for index in at[NodeForm.RUN] if nodes[index].kind is dict]
        runs_at = [index for index in at[NodeForm.RUN] if nodes[index].kind is not dict]
        self._members = picker(members_at)
        self.holes_at = [*at[NodeForm.SCALAR], *at[NodeForm.ENCODED], *runs_at, *members_at]
        self._keep: list[tuple[int, Callable[[Any], object]]] = [
            *((index, _ValueEncoder(depth)) for index in at[NodeForm.ENCODED]),
            *((index, _Run(nodes[index].detail)) for index in runs_at),
        ]
        self.dicts_at = [index for index in at[NodeForm.MAPPING] if _is_simple(nodes[index])]
        self._dicts = picker(self.dicts_at)
        self._lengths = [len(nodes[index].detail[0]) for index in self.dicts_at]
        self._keys = [key for index in self.dicts_at for key in nodes[index].detail[0]]
        self._key_kinds = list(map(type, self._keys))
        # Dicts that are long enough to be packed next time. The state itself, at depth 0, is never packed.
        self._long_dicts = [at for at, length in enumerate(self._lengths) if length >= stored_arrays.FEWEST and depth]
        simple = set(self.dicts_at)
        self.opened_at = [
            index
            for form in (
                NodeForm.MAPPING,
                NodeForm.SEQUENCE,
                NodeForm.STATEFUL,
                NodeForm.PACKED,
                NodeForm.SHARD,
                NodeForm.WRAPPER,
            )
            for index in at[form]
            if index not in simple
        ]
        self._others = [(index, _opener(nodes[index])) for index in self.opened_at]

    def check_kinds(self, values: list[Any]) -> None:
        kinds = list(map(type, values))
        if len(kinds) != len(self._kinds):
            raise StructureInDoubt
        changed: list[int] = []
        if kinds != self._kinds:
            changed = list(compress(count(), map(operator.is_not, kinds, self._kinds)))
            if any(index not in self._loose or kinds[index] not in IMMUTABLE for index in changed):
                raise StructureInDoubt
        scalars = (*self._bytes_at, *changed)
        if any(kinds[index] is bytes and len(values[index]) >= stored_arrays.FEWEST_BYTES for index in scalars):
            raise StructureInDoubt

    def holes(self, values: list[Any]) -> list[object]:
        members = list(map(dict.copy, self._members(values)))
        if not are_runs_of_members(members) or any(map(pack, members)):
            raise StructureInDoubt
        return [*self._scalars(values), *(keep(values[index]) for index, keep in self._keep), *members]

    def arrays(self, values: list[Any]) -> list[torch.Tensor]:
        """Return tensors with copies of the NumPy arrays' values, generators' states and packed runs."""
        return [_array(values[index], form) for index, form in self._arrays]

    def children(self, values: list[Any], answers: Answers, added: list[tuple[int, str, Any]]) -> list[Any]:
        """Return the values one level down, in the order of the plan's nodes.

        `added` receives the members that simple dicts have after all known members: the dict's index in `dicts_at`, the
        new key and its value.
        """
        inner_values: list[Any] = []
        if self._lengths:
            # Each copied in one call, because another thread may change it meanwhile.
            dicts = list(map(dict.copy, self._dicts(values)))
            if list(map(len, dicts)) != self._lengths:
                self._part_with_new(dicts, added)
            keys = list(chain.from_iterable(dicts))
            if not _same(keys, self._keys, self._key_kinds):
                raise StructureInDoubt
            if any(pack(dicts[at]) for at in self._long_dicts):
                raise StructureInDoubt
            inner_values.extend(chain.from_iterable(map(dict.values, dicts)))
        for index, opened in self._others:
            inner_values += opened(values[index], answers)
        return inner_values

    def _part_with_new(self, dicts: list[dict[Any, Any]], added: list[tuple[int, str, Any]]) -> None:
        for at, length in enumerate(self._lengths):
            if len(dicts[at]) < length or len(dicts[at]) > length + MOST_ADDED:
                raise StructureInDoubt
            if len(dicts[at]) > length:
                pairs = list(dicts[at].items())
                added += [(at, key, value) for key, value in pairs[length:]]
                dicts[at] = dict(pairs[:length])


class _Run:
    """Return a sequence of immutable values as a tuple, or raise `StructureInDoubt`."""

    def __init__(self, maxlen: int | None) -> None:
        self._maxlen = maxlen

    def __call__(self, value: Any) -> object:
        parts = tuple(value)
        if pack_run(parts) or not is_run(parts) or (type(value) is deque and value.maxlen != self._maxlen):
            raise StructureInDoubt
        return parts


class _ValueEncoder:
    """Encode a value at this depth or above; raise `StructureInDoubt` if it must be packed or is nested too deeply."""

    def __init__(self, depth: int) -> None:
        self._path = (None,) * depth

    def __call__(self, value: Any) -> object:
        if type(value) is bytearray and len(value) >= stored_arrays.FEWEST_BYTES:
            raise StructureInDoubt
        return encode_at_once(value, self._path)


def _array(value: Any, form: tuple[str, tuple[int, ...]]) -> torch.Tensor:
    if type(value) is torch.Generator:
        state = value.get_state()
        if (str(value.device), state.shape) != form:
            raise StructureInDoubt
        return state
    if type(value) is torch.Tensor:  # a packed run
        if layout_form(value) != form:
            raise StructureInDoubt
        return value
    if (value.dtype.str, value.shape) != form or why_array_refused(value):
        raise StructureInDoubt
    return stored_arrays.tensor_of(value)


def _opener(node: Node) -> Callable[[Any, Answers], Iterable[Any]]:
    """Return a function that yields the values inside one value.

    The function raises `StructureInDoubt` if the value is not built like the node.
    """
    if node.form is NodeForm.STATEFUL:
        return _ask_state
    if node.form is NodeForm.PACKED:
        return _packer(*node.detail)
    if node.form is NodeForm.SHARD:
        return _Shard(node.detail)
    if node.form is NodeForm.WRAPPER:
        return _unwrapper(*node.detail)
    if node.form is NodeForm.SEQUENCE:
        length, maxlen = node.detail

        def parts(value: Any, answers: Answers) -> Iterable[Any]:
            items = tuple(value)
            if len(items) != length or (type(value) is deque and value.maxlen != maxlen):
                raise StructureInDoubt
            return items

        return parts
    keys, extra = list(node.detail[0]), node.detail[1]
    kinds = list(map(type, keys))
    text = None if _COMPARABLE.issuperset(kinds) else _key_text(keys)

    def inner(value: Any, answers: Answers) -> Iterable[Any]:
        pairs = tuple(value.items())
        value_keys = list(map(_first, pairs))
        same = _same(value_keys, keys, kinds) if text is None else _key_text(value_keys) == text
        attributes = dict(vars(value)) if type(value) in (OrderedDict, Counter) else {}
        if not same or tuple(attributes) != (extra if type(value) is OrderedDict else ()):
            raise StructureInDoubt
        if type(value) is defaultdict and value.default_factory is not extra:
            raise StructureInDoubt
        if len(pairs) >= stored_arrays.FEWEST and not attributes and pack(value):
            raise StructureInDoubt
        return [*map(_second, pairs), *attributes.values()]

    return inner


def _packer(names: tuple[str, ...], extra: object) -> Callable[[Any, Answers], Iterable[Any]]:
    def parts(value: Any, answers: Answers) -> Iterable[Any]:
        runs = pack(value)
        if runs is None or len(runs) != len(names) or _extra(value) != extra:
            raise StructureInDoubt
        if len(runs) > 1 and runs[0].kind != "str":
            check_alike(list(value), ())
        return [part for name, run in zip(names, runs, strict=True) for part in (run.json_reference(name), run.tensor)]

    return parts


def _extra(value: Any) -> object:
    """Return what the JSON of a packed container depends on, apart from the container's values."""
    if type(value) is deque:
        return value.maxlen
    if type(value) is defaultdict:
        return value.default_factory
    if type(value) is OrderedDict:
        return tuple(vars(value))
    return (tuple(vars(value)) or None) if type(value) is Counter else None


def _unwrapper(names: list[str], context: list[object]) -> Callable[[Any, Answers], Iterable[Any]]:
    def tensors(value: Any, answers: Answers) -> Iterable[Any]:
        inner = wrapper_tensors.inner_tensors(value)
        if list(inner) != names or wrapper_tensors.context_of(value) != context:
            raise StructureInDoubt
        return inner.values()

    return tensors


class _Shard:
    """Return a DTensor's local shard if its placement is unchanged: usually the spec is the same object."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec

    def __call__(self, value: Any, answers: Answers) -> Iterable[Any]:
        spec = value._spec
        if spec is not self._spec:
            if not is_placed_alike(spec, self._spec):
                raise StructureInDoubt
            self._spec = spec
        return (value._local_tensor,)


def _ask_state(value: Any, answers: Answers) -> Iterable[Any]:
    if not is_stateful(value):
        raise StructureInDoubt
    recorded = answers.setdefault(id(value), [])
    try:
        recorded.append((value, loader_fingerprint.state_dict_with_arguments(value), None))
    except Exception as error:
        recorded.append((value, None, error))
        raise
    return (recorded[-1][1],)


def _same(keys: list[Any], expected: list[Any], kinds: list[type]) -> bool:
    return keys == expected and list(map(type, keys)) == kinds


def _key_text(keys: Iterable[object]) -> str:
    return dumps([key_tree(key, ()) for key in keys])


def _is_simple(node: Node) -> bool:
    return node.kind is dict and _COMPARABLE.issuperset(map(type, node.detail[0]))


def picker(indices: list[int]) -> Pick:
    """Return a function that takes the values at `indices` from a list."""
    if indices == list(range(indices[0], indices[0] + len(indices)) if indices else []):
        return operator.itemgetter(slice(indices[0], indices[-1] + 1) if indices else slice(0))
    return operator.itemgetter(*indices)
