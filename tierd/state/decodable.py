"""Check that an encoded state can be decoded; done for every save before its commit.

Invariant: the code of a restore reads every byte of the tree and the header of the tensor file. Tensors and arrays are
compared only by dtype and shape. Most of a tree is its structure, which captures share, so the structure is decoded
once. Every other value is decoded at every save; long runs of numbers piece by piece, because the decoder holds the
GIL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NoReturn

import torch

from tierd.core.errors import StateMismatch, StateRefused
from tierd.state.containers import Path
from tierd.state.kinds import numpy_arrays, packed_tensors
from tierd.state.paths import places
from tierd.state.stored_dtypes import check_view
from tierd.state.tensor_file import TensorEntry, TensorFileLayout, parse_header
from tierd.state.tree_parser import DEFECTS, check_depth, decoder
from tierd.state.values import show

_MAX_QUICK_BYTES = (
    1 << 20
)  # bytes of a tree that are decoded within a few milliseconds if the structure was decoded before
_MAX_QUICK_NEW_BYTES = 1 << 16  # the same if the structure was not decoded before
_WINDOW = 1 << 16  # characters of a run that are decoded in one call, about half a millisecond


class Skeleton:
    """The parts that captures of one structure share: the pieces of their tree, and the layout of their tensor file.

    Args:
        pieces: the text before, between and after the holes.
        layout: of the tensor file.
        window: characters of a run that are decoded in one call.
    """

    def __init__(self, pieces: Sequence[str], layout: TensorFileLayout, window: int = _WINDOW) -> None:
        self.pieces, self._window = pieces, window
        self._layout = layout
        self._json_decoder: json.JSONDecoder | None = None

    def is_decoded_soon(self) -> bool:
        """Return whether decoding the structure takes at most a few milliseconds."""
        return self._json_decoder is not None or sum(map(len, self.pieces)) <= _MAX_QUICK_NEW_BYTES

    def is_checked_soon(self, tree: bytes) -> bool:
        """Return whether `check` takes at most a few milliseconds."""
        return len(tree) <= (_MAX_QUICK_BYTES if self._json_decoder else _MAX_QUICK_NEW_BYTES)

    def check(self, tree: bytes, pause: Callable[[], None] | None = None) -> None:
        """Decode a tree that has these pieces.

        Args:
            pause: called about every millisecond while a long run is decoded.

        Raises:
            StateRefused: a restore could not decode the tree; the message names the path.
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
                except DEFECTS as error:
                    _refuse(next(islice(places(self.pieces), number, None)), error)
        if at != len(text):
            _refuse((), "its tree has more in it than was put together")

    def _decode_structure(self) -> json.JSONDecoder:
        """Decode the pieces with empty holes. Returns the decoder for the holes' values."""
        try:
            entries = parse_header(self._layout.header, self._layout.size).entries
        except StateMismatch as error:
            _refuse((), error)
        json_decoder = decoder(entries.__getitem__, _viewed, _array, _values)
        text = "[]".join(self.pieces)
        try:
            check_depth(json_decoder.decode(text))
        except DEFECTS as error:
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
    numpy_arrays.check_form(entry.nbytes, dtype, shape)


def _values(entry: TensorEntry, kind: str, size: int) -> list[object]:
    packed_tensors.check_form(entry.dtype, entry.shape, kind, size)
    return []


def _culprit(json_decoder: json.JSONDecoder, text: str) -> Path:
    """Return the path of the entry that cannot be decoded; empty if the state itself cannot."""
    root = json.loads(text)
    for name, value in root.items() if "$dict" not in root else root["$dict"]:
        try:
            json_decoder.decode(json.dumps(value))
        except DEFECTS:
            return (name,) if type(name) is str else (json_decoder.decode(json.dumps(name)),)
    return ()


def _refuse(path: Path, why: object) -> NoReturn:
    raise StateRefused(f"{show(path)}: it would not come back from a checkpoint: {why}; please report this")
