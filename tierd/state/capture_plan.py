"""The structure that one full walk of a state found, by which later states are captured without a full walk.

Invariant: `follow` succeeds only for a state of the same structure. It compares types, keys, lengths, the tensors'
forms, and which tensors are one memory.

Only the structure of an earlier state is kept: no tensor and no value. Addresses are kept as plain ints. Keeping them
is safe although memory is freed and reused, because an equal address is never taken as proof of the same tensor. All
tensors of this capture are alive while their addresses are compared with each other, so equal addresses mean one memory
now. The earlier addresses only decide whether that comparison would have the same result as last time.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Mapping, Sequence
from itertools import chain, compress, count
from json.encoder import encode_basestring as quoted
from types import MappingProxyType
from typing import Any

import torch

from tierd.state.capture import Capture, DecodableText, TensorExtents, TensorForms
from tierd.state.encoder import Answers, Encoder
from tierd.state.kinds.stored_arrays import STORED_AS
from tierd.state.single_values import TensorForm, form_of, is_name, is_storable, storable_tensor
from tierd.state.state_tree import MAX_DEPTH, Node, NodeForm, tensor_name_of, text_pieces
from tierd.state.structure import MOST_ADDED, StructureInDoubt, StructureLevel, picker
from tierd.state.tensor_file import METADATA, TensorEntry, TensorFileLayout

_NOWHERE: Mapping[str, TensorEntry] = MappingProxyType({})


class CapturePlan:
    """A state's structure. `elsewhere` are the forms of the tensors that the tree names and the layout leaves out."""

    def __init__(
        self, walk: Encoder, root: Node, layout: TensorFileLayout, elsewhere: Mapping[str, TensorEntry] = _NOWHERE
    ) -> None:
        self._text, self._elsewhere = walk.text, elsewhere
        self._levels: list[StructureLevel] = []
        self._nodes: list[list[Node]] = []
        shards: list[Node] = []
        nodes = [root]
        while nodes:
            level = StructureLevel(nodes, len(self._levels))
            self._levels.append(level)
            self._nodes.append(nodes)
            shards += [nodes[index] for index in level.shards_at]
            nodes = [child for index in (*level.dicts_at, *level.opened_at) for child in nodes[index].children]
        tensors = self._tensor_nodes()
        self._forms = TensorForms([node.detail for node in tensors])
        self._extents = TensorExtents([node.detail[0] for node in tensors])
        self._addresses = [node.detail[0].data_ptr() for node in tensors]
        self._devices = tuple(
            {form[1]: None for _, form in (node.detail for node in tensors) if form[1].type == "cuda"}
        )
        for node in tensors:
            node.detail = _tensor_detail(*node.detail)
        self._names = list(walk.tensors)
        self._shard_names = [self._names[node.index] for node in shards]
        self._restless = self._copies = frozenset[str]()
        self._restless_at: list[int] = []
        self._resting: frozenset[int] = frozenset()
        self.added: dict[str, torch.Tensor] = {}  # by the last `follow`; not yet in the layout
        self._number()
        self._restless = self._copies
        self.lay_out(layout)

    def _tensor_nodes(self) -> list[Node]:
        return [nodes[at] for nodes, level in zip(self._nodes, self._levels, strict=True) for at in level.tensors_at]

    def lay_out(self, layout: TensorFileLayout) -> None:
        self._layout, self._skeleton = layout, DecodableText(text_pieces(self._text), layout, self._elsewhere)

    def _number(self) -> None:
        tensors, pairs = self._tensor_nodes(), list(zip(self._nodes, self._levels, strict=True))
        stored = [nodes[index] for nodes, level in pairs for index in level.arrays_at]
        order = [nodes[index].index for nodes, level in pairs for index in level.holes_at]
        self._in_order = picker(sorted(range(len(order)), key=order.__getitem__))
        numbers = [node.index for node in tensors]
        # Name index -> first tensor node with it.
        first = dict(zip(reversed(numbers), range(len(numbers) - 1, -1, -1), strict=True))
        firsts = [(at, tensors[at].detail) for at in sorted(first.values())]
        self._odd = [at for at, (is_odd, _, _) in firsts if is_odd]
        self._tied = [(at, first[number]) for at, number in enumerate(numbers) if first[number] != at]
        # Without empty tensors, which are never tied.
        self._first_indices = [at for at, (_, _, is_empty) in firsts if not is_empty]
        self._pick_firsts = picker(self._first_indices)
        self._first_forms = [form for _, (_, form, is_empty) in firsts if not is_empty]
        names = self._names
        places = first | {node.index: len(tensors) + index for index, node in enumerate(stored)}
        self._stored_at = [places[index] for index in range(len(names))]
        self._stored = picker(self._stored_at)
        self._name_of = [names[node.index] for node in tensors]
        self._places, self._steady = object(), object()
        self._copies = frozenset(names[node.index] for node in stored)

    def capture(
        self, tensors: dict[str, torch.Tensor], dtensors: Sequence[tuple[str, torch.Tensor]], holes: Sequence[object]
    ) -> Capture:
        return Capture(
            tensors,
            dtensors,
            self._layout,
            self._places,
            self._steady,
            self._restless,
            self._copies,
            self._devices,
            self._skeleton,
            holes,
        )

    def follow(self, state: Mapping[str, object], answers: Answers) -> Capture:
        """Capture a state that has this structure.

        Raises any `Exception` if it may have another one; `answers` then holds the states that objects have already
        returned.
        """
        if not isinstance(state, Mapping):
            raise StructureInDoubt
        values: list[Any] = [dict(state)]
        alive = []  # keeps the values alive, because their addresses are compared below
        holes: list[object] = []
        tensors: list[torch.Tensor] = []
        stored: list[torch.Tensor] = []
        dtensors: list[torch.Tensor] = []
        added: list[tuple[Node, str, Any]] = []
        for depth, level in enumerate(self._levels):
            level.check_kinds(values)
            holes += level.holes(values)
            tensors += level.tensors(values)
            stored += level.arrays(values)
            dtensors += level.dtensors(values)
            alive.append(values)
            new: list[tuple[int, str, Any]] = []
            values = level.children(values, answers, new)
            added += [(self._nodes[depth][level.dicts_at[at]], key, value) for at, key, value in new]
        if values:
            raise StructureInDoubt
        self._check_tensors(tensors)
        captured = [*tensors, *stored]
        for index in self._odd:
            captured[index] = storable_tensor(captured[index])
        by_name = dict(zip(self._names, self._stored(captured), strict=True))
        if added:
            by_name = self._add(by_name, added)
        return self.capture(by_name, list(zip(self._shard_names, dtensors, strict=True)), self._in_order(holes))

    def _add(self, by_name: dict[str, torch.Tensor], added: list[tuple[Node, str, Any]]) -> dict[str, torch.Tensor]:
        """Append plain tensors to mappings of names in the structure, and add them to `by_name`.

        Raises `StructureInDoubt` if only a full walk can encode the additions; nothing has changed then.
        """
        addresses, names = {*self._addresses}, {*by_name, METADATA}
        depths = {id(node): depth for depth, nodes in enumerate(self._nodes) for node in nodes if node.end >= 0}
        for parent, key, tensor in added:
            path = (*parent.path, key)
            simple = parent.end >= 0 and is_name(key) and isinstance(tensor, torch.Tensor) and is_storable(tensor)
            if not simple or not tensor.nbytes or len(added) > MOST_ADDED or len(path) >= MAX_DEPTH:
                raise StructureInDoubt
            is_plain = tensor.dtype not in STORED_AS and not tensor.is_conj() and not tensor.is_neg()
            if not is_plain or tensor_name_of(path) in names or tensor.data_ptr() in addresses:
                raise StructureInDoubt
            addresses.add(tensor.data_ptr())
            names.add(tensor_name_of(path))
        items = list(by_name.items())
        for parent, key, tensor in added:
            name = tensor_name_of((*parent.path, key))
            self.added[name] = storable_tensor(tensor)
            items.insert(self._insert(parent, depths[id(parent)], key, name, tensor), (name, self.added[name]))
        self._pick_firsts, self._stored = picker(self._first_indices), picker(self._stored_at)
        self._places, self._steady = object(), object()
        return dict(items)

    def _insert(self, parent: Node, depth: int, key: str, name: str, tensor: torch.Tensor) -> int:
        """Append a tensor node to the children of `parent`. Returns the number of names before its name."""
        form = form_of(tensor)
        node = Node(NodeForm.TENSOR, type(tensor), -1, _tensor_detail(tensor, form))
        if form[1].type == "cuda":
            self._devices = tuple(dict.fromkeys((*self._devices, form[1])))
        dicts = [self._nodes[depth][at] for at in self._levels[depth].dicts_at]
        before = dicts[: next(at for at, mapping in enumerate(dicts) if mapping is parent)]
        self._nodes[depth + 1].insert(sum(len(mapping.children) for mapping in before) + len(parent.children), node)
        parent.children = [*parent.children, node]
        parent.detail = (*parent.detail[0], key), parent.detail[1]
        number, end = self._names_before(parent, node), parent.end
        for other_node in chain.from_iterable(self._nodes):
            if other_node.index >= number and (other_node.form is NodeForm.TENSOR or other_node.form is NodeForm.ARRAY):
                other_node.index += 1
            if other_node.end >= end:
                other_node.end += 1
        node.index = number
        self._names.insert(number, name)
        self._text.insert(end, f',{quoted(key)}:{{"$tensor":{quoted(name)}}}')
        for level in (depth, depth + 1):
            self._levels[level] = StructureLevel(self._nodes[level], level)
        at = self._tensor_nodes().index(node)
        self._forms.insert(at, tensor)
        self._extents.insert(at, tensor)
        self._addresses.insert(at, tensor.data_ptr())
        self._resting |= {tensor.data_ptr()}
        self._restless_at = _shifted(self._restless_at, at)
        self._odd = [*_shifted(self._odd, at), *([at] if node.detail[0] else [])]
        self._tied = [(index + (index >= at), first + (first >= at)) for index, first in self._tied]
        position = bisect.bisect_left(self._first_indices, at)
        self._first_indices = _shifted(self._first_indices, at)
        self._first_indices.insert(position, at)
        self._first_forms.insert(position, form)
        self._stored_at = _shifted(self._stored_at, at)
        self._stored_at.insert(number, at)
        self._name_of.insert(at, name)
        return number

    def _names_before(self, parent: Node, node: Node) -> int:
        """Return how many names a walk has given when it reaches the node."""
        *_, sibling, _ = parent.children
        if sibling.form is NodeForm.TENSOR and not self._tied:
            return sibling.index + 1  # the sibling got its name at its own position, because no tensor is tied
        number, todo = 0, [self._nodes[0][0]]
        while (current := todo.pop()) is not node:
            if current.children:
                todo += current.children[::-1]
            elif current.index >= number and (current.form is NodeForm.TENSOR or current.form is NodeForm.ARRAY):
                number = current.index + 1
        return number

    def _check_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Check that the tensors have the expected forms, and that the same tensors among them share memory."""
        if not self._forms.matches(tensors):
            raise StructureInDoubt
        # Both lists have the same length, because the forms fit.
        if all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), self._addresses)):
            if not self._extents.matches(tensors):
                raise StructureInDoubt
            return
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        changed = list(compress(count(), map(operator.ne, addresses, self._addresses)))
        if not self._extents.matches(tensors, changed):
            raise StructureInDoubt
        for index in self._restless_at:
            self._addresses[index] = addresses[index]
        moved = {addresses[index] for index in self._restless_at}
        self._places = object()
        if addresses == self._addresses and len(moved) == len(self._restless_at) and self._resting.isdisjoint(moved):
            return  # only restless tensors moved, each to an address of its own
        if any(addresses[index] != addresses[first] for index, first in self._tied):
            raise StructureInDoubt
        first_addresses = self._pick_firsts(addresses)
        if len(set(first_addresses)) != len(first_addresses) and len(
            set(zip(first_addresses, self._first_forms, strict=True))
        ) != len(first_addresses):
            raise StructureInDoubt
        restless = {*self._restless_at, *changed}
        self._addresses, self._steady = addresses, object()
        self._restless_at = sorted(restless)
        self._restless |= {self._name_of[index] for index in restless}
        self._resting = frozenset(address for index, address in enumerate(addresses) if index not in restless)


def _tensor_detail(tensor: torch.Tensor, form: TensorForm) -> tuple[bool, TensorForm, bool]:
    """Return the facts that a plan keeps of a tensor: whether it is odd, its form, and whether it is empty."""
    return _is_odd(tensor, form), form, not tensor.numel()


def _is_odd(tensor: torch.Tensor, form: tuple[Any, ...]) -> bool:
    return tensor.requires_grad or form[0] in STORED_AS or form[4] or form[5]


def _shifted(indices: list[int], at: int) -> list[int]:
    """Return the indices after an insertion at index `at`."""
    return [index + (index >= at) for index in indices]
