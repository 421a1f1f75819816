"""One capture of a state: its live tensors, the values that cannot change any more, and the checks of both.

Invariants:

- A tensor that has no longer its known form, or does not lie within its storage, is found. No tensor is held for that.
- Before every commit the code of a restore reads every byte of the tree and the header of the tensor file. Tensors and
  arrays are compared only by dtype and shape. Most of a tree is its structure, which captures share, so the structure
  is decoded once. Every other value is decoded at every save; long runs of numbers piece by piece, because the decoder
  holds the GIL.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from tierd.core.errors import StateMismatch, StateRefused
from tierd.state.kinds import stored_arrays
from tierd.state.kinds.stored_arrays import check_view
from tierd.state.single_values import TensorForm, encode, form_of, path_text, span_of
from tierd.state.state_tree import Path
from tierd.state.structure import MOST_ADDED, picker
from tierd.state.tensor_file import TensorEntry, TensorFileLayout
from tierd.state.tensor_header import parse_header
from tierd.state.tree_parser import DECODE_ERRORS, check_depth, decoder, hole_paths

_LARGE = 1 << 20  # bytes
_storage, _nbytes = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes


class TensorForms:
    """The forms of tensors, compared without holding any tensor."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, TensorForm]]) -> None:
        listed = list(pairs)
        self._forms = [(form, tensor.requires_grad) for tensor, form in listed]
        self._guard = _guard([tensor for tensor, _ in listed])
        self._guarded = list(range(len(listed)))
        self._alone: list[int] = []  # indices of the tensors that the guard does not cover
        self._pick = picker(self._guarded)

    def insert(self, at: int, tensor: torch.Tensor) -> None:
        self._forms.insert(at, (form_of(tensor), tensor.requires_grad))
        self._guarded = [index + (index >= at) for index in self._guarded]
        self._alone = [at, *(index + (index >= at) for index in self._alone)]
        self._pick = picker(self._guarded)

    def matches(self, tensors: list[torch.Tensor]) -> bool:
        if len(tensors) != len(self._forms):
            return False
        if self._guard is not None and len(self._alone) <= MOST_ADDED**2:
            guarded = self._pick(tensors)
            if torch.is_grad_enabled():
                passes = self._guard(*guarded)
            else:
                with torch.enable_grad():  # because with grad disabled the guard ignores requires_grad
                    passes = self._guard(*guarded)
            if passes and all(_form_of(tensors[index]) == self._forms[index] for index in self._alone):
                return True
        if list(map(_form_of, tensors)) != self._forms:
            return False
        if self._alone:
            self._guard, self._guarded, self._alone = _guard(tensors), list(range(len(tensors))), []
            self._pick = picker(self._guarded)
        return True


class TensorExtents:
    """The extents of tensors in their storages, so that no tensor is read beyond a storage that was freed or shrunk.

    Freeing memory usually changes a tensor's address too, so only tensors with a new address and large tensors are
    checked. A small tensor is missed only if its memory was freed and a smaller block was allocated at the same
    address.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._spans = list(map(span_of, tensors))
        self._sizes = [tensor.element_size() for tensor in tensors]
        self._large = [index for index, tensor in enumerate(tensors) if tensor.nbytes >= _LARGE]

    def insert(self, at: int, tensor: torch.Tensor) -> None:
        self._spans.insert(at, span_of(tensor))
        self._sizes.insert(at, tensor.element_size())
        self._large = [index + (index >= at) for index in self._large] + [at] * (tensor.nbytes >= _LARGE)

    def matches(self, tensors: list[torch.Tensor], moved: Iterable[int] = ()) -> bool:
        """Whether the large tensors, and those at the indices `moved`, lie entirely within their storages."""
        pick = picker([*self._large, *moved])
        checked = pick(tensors)
        begins = map(operator.mul, map(torch.Tensor.storage_offset, checked), pick(self._sizes))
        ends = map(operator.add, begins, pick(self._spans))
        return all(map(operator.le, ends, map(_nbytes, map(_storage, checked))))


def _form_of(tensor: torch.Tensor) -> tuple[TensorForm, bool]:
    return form_of(tensor), tensor.requires_grad


def _guard(tensors: list[torch.Tensor]) -> Callable[..., bool] | None:
    """Return torch's own check of many tensors' types, dispatch keys, dtypes, devices, shapes and strides in one call.

    It is ten times as fast as asking each tensor, and holds none. It is private to torch, so tensors that it does not
    confirm are compared one by one, and all of them where torch lacks it.
    """
    try:
        sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        with torch.enable_grad():
            kind: Any = torch._C._dynamo.guards.TensorGuards
            guards = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check if tensors and check(*tensors) else None
    except Exception:
        return None


# Bytes of a tree that are decoded within a few milliseconds, if the structure was decoded before, and if it was not.
_MAX_QUICK_BYTES, _MAX_QUICK_NEW_BYTES = 1 << 20, 1 << 16
_WINDOW = 1 << 16  # characters of a run that are decoded in one call, about half a millisecond


class DecodableText:
    """The parts that captures of one structure share: the pieces of their tree, the layout of their tensor file, and
    the forms of the tensors that lie in other ranks' files.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        layout: TensorFileLayout,
        elsewhere: Mapping[str, TensorEntry] = MappingProxyType({}),
        window: int = _WINDOW,
    ) -> None:
        self.pieces, self._window = pieces, window
        self._layout, self._elsewhere = layout, elsewhere
        self._json_decoder: json.JSONDecoder | None = None

    def is_decoded_soon(self) -> bool:
        """Whether decoding the structure takes at most a few milliseconds."""
        return self._json_decoder is not None or sum(map(len, self.pieces)) <= _MAX_QUICK_NEW_BYTES

    def is_checked_soon(self, tree: bytes) -> bool:
        """Whether `check` takes at most a few milliseconds."""
        return len(tree) <= (_MAX_QUICK_BYTES if self._json_decoder else _MAX_QUICK_NEW_BYTES)

    def check(self, tree: bytes, pause: Callable[[], None] | None = None) -> None:
        """Decode a tree that has these pieces, as a restore does. Any thread may call this.

        `pause` is called about every millisecond while a long run is decoded. Raises `StateRefused`, which names the
        path, if a restore could not decode the tree.
        """
        if self._json_decoder is None:
            self._json_decoder = self._decode_structure()
        text, at, last = str(tree, "utf-8"), 0, len(self.pieces) - 1
        for number, piece in enumerate(self.pieces):
            if not text.startswith(piece, at):
                _refuse((), "its tree is not what was put together")
            at += len(piece)
            if number < last:
                try:
                    at = _end(self._json_decoder, text, at, pause, self._window)
                except DECODE_ERRORS as error:
                    _refuse(next(islice(hole_paths(self.pieces), number, None)), error)
        if at != len(text):
            _refuse((), "its tree has more in it than was put together")

    def _decode_structure(self) -> json.JSONDecoder:
        """Decode the pieces with empty holes. Returns the decoder for the holes' values."""
        try:
            parsed = parse_header(self._layout.header, self._layout.size)
            if parsed.elsewhere.keys() != self._elsewhere.keys():
                _refuse((), "its header does not name the tensors elsewhere")
            entries = parsed.entries | dict(self._elsewhere)
        except StateMismatch as error:
            _refuse((), error)
        json_decoder = decoder(entries.__getitem__, _viewed, _array, _values)
        text = "[]".join(self.pieces)
        try:
            check_depth(json_decoder.decode(text))
        except DECODE_ERRORS as error:
            _refuse(_culprit(json_decoder, text), error)
        return json_decoder


def _end(json_decoder: json.JSONDecoder, text: str, at: int, pause: Callable[[], None] | None, window_size: int) -> int:
    """Decode the value that begins at `at`. Returns the index after it."""
    begin = at + 1
    while text[at] == "[":
        window = text[begin : begin + window_size]
        last = window.find("]")
        cut = window.rfind(",") if last < 0 else last
        piece = window[:cut]
        if cut < 0 or '"' in piece or "[" in piece or (not piece and (last < 0 or begin > at + 1)):
            # Not a list of numbers alone, because strings may contain brackets and commas; or a superfluous comma.
            break
        json_decoder.decode(f"[{piece}]")
        begin += cut + 1
        if last >= 0:
            return begin
        if pause is not None:
            pause()
    return json_decoder.raw_decode(text, at)[1]


def _viewed(entry: TensorEntry, dtype: torch.dtype) -> TensorEntry:
    check_view(entry.dtype, entry.shape, dtype)
    return entry


def _array(entry: TensorEntry, dtype: str, shape: tuple[int, ...]) -> None:
    stored_arrays.check_array_form(entry.nbytes, dtype, shape)


def _values(entry: TensorEntry, kind: str, size: int) -> list[object]:
    stored_arrays.check_run_form(entry.dtype, entry.shape, kind, size)
    return []


def _culprit(json_decoder: json.JSONDecoder, text: str) -> Path:
    """Return the path of the entry that cannot be decoded; empty if the state itself cannot."""
    root = json.loads(text)
    for name, value in root.items() if "$dict" not in root else root["$dict"]:
        try:
            json_decoder.decode(json.dumps(value))
        except DECODE_ERRORS:
            return (name,) if type(name) is str else (json_decoder.decode(json.dumps(name)),)
    return ()


def _refuse(path: Path, why: object) -> NoReturn:
    raise StateRefused(f"{path_text(path)}: it would not come back from a checkpoint: {why}; please report this")


_MAX_QUICK_ITEMS = 1 << 13  # values in sequences, or characters, that are encoded within a few milliseconds


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A state at one moment. Its tensors are live, so training may change them; its other values cannot change."""

    tensors: dict[str, torch.Tensor]  # by name, without an autograd graph, of a dtype that the tensor file holds
    # Those whose local shards are in `tensors`, each with the name of its shard
    dtensors: Sequence[tuple[str, torch.Tensor]]
    layout: TensorFileLayout  # the same object as in the previous capture while the tensors stay the same
    places: object  # a token; the same object as in the previous capture while every tensor keeps its name and address
    steady: object  # a token as `places`, but it ignores the tensors in `restless`
    # Names of tensors whose addresses change between captures, such as RNG states, which are made anew
    restless: frozenset[str]
    # Names of the tensors that the capture itself made, of arrays and generators; nothing else holds them
    copies: frozenset[str]
    devices: tuple[torch.device, ...]  # CUDA's that hold tensors; a copy from any other device blocks
    _skeleton: DecodableText
    _holes: Sequence[object]
    rounds: tuple[tuple[str, ...], ...] = ()  # as in `ReplicaShare`
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)  # all tensors, if there are rounds
    division: str = ""  # as `ReplicaShare.digest`
    senders: Mapping[int, tuple[int, int, bool]] = field(default_factory=dict)  # as in `ReplicaShare`

    def replicas(self, number: int) -> dict[str, torch.Tensor]:
        """Return the tensors that are the same on all ranks and that the save of this number compares."""
        names = self.rounds[number % len(self.rounds)] if self.rounds else ()
        return {name: self.whole[name] for name in names}

    def tree(self, pause: Callable[[], None] | None = None) -> bytes:
        """Return everything but the tensors as typed JSON, as it was at the capture. Any thread may call this.

        `pause` is called about every millisecond if encoding takes many. Raises `StateRefused` if the tree is too
        large.
        """
        return encode(self._skeleton.pieces, self._holes, pause)

    def is_encoded_soon(self) -> bool:
        """Whether `tree` and `check` take at most a few milliseconds together."""
        hole_items = sum(len(hole) for hole in self._holes if isinstance(hole, tuple | dict | str | bytes))
        return hole_items <= _MAX_QUICK_ITEMS and self._skeleton.is_decoded_soon()

    def is_checked_soon(self, tree: bytes) -> bool:
        return self._skeleton.is_checked_soon(tree)

    def check(self, tree: bytes, pause: Callable[[], None] | None = None) -> None:
        """Decode the result of `tree()`, as `DecodableText.check`; fast if the structure has been decoded before."""
        self._skeleton.check(tree, pause)
