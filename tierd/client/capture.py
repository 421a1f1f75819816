"""Capturing a state, save after save: what did not change since the last one is not worked out again.

Law: a capture is what `flatten` and `plan_layout` would have given for the same state at the same moment, names, bytes
and refusals. The structure that the last full walk found is only a guess, and every part of it is compared with the
state: types, keys, lengths, the tensors' forms, which of them are one memory. On any doubt the full walk is done again.
Only which tensors an optimizer moves is not looked at anew until parameters are frozen or freed: it decides their order
in the file and nothing else.

Nothing of an earlier state is kept but its structure: no tensor, no value. Addresses are kept, as plain ints, and that
is safe although memory is freed and used again: an address is never taken for a sign that a tensor is the one of last
time. All tensors of this capture are alive while their addresses are compared with each other, so two that are equal
now are one memory now; the last addresses only say whether that comparison would come out as it did then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress, count
from typing import Any

import torch
from torch.optim import Optimizer

from tierd.client.owned import moving, optimizers_in, trained
from tierd.client.restorable import Skeleton
from tierd.client.structure import Doubt, Extents, Forms, Level, picker
from tierd.client.tensorfile import Layout, plan_layout
from tierd.client.tree import STORED_AS
from tierd.client.values import encode, plain
from tierd.client.walk import Answers, Node, Walk, uncollected

_MANY = 200_000  # values; a structure larger than that is not worth its memory between saves
_FEW = 1 << 13  # values in sequences, and characters, that are encoded within a few milliseconds
_address = torch.Tensor.data_ptr


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A state at one moment; its tensors are live and may change, the rest cannot.

    Attributes:
        tensors: as `Flattened.tensors`.
        layout: of their file; the same object as in the capture before while that has the same tensors.
        places: a token; the same object as in the capture before while every tensor has the name and lies in the place
            that it had.
        steady: another; it leaves the tensors in `restless` out.
        restless: names of the tensors that moved between captures of this structure (RNG states are made anew).
        copies: names of the tensors that the capture made, of arrays and generators; nothing else holds them.
        devices: CUDA devices where tensors lie; from others a copy blocks, and needs no care.
    """

    tensors: dict[str, torch.Tensor]
    layout: Layout
    places: object
    steady: object
    restless: frozenset[str]
    copies: frozenset[str]
    devices: tuple[torch.device, ...]
    _skeleton: Skeleton
    _holes: Sequence[object]

    def tree(self, pause: Callable[[], None] | None = None) -> bytes:
        """Everything but the tensors as typed JSON, as it was when captured. Any thread may ask, at any time.

        Args:
            pause: called about every millisecond where that takes many.

        Raises:
            StateRefused: it is too large.
        """
        return encode(self._skeleton.pieces, self._holes, pause)

    def is_encoded_soon(self) -> bool:
        """Whether `tree` and `check` take no longer than a few milliseconds together."""
        held = sum(len(hole) for hole in self._holes if isinstance(hole, tuple | str | bytes))
        return held <= _FEW and self._skeleton.is_decoded_soon()

    def is_checked_soon(self, tree: bytes) -> bool:
        """Whether `check` takes no longer than a few milliseconds."""
        return self._skeleton.is_checked_soon(tree)

    def check(self, tree: bytes, pause: Callable[[], None] | None = None) -> None:
        """Decode what `tree()` gave as a restore does, quickly where the structure has been decoded before. Any thread
        may ask.

        Args:
            pause: as for `tree`.

        Raises:
            StateRefused: it would not come back; names the path.
        """
        self._skeleton.check(tree, pause)


class Capturer:
    """Captures the states of one job, one after the other."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None
        self._layout: Layout | None = None
        self._moving: frozenset[str] = frozenset()
        self._trained: list[bool] = []

    def capture(self, state: Mapping[str, object]) -> Capture:
        """Take a state apart, as `flatten` does, and lay its tensors out. Calls every `state_dict()` once.

        Raises:
            StateRefused: as `flatten`, except that the size of the tree is looked at by `tree()`; or as `plan_layout`.
        """
        with uncollected():
            return self._capture(state)

    def _capture(self, state: Mapping[str, object]) -> Capture:
        answers: Answers = {}
        capture = None
        if self._plan is not None:
            with suppress(Exception):  # whatever it was: the full walk goes on from the answers, and names it
                capture = self._plan.follow(state, answers)
        optimizers, trains = _optimizers_of(state)  # behind the walk, because it leaves their parameters in the cache
        if capture is not None and trains == self._trained:
            return capture
        self._plan = None
        walk = Walk(answers)
        root = walk.begin(state)
        layout = self._laid_out(walk.tensors, optimizers)
        plan = _Plan(walk, root, layout)
        self._plan, self._trained = plan if walk.nodes <= _MANY else None, trains
        return plan.capture(walk.tensors, walk.holes)

    def _laid_out(self, tensors: Mapping[str, torch.Tensor], optimizers: list[Optimizer]) -> Layout:
        moved: frozenset[str] = frozenset()
        with suppress(Exception):  # as `_optimizers_of`
            moved = moving(optimizers, tensors)
        known = self._layout.entries if self._layout else {}
        same = tensors.keys() == known.keys() and all(
            (tensor.dtype, tensor.shape) == (known[name].dtype, known[name].shape) for name, tensor in tensors.items()
        )
        if self._layout is None or not same or moved != self._moving:
            self._layout, self._moving = plan_layout(tensors, moved), moved
        return self._layout


def _optimizers_of(state: Mapping[str, object]) -> tuple[list[Optimizer], list[bool]]:
    """The optimizers in a state, and which of their parameters they train."""
    try:
        optimizers = optimizers_in(state)
        return optimizers, trained(optimizers)
    except Exception:  # an object that does not like to be looked at: the order of tensors is not worth a save
        return [], []


class _Plan:
    """The structure that one full walk found, and how a state that has it is captured without another."""

    def __init__(self, walk: Walk, root: Node, layout: Layout) -> None:
        self._layout, self._skeleton = layout, Skeleton(walk.pieces(), layout)
        self._levels: list[Level] = []
        holes: list[int] = []
        tensors: list[Node] = []
        stored: list[Node] = []
        nodes = [root]
        while nodes:
            level = Level(nodes, len(self._levels))
            self._levels.append(level)
            holes += [nodes[index].index for index in level.holes_at]
            tensors += [nodes[index] for index in level.tensors_at]
            stored += [nodes[index] for index in level.arrays_at]
            nodes = [child for index in (*level.dicts_at, *level.others_at) for child in nodes[index].children]
        self._in_order = picker(_inverse(holes))
        self._forms = Forms([node.detail for node in tensors])
        self._extents = Extents([node.detail[0] for node in tensors])
        forms = [form for _, form in (node.detail for node in tensors)]
        self._devices = tuple({form[1]: None for form in forms if form[1].type == "cuda"})
        first: dict[int, int] = {}  # index of a name -> of the first tensor with it
        for index, node in enumerate(tensors):
            first.setdefault(node.index, index)
        self._odd = [index for index in first.values() if _is_odd(*tensors[index].detail)]
        self._tied = [(index, first[node.index]) for index, node in enumerate(tensors) if first[node.index] != index]
        seen = [index for index in first.values() if 0 not in forms[index][2]]  # an empty tensor is tied to none
        self._seen, self._seen_forms = picker(seen), [forms[at] for at in seen]
        names = list(walk.tensors)
        places = first | {node.index: len(tensors) + index for index, node in enumerate(stored)}
        self._names, self._stored = names, picker([places[index] for index in range(len(names))])
        self._name_of = [names[node.index] for node in tensors]
        self._addresses = [node.detail[0].data_ptr() for node in tensors]
        self._places, self._steady = object(), object()
        self._restless = self._copies = frozenset(names[node.index] for node in stored)
        self._restless_at: list[int] = []
        self._resting: frozenset[int] = frozenset()

    def capture(self, tensors: dict[str, torch.Tensor], holes: Sequence[object]) -> Capture:
        return Capture(
            tensors,
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
        """A capture of a state that has this structure.

        Raises:
            Exception: it may have another; `answers` then holds what objects said that were asked for their state.
        """
        if not isinstance(state, Mapping):
            raise Doubt
        values: list[Any] = [dict(state)]
        alive = []  # addresses are compared below
        holes: list[object] = []
        tensors: list[torch.Tensor] = []
        stored: list[torch.Tensor] = []
        for level in self._levels:
            level.check_kinds(values)
            holes += level.holes(values)
            tensors += level.tensors(values)
            stored += level.arrays(values)
            alive.append(values)
            values = level.children(values, answers)
        if values:
            raise Doubt
        self._check_tensors(tensors)
        found = [*tensors, *stored]
        for index in self._odd:
            found[index] = plain(found[index])
        named = dict(zip(self._names, self._stored(found), strict=True))
        return self.capture(named, self._in_order(holes))

    def _check_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Whether they have the forms that they had, and the same ones among them are one memory."""
        if not self._forms.fit(tensors):
            raise Doubt
        if all(map(operator.eq, map(_address, tensors), self._addresses)):  # as many as there were: the forms fit
            if not self._extents.fit(tensors):
                raise Doubt
            return
        addresses = list(map(_address, tensors))
        others = list(compress(count(), map(operator.ne, addresses, self._addresses)))
        if not self._extents.fit(tensors, others):
            raise Doubt
        for index in self._restless_at:
            self._addresses[index] = addresses[index]
        moved = {addresses[index] for index in self._restless_at}
        self._places = object()
        if addresses == self._addresses and len(moved) == len(self._restless_at) and self._resting.isdisjoint(moved):
            return  # only those moved that always do, each to a place of its own
        if any(addresses[index] != addresses[first] for index, first in self._tied):
            raise Doubt
        seen = self._seen(addresses)
        if len(set(seen)) != len(seen) and len(set(zip(seen, self._seen_forms, strict=True))) != len(seen):
            raise Doubt
        restless = {*self._restless_at, *others}
        self._addresses, self._steady = addresses, object()
        self._restless_at = sorted(restless)
        self._restless |= {self._name_of[index] for index in restless}
        self._resting = frozenset(address for index, address in enumerate(addresses) if index not in restless)


def _is_odd(tensor: torch.Tensor, form: tuple[Any, ...]) -> bool:
    return tensor.requires_grad or form[0] in STORED_AS or form[4] or form[5]


def _inverse(order: list[int]) -> list[int]:
    found = [0] * len(order)
    for place, index in enumerate(order):
        found[index] = place
    return found
