"""The structure of a state, level by level: what says whether another state has it, in few calls.

Law: what differs in any way that the JSON, the names or the layout could show is doubted. Values are compared in lists,
by calls that loop in C: asking one after the other would take longer than copying a small model.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, count
from typing import Any

import torch

from tierd.client import arrays, datastate
from tierd.client.values import (
    IMMUTABLE,
    TensorForm,
    dumps,
    form_of,
    is_run,
    is_stateful,
    key_tree,
    made,
    span_of,
    why_array_refused,
)
from tierd.client.walk import Answers, Form, Node

Pick = Callable[[Any], Sequence[Any]]

_LARGE = 1 << 20  # bytes
_storage, _nbytes = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_COMPARABLE = frozenset((str, int, bool, bytes, type(None)))  # keys that are the same if type and value are


class Doubt(Exception):
    """The state may not have the structure it had."""


class Level:
    """All the values at one depth, in one list, so that few calls in C compare them and find those one level down."""

    def __init__(self, nodes: list[Node], depth: int) -> None:
        at: dict[Form, list[int]] = {form: [] for form in Form}
        for index, node in enumerate(nodes):
            at[node.form].append(index)
        self._kinds = [node.kind for node in nodes]
        self._loose = frozenset(at[Form.SCALAR])
        self._scalars = picker(at[Form.SCALAR])
        self.tensors_at, self.tensors = at[Form.TENSOR], picker(at[Form.TENSOR])
        self.arrays_at, self._arrays = at[Form.ARRAY], [(index, nodes[index].detail) for index in at[Form.ARRAY]]
        kept = [*at[Form.MADE], *at[Form.RUN]]
        self.holes_at = [*at[Form.SCALAR], *kept]
        self._keep: list[tuple[int, Callable[[Any], object]]] = [
            (index, _Made(depth) if nodes[index].form is Form.MADE else _Run(nodes[index].detail)) for index in kept
        ]
        self.dicts_at = [index for index in at[Form.MAPPING] if _is_simple(nodes[index])]
        self._dicts = picker(self.dicts_at)
        self._lengths = [len(nodes[index].detail[0]) for index in self.dicts_at]
        self._keys = [key for index in self.dicts_at for key in nodes[index].detail[0]]
        self._key_kinds = list(map(type, self._keys))
        simple = set(self.dicts_at)
        self.others_at = [
            index for form in (Form.MAPPING, Form.SEQUENCE, Form.STATEFUL) for index in at[form] if index not in simple
        ]
        self._others = [(index, _opener(nodes[index])) for index in self.others_at]

    def check_kinds(self, values: list[Any]) -> None:
        kinds = list(map(type, values))
        if kinds == self._kinds:
            return
        if len(kinds) != len(self._kinds):
            raise Doubt
        for index in compress(count(), map(operator.is_not, kinds, self._kinds)):
            if index not in self._loose or kinds[index] not in IMMUTABLE:
                raise Doubt

    def holes(self, values: list[Any]) -> list[object]:
        """What is in the level's holes now."""
        return [*self._scalars(values), *(keep(values[index]) for index, keep in self._keep)]

    def arrays(self, values: list[Any]) -> list[torch.Tensor]:
        """Copies of the NumPy arrays."""
        return [_array(values[index], form) for index, form in self._arrays]

    def children(self, values: list[Any], answers: Answers) -> list[Any]:
        """The values one level down, in the order in which the plan has their nodes."""
        found: list[Any] = []
        if self._lengths:
            dicts = list(map(dict.copy, self._dicts(values)))  # each at once: another thread may still change it
            keys = list(chain.from_iterable(dicts))
            if list(map(len, dicts)) != self._lengths or not _same(keys, self._keys, self._key_kinds):
                raise Doubt
            found.extend(chain.from_iterable(map(dict.values, dicts)))
        for index, opened in self._others:
            found += opened(values[index], answers)
        return found


class Forms:
    """What tensors look like: compared without holding any of them."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, TensorForm]]) -> None:
        listed = list(pairs)
        self._forms = [(form, tensor.requires_grad) for tensor, form in listed]
        self._guard = _guard([tensor for tensor, _ in listed])

    def fit(self, tensors: list[torch.Tensor]) -> bool:
        if len(tensors) != len(self._forms):
            return False
        if self._guard is not None:
            if torch.is_grad_enabled():
                fits = self._guard(*tensors)
            else:
                with torch.enable_grad():  # without, it does not tell who requires a gradient
                    fits = self._guard(*tensors)
            if fits:
                return True
        return [(form_of(tensor), tensor.requires_grad) for tensor in tensors] == self._forms


class Extents:
    """How far tensors reach into their memory, so that none is read beyond its end where somebody freed or shrank it.

    What frees memory moves it, too. So only what moved is looked at, and what is large: a small one would have to be
    freed and given less memory at the very same place to be missed.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._spans = list(map(span_of, tensors))
        self._sizes = [tensor.element_size() for tensor in tensors]
        self._large = [index for index, tensor in enumerate(tensors) if tensor.nbytes >= _LARGE]

    def fit(self, tensors: list[torch.Tensor], moved: Iterable[int] = ()) -> bool:
        """Whether the large ones, and those at the indices `moved`, lie in their memory whole."""
        pick = picker([*self._large, *moved])
        chosen = pick(tensors)
        begins = map(operator.mul, map(torch.Tensor.storage_offset, chosen), pick(self._sizes))
        ends = map(operator.add, begins, pick(self._spans))
        return all(map(operator.le, ends, map(_nbytes, map(_storage, chosen))))


def _guard(tensors: list[torch.Tensor]) -> Callable[..., bool] | None:
    """torch's own comparison of many tensors' types, dispatch keys, dtypes, devices, shapes and strides in one call,
    ten times as quick as asking each. It is private to torch: what it does not confirm is compared one by one, and
    where it is missing everything is. It holds no tensor."""
    try:
        sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        with torch.enable_grad():
            kind: Any = torch._C._dynamo.guards.TensorGuards
            guards = kind(
                *tensors,
                dynamic_dims_sizes=sizes,
                dynamic_dims_strides=strides,
            )
        check: Callable[..., bool] = guards.check
        return check if tensors and check(*tensors) else None
    except Exception:
        return None


class _Run:
    """Keeps a sequence of immutable values."""

    def __init__(self, maxlen: int | None) -> None:
        self._maxlen = maxlen

    def __call__(self, value: Any) -> object:
        parts = tuple(value)
        if not is_run(parts) or (type(value) is deque and value.maxlen != self._maxlen):
            raise Doubt
        return parts


class _Made:
    """Makes the JSON of a value that lies this deep, or less: what is too deep there is doubted."""

    def __init__(self, depth: int) -> None:
        self._path = (None,) * depth

    def __call__(self, value: Any) -> object:
        return made(value, self._path)


def _array(value: Any, form: tuple[str, tuple[int, ...]]) -> torch.Tensor:
    if type(value) is torch.Generator:
        state = value.get_state()
        if (str(value.device), state.shape) != form:
            raise Doubt
        return state
    if (value.dtype.str, value.shape) != form or why_array_refused(value):
        raise Doubt
    return arrays.tensor_of(value)


def _opener(node: Node) -> Callable[[Any, Answers], Iterable[Any]]:
    """What gives the values inside one value, or doubts that it is built like the node."""
    if node.form is Form.STATEFUL:
        return _asked
    if node.form is Form.SEQUENCE:
        length, maxlen = node.detail

        def parts(value: Any, answers: Answers) -> Iterable[Any]:
            found = tuple(value)
            if len(found) != length or (type(value) is deque and value.maxlen != maxlen):
                raise Doubt
            return found

        return parts
    keys, extra = list(node.detail[0]), node.detail[1]
    kinds = list(map(type, keys))
    text = None if _COMPARABLE.issuperset(kinds) else _key_text(keys)

    def inner(value: Any, answers: Answers) -> Iterable[Any]:
        pairs = tuple(value.items())
        here = [key for key, _ in pairs]
        same = _same(here, keys, kinds) if text is None else _key_text(here) == text
        attributes = dict(vars(value)) if type(value) in (OrderedDict, Counter) else {}
        if not same or tuple(attributes) != (extra if type(value) is OrderedDict else ()):
            raise Doubt
        if type(value) is defaultdict and value.default_factory is not extra:
            raise Doubt
        return [*(value for _, value in pairs), *attributes.values()]

    return inner


def _asked(value: Any, answers: Answers) -> Iterable[Any]:
    if not is_stateful(value):
        raise Doubt
    said = answers.setdefault(id(value), [])
    try:
        said.append((value, datastate.ask(value), None))
    except Exception as error:
        said.append((value, None, error))
        raise
    return (said[-1][1],)


def _same(keys: list[Any], known: list[Any], kinds: list[type]) -> bool:
    return keys == known and list(map(type, keys)) == kinds


def _key_text(keys: Iterable[object]) -> str:
    return dumps([key_tree(key, ()) for key in keys])


def _is_simple(node: Node) -> bool:
    return node.kind is dict and _COMPARABLE.issuperset(map(type, node.detail[0]))


def picker(indices: list[int]) -> Pick:
    """What takes the values at `indices` out of a list."""
    if indices == list(range(indices[0], indices[0] + len(indices)) if indices else []):
        return operator.itemgetter(slice(indices[0], indices[-1] + 1) if indices else slice(0))
    return operator.itemgetter(*indices)
