"""The structure of a walked state: its nodes, the text between its holes, and the names of its tensors."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from tierd.state.containers import Path


class Form(enum.Enum):
    """How a node is captured when the same structure is walked again."""

    SCALAR = enum.auto()  # a hole with an immutable value
    RUN = enum.auto()  # a hole with a sequence of immutable values, of any length, or with a dict of them
    MADE = enum.auto()  # a hole whose JSON is made during the walk
    TENSOR = enum.auto()
    ARRAY = enum.auto()  # an object that makes a new tensor for each capture: an array, a generator, a packed run
    MAPPING = enum.auto()
    SEQUENCE = enum.auto()
    PACKED = (
        enum.auto()
    )  # runs of plain values: for each run a hole with its `PackedReference`, and a tensor of its own
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
        self, form: Form, kind: type, index: int = -1, detail: Any = None, children: Sequence[Node] = ()
    ) -> None:
        self.form, self.kind, self.index, self.detail, self.children = form, kind, index, detail, children
        self.end = -1
        self.path: Path = ()


def pieces(texts: list[str | None]) -> list[str]:
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


def name_of(path: Path) -> str:
    """Return the name of the tensor at `path`, before `Encoder` makes it unique."""
    name = "/".join([part if type(part) is str else repr(part) for part in path])
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()
