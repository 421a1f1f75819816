"""Whether what was encoded can be decoded: asked of every save before anybody commits it.

Law: every byte of the tree, and the header of the tensor file, are read by the code that a restore reads them with;
tensors and arrays are only compared by dtype and shape. Most of a tree is its structure, which captures share: that is
decoded once. Of the rest every value is decoded at every save, and long runs of numbers piece by piece, because the
decoder holds the interpreter's lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NoReturn

import torch

from tierd.client import arrays
from tierd.client.places import places
from tierd.client.tensorfile import Entry, Layout, parse_header
from tierd.client.tree import DEFECTS, check_depth, check_view, decoder
from tierd.client.values import Path, show
from tierd.core.errors import StateMismatch, StateRefused

_SOON = 1 << 20  # bytes of a tree that are decoded within a few milliseconds, where the structure is known
_SOON_ANEW = 1 << 16  # where it is not
_WINDOW = 1 << 16  # characters of a run that are decoded at once: half a millisecond


class Skeleton:
    """What captures of one structure share: the pieces of their tree, and the layout of their tensor file.

    Args:
        pieces: the text before, between and behind the holes.
    """

    def __init__(self, pieces: Sequence[str], layout: Layout) -> None:
        self.pieces = pieces
        self._layout = layout
        self._known: json.JSONDecoder | None = None

    def is_decoded_soon(self) -> bool:
        """Whether decoding the structure takes no longer than a few milliseconds."""
        return self._known is not None or sum(map(len, self.pieces)) <= _SOON_ANEW

    def is_checked_soon(self, tree: bytes) -> bool:
        """Whether `check` takes no longer than a few milliseconds."""
        return len(tree) <= (_SOON if self._known else _SOON_ANEW)

    def check(self, tree: bytes, pause: Callable[[], None] | None = None) -> None:
        """Decode a tree that has these pieces.

        Args:
            pause: called between windows of a long run, about every millisecond.

        Raises:
            StateRefused: it would not come back; names the path.
        """
        if self._known is None:
            self._known = self._decode_structure()
        text, at, last = str(tree, "utf-8"), 0, len(self.pieces) - 1
        for number, piece in enumerate(self.pieces):
            if not text.startswith(piece, at):
                _refuse((), "its tree is not what was put together")
            at += len(piece)
            if number < last:
                try:
                    at = _end(self._known, text, at, pause)
                except DEFECTS as error:
                    _refuse(next(islice(places(self.pieces), number, None)), error)
        if at != len(text):
            _refuse((), "its tree has more in it than was put together")

    def _decode_structure(self) -> json.JSONDecoder:
        """Decode the pieces, with nothing in the holes; gives the decoder for what comes there."""
        try:
            entries = parse_header(self._layout.header, self._layout.size).entries
        except StateMismatch as error:
            _refuse((), error)
        known = decoder(entries.__getitem__, _viewed, _array)
        text = "[]".join(self.pieces)
        try:
            check_depth(known.decode(text))
        except DEFECTS as error:
            _refuse(_culprit(known, text), error)
        return known


def _end(known: json.JSONDecoder, text: str, at: int, pause: Callable[[], None] | None = None) -> int:
    """Decode the value that begins at `at`; where it ends."""
    begin = at + 1
    while text[at] == "[":
        window = text[begin : begin + _WINDOW]
        last = window.find("]")
        cut = window.rfind(",") if last < 0 else last
        piece = window[:cut]
        if cut < 0 or '"' in piece or "[" in piece or (not piece and (last < 0 or begin > at + 1)):
            break  # not numbers alone: brackets and commas may stand in strings; or a comma too many
        known.decode(f"[{piece}]")
        begin += cut + 1
        if last >= 0:
            return begin
        if pause is not None:
            pause()
    return known.raw_decode(text, at)[1]


def _viewed(entry: Entry, dtype: torch.dtype) -> Entry:
    check_view(entry.dtype, entry.shape, dtype)
    return entry


def _array(entry: Entry, dtype: str, shape: tuple[int, ...]) -> None:
    arrays.check_form(entry.nbytes, dtype, shape)


def _culprit(known: json.JSONDecoder, text: str) -> Path:
    """The entry of the state that does not decode; none where that is the state itself."""
    root = json.loads(text)
    for name, value in root.items() if "$dict" not in root else root["$dict"]:
        try:
            known.decode(json.dumps(value))
        except DEFECTS:
            return (name,) if type(name) is str else (known.decode(json.dumps(name)),)
    return ()


def _refuse(path: Path, why: object) -> NoReturn:
    raise StateRefused(f"{show(path)}: it would not come back from a checkpoint: {why}; please report this")
